"""Settings of one attempt of a run: the run folder's lease, checkpoints, and the reasons to stop, end or roll back."""

from __future__ import annotations

from dataclasses import dataclass

from train.config.checks import Section, check, setting


@dataclass(kw_only=True)
class LeaseConfig(Section, prefix="lease."):
    """Ownership of the run folder: a second job is rejected while the first sends heartbeats."""

    # The number of seconds without a heartbeat after which another job considers the owner dead; the owner sends
    # several heartbeats in this time.
    ttl_s: float = setting(60.0, least=0.1)


@dataclass(kw_only=True)
class WatchdogConfig(Section, prefix="watchdog."):
    """A thread and a timer in each rank. They end a rank that makes no progress, so that torchrun can restart it."""

    # The number of seconds without a heartbeat (a micro batch or an evaluation batch) after which a rank counts as
    # stuck; 0 never ends a rank, for use with a debugger. Until a rank's first step is done, while it joins the other
    # ranks, loads and compiles, the limit is 15 times higher.
    step_s: float = setting(480.0, least=0)

    @property
    def start_s(self) -> float:
        """The limit until a rank's first step is done: two hours by default."""
        return 15 * self.step_s


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
    # Also save a checkpoint whenever an evaluation is better than all earlier ones, and export the best one at the end
    # instead of the last.
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
    """The metric that selects the best evaluation, for early_stop and checkpoint.best."""

    # The metric that ranks the evaluations, a key of the eval lines in metrics.jsonl.
    metric: str = "loss"
