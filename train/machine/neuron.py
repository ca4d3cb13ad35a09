"""Neuron's environment, caches, packages and devices, read without opening a device. Does not import torch.

Sources: the Neuron SDK's guides for PyTorch/XLA (training-troubleshooting, torch-neuron-envvars, neuron-caching) in
SDK 2.31, the last with PyTorch/XLA.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from train.config import InputError, check
from train.config.backend import NEURON_TIMEOUT_S
from train.machine.host import LOCAL_ROOT, NETWORK_FILESYSTEMS, compile_root, filesystem
from train.machine.versions import read_versions, release

# port of Neuron's collectives, as in torch_xla; above Linux's ephemeral ports
ROOT_COMM_PORT = 62182
FLAGS = ("--model-type=transformer", "--auto-cast=none", "--retry_failed_compilation")


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
    if flags.strip():
        words = [flags]
    else:
        words = []
    words += [flag for flag in wanted if flag.split("=")[0] not in given]
    return " ".join(words)


def cache_location(environ: Mapping[str, str]) -> str:
    """Return where compiled graphs are kept: --cache_dir, else NEURON_COMPILE_CACHE_URL, else in `compile_root`."""
    flags = split_flags(environ.get("NEURON_CC_FLAGS", ""))
    given = [
        each.removeprefix("--cache_dir=") for each in flags if each.startswith("--cache_dir=")
    ]
    given += [value for flag, value in itertools.pairwise(flags) if flag == "--cache_dir"]
    if given:
        return given[-1]
    return environ.get("NEURON_COMPILE_CACHE_URL") or str(compile_root() / "neuron")


def split_flags(flags: str) -> list[str]:
    """Return the options in NEURON_CC_FLAGS. Raises InputError if its quotes are not closed."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise InputError(
            f"NEURON_CC_FLAGS={flags} cannot be split into options ({error}); fix its quotes"
        ) from error


def cache_fault(environ: Mapping[str, str]) -> str | None:
    """Return why the compile cache must be moved; None if its location is fine."""
    location = cache_location(environ)
    if location.startswith("s3://"):
        return None
    if "://" in location:
        return f"compile cache {location} must be a folder or s3://bucket/folder"
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
        wanted["NEURON_RT_ROOT_COMM_ID"] = root_address(environ, nodes=nodes)
    if nodes > 1:
        wanted["FI_PROVIDER"] = "efa"
        wanted["FI_EFA_USE_DEVICE_RDMA"] = "1"
        wanted["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = "512"
    missing = {name: value for name, value in wanted.items() if name not in environ}
    return {**missing, "NEURON_CC_FLAGS": with_flags(environ.get("NEURON_CC_FLAGS", ""), FLAGS)}


def root_address(environ: Mapping[str, str], *, nodes: int) -> str:
    """Return the address of Neuron's collectives. Raises InputError if it cannot work."""
    host = environ["MASTER_ADDR"]
    if ":" in host:
        host = f"[{host}]"
    address = environ.get("NEURON_RT_ROOT_COMM_ID", f"{host}:{ROOT_COMM_PORT}")
    check(
        address.rpartition(":")[2] != environ.get("MASTER_PORT"),
        f"NEURON_RT_ROOT_COMM_ID={address} has torchrun's port (MASTER_PORT); give torchrun another --master-port",
    )
    check(
        nodes == 1 or not address.startswith(("localhost", "127.", "[::1]")),
        f"NEURON_RT_ROOT_COMM_ID={address} means a different machine on each of the {nodes} machines; give "
        "torchrun the address of one machine by --master-addr",
    )
    return address


# ---- packages and devices ------------------------------------------------------------------------------------------


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
            if bdf.count(":") == 1:
                address = f"0000:{bdf}"
            else:
                address = bdf
            chips.append(
                Chip(int(entry.get("neuron_device", number)), int(num_cores), holders, address)
            )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return chips
