"""Garbage collection, malloc and PyTorch's compute threads: the defaults of all three could slow down training."""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor

USUAL = gc.get_threshold()
RARE = 100_000  # new objects between collections; 0 would disable them, but preparing a task's data may leave garbage

# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MOST_KEPT = 2**30  # bytes of a block


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed blocks of up to MOST_KEPT bytes. Call this before training on a CPU.

    By default it returns blocks above 32 MiB to the system, and memory at the end of the heap. The gradient of an
    embedding is larger, so that each step would touch all of its pages for the first time, a sixth of a step's time
    (benchmarks/notes.md). Other C libraries have no `mallopt`.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, MOST_KEPT)
        set_option(M_TRIM_THRESHOLD, -1)  # never


def search_rarely() -> None:
    """Collect garbage rarely. Call this before the slow imports.

    torch and transformers create half a million objects and hardly any garbage, but with Python's usual threshold, a
    collection runs after every 700 new objects (benchmarks/notes.md).
    """
    gc.set_threshold(RARE)


def search_as_usual() -> None:
    """Collect garbage as usual again, except among the objects that exist now.

    Call this before a device opens: garbage created later may hold device memory.
    """
    if gc.get_threshold()[0] == RARE:
        gc.freeze()
        gc.set_threshold(*USUAL)


def pool_beside_training(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread, which runs torch operations without further threads.

    PyTorch splits a CPU operation over a team of threads, and every thread that computes gets a separate team. A team
    spins for a while after each operation, on cores that the training's team needs.
    """
    import torch  # imported late because this package must work without torch

    # When a thread first asks for its thread count, it adopts the value that any thread set last. So let this thread
    # ask before the pool's thread sets 1.
    torch.get_num_threads()
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,)
    )
