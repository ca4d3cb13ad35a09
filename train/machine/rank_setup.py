"""The setup of a rank before the ranks connect: network card, open files, EFA, processors. Does not import torch.

Variables that the user or the launcher has set are kept. This module has not been run on EFA or Neuron hardware, nor on
several GPUs.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from train.machine.launched import Launched, check_master
from train.machine.neuron import read_neuron_ls

logger = logging.getLogger("train")
SYSFS = Path("/sys")
AMAZON = "0x1d0f"  # Amazon's PCI vendor id
OPEN_FILES = 65_535  # as in AWS's scripts for Trainium; a container's hard limit may be as high as a billion
OUTSIDE = "192.0.2.1"  # an address reserved for documentation (RFC 5737), to which the default route leads
NEURON_TOOLS = "/opt/aws/neuron/bin"
TOOL_TIMEOUT_S = 20.0
DEBUG = "TORCH_DISTRIBUTED_DEBUG"


def prepare(launch: Launched, *, forks: bool) -> None:
    """Set this rank's variables and limits before the ranks connect. `forks` says whether the loader forks workers.

    Raises InputError if MASTER_ADDR has no address.
    """
    check_master(launch)
    if os.environ.get(DEBUG, "").upper() == "DETAIL":
        os.environ[DEBUG] = "INFO"
        level = logging.WARNING if launch.rank == 0 else logging.DEBUG
        logger.log(
            level,
            "%s=DETAIL is replaced by INFO: the ranks would end with a segmentation fault",
            DEBUG,
        )
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
    return {name: value for name, value in wanted.items() if not environ.get(name)}


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


# ---- processors ----------------------------------------------------------------------------------------------------


def pin(address: str | None) -> None:
    """Bind this thread, and threads that it starts later, to the processors near a PCI device, if these are known."""
    if address and (near := near_cpus(address, os.sched_getaffinity(0))):
        os.sched_setaffinity(0, near)
        logger.info("bound to the %d processors of the NUMA node of device %s", len(near), address)


def near_cpus(address: str, allowed: set[int]) -> set[int]:
    """Return the processors of a PCI device's NUMA node (see sysfs-bus-pci in Linux's ABI documentation).

    The set is empty if the node has all processors of the machine, or if the launcher restricts this process to a
    subset.
    """
    files = (
        SYSFS / "devices/system/cpu/online",
        SYSFS / "bus/pci/devices" / address / "local_cpulist",
    )
    if not all(file.is_file() for file in files):
        return set()
    online, near = (read_cpus(file.read_text()) for file in files)
    if allowed == online and near < online:
        return near
    return set()


def read_cpus(text: str) -> set[int]:
    """Parse a list of processors, such as "0-31,64-95"."""
    pairs = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for low, _, high in pairs for number in range(int(low), int(high or low) + 1)}


def neuron_address(environ: Mapping[str, str], core: int) -> str | None:
    """Return the PCI address of the chip with the core of a local rank, from neuron-ls; None if it is unknown."""
    tool = shutil.which("neuron-ls", path=os.pathsep.join([environ.get("PATH", ""), NEURON_TOOLS]))
    if (
        tool is None
        or environ.get("NEURON_RT_VISIBLE_CORES")
        or environ.get("NEURON_RT_NUM_CORES")
    ):
        return None  # the user has chosen the ranks' cores
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None  # a process without a launcher uses any free core
    try:
        done = subprocess.run(
            [tool, "-j"], capture_output=True, text=True, check=True, timeout=TOOL_TIMEOUT_S
        )
        chips = sorted(read_neuron_ls(done.stdout), key=lambda chip: chip.number)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        logger.warning(
            "ranks are not bound to the processors near their devices: neuron-ls -j: %s", error
        )
        return None
    addresses = [chip.address for chip in chips for _ in range(chip.num_cores)]
    if core < len(addresses):
        return addresses[core]
    return None
