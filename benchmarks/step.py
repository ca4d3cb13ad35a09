"""Our training loop and the Hugging Face Trainer, each beside a bare PyTorch step, step by step in one process.

    python -m benchmarks.step [--rounds 3] [--steps 10] [--shape base|demo|...] [--precision fp32 bf16] [--compile]

Same sizes, weights, sequences, masks, batch, optimizer, clipping and precision for all. "bare" is our optimised step
with no loop around it and its batches ready in memory, so ours / bare is what the loop, data included, costs. "trainer"
is transformers' Trainer on transformers' own model class with its defaults, so trainer / ours is what a user gains.
Between any two steps of a loop one bare step is taken: ratios are of neighbours in time, medians of a round's pairs,
and survive a machine that is shared. --compile adds ours with backend.compile=layers and the Trainer with
torch_compile=True. The share of the peak is the model's arithmetic a second against that of the fastest product of two
matrices, which this device did around the rounds (train.bench). --activations counts what is kept for the
backward pass instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.harness import hide_torch_xla, three

hide_torch_xla()

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.pretraining import (
    DEVICE,
    LOG_EVERY,
    PAD,
    SHAPES,
    Shape,
    activations,
    config,
    full_labels,
    ready_batches,
    synthetic_data,
    transformers_model,
)
from train import loop
from train.attempt.preempt import StopRequest
from train.backend.ddp import DDP
from train.bench.measure import matmul_flops_per_s
from train.config import BackendConfig
from train.data.batches.masking import IGNORE_INDEX
from train.models.encoder import build_masked_lm
from train.optim import build_optimizer
from train.tasks import build_task

SKIPPED = 3  # first steps of a round, which warm up


class Pairs:
    """Seconds of a loop's steps, each beside those of a bare step taken right before it."""

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.steps: list[tuple[float, float]] = []
        self.bares: list[tuple[float, float]] = []
        self.began: tuple[float, float] | None = None

    def between_steps(self) -> None:
        """The loop's step ends here; take a bare step; the loop's next one begins."""
        now = clocks()
        if self.began is not None:
            self.steps.append((now[0] - self.began[0], now[1] - self.began[1]))
        before = clocks()
        self.bare.step()
        self.began = clocks()
        self.bares.append((self.began[0] - before[0], self.began[1] - before[1]))

    def medians(self, skip: int) -> dict[str, float]:
        """Median seconds of the loop's and the bare steps, and median ratio of the pairs, wall and CPU."""
        pairs = list(zip(self.steps, self.bares, strict=False))[skip:]
        result = {}
        for folder, name in enumerate(("wall", "cpu")):
            result[f"step_{name}_s"] = statistics.median(step[folder] for step, _ in pairs)
            result[f"bare_{name}_s"] = statistics.median(bare[folder] for _, bare in pairs)
            result[f"ratio_{name}"] = statistics.median(step[folder] / bare[folder] for step, bare in pairs)
        return result


def clocks() -> tuple[float, float]:
    """Wall seconds, and CPU seconds of all threads of this process, once the device has done its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


class Bare:
    """Forward, backward, clip, update on batches that lie ready: our model and optimizer with no loop around them."""

    def __init__(self, folder: Path, shape: Shape, precision: str) -> None:
        cfg = config(folder, shape, precision, 1)
        torch.manual_seed(0)
        self.model = build_masked_lm(cfg.model, vocab_size=shape.vocab_size, pad_id=PAD, seq_len=shape.seq_len)
        self.model.to(DEVICE)
        self.optimizer = build_optimizer(cfg.optim, self.model.parameters(), adamw={"fused": True})
        ready = (batch["inputs"] for batch in ready_batches(folder, shape, 8))
        self.batches = cycle([{name: value.to(DEVICE) for name, value in inputs.items()} for inputs in ready])
        self.uses_bf16 = precision == "bf16"

    def step(self) -> None:
        inputs = next(self.batches)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.uses_bf16):
            logits = self.model(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), inputs["labels"].flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def run_ours(folder: Path, shape: Shape, precision: str, steps: int, *, compiles: bool = False) -> Pairs:
    """The product's own entry, with the pairs taken in its recorder."""
    pairs = Pairs(Bare(folder, shape, precision))

    class Pairing(loop.Recorder):
        def begin_step(self) -> None:
            pairs.between_steps()
            super().begin_step()

    kept, loop.Recorder = loop.Recorder, Pairing  # type: ignore[misc]
    try:
        compile = "layers" if compiles else "none"
        loop.run(config(folder, shape, precision, steps + 1, compile), StopRequest())
    finally:
        loop.Recorder = kept  # type: ignore[misc]
    return pairs


