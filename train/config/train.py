"""Settings of a whole training run, and the checks that concern several sections."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from train.config.attempt import LeaseConfig, NonfiniteConfig, PreemptConfig, WatchdogConfig
from train.config.backend import DEFAULT_TIMEOUT_S, BackendConfig, InstanceConfig
from train.config.checkpoints import BestConfig, CheckpointConfig, ResumeConfig
from train.config.checks import Unset, check, check_at_least, check_at_most, check_positive
from train.config.data import DataConfig, RecordsConfig, ShardsConfig
from train.config.models import ModelConfig
from train.config.optim import OptimConfig
from train.config.parallel import ParallelConfig
from train.config.s3 import S3Config
from train.config.tasks import TaskConfig

MAX_EVAL_BATCH = 2**20  # sequences
MAX_SAMPLES = 32


@dataclass(kw_only=True)
class EarlyStopConfig:
    patience: int | None = None  # evaluations without improvement after which the run ends; None: off
    min_delta: float = 0.0  # smallest change of best.metric that counts as an improvement

    def __post_init__(self) -> None:
        check_positive("early_stop.", self, "patience")
        check_at_least("early_stop.", self, min_delta=0)


@dataclass(kw_only=True)
class StragglerConfig:
    # A rank is named once its own work takes this many times the median of the other ranks, and longer than in nine of
    # ten of its own earlier lines, and again when that is over.
    factor: float = 1.5
    windows: int = 5  # metrics lines in a row for which that holds; twice as many if it held from the start

    def __post_init__(self) -> None:
        check(self.factor > 1, f"straggler.factor={self.factor:g} must be above 1")
        check_positive("straggler.", self, "windows")


@dataclass(kw_only=True)
class HubConfig:
    """Where a finished run is pushed on the Hugging Face Hub. The token is that of `hf auth login` or HF_TOKEN."""

    push_to: str | None = (
        None  # user/name of the repository for model, tokenizer, card and TensorBoard files; None: off
    )
    private: bool = True


@dataclass(kw_only=True)
class TrainConfig:
    """A whole training run: `python -m train --cfg job` prints it."""

    run_dir: str = MISSING  # where the run writes everything; with the same folder a run resumes where it stopped
    seed: int = 0  # for weights, order of the data, masking and dropout
    seq_len: int | None = None  # tokens; None: the length of the prepared data
    global_batch_size: int | None = None  # sequences per optimizer step over all ranks; None: micro * world size
    micro_batch_size: int | None = None  # sequences per rank and forward pass; None: global / world size
    max_examples: int | None = None  # length of the run in sequences; of max_examples, max_steps and max_epochs one or
    # more must be given, and the shortest counts
    max_steps: int | None = None  # length of the run in optimizer steps
    max_epochs: float | None = None  # length of the run in passes over the data
    max_run_s: float | None = None  # wall-clock time of this attempt, after which it stops with a checkpoint
    log_every: int = 10  # steps between lines in metrics.jsonl and on the console
    eval_every: int | None = 500  # steps between evaluations; None: only at the end
    eval_examples: int | None = None  # validation sequences used; None: all
    eval_batch_size: int | None = None  # sequences per rank and batch of an evaluation; None: micro_batch_size
    collect_graphs: bool = False  # for train.precompile: run each graph once, check no number, save nothing
    export: bool = True  # write run_dir/export for plain transformers at the end
    samples: int = 8  # validation examples that the export answers for the report (samples.json); 0: none
    tensorboard: bool = True
    profile: bool = False  # trace some steps of rank 0: run_dir/profile/summary.md says where their time went
    profile_after: int = 10  # steps of the attempt before these: the first ones compile and fill caches
    profile_steps: int = 5  # steps that are traced
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
        timeout_s = self.backend.timeout_s or DEFAULT_TIMEOUT_S
        check(
            self.checkpoint.max_wait_s < timeout_s,
            f"checkpoint.max_wait_s={self.checkpoint.max_wait_s:g} must be below backend.timeout_s={timeout_s:g}",
        )
        if isinstance(self.data, ShardsConfig) and self.data.path.startswith("s3://"):
            check(
                self.data.deadline_s < timeout_s,
                f"data.deadline_s={self.data.deadline_s:g} must be below backend.timeout_s={timeout_s:g}, so that a "
                "missing shard is named before the other ranks give up waiting",
            )
        sizes = ("seq_len", "global_batch_size", "micro_batch_size", "max_examples", "max_steps", "max_epochs")
        check_positive("", self, *sizes, "log_every", "eval_every", "eval_examples", "eval_batch_size", "max_run_s")
        check_at_least("", self, seed=0, samples=0, profile_after=0, profile_steps=1)
        check_at_most("", self, samples=MAX_SAMPLES)
        check(
            self.seq_len is None or self.seq_len >= 8,
            f"seq_len={self.seq_len} must be at least 8 (3 are special tokens)",
        )
        check(
            (self.eval_batch_size or 0) <= MAX_EVAL_BATCH,
            f"eval_batch_size={self.eval_batch_size} must be at most {MAX_EVAL_BATCH}: the last batch is padded to it",
        )
        learns_from = self.task.learns_from
        wanted = (
            "shards: choose data=shards" if learns_from is ShardsConfig else "records: choose data=csv, tweets, ..."
        )
        check(isinstance(self.data, learns_from), f"task={self.task.kind} learns from {wanted}")
        self.parallel.check_goes_with(self.backend)
        check(
            self.optim.head_lr is None or learns_from is RecordsConfig,
            f"optim.head_lr={self.optim.head_lr} is for tasks whose head begins with random weights; leave it out",
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
