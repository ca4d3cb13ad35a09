"""Token shards: safetensors files with sequences of one length.

A data set is a folder: `manifest.json tokenizer/ train-00000.safetensors ... validation-00000.safetensors`. Each shard
has `tokens` [rows, seq_len] (uint16 or uint32), `pivot` [rows] uint16 and `same_document` [rows] uint8 (packing.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict

import numpy as np
from safetensors.numpy import save

from train.config import InputError, check
from train.data.files.errors import naming
from train.data.shards.manifest import MAX_HEADER_BYTES, DataManifest, Shard
from train.machine.memory import total_memory_bytes
from train.machine.processes import LIBC
from train.storage.folders import Folder, sha256_bytes
from train.storage.schema import (
    BadContent,
    FileName,
    Sha256,
    read_object,
    record,
)

MAPPED_SHARDS = 8192  # maximum per ShardSet; each is a memory map, of which Linux allows 65,530 (vm.max_map_count)
STORED_TYPES = {
    "U8": "<u1",
    "U16": "<u2",
    "U32": "<u4",
}  # safetensors' dtype names, and numpy's


@dataclass
class Rows:
    """Packed sequences: tokens [R, S] of the shards' dtype, pivot [R] uint16, same_document [R] uint8."""

    tokens: np.ndarray
    pivot: np.ndarray  # index of B's first token
    same_document: np.ndarray  # 1 if A and B are from one document, so that they have an order

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def concatenate(parts: list[Rows]) -> Rows:
        tensors = {}
        for name in ROW_TENSORS:
            of_parts = [getattr(part, name) for part in parts]
            tensors[name] = np.concatenate(of_parts)
        return Rows(**tensors)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(**{name: tensor[rows] for name, tensor in vars(self).items()})


ROW_TENSORS = tuple(field.name for field in fields(Rows))


def write_shard(folder: Folder, name: str, rows: Rows) -> Shard:
    """Write one shard atomically."""
    content = save({name: np.ascontiguousarray(tensor) for name, tensor in vars(rows).items()})
    folder.write(name, content)
    return Shard(
        file=FileName(name),
        rows=len(rows),
        bytes=len(content),
        sha256=Sha256(sha256_bytes(content)),
    )


