"""Work of local rank 0 for all ranks of its machine, which get the result, or the reason why there is none.

Local rank 0 writes its state to a file `.launch-NODE-PID-STARTED-RESTARTS-KEY` (PID and STARTED are those of torchrun's
agent, the parent of the ranks), a new one at every start. Ranks need no process group for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.config import Failure, InputError, Unreachable
from train.host.launched import launched
from train.host.processes import is_gone, owner_name
from train.storage.atomic_io import write_atomic
from train.storage.folders import canonical_json, make_folder, read_json

PREFIX = ".launch-"
POLL_S = 0.1
BEGINS_WITHIN_S = 1800.0  # local rank 0: other ranks may start earlier, but not by so much
ENDS_WITHIN_S = 4 * 3600.0  # reading and tokenising; a rank that is gone is noticed at once
BEGUN, DONE = "begun", "done"
ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (InputError, Unreachable, Failure)}


def once_per_node(folder: Path, key: str, action: Callable[[], str]) -> str:
    """Return what `action` returns. Local rank 0 calls it while the others wait; `key` identifies the action.

    Raises:
        InputError, Failure: what `action` raised, on all ranks of the machine.
        Failure: on the ranks that wait, if local rank 0 ends before the action, or takes too long.
    """
    launch = launched()
    if launch.local_world_size == 1:
        return action()
    path = folder / f"{PREFIX}{owner_name(os.getppid())}-{launch.restart_count}-{key}"
    if launch.local_rank != 0:
        return wait(path)
    make_folder(folder)
    remove_old(folder)
    write_state(path, BEGUN, "")
    try:
        result = action()
    except tuple(ERRORS.values()) as error:
        write_state(path, next(name for name, kind in ERRORS.items() if isinstance(error, kind)), str(error))
        raise
    write_state(path, DONE, result)
    return result


def write_state(path: Path, state: str, text: str) -> None:
    write_atomic(path, canonical_json({"state": state, "text": text, "owner": owner_name(os.getpid())}))


def wait(path: Path) -> str:
    began_s = time.monotonic()
    while True:
        state = read_json(path)
        if state is not None and state["state"] == BEGUN and is_gone(state["owner"]):
            state = read_json(path)  # it may have written the result in between
            if state["state"] == BEGUN:
                raise Failure("rank 0 of this machine ended while it prepared the data; its error is above")
        if state is not None and state["state"] != BEGUN:
            return answer(state)
        waited_s, limit_s = time.monotonic() - began_s, BEGINS_WITHIN_S if state is None else ENDS_WITHIN_S
        if waited_s > limit_s:
            what = "has not begun to prepare the data" if state is None else "has not ended preparing the data"
            raise Failure(f"rank 0 of this machine {what} after {limit_s:g} s ({path})")
        time.sleep(POLL_S)


def answer(state: dict[str, Any]) -> str:
    if state["state"] != DONE:
        raise ERRORS[state["state"]](state["text"])
    return str(state["text"])


def remove_old(folder: Path) -> None:
    """Remove the files of launches that have ended."""
    for path in folder.glob(f"{PREFIX}*"):
        owner, _, _ = path.name.removeprefix(PREFIX).rsplit("-", 2)
        if is_gone(owner):
            path.unlink(missing_ok=True)
