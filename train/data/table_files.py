"""A folder of prepared examples: whole or not there, on this machine or copied to and from another place.

`datasets.load_from_disk` reads each of its tables. tables.json comes last and has the checksums of all other files.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypedDict

from train.config import InputError, RecordsConfig, check, flatten
from train.data.once import is_gone, owner_name
from train.storage import (
    Folder,
    LocalFolder,
    Mismatch,
    canonical_json,
    make_folder,
    read_again,
    sha256_bytes,
    sha256_file,
    sha256_json,
    sync_file,
    sync_folder,
    telling,
    wait_for_file,
    write_atomic,
)
from train.untrusted import BadContent, FileEntry, FileName, RelativePath, Sha256, checked, read_object, record

if TYPE_CHECKING:
    from train.data.features import Featurizer

NAME = "tables.json"
FORMAT = 1
UNFINISHED = ".unfinished-"
INDEX = "index"


class SplitFacts(TypedDict):
    """See table_facts."""

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
    """tables.json."""

    format: int
    id: Sha256  # of the content, the settings and the tokenizer
    kind: str
    labels: list[str]
    settings: dict[str, Any]
    selection: dict[str, Any]
    tokenizer_sha256: Sha256
    splits: dict[str, SplitFacts]  # the names are FileNames
    files: dict[RelativePath, FileEntry]


def parse_facts(content: bytes) -> Facts:
    """Raises BadContent for what is not of this version, or cannot be."""
    found = read_object(content)
    if found.get("format") != FORMAT:
        raise BadContent("it is of another version of this program")
    if not is_sealed(found):
        raise BadContent("it was changed after it was written")
    found.pop("sha256", None)
    facts = record(Facts, found)
    for split in facts["splits"]:
        checked(FileName, split, "splits")
    return facts


# ---- on this machine -----------------------------------------------------------------------------------------------


@contextmanager
def unfinished(root: Path) -> Iterator[Path]:
    """A new folder in `root`, removed in the end unless it was published; those of killed processes go too."""
    make_folder(root)
    for path in root.glob(f"{UNFINISHED}*"):
        if is_gone(path.name.removeprefix(UNFINISHED).rpartition("-")[0]):
            shutil.rmtree(path, ignore_errors=True)
    temporary = root / f"{UNFINISHED}{owner_name(os.getpid())}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write tables.json: `facts` and the checksums of what is there. All of it is on disk then."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in paths
    }
    make_durable(folder)
    sealed = json.loads(as_json({**facts, "files": files}))
    write_atomic(folder / NAME, as_json({**sealed, "sha256": sha256_json(sealed)}))


def is_sealed(facts: dict[str, Any]) -> bool:
    """Whether tables.json is as it was written; earlier versions wrote no checksum of it."""
    body = {name: value for name, value in facts.items() if name != "sha256"}
    return "sha256" not in facts or facts["sha256"] == sha256_json(body)


def as_json(facts: Mapping[str, Any]) -> bytes:
    """Splits and labels stay in their order."""
    return (json.dumps(facts, indent=1, ensure_ascii=False) + "\n").encode()


def make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        (sync_folder if path.is_dir() else sync_file)(path)
    sync_folder(folder)


def publish(temporary: Path, folder: Path) -> None:
    """Rename it to `folder`. If another process was first, its result stays: it is of the same data. What is damaged
    there is replaced: a run that reads it keeps the files that it has open.
    """
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        identity = json.loads((temporary / NAME).read_bytes())["id"]
        if not find_whole(folder, identity, checksums=True):
            put_aside(folder)
            temporary.rename(folder)
    sync_folder(folder.parent)


def put_aside(folder: Path) -> None:
    """Remove a folder in one go, as others see it."""
    aside = folder.with_name(f"{UNFINISHED}{owner_name(os.getpid())}-{uuid.uuid4().hex[:8]}")
    with suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


@read_again
def find_facts(folder: Folder) -> Facts | None:
    """tables.json of a folder, None if it has none. InputError if it is not of this version, or cannot be."""
    if folder.size(NAME) is None:
        return None
    try:
        return parse_facts(folder.read(NAME))
    except BadContent as error:
        raise Mismatch(f"{folder.location}/{NAME} is damaged: {error}; prepare the data again") from error


def fault_of(folder: Path, facts: Facts, *, checksums: bool) -> str | None:
    """What differs from tables.json, by the length of the files or also their checksums; None: nothing."""
    for name, wanted in facts["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"{path} has {size} bytes, {NAME} says {wanted['bytes']}"
        if checksums and sha256_file(path) != wanted["sha256"]:
            return f"{path} is damaged: its sha256 is not that of {NAME}"
    return None


def check_whole(folder: Path, facts: Facts, *, checksums: bool) -> None:
    """InputError for a file that is missing or damaged."""
    fault = fault_of(folder, facts, checksums=checksums)
    check(fault is None, f"{fault}; prepare the data again")


def find_whole(folder: Path, identity: str, *, checksums: bool) -> bool:
    """Whether `folder` holds the tables of this id, and nothing in it is damaged."""
    try:
        facts = parse_facts((folder / NAME).read_bytes())
        return facts["id"] == identity and fault_of(folder, facts, checksums=checksums) is None
    except (FileNotFoundError, NotADirectoryError, BadContent):  # not what we wrote
        return False


# ---- what raw data was, without reading it again ---------------------------------------------------------------------


def remember(root: Path, key: str, content: str) -> None:
    """Keep the fingerprint of raw data in the cache `root`, by a key of what can be seen of it without reading."""
    folder = make_folder(root / INDEX)
    with telling("write", folder):
        write_atomic(folder / f"{key}.json", canonical_json({"content": content}))


def recall(root: Path, key: str) -> str | None:
    """What `remember` kept; None for nothing, or what is not of its making."""
    path = root / INDEX / f"{key}.json"
    try:
        return str(json.loads(path.read_bytes())["content"])
    except (OSError, ValueError, KeyError, TypeError):  # then the raw data is read, which always helps
        return None


# ---- elsewhere -----------------------------------------------------------------------------------------------------


def save(folder: Path, target: Folder) -> None:
    """Copy prepared tables to another place, tables.json last. InputError if there is something else."""
    content = LocalFolder(folder).read(NAME)
    facts = parse_facts(content)
    there = find_facts(target)
    key = f"data.save_to={target.location}"
    if there is not None:
        check(there["id"] == facts["id"], f"{key} holds other prepared data; choose another folder")
        return
    strange = sorted(target.names_here() - {PurePosixPath(name).parts[0] for name in facts["files"]})
    check(not strange, f"{key} holds something else ({', '.join(strange[:3])}); choose an empty folder")
    for name in facts["files"]:
        target.write(name, (folder / name).read_bytes())
    target.write(NAME, content)


def check_same(facts: Facts, data: RecordsConfig, featurizer: Featurizer, tokenizer_id: str) -> None:
    """InputError for the first setting in which this run and tables prepared elsewhere differ."""
    place = f"data.path={data.path}"
    check(facts["kind"] == featurizer.kind, f"{place} was prepared for task={facts['kind']}, not {featurizer.kind}")
    theirs = dict(flatten(facts["settings"]))
    mine = dict(flatten(json.loads(canonical_json(featurizer.settings))))
    theirs["labels"], mine["labels"] = facts["labels"], data.labels or facts["labels"]
    for name, value in facts["selection"].items():
        theirs[name], mine[name] = value, value if getattr(data, name) is None else getattr(data, name)
    for name in sorted({*theirs, *mine}):
        old, new = theirs.get(name), mine.get(name)
        check(old == new, f"{place} was prepared with {name}={old}, this run has {new}; use the same or prepare anew")
    missing = sorted(set(data.more_validation) - set(facts["splits"]))
    check(not missing, f"{place} has no split {', '.join(missing)} (data.more_validation); prepare it anew")
    check(
        facts["tokenizer_sha256"] == tokenizer_id,
        f"{place} was prepared with another tokenizer (sha256 {facts['tokenizer_sha256'][:12]}) than the model's "
        f"({tokenizer_id[:12]}); choose the model it was prepared for, or prepare anew",
    )


def bring(source: Folder, facts: Facts, folder: Path) -> None:
    """Copy the files of prepared tables to `folder`, without tables.json. InputError for one that is not right."""
    for name, wanted in facts["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_verified(source, name, wanted["sha256"]))


@read_again
def read_verified(source: Folder, name: str, sha256: str) -> bytes:
    place = f"{source.location}/{name}"
    try:
        content = wait_for_file(source, name, source.read)
    except FileNotFoundError:
        raise InputError(f"{place} is missing, {NAME} names it; save the data again") from None
    if sha256_bytes(content) != sha256:
        raise Mismatch(f"{place} is damaged: its sha256 is not that of {NAME}; save the data again")
    return content
