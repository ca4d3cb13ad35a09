"""Our training loop and the Hugging Face Trainer, each compared step by step with a bare PyTorch step, in one process.

    python -m benchmarks.step [--rounds 3] [--steps 10] [--shape base|demo|...] [--precision fp32 bf16] [--contestants]

"bare" is our optimised step without a loop around it, on batches that are ready in memory; "ours" is `train.loop.run`;
"trainer" is the Trainer with its defaults, on transformers' model class; "trainer_eager" is the same with "eager"
attention. Before each step of a loop, a bare step is taken. Each ratio compares such a pair, and the medians of ratios
are reported, so load from other users of the machine hardly affects them. The share of the peak is the model's FLOP/s
divided by that of the fastest matrix product, which is measured before the first round and after each.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import harness
from benchmarks.harness import QUIET, Result, hide_torch_xla, ratios, three, turns

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
    native_config,
    plain_rows,
    ready_batches,
    synthetic_data,
    transformers_model,
)
from train import loop
from train.config import BackendConfig
from train.data.batches.masking import IGNORE_INDEX
from train.models.encoder import build_masked_lm
from train.parallel.ddp import DDP
from train.parallel.optim import build_optimizer
from train.run.stopping import StopRequest
from train.tasks import build_task
from train.tools.bench.measure import matmul_flops_per_s

SKIPPED = 3  # the first steps of a round are a warm-up


class Bare:
    """Our model and optimizer without a loop: forward, backward, clip and update, on batches that are ready."""

    def __init__(self, folder: Path, shape: Shape, precision: str) -> None:
        cfg = native_config(folder, shape, precision, 1)
        torch.manual_seed(0)
        self.model = build_masked_lm(
            cfg.model, vocab_size=shape.vocab_size, pad_id=PAD, seq_len=shape.seq_len
        )
        DDP(cfg.backend).setup_model(self.model)
        self.optimizer = build_optimizer(cfg.optim, self.model.parameters(), adamw={"fused": True})
        ready = (batch["inputs"] for batch in ready_batches(folder, shape, 8))
        self.batches = cycle(
            [{name: value.to(DEVICE) for name, value in inputs.items()} for inputs in ready]
        )
        self.uses_bf16 = precision == "bf16"

    def step(self) -> None:
        inputs = next(self.batches)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.uses_bf16):
            logits = self.model(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), inputs["labels"].flatten(), ignore_index=IGNORE_INDEX
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Pairs:
    """The seconds of a loop's steps, each paired with the bare step taken right before it."""

    def __init__(self, bare: Bare) -> None:
        self.bare = bare
        self.steps_s: list[float] = []
        self.bares_s: list[float] = []
        self.began_s: float | None = None

    def between_steps(self) -> None:
        """Stop the clock of a loop's step, take a bare step, and start the clock of the loop's next step."""
        before_s = clock_s()
        if self.began_s is not None:
            self.steps_s.append(before_s - self.began_s)
        self.bare.step()
        self.began_s = clock_s()
        self.bares_s.append(self.began_s - before_s)

    def medians(self) -> tuple[float, float]:
        """Return the median seconds of the loop's steps, and the median ratio of the pairs."""
        steps_s = self.steps_s[SKIPPED:]
        bares_s = self.bares_s[SKIPPED : len(self.steps_s)]
        return statistics.median(steps_s), statistics.median(ratios(steps_s, bares_s))


def clock_s() -> float:
    """Wait for the device, and return the time."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def run_ours(folder: Path, shape: Shape, precision: str, steps: int) -> Pairs:
    """Run our loop with a recorder that takes a bare step before each step."""
    pairs = Pairs(Bare(folder, shape, precision))

    class Pairing(loop.Recorder):
        def begin_step(self) -> None:
            pairs.between_steps()
            super().begin_step()

    with mock.patch.object(loop, "Recorder", Pairing):
        loop.run(native_config(folder, shape, precision, steps + 1), StopRequest())
    return pairs


def run_trainer(
    folder: Path, shape: Shape, precision: str, steps: int, *, attention: str = "sdpa"
) -> Pairs:
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    torch.manual_seed(0)
    model: Any = transformers_model(
        native_config(folder, shape, precision, steps).model, shape.vocab_size
    )
    model.set_attn_implementation(attention)
    rows = [row for batch in ready_batches(folder, shape, steps + 1) for row in plain_rows(batch)]
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
        logging_steps=LOG_EVERY,
        use_cpu=DEVICE.type == "cpu",
        **QUIET,
    )
    Trainer(
        model,
        arguments,
        train_dataset=rows,
        data_collator=default_data_collator,
        callbacks=[Pairing()],
    ).train()
    return pairs


CONTESTANTS = {
    "ours": run_ours,
    "trainer": run_trainer,
    "trainer_eager": partial(run_trainer, attention="eager"),
}


def compare(shape_name: str, precision: str, rounds: int, steps: int, names: list[str]) -> Result:
    """Return each loop's seconds per step and ratio to the bare steps, from the medians of each round."""
    shape = SHAPES[shape_name]
    device = DDP(BackendConfig(device=DEVICE.type, precision=precision))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthetic_data(folder, shape)
        task = build_task(native_config(folder, shape, "fp32", 1))
        flops = shape.batch * (task.flops_per_example(task.build_model(), shape.seq_len) or 0.0)
        peaks = [matmul_flops_per_s(device)[0]]
        for index, (_, each) in enumerate(turns(rounds, names), start=1):
            taken[each].append(
                CONTESTANTS[each](folder, shape, precision, steps + SKIPPED).medians()
            )
            if index % len(names) == 0:
                peaks.append(matmul_flops_per_s(device)[0])
    result: Result = {
        "shape": shape_name,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "device": DEVICE.type,
        "peak_tflops": rounded([peak / 1e12 for peak in peaks]),
    }
    to_bare = {each: [ratio for _, ratio in rows] for each, rows in taken.items()}
    for each, rows in taken.items():
        steps_s = [step_s for step_s, _ in rows]
        shares = [flops / step_s / max(peaks) for step_s in steps_s]
        result[f"{each}, s"] = round(statistics.median(steps_s), 4)
        result[f"{each} / bare"] = rounded(to_bare[each])
        result[f"{each} share of the peak"] = rounded(shares)
        if each != "ours" and "ours" in names:
            result[f"{each} / ours"] = rounded(ratios(to_bare[each], to_bare["ours"]))
    return result


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in three(values)]


def main() -> None:
    parser = harness.parser(__doc__, rounds=3, steps=10)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=["ours", "trainer"]
    )
    options = parser.parse_args()
    for precision in options.precision:
        result = compare(
            options.shape, precision, options.rounds, options.steps, options.contestants
        )
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
