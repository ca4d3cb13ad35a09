"""The device that a run trains on: the interface between the engines and the hardware, and how a backend is chosen.

Ranks exchange values in two ways: gradients by the device's own collectives (`GradSync`), and a few plain numbers
between the hosts (`train.ranks.World`), so that no decision of the loop waits for a device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import BackendConfig, InstanceConfig, S3Config, check
from train.host import machine
from train.host.launched import launched

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from train.backend.base import Work
    from train.backend.graphs import Compilers, Graphs
    from train.backend.nonfinite import Skips
    from train.data.batches.loader import Batch
    from train.ranks import World

logger = logging.getLogger("train")
State = dict[str, Any]  # tensors and plain containers


class GradSync(Protocol):
    """Adds the gradients of a replicated model over the ranks, once a step."""

    module: nn.Module  # the model as forward passes call it

    def begin(self, count: float) -> None:
        """Begin a step in which this rank has `count` labels. The count is added up together with the gradients."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """The context of one micro batch, forward and backward. Only the last one of a step reduces the gradients."""

    def finish(self) -> Tensor:
        """Reduce what is not yet reduced. Returns the divisor [1], on the device, that makes the gradients those of the
        mean over the labels of all ranks; 0 if there are no labels.
        """

    def state(self) -> State:
        """Entries for the optimizer's state in a checkpoint, the same on all ranks. What a rank remembers beside it is
        dropped here, so that the run that continues and one that resumes do the same.
        """

    def load(self, state: State) -> None:
        """Restore the entry "compression" of what `state` returned; empty if the checkpoint has none."""


class Backend(Protocol):
    """What engines and loop need of a device. All ranks call the methods that are collectives, in the same order."""

    name: str
    device: torch.device
    device_name: str
    precision: str  # what was chosen: fp32, bf16, ...
    adamw: dict[str, bool]  # which of torch's AdamW implementations suits the device
    monitor_kind: str  # the source of utilisation: neuron | nvidia | cpu
    may_compile: bool  # whether backend.compile is an option here that the run does not use
    pin_memory: bool  # host batches in page-locked memory, so that copies to the device overlap with work
    world: World  # the ranks, over the hosts
    work: Work  # seconds of this rank's own work; where the device cannot be asked, those of the host
    span: Work  # likewise from the first to the last pass of a step, for engines whose ranks wait for one another there
    compilers: Compilers
    skips: Skips  # steps that changed nothing; set once a model has moved
    scaler: torch.amp.GradScaler  # of losses before backward passes; it does nothing unless the precision is fp16

    def setup_model(self, model: nn.Module, *, accumulation: int = 1, lengths: int = 1) -> None:
        """Put the model on the device, keep its tied weights tied, and arrange its layers to suit the device.
        `accumulation`: micro batches of a step; `lengths`: how many shapes batches have.
        """

    def grad_sync(self, model: nn.Module, *, accumulation: int) -> GradSync:
        """What sums the gradients of a model that is set up and is the same on all ranks."""

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Add tensors of the device up over the ranks, in place, on the path that gradients take."""

    def mesh(self) -> DeviceMesh:
        """The devices of all ranks, for engines that split tensors over them. InputError where there is none."""

    def subgroup(self, ranks: list[int]) -> dist.ProcessGroup:
        """A group of some of the ranks, in which tensors of the device are sent and added up. All ranks make the same
        groups, in the same order. InputError for a device whose collectives join all ranks only.
        """

    def ready(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Called once weights and optimizer are as the first step finds them. Raises RuntimeError unless the optimizer
        holds exactly these parameters.
        """

    def to_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches with their inputs on the device."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Inside, forward passes run in the run's precision."""

    def unscale(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Make the gradients those of the loss itself, in fp32: undo its scale (fp16), widen what is stored in bf16."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor) -> None:
        """Step and clear the gradients, after `unscale`. `norm`: that of the gradients, [] on the device. If it is NaN
        or infinite, weights, moments and step counts stay as they are, on all ranks.
        """

    def mark_step(self) -> None:
        """Bring weights and optimizer to the device after a rollback, before the next step begins."""

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the host. Waits for the device."""

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Copy each tensor to the buffer of its shape and type. Waits for the device."""

    def graphs(self) -> Graphs:
        """What was compiled and executed; zeros where nothing is."""

    def profile_text(self) -> str:
        """What the device says of the steps so far, in Markdown; nothing where PyTorch's profiler sees it all."""

    def seed(self, seed: int) -> None:
        """Random numbers of this rank (dropout): a function of seed and rank."""

    def rng_state(self) -> State: ...

    def set_rng_state(self, state: State) -> None: ...

    def save(self, state: State, file: BinaryIO) -> None:
        """Write tensors and plain containers that are on the host, for `train.backend.base.load`. A thread calls it
        while the ranks train, on rank 0 and wherever else a part of the state is: it may not touch the device.
        """

    def close(self) -> None: ...


def open_backend(
    cfg: BackendConfig, instance: InstanceConfig, s3: S3Config | None = None, *, collects: bool = False
) -> Backend:
    """Open the device and join the other ranks. Raises InputError if this machine has no such device.

    `collects`: the run only collects graphs, and the numbers that come back mean nothing; one that cannot be kept is an
    error.
    """
    wanted = instance.device
    check(
        wanted is None or cfg.device in ("auto", wanted),
        f"instance={instance.name} has {wanted} devices, but backend.device={cfg.device}; set instance=local",
    )
    cfg = replace(cfg, device=wanted or cfg.device)
    kind = machine.instance_type()
    if kind.startswith("trn"):
        check(
            cfg.device == "cpu" or bool(machine.neuron_devices()),
            f"this is a {kind} without /dev/neuron0: its driver is not loaded (python -m train.doctor); set "
            "backend.device=cpu to train on the CPU",
        )
        if instance.name == "local":
            logger.warning("this is a %s: set instance=%s to check the ranks and report MFU and cost", kind, kind)
    name = cfg.name
    if name == "auto":
        has_neuron = cfg.device == "neuron" or (cfg.device == "auto" and bool(machine.neuron_devices()))
        name = "xla" if has_neuron else "ddp"
    check(
        cfg.compile == "none" or name == "ddp",
        f"backend.compile={cfg.compile} is for GPUs and CPUs; {name} compiles every graph by itself: leave it out",
    )
    # The modules are imported here, so that a run pays for its own backend alone.
    if name == "xla":
        from train.backend import xla_environment

        launch = launched()
        nodes = launch.world_size // launch.local_world_size
        xla_environment.ready(cfg, nodes=nodes, collects=collects)
        from train.backend.xla import XLA  # only now: torch_xla reads the environment

        return XLA(cfg, collects=collects)
    if name == "neuron":
        from train.backend.neuron import Neuron

        return Neuron(cfg)
    from train.backend.ddp import DDP

    return DDP(cfg, s3, collects=collects)
