"""Our training loop and the Hugging Face Trainer, each beside a bare PyTorch step, step by step in one process.

    python -m benchmarks.step [--rounds 3] [--steps 10] [--shape base|demo|long] [--precision fp32 bf16]

Same sizes, weights, sequences, masks, batch, optimizer, clipping and precision for all. "bare" is our optimised step
with no loop around it and its batches ready in memory, so ours / bare is what the loop, data included, costs. "trainer"
is transformers' Trainer on transformers' own model class with its defaults, so trainer / ours is what a user gains.
Between any two steps of a loop one bare step is taken: ratios are of neighbours in time, medians of a round's pairs,
and survive a machine that is shared. --activations counts what is kept for the backward pass instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

# Where torch_xla is installed, accelerate imports it and the Trainer trains on XLA, use_cpu=True or not.
sys.modules["torch_xla"] = None  # type: ignore[assignment]

import torch
import torch.nn.functional as F
from torch import nn

from train import loop
from train.attempt.preempt import StopRequest
from train.cli import compose as cli
from train.config import ModelConfig, TrainConfig
from train.data.batches import loader as data_batches
from train.data.batches.masking import IGNORE_INDEX
from train.data.shards.format import SPLITS, TokenizerInfo
from train.data.shards.writer import write_manifest, write_shard
from train.data.text.packing import Rows
from train.models.encoder import build_masked_lm
from train.optim import build_optimizer
from train.storage.folders import LocalFolder, sha256_file

NUM_ROWS = 512
LOG_EVERY = 5
SKIPPED = 3  # first steps of a round, which warm up
PAD, CLS, SEP, MASK, FIRST = 0, 2, 3, 4, 5


@dataclass(frozen=True)
class Shape:
    model: str
    vocab_size: int
    seq_len: int
    batch: int


SHAPES = {
    "base": Shape("albert_base", 30000, 128, 8),
    "demo": Shape("albert_tiny", 2000, 64, 32),
    "long": Shape("albert_base", 30000, 512, 2),
}


def synthetic_data(folder: Path, shape: Shape) -> Path:
    """A prepared data set of random tokens: nothing is learnt here, only timed."""
    rng = np.random.default_rng(0)
    splits = {}
    for split in SPLITS:
        tokens = rng.integers(FIRST, shape.vocab_size, (NUM_ROWS, shape.seq_len)).astype(np.uint16)
        tokens[:, 0], tokens[:, shape.seq_len // 2], tokens[:, -1] = CLS, SEP, SEP
        pivot = np.full(NUM_ROWS, shape.seq_len // 2 + 1, np.uint16)
        rows = Rows(tokens, pivot, np.ones(NUM_ROWS, np.uint8))
        splits[split] = [write_shard(LocalFolder(folder), f"{split}-00000.safetensors", rows)]
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    write_manifest(
        LocalFolder(folder),
        seq_len=shape.seq_len,
        dtype="uint16",
        splits=splits,
        tokenizer=TokenizerInfo(
            sha256=sha256_file(folder / "tokenizer" / "tokenizer.json"),
            vocab_size=shape.vocab_size,
            cls_id=CLS,
            sep_id=SEP,
            mask_id=MASK,
            pad_id=PAD,
            special_ids=list(range(FIRST)),
        ),
        counts={"unigram_entropy": float(np.log(shape.vocab_size))},
        config={},
    )
    return folder


def config(folder: Path, shape: Shape, precision: str, steps: int) -> TrainConfig:
    return cli.load_config(
        TrainConfig,
        [
            f"model={shape.model}",
            f"data.path={folder / 'data'}",
            f"run_dir={tempfile.mkdtemp(dir=folder)}/run",
            f"global_batch_size={shape.batch}",
            f"max_steps={steps}",
            f"log_every={LOG_EVERY}",
            "data.num_workers=0",  # masks are drawn inside the step: their whole cost is in the figure
            "eval_every=null",
            "eval_examples=1",
            "checkpoint.every=1000000",
            "export=false",
            f"backend.precision={precision}",
            "optim.lr=1e-4",
        ],
    )


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
    """Wall seconds, and CPU seconds of all threads of this process."""
    return time.perf_counter(), time.process_time()


class Bare:
    """Forward, backward, clip, update on batches that lie ready: our model and optimizer with no loop around them."""

    def __init__(self, folder: Path, shape: Shape, precision: str) -> None:
        cfg = config(folder, shape, precision, 1)
        torch.manual_seed(0)
        self.model = build_masked_lm(cfg.model, vocab_size=shape.vocab_size, pad_id=PAD, seq_len=shape.seq_len)
        self.optimizer = build_optimizer(cfg.optim, self.model.parameters(), adamw={"fused": True})
        self.batches = cycle(ready_batches(folder, shape, 8))
        self.uses_bf16 = precision == "bf16"

    def step(self) -> None:
        inputs = next(self.batches)["inputs"]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.uses_bf16):
            logits = self.model(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), inputs["labels"].flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def run_ours(folder: Path, shape: Shape, precision: str, steps: int) -> Pairs:
    """The product's own entry, with the pairs taken in its recorder."""
    pairs = Pairs(Bare(folder, shape, precision))

    class Pairing(loop.Recorder):
        def begin_step(self) -> None:
            pairs.between_steps()
            super().begin_step()

    kept, loop.Recorder = loop.Recorder, Pairing  # type: ignore[misc]
    try:
        loop.run(config(folder, shape, precision, steps + 1), StopRequest())
    finally:
        loop.Recorder = kept  # type: ignore[misc]
    return pairs


