"""The preparation of several parts in parallel processes, which share this machine's cores."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from train.config import Failure, InputError
from train.config.prepare import MAX_PREPARING_PROCESSES
from train.data.text.corpus import open_corpus
from train.data.text.documents import CorpusPart
from train.data.text.preparation import Recipe, Report, prepare_part
from train.machine.memory import available_bytes, usable_cpus
from train.storage.folders import open_folder

STOP_S = 10.0  # seconds that a process may take to end after SIGTERM
# limits the threads of `tokenizers`, which otherwise uses all cores
TOKENIZER_THREADS = "RAYON_NUM_THREADS"
# measured maximum per process: 64 MiB shards, and copies of the one being written
PROCESS_BYTES = 600 * 2**20


def most_processes() -> int:
    """Return how many processes suit this machine: one per usable core, or fewer if there is little memory."""
    return max(1, min(usable_cpus(), MAX_PREPARING_PROCESSES, available_bytes() // PROCESS_BYTES))


def prepare_in_processes(
    recipe: Recipe, parts: list[CorpusPart], report: Report, num_processes: int
) -> None:
    """Prepare the parts in processes, one part at a time in each. If one fails, raise its error and stop the others."""
    context = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
    threads = max(1, usable_cpus() // num_processes)
    waiting = iter(parts)
    running: dict[Any, tuple[CorpusPart, SpawnProcess]] = {}  # the keys are our ends of the pipes
    try:
        for part in islice(waiting, num_processes):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(recipe, there, threads), daemon=True)
            process.start()
            there.close()  # if only the new process has this end open, the pipe breaks when the process ends
            running[here] = part, process
            here.send(part)
        while running:
            receiver: Any
            for receiver in wait(list(running)):
                part, process = running[receiver]
                try:
                    message = receiver.recv()
                    if message is None:  # the process has finished its part
                        following = next(waiting, None)
                        receiver.send(following)
                        running[receiver] = following or part, process
                        continue
                except (EOFError, ConnectionError):
                    del running[receiver]
                    process.join()
                    if code := process.exitcode or 0:
                        how = (
                            f"killed by {signal.Signals(-code).name}"
                            if code < 0
                            else f"exit code {code}, see above"
                        )
                        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                        raise Failure(
                            f"part {part}: {how}{hint}; the same command resumes it"
                        ) from None
                    continue
                if isinstance(message, Exception):
                    raise message
                report(*message)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join(STOP_S)
            process.kill()


def work(recipe: Recipe, pipe: Connection, threads: int) -> None:
    """Prepare parts in this process until there are no more, or until its parent ends, which breaks the pipe."""
    os.environ.setdefault(TOKENIZER_THREADS, str(threads))
    # Ctrl-C signals all processes: the first stops the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # the first process has logged the same warnings
    logging.getLogger("train").setLevel(logging.ERROR)
    try:
        folder, corpus = (
            open_folder(recipe.cfg.output, recipe.cfg.s3),
            open_corpus(recipe.cfg.corpus),
        )
        while (part := pipe.recv()) is not None:
            prepare_part(recipe, folder, corpus, part, lambda *counts: pipe.send(counts))
            pipe.send(None)
    except (InputError, Failure) as error:
        pipe.send(error)
    except (EOFError, ConnectionError):
        raise SystemExit(1) from None
