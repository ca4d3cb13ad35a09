"""The preparation of several parts in parallel processes, which share this machine's cores."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from train.config import Failure
from train.config.prepare import MAX_PREPARING_PROCESSES
from train.data.text.corpus import Corpus, open_corpus
from train.data.text.documents import CorpusPart
from train.data.text.preparation import Recipe, Report, prepare_part
from train.machine.memory import available_bytes, usable_cpus
from train.machine.processes import end_with_parent
from train.storage.folders import Folder, open_folder

# This variable limits the threads of `tokenizers`, which otherwise uses all cores.
TOKENIZER_THREADS = "RAYON_NUM_THREADS"
# The measured maximum per process: 64 MiB shards, and copies of the one being written.
PROCESS_BYTES = 600 * 2**20

WORK: list[
    tuple[Recipe, Folder, Corpus]
] = []  # what this process has opened, if it is one of the pool


def most_processes() -> int:
    """Return how many processes suit this machine: one per usable core, or fewer if there is little memory."""
    return max(1, min(usable_cpus(), MAX_PREPARING_PROCESSES, available_bytes() // PROCESS_BYTES))


def prepare_in_processes(
    recipe: Recipe, parts: list[CorpusPart], report: Report, num_processes: int
) -> None:
    """Prepare the parts in processes, one part at a time in each. If one fails, raise its error and stop the others."""
    threads = max(1, usable_cpus() // num_processes)
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("spawn"),  # threads of this process do not survive a fork
        initializer=begin,
        initargs=(recipe, os.getpid(), threads),
    )
    try:
        for done in as_completed([pool.submit(prepare_here, part) for part in parts]):
            report(done.result())
    except BrokenProcessPool:
        raise Failure(
            "a process was killed (out of memory?); the same command resumes the preparation"
        ) from None
    finally:
        for process in set(multiprocessing.active_children()).difference(others):
            process.kill()
        # The pool's thread waits for the processes. If this thread did so too, one of them would see nothing.
        pool.shutdown(cancel_futures=True)


def begin(recipe: Recipe, parent: int, threads: int) -> None:
    """Open the corpus and the output in a process of the pool."""
    end_with_parent(parent)
    os.environ.setdefault(TOKENIZER_THREADS, str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals all: the first stops the others
    logging.getLogger("train").setLevel(logging.ERROR)  # the first has logged the same warnings
    folder = open_folder(recipe.cfg.output, recipe.cfg.s3)
    WORK.append((recipe, folder, open_corpus(recipe.cfg.corpus)))


def prepare_here(part: CorpusPart) -> int:
    """Prepare a part in this process. Returns the bytes of text that it has read."""
    recipe, folder, corpus = WORK[0]
    reports: list[int] = []
    prepare_part(recipe, folder, corpus, part, reports.append)
    return sum(reports)
