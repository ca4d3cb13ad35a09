"""Settings of corpus preparation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from omegaconf import MISSING

from train.config.checks import Section, check, setting
from train.config.data import S3Config

MIN_VOCAB_SIZE = 16
MAX_PREPARING_PROCESSES = 1024  # per machine; the largest have this many processors, and each holds a tokenizer


@dataclass(kw_only=True)
class CorpusConfig(Section, prefix="corpus."):
    kind: str = MISSING  # name of the source in train/data/text/corpus.py; corpus=... sets it
    name: str = MISSING  # written to the manifest


@dataclass(kw_only=True)
class FilesCorpusConfig(CorpusConfig):
    """Local files: plain text, JSON lines, CSV or Parquet; any but Parquet may be gzipped (.gz)."""

    path: str = MISSING  # a file, a folder (read recursively) or a glob
    encoding: str = "utf-8"  # of the files, by its name in Python
    errors: str = setting("strict", among=("strict", "replace"))  # for bytes that do not decode: strict stops and names
    # them, replace writes U+FFFD
    separator: str | None = r"^\s*$"  # text: a matching line starts a new document; None: a file is one document
    column: str = "text"  # jsonl, csv, parquet: the field with the document


@dataclass(kw_only=True)
class HFDataset:
    path: str = MISSING  # Hub id, or a local folder or builder name
    name: str | None = None  # configuration of the data set
    split: str = "train"  # of the data set
    column: str = "text"  # with the text
    data_files: str | None = None  # for builders such as json, csv, parquet
    rows_per_document: int = 1  # consecutive rows joined into one document, if rows are sentences


@dataclass(kw_only=True)
class HFCorpusConfig(CorpusConfig):
    datasets: list[HFDataset] = field(default_factory=list)  # read one after the other

    def __post_init__(self) -> None:
        check(bool(self.datasets), "corpus.datasets is empty: name one, e.g. corpus.datasets=[{path: user/set}]")


@dataclass(kw_only=True)
class TokenizerConfig(Section, prefix="tokenizer."):
    pretrained: str | None = None  # Hub id or folder of a fast tokenizer; None: one is trained on the corpus
    vocab_size: int = setting(30000, least=MIN_VOCAB_SIZE, most=2**31)  # of a tokenizer that is trained
    lowercase: bool = True  # read all text in lower case
    strip_accents: bool = False  # with all marks, and plain forms for compatibility characters and LaTeX quotes, as
    # ALBERT's; other languages than English write vowels with marks
    train_bytes: int = setting(256 * 2**20, above=0)  # most text that it is trained on, with 20 times its memory; of a
    # Hub stream, the first


@dataclass(kw_only=True)
class PrepareConfig(Section):
    """Preparation of token shards from text: `python -m train.prepare --cfg job` prints it."""

    output: str = MISSING  # folder or s3://bucket/prefix for the shards; finished work is not done twice
    seed: int = setting(0, least=0)  # for packing, and for the choice of documents that are held out
    seq_len: int = setting(512, least=8, below=2**16)  # tokens per sequence, special ones included
    validation_fraction: float = setting(0.01, above=0, below=1)  # share of the text held out: documents by their hash,
    # the end of long ones
    rows_per_shard: int | None = setting(None, above=0)  # sequences; None: about 64 MiB
    part: str | None = None  # "3/64": this call prepares the third of 64 parts; None: all of them
    processes: int | None = setting(None, above=0, most=MAX_PREPARING_PROCESSES)  # that share the work on this machine,
    # with the same result whatever their number; None: one for each processor that this process may use
    merge: bool = False  # only write the manifest of parts that are all prepared
    corpus: CorpusConfig = MISSING
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    s3: S3Config = field(default_factory=S3Config)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part is not None:
            match = re.fullmatch(r"([0-9]+)/([0-9]+)", self.part)
            ok = match is not None and 1 <= int(match[1]) <= int(match[2])
            check(ok, f"part={self.part} must be two numbers, as 3/64 for the third of 64 parts")
        check(
            not (self.merge and (self.part is not None or self.processes is not None)),
            "merge=true prepares nothing: give it without part and processes",
        )
