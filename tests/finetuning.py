"""How tests make a fine-tuning: one of a second, and questions to learn from."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from forks import DEVICE
from running import TINY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from train import loop
from train.config import TrainConfig
from train.run import compose as cli
from train.run.stopping import StopRequest
from train.tasks import Task, build_task

FP32 = [f"backend.device={DEVICE}", "backend.precision=fp32"]


def tuning(run_dir: Path, tokenizer: Path, *overrides: str) -> list[str]:
    """Settings but for the task and its data: two steps of eight examples. Its cache is beside the run."""
    return [
        *TINY,
        f"model.tokenizer={tokenizer}",
        f"run_dir={run_dir}",
        f"data.cache_dir={run_dir.parent / 'cache'}",
        "data.num_workers=0",
        "global_batch_size=8",
        "max_steps=2",
        "optim.lr=3e-3",
        "log_every=1",
        "telemetry.trackers=[]",
        f"backend.device={DEVICE}",
        "backend.precision=fp32",
        *overrides,
    ]


def tuned(run_dir: Path, tokenizer: Path, *overrides: str) -> Path:
    """The folder of such a run that has ended."""
    train_with(tuning(run_dir, tokenizer, *overrides))
    return run_dir


def train_with(settings: list[str], stop: StopRequest | None = None) -> tuple[str, int]:
    return loop.run(cli.load_config(TrainConfig, settings), stop or StopRequest())


def task_of(settings: list[str]) -> Task:
    return build_task(cli.load_config(TrainConfig, settings))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a file of JSON lines or, if the name ends so, of Parquet, or of CSV with a header."""
    if path.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, or of CSV."""
    if path.suffix == ".csv":
        return list(csv.DictReader(path.open(newline="")))
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch_of(rows: Any, items: Any) -> dict[str, Any]:
    """The inputs of one micro batch of these items."""
    drawn = rows.draw(np.array([items]))["inputs"]
    return {name: tensor[0] for name, tensor in drawn.items()}


def asking(
    folder: Path, texts: Sequence[str], *, train: int, dev: int, v2: bool = False
) -> list[str]:
    """Settings of a task that learns from so many questions, which are written into a folder."""
    for seed, (name, questions) in enumerate({"train": train, "dev": dev}.items()):
        (folder / f"{name}.json").write_text(
            json.dumps(squad(texts, seed=seed, questions=questions, v2=v2))
        )
    task = [
        "task=qa",
        "task.stride=8",
        f"task.unanswerable={str(v2).lower()}",
    ]
    return [
        *task,
        "data=records",
        f"data.path={folder}",
        "data.train=train.json",
        "data.validation=dev.json",
    ]


def two_lengths(folder: Path) -> list[str]:
    """Settings of a classifier of short and of long texts, which are written into a folder."""
    for part, word in {"train": "ba", "dev": "na"}.items():
        rows = [(f"{word} " * size, label) for size in (2, 20) for label in ("good", "bad")] * 20
        text = "".join(f"{text},{label}\n" for text, label in [("text", "label"), *rows])
        (folder / f"{part}.csv").write_text(text)
    settings = [
        "task=classify",
        "data=records",
        f"data.path={folder}",
        "data.train=train.csv",
        "backend=ddp",
    ]
    return [
        *settings,
        "data.validation=dev.csv",
        "model.num_layers=1",
        "data.lengths=[16]",
        "seq_len=32",
    ]


def squad(texts: Sequence[str], *, seed: int, questions: int, v2: bool = False) -> dict[str, Any]:
    """A SQuAD file: contexts of several sentences, answers of some words of theirs; in v2 every third has none."""
    rng = random.Random(seed)
    paragraphs = []
    for number in range(questions):
        context = " ".join(rng.choices(texts, k=rng.randint(1, 6)))
        words = context.split(" ")
        first = rng.randrange(len(words) - 1)
        text = " ".join(words[first : first + rng.randint(1, 2)])
        start = len(" ".join(words[:first])) + (first > 0)
        answers = [] if v2 and number % 3 == 0 else [{"text": text, "answer_start": start}]
        question = {"id": f"q{number}", "question": f"  {rng.choice(words)} ?", "answers": answers}
        paragraphs.append(
            {
                "context": context,
                "qas": [question | ({"is_impossible": not answers} if v2 else {})],
            }
        )
    return {"version": "2.0" if v2 else "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}


def word_tokenizer(words: Sequence[str], **special: str | None) -> PreTrainedTokenizerFast:
    """One that knows these words. `special`: special tokens that are others, or None."""
    names = {
        f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
    } | special
    pieces = [*filter(None, names.values()), *words]
    tokenizer = Tokenizer(
        models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """As RoBERTa's: bytes and the word " in", a space belongs to the word behind it, two separators in a pair."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120i", "\u0120in"]
    merges = [("\u0120", "i"), ("\u0120i", "n")]
    tokenizer = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(
        zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), names, strict=True)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
