"""Token shards: safetensors files of sequences of one length, and the manifest that makes a data set of them.

A data set is a folder: `manifest.json tokenizer/ train-00000.safetensors ... validation-00000.safetensors`. Each shard
holds `tokens` [rows, seq_len] (uint16 or uint32), `pivot` [rows] uint16 and `same_document` [rows] uint8 (packing.py).
The manifest is written last, names every shard with rows, bytes and sha256, and carries its own checksum, which is
the data set's id. Readers open what the manifest names and nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from train.config import InputError, check
from train.data.packing import Rows
from train.storage import Folder, LocalFolder, Mismatch, read_again, sha256_file, sha256_json, wait_for_file
from train.untrusted import BadContent, FileName, Sha256, read_object, record, shown

FORMAT = 1  # raised when a reader of today could not read the files of tomorrow
SPLITS = ("train", "validation")
DTYPES = ("uint16", "uint32")  # of tokens
MAX_SEQ_LEN = 2**16 - 1  # what pivot, uint16, can point into
MAX_HEADER_BYTES = 1024  # of a shard's file: three tensors take some 250
TOKENIZER_FILE = "tokenizer/tokenizer.json"  # what the manifest has the checksum of


@dataclass(frozen=True)
class TokenizerInfo:
    """What the manifest of prepared data says of its tokenizer."""

    sha256: Sha256  # of tokenizer.json
    vocab_size: int
    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    special_ids: list[int]  # never masked, never a random replacement


@dataclass(frozen=True)
class Shard:
    file: FileName
    rows: int
    bytes: int
    sha256: Sha256


@dataclass(frozen=True)
class Manifest:
    id: str  # sha256 of everything below
    seq_len: int
    dtype: str  # of tokens
    splits: dict[str, list[Shard]]
    tokenizer: TokenizerInfo
    counts: dict[str, float]  # documents, tokens, unigram_entropy (nats per token), ...
    config: dict[str, Any]  # of the preparation

    @property
    def shards(self) -> list[Shard]:
        """Of all splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits[split])


def read_manifest(where: Folder | Path) -> Manifest:
    """The manifest of a prepared folder. InputError if there is none, or if it is not what the preparation wrote."""
    folder = LocalFolder(where) if isinstance(where, Path) else where
    place = folder.location
    if isinstance(folder, LocalFolder):
        advice = "give the folder that python -m train.prepare output=... wrote"
        check(not folder.path.is_file(), f"data.path={place} is a file, not a folder; {advice}")
        missing = f"data.path={place} does not exist; python -m train.prepare output={place} writes it"
        check(folder.path.is_dir(), missing)
    try:
        return read_whole_manifest(folder)
    except FileNotFoundError:
        raise InputError(
            f"{place} holds no manifest.json: nothing was prepared there (python -m train.prepare output={place}), or "
            "the preparation did not finish"
        ) from None


@read_again
def read_whole_manifest(folder: Folder) -> Manifest:
    """Raises Mismatch if it is not what it says of itself, FileNotFoundError if there is none."""
    content = wait_for_file(folder, "manifest.json", folder.read)
    try:
        return parse_manifest(content)
    except BadContent as error:
        raise Mismatch(f"{folder.location}/manifest.json is not a manifest: {error}; prepare the data again") from error


def parse_manifest(content: bytes) -> Manifest:
    """A manifest of which all that it says of itself is possible: names that stay in their folder, sizes that agree.

    Raises BadContent, one line, for any other: a checksum shows that nobody changed it later, not who wrote it.
    """
    body = read_object(content)
    if body.get("format") != FORMAT:
        raise BadContent(f"its format {shown(body.get('format'))} is not {FORMAT}")
    written = body.pop("id", None)
    try:
        seen = sha256_json(body)
    except (ValueError, RecursionError):
        raise BadContent("it holds what no JSON file holds") from None
    if written != seen:
        raise BadContent(f"it was changed after it was written (checksum {seen[:12]}, recorded {shown(written)[:13]})")
    manifest = record(Manifest, {key: value for key, value in body.items() if key != "format"} | {"id": written})
    fault = fault_of_manifest(manifest)
    if fault is not None:
        raise BadContent(fault)
    return manifest


