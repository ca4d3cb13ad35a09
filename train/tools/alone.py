"""A run in a temporary folder, of which only figures remain: an evaluation or a measurement."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from train.config import Failure
from train.entry import leave_at_once
from train.machine.launched import launched
from train.parallel.ranks import AGREED
from train.run.command import FAILED
from train.run.stopping import StoppedEarly, StopRequest

logger = logging.getLogger("train")


@contextmanager
def temporary_run(command: str) -> Iterator[tuple[str, StopRequest]]:
    """Yield a run folder that exists only in this block, and the request that can stop the run.

    Raises Failure if the run is stopped before it has figures. Ends the job if only this rank fails.
    """
    prefix = f"baretrain-{command}-"
    try:
        with (
            TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder,
            StopRequest() as stop,
        ):
            yield folder, stop
    except StoppedEarly as signal:
        raise Failure(f"stopped on {signal}: there are no figures") from signal
    except AGREED:
        raise
    except Exception as error:
        if launched().world_size > 1:  # other ranks may wait for this one forever
            logger.exception("rank %d: %s", launched().rank, error)
            leave_at_once(FAILED)
        raise
