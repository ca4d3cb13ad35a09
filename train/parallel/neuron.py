"""Native PyTorch on Trainium 2 and 3 (TorchNeuron, torch-neuronx 2.13 and newer). Experimental, not run on hardware.

TorchNeuron is an ordinary torch device, so this backend is DDP with a device, collectives and autocast named "neuron".
It follows https://awsdocs-neuron.readthedocs-hosted.com (frameworks/torch, SDK 2.33) and the source of a
pre-release. docs/trainium.md lists the source of each fact.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from train.config import BackendConfig, NeuronConfig, check
from train.config.backend import NEURON_TIMEOUT_S
from train.machine import host, neuron, rank_setup
from train.machine.versions import read_versions
from train.parallel import guards
from train.parallel.backend import Backend, Work
from train.parallel.ddp import DDP
from train.storage.caches import place_graphs

DEVICE = "neuron"  # without an index: a process sees a single core
COLLECTIVES = "cpu:gloo,neuron:neuron"


class Neuron(DDP):
    """A NeuronCore. This class opens and checks the device; everything else is inherited from DDP."""

    name = "neuron"
    # With a pre-release on trn2, a step took 126 ms with AdamW's foreach implementation and 1,324 ms with its loop over
    # weight tensors, which also failed for a model with 814 of them (hokindeng/object-permanence, pwm/).
    adamw = {"foreach": True}
    # AdamW counts steps on the host, so the host must know which are skipped
    skips_on_device = False
    pin_memory = False
    drops_masks = False  # batches without a mask would need another graph
    device_name = "NeuronCore"
    monitor_kind = "neuron"
    compresses = False
    continues_dropout = False

    def __init__(self, cfg: BackendConfig) -> None:
        Backend.__init__(self)
        # validates
        cfg = (
            cfg
            if isinstance(cfg, NeuronConfig)
            else NeuronConfig(**{**asdict(cfg), "name": "neuron"})
        )
        check_machine(cfg)
        timeout_s, nodes = cfg.timeout_s or NEURON_TIMEOUT_S, self.world.num_machines
        os.environ.update(neuron.runtime_environment(os.environ, nodes=nodes, timeout_s=timeout_s))
        os.environ.update(place_graphs(os.environ, is_native=True))
        # This registers the device and its collectives. torch also does so, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
        self.package = importlib.import_module("torch_neuronx")
        rank_setup.pin(rank_setup.neuron_address(os.environ, self.world.local_rank))
        self.precision = "bf16" if cfg.precision == "auto" else cfg.precision
        self.recomputes = cfg.activation_checkpointing
        if cfg.compile not in ("none", "auto"):
            from train.parallel.compiled import TorchCompiler  # late: it imports Dynamo

            self.compiler = TorchCompiler(cfg, compiles_with="neuron")
        self.device = torch.device(DEVICE)
        self.work, self.span = WaitedWork(self.device), WaitedWork(self.device)
        if self.world.is_distributed:
            self.join_ranks(COLLECTIVES, timeout_s)  # before anything touches the device
            ones = torch.ones(1, device=self.device)
            self.all_reduce([ones])
            guards.check_world(
                launched=self.world.size,
                device=dist.get_world_size(),
                group=dist.get_world_size(),
                ones=float(ones.cpu()),
            )

    def ready(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        super().ready(optimizer, parameters)
        getattr(
            self.package, "clear_op_tracking", self.fallback_ops
        )()  # ignore operators before the first step

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor
    ) -> None:
        super().optimizer_step(optimizer, parameters, norm)
        wait_for(self.device)  # asynchronous updates of many weights have failed

    def fallback_ops(self) -> set[str]:
        """Return the operators that have run on the CPU; an empty set if this release cannot list them."""
        listed = getattr(self.package, "get_fallback_ops", None)
        return set() if listed is None else {str(each) for each in listed()}

    def notices(self) -> list[str]:
        # Each operator that ran on the CPU is reported once.
        new = sorted(self.fallback_ops() - self.lacking)
        self.lacking = self.lacking.union(new)
        message = f"operators that ran on the CPU instead of the device: {', '.join(new)}"
        return [f"{message}; their tensors are copied to the host and back"] if new else []

    def mesh(self) -> DeviceMesh:
        # First test the collectives that FSDP uses. The test values start at 1, because unwritten memory is 0.
        number, size = self.world.rank + 1, self.world.size
        numbers, whole = (
            torch.arange(1.0, size + 1).to(self.device),
            torch.zeros(size).to(self.device),
        )
        own, part = torch.tensor([float(number)]).to(self.device), torch.zeros(1).to(self.device)
        dist.all_gather_into_tensor(whole, own)
        guards.check_collective("all-gather", whole, range(1, size + 1))
        dist.reduce_scatter_tensor(part, numbers)
        guards.check_collective("reduce-scatter", part, [number * size])
        return super().mesh()

    def subgroup(self, ranks: list[int]) -> dist.ProcessGroup:
        # The group's ranks first test the collectives that a pipeline uses.
        group = super().subgroup(ranks)
        if self.world.rank in ranks and len(ranks) > 1:
            place, numbers = ranks.index(self.world.rank), range(1, len(ranks) + 1)
            own, taken = (
                torch.tensor([float(numbers[place])]).to(self.device),
                torch.zeros(1).to(self.device),
            )
            sends = dist.P2POp(dist.isend, own, ranks[(place + 1) % len(ranks)], group)
            takes = dist.P2POp(dist.irecv, taken, ranks[place - 1], group)
            for work in dist.batch_isend_irecv([sends, takes]):
                work.wait()
            guards.check_collective("send and receive", taken, [numbers[place - 1]])
            dist.all_reduce(own, group=group)
            guards.check_collective("all-reduce of some ranks", own, [sum(numbers)])
        return group

    def tracer(self, folder: Path) -> torch.profiler.profile:
        # Only the runtime is traced. A trace of instructions would take about 5 GB of device memory.
        profiling = importlib.import_module("torch_neuronx.profiling")
        config = profiling.NeuronConfig(
            modes=[profiling.ProfileMode.RUNTIME], profile_output_dir=str(folder)
        )
        activities = [
            torch.profiler.ProfilerActivity.CPU,
            torch.profiler.ProfilerActivity.PrivateUse1,
        ]
        return torch.profiler.profile(activities=activities, experimental_config=config)


class WaitedWork(Work):
    """A timer that waits for the device and reads the host's clock, because device events failed in a beta release."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @contextmanager
    def timed(self) -> Iterator[None]:
        wait_for(self.device)
        with super().timed():
            yield
            wait_for(self.device)


def wait_for(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def check_machine(cfg: BackendConfig) -> None:
    """Raise InputError if native PyTorch on Neuron cannot run on this machine."""
    faults = read_versions().native.faults(host.installed_versions("torch", "torch-neuronx"))
    check(
        not faults,
        f"backend=neuron needs native PyTorch: {'; '.join(faults)}; for PyTorch/XLA set backend=xla",
    )
    check(
        bool(neuron.neuron_devices()),
        "no Trainium here: there is no /dev/neuron0; see baretrain doctor",
    )
    check(
        cfg.device in ("auto", "neuron"),
        f"backend=neuron runs on Neuron devices, not backend.device={cfg.device}",
    )
