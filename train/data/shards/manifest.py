"""The manifest of a data set of token shards, written last. It lists the rows, bytes and sha256 of every shard.

Its checksum of itself is the data set's id. Readers open only the files that the manifest lists. This module imports
no library of arrays: a plan and the first checks of a run read the manifest too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from train.config import InputError, check
from train.data.files.errors import naming
from train.storage.checksums import check_entries, sealed, unsealed
from train.storage.folders import Folder, LocalFolder, canonical_json, sha256_file
from train.storage.schema import (
    BadContent,
    FileEntry,
    FileName,
    Sha256,
    read_object,
    record,
    shown,
)

FORMAT = 1  # increase this when older readers cannot read new files
SPLITS = ("train", "validation")
DTYPES = {"uint16": 2, "uint32": 4}  # the dtypes of tokens, and their bytes
MAX_SEQ_LEN = 2**16 - 1  # pivot is uint16
MAX_HEADER_BYTES = 1024  # maximum per shard file; three tensors take about 250
TOKENIZER_FILE = "tokenizer/tokenizer.json"  # the manifest has its checksum


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer of prepared data, as its manifest describes it."""

    sha256: Sha256  # the checksum of tokenizer.json
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

    @property
    def entry(self) -> FileEntry:
        return {"bytes": self.bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class DataManifest:
    id: str  # sha256 of everything below
    seq_len: int
    dtype: str  # the dtype of tokens
    splits: dict[str, list[Shard]]
    tokenizer: TokenizerInfo
    counts: dict[str, float]  # documents, tokens, unigram_entropy (nats per token), ...
    config: dict[str, Any]  # the settings of the preparation

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of all splits."""
        return tuple(shard for shards in self.splits.values() for shard in shards)

    def rows(self, split: str) -> int:
        return sum(shard.rows for shard in self.splits[split])

    def check_length(self, seq_len: int | None, path: str) -> None:
        """Raise InputError if a run's `seq_len` is not that of these shards, which are in `path`."""
        check(
            seq_len in (None, self.seq_len),
            f"seq_len={seq_len}, but {path} has sequences of {self.seq_len}: set seq_len={self.seq_len}, or prepare "
            "the data again",
        )


def read_manifest(where: Folder | Path) -> DataManifest:
    """Return the manifest of a prepared folder. Raises InputError if it is missing or damaged."""
    folder: Folder = LocalFolder(where) if isinstance(where, Path) else where
    location = folder.location
    try:
        content = folder.read("manifest.json")
    except FileNotFoundError:
        raise InputError(
            f"{location} has no manifest.json: nothing was prepared there (baretrain prepare "
            f"output={location}), or the preparation did not finish"
        ) from None
    with naming(f"{location}/manifest.json is not a manifest", (), "; prepare the data again"):
        return parse_manifest(content)


def parse_manifest(content: bytes) -> DataManifest:
    """Parse a manifest. Raises BadContent if a value is impossible, such as a file outside the folder.

    The checksum does not replace these checks, because anyone who writes a manifest can compute it.
    """
    values = read_object(content)
    if values.get("format") != FORMAT:
        raise BadContent(f"its format {shown(values.get('format'))} is not {FORMAT}")
    body = unsealed(values, "id")
    del body["format"]
    manifest = record(DataManifest, {**body, "id": values["id"]})
    fault = fault_of_manifest(manifest)
    if fault is not None:
        raise BadContent(fault)
    return manifest


def fault_of_manifest(manifest: DataManifest) -> str | None:
    """Return which value of a manifest is impossible; None if all are possible. Types must have been checked."""
    info = manifest.tokenizer
    seq_len = manifest.seq_len
    if not 1 <= seq_len <= MAX_SEQ_LEN:
        return f"seq_len is {seq_len}, not 1 to {MAX_SEQ_LEN}"
    if manifest.dtype not in DTYPES:
        return f"dtype is {shown(manifest.dtype)}, not {' or '.join(DTYPES)}"
    token_bytes = DTYPES[manifest.dtype]
    if sorted(manifest.splits) != sorted(SPLITS) or not manifest.splits["train"]:
        return f"its splits are not {' and '.join(SPLITS)}, or there is no training shard"
    (file, times), *_ = Counter(shard.file for shard in manifest.shards).most_common()
    if times > 1:
        return f"it lists {file} {times} times"
    largest = max(info.cls_id, info.sep_id, info.mask_id, info.pad_id, *info.special_ids)
    if not largest < info.vocab_size <= 2 ** (8 * token_bytes):
        return f"a vocabulary of {info.vocab_size} tokens does not fit ids up to {largest} and dtype {manifest.dtype}"
    # 3: pivot and same_document
    row_bytes = seq_len * token_bytes + 3
    for shard in manifest.shards:
        if not shard.file.endswith(".safetensors"):
            return f"{shard.file} is not the name of a shard, NAME.safetensors"
        if shard.rows < 1:
            return f"{shard.file} has no sequences"
        header_bytes = shard.bytes - shard.rows * row_bytes
        if not 8 < header_bytes <= MAX_HEADER_BYTES:
            return f"{shard.file}: {shard.rows} sequences of {seq_len} tokens cannot have {shard.bytes} bytes"
    return None


def write_manifest(folder: Folder, **fields: Any) -> DataManifest:
    """Write the manifest. It completes the data set: readers require one. `fields`: all fields except the id."""
    body = {"format": FORMAT, **asdict(DataManifest(id="", **fields))}
    del body["id"]
    folder.write("manifest.json", canonical_json(sealed(body, "id")))
    return read_manifest(folder)


def check_files(folder: Path, manifest: DataManifest, *, checksums: bool) -> None:
    """Raise InputError if a shard's length (with `checksums` also its sha256) or the tokenizer's sha256 is wrong."""
    entries = {shard.file: shard.entry for shard in manifest.shards}
    check_entries(folder, entries, checksums=checksums)
    fault = fault_of_tokenizer(folder, manifest)
    check(fault is None, f"{fault}; put the original back or prepare the data again")


def fault_of_tokenizer(folder: Path, manifest: DataManifest) -> str | None:
    """Return what is wrong with the tokenizer in a prepared folder; None if it made the shards."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return f"{path} is missing"
    if sha256_file(path) != manifest.tokenizer.sha256:
        return f"{path} is not the tokenizer that made the shards"
    return None
