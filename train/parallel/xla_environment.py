"""The environment variables that torch_xla and the Neuron runtime read once, when torch_xla is imported."""

from __future__ import annotations

import logging
import os
import sys

from train.config import BackendConfig, check
from train.config.backend import NEURON_TIMEOUT_S
from train.machine import host, neuron
from train.machine.launched import launched
from train.machine.versions import read_versions
from train.storage.caches import place_graphs

logger = logging.getLogger("train")
COLLECTS = "BARETRAIN_COLLECTS"  # variable that `baretrain precompile` sets: NeuronCores return only zeros
PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc")


def ready(cfg: BackendConfig) -> None:
    """Choose the device and set the variables that the runtime reads. Raises InputError if a run would fail."""
    kind = choose_device(cfg.device)
    check_packages(kind)
    for name, why in neuron.BAD_VARIABLES.items():
        if name == "NEURON_EXTRACT_GRAPHS_ONLY" and os.environ.get(COLLECTS) == "1":
            continue
        value = os.environ.get(name, "")
        check(value in ("", "0"), f"{name}={value} {why}")
    os.environ["PJRT_DEVICE"] = kind
    if kind == "NEURON":
        prepare_neuron(cfg)


def check_packages(kind: str) -> None:
    """Raise InputError if packages are missing, do not fit together, or were imported too early."""
    versions = host.installed_versions(*PACKAGES)
    faults = neuron.package_faults(versions)
    check(not faults, "; ".join(faults))
    check(
        "torch-xla" in versions,
        "backend=xla needs PyTorch/XLA: pip install 'baretrain[xla]' (on trn1 see docs/trainium.md)",
    )
    if kind == "CPU":
        return
    missing = [name for name in ("torch-neuronx", "neuronx-cc") if name not in versions]
    check(not missing, f"{' and '.join(missing)} not installed: {read_versions().sdk.install}")
    check(
        "torch_xla" not in sys.modules,
        "another library (accelerate?) imported torch_xla before its environment was set: pip uninstall accelerate",
    )


def prepare_neuron(cfg: BackendConfig) -> None:
    """Set the variables of the Neuron runtime and compiler."""
    fault = neuron.cache_fault(os.environ)
    check(fault is None, fault or "")
    os.environ.update(place_graphs(os.environ))
    launch = launched()
    wanted = neuron.neuron_environment(
        os.environ,
        nodes=launch.world_size // launch.local_world_size,
        stochastic_rounding=cfg.precision == "bf16_stochastic",
        timeout_s=cfg.timeout_s or NEURON_TIMEOUT_S,
    )
    os.environ.update(wanted)
    logger.info(
        "NEURON_CC_FLAGS=%s, cache %s",
        os.environ["NEURON_CC_FLAGS"],
        neuron.cache_location(os.environ),
    )


def choose_device(name: str) -> str:
    """Return NEURON or CPU. `auto` chooses the device in PJRT_DEVICE, else Trainium if there is one, else CPU."""
    devices = neuron.neuron_devices()
    asked = os.environ.get("PJRT_DEVICE")
    check(
        not (devices and asked == "CPU" and name == "auto"),
        "PJRT_DEVICE=CPU on a machine with Trainium: unset it, or set backend.device=cpu to train on the CPU",
    )
    kind = name.upper()
    if name == "auto":
        kind = asked or ("NEURON" if devices else "CPU")
    check(
        kind in ("NEURON", "CPU"),
        f"backend=xla runs on Trainium and CPUs, not on {kind}; set backend=ddp for GPUs",
    )
    check(
        kind == "CPU" or bool(devices),
        "no Trainium here: there is no /dev/neuron0. On a trn1 instance, its driver is missing: see baretrain doctor. "
        "Elsewhere, set backend.device=cpu and instance=local",
    )
    return kind
