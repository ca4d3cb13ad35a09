"""Pretraining on random tokens, with our code and with transformers: data, batches and models."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from train.config import ModelConfig, TrainConfig
from train.data.batches.loader import Batch, Batches
from train.data.batches.masking import IGNORE_INDEX
from train.data.shards.format import write_shard
from train.data.shards.manifest import SPLITS, Shard, TokenizerInfo, write_manifest
from train.data.shards.order import ShardSampler
from train.data.text.packing import Rows
from train.run import compose as cli
from train.storage.folders import LocalFolder, sha256_bytes
from train.tasks import build_task

NUM_ROWS = 512
LOG_EVERY = 5
PAD, CLS, SEP, MASK, FIRST = 0, 2, 3, 4, 5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Shape:
    model: str
    vocab_size: int
    seq_len: int
    batch: int  # sequences in a micro batch


SHAPES = {
    "base": Shape("albert_base", 30000, 128, 8),
    "demo": Shape("albert_tiny", 2000, 64, 32),
    "long": Shape("albert_base", 30000, 512, 2),
    "base_gpu": Shape("albert_base", 30000, 128, 128),
    "long_gpu": Shape("albert_base", 30000, 512, 32),
}


def synthetic_data(folder: Path, shape: Shape) -> None:
    """Write prepared data with random tokens to `folder`/data. It is only for timing."""
    rng = np.random.default_rng(0)
    splits = {}
    for split in SPLITS:
        drawn = rng.integers(FIRST, shape.vocab_size, (NUM_ROWS, shape.seq_len))
        tokens = drawn.astype(np.uint16)
        tokens[:, 0] = CLS
        tokens[:, [shape.seq_len // 2, -1]] = SEP
        splits[split] = [tokens]
    write_data(folder / "data", splits, shape.vocab_size, shape.seq_len)


def write_data(
    folder: Path, splits: Mapping[str, list[np.ndarray]], vocab_size: int, seq_len: int
) -> None:
    """Write prepared data with a shard for each array of tokens [rows, S], and with an empty tokenizer.json."""
    home = LocalFolder(folder)
    home.write("tokenizer/tokenizer.json", b"{}")
    tokenizer = TokenizerInfo(
        sha256=sha256_bytes(b"{}"),
        vocab_size=vocab_size,
        cls_id=CLS,
        sep_id=SEP,
        mask_id=MASK,
        pad_id=PAD,
        special_ids=list(range(FIRST)),
    )

    def shard(name: str, tokens: np.ndarray) -> Shard:
        pivot = np.full(len(tokens), seq_len // 2 + 1, np.uint16)
        rows = Rows(tokens, pivot, np.ones(len(tokens), np.uint8))
        return write_shard(home, f"{name}.safetensors", rows)

    write_manifest(
        home,
        seq_len=seq_len,
        dtype="uint16",
        splits={
            name: [shard(f"{name}-{n:05d}", each) for n, each in enumerate(of)]
            for name, of in splits.items()
        },
        tokenizer=tokenizer,
        counts={
            "unigram_entropy": float(np.log(vocab_size)),
            "neighbour_accuracy": 1 / vocab_size,
        },
        config={},
    )


def native_config(folder: Path, shape: Shape, precision: str, steps: int) -> TrainConfig:
    """Return the settings of a run on `synthetic_data` that evaluates and saves only at its end."""
    # Without loader processes, masks are drawn during the step, so all of their cost is measured.
    settings = f"""
        model={shape.model} data.path={folder / "data"} run_dir={tempfile.mkdtemp(dir=folder)}/run
        max_steps={steps} global_batch_size={shape.batch} log_every={LOG_EVERY} optim.lr=1e-4
        data.num_workers=0 eval_every=null eval_examples=1 checkpoint.every=1000000 export=false
        backend.device={DEVICE.type} backend.precision={precision} backend.compile=none
    """
    return cli.load_config(TrainConfig, settings.split())


def ready_batches(folder: Path, shape: Shape, steps: int) -> list[Batch]:
    """Return the first `steps` batches that our loop would draw."""
    task = build_task(native_config(folder, shape, "fp32", 1))
    size = shape.batch
    order = ShardSampler(
        task.shard_rows, seed=0, global_batch_size=size, rank=0, world_size=1
    ).micro_batches(size)
    made = Batches(
        task.train_data(), order, batch_size=size, num_workers=0, prefetch=1, pin_memory=False
    )
    return list(islice(made, steps))


def plain_rows(batch: Batch) -> list[dict[str, Tensor]]:
    """Return the rows of a batch in transformers' form, with labels [S] at the same masked positions."""
    inputs = batch["inputs"]
    columns = (inputs["input_ids"], inputs["token_type_ids"], full_labels(inputs))
    return [
        {"input_ids": a, "token_type_ids": b, "labels": c}
        for a, b, c in zip(*columns, strict=True)
    ]


def full_labels(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return labels [B, S] at the masked positions of `inputs`; IGNORE_INDEX elsewhere."""
    used = inputs["labels"] != IGNORE_INDEX
    labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
    lines = torch.arange(len(labels))[:, None].expand_as(used)
    labels[lines[used], inputs["positions"][used]] = inputs["labels"][used]
    return labels


def transformers_model(cfg: ModelConfig, vocab_size: int) -> nn.Module:
    """Return the model that a user of transformers would build, with ALBERT v2's published settings."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=vocab_size,
            embedding_size=cfg.embedding_size,
            hidden_size=cfg.hidden_size,
            intermediate_size=cfg.intermediate_size,
            num_hidden_layers=cfg.num_layers,
            num_attention_heads=cfg.num_heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
