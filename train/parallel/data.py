"""Data parallelism: every rank holds the model and sees its share of each batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.backend import guards
from train.config import DataParallelConfig, OptimConfig, ParallelConfig
from train.config.parallel import check_shards
from train.optim import build_optimizer, load_state, set_learning_rate
from train.parallel.clipping import divide_and_clip

if TYPE_CHECKING:
    from train.backend import Backend, Reducer
    from train.data.batches.loader import Batch
    from train.parallel import LossFunction, State, Statistics


def build(cfg: ParallelConfig, optim: OptimConfig, backend: Backend, *args: Any, **options: Any) -> DataParallel:
    if isinstance(cfg, DataParallelConfig) and cfg.shard_optimizer and backend.world.size > 1:
        from train.parallel.sharded_optimizer import ShardedOptimizer  # late: it is made of this engine

        check_shards("parallel.shard_optimizer=true", backend=backend.name, precision=backend.precision)
        return ShardedOptimizer(optim, backend, *args, **options)
    return DataParallel(optim, backend, *args, **options)


class Replica:
    """A model that every rank holds whole, and its optimizer, as checkpoints see them."""

    def __init__(self, backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.backend, self.model, self.optimizer = backend, model, optimizer

    def check_replicas(self) -> None:
        """Compare a few small weights, on the hosts."""
        weights = guards.smallest(self.model.parameters())
        guards.check_same(
            self.backend.world.gather([float(copy.double().sum()) for copy in self.backend.read(weights)])
        )

    def state(self) -> dict[str, State]:
        held = self.held()
        return held if self.backend.world.rank == 0 else {}

    def held(self) -> dict[str, State]:
        """The state, as far as this rank holds it."""
        moments = self.optimizer.state_dict()
        groups = [{"params": group["params"]} for group in moments["param_groups"]]
        scaler = self.backend.scaler
        scale = {"loss_scale": scaler.state_dict()} if scaler.is_enabled() else {}
        # With keep_vars these are the parameters themselves: tied names share one.
        return {
            "model": self.model.state_dict(keep_vars=True),
            "optimizer": {**moments, "param_groups": groups, **scale},
        }

    def load(self, model: Mapping[str, Tensor], optimizer: State) -> None:
        self.model.load_state_dict(model)
        load_state(self.optimizer, optimizer)
        if "loss_scale" in optimizer:
            self.backend.scaler.load_state_dict(optimizer["loss_scale"])

    def assemble(self) -> None:
        """Do nothing: the model of every rank is whole."""


class DataParallel(Replica):
    """See `train.parallel.Engine`."""

    def __init__(
        self,
        optim: OptimConfig,
        backend: Backend,
        model: Any,
        loss: LossFunction,
        *,
        accumulation: int,
        lengths: int = 1,
    ) -> None:
        self.data_rank, self.data_size = backend.world.rank, backend.world.size
        self.max_grad_norm = optim.max_grad_norm
        backend.move(model)
        self.reducer = self.build_reducer(backend, model, accumulation=accumulation, lengths=lengths)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = self.build_optimizer(optim, backend, model.head_parameters())
        super().__init__(backend, model, optimizer)
        self.loss = loss
        self.loss_sum = torch.zeros(1).to(backend.device)

    def build_reducer(self, backend: Backend, model: nn.Module, *, accumulation: int, lengths: int) -> Reducer:
        return backend.reducer(model, accumulation=accumulation, lengths=lengths)

    def build_optimizer(self, optim: OptimConfig, backend: Backend, head: list[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(optim, self.parameters, adamw=backend.adamw, head=head)

    def ready(self) -> None:
        self.backend.ready(self.optimizer, self.parameters)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, count: float, lr: float) -> None:
        set_learning_rate(self.optimizer, lr)
        self.reducer.begin(count)

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        with self.reducer.micro_batch(is_last=is_last):  # XLA may end a graph here
            self._add_gradients(batch)

    def _add_gradients(self, batch: Batch) -> None:
        # This is a function so that none of its tensors is alive when XLA ends a graph: all graphs are alike.
        with self.backend.work.timed(), self.backend.autocast():
            loss_sum = self.loss(self.reducer.module, batch["inputs"])
        self.backend.scaler.scale(loss_sum).backward()
        self.loss_sum += loss_sum.detach()

    def reduce_and_clip(self) -> Tensor:
        divisor = self.reducer.finish()
        self.backend.unscale(self.optimizer, self.parameters)
        return self.clip(divisor)

    def clip(self, divisor: Tensor) -> Tensor:
        """Divide and clip the gradients. Returns their norm in between, []."""
        return divide_and_clip(self.parameters, divisor, self.max_grad_norm)

    def optimizer_step(self, norm: Tensor) -> None:
        self.backend.optimizer_step(self.optimizer, self.parameters, norm)

    def take_loss(self) -> float:
        taken = float(self.backend.read([self.loss_sum])[0])
        # The tensor stays and is filled from the host: a new one, or zeros made on the device, would change the graph.
        self.loss_sum.copy_(torch.zeros(1))
        return taken

    def evaluate(self, statistics: Statistics, inputs: dict[str, Tensor]) -> Tensor:
        with self.backend.autocast():  # a new one for each batch: casts that outlive it would change the next graph
            return statistics(self.model, inputs)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def held(self) -> dict[str, State]:
        held = super().held()
        return {**held, "optimizer": {**held["optimizer"], **self.reducer.state()}}

    def load(self, model: Mapping[str, Tensor], optimizer: State) -> None:
        super().load(model, optimizer)
        self.reducer.load(optimizer.get("compression", {}))
