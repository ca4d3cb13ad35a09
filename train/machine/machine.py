"""Facts about a machine and its environment, read without opening a device. Importing this does not import torch.

Sources: the Neuron SDK's guides for PyTorch/XLA (training-troubleshooting, torch-neuron-envvars, neuron-caching) in
SDK 2.31, the last with PyTorch/XLA.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from train.config import InputError, check, check_printable
from train.config.backend import NEURON_TIMEOUT_S
from train.machine.home import is_own
from train.machine.versions import read_versions, release

LOCAL_ROOT = "/var/tmp/baretrain-{}"  # `compile_root` if the cache is on a network file system
MOUNTINFO, SYS_BLOCK = Path("/proc/self/mountinfo"), Path("/sys/class/block")
NETWORK_FILESYSTEMS = ("nfs", "efs", "lustre", "smb", "cifs", "ceph", "beegfs", "gpfs", "fuse.s3")
# port of Neuron's collectives, as in torch_xla; above Linux's ephemeral ports
ROOT_COMM_PORT = 62182


@dataclass(frozen=True)
class Knob:
    """An environment variable with an effect that users may not expect."""

    name: str
    why: str
    is_dangerous: bool = False  # whether it changes the results


KNOBS = (
    Knob(
        "XLA_USE_BF16",
        "silently rounds every float32 to bfloat16; unset it and set backend.precision=bf16",
        True,
    ),
    Knob(
        "XLA_DOWNCAST_BF16",
        "silently rounds float32 to bfloat16; unset it and set backend.precision=bf16",
        True,
    ),
    Knob(
        "NEURON_EXTRACT_GRAPHS_ONLY", "only collects graphs, so every result is 0; unset it", True
    ),
    Knob(
        "XLA_USE_DUMMY_STORE",
        "leaves the ranks without a store through which they connect; unset it",
        True,
    ),
    Knob("XRT_TPU_CONFIG", "belongs to XRT, which torch-xla dropped in 2.7; unset it"),
    Knob("XRT_WORKERS", "belongs to XRT, which torch-xla dropped in 2.7; unset it"),
    Knob("XRT_DEVICE_MAP", "belongs to XRT, which torch-xla dropped in 2.7; unset it"),
    Knob(
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "has had no effect since SDK 2.31; unset it"
    ),
    Knob("BUCKET_CAP_MB", "is not read; set ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB instead"),
    Knob("FI_EFA_FORK_SAFE", "is only for kernels before 5.15; unset it on newer ones"),
)


def bad_knobs(environ: Mapping[str, str]) -> list[Knob]:
    """Return the KNOBS that are set to anything but an empty string or 0."""
    return [knob for knob in KNOBS if environ.get(knob.name, "") not in ("", "0")]


# ---- compiler flags and cache --------------------------------------------------------------------------------------


def with_flags(flags: str, wanted: Iterable[str]) -> str:
    """Append the `wanted` options to NEURON_CC_FLAGS, except options that the user already gave."""
    given = {part.split("=")[0] for part in split_flags(flags)}
    return " ".join(
        [*([flags] if flags.strip() else []), *(f for f in wanted if f.split("=")[0] not in given)]
    )


def cache_location(environ: Mapping[str, str]) -> str:
    """Return where compiled graphs are kept: --cache_dir, else NEURON_COMPILE_CACHE_URL, else in `compile_root`."""
    flags = split_flags(environ.get("NEURON_CC_FLAGS", ""))
    given = [
        flag.removeprefix("--cache_dir=") for flag in flags if flag.startswith("--cache_dir=")
    ]
    given += [value for flag, value in itertools.pairwise(flags) if flag == "--cache_dir"]
    return (
        given[-1]
        if given
        else environ.get("NEURON_COMPILE_CACHE_URL") or str(compile_root() / "neuron")
    )


def split_flags(flags: str) -> list[str]:
    """Return the options in NEURON_CC_FLAGS. Raises InputError if its quotes are not closed."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise InputError(
            f"NEURON_CC_FLAGS={flags} cannot be split into options ({error}); fix its quotes"
        ) from error


def filesystem(path: str | Path) -> str:
    """Return the type of a path's file system ("ext4", "nfs4", "lustre"), "" if unknown. The path need not exist."""
    real_path, best, kind = Path(os.path.realpath(Path(path).expanduser().absolute())), -1, ""
    for point, type_, source in mounts():
        # later mounts hide earlier ones
        if real_path.is_relative_to(point) and len(point.parts) >= best:
            best = len(point.parts)
            # both are of type "fuse"
            kind = f"{type_}.s3" if source in ("mountpoint-s3", "s3fs") else type_
    return kind


def mounts() -> Iterator[tuple[Path, str, str]]:
    """Yield the mount point, type and source of each file system (see proc(5)). Names may contain any bytes."""
    for line in filter(None, os.fsdecode(MOUNTINFO.read_bytes()).split("\n")):
        left, _, right = line.partition(" - ")
        # \040 is a space
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), left.split(" ")[4])
        type_, source = right.split(" ")[:2]
        yield Path(point), type_, source


