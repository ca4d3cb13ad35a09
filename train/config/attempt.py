"""Settings of one attempt of a run: the lease of the run folder, the saves, the reasons to stop, end or roll back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from train.config.checks import Section, check, setting


@dataclass(kw_only=True)
class LeaseConfig(Section, prefix="lease."):
    """Ownership of the run folder: a second job is rejected while the first has a heartbeat."""

    ttl_s: float = setting(60.0, least=0.1)  # The time without a heartbeat, as another job observes it, after which an
    # owner counts as dead; several heartbeats come in that time.


@dataclass(kw_only=True)
class PreemptConfig(Section, prefix="preempt."):
    """Further reasons to stop the run, besides signals, max_run_s, a file run_dir/STOP and, on EC2, its notices."""

    block_end: str | None = None  # The end of the capacity block, a time with zone; its machines end 30 minutes before.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_end is not None:
            try:
                aware = datetime.fromisoformat(self.block_end.replace("Z", "+00:00")).tzinfo is not None
            except ValueError:
                aware = False
            check(aware, f"preempt.block_end={self.block_end} must be a time with a zone, such as 2026-11-30T11:30:00Z")


@dataclass(kw_only=True)
class WatchdogConfig(Section, prefix="watchdog."):
    """A thread and a timer of each rank that end it when it makes no progress, so that torchrun can start it again."""

    step_s: float = setting(480.0, least=0)  # The time without a heartbeat (a micro batch, or a batch of an evaluation)
    # after which a rank is stuck; 0 ends no rank, as under a debugger.
    start_s: float = setting(7200.0, above=0)  # The time without a heartbeat after which a rank is stuck before the
    # first step is done, while it joins, loads and compiles.


@dataclass(kw_only=True)
class NonfiniteConfig(Section, prefix="nonfinite."):
    """Steps whose gradient is NaN or infinite: they are skipped, and change neither weights nor optimizer."""

    max_skips: int = setting(3, above=0)  # The number of steps in a row without a finite gradient after which the run
    # goes back to its newest checkpoint, and past the data that came since. On CPUs, and with backend=neuron, it does
    # so after exactly this number. CUDA and XLA devices count by themselves and are asked every log_every steps, so
    # that no step waits, and the run goes back at the first line with this many or more. After two rollbacks it ends
    # the next time.


@dataclass(kw_only=True)
class CheckpointConfig(Section, prefix="checkpoint."):
    every: int = setting(1000, above=0)  # The steps between saves; the last step always saves.
    keep: int = 3  # The newest checkpoints that are kept, at least two, besides the best one; 0 keeps all.
    best: bool = False  # Save whenever an evaluation is better than all before, too.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.keep == 0 or self.keep >= 2, f"checkpoint.keep={self.keep} must be 0 (all) or at least 2")


@dataclass(kw_only=True)
class ResumeConfig:
    force: bool = False  # Resume although the task, the model, the data or the batches have changed.


@dataclass(kw_only=True)
class BestConfig:
    """The choice of the best evaluation, for early_stop, checkpoint.best and the checkpoint that is always kept."""

    metric: str = "loss"  # The key in the eval lines of metrics.jsonl by which an evaluation is better than another.
    export: bool = False  # Export the best checkpoint instead of the last; it needs checkpoint.best=true.
