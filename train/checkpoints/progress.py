"""How far a run has come: what is saved beside weights, optimizer and each rank's own. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    step: int = 0  # optimizer steps done, skipped ones too
    examples: int = 0  # sequences drawn by all ranks: the place in the data. More than step * batch after a rollback
    window_shards: int | None = None  # shuffled together; None: not yet decided
    windows_grow: bool = False
    best_loss: float | None = None  # of the evaluations so far
    best_step: int | None = None
    evals_since_best: int = 0
    owes_evaluation: bool = False  # of this step: the run was asked to stop, and had no time for it
    rollbacks: int = 0
    skipped: int = 0  # steps whose gradient was not finite
    productive_s: float = 0.0  # in steps that were not lost
    window: dict[str, float] = field(default_factory=dict)  # of the metrics, since their last line

    def saw(self, loss: float, *, min_delta: float) -> bool:
        """Take note of an evaluation; whether it is better than all before."""
        is_better = self.best_loss is None or loss < self.best_loss - min_delta
        if is_better:
            self.best_loss, self.best_step, self.evals_since_best = loss, self.step, 0
        else:
            self.evals_since_best += 1
        return is_better
