"""The parts of a model that a rank of a pipeline holds, and the rank's share of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.config import OptimConfig, PipelineConfig, check
from train.models.chain import Chain
from train.parallel import guards
from train.parallel.engines import Engine
from train.parallel.guards import replace
from train.parallel.optim import load_state, parameter_groups, part_of

if TYPE_CHECKING:
    from train.parallel.backend import Backend, State
    from train.parallel.engines import LossFunction, Statistics
    from train.parallel.pieces import Tensors


LAYOUT = ("name", "stages", "schedule")  # the settings that determine which stages hold a weight


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


def hold(backend: Backend, model: nn.Module, names: set[str], *, lengths: int) -> None:
    """Move only the parameters `names` of a model to the device. The others move to "meta" and need no memory."""
    kept = {parameter for name, parameter in model.named_parameters() if name in names}
    absent = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter not in kept
    }
    # moved instead of absent weights; those on "meta" cannot be moved
    no_numbers = nn.Parameter(torch.empty(0))
    replace(model, dict.fromkeys(absent, no_numbers))
    backend.setup_model(model, lengths=lengths)
    metas = {
        parameter: nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for parameter in absent.values()
    }
    replace(model, {name: metas[parameter] for name, parameter in absent.items()})


class PipelineState(Engine):
    """The state of a whole model and its optimizer. Each rank of a pipeline holds a part of it."""

    cfg: PipelineConfig
    data_rank: int
    stage: int

    def number(
        self, optim: OptimConfig, head: list[nn.Parameter], holders: dict[str, tuple[int, ...]]
    ) -> None:
        """Assign trained parameters their indices in an optimizer of the whole model. Call this before it is split.

        `holders` has the stages that hold each parameter, by the first of its names. Raises InputError if a stage has
        no parameter to train.
        """
        self.holders = holders
        trained = {
            parameter: name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        groups = parameter_groups(optim, trained, head)
        order = [trained[parameter] for group in groups for parameter in group["params"]]
        self.numbers = {name: number for number, name in enumerate(order)}
        num_stages = 1 + max(max(stages) for stages in holders.values())
        for stage in range(num_stages):
            check(
                any(stage in holders[name] for name in self.numbers),
                f"parallel.stages={num_stages}: all weights of stage {stage} are frozen; lower model.freeze_layers, or "
                "parallel.stages",
            )

    def own(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this stage trains, by name, in the same order on all ranks."""
        named = self.model.named_parameters()
        return {
            name: weight
            for name, weight in named
            if name in self.numbers and self.stage in self.holders[name]
        }

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
        own = {
            self.numbers[name]: weight
            for name, weight in self.own().items()
            if first[weight] == self.stage
        }
        moments: State = {
            "state": {number: self.optimizer.state[own[number]] for number in sorted(own)}
        }
        if self.stage == 0:
            groups = {"param_groups": [{"params": list(range(len(self.numbers)))}]}
        else:
            groups = {}
        return {"model": weights, "optimizer": {**moments, **groups}}

    def sources(self, rank: int, num_ranks: int, settings: Mapping[str, Any]) -> set[int] | None:
        if any(settings.get(f"parallel.{key}") != getattr(self.cfg, key) for key in LAYOUT):
            return None
        return {stages[0] for stages in self.holders.values() if rank % self.cfg.stages in stages}

    def load(self, model: Tensors, optimizer: State) -> None:
        own = {
            name: model[name]
            for name, value in self.model.state_dict().items()
            if value.device.type != "meta"
        }
        self.model.load_state_dict(own, strict=False)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        held = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        mine = [self.numbers[names[weight]] for weight in held]
        load_state(self.optimizer, part_of(optimizer, mine, total=len(self.numbers)))

    def gather_full_model(self) -> None:
        if self.data_rank != 0:
            return
        world = self.backend.world
        full: dict[nn.Parameter, nn.Parameter] = {}
        for name, weight in self.model.named_parameters():
            source = self.holders[name][0]  # the stage's rank in the first pipeline
            if source and world.rank in (0, source):
                tensor: Tensor = weight
                if world.rank == 0:
                    tensor = torch.empty(weight.shape, dtype=weight.dtype)
                world.recv_from([tensor], source)
                full[weight] = nn.Parameter(tensor, weight.requires_grad)  # on the host
        if world.rank == 0:
            named = list(self.model.named_parameters(remove_duplicate=False))
            replace(self.model, {name: full[weight] for name, weight in named if weight in full})

    def check_replicas(self) -> None:
        # A few weights of each stage, and a few that several stages hold, are compared on all ranks that hold them.
        held = {
            name: weight for name, weight in self.model.named_parameters() if not weight.is_meta
        }
        shared = [weight for name, weight in held.items() if len(self.holders[name]) > 1]
        guards.check_same(
            self.backend, self.model, guards.smallest(held.values()) + guards.smallest(shared)
        )
