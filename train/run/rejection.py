"""Messages from a rejected rank to programs that do not see its exit code. Importing this does not import torch."""

from __future__ import annotations

import socket
from contextlib import suppress

from train.config import InputError
from train.machine.launched import check_master, launched
from train.machine.torchrun import leave_rejection

INFORM_S = 60.0  # seconds for which a rejected first machine waits for machines that join later


def inform_others(rejection: str) -> None:
    """Tell the other machines, and the program that started torchrun on this machine, about a rejection."""
    leave_rejection(rejection)
    # `launched` raises if the launcher's variables are wrong
    with suppress(InputError, KeyboardInterrupt):
        launch = launched()
        check_master(launch)  # without an address, no machine can be told
        if not launch.is_one_machine:
            from train.parallel import rendezvous  # imported late, since torch takes seconds

            rendezvous.announce(
                f"rank {launch.rank} on {socket.gethostname()} was rejected: {rejection}", INFORM_S
            )
