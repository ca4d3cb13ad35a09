"""A folder of prepared examples: tables that `datasets.load_from_disk` reads, a tokenizer, and tables.json.

tables.json is written last, and has the checksums of all other files and of itself.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypedDict

from train.config import InputError, RecordsConfig, check, flatten
from train.data.files.errors import naming
from train.system.atomic_io import write_atomic
from train.system.checksums import check_entries, read_verified, sealed, unsealed
from train.system.folders import Folder, LocalFolder, canonical_json, sha256_file
from train.system.schema import BadContent, FileEntry, FileName, RelativePath, Sha256, checked, read_object, record

if TYPE_CHECKING:
    from train.data.records.featurizer import Featurizer

NAME = "tables.json"
FORMAT = 2


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
    settings: dict[str, Any]
    selection: dict[str, Any]
    tokenizer_sha256: Sha256
    splits: dict[str, SplitEntry]  # the keys, names of splits, are FileNames
    files: dict[RelativePath, FileEntry]


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write tables.json: `facts` and the checksums of all files in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in paths
    }
    body = json.loads(json.dumps({**facts, "files": files}))  # plain JSON types, equal to what is read back
    write_atomic(folder / NAME, (json.dumps(sealed(body), indent=1, ensure_ascii=False) + "\n").encode())


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


def find_facts(folder: Folder) -> Facts | None:
    """Return the facts in a folder's tables.json; None if the file is missing. Raises InputError if it is unusable."""
    if folder.size(NAME) is None:
        return None
    with naming(f"{folder.location}/{NAME} is damaged", (), "; prepare the data again"):
        return parse_facts(folder.read(NAME))


def whole_facts(folder: Path, *, checksums: bool) -> Facts | None:
    """Return the facts of a cached folder; None if any of its files is missing or damaged."""
    try:
        facts = parse_facts((folder / NAME).read_bytes())
        check_entries(folder, facts["files"], checksums=checksums)
    except (FileNotFoundError, NotADirectoryError, InputError):
        return None
    return facts


def save(folder: Path, target: Folder) -> None:
    """Copy prepared tables to `target`, tables.json last. Raises InputError if `target` contains other files."""
    content = LocalFolder(folder).read(NAME)
    facts = parse_facts(content)
    saved_before = find_facts(target)
    key = f"data.save_to={target.location}"
    if saved_before is not None:
        same = all(dict(saved_before)[name] == dict(facts)[name] for name in ("id", "settings", "selection"))
        check(same, f"{key} contains other prepared data; choose another folder")
        return
    strange = sorted(target.names_here() - {PurePosixPath(name).parts[0] for name in facts["files"]})
    check(not strange, f"{key} contains other files ({', '.join(strange[:3])}); choose an empty folder")
    for name in facts["files"]:
        target.write(name, (folder / name).read_bytes())
    target.write(NAME, content)


def bring(source: Folder, facts: Facts, folder: Path) -> None:
    """Copy prepared tables to `folder`, tables.json last. Raises InputError if a file is missing or damaged."""
    for name, entry in facts["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        advice = f"{NAME} lists it: save the data again"
        path.write_bytes(read_verified(source, name, entry["sha256"], advice=advice))
    (folder / NAME).write_bytes(source.read(NAME))


def check_same(facts: Facts, data: RecordsConfig, featurizer: Featurizer, tokenizer_sha256: str) -> None:
    """Raise InputError if saved tables were prepared with other settings. The message names the first that differs."""
    path, task = f"data.path={data.path}", featurizer.kind.name
    check(facts["kind"] == task, f"{path} was prepared for task={facts['kind']}, not {task}")
    theirs = dict(flatten(facts["settings"]))
    mine = dict(flatten(json.loads(canonical_json(featurizer.settings))))
    theirs["labels"], mine["labels"] = facts["labels"], data.labels or facts["labels"]
    for name, value in facts["selection"].items():
        theirs[name], mine[name] = value, value if getattr(data, name) is None else getattr(data, name)
    for name in sorted({*theirs, *mine}):
        old, new = theirs.get(name), mine.get(name)
        check(old == new, f"{path} was prepared with {name}={old}, but this run has {new}; change it or prepare again")
    missing = sorted(set(data.more_validation) - set(facts["splits"]))
    check(not missing, f"{path} has no split {', '.join(missing)} (data.more_validation); prepare it again")
    check(
        facts["tokenizer_sha256"] == tokenizer_sha256,
        f"{path} was prepared with a tokenizer of sha256 {facts['tokenizer_sha256'][:12]}, but the model's has "
        f"{tokenizer_sha256[:12]}; choose the model it was prepared for, or prepare again",
    )
