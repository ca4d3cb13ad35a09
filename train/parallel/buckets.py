"""The reduction of gradients in buckets that stay the same: beside recorded steps, and on more than two CPU ranks.

Gradients are views of flat buckets in the order in which they arrive in a backward pass. In the last one of a step, a
bucket is sent when its gradients are complete, as in torch's DDP, https://arxiv.org/abs/2006.15704, section 3.2.3.
Ranks whose steps are recorded and ranks whose steps are not send the same buckets in the same order. The host sends
them, between recordings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.grad_sync import GradSync
from train.parallel.ranks import World

# The sizes of DDP's buckets. The first one is small, so that sending begins early.
FIRST_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


class BucketSync(GradSync):
    """A reduction by sums over the ranks. Gradients keep their addresses and places, also after a resume."""

    adds_counts = True

    def __init__(
        self, model: nn.Module, device: torch.device, world: World, *, compresses: bool
    ) -> None:
        """Give all ranks the weights and buffers of rank 0. With `compresses`, gradients are sent in bf16."""
        super().__init__(model, device)
        self.world = world
        self.compresses = compresses
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.arrived: list[int] = []  # parameters by number, in the order of their first gradients
        self.buckets: list[Tensor] = []  # made at the end of the first step
        self.bucket_of: dict[int, int] = {}
        self.missing = Counter[int]()  # gradients that each bucket awaits in this backward pass
        self.num_complete = 0  # buckets, in this backward pass
        self.num_sent = 0  # buckets, in this step
        self.sending: list[tuple[Any, Tensor, Tensor]] = []
        self.is_built = False
        self.is_last = False
        self.is_held = False
        for tensor in chain(model.parameters(), model.buffers()):
            sent = tensor.detach().contiguous()  # NCCL sends no others
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self.see, number))

    def add_counts(self) -> None:
        self.num_sent = 0
        super().add_counts()

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        self.is_last = is_last
        self.num_complete = 0
        self.missing = Counter(self.bucket_of.values())
        # The hooks run in this thread: only the thread that began a recording may end it.
        with torch.autograd.set_multithreading_enabled(False):
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        self.adding.wait()
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def see(self, number: int, _: Tensor) -> None:
        """Note that a gradient is complete in this backward pass. Send the buckets that now are."""
        if not self.is_built:
            self.arrived.append(number)
            return
        if number not in self.bucket_of:
            raise RuntimeError(
                f"parameter {number} has a gradient, but it had none in the first step on any rank; a "
                "model must use the same weights in all steps"
            )
        self.missing[self.bucket_of[number]] -= 1
        if not self.is_last or self.missing[self.num_complete]:
            return
        while self.missing.get(self.num_complete) == 0:
            self.num_complete += 1
        self.outside(partial(self.send, self.num_complete))

    def send(self, until: int) -> None:
        """Begin to sum the buckets before number `until` over the ranks, unless they are being sent or held."""
        if self.is_held:
            return
        for bucket in self.buckets[self.num_sent : until]:
            sent = bucket
            if self.compresses:
                sent = bucket.bfloat16()
            self.sending.append((dist.all_reduce(sent, async_op=True), sent, bucket))
            self.num_sent += 1  # the next copy may find no memory

    def reduce(self) -> Tensor:
        if not self.is_built:
            self.build()
        # also those to which a parameter gave no gradient
        self.send(len(self.buckets))
        for work, sent, bucket in self.sending:
            work.wait()
            bucket.copy_(sent)  # does nothing if they are the same
        self.sending.clear()
        return super().reduce()

    def build(self) -> None:
        """Move the gradients of the first step into buckets, which are the same on all ranks."""
        orders = self.world.all_gather_object(self.arrived)
        numbers = dict.fromkeys(chain.from_iterable(orders))
        for group in groups(self.parameters, numbers):
            self.bucket_of |= dict.fromkeys(group, len(self.buckets))
            self.buckets.append(flatten([self.parameters[number] for number in group]))
        self.is_built = True


def groups(parameters: Sequence[Tensor], numbers: Iterable[int]) -> list[list[int]]:
    """Divide the numbers of parameters into groups of one dtype and about the size of a bucket."""
    found: list[list[int]] = []
    room_bytes = 0
    for number in numbers:
        parameter = parameters[number]
        is_other = bool(found) and parameter.dtype != parameters[found[-1][0]].dtype
        if room_bytes <= 0 or is_other:
            room_bytes = BUCKET_BYTES if found else FIRST_BYTES
            found.append([])
        found[-1].append(number)
        room_bytes -= parameter.nbytes
    return found


@torch.no_grad()
def flatten(parameters: Sequence[Tensor]) -> Tensor:
    """Return a new flat tensor, of which the gradients of these parameters are views from now on."""
    flat = parameters[0].new_zeros(sum(each.numel() for each in parameters))
    parts = flat.split([each.numel() for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        # Fused AdamW reads weights and gradients in the order of memory, which must be the same.
        strides = torch.empty_like(parameter, device="meta").stride()
        view = part.as_strided(parameter.shape, strides)
        if parameter.grad is not None:
            view.copy_(parameter.grad)
        parameter.grad = view
    return flat
