"""What has to be right before torch_xla is imported: it and the Neuron runtime read their environment only once."""

from __future__ import annotations

import logging
import os
import sys

from train import machine
from train.config import BackendConfig, check
from train.launched import launched

logger = logging.getLogger("train")
PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc")


def ready(cfg: BackendConfig, *, nodes: int, collects: bool) -> None:
    """Choose the device, set what the runtime reads at its start. Raises InputError for packages that do not fit each
    other, a device that is not there, a variable that would change what is computed, a cache that cannot work.
    """
    versions = machine.installed_versions(*PACKAGES)
    faults = machine.package_faults(versions)
    check(not faults, "; ".join(faults))
    check(
        "torch-xla" in versions,
        "backend=xla needs PyTorch/XLA: pip install 'baretrain[xla]' (on trn1 see docs/trainium.md)",
    )
    kind = choose_device(cfg.device)
    missing = [name for name in ("torch-neuronx", "neuronx-cc") if name not in versions]
    check(kind == "CPU" or not missing, f"{' and '.join(missing)} not installed: {machine.INSTALL}")
    check(
        kind == "CPU" or "torch_xla" not in sys.modules,
        "another library (accelerate?) has imported torch_xla before its environment was set: pip uninstall accelerate",
    )
    check(
        kind == "NEURON" or not getattr(cfg, "zero1", False) or launched().world_size == 1,
        "backend.zero1 on several ranks needs Trainium: CPU processes have no collectives between their devices",
    )
    for knob in machine.bad_knobs(os.environ):
        if not (collects and knob.name == "NEURON_EXTRACT_GRAPHS_ONLY"):
            message = f"{knob.name}={os.environ[knob.name]} {knob.why}"
            check(not knob.is_dangerous, message)
            logger.warning(message)
    os.environ["PJRT_DEVICE"] = kind
    if kind == "NEURON":
        fault = machine.cache_fault(os.environ)
        check(fault is None, fault or "")
        rounds = cfg.precision == "bf16_stochastic"
        os.environ.update(machine.neuron_environment(os.environ, nodes=nodes, stochastic_rounding=rounds))
        if getattr(cfg, "zero1", False):
            os.environ.setdefault("XLA_DISABLE_FUNCTIONALIZATION", "0")  # as NxD Training does, for convergence
        logger.info("NEURON_CC_FLAGS=%s, cache %s", os.environ["NEURON_CC_FLAGS"], machine.cache_location(os.environ))


def choose_device(name: str) -> str:
    """NEURON or CPU. `auto` is what PJRT_DEVICE says, else Trainium where there is one."""
    devices = machine.neuron_devices()
    kind = {"neuron": "NEURON", "cpu": "CPU", "cuda": "CUDA"}.get(name)
    asked = os.environ.get("PJRT_DEVICE")
    check(
        not (devices and asked == "CPU" and name == "auto"),
        "PJRT_DEVICE=CPU on a machine with Trainium: unset it, or say backend.device=cpu if the CPU is meant",
    )
    kind = kind or os.environ.get("PJRT_DEVICE") or ("NEURON" if devices else "CPU")
    check(kind in ("NEURON", "CPU"), f"backend=xla runs on Trainium or the CPU, not on {kind}; for GPUs: backend=ddp")
    check(
        kind == "CPU" or bool(devices),
        "no Trainium here: there is no /dev/neuron0. On a trn1 instance its driver is missing, see python -m "
        "train.doctor; elsewhere say backend.device=cpu and instance=local",
    )
    return kind
