"""A folder of prepared examples: tables that `datasets.load_from_disk` reads, a tokenizer, and tables.json.

tables.json is written last, and has the checksums of all other files and of itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from train.config import InputError
from train.storage.atomic_io import write_atomic
from train.storage.checksums import check_entries, sealed, unsealed
from train.storage.folders import sha256_file
from train.storage.schema import (
    BadContent,
    FileEntry,
    FileName,
    RelativePath,
    Sha256,
    checked,
    read_object,
    record,
)

NAME = "tables.json"
FORMAT = 3


class SplitLines(TypedDict, total=False):
    """Counts for a split that was read from CSV."""

    read_lines: int
    read_rows: int  # parsed from these lines, including bad rows


class SplitEntry(SplitLines):
    """The facts of a split (see table_facts.py)."""

    examples: int
    rows: int
    tokens: int
    label_counts: dict[str, int]
    length_quantiles: dict[str, int]
    length_histogram: dict[str, list[int]]
    padding_share: float
    notes: dict[str, float]
    bad_rows: int
    bad_examples: list[str]
    left_out: int


class Facts(TypedDict):
    """The content of tables.json."""

    format: int
    id: Sha256  # the hash of the token rows and the labels
    kind: str
    labels: list[str]
    remarks: list[str]  # what seems strange about the labels
    settings: dict[str, Any]
    splits: dict[str, SplitEntry]  # the keys, names of splits, are FileNames
    files: dict[RelativePath, FileEntry]


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write tables.json: `facts` and the checksums of all files in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
        }
        for path in paths
    }
    # plain JSON types, equal to what is read back
    body = json.loads(json.dumps({**facts, "files": files}))
    write_atomic(
        folder / NAME, (json.dumps(sealed(body), indent=1, ensure_ascii=False) + "\n").encode()
    )


def parse_facts(content: bytes) -> Facts:
    """Parse tables.json. Raises BadContent if another version wrote it, it was changed, or a value is impossible."""
    body = read_object(content)
    if body.get("format") != FORMAT:
        raise BadContent("it was written by another version of this program")
    body = unsealed(body)
    facts = record(Facts, body)
    for split in facts["splits"]:
        checked(FileName, split, "splits")
    return facts


def whole_facts(folder: Path, *, checksums: bool) -> Facts | None:
    """Return the facts of a cached folder; None if any of its files is missing or damaged."""
    try:
        facts = parse_facts((folder / NAME).read_bytes())
        check_entries(folder, facts["files"], checksums=checksums)
    except (FileNotFoundError, NotADirectoryError, InputError):
        return None
    return facts
