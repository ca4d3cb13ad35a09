"""Settings of the data that a run reads, and of S3."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING

from train.config.checks import Section, check, setting, shortlist

MOST_LENGTHS = 255  # maximum of data.lengths, to which the longest length is added: rows store an index in one byte
MAX_LOADER_PROCESSES = 128  # maximum per rank; a trn1.32xlarge has 128 vCPUs for its 32 ranks
AWS = "https://s3.amazonaws.com"
KMS_KEY = re.compile(r"arn:aws[\w-]*:kms:[\w-]+:\d{12}:(key|alias)/[\w/-]+", re.ASCII)
SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".conll")  # .gz may follow
FILE_FORMATS = ("csv", "jsonl", "parquet", "squad", "conll")
FORMATS = ("auto", *FILE_FORMATS, "hub", "saved")  # saved: by Dataset.save_to_disk


@dataclass(kw_only=True)
class DataConfig(Section, prefix="data."):
    """Settings that both kinds of data share: token shards (pretraining) and records (labelled examples)."""

    # The folder or s3://bucket/prefix of the data; for records also a file or a Hub id.
    path: str = MISSING
    # The number of data loader processes per rank; 0 loads data in the rank's process.
    num_workers: int = setting(1, least=0, most=MAX_LOADER_PROCESSES)
    # Compare local shards with their checksums before training, once per machine.
    verify: bool = True
    # The folder for local copies; None uses the NVMe instance store if there is one, otherwise ~/.cache/baretrain.
    cache_dir: str | None = None


@dataclass(kw_only=True)
class ShardsConfig(DataConfig):
    """Token shards: `path` is a folder or s3://bucket/prefix that `baretrain prepare` wrote."""

    # The disk space for local copies in GB (1e9 bytes); None uses 90 % of the free space.
    cache_gb: float | None = setting(None, above=0)


@dataclass(kw_only=True)
class ColumnsConfig:
    """Names of the data's columns. A dot selects a field of an object: answers.text."""

    # The column that identifies rows in predictions; None uses SQuAD's ids or row numbers.
    id: str | None = None
    # The column of the text, or of the first text of a pair.
    text: str = "text"
    # The column of the second text of a pair; None reads single texts.
    text_pair: str | None = None
    # The column of the label (classification) or number (regression). A list names several number columns, or a 0/1
    # column for each label.
    label: Any = "label"
    # The column of the question, for question answering.
    question: str = "question"
    # The column of the text that contains the answer.
    context: str = "context"
    # The column of the answers, with texts and positions as in SQuAD.
    answers: str = "answers"
    # The column of the words, for named entities; in CoNLL files, its number, by default 0 (the first).
    tokens: str = "tokens"
    # The column of the words' tags; in CoNLL files, its number, by default -1 (the last).
    tags: str = "tags"


