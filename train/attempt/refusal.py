"""What a rank that is refused does for those of the other machines. No torch until then."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

from train.config import InputError
from train.host.launched import launched

logger = logging.getLogger("train")
INFORM_S = 60.0  # the first machine, if it is refused, stays for machines that come later by up to this


def inform_other_machines(refusal: str) -> None:
    """Let ranks elsewhere know that this one is refused; torchrun ends those of this machine."""
    with suppress(InputError, KeyboardInterrupt):  # the launcher's variables may be what was refused
        launch = launched()
        if launch.is_one_machine:
            return
        try:
            from train.backend import rendezvous  # late: torch takes seconds to import
        except ImportError as error:
            logger.warning("the other machines do not learn of it: %s", error)
            return
        rendezvous.announce(f"rank {launch.rank} on {socket.gethostname()} was refused: {refusal}", INFORM_S)