def cache_fault(environ: Mapping[str, str]) -> str | None:
    """Return why the compile cache must be moved; None if its location is fine."""
    location = cache_location(environ)
    if "://" in location:
        is_usable = location.startswith("s3://")
        return (
            None
            if is_usable
            else f"compile cache {location} must be a folder or s3://bucket/folder"
        )
    kind = filesystem(location)
    if not kind.startswith(NETWORK_FILESYSTEMS):
        return None
    return (
        f"compile cache {location} is on {kind}, whose file locks break neuronx-cc; set NEURON_COMPILE_CACHE_URL to a "
        f"folder on a local disk ({LOCAL_ROOT.format(os.geteuid())}/neuron) or to s3://bucket/folder"
    )


# ---- environment of PyTorch on Trainium ----------------------------------------------------------------------------


def neuron_environment(
    environ: Mapping[str, str],
    *,
    nodes: int,
    stochastic_rounding: bool,
    timeout_s: float = NEURON_TIMEOUT_S,
) -> dict[str, str]:
    """Return the variables to set before the Neuron runtime starts.

    The user's variables are kept. Compiler flags are added to the user's flags.

    `timeout_s` limits one execution, including its waits for other ranks. AWS's samples use 600 s, which is too short
    if another machine must compile first. If nothing must be compiled, the watchdog ends a hang sooner.

    Raises InputError if the user's variables disable stochastic rounding that was requested, or give the ranks an
    unusable address.
    """
    wanted = {
        "NEURON_RT_EXEC_TIMEOUT": f"{math.ceil(timeout_s)}",
        "XLA_TRANSFER_SEED_ASYNC": "1",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1" if stochastic_rounding else "0",
    }
    if "TORCHELASTIC_RUN_ID" not in environ and "NEURON_RT_VISIBLE_CORES" not in environ:
        wanted["NEURON_RT_NUM_CORES"] = "1"  # otherwise a single process would use all cores
    if stochastic_rounding:
        wanted["NEURON_RT_STOCHASTIC_ROUNDING_SEED"] = "0"
        check(
            environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1") == "1",
            "NEURON_RT_STOCHASTIC_ROUNDING_EN=0 with backend.precision=bf16_stochastic: small updates would be rounded "
            "away; unset it or choose another precision",
        )
    if "MASTER_ADDR" in environ:
        host = environ["MASTER_ADDR"]
        wanted["NEURON_RT_ROOT_COMM_ID"] = (
            f"{f'[{host}]' if ':' in host else host}:{ROOT_COMM_PORT}"
        )
        address = environ.get("NEURON_RT_ROOT_COMM_ID", wanted["NEURON_RT_ROOT_COMM_ID"])
        check(
            address.rpartition(":")[2] != environ.get("MASTER_PORT"),
            f"NEURON_RT_ROOT_COMM_ID={address} has torchrun's port (MASTER_PORT); give torchrun another --master-port",
        )
        check(
            nodes == 1 or not address.startswith(("localhost", "127.", "[::1]")),
            f"NEURON_RT_ROOT_COMM_ID={address} means a different machine on each of the {nodes} machines; give "
            "torchrun the address of one machine by --master-addr",
        )
    if nodes > 1:
        wanted["FI_PROVIDER"] = "efa"
        wanted["FI_EFA_USE_DEVICE_RDMA"] = "1"
        wanted["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = "512"
    flags = ("--model-type=transformer", "--auto-cast=none", "--retry_failed_compilation")
    missing = {name: value for name, value in wanted.items() if name not in environ}
    return {**missing, "NEURON_CC_FLAGS": with_flags(environ.get("NEURON_CC_FLAGS", ""), flags)}


# ---- packages ------------------------------------------------------------------------------------------------------


def installed_versions(*names: str) -> dict[str, str]:
    """Return the versions of those packages among `names` that are installed."""
    versions = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def package_faults(versions: Mapping[str, str]) -> list[str]:
    """Return conflicts between the installed torch, torch-xla, torch-neuronx and neuronx-cc, each with its fix."""
    faults, install = [], read_versions().sdk.install
    torch, xla = versions.get("torch", ""), versions.get("torch-xla", "")
    if xla and release(torch) != release(xla):
        faults.append(
            f"torch {torch or 'is missing'} with torch-xla {xla}: both must have the same release; "
            f"pip install 'torch=={'.'.join(map(str, release(xla)))}.*'"
        )
    neuronx = versions.get("torch-neuronx", "")
    if neuronx and neuronx.split(".")[0] == "1" and "+" not in neuronx and neuronx.count(".") < 3:
        faults.append(
            f"torch-neuronx {neuronx} is the public index's empty stub; pip uninstall torch-neuronx && {install}"
        )
    elif neuronx and release(neuronx) < (2, 9):
        faults.append(f"torch-neuronx {neuronx} is older than 2.9; {install}")
    elif neuronx and release(neuronx) > (2, 9):
        faults.append(f"torch-neuronx {neuronx} has no PyTorch/XLA; {install}")
    compiler = versions.get("neuronx-cc", "")
    if compiler and compiler.split(".")[0] in ("0", "1"):
        faults.append(
            f"neuronx-cc {compiler} is the public index's empty stub; pip uninstall neuronx-cc && {install}"
        )
    return faults


def neuron_devices() -> list[str]:
    """Return the device files of the Neuron driver, one for each chip."""
    return sorted(str(path) for path in Path("/dev").glob("neuron[0-9]*"))


@dataclass(frozen=True)
class Chip:
    """A Neuron chip. Each rank uses one logical core."""

    number: int
    num_cores: int  # logical cores
    # process id and command (may be empty) of processes that use it
    holders: tuple[tuple[int, str], ...]
    address: str  # PCI address with its domain; may be empty


def read_neuron_ls(text: str) -> list[Chip]:
    """Parse the output of `neuron-ls -j`. Older versions print fewer fields. Raises ValueError on other output."""
    chips = []
    try:
        for number, entry in enumerate(json.loads(text)):
            num_cores = entry.get("nc_count") or len(entry.get("neuroncore_ids") or ())
            if not num_cores:
                raise ValueError("no nc_count in it")
            processes, bdf = entry.get("neuron_processes") or (), str(entry.get("bdf") or "")
            holders = tuple(
                (int(process["pid"]), str(process.get("command") or "")) for process in processes
            )
            address = f"0000:{bdf}" if bdf.count(":") == 1 else bdf
            chips.append(
                Chip(int(entry.get("neuron_device", number)), int(num_cores), holders, address)
            )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return chips


def nvidia_gpus(bus: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the PCI addresses of NVIDIA GPUs (vendor 10de, class 03: display or 3D), with or without a driver."""
    gpus = []
    for device in sorted(bus.glob("*")):
        vendor, kind = device / "vendor", device / "class"
        if vendor.is_file() and kind.is_file() and vendor.read_text().strip() == "0x10de":
            gpus += [device.name] if kind.read_text().startswith("0x03") else []
    return gpus


def is_ec2(kind: str) -> bool:
    """Return whether a machine's name has the form of an EC2 instance type, family.size."""
    return re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", kind) is not None


def instance_names() -> list[str]:
    """Return the names of the known instance types, from the files conf/instance/*.yaml."""
    folder = resources.files("conf") / "instance"
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def instance_type(product: Path = Path("/sys/devices/virtual/dmi/id/product_name")) -> str:
    """Return this machine's EC2 instance type ("trn1.32xlarge"); elsewhere the product's name or an empty string."""
    return product.read_text().strip() if product.is_file() else ""


def instance_stores() -> list[Path]:
    """Return the writable mount points of this EC2 machine's local NVMe disks, or of a RAID of these disks.

    A local disk is recognised by its model, "Amazon EC2 NVMe Instance Storage" (EC2 user guide, "Instance store
    volumes").
    """

    def is_instance_store(device: str) -> bool:
        model = SYS_BLOCK / device / "device" / "model"
        members = SYS_BLOCK / device / "slaves"
        if model.is_file():
            return "Instance Storage" in model.read_text()
        parts = [path.name for path in members.iterdir()] if members.is_dir() else []
        return bool(parts) and all(map(is_instance_store, parts))

    return [
        point
        for point, _, source in mounts()
        if Path(source).parent == Path("/dev")
        and is_instance_store(Path(source).name)
        and os.access(point, os.W_OK)
    ]


def cache_root() -> Path:
    """Return the folder for large local files that may be lost: on a local NVMe disk, or in the user's cache.

    It is private to this user, since the files in it may contain private texts.
    """
    stores = instance_stores()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    check_printable(home, "XDG_CACHE_HOME=")
    # Several users may share an instance store, and another user may have made the folder.
    roots = [
        *(store / f"baretrain-{os.geteuid()}" for store in stores),
        Path(home).expanduser() / "baretrain",
    ]
    for root in roots:
        with suppress(OSError):  # the first write to the folder will report the error
            root.mkdir(0o700, parents=True, exist_ok=True)
            root.chmod(0o700)
        if is_own(root):
            return root
    raise InputError(
        f"{root} belongs to another user; remove it, or set XDG_CACHE_HOME to a folder of your own"
    )


def compile_root() -> Path:
    """Return the folder for compiled graphs and kernels. It is on a local disk: file locks over a network may fail."""
    root = cache_root()
    return (
        Path(LOCAL_ROOT.format(os.geteuid()))
        if filesystem(root).startswith(NETWORK_FILESYSTEMS)
        else root
    )
