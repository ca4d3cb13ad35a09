"""Parts of a preparation in processes of this machine, among which the cores are divided."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from train.config import Failure, InputError
from train.data.text.corpus import open_corpus
from train.data.text.documents import CorpusPart
from train.data.text.preparation import Recipe, Report, prepare_part
from train.storage.folders import open_folder

STOP_S = 10.0  # for a process to end after SIGTERM
TOKENIZER_THREADS = "RAYON_NUM_THREADS"  # the tokenizers library's; it takes all cores otherwise


def prepare_in_processes(recipe: Recipe, parts: list[CorpusPart], report: Report) -> None:
    """Prepare each part in a process of its own. An error of one is raised here, and the others stop."""
    context = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // len(parts))
    running: dict[Any, tuple[CorpusPart, SpawnProcess]] = {}  # by the end of its pipe
    try:
        for part in parts:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(recipe, part, there, threads), daemon=True)
            process.start()
            there.close()  # so that the process's end is the pipe's
            running[here] = part, process
        while running:
            receiver: Any
            for receiver in wait(list(running)):
                try:
                    message = receiver.recv()
                except EOFError:
                    part, process = running.pop(receiver)
                    process.join()
                    if code := process.exitcode or 0:
                        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}, see above"
                        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                        raise Failure(f"part {part}: {how}{hint}; the same command resumes it") from None
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


def work(recipe: Recipe, part: CorpusPart, sender: Connection, threads: int) -> None:
    """Prepare a part in this process, which ends with the one that started it, as that breaks the pipe."""
    os.environ.setdefault(TOKENIZER_THREADS, str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the first process stops the others
    logging.getLogger("train").setLevel(logging.ERROR)  # the first process has warned of the same
    try:
        folder, corpus = open_folder(recipe.cfg.output, recipe.cfg.s3), open_corpus(recipe.cfg.corpus)
        prepare_part(recipe, folder, corpus, part, lambda *counts: sender.send(counts))
    except (InputError, Failure) as error:
        sender.send(error)
    except BrokenPipeError:
        raise SystemExit(1) from None
