"""What the first rank of a machine does for all of its ranks, and how they learn the result, or why there is none.

A file `.launch-NODE-PID-STARTED-RESTARTS-KEY` (PID and STARTED of torchrun's agent, the parent of the ranks) holds the
word of local rank 0, anew at every start. Ranks need no process group for it, and none has to be up yet.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.config import Failure, InputError, Unreachable
from train.launched import launched
from train.machine import read_process
from train.storage import canonical_json, make_folder, read_json, write_atomic

PREFIX = ".launch-"
POLL_S = 0.1
BEGINS_WITHIN_S = 1800.0  # rank 0: other ranks may have come up sooner, not by so much
ENDS_WITHIN_S = 4 * 3600.0  # reading and tokenising; a rank that is gone is noticed at once
BEGUN, DONE = "begun", "done"
TOLD: dict[str, type[Exception]] = {kind.__name__: kind for kind in (InputError, Unreachable, Failure)}


def once_per_node(folder: Path, key: str, action: Callable[[], str]) -> str:
    """What `action` gives, done by local rank 0 while the others wait. `key` tells this question from others.

    Raises:
        InputError, Failure: as `action` did, on all ranks of the machine.
        Failure: on those that wait, if rank 0 is gone or does not come to an end.
    """
    launch = launched()
    if launch.local_world_size == 1:
        return action()
    path = folder / f"{PREFIX}{owner_name(os.getppid())}-{launch.restart_count}-{key}"
    if launch.local_rank != 0:
        return wait(path)
    make_folder(folder)
    remove_old(folder)
    tell(path, BEGUN, "")
    try:
        result = action()
    except tuple(TOLD.values()) as error:
        tell(path, next(name for name, kind in TOLD.items() if isinstance(error, kind)), str(error))
        raise
    tell(path, DONE, result)
    return result


def tell(path: Path, state: str, words: str) -> None:
    write_atomic(path, canonical_json({"state": state, "words": words, "owner": owner_name(os.getpid())}))


def wait(path: Path) -> str:
    began_s = time.monotonic()
    while True:
        told = read_json(path)
        if told is not None and told["state"] == BEGUN and is_gone(told["owner"]):
            told = read_json(path)  # its last word may have come in between
            if told["state"] == BEGUN:
                raise Failure("rank 0 of this machine ended while it prepared the data; its words are above")
        if told is not None and told["state"] != BEGUN:
            return answer(told)
        waited_s, limit_s = time.monotonic() - began_s, BEGINS_WITHIN_S if told is None else ENDS_WITHIN_S
        if waited_s > limit_s:
            what = "has not begun to prepare the data" if told is None else "has not ended preparing the data"
            raise Failure(f"rank 0 of this machine {what} after {limit_s:g} s ({path})")
        time.sleep(POLL_S)


def answer(told: dict[str, Any]) -> str:
    if told["state"] != DONE:
        raise TOLD[told["state"]](told["words"])
    return str(told["words"])


# ---- whose files are whose -----------------------------------------------------------------------------------------


def owner_name(pid: int) -> str:
    """NODE-PID-STARTED: no other process has it, on machines that share a folder neither."""
    process = read_process(pid)
    return f"{platform.node()}-{pid}-{process.started if process else 0}"


def is_gone(owner: str) -> bool:
    """Whether this machine's process of that name has ended; False for those of others, of which nobody here knows."""
    node, pid, started = owner.rsplit("-", 2)
    if node != platform.node() or read_process(os.getpid()) is None:  # not Linux
        return False
    process = read_process(int(pid))
    return process is None or process.state == "Z" or str(process.started) != started


def remove_old(folder: Path) -> None:
    """The words of launches that are gone."""
    for path in folder.glob(f"{PREFIX}*"):
        owner, _, _ = path.name.removeprefix(PREFIX).rsplit("-", 2)
        if is_gone(owner):
            path.unlink(missing_ok=True)
