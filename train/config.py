"""Every setting of a training run and of corpus preparation: name, type, unit, default and check.

These dataclasses are the Hydra schema: an unknown key or a value of another type is refused before anything starts.
Defaults live here and nowhere else; `conf/*.yaml` holds only what differs. No torch here, so that launchers and
reports can read a configuration on a machine without it. None means "off" or "work it out"; the comment says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING, OmegaConf

DEFAULT_TIMEOUT_S = 600.0  # of a collective
TO_BE_GIVEN = "(to be given)"  # model.pretrained, by conf/model/pretrained.yaml
LARGEST_FLOAT = 1e100  # products of two stay finite
LARGEST = 2**63  # numbers stay below: NumPy, torch and safetensors count in 64 bits
LONGEST_S = 1e9  # 30 years; timers of Python and gloo take some more, but not every float
# Limits far above what is of use: a larger value is a slip, and would cost memory, processes or a hang.
MAX_EVAL_BATCH = 2**20  # sequences
MAX_MICRO_BATCHES_AHEAD = 1000  # kept ready: minutes of training, and at a megabyte each a gigabyte of memory
MAX_LOADER_PROCESSES = 128  # of a rank: a trn1.32xlarge has as many processors for all of its 32 ranks
MAX_DOWNLOADS = 64  # at once: each holds its shard in memory, about 64 MiB twice; a few fill a network card
MAX_CACHE_GB = 1e6  # a petabyte: no machine has such a disk, and infinity has no bytes
MAX_PREPARING_PROCESSES = 1024  # of a machine: as many as the largest have processors, and each holds a tokenizer


class InputError(Exception):
    """A setting or an input that the user has to fix. The message is one line: what, the value seen, what is right.

    It is no ValueError: whoever catches those around a parser must not take a refusal by S3 for a damaged file.
    """


class Unset(InputError):
    """A setting that a run cannot do without is not given."""


class Failure(RuntimeError):
    """Why a run ends that the user need not look for: one line, the same on all ranks, which leave in order."""


class Unreachable(Failure):
    """A service did not answer as it should, although it was asked again; the same command may succeed later."""


def check(ok: bool, message: str) -> None:
    """Raise InputError with `message` unless `ok`."""
    if not ok:
        raise InputError(message)


def check_values(settings: Mapping[str, Any]) -> None:
    """Refuse what no setting can be, whatever it means: numbers that are not finite or larger than 64 bits hold, times
    that no timer of the operating system takes, empty texts (an unset variable, mostly), and texts of several lines.
    """
    for key, value in leaves(settings):
        if isinstance(value, int | float):
            check(math.isfinite(value) and abs(value) < LARGEST_FLOAT, f"{key}={value:g} must be a finite number")
            is_real = isinstance(value, float) and key != "max_epochs"  # which becomes a number of steps
            check(is_real or abs(value) < LARGEST, f"{key}={value} must be below 2^63")
            check(not key.endswith("_s") or value <= LONGEST_S, f"{key}={value:g} must be at most {LONGEST_S:g} s")
        elif isinstance(value, str):
            check(value != "", f"{key}= is empty (a variable that is not set?); give a value or leave it out")
            check(not set(value) & set("\0\n\r"), f"{key}={value!r} must be one line")


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Single values of nested tables and lists, with their names: "optim.betas[0]"."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from leaves(item, f"{key}[{place}]")
    else:
        yield key, value


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    check(value in choices, f"{key}={value} is not known; choose one of: {', '.join(choices)}")


def check_positive(prefix: str, obj: object, *names: str) -> None:
    """Every named field of `obj` is None or above zero."""
    for name in names:
        value = getattr(obj, name)
        check(value is None or value > 0, f"{prefix}{name}={value} must be above 0")


def check_at_most(prefix: str, obj: object, **limits: float) -> None:
    """Every named field of `obj` is None or no more than its limit."""
    for name, limit in limits.items():
        value = getattr(obj, name)
        check(value is None or value <= limit, f"{prefix}{name}={value} must be at most {limit:,}")


# ---- what is learnt ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class TaskConfig:
    kind: str = MISSING  # which module of train/tasks


@dataclass(kw_only=True)
class MLMConfig(TaskConfig):
    """Masked language modelling with n-gram masking (ALBERT, section 3.1 of https://arxiv.org/abs/1909.11942)."""

    kind: str = "mlm"
    mask_rate: float = 0.15  # share of the tokens of a sequence to predict
    max_predictions: int | None = None  # slots per sequence, a fixed shape; None: seq_len * mask_rate, rounded
    max_ngram: int = 3  # longest run of units hidden together, p(n) ~ 1/n; 1 is BERT's masking
    whole_word: bool = False  # units are whole words instead of tokens

    def __post_init__(self) -> None:
        check_choice("task.kind", self.kind, ("mlm",))
        check(0 < self.mask_rate < 1, f"task.mask_rate={self.mask_rate} must lie between 0 and 1")
        check_positive("task.", self, "max_predictions", "max_ngram")


@dataclass(kw_only=True)
class ClassifyConfig(TaskConfig):
    """One label for a text or a pair of texts."""

    kind: str = "classify"
    class_weights: list[float] | None = None  # of the labels in their order: how much an error counts; None: the same
    balanced: bool = False  # class weights from the training data: rows / (labels * rows of the label)
    label_smoothing: float = 0.0  # share of the target that is spread over all labels

    def __post_init__(self) -> None:
        check_choice("task.kind", self.kind, ("classify",))
        check(0 <= self.label_smoothing < 1, f"task.label_smoothing={self.label_smoothing} must lie in [0, 1)")
        weights = self.class_weights
        check(weights is None or all(w > 0 for w in weights), f"task.class_weights={weights} must be above 0")
        check(not (self.balanced and weights), "task.balanced=true makes the weights: leave task.class_weights out")


@dataclass(kw_only=True)
class QAConfig(TaskConfig):
    """The span of a context that answers a question (SQuAD). Long contexts are read in windows that overlap."""

    kind: str = "qa"
    stride: int = 128  # tokens that two windows of a context share
    max_question_tokens: int = 64  # longer questions are cut, and counted
    max_answer_tokens: int = 30  # of an answer that is given
    n_best: int = 20  # answers kept for each question
    unanswerable: bool = False  # SQuAD v2: a question may have no answer
    null_threshold: float | None = None  # v2: no answer where its score is above the best span's by more than this;
    # None: the threshold that is best on the validation data, which is reported

    def __post_init__(self) -> None:
        check_choice("task.kind", self.kind, ("qa",))
        check_positive("task.", self, "stride", "max_question_tokens", "max_answer_tokens", "n_best")
        check(self.null_threshold is None or self.unanswerable, "task.null_threshold is for task.unanswerable=true")


@dataclass(kw_only=True)
class ModelConfig:
    """A Hugging Face encoder: made from sizes, or read from a checkpoint."""

    pretrained: str | None = None  # Hub id or folder; its configuration and weights are used, sizes below must agree
    init_from: str | None = None  # the same, or a run of ours (its run_dir, in S3 too), in place of pretrained
    tokenizer: str | None = None  # Hub id, folder or run, for classify and qa; None: that of the weights
    freeze_embeddings: bool = False  # they stay as they are
    freeze_layers: int = 0  # so many layers from the bottom stay as they are, and the embeddings with them
    new_head: bool = False  # a checkpoint's head for other labels is left out, instead of refused
    architecture: str = "albert"  # `model_type` of transformers, for a model made from sizes
    vocab_size: int | None = None  # None: that of the tokenizer that prepared the data
    max_positions: int | None = None  # longest sequence; None here and below: the architecture's own default
    embedding_size: int | None = None  # only for architectures that factorise the embedding
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    hidden_dropout: float | None = None
    attention_dropout: float | None = None

    def __post_init__(self) -> None:
        sizes = ("embedding_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        check_positive("model.", self, "vocab_size", "max_positions", *sizes)
        if self.init_from is not None:
            self.pretrained = None
        if self.pretrained == TO_BE_GIVEN:
            raise Unset(
                "model.pretrained is not set: give model.pretrained=... (a Hub id or folder), or model.init_from"
            )
        check(self.freeze_layers >= 0, f"model.freeze_layers={self.freeze_layers} must be 0 or more")
        for name in ("hidden_dropout", "attention_dropout"):
            value = getattr(self, name)
            check(value is None or 0 <= value < 1, f"model.{name}={value} must lie in [0, 1)")
        if self.hidden_size and self.num_heads:
            check(
                self.hidden_size % self.num_heads == 0,
                f"model.hidden_size={self.hidden_size} must be a multiple of model.num_heads={self.num_heads}",
            )


@dataclass(kw_only=True)
class S3Config:
    """How to reach S3. None: as AWS's own tools find it (environment, ~/.aws, the instance's role)."""

    endpoint: str | None = None  # URL of an S3-compatible server
    region: str | None = None
    profile: str | None = None  # of ~/.aws: whose credentials
    path_style: bool = False  # bucket in the path instead of the host name; most S3-compatible servers want it
    timeout_s: float = 60.0  # a request ends after so long without an answer, all its attempts included

    def __post_init__(self) -> None:
        check_positive("s3.", self, "timeout_s")
        if self.endpoint is not None:
            check_endpoint("s3.endpoint", self.endpoint)

    def flags(self) -> list[str]:
        """The same for the commands that take flags."""
        given = {"--endpoint": self.endpoint, "--region": self.region, "--profile": self.profile}
        words = [word for flag, value in given.items() if value is not None for word in (flag, value)]
        return [*words, "--path-style"] if self.path_style else words


def check_endpoint(key: str, url: str) -> None:
    """InputError, without repeating it, for a URL that holds more than a server's address: run folders keep it."""
    try:
        parts = urlsplit(url)
        has_secret = "@" in url or bool(parts.query or parts.fragment)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # no port or address
        has_secret, ok = "@" in url, False
    check(
        not has_secret,
        f"{key} holds more than an address (user:password@, ? or #), and run folders would keep it; give "
        "http://host:port, and credentials as AWS's tools do (environment, ~/.aws, a role)",
    )
    check(ok, f"{key}={url} must be a server's address, http:// or https://, as http://host:port")


@dataclass(kw_only=True)
class DataConfig:
    """What all data has in common. It is shards (pretraining) or records (labelled examples)."""

    path: str = MISSING  # a folder or s3://bucket/prefix of shards; for records a file or the Hub id of a set as well
    num_workers: int = 1  # loader processes per rank; 0 prepares batches in the training process
    prefetch: int = 4  # micro batches each worker keeps ready
    verify: bool = True  # compare what is on this machine with its checksums before training (once per node)
    cache_dir: str | None = None  # where data is kept for training; None: an NVMe instance store, or ~/.cache/baretrain

    def __post_init__(self) -> None:
        check(self.num_workers >= 0, f"data.num_workers={self.num_workers} must be 0 or more")
        check_positive("data.", self, "prefetch")
        check_at_most("data.", self, num_workers=MAX_LOADER_PROCESSES, prefetch=MAX_MICRO_BATCHES_AHEAD)


@dataclass(kw_only=True)
class ShardsConfig(DataConfig):
    """Token shards: `path` is a folder or s3://bucket/prefix that `python -m train.prepare output=...` wrote."""

    window_shards: int | None = None  # shards whose sequences are shuffled together; None: all that the cache holds,
    # growing from 2 in the first epoch, so that training starts early; from the number of shards on: all at once
    cache_gb: float | None = None  # 1e9 bytes that they may take; None: 90 % of what is free
    downloads: int = 4  # shards fetched at once, by one process per node
    attempt_s: float = 60.0  # a download that takes longer is given up for another one, with a new client
    deadline_s: float = 300.0  # a batch waits so long for a shard, all tries included; then the run ends and names it
    refetches: int = 3  # downloads of a shard whose checksum is wrong

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = ("window_shards", "cache_gb", "downloads", "attempt_s", "deadline_s", "refetches")
        check_positive("data.", self, *numbers)
        check_at_most("data.", self, downloads=MAX_DOWNLOADS, cache_gb=MAX_CACHE_GB)
        check(
            self.attempt_s <= self.deadline_s,
            f"data.attempt_s={self.attempt_s:g} is longer than data.deadline_s={self.deadline_s:g}; lower it",
        )


@dataclass(kw_only=True)
class ColumnsConfig:
    """Which columns of the data hold what. A dot leads into an object: answers.text."""

    id: str | None = None  # goes into the predictions; None: the row's number
    text: str = "text"
    text_pair: str | None = None  # the second text of a pair
    label: str = "label"
    question: str = "question"  # these for question answering
    context: str = "context"
    answers: str = "answers"


@dataclass(kw_only=True)
class RecordsConfig(DataConfig):
    """Labelled examples: `path` is a file, a folder, s3://bucket/prefix or the Hub id of a data set."""

    format: str = "auto"  # csv | jsonl | parquet | squad | hub | saved (datasets' save_to_disk, raw or prepared) | auto
    name: str | None = None  # configuration of a Hub data set
    revision: str | None = None  # of a Hub data set: a commit, so that it stays the same
    train: str | None = None  # file, glob below path, or split; None: path itself, or the split "train"
    validation: str | None = None  # the same; None: validation_fraction of the training rows
    more_validation: dict[str, str] = field(default_factory=dict)  # further ones, named: {mismatched: dev_mm.tsv}
    validation_fraction: float = 0.1  # rows held out where there is no validation, chosen by a hash of their text
    max_train_examples: int | None = None  # so many, drawn with the run's seed; None: all
    max_validation_examples: int | None = None  # the same, of each validation
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    labels: list[str] = field(default_factory=list)  # in the order of their numbers; empty: those found, sorted
    label_map: dict[str, str | None] = field(default_factory=dict)  # value in the data: label; null leaves the row out
    lengths: list[int] = field(default_factory=list)  # tokens that batches are padded to, rising: one graph each;
    # empty: seq_len alone
    delimiter: str = ","  # of CSV, these too
    quote: str | None = '"'  # None: quotes are text
    escape: str | None = None  # as \\: the character after it is text; None: a doubled quote is a quote
    header: bool = True  # the first line names the columns; without it they are 0, 1, ...
    encoding: str = "utf-8"
    max_bad_rows: int = 0  # rows that cannot be read, or whose label or answer is wrong: left out, counted and named up
    # to here, refused beyond
    save_to: str | None = None  # also keep what was prepared there, a folder or s3://..., for data.path of other runs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.delimiter = "\t" if self.delimiter == r"\t" else self.delimiter  # as command lines have it
        formats = ("auto", "csv", "jsonl", "parquet", "squad", "hub", "saved")
        check_choice("data.format", self.format, formats)
        check_positive("data.", self, "max_train_examples", "max_validation_examples")
        check(self.max_bad_rows >= 0, f"data.max_bad_rows={self.max_bad_rows} must be 0 or more")
        fraction = self.validation_fraction
        check(0 < fraction < 1, f"data.validation_fraction={fraction} must lie between 0 and 1")
        rising = all(0 < a < b for a, b in zip([1, *self.lengths], self.lengths, strict=False))
        check(rising, f"data.lengths={self.lengths} must be rising numbers of tokens, as [32,64,128]")
        for name in ("delimiter", "quote", "escape"):
            value = getattr(self, name)
            check(value is None or len(value) == 1, f"data.{name}={value} must be one character")
        reserved = sorted({"train", "validation"} & set(self.more_validation))
        check(not reserved, f"data.more_validation names {', '.join(reserved)}; choose other names")
        twice = sorted({label for label in self.labels if self.labels.count(label) > 1})
        check(not twice, f"data.labels names {', '.join(twice)} twice")
        unknown = sorted({label for label in self.label_map.values() if label is not None} - set(self.labels))
        check(not (self.labels and unknown), f"data.label_map leads to {', '.join(unknown)}, not one of data.labels")


@dataclass(kw_only=True)
class OptimConfig:
    name: str = "adamw"  # adamw | lamb
    lr: float = 1e-3  # peak, at reference_batch_size when lr_scaling is not none
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    head_lr: float | None = None  # peak for the task's head, which begins with random weights; None: lr
    weight_decay: float = 0.01  # not applied to biases and normalisation weights
    max_grad_norm: float | None = 1.0  # clip by the global norm; None: no clipping
    schedule: str = "linear"  # after the warm-up: linear | cosine | polynomial | constant
    power: float = 1.0  # exponent of the polynomial decay
    final_lr_fraction: float = 0.0  # share of lr left at the last step
    warmup_steps: int | None = None  # None: warmup_fraction of the run
    warmup_fraction: float = 0.1
    lr_scaling: str = "none"  # with global batch / reference_batch_size: none | linear | sqrt
    reference_batch_size: int | None = None  # sequences; required by linear and sqrt

    def __post_init__(self) -> None:
        check_choice("optim.name", self.name, ("adamw", "lamb"))
        check_choice("optim.schedule", self.schedule, ("linear", "cosine", "polynomial", "constant"))
        check_choice("optim.lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))
        check_positive("optim.", self, "lr", "head_lr", "eps", "max_grad_norm", "power", "reference_batch_size")
        check(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay} must be 0 or more")
        valid = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(valid, f"optim.betas={list(self.betas)} must be two numbers in [0, 1)")
        check((self.warmup_steps or 0) >= 0, f"optim.warmup_steps={self.warmup_steps} must be 0 or more")
        for name in ("warmup_fraction", "final_lr_fraction"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"optim.{name}={value} must lie between 0 and 1")
        check(
            self.lr_scaling == "none" or self.reference_batch_size is not None,
            f"optim.lr_scaling={self.lr_scaling} needs optim.reference_batch_size, the batch optim.lr is for",
        )


# ---- where and how it runs -----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class BackendConfig:
    name: str = "auto"  # auto | ddp | xla | neuron
    device: str = "auto"  # auto | cpu | cuda | neuron
    precision: str = "auto"  # fp32 | bf16 (autocast) | auto: bf16 where the hardware multiplies it natively
    grad_compression: str = "none"  # none | bf16: halves the bytes of the gradient reduction (CUDA)
    activation_checkpointing: bool = False  # keep only each layer's input and compute the layer again in backward
    timeout_s: float | None = (
        None  # a collective that takes longer is an error; None: DEFAULT_TIMEOUT_S, on Trainium 7,200, since
    )
    # ranks also wait for each other's compilers

    def __post_init__(self) -> None:
        check_choice("backend.name", self.name, ("auto", "ddp", "xla", "neuron"))
        check_choice("backend.device", self.device, ("auto", "cpu", "cuda", "neuron"))
        check_choice("backend.precision", self.precision, self.precisions())
        check_choice("backend.grad_compression", self.grad_compression, ("none", "bf16"))
        check_positive("backend.", self, "timeout_s")

    def precisions(self) -> tuple[str, ...]:
        return ("auto", "fp32", "bf16")


@dataclass(kw_only=True)
class XLAConfig(BackendConfig):
    """PyTorch/XLA, on Trainium 1 or the CPU. Two precisions more: bf16_master (everything in bf16, computed from fp32
    weights that the optimizer keeps) and bf16_stochastic (bf16 weights, updated in fp32 and rounded stochastically by
    the hardware: 2 bytes a weight; the CPU rounds to nearest).
    """

    name: str = "xla"
    layers: str = "auto"  # unrolled | scan: a shared layer is compiled once | auto: scan on CPUs, unrolled on Trainium
    batches_per_execution: int = 1  # micro batches in one graph; all of a step's give one execution a step
    loader_prefetch: int = 8  # micro batches kept ready on the host
    device_prefetch: int = 4  # and on the device; that many are sent together
    zero1: bool = False  # split AdamW's state over the ranks; never run on more than one rank yet
    max_graphs: int | None = None  # of a run; one more stops it on CPUs, warns on Trainium. None: as many as needed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backend.layers", self.layers, ("unrolled", "scan", "auto"))
        check(self.grad_compression == "none", "backend.grad_compression is for NCCL; leave it out with backend=xla")
        check_positive("backend.", self, "batches_per_execution", "loader_prefetch", "device_prefetch", "max_graphs")
        ahead = MAX_MICRO_BATCHES_AHEAD
        check_at_most("backend.", self, loader_prefetch=ahead, device_prefetch=ahead)
        check(
            not self.zero1 or self.precision in ("auto", "fp32", "bf16"),
            f"backend.zero1=true has fp32 weights of its own; backend.precision={self.precision} does not go with it",
        )

    def precisions(self) -> tuple[str, ...]:
        return ("auto", "fp32", "bf16", "bf16_master", "bf16_stochastic")


@dataclass(kw_only=True)
class ParallelConfig:
    name: str = "data"  # every rank holds the model and a share of each batch

    def __post_init__(self) -> None:
        check_choice("parallel.name", self.name, ("data",))


@dataclass(kw_only=True)
class InstanceConfig:
    """One machine type. Unknown figures stay None and what needs them (MFU, cost) is left out, never guessed."""

    name: str = "local"
    device: str | None = None  # what it has: cuda | neuron; a run that says this instance needs it. None: anything
    devices: int | None = None  # ranks that fill one machine
    rank_counts: list[int] | None = None  # numbers of ranks that one machine can run; None: any
    device_tflops_bf16: float | None = None  # dense peak of one rank's device, 1e12 FLOP/s
    device_tflops_fp32: float | None = None
    usd_per_hour: float | None = None  # on demand, one machine
    source: str | None = None  # where the figures are from, and the date

    def __post_init__(self) -> None:
        check_choice("instance.device", self.device or "cuda", ("cuda", "neuron"))
        check_positive("instance.", self, "devices", "device_tflops_bf16", "device_tflops_fp32", "usd_per_hour")
        counts = self.rank_counts
        ok = counts is None or (counts != [] and min(counts) > 0)
        check(ok, f"instance.rank_counts={counts} must be numbers above 0, or null for any")

    def peak_flops_per_s(self, precision: str) -> float | None:
        """Of one rank's device."""
        tflops = self.device_tflops_fp32 if precision == "fp32" else self.device_tflops_bf16
        return None if tflops is None else tflops * 1e12


@dataclass(kw_only=True)
class CheckpointConfig:
    every: int = 1000  # steps between saves; the last step always saves
    keep: int = 3  # newest ones kept, at least the last two that are whole; 0 keeps all. The best one stays as well
    best: bool = False  # save also whenever an evaluation is better than all before
    max_wait_s: float = 10.0  # a save due while the last one is being written waits that long, then is skipped
    max_failures: int = 3  # saves in a row that failed, before the run stops
    patience_s: float = 300.0  # the last save is tried again for so long, or until max_run_s is over, while S3 is away
    max_loss_s: float = 1800.0  # of work that a fault may cost: bounds the interval that the summary suggests

    def __post_init__(self) -> None:
        check_positive("checkpoint.", self, "every", "max_failures", "max_loss_s")
        check(self.keep == 0 or self.keep >= 2, f"checkpoint.keep={self.keep} must be 0 (all) or at least 2")
        for name in ("max_wait_s", "patience_s"):
            check(getattr(self, name) >= 0, f"checkpoint.{name}={getattr(self, name):g} must be 0 or more")


@dataclass(kw_only=True)
class ResumeConfig:
    force: bool = False  # go on although what is learnt, from which data or in which batches has changed


@dataclass(kw_only=True)
class LeaseConfig:
    """Who owns the run folder: a second job is refused while the first one's heartbeat goes on."""

    ttl_s: float = 60.0  # without a heartbeat, as watched by a newcomer, and the owner counts as dead

    def __post_init__(self) -> None:
        check(
            self.ttl_s >= 0.1, f"lease.ttl_s={self.ttl_s:g} must be at least 0.1: several heartbeats come in that time"
        )


@dataclass(kw_only=True)
class PreemptConfig:
    """What asks the run to stop at the next step, beside signals, max_run_s and a file run_dir/STOP."""

    notices: str = "auto"  # EC2's spot notices, over IMDSv2: auto (on EC2) | on | off
    poll_s: float = 5.0  # AWS advises 5 s; a spot notice comes two minutes ahead at best
    rebalance: str = "save"  # at EC2's rebalance recommendation: save and go on | leave | ignore
    block_end: str | None = None  # of the capacity block, as 2026-11-30T11:30:00Z; instances end 30 min before it

    def __post_init__(self) -> None:
        check_choice("preempt.notices", self.notices, ("auto", "on", "off"))
        check_choice("preempt.rebalance", self.rebalance, ("save", "leave", "ignore"))
        check(
            self.poll_s >= 0.01,
            f"preempt.poll_s={self.poll_s:g} must be at least 0.01: each time asks EC2 and the disk",
        )
        if self.block_end is not None:
            try:
                aware = datetime.fromisoformat(self.block_end.replace("Z", "+00:00")).tzinfo is not None
            except ValueError:
                aware = False
            check(aware, f"preempt.block_end={self.block_end} must be a time with its zone, as 2026-11-30T11:30:00Z")


@dataclass(kw_only=True)
class WatchdogConfig:
    """A process per node that ends a rank which no longer comes forward, so that torchrun can start it again."""

    enabled: bool = True
    step_s: float = 480.0  # without a heartbeat (micro batch, batch of an evaluation), and a rank counts as stuck
    start_s: float = 7200.0  # the same until the first step is done: joining, loading, compiling

    def __post_init__(self) -> None:
        check_positive("watchdog.", self, "step_s", "start_s")


@dataclass(kw_only=True)
class NonfiniteConfig:
    """Steps whose gradient is NaN or infinite are skipped: neither weights nor optimizer change."""

    # In a row. Then the run goes back to its newest checkpoint, and past the data that came since. On CPUs, and with
    # backend=neuron, after exactly so many. CUDA and XLA devices count by themselves and are asked every log_every
    # steps, so that no step waits: there the run goes back at the first line that ends with so many or more.
    max_skips: int = 3
    max_rollbacks: int = 2  # The next time it ends: after max_skips * (max_rollbacks + 1) skips if there are no others.

    def __post_init__(self) -> None:
        check_positive("nonfinite.", self, "max_skips")
        check(self.max_rollbacks >= 0, f"nonfinite.max_rollbacks={self.max_rollbacks} must be 0 or more")


@dataclass(kw_only=True)
class StragglerConfig:
    # A rank is named once its own work takes so many times the median of the other ranks, and longer than in nine of
    # ten lines of its own past, and again when that is over.
    factor: float = 1.5
    windows: int = 5  # lines of the metrics in a row in which it does; twice as many if it was so from the start

    def __post_init__(self) -> None:
        check(self.factor > 1, f"straggler.factor={self.factor:g} must be above 1")
        check_positive("straggler.", self, "windows")


@dataclass(kw_only=True)
class BestConfig:
    """Which evaluation counts as the best: for early_stop, checkpoint.best and the checkpoint that always stays."""

    metric: str = "loss"  # of the eval lines of metrics.jsonl
    export: bool = False  # export the best checkpoint at the end, not the last one; checkpoint.best=true goes with it

    @property
    def lower_is_better(self) -> bool:
        return self.metric.endswith(("loss", "perplexity"))


@dataclass(kw_only=True)
class HubConfig:
    """Where a finished run goes on the Hugging Face Hub; the token is where `hf auth login` or HF_TOKEN put it."""

    push_to: str | None = None  # user/name: model, tokenizer, card and TensorBoard files; None: nowhere
    private: bool = True


@dataclass(kw_only=True)
class EarlyStopConfig:
    patience: int | None = None  # evaluations that are not better before the run ends; None: off
    min_delta: float = 0.0  # by how much best.metric must be better to count

    def __post_init__(self) -> None:
        check_positive("early_stop.", self, "patience")
        check(self.min_delta >= 0, f"early_stop.min_delta={self.min_delta:g} must be 0 or more")


@dataclass(kw_only=True)
class TrainConfig:
    """A whole training run: `python -m train --cfg job` prints it."""

    run_dir: str = MISSING  # everything the run writes; the same folder goes on where it stopped
    seed: int = 0  # of the weights, the order of the data, masking and dropout
    seq_len: int | None = None  # tokens; None: that of the prepared data
    global_batch_size: int | None = None  # sequences per optimizer step over all ranks; None: micro * world size
    micro_batch_size: int | None = None  # sequences per rank and forward pass; None: global / world size
    max_examples: int | None = None  # length of the run in sequences; of these three at least one must be given, and
    # the shortest counts
    max_steps: int | None = None  # length of the run in steps of the optimizer
    max_epochs: float | None = None  # length of the run in passes over the data
    max_run_s: float | None = None  # wall-clock time of this start of the run: then it stops with a checkpoint
    log_every: int = 10  # steps between lines in metrics.jsonl and on the console
    eval_every: int | None = 500  # steps between evaluations; None: only at the end
    eval_examples: int | None = None  # validation sequences used; None: all
    eval_batch_size: int | None = None  # sequences per rank and batch of an evaluation; None: micro_batch_size
    collect_graphs: bool = False  # train.precompile's short run: each graph once, no number judged, nothing saved
    export: bool = True  # write run_dir/export for plain transformers at the end
    tensorboard: bool = True
    task: TaskConfig = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = MISSING
    s3: S3Config = field(default_factory=S3Config)
    optim: OptimConfig = field(default_factory=OptimConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    best: BestConfig = field(default_factory=BestConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    preempt: PreemptConfig = field(default_factory=PreemptConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    nonfinite: NonfiniteConfig = field(default_factory=NonfiniteConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)

    def __post_init__(self) -> None:
        check(
            not (isinstance(self.backend, XLAConfig) and self.backend.zero1 and self.optim.name == "lamb"),
            "backend.zero1=true splits tensors, and LAMB needs the norms of whole ones; use optim=adamw",
        )
        timeout_s = self.backend.timeout_s or DEFAULT_TIMEOUT_S
        check(
            self.checkpoint.max_wait_s < timeout_s,
            f"checkpoint.max_wait_s={self.checkpoint.max_wait_s:g} must be below backend.timeout_s={timeout_s:g}",
        )
        if isinstance(self.data, ShardsConfig) and self.data.path.startswith("s3://"):
            check(
                self.data.deadline_s < timeout_s,
                f"data.deadline_s={self.data.deadline_s:g} must be below backend.timeout_s={timeout_s:g}: a missing "
                "shard is to be named before the other ranks give up waiting",
            )
        sizes = ("seq_len", "global_batch_size", "micro_batch_size", "max_examples", "max_steps", "max_epochs")
        check_positive("", self, *sizes, "log_every", "eval_every", "eval_examples", "eval_batch_size", "max_run_s")
        check(self.seed >= 0, f"seed={self.seed} must be 0 or more")
        check(
            self.seq_len is None or self.seq_len >= 8,
            f"seq_len={self.seq_len} must be at least 8 (3 are special tokens)",
        )
        check(
            (self.eval_batch_size or 0) <= MAX_EVAL_BATCH,
            f"eval_batch_size={self.eval_batch_size} must be at most {MAX_EVAL_BATCH}: the last batch is filled up",
        )
        reads_records = isinstance(self.data, RecordsConfig)
        check(
            reads_records == isinstance(self.task, ClassifyConfig | QAConfig),
            f"task={self.task.kind} learns from {'shards' if reads_records else 'records'}, data is of the other kind; "
            "choose data=shards for mlm, data=csv, tweets, squad, ... for classify and qa",
        )
        check(
            self.optim.head_lr is None or reads_records,
            f"optim.head_lr={self.optim.head_lr} is for tasks whose head begins anew (classify, qa); leave it out",
        )
        check(
            not self.best.export or self.checkpoint.best,
            "best.export=true needs the best checkpoint: set checkpoint.best=true",
        )
        check(
            self.hub.push_to is None or self.export,
            f"hub.push_to={self.hub.push_to} pushes what export=true writes; set export=true",
        )
        if self.max_examples is self.max_steps is self.max_epochs is None:
            raise Unset("the run has no length: set max_steps, max_examples or max_epochs")
        if self.global_batch_size is self.micro_batch_size is None:
            raise Unset("the batch has no size: set global_batch_size (over all ranks) or micro_batch_size (per rank)")


# ---- corpus preparation --------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class CorpusConfig:
    kind: str = MISSING  # which source of train/data/corpus.py
    name: str = MISSING  # goes into the manifest


@dataclass(kw_only=True)
class FilesCorpusConfig(CorpusConfig):
    """Local files: plain text, JSON lines, CSV or Parquet; any but Parquet may be gzipped (.gz)."""

    path: str = MISSING  # a file, a folder (read recursively) or a glob
    encoding: str = "utf-8"  # of the files, by Python's name for it
    errors: str = "strict"  # bytes that do not decode: strict stops and names them, replace puts U+FFFD
    separator: str | None = r"^\s*$"  # text: a line that matches starts a new document; None: a file is a document
    column: str = "text"  # jsonl, csv, parquet: the field that holds a document

    def __post_init__(self) -> None:
        check_choice("corpus.errors", self.errors, ("strict", "replace"))


@dataclass(kw_only=True)
class HFDataset:
    path: str = MISSING  # Hub id, or a local folder or builder name
    name: str | None = None  # configuration of the data set
    split: str = "train"
    column: str = "text"
    data_files: str | None = None  # for builders such as json, csv, parquet
    rows_per_document: int = 1  # consecutive rows joined into one document, for sets whose rows are sentences


@dataclass(kw_only=True)
class HFCorpusConfig(CorpusConfig):
    datasets: list[HFDataset] = field(default_factory=list)  # read one after the other

    def __post_init__(self) -> None:
        check(bool(self.datasets), "corpus.datasets is empty: name one, e.g. corpus.datasets=[{path: user/set}]")


MIN_VOCAB_SIZE = 16


@dataclass(kw_only=True)
class TokenizerConfig:
    pretrained: str | None = None  # Hub id or folder of a fast tokenizer; None: train one on the corpus
    vocab_size: int = 30000  # pieces of a trained tokenizer
    lowercase: bool = True  # with accents stripped, as ALBERT's
    train_bytes: int = 256 * 2**20  # text that a new tokenizer is trained on at most; of a Hub stream, the first

    def __post_init__(self) -> None:
        ok = MIN_VOCAB_SIZE <= self.vocab_size <= 2**31
        check(ok, f"tokenizer.vocab_size={self.vocab_size} must be at least {MIN_VOCAB_SIZE}")
        check_positive("tokenizer.", self, "train_bytes")


@dataclass(kw_only=True)
class PrepareConfig:
    """Text to token shards: `python -m train.prepare --cfg job` prints it."""

    output: str = MISSING  # folder or s3://bucket/prefix to write; finished work is not done twice
    seed: int = 0  # of the documents that are held out, and of packing
    seq_len: int = 512  # tokens per sequence, special ones included
    validation_fraction: float = 0.01  # share of the documents held out, chosen by a hash of their text
    rows_per_shard: int | None = None  # sequences; None: about 64 MiB
    part: str | None = None  # "3/64": this call prepares the third of 64 parts, wherever and whenever; None: all
    processes: int = 1  # side by side on this machine; the call's part is divided further among them
    merge: bool = False  # only write the manifest of parts that are all there
    corpus: CorpusConfig = MISSING
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    s3: S3Config = field(default_factory=S3Config)

    def __post_init__(self) -> None:
        check(8 <= self.seq_len < 2**16, f"seq_len={self.seq_len} must lie between 8 (3 are special tokens) and 65535")
        check(self.seed >= 0, f"seed={self.seed} must be 0 or more")
        fraction = self.validation_fraction
        check(0 < fraction < 1, f"validation_fraction={fraction} must lie between 0 and 1")
        check_positive("", self, "rows_per_shard", "processes")
        check_at_most("", self, processes=MAX_PREPARING_PROCESSES)
        if self.part is not None:
            number, _, count = self.part.partition("/")
            ok = number.isascii() and number.isdigit() and count.isascii() and count.isdigit()
            check(
                ok and 1 <= int(number) <= int(count),
                f"part={self.part} must be two numbers, as 3/64 for the third of 64 parts",
            )
        check(
            not (self.merge and (self.part is not None or self.processes > 1)),
            "merge=true prepares nothing: give it without part and processes",
        )


# ---- sizes that follow ---------------------------------------------------------------------------------------------


def to_dict(config: TrainConfig | PrepareConfig) -> dict[str, Any]:
    """Plain containers, for config.yaml and fingerprints."""
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def flat(config: TrainConfig) -> dict[str, Any]:
    """One table of all settings: "optim.lr"."""
    return dict(flatten(to_dict(config)))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys joined by dots; empty tables stay as they are."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Plan:
    """What a configuration comes to on a number of ranks and an amount of data."""

    world_size: int
    global_batch_size: int  # sequences per optimizer step
    micro_batch_size: int  # sequences per rank and forward pass
    accumulation: int  # forward passes per rank and optimizer step
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    lr: float  # peak, scaled


def make_plan(cfg: TrainConfig, *, world_size: int, rows: int) -> Plan:
    """Batch sizes, length and learning rate of a run over `rows` training sequences; InputError if impossible."""
    if cfg.global_batch_size is None:
        assert cfg.micro_batch_size is not None  # TrainConfig refuses both missing
        global_batch = cfg.micro_batch_size * world_size
    else:
        global_batch = cfg.global_batch_size
    check(
        global_batch % world_size == 0,
        f"global_batch_size={global_batch} does not divide over {world_size} ranks; make it a multiple",
    )
    micro = cfg.micro_batch_size or global_batch // world_size
    check(
        global_batch % (micro * world_size) == 0,
        f"global_batch_size={global_batch} is not a multiple of micro_batch_size={micro} x {world_size} ranks",
    )
    per_graph = cfg.backend.batches_per_execution if isinstance(cfg.backend, XLAConfig) else 1
    check(
        global_batch // (micro * world_size) % per_graph == 0,
        f"backend.batches_per_execution={per_graph} does not divide the {global_batch // (micro * world_size)} micro "
        "batches of a rank and step",
    )
    check(
        rows >= global_batch,
        f"the data holds {rows} training sequences, fewer than one batch of {global_batch} over {world_size} ranks; "
        "prepare more text or lower global_batch_size",
    )
    steps_per_epoch = rows // global_batch  # the tail that does not fill a batch is left out, other rows each epoch
    lengths = []
    if cfg.max_steps is not None:
        lengths.append(cfg.max_steps)
    if cfg.max_examples is not None:
        lengths.append(cfg.max_examples // global_batch)
    if cfg.max_epochs is not None:
        lengths.append(int(cfg.max_epochs * steps_per_epoch))
    total = min(lengths)
    check(total > 0, f"the run is shorter than one step of {global_batch} sequences; raise max_examples or max_epochs")
    optim = cfg.optim
    warmup = optim.warmup_steps if optim.warmup_steps is not None else round(total * optim.warmup_fraction)
    check(
        warmup <= total,
        f"optim.warmup_steps={warmup} is longer than the run of {total} steps; lower it, or set it to null for a tenth",
    )
    ratio = global_batch / (optim.reference_batch_size or global_batch)
    factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[optim.lr_scaling]
    return Plan(
        world_size=world_size,
        global_batch_size=global_batch,
        micro_batch_size=micro,
        accumulation=global_batch // (micro * world_size),
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        warmup_steps=warmup,
        lr=optim.lr * factor,
    )
