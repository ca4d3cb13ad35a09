"""Pipeline parallelism: each rank holds some of the layers, and micro batches pass through the ranks in turn.

The schedules are those of torch.distributed.pipelining: GPipe (https://arxiv.org/abs/1811.06965), 1F1B, and 1F1B with
several parts of the model on each rank (https://arxiv.org/abs/2104.04473). All ranks of a pipeline read the same rows,
so that they exchange only hidden states and their gradients. Several pipelines are data-parallel replicas: rank =
replica * stages + stage. This keeps the ranks of a pipeline consecutive, so that they can be on one machine.

A weight that several ranks use (ALBERT's shared layer, an embedding tied to the head) is on all of these ranks. Its
gradient is summed over them, and over all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from train.config import OptimConfig, ParallelConfig, PipelineConfig, check
from train.config.parallel import check_shards
from train.models.chain import Chain
from train.models.network import Network
from train.parallel import guards
from train.parallel.backend import all_reduce_flat
from train.parallel.data import scale
from train.parallel.engines import Engine
from train.parallel.grad_sync import GradSync, gradients_of
from train.parallel.guards import replace
from train.parallel.optim import (
    build_optimizer,
    load_state,
    parameter_groups,
    parameters_of,
    part_of,
)

if TYPE_CHECKING:
    from train.data.batches.loader import Batch
    from train.parallel.backend import Backend, State
    from train.parallel.engines import LossFunction, Statistics
    from train.parallel.pieces import Tensors

SCHEDULES: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def build(cfg: ParallelConfig, *args: Any, **options: Any) -> Pipeline:
    assert isinstance(cfg, PipelineConfig)
    return Pipeline(cfg, *args, **options)


class Part(nn.Module):
    """Some consecutive layers of a model. The first part also has the embeddings, the last the head and the loss."""

    def __init__(
        self, backend: Backend, chain: Chain, layers: range, model: nn.Module, loss: LossFunction
    ) -> None:
        super().__init__()
        self.backend = backend
        self.chain = chain
        self.layers = layers
        self.model = model
        self.loss = loss

    def forward(self, received: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the loss sum [1] of a micro batch if this is the last part, otherwise hidden states [B, S, H]."""
        output = self.run(self.loss, received, inputs)
        # the whole part is frozen, but a gradient will arrive
        if not output.requires_grad and torch.is_grad_enabled():
            output.requires_grad_()
        if output.ndim == 0:
            return torch.stack([output])
        return output

    def run(
        self, function: Statistics, received: Tensor | None, inputs: dict[str, Tensor]
    ) -> Tensor:
        """Return the result of `function` if this is the last part, otherwise hidden states [B, S, H] in float32."""
        with self.backend.autocast():
            output = self.chain.run(self.layers, received, lambda: function(self.model, inputs))
        return output.float().contiguous()


