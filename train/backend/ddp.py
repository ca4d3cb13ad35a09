"""PyTorch DDP: gloo between CPUs, NCCL between CUDA devices; a single process, with or without torchrun, as well."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import BackendConfig, check, launched_rank, launched_world_size

if TYPE_CHECKING:
    from train.backend import State
    from train.data.batches import Batch

RANK_STRIDE = 1_000_003  # a prime: seeds of neighbouring runs and ranks do not meet


class DDP:
    """See `train.backend.Backend`."""

    name = "ddp"

    def __init__(self, cfg: BackendConfig) -> None:
        self.rank, self.world_size = launched_rank(), launched_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.device = pick_device(cfg.device, self.local_rank, self.local_world_size)
        is_cuda = self.device.type == "cuda"
        self.pin_memory = is_cuda
        self.device_name = torch.cuda.get_device_name(self.device) if is_cuda else "cpu"
        self.precision = pick_precision(cfg.precision, self.device)
        self.compresses = cfg.grad_compression == "bf16"
        check(is_cuda or not self.compresses, "backend.grad_compression=bf16 needs CUDA; gloo cannot add bf16 numbers")
        self.is_distributed = "RANK" in os.environ
        if is_cuda:
            torch.cuda.set_device(self.device)
        if self.is_distributed:
            names = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
            dist.init_process_group(names, timeout=timedelta(seconds=cfg.timeout_s))
            seen = self.sum([1.0])[0]
            if seen != self.world_size:
                raise RuntimeError(f"{seen:g} ranks answered, WORLD_SIZE says {self.world_size}")

    def wrap(self, model: nn.Module, *, accumulates: bool) -> nn.Module:
        model.to(self.device)
        if not self.is_distributed:
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            broadcast_buffers=False,  # constants (position ids) only
            gradient_as_bucket_view=True,  # gradients live in the buckets that are sent: no copy, less memory
            static_graph=not accumulates,  # true for every task here; torch does not support it with no_sync
        )
        if self.compresses:
            wrapped.register_comm_hook(None, bf16_compress_hook)
        return wrapped

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            inputs = {name: value.to(self.device, non_blocking=True) for name, value in batch["inputs"].items()}
            yield {**batch, "inputs": inputs}

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        if is_last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        norm = nn.utils.clip_grad_norm_(parameters, max_norm if max_norm is not None else float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def sum(self, values: Sequence[float]) -> list[float]:
        if not self.is_distributed:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def gather(self, value: State) -> list[State]:
        if not self.is_distributed:
            return [value]
        found: list[State] | None = [{} for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather_object(value, found)
        return found or []

    def broadcast(self, value: int) -> int:
        return int(self.sum([value if self.rank == 0 else 0])[0])

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed + RANK_STRIDE * (self.rank + 1))  # all devices

    def rng_state(self) -> State:
        state = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: State) -> None:
        torch.set_rng_state(state["cpu"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def save(self, state: State, path: Path) -> None:
        torch.save(to_cpu(state), path)

    def load(self, path: Path) -> State:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def barrier(self) -> None:
        self.sum([0.0])

    def close(self) -> None:
        """Leave the group. The model and optimizer must be out of scope: DDP's wrapper sits in a reference cycle, and
        gloo threads that still hold its tensors at exit abort the process (https://github.com/pytorch/pytorch/pull/179291).
        """
        if self.is_distributed:
            gc.collect()
            self.barrier()
            dist.destroy_process_group()


def pick_device(name: str, local_rank: int, local_world_size: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    check(count > 0, "backend.device=cuda, but this machine shows no CUDA device; use backend.device=cpu")
    check(
        local_world_size <= count,
        f"{local_world_size} ranks on this machine, which shows {count} CUDA devices; "
        f"start torchrun with --nproc-per-node={count}",
    )
    return torch.device("cuda", local_rank)


def pick_precision(name: str, device: torch.device) -> str:
    """`auto` is bf16 where the hardware multiplies it natively: elsewhere it is slower than fp32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        is_native = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        is_native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if is_native else "fp32"


def to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(item) for item in value)
    return value
