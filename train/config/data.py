"""Settings of the data that a run reads, and of S3."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING

from train.config.checks import Section, check, setting, shortlist

MOST_LENGTHS = 255  # rows hold which is theirs in a byte, as is the longest row's or seq_len
MAX_LOADER_PROCESSES = 128  # per rank; a trn1.32xlarge has 128 processors for all of its 32 ranks
FORMATS = ("auto", "csv", "jsonl", "parquet", "squad", "conll", "hub", "saved")  # saved: by datasets' save_to_disk
MAX_CACHE_GB = 10**6  # a petabyte, more than the disk of any machine


@dataclass(kw_only=True)
class DataConfig(Section, prefix="data."):
    """Settings of all data, which is shards (pretraining) or records (labelled examples)."""

    path: str = MISSING  # a folder or s3://bucket/prefix of shards; for records also a file or the Hub id of a data set
    num_workers: int = setting(1, least=0, most=MAX_LOADER_PROCESSES)  # loader processes per rank; 0: the rank itself
    verify: bool = True  # compare local data with its checksums before training, once per node
    cache_dir: str | None = None  # local copies of data; None: on an NVMe instance store, or in ~/.cache/baretrain


@dataclass(kw_only=True)
class ShardsConfig(DataConfig):
    """Token shards: `path` is a folder or s3://bucket/prefix that `python -m train.prepare` wrote."""

    cache_gb: float | None = setting(None, above=0, most=MAX_CACHE_GB)  # disk space, 1e9 bytes; None: 90 % of the free
    attempt_s: float = setting(60.0, above=0)  # a download of which nothing comes for so long is started again, with a
    # new client
    deadline_s: float = setting(300.0, above=0)  # a batch waits for a shard as long as bytes of any come; after so long
    # without, the run ends and names it

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.attempt_s <= self.deadline_s,
            f"data.attempt_s={self.attempt_s:g} is longer than data.deadline_s={self.deadline_s:g}; lower it",
        )


@dataclass(kw_only=True)
class ColumnsConfig:
    """Names of the columns of the data. A dot leads into an object: answers.text."""

    id: str | None = None  # written to the predictions; None: SQuAD's own, or else the row's number
    text: str = "text"  # the text to label, or the first of a pair
    text_pair: str | None = None  # the second text of a pair
    label: Any = "label"  # the label, for classification, or the number, for regression; a list names the columns of
    # several numbers, or the labels that have a column of 0 and 1 each
    question: str = "question"  # this one and those below are for question answering
    context: str = "context"  # the text in which the answer is
    answers: str = "answers"  # answers with their texts and places, as SQuAD has them
    tokens: str = "tokens"  # lists of words, for named entities; of CoNLL files the number of their column: by
    # default the first one, 0
    tags: str = "tags"  # a tag for each word of `tokens`; of CoNLL files a number: by default the last one, -1