def run_trainer(folder: Path, shape: Shape, precision: str, steps: int, *, compiles: bool = False) -> Pairs:
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    torch.manual_seed(0)
    model = transformers_model(config(folder, shape, precision, steps).model, shape)
    rows = []
    for batch in ready_batches(folder, shape, steps + 1):
        inputs = batch["inputs"]
        columns = (inputs["input_ids"], inputs["token_type_ids"], full_labels(inputs))
        rows += [{"input_ids": a, "token_type_ids": b, "labels": c} for a, b, c in zip(*columns, strict=True)]
    pairs = Pairs(Bare(folder, shape, precision))

    class Pairing(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pairs.between_steps()

    arguments = TrainingArguments(
        tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=shape.batch,
        max_steps=steps + 1,
        learning_rate=1e-4,
        weight_decay=0.01,
        optim="adamw_torch_fused",
        bf16=precision == "bf16",
        save_strategy="no",
        logging_steps=LOG_EVERY,
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        torch_compile=compiles,
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[Pairing()]).train()
    return pairs


CONTESTANTS = {
    "ours": run_ours,
    "trainer": run_trainer,
    "ours_compiled": partial(run_ours, compiles=True),
    "trainer_compiled": partial(run_trainer, compiles=True),
}


def compare(shape_name: str, precision: str, rounds: int, steps: int, names: list[str]) -> dict[str, Any]:
    """Medians over the rounds: seconds per step, and each loop's ratio to the bare steps between its own."""
    shape = SHAPES[shape_name]
    answer: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        synthetic_data(folder / "data", shape)
        peaks = [peak_flops_per_s(precision)]
        for number in range(rounds):
            for each in names if number % 2 == 0 else names[::-1]:
                answer[each].append(CONTESTANTS[each](folder, shape, precision, steps + SKIPPED).medians(SKIPPED))
            peaks.append(peak_flops_per_s(precision))
        flops = flops_per_step(folder, shape)
    result: dict[str, Any] = {"shape": shape_name, "precision": precision, "threads": torch.get_num_threads()}
    result |= {"device": DEVICE.type, "tflop_per_step": flops / 1e12, "peak_tflops": rounded([p / 1e12 for p in peaks])}
    for each, rows in answer.items():
        times = [row["step_wall_s"] for row in rows]
        result[f"{each}_step_wall_s"] = round(statistics.median(times), 4)
        result[f"{each}_tokens_per_s"] = round(shape.batch * shape.seq_len / statistics.median(times))
        result[f"{each} share of the peak"] = rounded([flops / step_s / max(peaks) for step_s in times])
    for clock in ("wall", "cpu"):
        ratios = {each: [row[f"ratio_{clock}"] for row in rows] for each, rows in answer.items()}
        result |= {f"{each} / bare ({clock})": rounded(values) for each, values in ratios.items()}
        for theirs, ours in ((a, b) for a in names for b in names if a[0] == "t" and b[0] == "o"):
            pairs = zip(ratios[ours], ratios[theirs], strict=True)
            result[f"{theirs} / {ours} ({clock})"] = rounded([b / a for a, b in pairs])
    return result


def peak_flops_per_s(precision: str) -> float:
    return matmul_flops_per_s(DDP(BackendConfig(device=DEVICE.type, precision=precision)))[0]


def flops_per_step(folder: Path, shape: Shape) -> float:
    """The model's arithmetic alone, by the formula of train.models."""
    task = build_task(config(folder, shape, "fp32", 1))
    return shape.batch * (task.flops_per_example(task.build_model(), shape.seq_len) or 0.0)


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in three(values)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each variant a round")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--compile", action="store_true", help="compiled contestants beside the plain ones")
    parser.add_argument("--activations", action="store_true", help="count saved activations instead of timing")
    options = parser.parse_args()
    for precision in options.precision:
        if options.activations:
            print(json.dumps(activations(options.shape, precision)))
        else:
            names = list(CONTESTANTS) if options.compile else ["ours", "trainer"]
            print(json.dumps(compare(options.shape, precision, options.rounds, options.steps, names), indent=1))


if __name__ == "__main__":
    main()