def ready_batches(folder: Path, shape: Shape, steps: int) -> list[data_batches.Batch]:
    """The batches that our loop sees, made beforehand."""
    from train.data.shards.order import ShardSampler
    from train.tasks import build_task

    task = build_task(config(folder, shape, "fp32", 1))
    sampler = ShardSampler([NUM_ROWS], seed=0, global_batch_size=shape.batch, rank=0, world_size=1)
    order = sampler.micro_batches(shape.batch)
    made = data_batches.Batches(
        task.train_data(), order, batch_size=shape.batch, num_workers=0, prefetch=1, pin_memory=False
    )
    return list(islice(made, steps))


def transformers_model(cfg: ModelConfig, shape: Shape) -> nn.Module:
    """What a user of transformers writes: the model class with the published ALBERT v2 settings."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=shape.vocab_size,
            embedding_size=cfg.embedding_size or 128,
            hidden_size=cfg.hidden_size or 768,
            intermediate_size=cfg.intermediate_size or 3072,
            num_hidden_layers=cfg.num_layers or 12,
            num_attention_heads=cfg.num_heads or 12,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def full_labels(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Labels [B, S] of the same masks, as transformers wants them."""
    used = inputs["labels"] != IGNORE_INDEX
    labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
    lines = torch.arange(len(labels))[:, None].expand_as(used)
    labels[lines[used], inputs["positions"][used]] = inputs["labels"][used]
    return labels


def run_trainer(folder: Path, shape: Shape, precision: str, steps: int) -> Pairs:
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
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[Pairing()]).train()
    return pairs


def compare(shape_name: str, precision: str, rounds: int, steps: int) -> dict[str, Any]:
    """Medians over the rounds: seconds per step, and each loop's ratio to the bare steps between its own."""
    shape = SHAPES[shape_name]
    answer: dict[str, list[dict[str, float]]] = {"ours": [], "trainer": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        synthetic_data(folder / "data", shape)
        for _ in range(rounds):
            answer["ours"].append(run_ours(folder, shape, precision, steps + SKIPPED).medians(SKIPPED))
            answer["trainer"].append(run_trainer(folder, shape, precision, steps + SKIPPED).medians(SKIPPED))
    result: dict[str, Any] = {"shape": shape_name, "precision": precision, "threads": torch.get_num_threads()}
    for variant, rows in answer.items():
        result[f"{variant}_step_wall_s"] = round(statistics.median(row["step_wall_s"] for row in rows), 4)
    for clock in ("wall", "cpu"):
        ours, trainer = ([row[f"ratio_{clock}"] for row in answer[variant]] for variant in ("ours", "trainer"))
        result[f"ours / bare ({clock})"] = spread(ours)
        result[f"trainer / bare ({clock})"] = spread(trainer)
        result[f"trainer / ours ({clock})"] = spread([b / a for a, b in zip(ours, trainer, strict=True)])
    return result


def spread(values: list[float]) -> list[float]:
    """Least, median, greatest."""
    return [round(choose(values), 3) for choose in (min, statistics.median, max)]


def saved_mib(forward: Callable[[], torch.Tensor], parameters: set[int]) -> float:
    """Bytes kept for the backward pass, each storage once, parameters left out."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    result = sum(storages.values()) / 2**20
    del loss
    return result


def activations(shape_name: str, precision: str) -> dict[str, Any]:
    """MiB per sequence saved for the backward pass by our step and by transformers' model."""
    shape, autocast = SHAPES[shape_name], precision == "bf16"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        synthetic_data(folder / "data", shape)
        cfg = config(folder, shape, precision, 1)
        inputs = ready_batches(folder, shape, 1)[0]["inputs"]
        labels = full_labels(inputs)
        ours = build_masked_lm(cfg.model, vocab_size=shape.vocab_size, pad_id=PAD, seq_len=shape.seq_len)
        theirs = transformers_model(cfg.model, shape)

        def our_loss() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = ours(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
                return F.cross_entropy(logits.flatten(0, 1).float(), inputs["labels"].flatten())

        def their_loss() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return theirs(
                    input_ids=inputs["input_ids"], token_type_ids=inputs["token_type_ids"], labels=labels
                ).loss

        result = {}
        for label, model, forward in (("ours", ours, our_loss), ("transformers", theirs, their_loss)):
            pointers = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            result[f"{label}_mib_per_sequence"] = round(saved_mib(forward, pointers) / shape.batch, 1)
    return {"shape": shape_name, "precision": precision, **result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each variant a round")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--activations", action="store_true", help="count saved activations instead of timing")
    options = parser.parse_args()
    for precision in options.precision:
        if options.activations:
            print(json.dumps(activations(options.shape, precision)))
        else:
            print(json.dumps(compare(options.shape, precision, options.rounds, options.steps)))


if __name__ == "__main__":
    main()
