"""The environment variables that torch_xla and the Neuron runtime read once, when torch_xla is imported."""

from __future__ import annotations

import logging
import os
import sys

from train.config import BackendConfig, check
from train.config.backend import NEURON_TIMEOUT_S
from train.machine import host, neuron, rank_setup
from train.machine.launched import launched
from train.machine.versions import read_versions
from train.storage.caches import place_graphs

logger = logging.getLogger("train")
PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc")


def ready(cfg: BackendConfig, *, collects: bool) -> None:
    """Choose the device and set the variables that the runtime reads. Raises InputError if a run would fail."""
    versions = host.installed_versions(*PACKAGES)
    faults = neuron.package_faults(versions)
    check(not faults, "; ".join(faults))
    check(
        "torch-xla" in versions,
        "backend=xla needs PyTorch/XLA: pip install 'baretrain[xla]' (on trn1 see docs/trainium.md)",
    )
    kind = choose_device(cfg.device)
    missing = [name for name in ("torch-neuronx", "neuronx-cc") if name not in versions]
    check(
        kind == "CPU" or not missing,
        f"{' and '.join(missing)} not installed: {read_versions().sdk.install}",
    )
    check(
        kind == "CPU" or "torch_xla" not in sys.modules,
        "another library (accelerate?) imported torch_xla before its environment was set: pip uninstall accelerate",
    )
    for knob in neuron.bad_knobs(os.environ):
        if not (collects and knob.name == "NEURON_EXTRACT_GRAPHS_ONLY"):
            message = f"{knob.name}={os.environ[knob.name]} {knob.why}"
            check(not knob.is_dangerous, message)
            logger.warning(message)
    os.environ["PJRT_DEVICE"] = kind
    if kind == "NEURON":
        fault = neuron.cache_fault(os.environ)
        check(fault is None, fault or "")
        os.environ.update(place_graphs(os.environ, is_native=False))
        launch = launched()
        nodes = launch.world_size // launch.local_world_size
        rank_setup.pin(rank_setup.neuron_address(os.environ, launch.local_rank))
        rounds = cfg.precision == "bf16_stochastic"
        timeout_s = cfg.timeout_s or NEURON_TIMEOUT_S
        wanted = neuron.neuron_environment(
            os.environ, nodes=nodes, stochastic_rounding=rounds, timeout_s=timeout_s
        )
        os.environ.update(wanted)
        logger.info(
            "NEURON_CC_FLAGS=%s, cache %s",
            os.environ["NEURON_CC_FLAGS"],
            neuron.cache_location(os.environ),
        )


def choose_device(name: str) -> str:
    """Return NEURON or CPU. `auto` chooses the device in PJRT_DEVICE, else Trainium if there is one, else CPU."""
    devices, asked = neuron.neuron_devices(), os.environ.get("PJRT_DEVICE")
    check(
        not (devices and asked == "CPU" and name == "auto"),
        "PJRT_DEVICE=CPU on a machine with Trainium: unset it, or set backend.device=cpu to train on the CPU",
    )
    kind = (
        {"neuron": "NEURON", "cpu": "CPU", "cuda": "CUDA"}.get(name)
        or asked
        or ("NEURON" if devices else "CPU")
    )
    check(
        kind in ("NEURON", "CPU"),
        f"backend=xla runs on Trainium and CPUs, not on {kind}; set backend=ddp for GPUs",
    )
    check(
        kind == "CPU" or bool(devices),
        "no Trainium here: there is no /dev/neuron0. On a trn1 instance, its driver is missing: see python -m "
        "baretrain doctor. Elsewhere, set backend.device=cpu and instance=local",
    )
    return kind
