"""What a machine and its environment say without a device being opened. No torch here.

Sources: the Neuron SDK's guides for PyTorch/XLA (training-troubleshooting, torch-neuron-envvars, neuron-caching), of
SDK 2.31, the last that ships it.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from train.config import InputError, check

DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"
NETWORK_FILESYSTEMS = ("nfs", "efs", "lustre", "smb", "cifs", "ceph", "beegfs", "gpfs", "fuse.s3")
ROOT_COMM_PORT = 48620  # of Neuron's collectives; inside Linux's range for outgoing connections, so to be reserved
INDEX = "https://pip.repos.neuron.amazonaws.com"
INSTALL = (
    f"pip install 'neuronx-cc==2.26.6360.0' 'torch-neuronx==2.9.0.2.15.32035' --extra-index-url {INDEX}"  # SDK 2.31.1
)


@dataclass(frozen=True)
class Knob:
    """An environment variable that does not do what its user hopes for."""

    name: str
    why: str
    is_dangerous: bool = False  # it changes what is computed


KNOBS = (
    Knob("XLA_USE_BF16", "rounds every float32 to bfloat16 in silence; unset it, say backend.precision=bf16", True),
    Knob("XLA_DOWNCAST_BF16", "rounds float32 to bfloat16 in silence; unset it, say backend.precision=bf16", True),
    Knob("NEURON_EXTRACT_GRAPHS_ONLY", "only collects graphs, every number computed is 0; unset it", True),
    Knob("XLA_USE_DUMMY_STORE", "leaves the ranks without a store to meet by; unset it", True),
    Knob("XRT_TPU_CONFIG", "belongs to XRT, which torch-xla dropped in 2.7; unset it"),
    Knob("XRT_WORKERS", "belongs to XRT, which torch-xla dropped in 2.7; unset it"),
    Knob("XRT_DEVICE_MAP", "belongs to XRT, which torch-xla dropped in 2.7; unset it"),
    Knob("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "has had no effect since SDK 2.31; unset it"),
    Knob("BUCKET_CAP_MB", "is not read; the name is ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"),
    Knob("FI_EFA_FORK_SAFE", "is for kernels before 5.15 only; unset it on newer ones"),
)


def bad_knobs(environ: Mapping[str, str]) -> list[Knob]:
    """Those of KNOBS that are set (to anything but nothing or 0)."""
    return [knob for knob in KNOBS if environ.get(knob.name, "") not in ("", "0")]


# ---- compiler flags and cache --------------------------------------------------------------------------------------


def with_flags(flags: str, wanted: Iterable[str]) -> str:
    """NEURON_CC_FLAGS with what is wanted appended; an option that the user gave already stays as it is."""
    given = {part.split("=")[0] for part in split_flags(flags)}
    return " ".join([*([flags] if flags.strip() else []), *(f for f in wanted if f.split("=")[0] not in given)])


def cache_location(environ: Mapping[str, str]) -> str:
    """Where neuronx-cc keeps compiled graphs: --cache_dir wins over NEURON_COMPILE_CACHE_URL over the default."""
    flags = split_flags(environ.get("NEURON_CC_FLAGS", ""))
    found = [flag.removeprefix("--cache_dir=") for flag in flags if flag.startswith("--cache_dir=")]
    found += [value for flag, value in itertools.pairwise(flags) if flag == "--cache_dir"]
    return found[-1] if found else environ.get("NEURON_COMPILE_CACHE_URL") or DEFAULT_CACHE


def split_flags(flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise InputError(f"NEURON_CC_FLAGS={flags} is not a line of options ({error}); mend its quotes") from error


def filesystem(path: str | Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """Type of the file system that holds a path, or will once it is made ("ext4", "nfs4", "lustre"); "" if unknown."""
    place, best, kind = Path(path).expanduser().absolute(), -1, ""
    place = Path(os.path.realpath(place))
    if not mountinfo.is_file():
        return ""
    for line in mountinfo.read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), left.split()[4]))  # \040 is a space
        if (place == point or point in place.parents) and len(point.parts) >= best:  # later mounts lie over earlier
            best, kind = len(point.parts), right.split()[0]
            kind += ".s3" if right.split()[1] in ("mountpoint-s3", "s3fs") else ""  # both are of type "fuse"
    return kind


def is_network_filesystem(kind: str) -> bool:
    return any(kind.startswith(name) for name in NETWORK_FILESYSTEMS)


def cache_fault(environ: Mapping[str, str]) -> str | None:
    """Why the compile cache cannot stay where it is; None if it can."""
    place = cache_location(environ)
    if "://" in place:
        return None if place.startswith("s3://") else f"compile cache {place} must be a folder or s3://bucket/folder"
    kind = filesystem(place)
    if not is_network_filesystem(kind):
        return None
    return (
        f"compile cache {place} is on {kind}, whose file locks break neuronx-cc; set NEURON_COMPILE_CACHE_URL to a "
        f"folder of this machine's own disk ({DEFAULT_CACHE}) or to s3://bucket/folder"
    )


def count_cached(place: str, name: str) -> int | None:
    """Graphs of a local compile cache beside which there is a file: model.done (compiled), model.log (failed),
    *.lock (being compiled, or left by what was killed). None for a cache in S3.

    The layout is that of optimum-neuron's cache guide: neuronxcc-<version>/MODULE_<graph>+<flags>/.
    """
    return None if "://" in place else sum(1 for _ in Path(place).expanduser().glob(f"neuronxcc-*/MODULE_*/{name}"))


# ---- what PyTorch on Trainium wants of its environment -------------------------------------------------------------


def neuron_environment(environ: Mapping[str, str], *, nodes: int, stochastic_rounding: bool) -> dict[str, str]:
    """Variables to set before the Neuron runtime starts; what the user set stays, compiler flags are appended to.

    Raises InputError where what the user set would round in silence, or have the ranks meet at a place that is taken.
    """
    wanted = {
        "NEURON_RT_EXEC_TIMEOUT": "600",  # seconds; peers may still compile
        "XLA_TRANSFER_SEED_ASYNC": "1",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1" if stochastic_rounding else "0",
    }
    if stochastic_rounding:
        wanted["NEURON_RT_STOCHASTIC_ROUNDING_SEED"] = "0"
        check(
            environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1") == "1",
            "NEURON_RT_STOCHASTIC_ROUNDING_EN=0 with backend.precision=bf16_stochastic: small updates would be rounded "
            "away; unset it or choose another precision",
        )
    if "TORCHELASTIC_RUN_ID" not in environ and "NEURON_RT_VISIBLE_CORES" not in environ:
        wanted["NEURON_RT_NUM_CORES"] = "1"  # without torchrun one process is one rank: else it takes the whole machine
    if "MASTER_ADDR" in environ:
        host = environ["MASTER_ADDR"]
        wanted["NEURON_RT_ROOT_COMM_ID"] = f"{f'[{host}]' if ':' in host else host}:{ROOT_COMM_PORT}"
        meeting = environ.get("NEURON_RT_ROOT_COMM_ID", wanted["NEURON_RT_ROOT_COMM_ID"])
        check(
            meeting.rpartition(":")[2] != environ.get("MASTER_PORT"),
            f"NEURON_RT_ROOT_COMM_ID={meeting} has torchrun's port (MASTER_PORT); give torchrun another --master-port",
        )
        check(
            nodes == 1 or not meeting.startswith(("localhost", "127.", "[::1]")),
            f"NEURON_RT_ROOT_COMM_ID={meeting} is another machine for each of the {nodes}; give torchrun the "
            "address of one by --master-addr",
        )
    if nodes > 1:
        wanted |= {
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB": "512",
        }
    flags = ("--model-type=transformer", "--auto-cast=none", "--retry_failed_compilation")
    found = {name: value for name, value in wanted.items() if name not in environ}
    return {**found, "NEURON_CC_FLAGS": with_flags(environ.get("NEURON_CC_FLAGS", ""), flags)}


def first_slurm_host(environ: Mapping[str, str]) -> str | None:
    """The machine of a Slurm job on which its node 0 runs; None outside Slurm."""
    scontrol, hosts = shutil.which("scontrol", path=environ.get("PATH")), environ.get("SLURM_JOB_NODELIST")
    if scontrol is None or not hosts:
        return None
    found = subprocess.run([scontrol, "show", "hostnames", hosts], capture_output=True, text=True, check=False)
    return found.stdout.split()[0] if found.returncode == 0 and found.stdout.split() else None


# ---- packages ------------------------------------------------------------------------------------------------------


def installed_versions(*names: str) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def package_faults(versions: Mapping[str, str]) -> list[str]:
    """What is wrong with the installed torch, torch-xla, torch-neuronx and neuronx-cc together, each with its cure."""
    faults = []
    torch, xla = versions.get("torch", ""), versions.get("torch-xla", "")
    if xla and minor(torch) != minor(xla):
        faults.append(
            f"torch {torch or 'is missing'} with torch-xla {xla}: both must be of the same release; "
            f"pip install 'torch=={minor(xla)}.*'"
        )
    neuronx = versions.get("torch-neuronx", "")
    if neuronx and neuronx.split(".")[0] == "1" and "+" not in neuronx and neuronx.count(".") < 3:
        faults.append(
            f"torch-neuronx {neuronx} is the public index's empty stub; pip uninstall torch-neuronx && {INSTALL}"
        )
    elif neuronx and release(neuronx) < (2, 9):
        faults.append(f"torch-neuronx {neuronx} is older than 2.9; {INSTALL}")
    elif neuronx and release(neuronx) > (2, 9):
        faults.append(
            f"torch-neuronx {neuronx} is the native build for trn2 and trn3 (backend=neuron); on trn1: {INSTALL}"
        )
    compiler = versions.get("neuronx-cc", "")
    if compiler and compiler.split(".")[0] in ("0", "1"):
        faults.append(f"neuronx-cc {compiler} is the public index's empty stub; pip uninstall neuronx-cc && {INSTALL}")
    return faults


def release(version: str) -> tuple[int, int]:
    """Major and minor number as numbers; (0, 0) of an empty version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def minor(version: str) -> str:
    """Major and minor number: "2.9" of "2.9.0.2.15.32035"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def neuron_devices() -> list[str]:
    """Device files of the Neuron driver: one for each chip."""
    return sorted(str(path) for path in Path("/dev").glob("neuron[0-9]*"))


def instance_type(product: Path = Path("/sys/devices/virtual/dmi/id/product_name")) -> str:
    """What EC2 calls this machine ("trn1.32xlarge"); of other machines the maker's name, or nothing."""
    return product.read_text().strip() if product.is_file() else ""


