"""Labelled examples, read and tokenised once for all ranks of a machine and for later runs.

    read      train/data/records/raw.py: rows of files, one table per split
    make      the task's Featurizer: token rows, without padding
    store     CACHE_DIR/records/SETTINGS-VERSION/: SPLIT/ (token rows), SPLIT_examples/ (rows as read), tokenizer/ and
              tables.json; SETTINGS and VERSION are hashes of the settings, and of the raw files' names, sizes and times

A folder gets its name when it is complete. The data's id is a hash of the token rows and the labels, so it does not
depend on where they were prepared. Machines that share a disk prepare once if CACHE_DIR is on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from tqdm import tqdm

from train.config import RecordsConfig, TrainConfig, check
from train.data.records.content_checks import shortages
from train.data.records.examples import Dropped
from train.data.records.featurizer import Featurizer
from train.data.records.raw import read_raw, write_arrow
from train.data.records.saved import load_saved
from train.data.records.sources import settings_of, version
from train.data.records.table_facts import column, facts_of_split
from train.data.shards.cache import cache_dir
from train.machine import progress
from train.machine.launched import launched
from train.machine.processes import owner_name
from train.machine.progress import Phase
from train.storage.atomic_io import discard, new_folder, remove_temporaries
from train.storage.folders import (
    canonical_json,
    disk_errors,
    make_folder,
    read_json,
    sha256_json,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("train")

FORMAT = 4  # changes if other versions of this program cannot read the folder
FACTS = "tables.json"
RESERVED = ("tokenizer", "scratch")  # folder names that a split cannot have
ROWS_AT_ONCE = 1000  # rows tokenised together, and rows per chunk of an Arrow file


# The content of tables.json: "id" (see Tables), "kind", "labels", "remarks" (what seems strange about the data),
# "settings" of the featurizer, and in "splits" the facts of each (see table_facts.py) and its unused rows.
Facts = dict[str, Any]


@dataclass(frozen=True)
class Tables:
    folder: Path
    id: str  # sha256 of the token rows and the labels
    facts: Facts

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
    data = cfg.data
    assert isinstance(data, RecordsConfig)
    for name in data.more_validation:
        is_taken = name in RESERVED or name.endswith("_examples")
        ok = re.fullmatch(r"\w{1,64}", name) and not is_taken
        cannot = f"data.more_validation: {name} cannot be the name of a split"
        check(bool(ok), f"{cannot}; choose a plain word")
    settings = [FORMAT, settings_of(data), cfg.seed, featurizer.kind.name]
    tokenizer_id = tokenizer_sha256(featurizer.tokenizer)
    made_by = sha256_json([*settings, featurizer.settings, tokenizer_id])[:12]
    root = cache_dir(data) / "records"
    make_folder(root)
    lock = root / f"{made_by}.lock"
    name = once_per_machine(lock, lambda: find_or_make(cfg, data, featurizer, root, made_by))
    # The tokenizer has used threads in this process. This keeps forked workers from using any, and from warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    facts = read_json(root / name / FACTS)
    return Tables(root / name, facts["id"], facts)


def once_per_machine(lock: Path, action: Callable[[], str]) -> str:
    """Return the result of `action`, which only one rank of each machine performs while other processes wait.

    The rank that holds the lock writes the result into it, with the name of the launch. If a rank dies or fails, the
    next one performs `action`.
    """
    launch = launched()
    # Ranks of one launch have the same parent, torchrun's agent, and the same restart count.
    name = f"{owner_name(os.getppid())}-{launch.restart_count}"
    with disk_errors("write", lock):
        file = lock.open("a+")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        made_by, _, result = file.read().partition(" ")
        if made_by != name or launch.local_world_size == 1:
            result = action()
            file.truncate(0)
            file.write(f"{name} {result}")
    return result


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the checksum of tokenizer.json without truncation and padding settings, which tokenizer calls change."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return sha256_json(
        {name: part for name, part in parts.items() if name not in ("truncation", "padding")}
    )


def find_or_make(
    cfg: TrainConfig, data: RecordsConfig, featurizer: Featurizer, root: Path, made_by: str
) -> str:
    """Return the name of the folder for these rows, and make it if it is not in the cache.

    Unchanged raw data is not read again. Raises InputError if too many rows are bad, or if the disk is full. The first
    machine logs what seems strange about the data.
    """
    launch = launched()
    is_first_machine = launch.rank == launch.local_rank
    progress.begin(Phase(f"looking for data.path={data.path}"))
    with progress.reported(speaks=is_first_machine):
        now = version(data, cfg.s3)
        folder = root / f"{made_by}-{now[:12]}"
        if not (folder / FACTS).exists():
            remove_temporaries(root, re.escape(folder.name))
            with disk_errors("write", folder), new_folder(folder, replaces=True) as temporary:
                make(cfg, data, featurizer, temporary, now)
    facts = read_json(folder / FACTS)
    for split, entry in facts["splits"].items():
        bad = {key: entry[key] for key in ("bad_rows", "bad_examples")}
        Dropped(split, data.max_bad_rows, **bad).check()
    if is_first_machine:
        for remark in facts["remarks"]:
            logger.warning(remark)
    return folder.name


def make(
    cfg: TrainConfig, data: RecordsConfig, featurizer: Featurizer, folder: Path, now: str
) -> None:
    """Read the raw data, whose version is `now`, and write the tables of all splits and the tokenizer to `folder`."""
    scratch = folder / "scratch"
    scratch.mkdir()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    raw = read_raw(data, featurizer.kind, cfg.s3, seed=cfg.seed, folder=scratch)
    changed = f"data.path={data.path} changed while it was being read; start again"
    check(version(data, cfg.s3) == now, changed)
    featurizer.labels = raw.labels
    splits = {}
    tokens = {}
    for split, examples in raw.splits.items():
        tokens[split] = make_features(featurizer, split, examples, scratch)
        tokens[split].save_to_disk(str(folder / split))
        examples.save_to_disk(str(folder / f"{split}_examples"))
        facts = facts_of_split(
            examples,
            tokens[split],
            target=featurizer.kind.target,
            labels=raw.labels,
            seq_len=featurizer.settings["seq_len"],
            notes=featurizer.notes(split),
        )
        splits[split] = {**facts, **raw.dropped[split].facts()}
    save_tokenizer(featurizer.tokenizer, folder / "tokenizer")
    discard(scratch)
    about = {
        "id": content_id(tokens, raw.labels),
        "kind": featurizer.kind.name,
        "labels": raw.labels,
        "remarks": [*raw.remarks, *shortages(splits)],
        "settings": featurizer.settings,
        "splits": splits,
    }
    (folder / FACTS).write_text(json.dumps(about, indent=1))


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    fast = tokenizer.backend_tokenizer
    fast.no_truncation()  # undo the settings of the last call
    fast.no_padding()
    tokenizer.save_pretrained(str(folder))


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
    progress.begin(Phase(f"tokenising {split}", len(examples), has_bar=True))
    bar = tqdm(total=len(examples), desc=f"tokenise {split}", unit=" rows", disable=None)
    features = datasets.Features(featurizer.types)

    def batches() -> Iterator[dict[str, list]]:
        first = 0
        for batch in examples.with_format("arrow").iter(ROWS_AT_ONCE):
            indices = list(range(first, first + len(batch)))
            yield featurizer.features(batch.to_pydict(), indices, split=split)
            first += len(batch)
            progress.advance(len(batch))
            bar.update(len(batch))

    with bar:
        return write_arrow(batches(), features, scratch / f"{split}-tokens.arrow")
