"""Parts of a preparation in processes of this machine, each with its share of the cores."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from train.config import Failure, InputError, PrepareConfig
from train.data.text.corpus import open_corpus
from train.data.text.documents import Part
from train.data.text.encoding import Vocabulary
from train.data.text.preparation import HeldOut, Report, prepare_part
from train.storage.folders import open_folder

STOP_S = 10.0  # from the request to end to the order
TOKENIZER_THREADS = "RAYON_NUM_THREADS"  # the tokenizers library's; it takes all cores otherwise


class PartStopped(RuntimeError):
    """A process ended before its part did, for a reason that is not the user's input."""


def prepare_in_processes(
    cfg: PrepareConfig,
    vocabulary: Vocabulary,
    held_out: HeldOut,
    parts: list[Part],
    identity: str,
    report: Report,
) -> None:
    """Prepare each part in a process of its own. An error of one is raised here, and the others stop."""
    context = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
    running: dict[Any, tuple[Part, SpawnProcess]] = {}  # by the end of its pipe
    threads = threads_of_each(len(parts))
    try:
        for part in parts:
            here, there = context.Pipe(duplex=False)
            arguments = (cfg, vocabulary, held_out, part, identity, there, threads)
            process = context.Process(target=work, args=arguments, daemon=True)
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
                    if process.exitcode:
                        raise PartStopped(f"part {part} {ended(process.exitcode)}") from None
                    continue
                if isinstance(message, Exception):
                    raise message
                report(*message)
    finally:
        stop([process for _, process in running.values()])


def work(
    cfg: PrepareConfig,
    vocabulary: Vocabulary,
    held_out: HeldOut,
    part: Part,
    identity: str,
    sender: Connection,
    threads: int,
) -> None:
    """Prepare a part in this process, which ends with the one that started it, as that breaks the pipe."""
    os.environ.setdefault(TOKENIZER_THREADS, str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the first process stops the others
    logging.getLogger("train").setLevel(logging.ERROR)  # the first process has warned of the same
    try:
        folder, corpus = open_folder(cfg.output, cfg.s3), open_corpus(cfg.corpus)
        prepare_part(cfg, folder, corpus, vocabulary, held_out, part, identity, lambda *counts: sender.send(counts))
    except (InputError, Failure) as error:
        sender.send(error)
    except BrokenPipeError:
        raise SystemExit(1) from None


def threads_of_each(num_processes: int) -> int:
    """The cores divided among the processes."""
    return max(1, num_cores() // num_processes)


def num_cores() -> int:
    """Cores that this process may use, if the system says so; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"failed (exit code {exitcode}), see above"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def stop(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(STOP_S)
        process.kill()
