"""Sequences to batches of fixed shape, and the loader that prepares them beside the training step.

A batch is a dict of host tensors under "inputs" and the number of labels in it as "count": a plain int, so that the
global count is known on the host before the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from train.config import InputError, Unreachable
from train.data.masking import IGNORE_INDEX, Masker
from train.data.order import PADDING
from train.data.shards import ShardSet
from train.preempt import leave_signals_to_the_parent

Batch = dict[str, Any]
EVAL_EPOCH = 2**40  # no training epoch: every evaluation hides the same tokens, others than training does


class MaskedRows(Dataset[Batch]):
    """Token sequences, masked as they are drawn. Items are `epoch * rows + row`; PADDING has no labels."""

    def __init__(self, shards: ShardSet, masker: Masker, *, is_training: bool) -> None:
        self.shards, self.masker, self.is_training = shards, masker, is_training

    def __len__(self) -> int:
        return len(self.shards)

    def __getitems__(self, items: list[int]) -> Batch:
        """A batch; or, when a shard cannot be had, what to tell about it (see failure_of)."""
        try:
            return self.draw(items)
        except (InputError, Unreachable) as error:
            return {"inputs": {}, "count": 0, "failure": error}

    def draw(self, items: list[int]) -> Batch:
        """input_ids, token_type_ids [B, S] and positions, labels [B, P], all int64, drawn at once."""
        numbers = np.asarray(items, np.int64)
        is_padding = numbers == PADDING
        epochs, rows = np.divmod(np.where(is_padding, 0, numbers), len(self.shards))
        if not self.is_training:
            epochs = np.full_like(epochs, EVAL_EPOCH)
        drawn = self.shards.rows(rows)
        masked = self.masker(drawn.tokens, epochs, rows)
        labels = np.where(is_padding[:, None], IGNORE_INDEX, masked.labels)
        segments = np.arange(drawn.tokens.shape[1]) >= drawn.pivot[:, None]
        inputs = {
            "input_ids": torch.from_numpy(masked.input_ids),
            "token_type_ids": torch.from_numpy(segments.astype(np.int64)),
            "positions": torch.from_numpy(masked.positions),
            "labels": torch.from_numpy(labels),
        }
        return {"inputs": inputs, "count": int((labels != IGNORE_INDEX).sum())}


def failure_of(batches: Iterable[Batch]) -> InputError | Unreachable | None:
    """Why a batch could not be drawn. It travels as a batch through loader processes and threads, so that the rank
    gets to tell the others at a step's end instead of leaving them waiting.
    """
    return next((batch["failure"] for batch in batches if "failure" in batch), None)


def as_it_is(batch: Any) -> Any:
    return batch


def loader(
    dataset: Dataset[Batch], order: Iterable[list[int]], *, num_workers: int, prefetch: int, pin_memory: bool
) -> DataLoader[Batch]:
    """Batches in the given order, made by worker processes (or, with none, when asked for)."""
    return DataLoader(
        dataset,
        batch_sampler=order,
        collate_fn=as_it_is,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,  # shares the memory maps instead of copying them
        worker_init_fn=leave_signals_to_the_parent,
        generator=torch.Generator(),  # else it draws from the one that dropout uses, and a resume differs
    )


def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The micro batches of one optimizer step at a time."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group
