"""Batches of fixed shape from sequences, and the loader that prepares them concurrently with training.

A batch is a dict: "inputs" has host tensors, "count" the number of labels, and "tokens" the number of tokens.
These counts are plain numbers, so that the global count is known on the host before the forward pass.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from train.data.batches.masking import IGNORE_INDEX, Masker
from train.data.random_bits import hash_uniform
from train.data.shards.format import ROW_TENSORS, ShardSet
from train.data.shards.order import PADDING
from train.machine.torchrun import leave_signals_to_the_parent
from train.storage.atomic_io import free_bytes, warn_once

Batch = dict[str, Any]
MULTI_BATCH_ROWS = 1024  # at most this many sequences,
MULTI_BATCH = 32  # and at most this many micro batches, are drawn together
# The index of the random number that decides whether to swap; masking.py has the other indices.
ORDER = 4
SHARED_MEMORY = Path("/dev/shm")  # where loader processes put batches for their rank
MOST_TMPDIR = 75  # bytes: sockets in it are named pymp-xxxxxxxx/listener-xxxxxxxx, and may have 107 bytes (unix(7))
LARGER = "enlarge it (docker run --shm-size=8g), or lower data.num_workers, to 0 if necessary"
SHARED_BYTES = 2**30  # free space that loader processes need; a container has 64 MiB by default
# The epoch that seeds every evaluation's masks, so that they are equal. Training never reaches it.
EVAL_EPOCH = 2**40


class Drawable(Protocol):
    """A data set that makes several micro batches at a time."""

    def draw(self, items: np.ndarray) -> Batch:
        """Return K micro batches of the items [K, B] as one batch, whose "inputs" are tensors [K, B, ...].

        "count" [K] has the number (or weight) of labels in each micro batch, "tokens" [K] its number of tokens without
        padding.
        """


@dataclass(frozen=True)
class Swapper:
    """A random swap of two segments, a function of (seed, epoch, sequence). The model predicts their order.

    ALBERT (https://arxiv.org/abs/1909.11942, section 3.1) swaps half of the pairs; here each epoch draws a new half.
    """

    seed: int

    def __call__(
        self,
        tokens: np.ndarray,
        pivot: np.ndarray,
        same_document: np.ndarray,
        epochs: np.ndarray,
        rows: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Swap the segments in about half of `tokens` [B, S]: `[CLS] A [SEP] B [SEP]` becomes `[CLS] B [SEP] A [SEP]`.

        `pivot` [B]: the index of B's first token. Returns tokens, pivots, and labels [B] int64: 0 in order, 1 swapped,
        IGNORE_INDEX if A and B are from different documents (`same_document` [B] is 0) or one of them is empty.
        """
        seq_len = tokens.shape[1]
        pivot = pivot.astype(np.int64)
        is_whole = (pivot > 2) & (pivot < seq_len - 1)  # neither segment is empty
        has_order = same_document.astype(bool) & is_whole
        drawn = hash_uniform(self.seed, epochs, rows, 0, ORDER)
        swaps = has_order & (drawn < 0.5)
        source = np.where(swaps[:, None], swapped(pivot, seq_len), np.arange(seq_len))
        labels = np.where(has_order, swaps, IGNORE_INDEX).astype(np.int64)
        pivots = np.where(swaps, seq_len + 1 - pivot, pivot)
        moved = np.take_along_axis(tokens, source, 1)
        return moved, pivots, labels


def swapped(pivot: np.ndarray, seq_len: int) -> np.ndarray:
    """Return [B, S]: the indices in `[CLS] A [SEP] B [SEP]` that make it `[CLS] B [SEP] A [SEP]`.

    `pivot` [B]: the index of B's first token.
    """
    index = np.arange(seq_len)[None]
    begin_of_b = pivot[:, None]
    begin_of_a = seq_len + 1 - begin_of_b  # after the swap; before it, A begins at 1
    source = np.where(index < begin_of_a, begin_of_b + index - 1, 1 + index - begin_of_a)
    source = np.where(index == begin_of_a - 1, begin_of_b - 1, source)  # the [SEP] after A
    source[:, 0] = 0
    source[:, -1] = seq_len - 1
    return source


class MaskedRows:
    """Token sequences, masked when they are drawn. An item is `epoch * rows + row`; PADDING has no labels."""

    def __init__(
        self,
        shards: ShardSet,
        masker: Masker,
        *,
        is_training: bool,
        swapper: Swapper | None = None,
        sample: np.ndarray | None = None,
    ) -> None:
        """Mask rows of `shards`; a `swapper` first swaps segments. If there is a `sample` [n], items index its rows."""
        self.shards = shards
        self.masker = masker
        self.swapper = swapper
        self.is_training = is_training
        self.sample = sample
        self.last_item = 0  # drawn in place of PADDING: this machine may lack the shards of others

    def __len__(self) -> int:
        return len(self.shards)

    def draw(self, items: np.ndarray) -> Batch:
        """Return input_ids, token_type_ids [K, B, S], positions, labels [K, B, P] and, with a swapper, order [K, B]."""
        is_padding = items == PADDING
        if not is_padding.all():
            self.last_item = int(items.max())
        epochs, rows = np.divmod(np.where(is_padding, self.last_item, items), len(self.shards))
        if self.sample is not None:
            rows = self.sample[rows]
        if not self.is_training:
            epochs = np.full_like(epochs, EVAL_EPOCH)
        tokens, pivot, order = self.sequences(epochs, rows)
        micro_batches = zip(tokens, epochs, rows, strict=True)
        masked = [self.masker(*micro_batch) for micro_batch in micro_batches]
        labels = np.stack([each.labels for each in masked])
        labels[is_padding] = IGNORE_INDEX
        seq_len = tokens.shape[-1]
        segments = np.arange(seq_len) >= pivot[..., None]
        arrays = {
            "input_ids": np.stack([each.input_ids for each in masked]),
            "token_type_ids": segments.astype(np.int64),
            "positions": np.stack([each.positions for each in masked]),
            "labels": labels,
        }
        if order is not None:
            arrays["order"] = np.where(is_padding, IGNORE_INDEX, order)
        num_tokens = (~is_padding).sum(1) * seq_len
        count = (labels != IGNORE_INDEX).sum((1, 2))
        return {
            "inputs": {name: torch.from_numpy(array) for name, array in arrays.items()},
            "count": count.tolist(),
            "tokens": num_tokens.tolist(),
        }

    def sequences(
        self, epochs: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return tokens [K, B, S], pivots [K, B] and, with a swapper, the labels of the order [K, B]."""
        if self.swapper is None:
            tokens, pivot = self.shards.gather(rows.ravel(), ("tokens", "pivot"))
            order = None
        else:
            tokens, pivot, same_document = self.shards.gather(rows.ravel(), ROW_TENSORS)
            tokens, pivot, order = self.swapper(
                tokens, pivot, same_document, epochs.ravel(), rows.ravel()
            )
            order = order.reshape(rows.shape)
        return tokens.reshape(*rows.shape, -1), pivot.reshape(rows.shape), order


class MultiBatch(Dataset[Batch]):
    """A data set that draws several micro batches per call, because each call, and each tensor sent, costs time.

    If they cannot be drawn, the batch has the exception under "failure". The rank can then report it to the other ranks
    at the end of a step instead of leaving them waiting.
    """

    def __init__(self, dataset: Drawable) -> None:
        self.dataset = dataset

    def __getitems__(self, micro_batches: list[np.ndarray]) -> Batch:
        try:
            return self.dataset.draw(np.stack(micro_batches))
        except Exception as error:
            return {
                "inputs": {},
                "count": [],
                "tokens": [],
                "failure": error,
            }


def failure_of(batches: Iterable[Batch]) -> Exception | None:
    """Return why a batch could not be drawn; None if all could."""
    return next((batch["failure"] for batch in batches if "failure" in batch), None)


class Batches:
    """Micro batches in the given order, drawn by worker processes, or by this process if there are none."""

    def __init__(
        self,
        dataset: Drawable,
        order: Iterable[Any],
        *,
        batch_size: int,
        num_workers: int,
        prefetch: int,
        pin_memory: bool,
        multi_batch: int | None = None,  # the maximum drawn together; None: MULTI_BATCH
    ) -> None:
        fault = worker_fault() if num_workers else ""
        if fault:
            what = f"data.num_workers={num_workers}: the rank reads its data itself, since {fault}"
            warn_once("loader", what)
            num_workers = 0
        limits = (MULTI_BATCH, multi_batch or MULTI_BATCH, MULTI_BATCH_ROWS // batch_size)
        num_drawn = max(1, min(limits))
        self.groups = batched(order, num_drawn)
        self.dataset = MultiBatch(dataset)
        self.loader: DataLoader[Batch] | None = None
        options: dict[str, Any] = {}
        if num_workers:
            options["prefetch_factor"] = -(-prefetch // num_drawn)
            options["multiprocessing_context"] = "fork"  # forked workers share the memory maps
        if num_workers or pin_memory:
            # This runs before multiprocessing's exit function, which was registered earlier.
            atexit.register(end_workers)
            self.loader = DataLoader(
                self.dataset,
                batch_sampler=self.groups,
                collate_fn=dict,  # MultiBatch has already built the batch
                num_workers=num_workers,
                pin_memory=pin_memory,
                worker_init_fn=leave_signals_to_the_parent,
                generator=torch.Generator(),  # drawing from the default one would change dropout after a resume
                **options,
            )

    def __iter__(self) -> Iterator[Batch]:
        # Without workers and page-locked memory, a DataLoader would only cost time.
        source: Iterable[Batch] = map(self.dataset.__getitems__, self.groups)
        if self.loader is not None:
            source = self.loader
        for drawn in source:
            names = list(drawn["inputs"])
            tensors = [tensor.unbind(0) for tensor in drawn["inputs"].values()]
            micro_batches = zip(drawn["count"], drawn["tokens"], *tensors, strict=True)
            for count, tokens, *of_batch in micro_batches:
                inputs = dict(zip(names, of_batch, strict=True))
                yield {
                    "inputs": inputs,
                    "count": count,
                    "tokens": tokens,
                }
            if "failure" in drawn:
                yield {
                    "inputs": {},
                    "count": 0,
                    "tokens": 0,
                    "failure": drawn["failure"],
                }
                return


def worker_fault() -> str:
    """Return why this machine cannot have loader processes, which need shared memory and sockets; "" if it can."""
    if not SHARED_MEMORY.is_dir() or free_bytes(SHARED_MEMORY) < SHARED_BYTES:
        return f"{SHARED_MEMORY} has less than {SHARED_BYTES / 1e9:.2g} GB of free space; {LARGER}"
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MOST_TMPDIR:
        return f"TMPDIR={folder} is longer than {MOST_TMPDIR} bytes, too long for sockets"
    return ""


def end_workers() -> None:
    """End loader workers at exit, before multiprocessing waits for them.

    multiprocessing sends SIGTERM, which loader workers ignore, and would wait for them forever if an exception
    still refers to the loader.
    """
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()


def batched(items: Iterable[Any], size: int) -> Iterable[list[Any]]:
    """Yield the items of an iterable, `size` at a time; the last list may be shorter."""
    return BatchSampler(items, size, drop_last=False)
