"""Settings of one attempt of a run: who owns the run folder, and what stops, ends or rolls back the attempt."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from train.config.checks import check, check_at_least, check_choice, check_positive


@dataclass(kw_only=True)
class LeaseConfig:
    """Ownership of the run folder: a second job is rejected while the first has a heartbeat."""

    ttl_s: float = 60.0  # an owner without a heartbeat for this long, as another job observes it, counts as dead

    def __post_init__(self) -> None:
        check(
            self.ttl_s >= 0.1, f"lease.ttl_s={self.ttl_s:g} must be at least 0.1: several heartbeats come in that time"
        )


@dataclass(kw_only=True)
class PreemptConfig:
    """What stops the run at its next step, besides signals, max_run_s and a file run_dir/STOP."""

    notices: str = "auto"  # EC2's spot notices, from IMDSv2: auto (on EC2) | on | off
    poll_s: float = 5.0  # AWS recommends 5 s; a spot notice comes at best two minutes before the end
    rebalance: str = "save"  # what EC2's rebalance recommendation leads to: save (and continue) | leave | ignore
    block_end: str | None = None  # end of the capacity block, as 2026-11-30T11:30:00Z; instances end 30 min before it

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
    """A thread and a timer of each rank that end it when it makes no progress, so that torchrun can start it again."""

    enabled: bool = True
    step_s: float = 480.0  # a rank without a heartbeat (micro batch, batch of an evaluation) for this long is stuck
    start_s: float = 7200.0  # the same until the first step is done, for joining, loading and compiling

    def __post_init__(self) -> None:
        check_positive("watchdog.", self, "step_s", "start_s")


@dataclass(kw_only=True)
class NonfiniteConfig:
    """Steps whose gradient is NaN or infinite: they are skipped, and change neither weights nor optimizer."""

    # Skips in a row after which the run goes back to its newest checkpoint, and past the data that came since. On CPUs,
    # and with backend=neuron, it does so after exactly this number. CUDA and XLA devices count by themselves and are
    # asked every log_every steps, so that no step waits: the run goes back at the first line with this many or more.
    max_skips: int = 3
    max_rollbacks: int = (
        2  # the next time the run ends: after max_skips * (max_rollbacks + 1) skips if all are in a row
    )

    def __post_init__(self) -> None:
        check_positive("nonfinite.", self, "max_skips")
        check_at_least("nonfinite.", self, max_rollbacks=0)