def fault_of_manifest(manifest: Manifest) -> str | None:
    """What cannot be in a manifest whose fields have the right types; None if all of it can."""
    info = manifest.tokenizer
    if not 1 <= manifest.seq_len <= MAX_SEQ_LEN:
        return f"seq_len is {manifest.seq_len}, not 1 to {MAX_SEQ_LEN}"
    if manifest.dtype not in DTYPES:
        return f"dtype is {shown(manifest.dtype)}, not {' or '.join(DTYPES)}"
    if sorted(manifest.splits) != sorted(SPLITS) or not manifest.splits["train"]:
        return f"its splits are not {' and '.join(SPLITS)} with a training shard"
    (file, times), *_ = Counter(shard.file for shard in manifest.shards).most_common()
    if times > 1:
        return f"{file} is in it {times} times"
    ids = [info.cls_id, info.sep_id, info.mask_id, info.pad_id, *info.special_ids]
    if not max(ids) < info.vocab_size <= np.iinfo(manifest.dtype).max + 1:
        return f"a vocabulary of {info.vocab_size} pieces and special ids up to {max(ids)} as {manifest.dtype}"
    row_bytes = manifest.seq_len * np.dtype(manifest.dtype).itemsize + 3  # with pivot and same_document
    for shard in manifest.shards:
        if not shard.file.endswith(".safetensors"):
            return f"{shard.file} is not the name of a shard, NAME.safetensors"
        if shard.rows < 1:
            return f"{shard.file} holds no sequence"
        if not 8 < shard.bytes - shard.rows * row_bytes <= MAX_HEADER_BYTES:
            return f"{shard.file} with {shard.rows} sequences of {manifest.seq_len} cannot have {shard.bytes} bytes"
    return None


def fault_of(shard: Shard, place: str, size: int | None, sha256: Callable[[], str] | None) -> str | None:
    """What is wrong with a shard found at `place`, in words; None if it is what the manifest says.

    `size` in bytes, None if it is not there; `sha256` gives that of its content, None leaves it out.
    """
    if size is None:
        return f"{place} is missing, but the manifest names it; prepare the data again"
    if size != shard.bytes:
        return f"{place} has {size} bytes, the manifest says {shard.bytes}; prepare the data again"
    seen = shard.sha256 if sha256 is None else sha256()
    if seen != shard.sha256:
        return f"{place} is damaged: sha256 {seen[:12]}, the manifest says {shard.sha256[:12]}; prepare the data again"
    return None


def fault_of_file(folder: Path, shard: Shard, *, checksum: bool) -> str | None:
    path = folder / shard.file
    size = path.stat().st_size if path.is_file() else None
    return fault_of(shard, str(path), size, (lambda: sha256_file(path)) if checksum else None)


