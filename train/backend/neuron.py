"""Native PyTorch on Trainium 2 and 3 (TorchNeuron, torch-neuronx 2.13 and newer). Experimental, not run on hardware.

TorchNeuron is a device of torch's own, so this is DDP with device, collectives and autocast named "neuron". It follows
https://awsdocs-neuron.readthedocs-hosted.com, frameworks/torch, SDK 2.33.
"""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.distributed as dist

from train.backend import guards
from train.backend.base import Backend
from train.backend.ddp import DDP
from train.backend.rendezvous import join
from train.config import BackendConfig, check
from train.config.backend import NEURON_TIMEOUT_S, check_reduces_plainly
from train.host import machine, rank_setup

DEVICE = "neuron"  # without a number: a process sees its own core only
COLLECTIVES = "cpu:gloo,neuron:neuron"


class Neuron(DDP):
    """See `train.backend.Backend`. Opening the device is its own, everything after that is DDP's."""

    name = "neuron"
    adamw = {"foreach": False}  # the plain implementation; it is not documented whether the others exist
    skips_on_device = False  # the plain implementation counts its steps on the host, which has to know of a skip
    pin_memory = False
    drops_masks = False  # each form of a batch is one more graph
    device_name = "NeuronCore"
    monitor_kind = "neuron"
    compresses = False

    def __init__(self, cfg: BackendConfig) -> None:
        self.begin()  # work is timed on the host
        check_machine(cfg)
        rank_setup.pin(rank_setup.neuron_address(os.environ, self.world.local_rank))
        self.precision = "bf16" if cfg.precision == "auto" else cfg.precision
        self.recomputes = cfg.activation_checkpointing
        if self.world.is_distributed:  # the ranks join before anything touches the device
            device = f"{self.name} on {DEVICE}, {self.precision}"
            join(COLLECTIVES, device, timeout_s=cfg.timeout_s or NEURON_TIMEOUT_S, join_timeout_s=cfg.join_timeout_s)
        self.device = torch.device(DEVICE)
        if self.world.is_distributed:
            ones = torch.ones(1, device=self.device)
            self.all_reduce([ones])
            guards.check_world(
                launched=self.world.size,
                device=dist.get_world_size(),
                group=dist.get_world_size(),
                ones=float(ones.cpu()),
            )

    mesh = Backend.mesh  # nobody has seen torch's split of a model run on these devices
    subgroup = Backend.subgroup  # whether its collectives send from rank to rank is not documented


def check_machine(cfg: BackendConfig) -> None:
    """Raise InputError if native PyTorch on Neuron cannot run here."""
    version = machine.installed_versions("torch-neuronx").get("torch-neuronx", "")
    check(
        machine.release(version) >= (2, 13) and importlib.util.find_spec("torch_neuronx") is not None,
        "backend=neuron needs native PyTorch for trn2 or trn3, torch-neuronx 2.13 or newer, and this machine has "
        f"{version or 'none'}; set backend=xla on trn1. See https://awsdocs-neuron.readthedocs-hosted.com, "
        "frameworks/torch",
    )
    check(bool(machine.neuron_devices()), "no Trainium here: there is no /dev/neuron0; see python -m train.doctor")
    check(cfg.device in ("auto", "neuron"), f"backend=neuron runs on Neuron devices, not backend.device={cfg.device}")
    check(
        cfg.precision in ("auto", "fp32", "bf16"),
        f"backend.precision={cfg.precision} is for CUDA; set bf16 or fp32 with backend=neuron",
    )
    check_reduces_plainly(cfg, Neuron.name)
