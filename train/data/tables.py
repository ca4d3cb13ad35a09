"""Labelled examples, read and tokenised once and kept by what they are made of, for all ranks and later runs.

    read      train/data/raw.py: rows of files, one table a split
    make      the task's Featurizer: tokens of each row, as long as they are
    keep      CACHE_DIR/records/ID/: SPLIT/ (tokens), SPLIT_examples/ (rows as they were), tokenizer/, tables.json
    remember  CACHE_DIR/records/index/: which raw files, by their names, sizes and times, have which content

A place that data.save_to wrote can be data.path of other runs: then nothing is read or tokenised.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from train import progress
from train.config import RecordsConfig, S3Config, TrainConfig, check
from train.data import raw as raw_data
from train.data import raw_identity
from train.data.cache import cache_dir
from train.data.features import FEATURES, Featurizer
from train.data.once import once_per_node
from train.data.raw_examples import Dropped
from train.data.raw_files import is_named
from train.data.saved import load_saved
from train.data.table_facts import column, facts_of_split
from train.data.table_files import (
    FORMAT,
    NAME,
    Facts,
    as_json,
    bring,
    check_same,
    check_whole,
    find_facts,
    find_whole,
    make_durable,
    parse_facts,
    publish,
    recall,
    remember,
    save,
    seal,
    unfinished,
)
from train.launched import launched
from train.progress import Stage
from train.storage import Folder, is_s3, local_path, open_folder, sha256_json, telling, write_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("train")

RESERVED = ("tokenizer", "scratch")  # folders beside those of the splits
ROWS_AT_ONCE = 1000  # tokenised together, and in one chunk of an Arrow file
SHARD = "128MB"  # of a table: a file of it is held in memory to be copied to S3


@dataclass(frozen=True)
class Tables:
    folder: Path
    id: str  # sha256 of the content, the settings and the tokenizer
    facts: Facts  # tables.json

    @property
    def splits(self) -> list[str]:
        """train, validation, and the further ones in their order."""
        return list(self.facts["splits"])

    def features(self, split: str) -> datasets.Dataset:
        """The tokens of a split, memory-mapped."""
        return load_saved(self.folder / split, str(self.folder / split))

    def examples(self, split: str) -> datasets.Dataset:
        """The rows of a split as they were read, memory-mapped; the column `row` of its features counts them."""
        return load_saved(self.folder / f"{split}_examples", str(self.folder / f"{split}_examples"))

    def lengths(self, split: str) -> np.ndarray:
        """[rows] int32: tokens of each row."""
        return column(self.features(split), "length")


def open_tables(cfg: TrainConfig, featurizer: Featurizer) -> Tables:
    """The prepared data of a run. Local rank 0 of a machine makes it or finds it, the others wait.

    Raises InputError for data that will not do, on all ranks of the machine alike; Failure where rank 0 does not end.
    """
    assert isinstance(cfg.data, RecordsConfig)
    data, root = cfg.data, cache_dir(cfg.data) / "records"
    for name in data.more_validation:
        ok = re.fullmatch(r"\w{1,64}", name) and name not in RESERVED and not name.endswith("_examples")
        check(bool(ok), f"data.more_validation: {name} cannot be the name of a split; choose a plain word")
    tokenizer_id = tokenizer_sha256(featurizer.tokenizer)
    key = sha256_json([asdict(data), cfg.seed, featurizer.kind, featurizer.settings, tokenizer_id])[:16]
    job = Job(cfg, data, featurizer, tokenizer_id, root)
    progress.begin(Stage(f"looking for data.path={data.path}"))
    with progress.reported(speaks=launched().rank == 0):
        folder = Path(once_per_node(root, key, lambda: str(provide(job))))
    facts = parse_facts((folder / NAME).read_bytes())
    return Tables(folder, facts["id"], facts)


@dataclass(frozen=True)
class Job:
    """What local rank 0 is to provide."""

    cfg: TrainConfig
    data: RecordsConfig
    featurizer: Featurizer
    tokenizer_id: str
    root: Path  # of all tables on this machine

    def identity(self, content: str) -> str:
        """The id of what is made from raw data of this fingerprint."""
        featurizer = self.featurizer
        parts = [FORMAT, content, self.cfg.seed, featurizer.kind, featurizer.settings, self.tokenizer_id]
        return sha256_json(parts)

    def folder(self, identity: str) -> Path:
        return self.root / identity[:24]


def provide(job: Job) -> Path:
    """The folder with the tables, on this machine; kept in data.save_to as well."""
    data = job.data
    source = saved_source(data, job.cfg.s3)
    facts = find_facts(source) if source else None
    if source and facts:
        check_same(facts, data, job.featurizer, job.tokenizer_id)
        folder = find_saved(job, source, facts)
    else:
        folder = find_or_make(job)
    if data.save_to is not None and launched().rank == 0:
        save(folder, open_folder(data.save_to, job.cfg.s3))
    # What was tokenised in threads: loaders that are forked now must not try the same, nor warn of it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return folder


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Of tokenizer.json without truncation and padding, which every call sets anew."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return sha256_json({name: part for name, part in parts.items() if name not in ("truncation", "padding")})


# ---- what was saved ------------------------------------------------------------------------------------------------


def saved_source(data: RecordsConfig, s3: S3Config) -> Folder | None:
    """data.path, if prepared tables may be there, whatever format the raw data had."""
    is_place = not is_named(data.path) if is_s3(data.path) else "://" not in data.path.removeprefix("file://")
    return open_folder(data.path, s3) if is_place else None


def find_saved(job: Job, source: Folder, facts: Facts) -> Path:
    """A local folder as it lies; of S3, a copy in the cache. InputError if something is missing or damaged."""
    data = job.data
    if not is_s3(data.path):
        folder = local_path(data.path)
        check_whole(folder, facts, checksums=data.verify)
        return folder
    folder = job.folder(facts["id"])
    if not find_whole(folder, facts["id"], checksums=data.verify):
        with unfinished(job.root) as temporary, telling("write", temporary):
            bring(source, facts, temporary)
            make_durable(temporary)
            write_atomic(temporary / NAME, as_json(facts))
            publish(temporary, folder)
    return folder


# ---- what is made --------------------------------------------------------------------------------------------------


def find_or_make(job: Job) -> Path:
    """The folder of these rows, settings and tokenizer. InputError for rows that will not do, or for a full disk.

    Raw data that has not changed since is not read again to find it; raw data that is gone need not come back.
    """
    data = job.data
    is_missing = raw_identity.is_missing(data)
    place = raw_identity.place_key(data)
    seen = place if is_missing else raw_identity.glance(data, job.cfg.s3)
    content = recall(job.root, seen) if seen else None
    identity = job.identity(content) if content else None
    if identity is None or not find_whole(job.folder(identity), identity, checksums=data.verify):
        content, identity = find_or_read(job)
        if seen is not None and seen == raw_identity.glance(data, job.cfg.s3):  # else it changed meanwhile
            remember(job.root, seen, content)
            remember(job.root, place, content)
    elif is_missing:
        logger.warning("data.path=%s is gone; going on with what was prepared from it", data.path)
    folder = job.folder(identity)
    for split, facts in parse_facts((folder / NAME).read_bytes())["splits"].items():
        Dropped(split, data.max_bad_rows, facts["bad_rows"], facts["bad_examples"]).check()
    return folder


def find_or_read(job: Job) -> tuple[str, str]:
    """Fingerprint of the raw data, by reading it, and the id of its tables, which are there then."""
    cfg, data, featurizer = job.cfg, job.data, job.featurizer
    with unfinished(job.root) as temporary, bars_on_terminals_only():
        scratch = temporary / "scratch"
        scratch.mkdir()
        progress.begin(Stage(f"comparing checksums of data.path={data.path}"))
        content = raw_identity.fingerprint(data, cfg.s3, scratch)  # of rows and of settings of data
        identity = job.identity(content)
        folder = job.folder(identity)
        if not find_whole(folder, identity, checksums=data.verify):
            unanswerable = featurizer.settings.get("unanswerable", True)
            found = raw_data.read_raw(
                data, featurizer.kind, cfg.s3, seed=cfg.seed, scratch=scratch, unanswerable=unanswerable
            )
            with telling("write", temporary):
                facts = make(job, found, identity, temporary, scratch)
                shutil.rmtree(scratch)
                seal(temporary, facts)
                publish(temporary, folder)
    return content, identity


def make(job: Job, found: raw_data.Raw, identity: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """Write the tables of all splits and the tokenizer to `folder`; what is to be said about them."""
    featurizer, splits = job.featurizer, {}
    for split, examples in found.splits.items():
        features = make_features(featurizer, split, examples, scratch, fingerprint=identity)
        features.save_to_disk(str(folder / split), max_shard_size=SHARD)
        examples.save_to_disk(str(folder / f"{split}_examples"), max_shard_size=SHARD)
        seq_len, notes = featurizer.settings["seq_len"], featurizer.notes(split)
        about = facts_of_split(examples, features, labels=found.labels, seq_len=seq_len, notes=notes)
        dropped = dict(found.dropped[split])
        splits[split] = {**about, "bad_examples": dropped.pop("examples"), **dropped}
    save_tokenizer(featurizer.tokenizer, folder / "tokenizer")
    return {
        "format": FORMAT,
        "id": identity,
        "kind": featurizer.kind,
        "labels": found.labels,
        "settings": featurizer.settings,
        "selection": {name: getattr(job.data, name) for name in ("max_train_examples", "max_validation_examples")},
        "tokenizer_sha256": job.tokenizer_id,
        "splits": splits,
    }


def make_features(
    featurizer: Featurizer, split: str, examples: datasets.Dataset, scratch: Path, *, fingerprint: str
) -> datasets.Dataset:
    """One process: the tokenizer has threads of its own. Memory: ROWS_AT_ONCE rows."""
    names = examples.column_names

    progress.begin(Stage(f"tokenising {split}", len(examples), has_bar=True))

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
        features=datasets.Features(FEATURES[featurizer.kind]),
        keep_in_memory=False,
        cache_file_name=str(scratch / f"{split}.arrow"),
        load_from_cache_file=False,
        new_fingerprint=sha256_json([fingerprint, split]),  # else it pickles the tokenizer to make one
        desc=f"tokenise {split}",
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.backend_tokenizer.no_truncation()  # as the last call left it
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(str(folder))


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    were_on = datasets.are_progress_bars_disabled() is False
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            datasets.enable_progress_bars()