def check_files(folder: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Every shard is there with its length and, if asked, its checksum; so is the tokenizer. InputError if not."""
    for shard in manifest.shards:
        fault = fault_of_file(folder, shard, checksum=checksums)
        check(fault is None, fault or "")
    tokenizer = folder / TOKENIZER_FILE
    check(tokenizer.is_file(), f"{tokenizer} is missing; prepare the data again")
    check(
        sha256_file(tokenizer) == manifest.tokenizer.sha256,
        f"{tokenizer} is not the tokenizer that made the shards; put the original back or prepare the data again",
    )


class ShardSet:
    """The sequences of one split, memory-mapped, by their number in the manifest's order.

    Shards are opened when first read, after `wait` has made sure of them (S3: cache.py). Copies for other processes,
    forked or spawned, open their own.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, split: str, wait: Callable[[Shard, float], None] | None = None
    ) -> None:
        self.folder, self.shards, self.wait = folder, manifest.splits[split], wait
        self.first_rows = np.cumsum([0, *(shard.rows for shard in self.shards)])
        self.maps: dict[int, dict[str, np.ndarray]] = {}
        self.seq_len, self.dtype = manifest.seq_len, np.dtype(manifest.dtype)
        self.vocab_size = manifest.tokenizer.vocab_size

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "maps": {}}

    def rows(self, numbers: np.ndarray) -> Rows:
        """The sequences with these numbers, in their order."""
        return Rows(*self.gather(numbers, ("tokens", "pivot", "same_document")))

    def gather(self, numbers: np.ndarray, names: Sequence[str]) -> list[np.ndarray]:
        """What the sequences with these numbers [N] have under each name: tokens [N, seq_len], pivot and same_document
        [N]. IndexError for a number that no sequence has.
        """
        began_s, order = time.monotonic(), np.argsort(numbers)
        ascending = numbers[order]
        if len(numbers) and not 0 <= ascending[0] <= ascending[-1] < len(self):
            raise IndexError(f"sequences {ascending[0]} to {ascending[-1]} of {len(self)}")
        cuts = np.searchsorted(ascending, self.first_rows)
        shapes = {"tokens": (self.seq_len,)}
        dtypes = {"tokens": self.dtype, "pivot": np.uint16, "same_document": np.uint8}
        found = [np.empty((len(numbers), *shapes.get(name, ())), dtypes[name]) for name in names]
        for shard in np.flatnonzero(np.diff(cuts)).tolist():
            first, last = cuts[shard], cuts[shard + 1]
            local, tensors = ascending[first:last] - self.first_rows[shard], self.tensors(shard, began_s)
            for name, values in zip(names, found, strict=True):
                # "clip" writes straight into `out`; the default mode gathers into a copy first
                tensors[name].take(local, 0, values[first:last], "clip")
                if name == "tokens":
                    self.check_tokens(values[first:last], self.shards[shard])
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return [values.take(place, 0) for values in found]

    def tensors(self, number: int, began_s: float) -> dict[str, np.ndarray]:
        if number not in self.maps:
            # A file that was deleted from the cache takes room as long as it is mapped here.
            self.maps = {old: maps for old, maps in self.maps.items() if (self.folder / self.shards[old].file).exists()}
            if self.wait is not None:
                self.wait(self.shards[number], began_s)
            self.maps[number] = self.opened(self.shards[number])
        return self.maps[number]

    def opened(self, shard: Shard) -> dict[str, np.ndarray]:
        """A shard's tensors, mapped. InputError if they are not those that the manifest promises."""
        tensors, rows = map_tensors(self.folder / shard.file), shard.rows
        wanted = {
            "tokens": ((rows, self.seq_len), self.dtype),
            "pivot": ((rows,), np.dtype(np.uint16)),
            "same_document": ((rows,), np.dtype(np.uint8)),
        }
        seen = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        ok = all(seen.get(name) == promised for name, promised in wanted.items())
        check(ok, f"{self.folder / shard.file} does not hold the {rows} sequences of its manifest; prepare again")
        return tensors

    def check_tokens(self, tokens: np.ndarray, shard: Shard) -> None:
        largest = int(tokens.max(initial=0))
        check(
            largest < self.vocab_size,
            f"{self.folder / shard.file} holds token {largest}, its vocabulary has {self.vocab_size}; prepare again",
        )


def map_tensors(path: Path) -> dict[str, np.ndarray]:
    """Memory-map a safetensors file (layout: https://github.com/huggingface/safetensors#format), copying nothing.

    InputError for a file whose header is not true of it.
    """
    names = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I64": "<i8"}
    try:
        with safe_open(path, "numpy"):  # compares sizes, shapes and offsets
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = read_object(file.read(header_bytes))
    except (SafetensorError, BadContent) as error:
        raise InputError(f"{path} is not a shard: {error}; prepare the data again") from error
    data = np.asarray(np.memmap(path, np.uint8, "r", offset=8 + header_bytes))  # memmap's own indexing is slow
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in names:
            first, last = entry["data_offsets"]
            tensors[name] = data[first:last].view(names[entry["dtype"]]).reshape(entry["shape"])
    return tensors