@dataclass(kw_only=True)
class RecordsConfig(DataConfig):
    """Labelled examples: `path` is a file, a folder, s3://bucket/prefix or the Hub id of a data set."""

    # The file format; auto recognises it from the file names, and saved is the format of Dataset.save_to_disk.
    format: str = setting("auto", among=FORMATS)
    # The configuration of a Hub data set.
    name: str | None = None
    # The commit of a Hub data set, which pins its content.
    revision: str | None = None
    # The training data: a file or glob in path, or a split; None uses path itself, or the split "train".
    train: str | None = None
    # The validation data: a file or glob in path, or a split; None holds out validation_fraction of the rows.
    validation: str | None = None
    # The additional validation splits by name, such as {mismatched: dev_mm.tsv}.
    more_validation: dict[str, str] = field(default_factory=dict)
    # The share of the rows, chosen by a hash of their text, that is held out for validation if data.validation is None.
    validation_fraction: float = setting(0.1, above=0, below=1)
    # The maximum number of training examples, drawn with the seed; None uses all.
    max_train_examples: int | None = setting(None, above=0)
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    # The labels in the order of their class numbers; [] uses the labels in the data: numbers in their order, then names
    # in the order of label_map, then by the alphabet.
    labels: list[str] = field(default_factory=list)
    # The label for each value of the label column; None drops the rows with that value.
    label_map: dict[str, str | None] = field(default_factory=dict)
    # The separator of several labels in one field, such as | in CSV; None expects lists, which may be written as text:
    # ['a', 'b'].
    label_separator: str | None = None
    # The lengths in tokens, in rising order, to which micro batches are padded, such as [32,64,128]. The longest
    # length, which is seq_len or that of the longest row, is always added. auto picks the fewest lengths that would
    # keep padding below 10 % if each row had its own, but at most three if each needs a compiled graph (XLA, Trainium,
    # backend.compile). It picks multiples of 16, or of 8 without compilation. [] pads each micro batch to its longest
    # row, in multiples of 8, or with compilation all of them to the longest length. The order of rows is the same.
    lengths: Any = "auto"
    # The character between the fields of a CSV file.
    delimiter: str = ","
    # The form of quotation marks inside quoted fields of CSV files: doubled, or escaped by a backslash. With none, no
    # field is quoted, and the marks are text. auto is doubled, or none if the delimiter is a tab.
    quotes: str = setting("auto", among=("auto", "doubled", "escaped", "none"))
    # Read the column names from the first line of a CSV file; false names the columns 0, 1, ...
    header: bool = True
    # The text encoding of the files, as Python names it.
    encoding: str = "utf-8"
    # The maximum number of bad rows: rows that cannot be read, or have an invalid label or answer. They are skipped,
    # counted and named; if there are more, the data is rejected.
    max_bad_rows: int = setting(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delimiter == r"\t":  # a tab is hard to type in a shell
            self.delimiter = "\t"
        ok = len(self.delimiter) == 1 and self.delimiter not in '\r\n"\\'
        check(ok, f"data.delimiter={self.delimiter} must be one character, and no quotation mark")
        given = [] if self.lengths == "auto" else self.lengths
        ok = isinstance(given, list) and all(type(length) is int for length in given)
        ok = ok and all(0 < a < b for a, b in zip([1, *given], given, strict=False))
        check(
            ok,
            f"data.lengths={self.lengths} must be auto, or token counts in rising order, such as [32,64,128]",
        )
        check(
            len(given) <= MOST_LENGTHS,
            f"data.lengths has {len(given)} lengths, but at most {MOST_LENGTHS} are supported",
        )
        self.columns.label = column_names(self.columns.label)
        reserved = sorted({"train", "validation"} & set(self.more_validation))
        check(
            not reserved,
            f"data.more_validation uses the reserved names {', '.join(reserved)}; choose others",
        )
        twice = sorted({label for label in self.labels if self.labels.count(label) > 1})
        check(not twice, f"data.labels names {shortlist(twice)} twice")
        unknown = sorted(
            {label for label in self.label_map.values() if label is not None} - set(self.labels)
        )
        check(
            not (self.labels and unknown),
            f"data.label_map maps to {shortlist(unknown)}, which data.labels lacks",
        )


@dataclass(kw_only=True)
class EvaluatedConfig(RecordsConfig):
    """Labelled examples of which an evaluation without training uses only the validation rows."""

    # True if these were held out of the training rows, so that all rows are read to find them.
    holds_out: bool = False


def is_named(name: str) -> bool:
    """Return whether a name ends in the suffix of a file format."""
    return name.lower().removesuffix(".gz").endswith(SUFFIXES)


def column_names(value: Any) -> str | list[str]:
    """Return data.columns.label as one name or a list of names. Raises InputError if it is neither."""
    names = [
        str(name) if type(name) is int else name
        for name in (value if isinstance(value, list) else [value])
    ]
    ok = (
        bool(names)
        and all(isinstance(name, str) for name in names)
        and len(set(names)) == len(names)
    )
    check(ok, f"data.columns.label={value} must be a column, or a list of different columns")
    if len(names) > 1:
        return names
    return names[0]


@dataclass(kw_only=True)
class S3Config(Section, prefix="s3."):
    """Access to S3. A setting that is None comes from AWS's usual sources: environment, ~/.aws, the instance's role.

    Credentials always do; AWS_PROFILE chooses a profile of ~/.aws.
    """

    # The URL of an S3-compatible server; None uses AWS.
    endpoint: str | None = None
    # The region of the bucket.
    region: str | None = None
    # The time limit of a request in seconds, without the pauses between its attempts.
    timeout_s: float = setting(60.0, above=0)
    # The encryption that writes ask for: AES256, aws:kms, or the ARN of a KMS key; null leaves it to the bucket. Some
    # buckets' policies demand it.
    sse: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.sse in (None, "AES256", "aws:kms") or bool(KMS_KEY.fullmatch(self.sse)),
            f"s3.sse={self.sse} must be AES256, aws:kms, or the ARN of a KMS key (arn:aws:kms:REGION:ACCOUNT:key/ID)",
        )
        if self.endpoint is not None:
            check_endpoint("s3.endpoint", self.endpoint)

    def flags(self) -> list[str]:
        """Return these settings as command line flags."""
        given = {
            "--endpoint": self.endpoint,
            "--region": self.region,
            "--sse": self.sse,
        }
        # Flag and value are one argument, since a value may begin with a dash.
        return [f"{flag}={value}" for flag, value in given.items() if value is not None]

    @property
    def path_style(self) -> bool:
        """True if the bucket is in the path of URLs, as most servers require that are not AWS's."""
        host = urlsplit(self.endpoint or AWS).hostname or ""
        return not host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def check_endpoint(key: str, url: str) -> None:
    """Raise InputError unless a URL is a plain server address. Run folders store it, so it must contain no secrets."""
    try:
        parts = urlsplit(url)
        has_secret = "@" in url or bool(parts.query or parts.fragment)
        ok = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isprintable()
        )
    except ValueError:  # the port or the address is invalid
        has_secret, ok = "@" in url, False
    check(
        not has_secret,
        f"{key} contains more than an address (user:password@, ? or #), and run folders would store it; give "
        "http://host:port, and set credentials as for AWS's tools (environment, ~/.aws or a role)",
    )
    check(
        ok,
        f"{key}={url} must be a server's address, http:// or https://, such as http://host:port",
    )
