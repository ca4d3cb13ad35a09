"""What a rank that is rejected does for those who do not see its exit code. No torch until then."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

from train.config import InputError
from train.system.launched import launched
from train.system.torchrun import leave_rejection

logger = logging.getLogger("train")
INFORM_S = 60.0  # the first machine, if it is rejected, stays for machines that come later by up to this


def inform_others(rejection: str) -> None:
    """Let who started torchrun, and ranks elsewhere, know that this one is rejected; torchrun ends those of this
    machine.
    """
    leave_rejection(rejection)
    with suppress(InputError, KeyboardInterrupt):  # the launcher's variables may be what was rejected
        launch = launched()
        if launch.is_one_machine:
            return
        try:
            from train.parallel import rendezvous  # late: torch takes seconds to import
        except ImportError as error:
            logger.warning("the other machines do not learn of it: %s", error)
            return
        rendezvous.announce(f"rank {launch.rank} on {socket.gethostname()} was rejected: {rejection}", INFORM_S)
