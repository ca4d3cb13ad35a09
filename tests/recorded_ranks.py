"""`baretrain train` on CPU ranks whose steps are recorded on tapes (`taped`), in the ways that WAYS names.

plain: steps are not recorded, and torch's DDP reduces. lying: the replays of rank 1 differ from its plain steps.
unused: the model has a parameter without gradient. unlabelled: some batches of rank 1 have no labels. full: rank 1 runs
out of memory in a step that has sent nothing. late: it does so after it has sent gradients. unable: rank 1 must
record, and cannot.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from taped import put_tapes

from train import __main__ as program
from train.parallel import buckets, captured, ddp
from train.parallel.data import Captured, DataParallel
from train.tasks.mlm import MaskedLMTask

WAYS = os.environ["WAYS"].split()
RANK = int(os.environ["RANK"])
UNLABELLED = (2, 6)  # steps of rank 1
# The parts of each recording, by function, and the sizes of what was reduced on the device, in order.
parts: dict[str, list[int]] = {}
reduced: list[int] = []
patch = pytest.MonkeyPatch()


def recording(record: Any, graphs: Any, function: Any, inputs: Any) -> Any:
    if RANK == 1 and "unable" in WAYS:
        raise RuntimeError("not recorded")
    replay = record(graphs, function, inputs)
    parts.setdefault(function.__name__, []).append(len(replay.__self__.parts))
    if RANK == 0 or "lying" not in WAYS:
        return replay

    def lie() -> None:
        replay()
        graphs.proof.engine.loss_sum.mul_(1.01)
        graphs.proof.engine.norm.mul_(1.01)

    return lie


def record_on_tapes() -> None:
    put_tapes(patch)
    # small ones, so that the small model has several
    patch.setattr(buckets, "FIRST_BYTES", 2**9)
    patch.setattr(buckets, "BUCKET_BYTES", 2**12)
    patch.setattr(ddp, "captures_steps", lambda *_: True)
    record = captured.Graphs.record
    patch.setattr(captured.Graphs, "record", lambda *args: recording(record, *args))
    all_reduce = dist.all_reduce

    def counted(tensor: Any, **options: Any) -> Any:
        if options.get("async_op") and not options.get("group"):
            reduced.append(tensor.numel())
        return all_reduce(tensor, **options)

    patch.setattr(dist, "all_reduce", counted)


def skip_on_device() -> None:
    """As on a GPU, also where nothing is recorded."""
    opened = ddp.DDP.__init__

    def open_as_gpu(self: Any, cfg: Any, **options: Any) -> None:
        opened(self, cfg, **options)
        self.skips_on_device = True
        self.must_capture = "unable" in WAYS

    patch.setattr(ddp.DDP, "__init__", open_as_gpu)


def add_unused_parameter() -> None:
    build = MaskedLMTask.build_model

    def with_unused(self: Any) -> Any:
        model = build(self)
        model.network.unused = torch.nn.Parameter(torch.ones(3))
        return model

    patch.setattr(MaskedLMTask, "build_model", with_unused)


def drop_labels() -> None:
    factor, loss, steps = torch.ones(()), MaskedLMTask.loss, iter(range(1, 100))

    def begin_step(self: Any, count: float, lr: float, *, begin: Any) -> None:
        is_empty = RANK == 1 and next(steps) in UNLABELLED
        factor.fill_(float(not is_empty))
        begin(self, 0.0 if is_empty else count, lr)

    for engine in (DataParallel, Captured):
        method = partialmethod(begin_step, begin=engine.begin_step)
        patch.setattr(engine, "begin_step", method)
    patch.setattr(MaskedLMTask, "loss", lambda *args: loss(*args) * factor)


def run_out_of_memory() -> None:
    run, failed = captured.Graphs.run, []

    def without_memory(self: Any, function: Any, inputs: Any) -> None:
        # the update and the passes; a proof would send nothing
        is_replayed = len(self.recorded) >= 1 + ("late" in WAYS)
        if RANK == 1 and is_replayed and not failed and "micro" in function.__name__:
            failed.append(function)
            if "late" in WAYS:
                run(self, function, inputs)
            raise torch.OutOfMemoryError("out of memory")
        run(self, function, inputs)

    patch.setattr(captured.Graphs, "run", without_memory)


if __name__ == "__main__":
    torch.set_num_threads(1)
    skip_on_device()
    if "plain" not in WAYS:
        record_on_tapes()
    for way, change in {
        "unused": add_unused_parameter,
        "unlabelled": drop_labels,
        "full": run_out_of_memory,
        "late": run_out_of_memory,
    }.items():
        if way in WAYS:
            change()
    code = program.main()
    found = {"parts": parts, "reduced": reduced}
    Path(os.environ["REPORT"], f"{RANK}.json").write_text(json.dumps(found))
    sys.exit(code)
