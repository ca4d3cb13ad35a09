"""Fully sharded data parallelism: every rank holds a shard of each weight, gradient and moment.

It is for models that do not fit on one device. See ZeRO, https://arxiv.org/abs/1910.02054, and PyTorch's `fully_shard`.
With several machines, each machine holds a whole copy in shards if it has the memory, so that weights never cross the
network between machines. Only gradients do, once per step. See hybrid sharding in https://arxiv.org/abs/2304.11277.

A layer's weights are all-gathered for its forward and backward passes and freed afterwards. Gradients are
reduce-scattered. If one layer is shared over the whole depth, it is always in use, so the model is gathered as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from train.config import FSDPConfig, OptimConfig, ParallelConfig, check
from train.config.backend import CUDA
from train.config.parallel import check_shards
from train.machine.memory import total_memory_bytes
from train.models.memory_estimate import OPTIMIZER_BYTES
from train.parallel import data, guards
from train.parallel.data import DataParallel, scale
from train.parallel.grad_sync import GradSync
from train.parallel.pieces import Tensors, piece

if TYPE_CHECKING:
    from train.parallel.backend import Backend, State

logger = logging.getLogger("train")
EMPTY = torch.empty(0)
STATE_BYTES = 4 + OPTIMIZER_BYTES  # of a weight, its gradient and moments


def build(
    cfg: ParallelConfig, optim: OptimConfig, backend: Backend, *args: Any, **options: Any
) -> DataParallel:
    assert isinstance(cfg, FSDPConfig)
    check_shards("parallel=fsdp", backend=backend.name, precision=backend.precision)
    if backend.world.size == 1:
        # a single rank holds the whole model
        return data.build(cfg, optim, backend, *args, **options)
    check(
        not backend.must_capture,
        "backend.cuda_graphs=true does not work with parallel=fsdp on several ranks; leave it out",
    )
    return FSDP(optim, backend, *args, cfg=cfg, **options)


class FSDP(DataParallel):
    """The engine in which every rank holds some rows of each weight, gradient and moment."""

    def __init__(
        self, optim: Any, backend: Backend, model: Any, *args: Any, cfg: FSDPConfig, **options: Any
    ) -> None:
        self.cfg = cfg
        self.num_shards = shards_of(cfg, backend, model)
        self.mesh = backend.mesh(self.num_shards)
        self.placements: list[Placement] = [Shard(0)]
        if self.mesh.ndim > 1:
            self.placements = [Replicate(), Shard(0)]
        # Weights are compared now, because no two ranks hold the same rows after sharding.
        guards.check_same(backend, model, guards.smallest(model.parameters()))
        # `half` is the dtype in which weights are gathered and used; None leaves it unchanged.
        half = torch.bfloat16 if backend.precision == "bf16" else None
        policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # The model is sharded before it moves to the device, which therefore needs space for only one whole layer.
        layers: Any = model.separate_layers()
        for layer in layers:
            fully_shard(
                layer,
                mesh=self.mesh,
                reshard_after_forward=cfg.reshard_after_forward,
                mp_policy=policy,
            )
        for layer, following in pairwise(layers):
            # gathered while `layer` computes, even if the host launches kernels late
            layer.set_modules_to_forward_prefetch([following])
        fully_shard(model, mesh=self.mesh, reshard_after_forward=False, mp_policy=policy)
        super().__init__(optim, backend, model, *args, **options)

    def build_sync(self, accumulation: int) -> GradSync:
        return ShardSync(self.model, self.backend.device)

    @torch.no_grad()
    def clip(self, divisor: Tensor) -> Tensor:
        gradients = local_parts(weight.grad for weight in self.parameters)
        square = nn.utils.get_total_norm(gradients).square().reshape(1)
        self.backend.all_reduce([square])
        square /= self.data_size // self.num_shards
        norm = square.sqrt().reshape(())
        return scale(gradients, norm, divisor, self.max_grad_norm)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        smallest = guards.smallest(self.model.parameters())
        parts = self.backend.to_host(local_parts(smallest))
        sums = [float(part.double().sum()) for part in parts]
        every = self.backend.world.gather(sums)
        for rank, others in enumerate(every):
            first = rank % self.num_shards
            if others != every[first]:
                raise RuntimeError(
                    f"rank {rank} has other weights than rank {first}, which holds the same rows: a reduction of "
                    "gradients did not reach it"
                )

    def state(self) -> dict[str, State]:
        if self.data_rank >= self.num_shards:
            return {}  # a rank of the first machine holds the same rows
        local = self.local_state_dict()
        moments = {index: self._pieces(own) for index, own in local["optimizer"]["state"].items()}
        optimizer = {"state": moments}
        if self.data_rank == 0:
            optimizer = {**local["optimizer"], "state": moments}
        return {"model": self._pieces(local["model"]), "optimizer": optimizer}

    def load(self, model: Tensors, optimizer: State) -> None:
        own = self.model.state_dict()
        weights = {}
        for name in model:
            is_split = isinstance(own.get(name), DTensor)
            if is_split:
                weights[name] = self._part(model, name)
            else:
                weights[name] = model[name]
        moments = {
            index: {name: self._part(state, name) for name in state}
            for index, state in optimizer["state"].items()
        }
        super().load(Tensors({"own": weights}), {**optimizer, "state": moments})

    def gather_full_model(self) -> None:
        whole = self._whole(self.model.state_dict(keep_vars=True))  # empty on other ranks
        guards.replace(self.model, {name: nn.Parameter(weight) for name, weight in whole.items()})

    def _whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors one at a time. Returns them on rank 0's host, with ties; {} on other ranks."""
        copies: dict[int, Tensor] = {}
        for part in parts.values():
            if id(part) in copies:
                continue
            if isinstance(part, DTensor):
                whole = part.full_tensor()
            else:
                whole = part
            copies[id(part)] = EMPTY
            if self.data_rank == 0:
                copies[id(part)] = self.backend.to_host([whole])[0]
        if self.data_rank > 0:
            return {}
        return {name: copies[id(part)] for name, part in parts.items()}

    def _pieces(self, parts: Mapping[str, Tensor]) -> State:
        """Return this rank's rows of each tensor; tied names share them. Only rank 0 returns unsharded tensors."""
        pieces: dict[str, Any] = {}
        rows: dict[int, Tensor] = {}
        for name, part in parts.items():
            if isinstance(part, DTensor):
                own = rows.setdefault(id(part), part.to_local().detach())
                if len(own):
                    pieces[name] = piece(own, self._own_rows(len(part)).start, len(part))
            elif self.data_rank == 0:
                pieces[name] = part
        return pieces

    def _own_rows(self, num_rows: int) -> slice:
        return rows_of(self.data_rank % self.num_shards, num_rows, self.num_shards)

    def _part(self, tensors: Tensors, name: Any) -> Tensor:
        """Copy this rank's rows of a saved tensor, so that its file can be unmapped. Return scalars as they are."""
        shape = tensors.shape(name)
        if not shape:
            return tensors[name]
        own = self._own_rows(shape[0])
        rows = tensors.rows(name, own).clone()
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(rows, self.mesh, self.placements, shape=shape, stride=stride)


