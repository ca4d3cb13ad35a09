"""Settings of checkpoints: when they are saved, which are kept, which is the best."""

from __future__ import annotations

import re
from dataclasses import dataclass

from train.config.checks import check, check_at_least, check_positive


@dataclass(kw_only=True)
class CheckpointConfig:
    every: int = 1000  # steps between saves; the last step always saves
    keep: int = 3  # newest ones that are kept, at least two, and the best one beside them; 0: all
    best: bool = False  # also save whenever an evaluation is better than all before
    max_wait_s: float = 10.0  # longest wait of a save for the one before; after it the save is skipped
    max_failures: int = 3  # failed saves in a row after which the run stops
    patience_s: float = (
        300.0  # while S3 does not answer, the last save is retried this long, or until max_run_s is over
    )
    max_loss_s: float = 1800.0  # work that a fault may cost: the longest interval that the summary suggests

    def __post_init__(self) -> None:
        check_positive("checkpoint.", self, "every", "max_failures", "max_loss_s")
        check(self.keep == 0 or self.keep >= 2, f"checkpoint.keep={self.keep} must be 0 (all) or at least 2")
        check_at_least("checkpoint.", self, max_wait_s=0, patience_s=0)


@dataclass(kw_only=True)
class ResumeConfig:
    force: bool = False  # resume although the task, the model, the data or the batches have changed


def lower_is_better(metric: str) -> bool:
    """Whether the smaller value of a metric is the better one, by its name."""
    return re.search("loss|perplexity|error", metric) is not None


@dataclass(kw_only=True)
class BestConfig:
    """What makes an evaluation the best, for early_stop, checkpoint.best and the checkpoint that is always kept."""

    metric: str = "loss"  # key in the eval lines of metrics.jsonl
    export: bool = False  # export the best checkpoint at the end instead of the last; needs checkpoint.best=true
