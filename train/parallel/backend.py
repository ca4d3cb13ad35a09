"""The interface between engines and hardware, with shared parts: timer, seeds, flat collectives, files of tensors."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import InputError
from train.parallel.grad_sync import GradSync
from train.parallel.graphs import Compilers, Graphs
from train.parallel.nonfinite import Skips
from train.parallel.ranks import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from train.data.batches.loader import Batch

State = dict[str, Any]  # tensors and plain containers
RANK_STRIDE = 1_000_003  # a prime: the seeds of neighbouring runs and ranks differ


class Work:
    """Seconds of this rank's work, without waits for other ranks, timed on the host."""

    def __init__(self) -> None:
        self.taken_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.taken_s += time.perf_counter() - began_s

    def take_s(self) -> float:
        taken_s, self.taken_s = self.taken_s, 0.0
        return taken_s


class Backend(ABC):
    """The device of a rank, and its collectives. All ranks call these in the same order."""

    name: str
    device: torch.device
    device_name: str
    precision: str  # the chosen precision: fp32, bf16, ...
    adamw: dict[str, bool]  # which of torch's AdamW implementations suits the device
    monitor_kind: str  # the source of utilisation: neuron | nvidia | cpu
    collects: bool = False  # for train.precompile: each graph runs once, and the returned numbers mean nothing
    continues_dropout: bool = True  # whether restored random numbers were seen to continue on the device
    lacking: frozenset[str] = frozenset()  # operators that the device lacks, which have run on the host
    captures: bool = False  # whether a step of parallel=data is a CUDA graph
    compiles: str = "none"  # the parts that torch.compile compiles: none | layers | model
    pin_memory: bool  # host batches in page-locked memory, so that copies to the device overlap with work
    skips: Skips  # steps that changed nothing; made when a model moves: later, XLA's first step would be another graph

    def __init__(self) -> None:
        """Set the attributes that all backends share; a backend calls it first."""
        self.world = World()  # the ranks, over the hosts
        self.work = Work()  # seconds of this rank's work, timed on the host if the device cannot be asked
        self.span = Work()  # the same for a whole step, from the first to the last pass, with waits for other ranks
        self.compilers = Compilers()
        # It scales losses before backward passes, and does nothing unless the precision is fp16.
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    # ---- the model -------------------------------------------------------------------------------------------------

    @abstractmethod
    def setup_model(self, model: Any, *, accumulation: int = 1, lengths: int = 1) -> None:
        """Put the model on the device, weights tied. `accumulation`: micro batches a step; `lengths`: their shapes."""

    def compile_loss(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a loss of logits, compiled if the model is."""
        return loss

    def try_graphs(self, micro_batch: Callable[[], object]) -> None:
        """Try backend.compile=auto on a micro batch, without a trace. If it fails on any rank, nothing is compiled."""
        return

    @abstractmethod
    def ready(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Begin, before the first step. Raises RuntimeError unless the optimizer holds exactly these parameters."""

    # ---- the other ranks -------------------------------------------------------------------------------------------

    @abstractmethod
    def grad_sync(self, model: nn.Module, *, accumulation: int) -> GradSync:
        """Return the object that adds up the gradients of a model that is set up and is the same on all ranks."""

    @abstractmethod
    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Add tensors of the device up over the ranks, in place, on the path that gradients take."""

    def mesh(self) -> DeviceMesh:
        """Return the devices of all ranks, for engines that split tensors. Raises InputError if there is no mesh."""
        raise InputError(
            f"backend={self.name} has no collectives of torch.distributed that could split a model's state over ranks; "
            "choose parallel=data without shard_optimizer"
        )

    def subgroup(self, ranks: list[int]) -> dist.ProcessGroup:
        """Return a group of some ranks; all ranks make each, in order. Raises InputError if only all ranks can join."""
        raise InputError(f"parallel=pipeline does not run with backend={self.name}; set parallel=data")

    # ---- a step ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def to_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches with their inputs on the device."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward passes run in the run's precision."""

    @abstractmethod
    def unscale(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Make the gradients those of the loss itself, in fp32: undo its scale (fp16), widen bf16 ones."""

    @abstractmethod
    def optimizer_step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor) -> None:
        """Step, unless `norm` [] is NaN or infinite: then nothing changes, on all ranks. Clear the gradients."""

    def mark_step(self) -> None:
        """Bring weights and optimizer to the device after a rollback, before the next step begins."""
        return

    @abstractmethod
    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the host. Waits for the device."""

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Copy each tensor to the buffer of its shape and type. Waits for the device."""
        for buffer, copy in zip(buffers, self.to_host(tensors), strict=True):
            buffer.copy_(copy)

    # ---- what the device tells -------------------------------------------------------------------------------------

    @abstractmethod
    def graphs(self) -> Graphs:
        """Return counts of compiled and executed graphs; zeros if the device has no graphs."""

    def notices(self) -> list[str]:
        """Return events of the device since the last call, for the run's log; called after each step and evaluation."""
        return []

    def tracer(self, folder: Path) -> torch.profiler.profile:
        """Return a profiler of steps. Files that the device's tools write in addition to the trace go to `folder`."""
        return torch.profiler.profile()

    def profile_text(self) -> str:
        """Return the device's summary of the steps so far; "" if PyTorch's profiler sees it all."""
        return ""

    # ---- random numbers and files ----------------------------------------------------------------------------------

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the random numbers of this rank (dropout) by a function of seed and rank."""

    @abstractmethod
    def rng_state(self) -> State:
        """Return the state of this rank's random numbers, on the host."""

    @abstractmethod
    def set_rng_state(self, state: State) -> None:
        """Restore a state of random numbers, perhaps of another device."""

    def save(self, state: State, file: BinaryIO) -> None:
        """Write tensors and plain containers that are on the host, for `load`. Called from the saver's thread."""
        torch.save(state, file)

    def close(self) -> None:
        """Leave the group, once the model and optimizer are out of scope.

        DDP's wrapper sits in a reference cycle, and gloo threads that still hold its tensors at exit abort the process
        (https://github.com/pytorch/pytorch/pull/179291).
        """
        if self.world.is_distributed:
            gc.collect()
            self.world.barrier()
            dist.destroy_process_group()


def peak_device_bytes() -> int | None:
    """Return the most bytes that PyTorch's allocator had handed out on this process's device; None without one."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    native: Any = getattr(torch, "neuron", None)  # TorchNeuron names its functions as torch.cuda does
    peak = getattr(native, "max_memory_allocated", None)
    return None if peak is None else int(peak())


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of one flat tensor in the shapes of tensors that were concatenated to it."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def all_reduce_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the sums of tensors over the ranks of a group, in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    return split_like(flat, tensors)


def widen(parameters: Sequence[nn.Parameter]) -> None:
    """Make bf16 parameters and their gradients fp32, for one update."""
    for parameter in parameters:
        grad, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.float()
        parameter.grad = None if grad is None else grad.float()


def round_to_bf16(parameters: Sequence[nn.Parameter]) -> None:
    """Round parameters to bf16 once, on Trainium stochastically, so that small updates survive. Gradients are None."""
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.bfloat16()


def load(path: Path) -> State:
    """Load on the host what a backend has saved. The file is mapped: the ranks of a machine share its pages."""
    state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state