class ShardSync(GradSync):
    """A reduce-scatter of the gradients: each rank gets the sums for its rows."""

    adds_counts = True

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__(model, device)
        for module in split_modules(model):  # sum instead of average: gloo cannot average
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        for module in split_modules(self.module):
            module.set_requires_gradient_sync(is_last, recurse=False)
        return nullcontext()


def shards_of(cfg: FSDPConfig, backend: Backend, model: nn.Module) -> int:
    """Return how many ranks share one copy of the weights: those of a machine if they have the memory, else all."""
    world = backend.world
    if backend.device.type == CUDA:
        device_bytes = torch.cuda.get_device_properties(backend.device).total_memory
    else:
        device_bytes = total_memory_bytes() // world.local_size
    state_bytes = STATE_BYTES * sum(weight.numel() for weight in model.parameters())
    filled = state_bytes / device_bytes
    own = cfg.num_holders(world.size, world.local_size, devices_filled=filled)
    # all ranks must shard alike, even if machines differ
    everywhere = set(world.all_gather_object((own, world.local_size)))
    if len(everywhere) > 1:
        return world.size
    if own < world.size:
        logger.info(
            "parallel=fsdp: each of %d machines holds a whole copy, in %d shards",
            world.num_machines,
            own,
        )
    return own


def local_parts(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return this rank's rows of the sharded tensors."""
    return [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]


def rows_of(rank: int, num_rows: int, num_ranks: int) -> slice:
    """Return the rows of a tensor that a rank holds under fully_shard."""
    share = -(-num_rows // num_ranks)  # the last ranks may have fewer rows or none
    begin = min(rank * share, num_rows)
    end = min(begin + share, num_rows)
    return slice(begin, end)


def split_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules to which `fully_shard` was applied. The weights of each are gathered together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