def instance_stores(
    *, mountinfo: Path = Path("/proc/self/mountinfo"), sys_block: Path = Path("/sys/class/block")
) -> list[Path]:
    """Where this EC2 machine's own NVMe disks are mounted, and can be written to; a RAID of them counts too.

    By the disk's model, "Amazon EC2 NVMe Instance Storage" (EC2 user guide, "Instance store volumes").
    """

    def is_instance_store(device: str) -> bool:
        model = sys_block / device / "device" / "model"
        members = sys_block / device / "slaves"
        if model.is_file():
            return "Instance Storage" in model.read_text()
        parts = [path.name for path in members.iterdir()] if members.is_dir() else []
        return bool(parts) and all(map(is_instance_store, parts))

    found = []
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        source = Path(after.split()[1])
        place = Path(before.split()[4].replace("\\040", " "))
        if source.parent == Path("/dev") and is_instance_store(source.name) and os.access(place, os.W_OK):
            found.append(place)
    return found


@dataclass(frozen=True)
class Process:
    state: str  # R runs, S sleeps, D waits for a device or a disk, T is stopped, Z has ended; see proc(5)
    parent: int
    started: int  # clock ticks after the boot; with the pid, it tells one process from all others


def read_process(pid: int) -> Process | None:
    """From /proc; None if there is no such process to see."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return Process(state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def age_s(pid: int) -> float:
    """How long a process of this machine has been running. Linux; elsewhere 0."""
    process = read_process(pid)
    if process is None:
        return 0.0
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime_s - process.started / os.sysconf("SC_CLK_TCK"))


def cache_root() -> Path:
    """Where large files of this machine go that may be lost: its NVMe disk, or the user's cache."""
    stores = instance_stores()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (stores[0] if stores else Path(home).expanduser()) / "baretrain"
