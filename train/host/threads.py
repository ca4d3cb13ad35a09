"""Threads that work beside the training.

PyTorch splits an operation on the CPU over a team of threads, and every thread that computes gets a team of its own. A
team spins for a while after each operation, on the cores that the training's team needs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


def pool_beside_training(name: str) -> ThreadPoolExecutor:
    """A pool of one thread that has no team: torch operations in it run in that thread alone."""
    import torch  # late: this package works without it

    # A thread takes its number of threads when it first asks: the last one set anywhere. The caller asks first.
    torch.get_num_threads()
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,))
