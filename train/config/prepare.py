"""Settings of corpus preparation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from train.config.checks import Section, check, setting
from train.config.data import S3Config

MIN_VOCAB_SIZE = 16
MOST_READINGS = 1000  # maximum for corpus.weights: a model memorises text that it sees more often
# maximum; no machine has more processors, and each process loads a tokenizer
MAX_PREPARING_PROCESSES = 1024


@dataclass(kw_only=True)
class CorpusConfig(Section, prefix="corpus."):
    # The name of the source in train/data/text/corpus.py; corpus=... sets it.
    kind: str = MISSING
    # The name of the corpus in the manifest.
    name: str = MISSING
    # The number of times to read each corpus, in the order of the corpora; None reads all once.
    weights: Any = None
    # The validation text, in the same form as corpus.path or an entry of corpus.datasets; None holds out
    # validation_fraction of the corpus.
    validation: Any = None

    @property
    def sources(self) -> list[str]:
        """The corpora, as the user named them."""
        return [self.name]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            are_counts = isinstance(self.weights, list) and all(
                type(each) is int and 0 < each <= MOST_READINGS for each in self.weights
            )
            check(
                are_counts,
                f"corpus.weights={self.weights} must be a list of whole numbers above 0, at most {MOST_READINGS}, "
                "such as [1,3]",
            )


@dataclass(kw_only=True)
class FilesCorpusConfig(CorpusConfig):
    """Local files: plain text, JSON lines, CSV or Parquet. All but Parquet may be gzipped (.gz)."""

    # The file, folder (read recursively) or glob, or a list of these for several corpora.
    path: Any = MISSING
    # The text encoding of the files, as Python names it.
    encoding: str = "utf-8"
    # The handling of bytes that cannot be decoded: strict stops and names them, replace writes U+FFFD.
    errors: str = setting("strict", among=("strict", "replace"))
    # The pattern of a line that begins a new document; None reads each file as one document.
    separator: str | None = r"^\s*$"
    # The column or field with the document, in JSON lines, CSV and Parquet.
    column: str = "text"

    @property
    def sources(self) -> list[str]:
        return paths_of(self.path)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_paths("corpus.path", self.path)
        if self.validation is not None:
            check_paths("corpus.validation", self.validation)


def check_paths(key: str, given: Any) -> None:
    """Raise InputError unless a setting is a path or a list of paths."""
    paths = given if isinstance(given, list) else [given]
    ok = bool(paths) and all(isinstance(path, str | int | float) for path in paths)
    check(ok, f"{key}={given} must be a file, a folder or a glob, or a list of these")


def paths_of(given: Any) -> list[str]:
    """Return a setting's path or paths as a list."""
    if isinstance(given, list):
        return list(map(str, given))
    return [str(given)]


@dataclass(kw_only=True)
class HFDataset:
    # The Hub id, local folder or builder name of the data set.
    path: str = MISSING
    # The configuration of the data set.
    name: str | None = None
    # The split of the data set.
    split: str = "train"
    # The column with the text.
    column: str = "text"
    # The files for builders such as json, csv and parquet.
    data_files: str | None = None
    # The number of consecutive rows to join into a document, for data sets whose rows are sentences.
    rows_per_document: int = 1


@dataclass(kw_only=True)
class HFCorpusConfig(CorpusConfig):
    # The data sets, which are read one after another.
    datasets: list[HFDataset] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        return [dataset.data_files or dataset.path for dataset in self.datasets]

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            bool(self.datasets),
            "corpus.datasets is empty: name one, e.g. corpus.datasets=[{path: user/set}]",
        )


@dataclass(kw_only=True)
class TokenizerConfig(Section, prefix="tokenizer."):
    # The Hub id or folder of a fast tokenizer; None trains one on the corpus.
    pretrained: str | None = None
    # The vocabulary size of a new tokenizer.
    vocab_size: int = setting(30000, least=MIN_VOCAB_SIZE, most=2**31)
    # Convert all text to lower case.
    lowercase: bool = True
    # Remove accents and other marks, and replace compatibility characters and LaTeX quotes with plain characters, as
    # ALBERT does; leave it off for languages in which accents matter, such as French.
    strip_accents: bool = False
    # The maximum number of bytes of text on which a new tokenizer is trained; training needs 20 times as much memory.
    # From a Hub stream, the first bytes are used.
    train_bytes: int = setting(256 * 2**20, above=0)


@dataclass(kw_only=True)
class PrepareConfig(Section):
    """All settings of the preparation of token shards: `baretrain prepare --cfg job` prints them."""

    # The folder or s3://bucket/prefix for the shards; finished work is not repeated.
    output: str = MISSING
    # The seed for packing and for choosing the documents to hold out.
    seed: int = setting(0, least=0)
    # The number of tokens per sequence, special tokens included.
    seq_len: int = setting(512, least=8, below=2**16)
    # The share of the text to hold out for validation: documents chosen by hash.
    validation_fraction: float = setting(0.01, above=0, below=1)
    # The number of sequences per shard; None makes shards of about 64 MiB.
    rows_per_shard: int | None = setting(None, above=0)
    # The part of the corpus that this call prepares, such as "3/64" for the third of 64 parts; None prepares all.
    part: str | None = None
    # The number of processes that share the work on this machine; it does not affect the result. None starts one for
    # each processor that this process may use.
    processes: int | None = setting(None, above=0, most=MAX_PREPARING_PROCESSES)
    # Write only the manifest, after all parts have been prepared.
    merge: bool = False
    corpus: CorpusConfig = MISSING
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    s3: S3Config = field(default_factory=S3Config)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part is not None:
            match = re.fullmatch(r"([0-9]+)/([0-9]+)", self.part)
            ok = match is not None and 1 <= int(match[1]) <= int(match[2])
            check(
                ok, f"part={self.part} must be two numbers, such as 3/64 for the third of 64 parts"
            )
        check(
            not (self.merge and (self.part is not None or self.processes is not None)),
            "merge=true prepares nothing: leave out part and processes",
        )
