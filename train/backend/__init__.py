"""On what device a run runs: the door between the loop and the hardware, and the table of backends.

Values between ranks go two ways: gradients over the device's own collectives inside `wrap`, and a few plain numbers a
step over the hosts (gloo), so that no decision of the loop has to wait for a device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

import torch
from torch import Tensor, nn

from train import machine
from train.config import BackendConfig, InstanceConfig, check
from train.launched import launched

if TYPE_CHECKING:
    from train.backend.graphs import Graphs
    from train.data.batches import Batch

logger = logging.getLogger("train")
Result = TypeVar("Result")
State = dict[str, Any]  # tensors and plain containers


class Backend(Protocol):
    """Every verb that takes part in a collective is called by all ranks, in the same order."""

    name: str
    device: torch.device
    device_name: str
    precision: str  # what was chosen: fp32, bf16, ...
    adamw: dict[str, bool]  # which of torch's AdamW implementations suits the device
    monitor_kind: str  # what to read utilisation from: neuron | nvidia | cpu
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    pin_memory: bool  # host batches in page-locked memory, so that copies to the device overlap with work

    def wrap(self, model: nn.Module, *, accumulation: int, lengths: int = 1) -> nn.Module:
        """Put the model on the device; its gradients will be reduced over the ranks once a step. `lengths`: how many
        shapes batches have.
        """

    def own(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None
    ) -> torch.optim.Optimizer:
        """The optimizer to step with, made of the one given, once weights and state are as the first step finds them.
        Raises RuntimeError unless it holds exactly these parameters.
        """

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        """Its state_dict() with whole tensors and without settings, complete on rank 0."""

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches with their inputs on the device."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes run in the run's precision inside."""

    def timed(self) -> AbstractContextManager[Any]:
        """Inside runs work of this rank alone, without a collective."""

    def take_work_s(self) -> float:
        """Seconds that `timed` work took since this was last asked for; to be called when the device has been waited
        for. Where the device cannot be asked, those of the host.
        """

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Inside runs one micro batch, forward and backward. Gradients stay local but for the last of a step."""

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        """Clip, update, clear the gradients. Gives the gradients' global norm before clipping, left on the device. If
        that is NaN or infinite, weights, moments and step counts stay as they are, on all ranks.
        """

    def skipped(self) -> tuple[int, int]:
        """Steps that changed nothing, because their norm was not finite: of this process, and of the last in a row.
        Waits for the device.
        """

    def known_skips(self) -> int:
        """Steps up to the last one that changed nothing, in a row, as far as the host knows without waiting for the
        device: 0 where it does not. The same on all ranks.
        """

    def reset_skips(self) -> None:
        """None of the last steps counts as skipped any more: the run has gone back behind them."""

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the host. Waits for the device."""

    def graphs(self) -> Graphs:
        """What was compiled and executed; zeros where nothing is."""

    def check_same(self, parameters: list[nn.Parameter]) -> None:
        """Raises RuntimeError if the ranks hold different weights (a few small ones are compared, on the hosts)."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Numbers added over all ranks, on the hosts."""

    def gather(self, value: State) -> list[State]:
        """Every rank's value in rank order, on rank 0; an empty list elsewhere."""

    def share(self, value: Result) -> list[Result]:
        """Every rank's value in rank order, on all ranks."""

    def broadcast(self, value: int) -> int:
        """Rank 0's value, on all ranks."""

    def seed(self, seed: int) -> None:
        """Random numbers of this rank (dropout): a function of seed and rank."""

    def rng_state(self) -> State: ...

    def set_rng_state(self, state: State) -> None: ...

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Copy each tensor to the buffer of its shape and type. Waits for the device."""

    def save(self, state: State, file: BinaryIO) -> None:
        """Write tensors and plain containers that are on the host, readable by every backend. A thread of rank 0 calls
        it, while the others train: it may not touch the device.
        """

    def load(self, path: Path) -> State: ...

    def settle(self) -> None:
        """Weights and optimizer were put back while it trains: bring them to the device before the next step begins."""

    def in_turn(self) -> AbstractContextManager[None]:
        """A few ranks of a machine at a time inside, so that its memory does not hold a checkpoint for each."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def open_backend(cfg: BackendConfig, instance: InstanceConfig, *, collects: bool = False) -> Backend:
    """Open the device and join the other ranks. Raises InputError if this machine has no such device.

    `collects`: only graphs are wanted, the numbers that come back mean nothing.
    """
    wanted = instance.device
    check(
        wanted is None or cfg.device in ("auto", wanted),
        f"instance={instance.name} is for its {wanted} devices, backend.device={cfg.device} is not; say instance=local",
    )
    cfg = replace(cfg, device=wanted or cfg.device)
    kind = machine.instance_type()
    if kind.startswith("trn"):
        check(
            cfg.device == "cpu" or bool(machine.neuron_devices()),
            f"this is a {kind} without /dev/neuron0: its driver is not loaded (python -m train.doctor); say "
            "backend.device=cpu if the CPU is meant",
        )
        if instance.name == "local":
            logger.warning("this is a %s: instance=%s would check the ranks and give MFU and cost", kind, kind)
    name = cfg.name
    if name == "auto":
        has_neuron = cfg.device == "neuron" or (cfg.device == "auto" and bool(machine.neuron_devices()))
        name = "xla" if has_neuron else "ddp"
    # Each backend's imports are paid by its own runs.
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

    return DDP(cfg)
