"""The setup of a rank before the ranks connect: network card, open files, EFA. Does not import torch.

Variables that the user or the launcher has set are kept. This module has not been run on EFA hardware.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from train.machine.launched import Launched, check_master

logger = logging.getLogger("train")
SYSFS = Path("/sys")
AMAZON = "0x1d0f"  # Amazon's PCI vendor id
MOST_COMPILE_PROCESSES = 32  # as in torch/_inductor/config.py
OPEN_FILES = 65_535  # as in AWS's scripts for Trainium; a container's hard limit may be as high as a billion
OUTSIDE = "192.0.2.1"  # an address reserved for documentation (RFC 5737), to which the default route leads


def prepare(launch: Launched, *, forks: bool) -> None:
    """Set this rank's variables and limits before the ranks connect. `forks` says whether the loader forks workers.

    Raises InputError if MASTER_ADDR has no address.
    """
    check_master(launch)
    os.environ.update(rank_environment(os.environ, launch, forks=forks))
    if (
        not launch.is_one_machine
        and launch.local_rank == 0
        and "GLOO_SOCKET_IFNAME" not in os.environ
    ):
        text = "no network card leads to MASTER_ADDR=%s, and there is no default route: set GLOO_SOCKET_IFNAME"
        logger.warning(text, launch.master_addr)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))


def rank_environment(
    environ: Mapping[str, str], launch: Launched, *, forks: bool
) -> dict[str, str]:
    """Return the environment variables to set, except those that the user has set.

    Since libfabric 1.18 and aws-ofi-nccl 1.7, NCCL over EFA needs FI_EFA_USE_HUGE_PAGE=0: otherwise forks can fail if
    huge pages run out (awsome-distributed-training, 1.architectures/efa-cheatsheet.md).
    """
    if forks and efa_devices(SYSFS):
        wanted = {"FI_EFA_USE_HUGE_PAGE": "0"}
    else:
        wanted = {}
    if not launch.is_one_machine and (card := network_card(launch.master_addr)):
        # By default gloo uses the address of the host name, which Debian and Ubuntu map to 127.0.1.1, and NCCL and
        # Neuron's collectives use the first card they find. "=" tells NCCL to compare the whole name.
        wanted |= {
            "GLOO_SOCKET_IFNAME": card,
            "NCCL_SOCKET_IFNAME": f"={card}",
            "CCOM_SOCKET_IFNAME": card,
        }
    # other machines cannot reach the loopback interface
    elif launch.is_one_machine and launch.is_distributed:
        wanted |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    if launch.local_world_size > 1:
        wanted["TORCHINDUCTOR_COMPILE_THREADS"] = str(compile_processes(launch.local_world_size))
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def compile_processes(num_ranks: int) -> int:
    """Return how many processes compile for one of a machine's `num_ranks` ranks: its share of the CPUs.

    By default, torch starts one for each CPU, up to 32, in every rank.
    """
    share = (os.cpu_count() or 1) // num_ranks
    return max(1, min(share, len(os.sched_getaffinity(0)), MOST_COMPILE_PROCESSES))


def network_card(master: str) -> str | None:
    """Return the network card through which this machine reaches the host `master`; None without such a card."""
    # On the master itself, its name may resolve to a loopback address. The default route's card is then returned.
    known = ((name, at) for name, addresses in psutil.net_if_addrs().items() for at in addresses)
    cards = {
        at.address: name
        for name, at in known
        if name != "lo" and at.family in (socket.AF_INET, socket.AF_INET6)
    }
    return cards.get(source_address(master)) or cards.get(source_address(OUTSIDE))


def source_address(host: str) -> str:
    """Return the address from which this machine would send packets to a host; "" if there is no route."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unused:
            unused.connect(address)  # UDP: nothing is sent
            return str(unused.getsockname()[0])
    except OSError:  # connecting the ranks will report why the master cannot be reached
        return ""


def efa_devices(sysfs: Path) -> list[str]:
    vendors = sorted(sysfs.glob("class/infiniband/*/device/vendor"))
    return [file.parts[-3] for file in vendors if file.read_text().strip() == AMAZON]
