"""Settings of a training run and of a comparison of runs, and the checks that concern several sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING

from train.config.attempt import (
    BestConfig,
    CheckpointConfig,
    LeaseConfig,
    NonfiniteConfig,
    ResumeConfig,
    WatchdogConfig,
)
from train.config.backend import BackendConfig, InstanceConfig
from train.config.checks import Section, check, check_choice, setting
from train.config.data import DataConfig, RecordsConfig, S3Config, ShardsConfig
from train.config.learning import ModelConfig, OptimConfig
from train.config.parallel import ParallelConfig
from train.config.tasks import TaskConfig

MAX_EVAL_BATCH = 2**20  # sequences
MAX_SAMPLES = 32
TENSORBOARD = "tensorboard"


@dataclass(kw_only=True)
class EarlyStopConfig(Section, prefix="early_stop."):
    # The number of evaluations without improvement after which the run ends; None never ends it early.
    patience: int | None = setting(None, above=0)


@dataclass(kw_only=True)
class HubConfig:
    """The Hugging Face Hub repository for a finished run. The token comes from `hf auth login` or HF_TOKEN."""

    # The user/name of a private repository, created if missing, for the model and its card; None pushes
    # nothing. `baretrain hub RUN --to NAME --public` pushes to a public one.
    push_to: str | None = None


@dataclass(kw_only=True)
class TelemetryConfig(Section, prefix="telemetry."):
    """Experiment trackers that receive the metrics of a run.

    Servers, projects, keys and passwords come from environment variables such as MLFLOW_TRACKING_URI and WANDB_PROJECT.
    """

    # The trackers that receive the metrics: any of tensorboard (files in run_dir/tensorboard), mlflow and wandb.
    trackers: list[str] = field(default_factory=lambda: [TENSORBOARD])

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.trackers:
            check_choice("telemetry.trackers", name, (TENSORBOARD, "mlflow", "wandb"))

    @property
    def services(self) -> list[str]:
        """The trackers that are packages of their own, with a server."""
        return [name for name in self.trackers if name != TENSORBOARD]


@dataclass(kw_only=True)
class TrainConfig(Section):
    """All settings of a training run: `baretrain train --cfg job` prints them."""

    # The folder for all files of the run, on disk or in S3; starting again with the same folder resumes the run.
    run_dir: str = MISSING
    # The seed for the initial weights, the order of the data, masking and dropout.
    seed: int = setting(0, least=0)
    # The maximum length of a sequence in tokens; None uses the sequence length of the shards or, for records, the
    # length of the longest row, but at most 512 and at most the model's limit.
    seq_len: int | None = setting(None, least=8)
    # The number of sequences per optimizer step, over all ranks; None uses micro_batch_size times the number of ranks.
    global_batch_size: int | None = setting(None, above=0)
    # The number of sequences per forward pass of a rank; None divides global_batch_size by the number of ranks, and
    # cuts rows of text, sorted by length, further where that saves more padding than it costs or, where layers do not
    # read padding, into parts of about 4,096 tokens.
    micro_batch_size: int | None = setting(None, above=0)
    # The length of the run in sequences; at least one of max_examples, max_steps and max_epochs must be given, and the
    # shortest applies.
    max_examples: int | None = setting(None, above=0)
    # The length of the run in optimizer steps.
    max_steps: int | None = setting(None, above=0)
    # The length of the run in passes over the data.
    max_epochs: float | None = setting(None, above=0)
    # The number of seconds after which this attempt saves a checkpoint and stops; None sets no limit.
    max_run_s: float | None = setting(None, above=0)
    # The number of steps between lines in metrics.jsonl. The console shows one every ten seconds or more, unless
    # log_every is on the command line.
    log_every: int = setting(10, above=0)
    # The number of steps between evaluations; None evaluates only at the end.
    eval_every: int | None = setting(500, above=0)
    # The number of validation sequences, drawn with the seed; None uses all.
    eval_examples: int | None = setting(None, above=0)
    # The number of sequences per evaluation batch of a rank, to which the last batch is padded; None uses
    # micro_batch_size or, if a step is cut to save padding, a rank's share of it.
    eval_batch_size: int | None = setting(None, above=0, most=MAX_EVAL_BATCH)
    # Write run_dir/export at the end: a model folder that needs only transformers.
    export: bool = True
    # The number of validation examples that the exported model answers for the report.
    samples: int = setting(8, least=0, most=MAX_SAMPLES)
    # Trace some steps of rank 0, and write the trace and a table of its kernels to run_dir/profile.
    profile: bool = False
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
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    nonfinite: NonfiniteConfig = field(default_factory=NonfiniteConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        learns_from = self.task.learns_from
        wanted = "shards: choose data=shards"
        if learns_from is not ShardsConfig:
            wanted = "records: choose data=csv, tweets, ..."
        check(isinstance(self.data, learns_from), f"task={self.task.kind} learns from {wanted}")
        self.parallel.check_goes_with(self.backend)
        check(
            self.optim.head_lr is None or learns_from is RecordsConfig,
            f"optim.head_lr={self.optim.head_lr} needs a task whose head begins with random weights; leave it out",
        )
        check(
            self.hub.push_to is None or self.export,
            f"hub.push_to={self.hub.push_to} pushes what export=true writes; set export=true",
        )
        check(
            bool(self.max_examples or self.max_steps or self.max_epochs),
            "the run has no length: set max_steps, max_examples or max_epochs",
        )
        check(
            bool(self.global_batch_size or self.micro_batch_size),
            "the batch has no size: set global_batch_size (over all ranks) or micro_batch_size (per rank)",
        )


VARIANTS = {way: f"backend.compile={way}" for way in ("none", "layers")}


@dataclass(kw_only=True)
class VariantsConfig(Section, prefix="compare."):
    # The variants by name, the baseline first, each with the settings that it changes, as typed on a command line; {}
    # compares uncompiled with compiled training.
    variants: dict[str, str] = field(default_factory=dict)
    # The number of ranks of each run, all on this machine; torchrun starts them if there are several.
    ranks: int = setting(1, above=0)


@dataclass(kw_only=True)
class CompareConfig(TrainConfig):
    """All settings of a comparison of variants of a run: `baretrain compare --cfg job` prints them."""

    compare: VariantsConfig = field(default_factory=VariantsConfig)


def to_dict(config: Section) -> dict[str, Any]:
    """Return the configuration in plain containers, for config.yaml and fingerprints."""
    return asdict(config)  # type: ignore[call-overload]


def flat(config: TrainConfig) -> dict[str, Any]:
    """Return all settings in one dict, with keys such as "optim.lr"."""
    return dict(flatten(to_dict(config)))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys, joined by dots, and the values of nested dicts. An empty dict counts as a value."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
