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

    path: str = MISSING  # The folder or s3://bucket/prefix of shards; of records also a file, or a Hub id.
    num_workers: int = setting(1, least=0, most=MAX_LOADER_PROCESSES)  # The number of loader processes of a rank; 0
    # loads in the rank itself.
    verify: bool = True  # Compare local data with its checksums before training, once a machine.
    cache_dir: str | None = None  # The folder of local copies; None is an NVMe instance store, or ~/.cache/baretrain.


@dataclass(kw_only=True)
class ShardsConfig(DataConfig):
    """Token shards: `path` is a folder or s3://bucket/prefix that `python -m train.prepare` wrote."""

    cache_gb: float | None = setting(None, above=0, most=MAX_CACHE_GB)  # The disk space, 1e9 bytes; None is 90 % of the
    # free.
    attempt_s: float = setting(60.0, above=0)  # The time without a byte after which a download starts again, with a new
    # client.
    deadline_s: float = setting(300.0, above=0)  # The time without a byte of any shard after which a batch waits no
    # longer, and the run ends and names the shard.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.attempt_s <= self.deadline_s,
            f"data.attempt_s={self.attempt_s:g} is longer than data.deadline_s={self.deadline_s:g}; lower it",
        )


@dataclass(kw_only=True)
class ColumnsConfig:
    """Names of the columns of the data. A dot leads into an object: answers.text."""

    id: str | None = None  # The ids for predictions; None takes SQuAD's own, or else the row's number.
    text: str = "text"  # The text to label, or the first of a pair.
    text_pair: str | None = None  # The second text of a pair; None reads single texts.
    label: Any = "label"  # The label, for classification, or the number, for regression; a list names the columns of
    # several numbers, or the labels that have a column of 0 and 1 each.
    question: str = "question"  # The question, for question answering.
    context: str = "context"  # The text in which the answer is.
    answers: str = "answers"  # The answers with their texts and places, as SQuAD has them.
    tokens: str = "tokens"  # The lists of words, for named entities; of CoNLL files the number of their column, by
    # default the first one, 0.
    tags: str = "tags"  # The tags of the words; of CoNLL files a number, by default the last one, -1.


@dataclass(kw_only=True)
class RecordsConfig(DataConfig):
    """Labelled examples: `path` is a file, a folder, s3://bucket/prefix or the Hub id of a data set."""

    format: str = setting("auto", among=FORMATS)  # The format; auto goes by names of files, saved is save_to_disk's.
    name: str | None = None  # The configuration of a Hub data set.
    revision: str | None = None  # The commit of a Hub data set, so that the data stays the same.
    train: str | None = None  # The file, glob below path or split of the training data; None takes path itself, or the
    # split "train".
    validation: str | None = None  # The file, glob below path or split of the validation data; None holds out
    # validation_fraction.
    more_validation: dict[str, str] = field(default_factory=dict)  # The further splits by name, {mismatched:
    # dev_mm.tsv}.
    validation_fraction: float = setting(0.1, above=0, below=1)  # The share of the rows that is held out, by a hash of
    # their text, where data.validation is None.
    max_train_examples: int | None = setting(None, above=0)  # The most examples, drawn by the seed; None uses all.
    max_validation_examples: int | None = setting(None, above=0)  # The most examples of a validation split; None uses
    # all.
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    labels: list[str] = field(default_factory=list)  # The labels in the order of their numbers; [] takes those of the
    # data, sorted, or in the order of the numbers of label_map.
    label_map: dict[str, str | None] = field(default_factory=dict)  # The label of each value; None leaves its rows out.
    label_separator: str | None = None  # The text between several labels in one field, e.g. | in CSV; None reads lists.
    lengths: Any = "auto"  # The lengths in tokens that batches are padded to, rising, such as [32,64,128]; that of
    # the longest row or seq_len is added, and [] pads to it alone. auto takes as few as keep padding below 10 %,
    # multiples of 8, of 16 on CUDA, at most three where each is a graph to compile (XLA, Trainium, backend.compile).
    delimiter: str = ","  # The character between the fields of a CSV.
    quote: str | None = "auto"  # The quotation mark; auto takes ", or none if the delimiter is a tab; None takes none.
    escape: str | None = None  # The character, e.g. \\, before one that is text; None reads doubled quotes as quotes.
    header: bool = True  # Take the names of the columns from the first line of a CSV; without them they are 0, 1, ...
    encoding: str = "utf-8"  # The encoding of the files, by its name in Python.
    max_bad_rows: int = setting(0, least=0)  # The number of rows that cannot be read, or have a wrong label or answer,
    # up to which they are left out, counted and named; with more the data is rejected.
    save_to: str | None = None  # The folder or s3://... that also keeps the prepared data, for data.path of other runs.

    def __post_init__(self) -> None:
        super().__post_init__()
        self.delimiter = "\t" if self.delimiter == r"\t" else self.delimiter  # command lines have no tab
        given = [] if self.lengths == "auto" else self.lengths
        ok = isinstance(given, list) and all(type(length) is int for length in given)
        ok = ok and all(0 < a < b for a, b in zip([1, *given], given, strict=False))
        check(ok, f"data.lengths={self.lengths} must be auto, or rising numbers of tokens, such as [32,64,128]")
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

    endpoint: str | None = None  # The URL of an S3-compatible server; None is AWS.
    region: str | None = None  # The region of the bucket.
    profile: str | None = None  # The profile of ~/.aws whose credentials are used.
    path_style: bool = False  # Put the bucket into the path, as most S3-compatible servers need it.
    timeout_s: float = setting(60.0, above=0)  # The limit of a request with all its retries.

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
    except ValueError:  # the port or the address is invalid
        has_secret, ok = "@" in url, False
    check(
        not has_secret,
        f"{key} contains more than an address (user:password@, ? or #), and run folders would keep it; give "
        "http://host:port, and credentials as AWS's tools do (environment, ~/.aws, a role)",
    )
    check(ok, f"{key}={url} must be a server's address, http:// or https://, such as http://host:port")
