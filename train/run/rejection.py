"""The messages of a rejected rank to those who do not see its exit code. No torch until then."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

from train.config import InputError
from train.system.launched import launched
from train.system.torchrun import leave_rejection

logger = logging.getLogger("train")
INFORM_S = 60.0  # the time that a rejected first machine waits for machines that come later


def inform_others(rejection: str) -> None:
    """Tell torchrun's starter, and ranks elsewhere, that this rank is rejected; torchrun ends those of this machine."""
    leave_rejection(rejection)
    with suppress(InputError, KeyboardInterrupt):  # the launcher's variables may be the reason
        launch = launched()
        if launch.is_one_machine:
            return
        try:
            from train.parallel import rendezvous  # late: torch takes seconds to import
        except ImportError as error:
            logger.warning("the other machines do not learn of it: %s", error)
            return
        rendezvous.announce(f"rank {launch.rank} on {socket.gethostname()} was rejected: {rejection}", INFORM_S)