class Stage(PipelineStage):
    """A part of the model in a schedule. Its passes are timed: the rest of a step's time is the pipeline's bubble."""

    submod: Part

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.submod.backend.work.timed():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.submod.backend.work.timed():
            return super().backward_one_chunk(*args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no start-up messages: only PyTorch 2.9 sends them, as 8 bytes into a 4-byte buffer; gloo aborts."""
        return []


class Pipeline(Engine):
    """The engine of a pipeline's rank, which holds some of the layers and runs their passes by a schedule."""

    def __init__(
        self,
        cfg: PipelineConfig,
        optim: OptimConfig,
        backend: Backend,
        model: Any,
        loss: LossFunction,
        *,
        accumulation: int,
        lengths: int = 1,
    ) -> None:
        self.cfg = cfg
        self.backend = backend
        self.model = model
        self.loss = loss
        self.data_rank, self.stage = divmod(backend.world.rank, cfg.stages)
        self.data_size = backend.world.size // cfg.stages
        self.max_grad_norm = optim.max_grad_norm
        check_shards("parallel=pipeline", backend=backend.name, precision=backend.precision)
        self.chain, self.layers = cut(model, cfg)
        self.holders = self._holders()
        head = model.head_parameters()
        self.number(optim, head)
        held = {name for name, stages in self.holders.items() if self.stage in stages}
        hold(backend, model, held, lengths=lengths)
        self.chain.divide()
        own = self.own()
        self.parameters = list(own.values())
        self.optimizer = build_optimizer(optim, self.parameters, adamw=backend.adamw, head=head)
        self.pipeline, sums = self._groups(own)
        self.sync = PipelineSync(model, backend.device, sums, counts=self.stage == 0)
        # The norm counts each weight once, on the first stage that holds it.
        self.counted = [own[name] for name in own if self.holders[name][0] == self.stage]
        self.parts = {
            number: Part(backend, self.chain, self.layers[number], model, loss)
            for number in range(self.stage, cfg.num_parts, cfg.stages)
        }
        self.schedules: dict[torch.Size, Any] = {}
        self.loss_sum = torch.zeros(1).to(backend.device)

    def _holders(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that hold each parameter, by the first of its names."""
        users = self.chain.users(self.layers)
        stages = self.cfg.stages
        return {
            name: tuple(sorted({number % stages for number in users[parameter]}))
            for name, parameter in self.model.named_parameters()
        }

    def number(self, optim: OptimConfig, head: list[nn.Parameter]) -> None:
        """Assign trained parameters their indices in an optimizer of the whole model. Call this before it is split.

        Raises InputError if a stage has no parameter to train.
        """
        trained = {
            parameter: name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        groups = parameter_groups(optim, trained, head)
        order = [trained[parameter] for group in groups for parameter in group["params"]]
        self.numbers = {name: number for number, name in enumerate(order)}
        for stage in range(self.cfg.stages):
            check(
                any(stage in self.holders[name] for name in self.numbers),
                f"parallel.stages={self.cfg.stages}: all weights of stage {stage} are frozen; lower "
                "model.freeze_layers, or parallel.stages",
            )

    def own(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this stage trains, by name, in the same order on all ranks."""
        return {
            name: weight
            for name, weight in self.model.named_parameters()
            if name in self.numbers and self.stage in self.holders[name]
        }

    def _groups(self, own: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Return the process group of this rank's pipeline, and the `sums` for `PipelineSync`."""
        stages = self.cfg.stages
        firsts = range(0, self.data_size * stages, stages)  # each replica's first rank
        pipelines = []
        for first in firsts:
            ranks = list(range(first, first + stages))
            pipelines.append(self.backend.subgroup(ranks))
        sums = []
        for held_by in sorted({self.holders[name] for name in self.numbers}):
            ranks = [first + stage for first in firsts for stage in held_by]
            if len(ranks) == 1:
                continue
            group = self.backend.subgroup(ranks)  # all ranks must call this
            weights = [weight for name, weight in own.items() if self.holders[name] == held_by]
            if weights:
                sums.append((group, weights, len(held_by) > 1))
        pipeline = pipelines[self.data_rank]
        # NCCL must connect all ranks of a group before two of them exchange messages.
        dist.all_reduce(torch.zeros(1, device=self.backend.device), group=pipeline)
        return pipeline, sums

    # ---- a step ----------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        losses: list[Tensor] = []
        inputs = batch["inputs"]
        tokens = inputs["input_ids"]
        if tokens.shape not in self.schedules:
            rows, seq_len = tokens.shape
            rows //= self.cfg.micro_batches
            self.schedules[tokens.shape] = self._schedule(rows, seq_len)
        try:
            with self.backend.span.timed():
                self.schedules[tokens.shape].step(target=tokens, losses=losses, **inputs)
        except RuntimeError as error:
            # the library wraps exceptions of a forward pass
            raise (error.__cause__ or error) from None
        if losses:
            self.loss_sum += torch.cat(losses).detach().sum()

    def _schedule(self, rows: int, seq_len: int) -> Any:
        """Return the schedule for micro batches [rows, seq_len].

        Shapes are passed explicitly. To infer them, the library would run the parts, which draws random numbers.
        """
        num_parts = self.cfg.num_parts
        device = self.backend.device
        shape = (rows, seq_len, self.chain.network.config.hidden_size)
        # otherwise newer PyTorch sends no gradient
        hidden = torch.empty(shape, device="meta", requires_grad=True)
        stages = [
            Stage(
                part,
                number,
                num_parts,
                device,
                input_args=(hidden,) if number else (),
                output_args=(hidden,) if number < num_parts - 1 else (hidden.new_empty(1),),
                group=self.pipeline,
            )
            for number, part in self.parts.items()
        ]
        options = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if self.cfg.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, self.cfg.micro_batches, **options)  # type: ignore[arg-type]
        return SCHEDULES[self.cfg.schedule](*stages, self.cfg.micro_batches, **options)

    @torch.no_grad()
    def clip(self, divisor: Tensor) -> Tensor:
        # The norm covers all stages. Every rank adds the same numbers in the same order, so that a weight remains
        # bitwise equal on all ranks that hold it, and all ranks skip the same steps.
        squares = torch.zeros(self.cfg.stages, dtype=torch.float64, device=self.backend.device)
        if self.data_rank == 0:
            own = nn.utils.get_total_norm(gradients_of(self.counted))
            squares[self.stage] = own.double().square()
        dist.all_reduce(squares)
        norm = squares.sum().sqrt()
        gradients = gradients_of(self.parameters)
        return scale(gradients, norm, divisor, self.max_grad_norm).float()

    def evaluate(self, statistics: Statistics, inputs: dict[str, Tensor]) -> Tensor | None:
        # Batches pass through the parts one at a time. The last rank of each pipeline computes the statistics.
        output = None
        shape = (*inputs["input_ids"].shape, self.chain.network.config.hidden_size)
        for number, part in self.parts.items():
            received = None
            if number:
                received = torch.empty(shape, device=self.backend.device)
                self._send(dist.irecv, received, number - 1)
            output = part.run(statistics, received, inputs)
            if number < self.cfg.num_parts - 1:
                self._send(dist.isend, output, number + 1)
                output = None
        return output

    def _send(self, way: Callable[..., Any], hidden: Tensor, part: int) -> None:
        """Exchange hidden states with the rank of a part, as the schedules do: NCCL then uses the same communicator."""
        stages = self.cfg.stages
        rank = self.data_rank * stages + part % stages
        sent = dist.P2POp(way, hidden, rank, self.pipeline)
        for sending in dist.batch_isend_irecv([sent]):
            sending.wait()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, State]:
        if self.data_rank != 0:
            return {}
        # The first stage that holds a weight saves it. Stage 0 saves everything else.
        first = {weight: self.holders[name][0] for name, weight in self.model.named_parameters()}
        # keep_vars returns the parameters themselves, so tied names get the same object.
        state = self.model.state_dict(keep_vars=True)
        weights = {
            name: value for name, value in state.items() if first.get(value, 0) == self.stage
        }
        moments = {}
        for name, weight in self.own().items():
            if first[weight] == self.stage:
                moments[self.numbers[name]] = self.optimizer.state[weight]
        optimizer: State = {"state": dict(sorted(moments.items()))}
        if self.stage == 0:
            numbers = list(range(len(self.numbers)))
            optimizer["param_groups"] = [{"params": numbers}]
        return {"model": weights, "optimizer": optimizer}

    def load(self, model: Tensors, optimizer: State) -> None:
        own = {
            name: model[name]
            for name, value in self.model.state_dict().items()
            if value.device.type != "meta"
        }
        self.model.load_state_dict(own, strict=False)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        mine = [self.numbers[names[weight]] for weight in parameters_of(self.optimizer)]
        load_state(self.optimizer, part_of(optimizer, mine, total=len(self.numbers)))

    def gather_full_model(self) -> None:
        if self.data_rank != 0:
            return
        rank = self.backend.world.rank
        full: dict[nn.Parameter, nn.Parameter] = {}
        for name, weight in self.model.named_parameters():
            source = self.holders[name][0]  # the stage's rank in the first pipeline
            if source == 0:
                continue
            if rank == source:
                dist.send(weight.detach().cpu(), 0)
            elif rank == 0:
                tensor = torch.empty(weight.shape, dtype=weight.dtype)
                dist.recv(tensor, source)
                full[weight] = nn.Parameter(tensor, weight.requires_grad)  # on the host
        named = list(self.model.named_parameters(remove_duplicate=False))
        replace(self.model, {name: full[weight] for name, weight in named if weight in full})

    def check_replicas(self) -> None:
        # A few weights of each stage, and a few that several stages hold, are compared on all ranks that hold them.
        held = []
        shared = []
        for name, weight in self.model.named_parameters():
            if weight.is_meta:
                continue
            held.append(weight)
            if len(self.holders[name]) > 1:
                shared.append(weight)
        few = guards.smallest(held) + guards.smallest(shared)
        guards.check_same(self.backend, self.model, few)


class PipelineSync(GradSync):
    """A reduction that sums a gradient over all ranks that hold the weight, and label counts over all pipelines."""

    count_type = torch.float64  # like the norm in `clip`
    adds_counts = True

    def __init__(
        self, model: nn.Module, device: torch.device, sums: list[Any], *, counts: bool
    ) -> None:
        """Store `sums`, tuples (group, weights, whether several stages hold them). `counts`: if True, count labels."""
        super().__init__(model, device)
        self.sums = sums
        self.counts = counts

    def begin(self, count: float) -> None:
        # All ranks of a pipeline have the same rows, so only its first stage counts labels.
        super().begin(count if self.counts else 0.0)

    @torch.no_grad()
    def reduce(self) -> Tensor:
        for group, weights, is_shared in self.sums:
            # A missing gradient is sent as zeros if other stages hold the weight, too. Otherwise it is left out.
            if is_shared:
                for weight in weights:
                    if weight.grad is None:
                        weight.grad = torch.zeros_like(weight)
            held = [weight for weight in weights if weight.grad is not None]
            if not held:
                continue
            totals = all_reduce_flat(gradients_of(held), group)
            for weight, total in zip(held, totals, strict=True):
                weight.grad = total
        return super().reduce()


def cut(model: Any, cfg: PipelineConfig) -> tuple[Chain, list[range]]:
    """Return the chain of a model's layers, and the range of each part. Raises InputError if there are too few."""
    check(
        isinstance(model, Network),
        f"parallel=pipeline splits transformers' encoders, not a {type(model).__name__}",
    )
    chain = Chain(model)
    cfg.check_layers(len(chain.layers))
    return chain, chain.cut(cfg.num_parts)


def hold(backend: Backend, model: nn.Module, names: set[str], *, lengths: int) -> None:
    """Move only the parameters `names` of a model to the device. The others move to "meta" and need no memory."""
    kept = {parameter for name, parameter in model.named_parameters() if name in names}
    named = model.named_parameters(remove_duplicate=False)
    absent = {name: parameter for name, parameter in named if parameter not in kept}
    metas = {}
    for parameter in absent.values():
        meta = parameter.detach().to("meta")
        metas[parameter] = nn.Parameter(meta, parameter.requires_grad)
    # moved instead of absent weights; those on "meta" cannot be moved
    no_numbers = nn.Parameter(torch.empty(0))
    replace(model, dict.fromkeys(absent, no_numbers))
    backend.setup_model(model, lengths=lengths)
    replace(model, {name: metas[parameter] for name, parameter in absent.items()})
