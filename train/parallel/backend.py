"""The interface between engines and devices, and the helpers of backends: timers, collectives, tensor files."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.graphs import Graphs
from train.parallel.nonfinite import Skips
from train.parallel.ranks import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from train.data.batches.loader import Batch
    from train.parallel.compiled import TorchCompiler
    from train.parallel.grad_sync import GradSync

State = dict[str, Any]  # tensors and plain containers
RANK_STRIDE = 1_000_003  # difference between adjacent ranks' seeds; large, so that runs with nearby seeds share no seed


class Work:
    """A timer of this rank's work on the host's clock. It excludes waits for other ranks."""

    def __init__(self) -> None:
        self.taken_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.taken_s += time.perf_counter() - began_s

    def take_s(self) -> float:
        taken_s = self.taken_s
        self.taken_s = 0.0
        return taken_s


class Backend(ABC):
    """The device of a rank, and its collectives. All ranks must call the collectives in the same order."""

    name: str
    device: torch.device
    device_name: str
    precision: str  # the chosen precision: fp32, bf16, ...
    adamw: dict[str, bool]  # the options that choose torch's AdamW implementation for the device
    monitor_kind: str  # the source of utilisation figures: neuron | nvidia | cpu
    compiler: TorchCompiler | None = None  # of torch.compile; None if nothing is compiled
    # whether each graph is only traced, so that results are meaningless (`precompile`)
    collects: bool = False
    captures: bool = False  # whether steps of parallel=data run as CUDA graphs
    must_capture: bool = False  # whether a step that does not ends the run
    compiles: str = "none"  # the parts that torch.compile compiles: none | layers | model
    pin_memory: bool  # whether batches are in page-locked memory, so that copies to the device overlap with computing
    # Counts of skipped steps. `setup_model` creates them: creating them later would change XLA's first graph.
    skips: Skips

    def __init__(self) -> None:
        """Set the attributes that all backends share. Subclasses must call this first."""
        self.world = World()  # communication between ranks, through host memory
        # Seconds of this rank's work, on the host's clock unless the backend replaces the timer.
        self.work = Work()
        # Seconds from the first to the last pass of a step, including waits for other ranks.
        self.span = Work()
        # The scaler multiplies losses before backward passes. It does nothing unless the precision is fp16.
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    # ---- the model -------------------------------------------------------------------------------------------------

    @abstractmethod
    def setup_model(self, model: Any, *, accumulation: int = 1, lengths: int = 1) -> None:
        """Move a model to the device. Tied weights remain tied.

        A step has `accumulation` micro batches. Over the whole run, batches have `lengths` different shapes.
        """

    def leave_out_padding(self, model: nn.Module) -> None:
        """Let the layers of a model read training batches without padding, where that is faster."""
        return

    def compile_loss(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `loss`, a function of logits, compiled if the model is compiled."""
        return loss

    def try_graphs(self, micro_batch: Callable[[], object]) -> None:
        """Try backend.compile=auto on the first micro batch, without side effects. If any rank fails, none compiles."""
        return

    @abstractmethod
    def ready(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Prepare the first step. Raises RuntimeError unless the optimizer holds exactly these parameters."""

    # ---- the other ranks -------------------------------------------------------------------------------------------

    @abstractmethod
    def grad_sync(self, model: nn.Module, *, accumulation: int) -> GradSync:
        """Return the object that reduces gradients. The model must be set up, with equal weights on all ranks."""

    @abstractmethod
    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Sum device tensors over the ranks, in place, with the collectives that reduce gradients."""

    def mesh(self, num_shards: int) -> DeviceMesh:
        """Return a mesh of all ranks' devices, for engines that split tensors over `num_shards` ranks.

        It has two dimensions, copies and shards, if there are several copies.
        """
        raise NotImplementedError

    def subgroup(self, ranks: list[int]) -> dist.ProcessGroup:
        """Return a process group of `ranks`. All ranks must call this for each group, in the same order."""
        raise NotImplementedError

    # ---- a step ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def to_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches with their inputs on the device."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which forward passes use the run's precision."""

    @abstractmethod
    def unscale(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Undo the loss scale (fp16) in the gradients, and convert bf16 gradients to fp32."""

    @abstractmethod
    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor
    ) -> None:
        """Take a step, or skip it on all ranks if `norm` [] is NaN or infinite. Clear the gradients in both cases."""

    def mark_step(self) -> None:
        """Send restored weights and moments to the device after a rollback, before the next step begins."""
        return

    @abstractmethod
    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the host. Waits for the device."""

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Copy each tensor to its host buffer, which has its shape and dtype. Waits for the device."""
        for buffer, copy in zip(buffers, self.to_host(tensors), strict=True):
            buffer.copy_(copy)

    def is_compiling(self) -> bool:
        """Return whether the training thread is compiling a graph. Any thread may call this."""
        return False

    # ---- reports from the device -----------------------------------------------------------------------------------

    @abstractmethod
    def graphs(self) -> Graphs:
        """Return counts of compiled and executed graphs; zeros if the device has no graphs."""

    def profile_text(self) -> str:
        """Return the device's text summary of all steps so far; "" if PyTorch's profiler covers everything."""
        return ""

    # ---- random numbers and files ----------------------------------------------------------------------------------

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed this rank's random numbers (dropout), differently on each rank."""

    @abstractmethod
    def rng_state(self) -> State:
        """Return this rank's random state, on the host."""

    @abstractmethod
    def set_rng_state(self, state: State) -> None:
        """Restore a random state, which may come from another kind of device."""

    def close(self) -> None:
        """Leave the process group. The caller must have dropped its references to the model and optimizer.

        DDP's wrapper is in a reference cycle, so only gc.collect frees it. If gloo's threads still hold the
        wrapper's tensors at exit, the process aborts (https://github.com/pytorch/pytorch/pull/179291).
        """
        if self.world.is_distributed:
            gc.collect()
            self.world.barrier()
            dist.destroy_process_group()


def peak_device_bytes() -> int | None:
    """Return the peak bytes that PyTorch reserved on this process's device; None if PyTorch does not count them.

    This includes memory that CUDA graphs keep and that no tensor uses.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    return None


def spare_device_bytes() -> int:
    """Return the bytes of this process's device that no step so far would need; 0 if PyTorch does not count them.

    Memory that PyTorch has reserved counts as used, because CUDA graphs may keep it. From the rest, the largest step so
    far must still be able to take its share.
    """
    if not torch.cuda.is_initialized():
        return 0
    free_bytes, _ = torch.cuda.mem_get_info()
    step_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return free_bytes - step_bytes


def all_reduce_flat(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Return the sums of tensors over the ranks of a group, computed by a single all-reduce."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    return split_like(flat, tensors)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split `flat` into views with the shapes of `tensors`, in the same order."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def widen(parameters: Sequence[nn.Parameter]) -> None:
    """Convert bf16 parameters and their gradients to fp32, for one update."""
    for parameter in parameters:
        grad = parameter.grad
        parameter.grad = None
        parameter.data = parameter.data.float()
        if grad is not None:
            parameter.grad = grad.float()


def round_to_bf16(parameters: Sequence[nn.Parameter]) -> None:
    """Round parameters to bf16 (Trainium does so stochastically, so that small updates survive). Free gradients."""
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.bfloat16()


def load(path: Path) -> State:
    """Load a file of a checkpoint. It is memory-mapped on the host, so the ranks of a machine share its pages."""
    state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state
