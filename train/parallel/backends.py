"""The selection of a run's backend and device.

The device's collectives reduce gradients (`GradSync`). The few plain numbers on which the training loop bases its
decisions are exchanged between the hosts (`train.parallel.ranks.World`), so no decision waits for a device.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from train.config import BackendConfig, InstanceConfig, TrainConfig, check
from train.machine import host, neuron
from train.parallel.auto_compile import Workload
from train.parallel.backend import Backend

logger = logging.getLogger("train")


def name_of(cfg: BackendConfig, instance: InstanceConfig) -> str:
    """Return the name of the backend that these settings choose on this machine: ddp, xla or neuron."""
    if cfg.name != "auto":
        return cfg.name
    device = instance.device or cfg.device
    has_neuron = device == "neuron" or (device == "auto" and bool(neuron.neuron_devices()))
    package = host.installed_versions("torch-neuronx").get("torch-neuronx", "")
    kind = host.instance_type()
    # release 2.9 is for XLA
    is_native = neuron.is_native(kind, instance.name) and neuron.release(package) != (
        2,
        9,
    )
    return ("neuron" if is_native else "xla") if has_neuron else "ddp"


def is_cuda(cfg: BackendConfig, instance: InstanceConfig) -> bool:
    """Return whether `open_backend` would open a CUDA device on this machine with these settings."""
    device = instance.device or cfg.device
    chosen = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return chosen and name_of(cfg, instance) == "ddp"


def check_attention(cfg: TrainConfig) -> None:
    """Raise InputError if the run's device does not support model.attention. No device is opened."""
    attention, backend = cfg.model.attention, cfg.backend
    if attention in ("auto", "sdpa", "eager"):
        return
    key = f"model.attention={attention}"
    check(is_cuda(backend, cfg.instance), f"{key} needs a CUDA device; leave it out")
    # if the package is missing, transformers downloads code from the Hub
    if attention == "flash_attention_2":
        check(
            bool(host.installed_versions("flash-attn")),
            f"{key} needs its package: pip install flash-attn",
        )
        is_narrow = backend.precision in ("auto", "bf16", "fp16")
        check(
            is_narrow,
            f"{key} needs backend.precision=bf16 or fp16; here it is {backend.precision}",
        )


def compiles_each_length(cfg: BackendConfig, instance: InstanceConfig) -> bool:
    """Return whether every batch length needs a compiled graph. No device is opened.

    With backend=ddp and backend.compile=auto this is False, because the decision to compile is made later.
    """
    return cfg.compile not in ("none", "auto") or name_of(cfg, instance) != "ddp"


def open_backend(
    cfg: BackendConfig,
    instance: InstanceConfig,
    *,
    collects: bool = False,
    work: Workload | None = None,
) -> Backend:
    """Open the device and join the other ranks. Raises InputError if this machine lacks the chosen device.

    `collects`: the run only collects the graphs of backend=xla, and its results are meaningless.
    `work`: the workload on which backend.compile=auto bases its choice.
    """
    wanted = instance.device
    check(
        wanted is None or cfg.device in ("auto", wanted),
        f"instance={instance.name} has {wanted} devices, but backend.device={cfg.device}; set instance=local",
    )
    cfg = replace(cfg, device=wanted or cfg.device)
    kind = host.instance_type()
    if kind.startswith("trn"):
        check(
            cfg.device == "cpu" or bool(neuron.neuron_devices()),
            f"this is a {kind} without /dev/neuron0: its driver is not loaded (see baretrain doctor); set "
            "backend.device=cpu to train on the CPU",
        )
        if instance.name == "local":
            is_known = kind in host.instance_names()
            setting = (
                f"instance={kind}"
                if is_known
                else f"instance.name={kind} and its figures (docs/trainium.md)"
            )
            logger.warning(
                "this is a %s: set %s to check the ranks and report MFU and cost", kind, setting
            )
    name = name_of(cfg, instance)
    # A run imports only the backend that it uses.
    if name == "xla":
        from train.parallel import xla_environment

        xla_environment.ready(cfg, collects=collects)
        # after `ready`: torch_xla reads the environment when it is imported
        from train.parallel.xla import (
            XLA,
        )

        return XLA(cfg, collects=collects)
    if name == "neuron":
        from train.parallel.neuron import Neuron

        return Neuron(cfg)
    from train.parallel.ddp import DDP

    return DDP(cfg, work=work)