@dataclass(kw_only=True)
class RecordsConfig(DataConfig):
    """Labelled examples: `path` is a file, a folder, s3://bucket/prefix or the Hub id of a data set."""

    format: str = setting("auto", among=FORMATS)  # auto: by the names of the files; saved: by datasets' save_to_disk
    name: str | None = None  # configuration of a Hub data set
    revision: str | None = None  # commit of a Hub data set, so that the data stays the same
    train: str | None = None  # file, glob below path, or split; None: path itself, or the split "train"
    validation: str | None = None  # the same; None: validation_fraction of the training rows
    more_validation: dict[str, str] = field(default_factory=dict)  # further splits by name: {mismatched: dev_mm.tsv}
    validation_fraction: float = setting(0.1, above=0, below=1)  # share of the rows held out if there is no validation,
    # by a hash of their text
    max_train_examples: int | None = setting(None, above=0)  # drawn with the run's seed; None: all
    max_validation_examples: int | None = setting(None, above=0)  # the same for each validation split
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    labels: list[str] = field(default_factory=list)  # in the order of their numbers; empty: those of the data, sorted,
    # or in the order of the numbers of label_map
    label_map: dict[str, str | None] = field(default_factory=dict)  # value: its label; null leaves the row out
    label_separator: str | None = None  # what separates several labels in a text, as | in CSV; None: they are lists
    lengths: Any = "auto"  # tokens that batches are padded to, rising, as [32,64,128]; the longest row's or seq_len is
    # added | []: that one alone | auto: as few as keep padding below 10 %, multiples of 8, of 16 on CUDA; where each
    # length is a graph to compile (XLA, Trainium, backend.compile) at most three
    delimiter: str = ","  # of CSV, as are the three below
    quote: str | None = "auto"  # auto: ", and text where fields are separated by tabs; None: quotation marks are text
    escape: str | None = None  # such as \\: the character after it is text; None: a doubled quote is a quote
    header: bool = True  # the first line names the columns; if there is none they are 0, 1, ...
    encoding: str = "utf-8"  # of the files, by its name in Python
    max_bad_rows: int = setting(0, least=0)  # rows that cannot be read or have a wrong label or answer: up to this
    # number they are left out, counted and named; with more the data is rejected
    save_to: str | None = None  # folder or s3://... that also keeps the prepared data, for data.path of other runs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.delimiter = "\t" if self.delimiter == r"\t" else self.delimiter  # command lines have no tab
        given = [] if self.lengths == "auto" else self.lengths
        ok = isinstance(given, list) and all(type(length) is int for length in given)
        ok = ok and all(0 < a < b for a, b in zip([1, *given], given, strict=False))
        check(ok, f"data.lengths={self.lengths} must be auto, or rising numbers of tokens, as [32,64,128]")
        check(
            len(given) <= MOST_LENGTHS,
            f"data.lengths has {len(given)} lengths, and at most {MOST_LENGTHS} are told apart",
        )
        check(self.label_separator != "", "data.label_separator is empty; leave it out, or set it to a character")
        self.columns.label = column_names(self.columns.label)
        for name in ("delimiter", "quote", "escape"):
            value = getattr(self, name)
            ok = value is None or len(value) == 1 or (name, value) == ("quote", "auto")
            check(ok, f"data.{name}={value} must be one character")
        reserved = sorted({"train", "validation"} & set(self.more_validation))
        check(not reserved, f"data.more_validation names {', '.join(reserved)}; choose other names")
        twice = sorted({label for label in self.labels if self.labels.count(label) > 1})
        check(not twice, f"data.labels names {shortlist(twice)} twice")
        unknown = sorted({label for label in self.label_map.values() if label is not None} - set(self.labels))
        check(not (self.labels and unknown), f"data.label_map leads to {shortlist(unknown)}, not one of data.labels")


def column_names(value: Any) -> str | list[str]:
    """Return data.columns.label as text: one name, or several. Raises InputError if it is neither."""
    names = [str(name) if type(name) is int else name for name in (value if isinstance(value, list) else [value])]
    ok = bool(names) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    check(ok, f"data.columns.label={value} must be a column, or a list of columns that all differ")
    return names if len(names) > 1 else names[0]


@dataclass(kw_only=True)
class S3Config(Section, prefix="s3."):
    """Access to S3. None: as AWS's tools find it (environment, ~/.aws, the instance's role)."""

    endpoint: str | None = None  # URL of an S3-compatible server
    region: str | None = None  # of the bucket
    profile: str | None = None  # of ~/.aws: the credentials that are used
    path_style: bool = False  # the bucket is in the path, not in the host name; most S3-compatible servers need it
    timeout_s: float = setting(60.0, above=0)  # after which a request without an answer fails, all its retries included

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is not None:
            check_endpoint("s3.endpoint", self.endpoint)

    def flags(self) -> list[str]:
        """Return these settings as command line flags."""
        given = {"--endpoint": self.endpoint, "--region": self.region, "--profile": self.profile}
        flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]  # it may begin with a dash
        return [*flags, "--path-style"] if self.path_style else flags


def check_endpoint(key: str, url: str) -> None:
    """Raise InputError, without repeating the URL, if it is more than a server's address: run folders keep it."""
    try:
        parts = urlsplit(url)
        has_secret = "@" in url or bool(parts.query or parts.fragment)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # the port or the address is none
        has_secret, ok = "@" in url, False
    check(
        not has_secret,
        f"{key} holds more than an address (user:password@, ? or #), and run folders would keep it; give "
        "http://host:port, and credentials as AWS's tools do (environment, ~/.aws, a role)",
    )
    check(ok, f"{key}={url} must be a server's address, http:// or https://, as http://host:port")
