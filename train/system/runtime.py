"""Work of Python and PyTorch that could slow the training down: garbage collection, and threads that compute."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

USUAL = gc.get_threshold()
RARE = 100_000  # objects; not 0, because the preparation of a task's data may leave garbage too


def search_rarely() -> None:
    """Collect garbage rarely; call it before the heavy imports.

    torch and transformers make half a million objects and hardly any garbage, and Python's usual threshold collects at
    every 700th (benchmarks/notes.md).
    """
    gc.set_threshold(RARE)


def search_as_usual() -> None:
    """Collect garbage as usual, except what exists now. Call it before a device opens: garbage may hold memory."""
    if gc.get_threshold()[0] == RARE:
        gc.freeze()
        gc.set_threshold(*USUAL)


def pool_beside_training(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread, in which torch operations run alone.

    PyTorch splits an operation on the CPU over a team of threads, and every thread that computes gets a separate team,
    which spins for a while after each operation, on the cores that the training's team needs.
    """
    import torch  # late: this package works without it

    # A thread takes its number of threads when it first asks: the last one set anywhere. So the caller asks first.
    torch.get_num_threads()
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,))
