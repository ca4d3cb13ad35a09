"""What ranks do together although one of them may fail: all raise what one has found, and leave in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, cast

from train.config import Failure, InputError

if TYPE_CHECKING:
    from train.backend import Backend

Result = TypeVar("Result")
POLL_S = 0.05
TOGETHER = (InputError, Failure, FloatingPointError)  # raised on all ranks alike


def together(backend: Backend, action: Callable[[], Result]) -> Result:
    """What an action gives on this rank, once it succeeded on all; else all raise what one found."""
    result, failure = None, None
    try:
        result = action()
    except TOGETHER as error:
        failure = error.with_traceback(None)
    if backend.sum([failure is not None])[0]:
        raise_together(backend, failure)
    return cast(Result, result)


def raise_together(backend: Backend, failure: Exception | None) -> None:
    """All ranks call it; the first failure among theirs is raised on all."""
    raise next(found for found in backend.share(failure) if found is not None)


def meanwhile(backend: Backend, action: Callable[[], Result], beat: Callable[[], None]) -> Result | None:
    """Rank 0 acts, the others wait for it, however long it takes: longer maybe than a collective may. None elsewhere;
    what is raised is raised on all.
    """
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action if backend.rank == 0 else lambda: None)
        while backend.sum([not future.done()])[0]:
            beat()
            time.sleep(POLL_S)
        return together(backend, future.result)
