"""A pretraining of ours and of transformers on random tokens: shapes, data, batches, models, and what they keep."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from train.cli import compose as cli
from train.config import ModelConfig, TrainConfig
from train.data.batches import loader as data_batches
from train.data.batches.masking import IGNORE_INDEX
from train.data.shards.format import SPLITS, TokenizerInfo, write_manifest, write_shard
from train.data.shards.order import ShardSampler
from train.data.text.packing import Rows
from train.models.encoder import build_masked_lm
from train.storage.folders import LocalFolder, sha256_file
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
    batch: int


SHAPES = {
    "base": Shape("albert_base", 30000, 128, 8),
    "demo": Shape("albert_tiny", 2000, 64, 32),
    "long": Shape("albert_base", 30000, 512, 2),
    "base_gpu": Shape("albert_base", 30000, 128, 128),
    "long_gpu": Shape("albert_base", 30000, 512, 32),
    "large_gpu": Shape("albert_large", 30000, 128, 64),
    "large_long_gpu": Shape("albert_large", 30000, 512, 16),
    "xlarge_gpu": Shape("albert_xlarge", 30000, 128, 32),
    "xlarge_long_gpu": Shape("albert_xlarge", 30000, 512, 8),
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


def config(folder: Path, shape: Shape, precision: str, steps: int, compile: str = "none") -> TrainConfig:
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
            f"backend.device={DEVICE.type}",
            f"backend.precision={precision}",
            f"backend.compile={compile}",
            "optim.lr=1e-4",
        ],
    )


def ready_batches(folder: Path, shape: Shape, steps: int) -> list[data_batches.Batch]:
    """The batches that our loop sees, made beforehand."""
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
