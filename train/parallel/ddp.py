"""PyTorch DDP, over gloo on CPUs and NCCL on CUDA devices. A single process may run without torchrun."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from train.config import BackendConfig, check
from train.config.backend import DEFAULT_TIMEOUT_S
from train.machine import host
from train.machine.console import without_stdout
from train.machine.runtime import keep_freed_memory
from train.parallel import guards, nonfinite, rendezvous
from train.parallel.backend import RANK_STRIDE, Backend, State, Work
from train.parallel.buckets import BucketSync
from train.parallel.captured import captures_steps
from train.parallel.compiled import Workload, open_compiler
from train.parallel.dropout import QuickDropout
from train.parallel.grad_sync import GradSync
from train.parallel.graphs import Graphs
from train.parallel.precision import (
    AUTOCAST,
    check_precision,
    pick_precision,
    set_deterministic,
)

if TYPE_CHECKING:
    from train.data.batches.loader import Batch
    from train.models.network import Network

logger = logging.getLogger("train")
EXACT_RANKS = 2  # the sum of two numbers does not depend on their order


class DDP(Backend):
    """A CPU or a CUDA device. DistributedDataParallel reduces gradients, and BucketSync those of recorded steps."""

    name = "ddp"

    def __init__(self, cfg: BackendConfig, *, work: Workload | None = None) -> None:
        super().__init__()
        world = self.world
        self.device = pick_device(cfg.device, world.local_rank, world.local_size)
        self.is_cuda = self.device.type == "cuda"
        self.keeps_gradients = False  # whether they are views of tensors that are sent
        self.precision = pick_precision(cfg.precision, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.adamw = {"fused": True}
        self.pin_memory = self.is_cuda
        self.skips_on_device = self.is_cuda  # so that the host does not wait for the norm
        self.device_name = "cpu"
        self.monitor_kind = "cpu"
        self.timeout_s = cfg.timeout_s or DEFAULT_TIMEOUT_S
        self.compresses = cfg.grad_compression == "bf16"
        self.recomputes = cfg.activation_checkpointing
        self.deterministic = self.is_cuda and cfg.deterministic
        self.captures = captures_steps(cfg, self.device, self.precision)
        self.must_capture = cfg.cuda_graphs is True
        if self.is_cuda:
            self.open_gpu()
        else:
            keep_freed_memory()
        if world.is_distributed:
            backends = "cpu:gloo,cuda:nccl" if self.is_cuda else "gloo"
            rendezvous.join(backends, timeout_s=self.timeout_s)
            rendezvous.check_alike(world, f"ddp on {self.device.type}, {self.precision}")
        self.compiler = open_compiler(cfg, self.device.type, work or Workload(), world)
        # If True, batches without padding lose their attention mask: a compiled model would need another graph.
        self.drops_masks = self.compiler is None
        self.compiled_norms: Sequence[RemovableHandle] = ()  # hooks, removed if compilation fails

    @property
    def narrows_norms(self) -> bool:
        """True if norms, which compute in fp32, return bf16: compiled models then need a third less memory traffic."""
        return self.is_cuda and self.compiler is not None and self.precision == "bf16"

    def open_gpu(self) -> None:
        self.work = CudaWork()
        self.span = CudaWork()
        self.device_name = torch.cuda.get_device_name(self.device)
        self.monitor_kind = "nvidia"
        torch.cuda.set_device(self.device)
        if self.deterministic:
            set_deterministic(True)
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")

    def setup_model(self, model: Any, *, accumulation: int = 1, lengths: int = 1) -> None:
        tied = guards.tied_names(model)
        self.place(model)
        guards.tie(model, tied)
        if self.skips_on_device:
            counts_on = self.device
        else:
            counts_on = torch.device("cpu")
        self.skips = nonfinite.Skips(counts_on, self.to_host)
        if self.narrows_norms:
            self.compiled_norms = model.narrow_norms(torch.bfloat16)
        if self.compiler is not None:
            is_narrow = self.precision in AUTOCAST and not self.narrows_norms
            if self.is_cuda:
                model.join_projections()
            # Small layers may become one graph together, unless this would delay reductions between machines.
            self.compiler.compile(
                model,
                one_graph=self.world.num_machines == 1 and not self.captures,
                widens=self.is_cuda and is_narrow,
            )
            self.compiler.expect(lengths)
            self.compiles = self.compiler.what
        if self.recomputes:
            model.recompute_layers(partial(checkpoint, use_reentrant=False))

    def leave_out_padding(self, model: nn.Module) -> None:
        # GPUs would wait for the places of tokens, and compiled layers need a graph for each number of tokens.
        if not self.is_cuda and self.compiler is None and is_network(model):
            model.leave_out_padding()

    def place(self, model: nn.Module) -> None:
        """Move a model to the device. Raises InputError if its code does not run in this backend's precision."""
        check_precision(model, self.precision)
        model.to(self.device)
        if not is_network(model):
            return
        model.keep_relative_positions()
        if self.is_cuda:
            model.align_logits()
            model.widen_transforms()
        elif self.precision == "bf16":
            # SDPA's backward pass takes four times as long there (benchmarks/notes.md).
            model.attend_by_products(torch.bfloat16)

    def compile_loss(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if self.compiler is None:
            return loss
        return self.compiler.compile_loss(loss)

    def try_graphs(self, micro_batch: Callable[[], object]) -> None:
        if self.compiler is None or not self.compiler.is_trial:
            return
        if self.is_cuda:
            devices = [self.device]
        else:
            devices = []
        with torch.random.fork_rng(devices):
            self.compiler.try_first(micro_batch, self.world)
        if not self.compiler.is_on:  # continue as a run that never compiles
            self.drops_masks = True
            for hook in self.compiled_norms:
                hook.remove()

    def grad_sync(self, model: nn.Module, *, accumulation: int) -> GradSync:
        if self.world.size == 1:
            return GradSync(model, self.device)
        # DDP's hooks run on the stream on which it was built, and cannot be recorded. After its first step, DDP moves
        # gradients to other buckets, in which gloo adds those of more than two ranks in another order: on CPUs, a
        # resumed run would not be the uninterrupted one, bit for bit.
        self.keeps_gradients = self.captures or (
            not self.is_cuda and self.world.size > EXACT_RANKS
        )
        if self.keeps_gradients:
            return BucketSync(model, self.device, self.world, compresses=self.compresses)
        return DDPSync(
            model, self.device, self.world.size, accumulation, compresses=self.compresses
        )

    def all_reduce(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def mesh(self, num_shards: int) -> DeviceMesh:
        sizes = (self.world.size // num_shards, num_shards)
        if sizes[0] == 1:
            return init_device_mesh(self.device.type, (num_shards,))
        with without_stdout():  # gloo prints how many ranks have connected
            return init_device_mesh(self.device.type, sizes, mesh_dim_names=("copies", "shards"))

    def subgroup(self, ranks: list[int]) -> dist.ProcessGroup:
        with without_stdout():  # gloo prints how many ranks have connected
            group: dist.ProcessGroup = dist.new_group(
                ranks, timeout=timedelta(seconds=self.timeout_s)
            )
        return group

    def to_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            inputs = {
                name: value.to(self.device, non_blocking=True)
                for name, value in batch["inputs"].items()
            }
            mask = inputs.get("attention_mask")
            if self.drops_masks and mask is not None and mask.numel() == batch["tokens"]:
                # It hides nothing, and CUDA's fastest attention accepts no mask.
                del inputs["attention_mask"]
            yield {**batch, "inputs": inputs}

    @contextmanager
    def autocast(self) -> Iterator[None]:
        dtype = AUTOCAST.get(self.precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None), self.dropout():
            yield

    def dropout(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes in which dropout is quick, where it can be."""
        # layers that are computed again, outside this context, must drop the same elements
        is_eager = self.compiler is None and not self.recomputes
        if is_eager and not self.is_cuda and self.precision == "bf16":
            return QuickDropout()
        return nullcontext()

    def ready(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        guards.check_owned(optimizer, parameters)

    def unscale(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self.scaler.unscale_(optimizer)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor
    ) -> None:
        self.update(optimizer, norm, keeps_gradients=self.keeps_gradients)
        self.end_step()

    def update(
        self, optimizer: torch.optim.Optimizer, norm: Tensor, *, keeps_gradients: bool = False
    ) -> None:
        """Take a step or skip it. Then free the gradients, or with `keeps_gradients` set them to zero in place."""
        nonfinite.step_if_finite(optimizer, norm, on_device=self.skips_on_device)
        self.skips.see(norm, overflowed=self._rescale())
        optimizer.zero_grad(set_to_none=not keeps_gradients)

    def end_step(self) -> None:
        if self.compiler is not None:
            self.compiler.budget.check()

    def _rescale(self) -> Tensor | None:
        """Adjust the loss scale. Returns True [1] if a scale above 1 was halved: it may have caused the overflow."""
        if not self.scaler.is_enabled():
            return None
        one = torch.ones(1, device=self.device)
        before = self.scaler.scale(one)  # a tensor on the device; get_scale() would wait for it
        self.scaler.update()
        return (self.scaler.scale(one) < before) & (before > 1)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach().cpu() for tensor in tensors]

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)  # does not wait if the buffers are page-locked
        if self.is_cuda:
            torch.cuda.synchronize()

    def is_compiling(self) -> bool:
        return self.compiler is not None and self.compiler.is_busy()

    def graphs(self) -> Graphs:
        if self.compiler is None:
            return Graphs()
        return self.compiler.graphs()

    def close(self) -> None:
        if self.compiler is not None:
            self.compiler.close()
        if self.deterministic:
            set_deterministic(False)
        super().close()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed + RANK_STRIDE * (self.world.rank + 1))  # seeds all devices

    def rng_state(self) -> State:
        state = {"cpu": torch.get_rng_state()}
        if self.is_cuda:
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: State) -> None:
        torch.set_rng_state(state["cpu"])
        if self.is_cuda and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


class DDPSync(GradSync):
    """A reduction by DistributedDataParallel, which averages gradients in the step's last backward pass."""

    adds_counts = True

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        world_size: int,
        accumulation: int,
        *,
        compresses: bool,
    ) -> None:
        super().__init__(model, device)
        self.world_size = world_size
        self.replica = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            # Gradients are views of the buckets that are sent: no copy, less memory.
            gradient_as_bucket_view=True,
            # Graphs are static in all tasks, but torch forbids this with no_sync.
            static_graph=accumulation == 1,
        )
        # Buffers are constant. The argument is deprecated since PyTorch 2.13.
        self.replica.broadcast_buffers = False
        self.module = self.replica
        if compresses:
            self.replica.register_comm_hook(None, bf16_compress_hook)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if is_last:
            return nullcontext()
        return self.replica.no_sync()

    def reduce(self) -> Tensor:
        # DDP averages gradients over the ranks, so the count is averaged too.
        return super().reduce() / self.world_size


class CudaWork(Work):
    """A timer of this rank's work on the device's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self.events.append((begin, end))

    def take_s(self) -> float:
        # Wait until the timed work has ended.
        if self.events:
            self.events[-1][1].synchronize()
        taken_s = sum(begin.elapsed_time(end) for begin, end in self.events) / 1000
        self.events.clear()
        return taken_s


def is_network(model: nn.Module) -> TypeGuard[Network]:
    from train.models.network import Network  # late: it imports transformers

    return isinstance(model, Network)


def pick_device(name: str, local_rank: int, local_world_size: int) -> torch.device:
    check(name != "neuron", "backend=ddp runs on CPUs and GPUs; set backend=xla on trn1")
    if name == "auto" and torch.cuda.is_available():
        name = "cuda"
    elif name == "auto":
        name = "cpu"
        check_no_idle_gpu()
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    check(
        count > 0, "backend.device=cuda, but PyTorch sees no CUDA device; use backend.device=cpu"
    )
    check(
        local_world_size <= count,
        f"{local_world_size} ranks on this machine, but PyTorch sees {count} CUDA devices; "
        f"start torchrun with --nproc-per-node={count}",
    )
    return torch.device("cuda", local_rank)


def check_no_idle_gpu() -> None:
    """Raise InputError if a run would use the CPU of an EC2 GPU instance; warn on other machines with a GPU."""
    if not host.nvidia_gpus():
        return
    fault = "has an NVIDIA GPU that PyTorch cannot use: no driver is loaded, or this PyTorch was built without CUDA"
    kind = host.instance_type()
    check(
        not host.is_ec2_type(kind),
        f"this {kind} {fault}; see baretrain doctor, or set backend.device=cpu to train on the CPU",
    )
    logger.warning("this machine %s; training on the CPU", fault)
