"""Settings of one attempt of a run: the run folder's lease, checkpoints, and the reasons to stop, end or roll back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from train.config.checks import Section, check, setting


@dataclass(kw_only=True)
class LeaseConfig(Section, prefix="lease."):
    """Ownership of the run folder: a second job is rejected while the first sends heartbeats."""

    # The number of seconds without a heartbeat after which another job considers the owner dead; the owner sends
    # several heartbeats in this time.
    ttl_s: float = setting(60.0, least=0.1)


@dataclass(kw_only=True)
class PreemptConfig(Section, prefix="preempt."):
    """Reasons to stop the run in addition to signals, max_run_s, the file run_dir/STOP and notices from EC2."""

    # The time, with its zone, at which the EC2 capacity block ends; EC2 terminates the machines 30 minutes earlier.
    block_end: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_end is not None:
            try:
                aware = (
                    datetime.fromisoformat(self.block_end.replace("Z", "+00:00")).tzinfo
                    is not None
                )
            except ValueError:
                aware = False
            check(
                aware,
                f"preempt.block_end={self.block_end} must be a time with a zone, such as 2026-11-30T11:30:00Z",
            )


@dataclass(kw_only=True)
class WatchdogConfig(Section, prefix="watchdog."):
    """A thread and a timer in each rank. They end a rank that makes no progress, so that torchrun can restart it."""

    # The number of seconds without a heartbeat (a micro batch or an evaluation batch) after which a rank counts as
    # stuck; 0 never ends a rank, for use with a debugger.
    step_s: float = setting(480.0, least=0)
    # The limit that replaces step_s until a rank's first step is done, while it joins the other ranks, loads and
    # compiles.
    start_s: float = setting(7200.0, above=0)


@dataclass(kw_only=True)
class NonfiniteConfig(Section, prefix="nonfinite."):
    """Limits for steps with a NaN or infinite gradient. These steps change neither weights nor optimizer."""

    # The number of consecutive steps without a finite gradient after which the run goes back to its newest checkpoint
    # and skips the data that it has read since. CPUs check this after every step; CUDA and XLA
    # devices keep the count, which the run reads only every log_every steps, so the rollback may come later. After two
    # rollbacks, the run ends instead.
    max_skips: int = setting(3, above=0)


@dataclass(kw_only=True)
class CheckpointConfig(Section, prefix="checkpoint."):
    # The number of steps between checkpoints; the last step always saves one.
    every: int = setting(1000, above=0)
    # The number of newest checkpoints to keep, at least two, in addition to the best one; 0 keeps all.
    keep: int = 3
    # Also save a checkpoint whenever an evaluation is better than all earlier ones.
    best: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.keep == 0 or self.keep >= 2,
            f"checkpoint.keep={self.keep} must be 0 (all) or at least 2",
        )


@dataclass(kw_only=True)
class ResumeConfig:
    # Resume even if the task, the model, the data or the batches have changed.
    force: bool = False


@dataclass(kw_only=True)
class BestConfig:
    """The metric that selects the best evaluation, for early_stop, checkpoint.best and checkpoint.keep."""

    # The metric that ranks the evaluations, a key of the eval lines in metrics.jsonl.
    metric: str = "loss"
    # The checkpoint to export: true takes the best one, false the last one; None takes the best one if
    # checkpoint.best=true.
    export: bool | None = None
