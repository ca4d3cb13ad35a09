"""Labelled examples, read and tokenised once for all ranks of a machine and for later runs.

    read      train/data/records/raw.py: rows of files, one table per split
    make      the task's Featurizer: token rows, without padding
    store     CACHE_DIR/records/SETTINGS-VERSION/: SPLIT/ (token rows), SPLIT_examples/ (rows as read), tokenizer/ and
              tables.json; SETTINGS and VERSION are hashes of the settings, and of the raw files' names, sizes and times

The data's id is a hash of the token rows and the labels, so it does not depend on where they were prepared.
Machines that share a disk prepare once if CACHE_DIR is on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from train.config import RecordsConfig, TrainConfig, check
from train.data.records.featurizer import Featurizer
from train.data.records.formats import load_saved
from train.data.records.raw import read_raw
from train.data.records.rows import Dropped
from train.data.records.sources import settings_of, version
from train.data.records.table_facts import column, facts_of_split, shortages
from train.data.records.table_folder import FORMAT, NAME, Facts, parse_facts, seal, whole_facts
from train.data.shards.cache import cache_dir
from train.machine import progress
from train.machine.launched import launched
from train.machine.processes import is_gone, owner_name
from train.machine.progress import Phase
from train.storage.atomic_io import discard, made_once
from train.storage.folders import canonical_json, disk_errors, make_folder, sha256_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("train")

RESERVED = ("tokenizer", "scratch")  # folder names that a split cannot have
ROWS_AT_ONCE = 1000  # rows tokenised together, and rows per chunk of an Arrow file
LAUNCH = ".launch-"  # prefix of the files in which a rank leaves a result for the other ranks of its machine
# maximum size of each file of a table: an upload to S3 reads a whole file into memory
SHARD = "128MB"


@dataclass(frozen=True)
class Tables:
    folder: Path
    id: str  # sha256 of the token rows and the labels
    facts: Facts  # tables.json

    def features(self, split: str) -> datasets.Dataset:
        """Return the token rows of a split, memory-mapped."""
        return load_saved(self.folder / split)

    def examples(self, split: str) -> datasets.Dataset:
        """Return the rows of a split as read, memory-mapped. The column `row` of a token row is an index into them."""
        return load_saved(self.folder / f"{split}_examples")

    def lengths(self, split: str) -> np.ndarray:
        """Return the token count of each row, [rows] int32."""
        return column(self.features(split), "length")


def open_tables(cfg: TrainConfig, featurizer: Featurizer) -> Tables:
    """Return the data of a run, which one rank per machine prepares. Raises InputError if it cannot be used."""
    assert isinstance(cfg.data, RecordsConfig)
    data, root = cfg.data, cache_dir(cfg.data) / "records"
    for name in data.more_validation:
        ok = (
            re.fullmatch(r"\w{1,64}", name)
            and name not in RESERVED
            and not name.endswith("_examples")
        )
        check(
            bool(ok),
            f"data.more_validation: {name} cannot be the name of a split; choose a plain word",
        )
    tokenizer_id = tokenizer_sha256(featurizer.tokenizer)
    key = sha256_json(
        [asdict(data), cfg.seed, featurizer.kind.name, featurizer.settings, tokenizer_id]
    )[:16]
    request = TableRequest(cfg, data, featurizer, tokenizer_id, root)
    folder = Path(once_per_machine(root, key, lambda: provide(request)))
    facts = parse_facts((folder / NAME).read_bytes())
    return Tables(folder, facts["id"], facts)


@dataclass(frozen=True)
class TableRequest:
    """A request for the data of a run, which one rank of each machine fulfils."""

    cfg: TrainConfig
    data: RecordsConfig
    featurizer: Featurizer
    tokenizer_id: str
    root: Path  # the folder of all tables on this machine


def once_per_machine(root: Path, key: str, action: Callable[[], str]) -> str:
    """Return the result of `action`, which only one rank of each machine performs.

    The ranks lock a file in `root` one after the other. The first one performs `action` and writes the
    result into the file. If it dies or fails, the next one performs `action`.
    """
    launch = launched()
    if launch.local_world_size == 1:
        return action()
    make_folder(root)
    for path in root.glob(f"{LAUNCH}*"):
        if is_gone(path.name.removeprefix(LAUNCH).rsplit("-", 2)[0]):
            discard(path)
    # Ranks of one launch have the same parent, torchrun's agent, and the same restart count.
    path = root / f"{LAUNCH}{owner_name(os.getppid())}-{launch.restart_count}-{key}"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        result = file.read()
        if not result:
            result = action()
            file.write(result)
    return result


def provide(request: TableRequest) -> str:
    """Return the folder with the tables on this machine."""
    launch = launched()
    is_first_machine = launch.rank == launch.local_rank
    progress.begin(Phase(f"looking for data.path={request.data.path}"))
    with progress.reported(speaks=is_first_machine):
        folder = find_or_make(request)
        facts = parse_facts((folder / NAME).read_bytes())
        for line in (*facts["remarks"], *shortages(facts["splits"])) if is_first_machine else ():
            logger.warning(line)
    # The tokenizer has used threads in this process. This keeps forked workers from using any, and from warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return str(folder)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the checksum of tokenizer.json without truncation and padding settings, which tokenizer calls change."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return sha256_json(
        {name: part for name, part in parts.items() if name not in ("truncation", "padding")}
    )


def find_or_make(request: TableRequest) -> Path:
    """Return the folder for these rows, settings and tokenizer, and make it if it is not in the cache.

    Unchanged raw data is not read again. Raises InputError if too many rows are bad, or if the disk is full.
    """
    data, kind, settings = request.data, request.featurizer.kind.name, request.featurizer.settings
    now = version(data, request.cfg.s3)
    made_by = sha256_json(
        [FORMAT, settings_of(data), request.cfg.seed, kind, settings, request.tokenizer_id]
    )
    folder = request.root / f"{made_by[:12]}-{now[:12]}"

    def is_whole(there: Path) -> bool:
        return whole_facts(there, checksums=data.verify) is not None

    if not is_whole(folder):
        make_folder(folder.parent)
        with disk_errors("write", folder):
            made_once(folder, lambda temporary: make(request, temporary, now), is_whole=is_whole)
    for split, facts in parse_facts((folder / NAME).read_bytes())["splits"].items():
        Dropped(split, data.max_bad_rows, facts["bad_rows"], facts["bad_examples"]).check()
    return folder


def make(request: TableRequest, folder: Path, now: str) -> None:
    """Read the raw data, whose version is `now`, and write the tables of all splits and the tokenizer to `folder`."""
    data, s3, scratch, featurizer = (
        request.data,
        request.cfg.s3,
        folder / "scratch",
        request.featurizer,
    )
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    scratch.mkdir()
    raw = read_raw(data, featurizer.kind, s3, seed=request.cfg.seed, folder=scratch)
    check(
        version(data, s3) == now,
        f"data.path={data.path} changed while it was being read; start again",
    )
    featurizer.labels = raw.labels
    splits, tokens = {}, {}
    for split, examples in raw.splits.items():
        tokens[split] = make_features(featurizer, split, examples, scratch)
        tokens[split].save_to_disk(str(folder / split), max_shard_size=SHARD)
        examples.save_to_disk(str(folder / f"{split}_examples"), max_shard_size=SHARD)
        target, seq_len, notes = (
            featurizer.kind.target,
            featurizer.settings["seq_len"],
            featurizer.notes(split),
        )
        facts = facts_of_split(
            examples, tokens[split], target=target, labels=raw.labels, seq_len=seq_len, notes=notes
        )
        splits[split] = {**facts, **raw.dropped[split].facts()}
    fast = featurizer.tokenizer.backend_tokenizer
    fast.no_truncation()  # undo the settings of the last call
    fast.no_padding()
    featurizer.tokenizer.save_pretrained(str(folder / "tokenizer"))
    about = {
        "format": FORMAT,
        "id": content_id(tokens, raw.labels),
        "kind": featurizer.kind.name,
        "labels": raw.labels,
        "remarks": raw.remarks,
        "settings": featurizer.settings,
        "splits": splits,
    }
    discard(scratch)
    seal(folder, about)


def content_id(tables: Mapping[str, datasets.Dataset], labels: list[str]) -> str:
    """Return the sha256 of all token rows and the labels. It does not depend on how Arrow divides them into chunks."""
    about = {split: [len(table), sorted(table.column_names)] for split, table in tables.items()}
    digest = hashlib.sha256(canonical_json([labels, list(tables), about]))
    for table in tables.values():
        for batch in table.with_format("arrow").iter(ROWS_AT_ONCE):
            for name in sorted(batch.column_names):
                values = batch.column(name).combine_chunks()
                if isinstance(table.features[name], datasets.List):
                    digest.update(values.value_lengths().to_numpy().tobytes())
                    values = values.flatten()
                digest.update(values.to_numpy().tobytes())
    return digest.hexdigest()


def make_features(
    featurizer: Featurizer, split: str, examples: datasets.Dataset, scratch: Path
) -> datasets.Dataset:
    """Make the token rows of a split, ROWS_AT_ONCE rows at a time. One process suffices: the tokenizer uses threads."""
    names = examples.column_names
    progress.begin(Phase(f"tokenising {split}", len(examples), has_bar=True))

    def features_of(rows: Any, indices: list[int]) -> dict[str, list]:
        progress.advance(len(indices))
        return featurizer.features({name: rows[name] for name in names}, indices, split=split)

    return examples.map(
        features_of,
        with_indices=True,
        batched=True,
        batch_size=ROWS_AT_ONCE,
        writer_batch_size=ROWS_AT_ONCE,
        remove_columns=names,
        features=datasets.Features(featurizer.types),
        cache_file_name=str(scratch / f"{split}-tokens.arrow"),
        load_from_cache_file=False,
        new_fingerprint=f"tokens-{split}",  # otherwise `map` pickles the tokenizer to compute one
        desc=f"tokenise {split}",
    )
