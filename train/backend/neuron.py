"""Native PyTorch on Trainium 2 and 3 (TorchNeuron, torch-neuronx 2.13 and newer). Experimental, not run on hardware.

There the device is one of torch's own, so this is DDP with other names: device and collectives "neuron", autocast
"neuron". What is known of it: https://awsdocs-neuron.readthedocs-hosted.com, frameworks/torch, SDK 2.33.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist

from train import machine
from train.backend import guards
from train.backend.ddp import DDP
from train.backend.hosts import Hosts
from train.backend.rendezvous import join
from train.config import BackendConfig, check

DEVICE = "neuron"  # never "neuron:0": a process sees its own core only
COLLECTIVES = "cpu:gloo,neuron:neuron"


class Neuron(DDP):
    """See `train.backend.Backend`. It opens another device and shares all that follows."""

    name = "neuron"
    adamw = {"foreach": False}  # the plain one: whether the others exist there is not documented
    skips_on_device = False  # that implementation counts its steps on the host, which has to know of a skip
    pin_memory = False
    device_name = "NeuronCore"
    monitor_kind = "neuron"
    compresses = False

    def __init__(self, cfg: BackendConfig) -> None:
        Hosts.__init__(self)
        self.events = []  # work is timed on the host
        check_machine(cfg)
        self.precision = "bf16" if cfg.precision == "auto" else cfg.precision
        self.recomputes = cfg.activation_checkpointing
        if self.is_distributed:  # before anything touches the device
            join(COLLECTIVES, cfg.timeout_s or 7200)
        self.device = torch.device(DEVICE)
        if self.is_distributed:
            ones = torch.ones(1, device=self.device)
            dist.all_reduce(ones)
            guards.check_world(
                launched=self.world_size,
                device=dist.get_world_size(),
                group=dist.get_world_size(),
                ones=float(ones.cpu()),
            )


def check_machine(cfg: BackendConfig) -> None:
    """Raises InputError where native PyTorch on Neuron cannot run."""
    found = machine.installed_versions("torch-neuronx").get("torch-neuronx", "")
    check(
        machine.release(found) >= (2, 13) and importlib.util.find_spec("torch_neuronx") is not None,
        f"backend=neuron needs native PyTorch for trn2 or trn3, torch-neuronx 2.13 or newer, not {found or 'none'}; on "
        "trn1 say backend=xla. See https://awsdocs-neuron.readthedocs-hosted.com, frameworks/torch",
    )
    check(bool(machine.neuron_devices()), "no Trainium here: there is no /dev/neuron0; see python -m train.doctor")
    check(cfg.device in ("auto", "neuron"), f"backend=neuron runs on Neuron devices, not backend.device={cfg.device}")
    check(cfg.grad_compression == "none", "backend.grad_compression is for NCCL; leave it out with backend=neuron")