class ShardSet:
    """The sequences of one split, memory-mapped, numbered in the manifest's order.

    A shard is mapped when it is first read. For data in S3, `wait` must first block until the shards are on disk
    (ShardCache.wait). At most MAPPED_SHARDS remain mapped.
    """

    def __init__(
        self,
        folder: Path,
        manifest: DataManifest,
        split: str,
        wait: Callable[[Sequence[Shard]], None] | None = None,
    ) -> None:
        self.folder = folder
        self.shards = manifest.splits[split]
        self.wait = wait
        self.first_rows = np.cumsum([0, *(shard.rows for shard in self.shards)])
        # The tensors of the mapped shards, at most MAPPED_SHARDS, most recently used last.
        self.maps: dict[int, dict[str, np.ndarray]] = {}
        # Reading ahead helps only if a row's neighbours are still in memory when their turn comes.
        self.reads_ahead = sum(shard.bytes for shard in self.shards) <= total_memory_bytes()
        self.vocab_size = manifest.tokenizer.vocab_size
        # The shape and dtype of a row in each tensor.
        self.layout: dict[str, tuple[tuple[int, ...], np.dtype]] = {
            "tokens": ((manifest.seq_len,), np.dtype(manifest.dtype)),
            "pivot": ((), np.dtype(np.uint16)),
            "same_document": ((), np.dtype(np.uint8)),
        }

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def rows(self, numbers: np.ndarray) -> Rows:
        """Return the sequences with these numbers, in this order."""
        return Rows(*self.gather(numbers, ROW_TENSORS))

    def gather(self, numbers: np.ndarray, names: Sequence[str]) -> list[np.ndarray]:
        """Return the tensors `names` of sequences `numbers` [N]: tokens [N, seq_len], pivot and same_document [N].

        Raises IndexError if there is no such sequence, InputError if a token is not in the vocabulary.
        """
        order = np.argsort(numbers)
        ascending = numbers[order]
        if len(numbers) and not 0 <= ascending[0] <= ascending[-1] < len(self):
            asked = f"sequences {ascending[0]} to {ascending[-1]}"
            raise IndexError(f"{asked}, but there are {len(self)}")
        shard_of = np.searchsorted(self.first_rows, ascending, "right") - 1
        needed, firsts = np.unique(shard_of, return_index=True)
        shards = needed.tolist()
        ends = [*firsts[1:], len(numbers)]
        gathered = []
        for name in names:
            shape, dtype = self.layout[name]
            gathered.append(np.empty((len(numbers), *shape), dtype))
        self.open(shards)
        for shard, first, end in zip(shards, firsts, ends, strict=True):
            local = ascending[first:end] - self.first_rows[shard]
            tensors = self.tensors(shard)
            for name, values in zip(names, gathered, strict=True):
                output = values[first:end]
                # The mode "clip" writes directly to the output; the default mode gathers into a copy first.
                tensors[name].take(local, 0, output, "clip")
                if name == "tokens":
                    self.check_tokens(shard, int(output.max()))
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        return [values.take(position, 0) for values in gathered]

    def check_tokens(self, number: int, largest: int) -> None:
        """Raise InputError if the largest token of a shard's rows is not in the vocabulary."""
        if largest >= self.vocab_size:
            raise InputError(
                f"{self.folder / self.shards[number].file} has token id {largest}, but its vocabulary has "
                f"{self.vocab_size} tokens; prepare again"
            )

    def open(self, numbers: list[int]) -> None:
        """Wait until the shards with these indices are on disk, and mark those already mapped as most recently used."""
        new = [number for number in numbers if number not in self.maps]
        for number in set(numbers) - set(new):
            self.maps[number] = self.maps.pop(number)
        if self.wait is None or not new:
            return
        self.release(numbers)
        self.wait([self.shards[number] for number in new])

    def release(self, kept: list[int]) -> None:
        """Unmap deleted shards that are not to be `kept`: a deleted file takes space while it is mapped."""
        # The oldest are deleted first.
        for number in list(self.maps):
            if number in kept or (self.folder / self.shards[number].file).exists():
                return
            del self.maps[number]

    def tensors(self, number: int) -> dict[str, np.ndarray]:
        """Return the mapped tensors of a shard on disk. Raises InputError if it does not match the manifest."""
        if number in self.maps:
            return self.maps[number]
        shard = self.shards[number]
        path = self.folder / shard.file
        tensors = map_tensors(path, reads_ahead=self.reads_ahead)
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for name, (shape, dtype) in self.layout.items():
            wanted = ((shard.rows, *shape), dtype)
            check(
                found.get(name) == wanted,
                f"{path} does not have the {shard.rows} sequences listed in the manifest; prepare again",
            )
        self.maps[number] = tensors
        if len(self.maps) > MAPPED_SHARDS:
            del self.maps[next(iter(self.maps))]
        return tensors


def map_tensors(path: Path, *, reads_ahead: bool = True) -> dict[str, np.ndarray]:
    """Return the ROW_TENSORS of a file, memory-mapped without copies. Raises InputError if it is not safetensors.

    With `reads_ahead`, the kernel also reads the data around a row when it reads the row. The header is not parsed by
    safetensors, because its map of the file would always read ahead.
    """
    import torch  # torch's maps need no open file, unlike Python's mmap

    with path.open("rb", buffering=0) as file:
        head = file.read(8 + MAX_HEADER_BYTES)
        file_bytes = os.fstat(file.fileno()).st_size
    tensors = {}
    # Shape and bytes may not match.
    with naming(f"{path} is not a shard", (ValueError,), "; prepare the data again"):
        layout, first = read_header(head)
        data = torch.from_file(str(path), size=file_bytes, dtype=torch.uint8).numpy()
        if not reads_ahead:
            address = ctypes.c_void_p(data.ctypes.data)
            length = ctypes.c_size_t(data.nbytes)
            LIBC.madvise(address, length, mmap.MADV_RANDOM)
        content = data[first:]
        for name, stored in layout.items():
            begin, end = stored["data_offsets"]
            dtype = STORED_TYPES[stored["dtype"]]
            values = content[begin:end].view(dtype)
            tensors[name] = values.reshape(stored["shape"])
    return tensors


class Stored(TypedDict):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]  # the tensor's bytes, [begin, end)


def read_header(head: bytes) -> tuple[dict[str, Stored], int]:
    """Return the ROW_TENSORS in a safetensors header, and the position in the file at which the data begins.

    `head`: the first bytes of the file. Raises BadContent if they are not such a header.
    """
    header_bytes = int.from_bytes(head[:8], "little")
    if not 0 < header_bytes <= len(head) - 8:
        raise BadContent(f"the length of its header is {header_bytes} bytes")
    header = read_object(head[8 : 8 + header_bytes])
    tensors: dict[str, Stored] = {}
    for name in ROW_TENSORS:
        if name in header:
            stored: Stored = record(Stored, header[name], name)
            if stored["dtype"] in STORED_TYPES:
                tensors[name] = stored
    return tensors, 8 + header_bytes
