"""Neuron's environment, caches, packages and devices, read without opening a device. Does not import torch.

Sources: the Neuron SDK's guides for PyTorch/XLA (training-troubleshooting, torch-neuron-envvars, neuron-caching) in
SDK 2.31, the last with PyTorch/XLA.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from train.config import check
from train.config.backend import NEURON_TIMEOUT_S
from train.machine.host import LOCAL_ROOT, NETWORK_FILESYSTEMS, compile_root, filesystem
from train.machine.versions import read_versions, release

# port of Neuron's collectives, as in torch_xla; above Linux's ephemeral ports
ROOT_COMM_PORT = 62182
# the oldest releases that work; torch-neuronx has PyTorch/XLA only in this one
LEAST = {"torch-neuronx": (2, 9), "neuronx-cc": (2, 0)}
FLAGS = ("--model-type=transformer", "--auto-cast=none", "--retry_failed_compilation")


# Variables that silently change results, each with what it does and what to do.
BAD_VARIABLES = {
    "XLA_USE_BF16": "silently rounds every float32 to bfloat16; unset it and set backend.precision=bf16",
    "XLA_DOWNCAST_BF16": "silently rounds float32 to bfloat16; unset it and set backend.precision=bf16",
    "NEURON_EXTRACT_GRAPHS_ONLY": "only collects graphs, so every result is 0; unset it",
}


# ---- compiler flags and cache --------------------------------------------------------------------------------------


def with_flags(flags: str, wanted: Iterable[str]) -> str:
    """Append the `wanted` options to NEURON_CC_FLAGS, except options that the user already gave."""
    given = {word.strip("\"'").partition("=")[0] for word in flags.split()}
    for flag in wanted:
        if flag.partition("=")[0] not in given:
            flags = f"{flags} {flag}"
    return flags.strip()


def cache_location(environ: Mapping[str, str]) -> str:
    """Return where compiled graphs are kept: NEURON_COMPILE_CACHE_URL, else in `compile_root`."""
    return environ.get("NEURON_COMPILE_CACHE_URL") or str(compile_root() / "neuron")


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

    Raises InputError if the user's variables disable stochastic rounding that was requested.
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
        host = f"[{host}]" if ":" in host else host
        wanted["NEURON_RT_ROOT_COMM_ID"] = f"{host}:{ROOT_COMM_PORT}"
    if nodes > 1:
        wanted["FI_PROVIDER"] = "efa"
        wanted["FI_EFA_USE_DEVICE_RDMA"] = "1"
        wanted["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = "512"
    missing = {name: value for name, value in wanted.items() if name not in environ}
    return {**missing, "NEURON_CC_FLAGS": with_flags(environ.get("NEURON_CC_FLAGS", ""), FLAGS)}


# ---- packages and devices ------------------------------------------------------------------------------------------


def package_faults(versions: Mapping[str, str]) -> list[str]:
    """Return conflicts between the installed torch, torch-xla, torch-neuronx and neuronx-cc, each with its fix."""
    faults = []
    install = read_versions().sdk.install
    torch = versions.get("torch", "")
    xla = versions.get("torch-xla", "")
    if xla and release(torch) != release(xla):
        faults.append(
            f"torch {torch or 'is missing'} with torch-xla {xla}: both must have the same release; "
            f"pip install 'torch=={'.'.join(map(str, release(xla)))}.*'"
        )
    for name, least in LEAST.items():
        version = versions.get(name, "")
        if version and release(version) < least:
            faults.append(
                f"{name} {version} is too old, or the public index's empty stub; pip uninstall {name} && {install}"
            )
    neuronx = versions.get("torch-neuronx", "")
    if release(neuronx) > LEAST["torch-neuronx"]:
        faults.append(f"torch-neuronx {neuronx} has no PyTorch/XLA; {install}")
    return faults


def neuron_devices() -> list[str]:
    """Return the device files of the Neuron driver, one for each chip."""
    return sorted(str(path) for path in Path("/dev").glob("neuron[0-9]*"))


def cores_of_chips(text: str) -> list[int]:
    """Return the number of logical cores of each chip from `neuron-ls -j`. Raises ValueError on other output."""
    try:
        return [int(chip["nc_count"]) for chip in json.loads(text)]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
