"""The messages of a rejected rank to programs that do not see its exit code. Only a rejection imports torch."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

from train.config import InputError
from train.system.launched import launched
from train.system.torchrun import leave_rejection

logger = logging.getLogger("train")
INFORM_S = 60.0  # seconds for which a rejected first machine waits for machines that join later


def inform_others(rejection: str) -> None:
    """Tell the program that started torchrun, and other machines, that this rank is rejected.

    Torchrun ends the other ranks of this machine.
    """
    leave_rejection(rejection)
    with suppress(InputError, KeyboardInterrupt):  # the launcher's variables may be what was rejected
        launch = launched()
        if launch.is_one_machine:
            return
        try:
            from train.parallel import rendezvous  # late: torch takes seconds to import
        except ImportError as error:
            logger.warning("the other machines are not told of the rejection: %s", error)
            return
        rendezvous.announce(f"rank {launch.rank} on {socket.gethostname()} was rejected: {rejection}", INFORM_S)
