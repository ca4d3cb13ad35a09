"""A torchrun for one machine that listens only on the loopback address: `python -m train.machine.local_torchrun`.

Ranks connect through torch's TCPStore. Unless it is given a socket, the store listens on every interface, whatever
address it is given. Any machine that reaches the store could make the ranks unpickle arbitrary objects.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Any


def main() -> None:
    import torch.distributed as dist  # imported late because this package must work without torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    class LoopbackStore(dist.TCPStore):
        """A store that listens on 127.0.0.1 only."""

        def __init__(
            self, host_name: str, port: int, *rest: Any, is_master: bool = False, **settings: Any
        ) -> None:
            if is_master:
                listener = socket.create_server(("127.0.0.1", port))
                host_name, port = listener.getsockname()
                settings["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, *rest, is_master=is_master, **settings)  # type: ignore[misc]

    dist.TCPStore = c10d_rendezvous_backend.TCPStore = LoopbackStore  # type: ignore[misc]
    usual = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    for name in [each for each in os.environ if each.startswith("PET_")]:
        # torchrun would take options from it, such as Kubeflow's number of machines
        del os.environ[name]
    try:
        run.main([*usual, "--local-addr=127.0.0.1", *sys.argv[1:]])
    except SignalException as stop:  # the ranks have ended, and have said how
        sys.stderr.write(f"torchrun ended on {signal.Signals(stop.sigval).name}\n")
        sys.exit(128 + stop.sigval)


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    # otherwise modules in this folder would hide libraries
    sys.path = [each for each in sys.path if each != here]
    main()
