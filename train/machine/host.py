"""Facts about this machine: file systems and caches, packages, GPUs and the instance type. Does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata, resources
from pathlib import Path

from train.config import InputError, check_printable
from train.machine.home import is_own

LOCAL_ROOT = "/var/tmp/baretrain-{}"  # `compile_root` if the cache is on a network file system
MOUNTINFO = Path("/proc/self/mountinfo")
SYS_BLOCK = Path("/sys/class/block")
ASSET_TAG = Path("/sys/devices/virtual/dmi/id/board_asset_tag")
NETWORK_FILESYSTEMS = ("nfs", "efs", "lustre", "smb", "cifs", "ceph", "beegfs", "gpfs", "fuse.s3")


# ---- disks and folders -----------------------------------------------------------------------------------------------


def filesystem(path: str | Path) -> str:
    """Return the type of a path's file system ("ext4", "nfs4", "lustre"), "" if unknown. The path need not exist."""
    real_path = Path(os.path.realpath(Path(path).expanduser().absolute()))
    best = -1
    kind = ""
    for point, type_, source in mounts():
        # later mounts hide earlier ones
        if real_path.is_relative_to(point) and len(point.parts) >= best:
            best = len(point.parts)
            # both are of type "fuse"
            if source in ("mountpoint-s3", "s3fs"):
                kind = f"{type_}.s3"
            else:
                kind = type_
    return kind


def mounts() -> Iterator[tuple[Path, str, str]]:
    """Yield the mount point, type and source of each file system (see proc(5)). Names may contain any bytes."""
    lines = os.fsdecode(MOUNTINFO.read_bytes()).split("\n")
    for line in filter(None, lines):
        left, _, right = line.partition(" - ")
        coded = left.split(" ")[4]
        # \040 is a space
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), coded)
        type_, source = right.split(" ")[:2]
        yield Path(point), type_, source


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
        if members.is_dir():
            parts = [path.name for path in members.iterdir()]
        else:
            parts = []
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
    if filesystem(root).startswith(NETWORK_FILESYSTEMS):
        return Path(LOCAL_ROOT.format(os.geteuid()))
    return root


# ---- packages, devices and the instance ------------------------------------------------------------------------------


def installed_versions(*names: str) -> dict[str, str]:
    """Return the versions of those packages among `names` that are installed."""
    versions = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def nvidia_gpus(bus: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Return the PCI addresses of NVIDIA GPUs (vendor 10de, class 03: display or 3D), with or without a driver."""
    gpus = []
    for device in sorted(bus.glob("*")):
        vendor = device / "vendor"
        kind = device / "class"
        if not (vendor.is_file() and kind.is_file()):
            continue
        is_nvidias = vendor.read_text().strip() == "0x10de"
        if is_nvidias and kind.read_text().startswith("0x03"):
            gpus.append(device.name)
    return gpus


def is_ec2_type(kind: str) -> bool:
    """Return whether a machine's name has the form of an EC2 instance type, family.size."""
    return re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", kind) is not None


def is_ec2_machine(asset_tag: Path = ASSET_TAG) -> bool:
    """Return whether this is an EC2 instance."""
    # On Nitro, that is on Trainium and all newer types, the asset tag is the instance's id (EC2 user guide, "Detect
    # whether a host is an EC2 instance").
    return asset_tag.is_file() and asset_tag.read_text().startswith("i-")


def instance_names() -> list[str]:
    """Return the names of the known instance types, from the files conf/instance/*.yaml."""
    folder = resources.files("conf") / "instance"
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def instance_type(product: Path = Path("/sys/devices/virtual/dmi/id/product_name")) -> str:
    """Return this machine's EC2 instance type ("trn1.32xlarge"); elsewhere the product's name or an empty string."""
    if product.is_file():
        return product.read_text().strip()
    return ""
