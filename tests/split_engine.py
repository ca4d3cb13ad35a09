"""An engine from outside: two ranks see the same rows, and each holds one of the two layers of a small model.

Activations go from rank 0 to rank 1, their gradients come back; nothing in `train` knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from toy import ToyTask

from train.config import ParallelConfig, check
from train.optim import build_optimizer, load_state, set_learning_rate

WIDTH = 5


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)

    def head_parameters(self):
        return []

    def forward(self, numbers):
        return self.second(self.first(numbers).tanh()).squeeze(-1)


class TwoLayersTask(ToyTask):
    def build_model(self):
        return TwoLayers()


def build(cfg, optim, backend, model, loss, **_):
    return Halves(optim, backend, model, loss)


@dataclass(kw_only=True)
class HalvesConfig(ParallelConfig):
    name: str = "halves"

    def replicas(self, world_size):
        check(world_size == 2, f"parallel=halves needs 2 ranks, not {world_size}")
        return 1


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, numbers):
        self.sent = self.layer(numbers).tanh()
        dist.send(self.sent.detach(), 1)
        return self.sent


class Second(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, numbers):
        self.received = torch.empty(len(numbers), WIDTH)
        dist.recv(self.received, 0)
        self.received.requires_grad_()
        return self.layer(self.received).squeeze(-1)


class Halves:
    def __init__(self, optim, backend, model, loss):
        self.backend, self.world, self.model, self.loss = backend, backend.world, model, loss
        self.data_rank, self.data_size = 0, 1
        # Checkpoints number the weights as an optimizer of the whole model does: those that decay first.
        numbered = sorted(model.named_parameters(), key=lambda item: item[1].ndim < 2)
        numbers = {name: number for number, (name, _) in enumerate(numbered)}
        self.own, other = ("first", "second") if self.world.rank == 0 else ("second", "first")
        setattr(model, other, nn.Identity())  # the other layer is not held here
        backend.setup_model(model)
        self.half = First(model.first) if self.world.rank == 0 else Second(model.second)
        self.parameters = list(model.parameters())
        self.optimizer = build_optimizer(optim, self.parameters, adamw=backend.adamw)
        names = {id(weight): name for name, weight in model.named_parameters()}
        order = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        self.numbers = {numbers[names[id(weight)]]: weight for weight in order}
        self.max_grad_norm = optim.max_grad_norm
        self.loss_sum = torch.zeros(1)

    def ready(self):
        self.backend.ready(self.optimizer, self.parameters)

    def begin_step(self, count, lr):
        set_learning_rate(self.optimizer, lr)
        self.count = count

    def forward_backward(self, batch, *, is_last):
        if self.world.rank == 0:
            self.half(batch["inputs"]["input_ids"])
            gradient = torch.empty_like(self.half.sent)
            dist.recv(gradient, 1)
            self.half.sent.backward(gradient)
        else:
            loss_sum = self.loss(self.half, batch["inputs"])
            loss_sum.backward()
            dist.send(self.half.received.grad, 0)
            self.loss_sum += loss_sum.detach()

    def reduce_and_clip(self):
        """By the norm over both layers."""
        gradients = [weight.grad for weight in self.parameters]
        torch._foreach_div_(gradients, self.count)
        norm = torch.tensor(self.world.sum([sum(float(each.square().sum()) for each in gradients)])[0]).sqrt()
        if self.max_grad_norm is not None:
            torch._foreach_mul_(gradients, float((self.max_grad_norm / (norm + 1e-6)).clamp(max=1)))
        return norm

    def optimizer_step(self, norm):
        self.backend.optimizer_step(self.optimizer, self.parameters, norm)

    def take_loss(self):
        taken = float(self.loss_sum)
        self.loss_sum.zero_()
        return taken

    def evaluate(self, statistics, inputs):
        if self.world.rank == 1:
            return statistics(self.half, inputs)
        self.half(inputs["input_ids"])
        return None

    def check_replicas(self):
        """No weight is on two ranks."""

    def whole(self):
        """The weights of both layers, by their names in the whole model."""
        return {
            name: value
            for part in self.world.all_gather_object(self.model.state_dict())
            for name, value in part.items()
        }

    def state(self):
        own = {"state": {number: self.optimizer.state[weight] for number, weight in self.numbers.items()}}
        if self.world.rank == 0:
            own["param_groups"] = [{"params": list(range(4))}]
        return {"model": self.model.state_dict(), "optimizer": own}

    def load(self, model, optimizer):
        self.model.load_state_dict({name: value for name, value in model.items() if name.startswith(self.own)})
        load_state(self.optimizer, {**optimizer, "param_groups": [{"params": list(self.numbers)}]})

    def gather_full_model(self):
        whole = self.whole()
        if self.world.rank == 0:
            self.model.second = nn.Linear(WIDTH, 1)
            self.model.load_state_dict(whole)
