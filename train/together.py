"""What ranks do together although one of them may fail: all raise what one has found, and leave in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from train.config import Failure, InputError

if TYPE_CHECKING:
    from train.backend import Backend

Result = TypeVar("Result")
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
