"""How far a run has come, saved beside the weights, the optimizer and the state of each rank. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Progress:
    step: int = 0  # optimizer steps done, skipped ones too
    examples: int = 0  # sequences drawn by all ranks, the position in the data; more than step * batch after a rollback
    window_shards: int | None = None  # shuffled together; None: not yet decided
    windows_grow: bool = False
    best_loss: float | None = None  # best_metric of the evaluations so far, negated if more is better
    best_metric: str = "loss"
    best_step: int | None = None
    evals_since_best: int = 0
    owes_evaluation: bool = False  # at this step: the run was asked to stop, and had no time for it
    rollbacks: int = 0
    skipped: int = 0  # steps whose gradient was not finite
    productive_s: float = 0.0  # in steps that were not lost
    attempts_s: float = 0.0  # how long all attempts took, without the pauses between them
    window: dict[str, float] = field(default_factory=dict)  # sums since the last line of the metrics

    def advance(self, examples: int) -> None:
        """Count a step of so many examples of all ranks."""
        self.step += 1
        self.examples += examples

    def saw(self, score: float, metric: str = "loss", *, min_delta: float) -> bool:
        """Record an evaluation; returns whether it is better than all before by the same metric. Lower is better. Only
        one that is better by `min_delta` resets the count for early stopping.
        """
        before = self.best_loss if metric == self.best_metric else None
        is_better = not math.isnan(score) and (before is None or score < before)
        self.evals_since_best += 1
        if is_better:
            if before is None or score < before - min_delta:
                self.evals_since_best = 0
            self.best_metric, self.best_loss, self.best_step = metric, score, self.step
        return is_better
