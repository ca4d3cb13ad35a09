"""The selection of a run's backend and device.

The device's collectives reduce gradients (`GradSync`). The few plain numbers on which the training loop bases its
decisions are exchanged between the hosts (`train.parallel.ranks.World`), so no decision waits for a device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from train.config import BackendConfig, InstanceConfig, TrainConfig, check
from train.machine import host, neuron
from train.parallel.backend import Backend
from train.parallel.compiled import Workload


def name_of(cfg: BackendConfig, instance: InstanceConfig) -> str:
    """Return the name of the backend that these settings choose on this machine: ddp or xla."""
    if cfg.name != "auto":
        return cfg.name
    device = instance.device or cfg.device
    if device == "neuron" or (device == "auto" and neuron.neuron_devices()):
        return "xla"
    return "ddp"


def is_cuda(cfg: BackendConfig, instance: InstanceConfig) -> bool:
    """Return whether `open_backend` would open a CUDA device on this machine with these settings."""
    device = instance.device or cfg.device
    is_chosen = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return is_chosen and name_of(cfg, instance) == "ddp"


def check_attention(cfg: TrainConfig) -> None:
    """Raise InputError if the run's device does not support model.attention. No device is opened."""
    attention = cfg.model.attention
    if attention in ("auto", "sdpa", "eager"):
        return
    key = f"model.attention={attention}"
    check(is_cuda(cfg.backend, cfg.instance), f"{key} needs a CUDA device; leave it out")
    if attention != "flash_attention_2":
        return
    # If the package is missing, transformers downloads code from the Hub.
    check(
        bool(host.installed_versions("flash-attn")),
        f"{key} needs its package: pip install flash-attn",
    )
    precision = cfg.backend.precision
    check(
        precision in ("auto", "bf16", "fp16"),
        f"{key} needs backend.precision=bf16 or fp16; here it is {precision}",
    )


def compiles_each_length(cfg: BackendConfig, instance: InstanceConfig) -> bool:
    """Return whether every batch length needs a compiled graph. No device is opened.

    With backend=ddp and backend.compile=auto this is False, because the decision to compile is made later.
    """
    return cfg.compile not in ("none", "auto") or name_of(cfg, instance) != "ddp"


def open_backend(
    cfg: BackendConfig, instance: InstanceConfig, *, work: Workload | None = None
) -> Backend:
    """Open the device and join the other ranks. Raises InputError if this machine lacks the chosen device.

    `work`: the workload on which backend.compile=auto bases its choice.
    """
    wanted = instance.device
    check(
        wanted is None or cfg.device in ("auto", wanted),
        f"instance={instance.name} has {wanted} devices, but backend.device={cfg.device}; set instance=local",
    )
    cfg = replace(cfg, device=wanted or cfg.device)
    check_trainium(cfg)
    # A run imports only the backend that it uses.
    if name_of(cfg, instance) == "xla":
        from train.parallel import xla_environment

        xla_environment.ready(cfg)
        # After `ready`, because torch_xla reads the environment when it is imported.
        from train.parallel.xla import XLA

        return XLA(cfg)
    from train.parallel.ddp import DDP

    return DDP(cfg, work=work)


def check_trainium(cfg: BackendConfig) -> None:
    """Raise InputError on a Trainium machine whose driver is not loaded."""
    kind = host.instance_type()
    if not kind.startswith("trn"):
        return
    check(
        cfg.device == "cpu" or bool(neuron.neuron_devices()),
        f"this is a {kind} without /dev/neuron0: its driver is not loaded (see baretrain doctor); set "
        "backend.device=cpu to train on the CPU",
    )
