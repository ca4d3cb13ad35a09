"""Which checkpoints may go: all but the newest, the best, and the last two that are valid."""

from __future__ import annotations

from train.checkpoints.manifest import Damaged, Manifest
from train.checkpoints.store import LocalStore, Store

ALWAYS_VALID = 2


class Retention:
    """Remembers which steps it has read through, so that each is read once."""

    def __init__(self, store: Store, keep: int) -> None:
        self.store, self.keep = store, keep
        self.read_through: set[int] = set()

    def prune(self) -> list[int]:
        """Remove what need not be kept; gives the steps removed."""
        removed = [step for step, reason in self.reasons().items() if reason is None]
        for step in removed:
            self.store.remove(step)
        return removed

    def reasons(self) -> dict[int, str | None]:
        """Why each step stays; None for those that may go. What is damaged stays: somebody may mend it."""
        steps = self.store.steps()
        newest = steps[-self.keep :] if self.keep else steps
        reasons: dict[int, str | None] = dict.fromkeys(steps)
        if newest != steps:
            manifests: dict[int, Manifest] = {}
            valid: list[int] = []
            for step in reversed(steps):
                try:
                    manifests[step] = self.store.look(step)
                except Damaged as error:
                    reasons[step] = f"damaged: {error}"
                    continue
                if len(valid) < ALWAYS_VALID and self.is_valid(step):
                    valid.append(step)
            best_step = best(manifests)
            reasons |= dict.fromkeys(valid, f"one of the last {ALWAYS_VALID} that are valid")
            reasons |= {best_step: "the best"} if best_step is not None else {}
        return reasons | dict.fromkeys(newest, f"one of the newest {len(newest)}")

    def is_valid(self, step: int) -> bool:
        """On disk what was written is read back once. S3 has compared checksums itself when it took the files."""
        if isinstance(self.store, LocalStore) and step not in self.read_through:
            try:
                self.store.fetch(step)
            except Damaged:
                return False
        self.read_through.add(step)
        return True


def best(manifests: dict[int, Manifest]) -> int | None:
    """The step of the best evaluation by the metric that the run goes by now, of equal ones the first; None if none was
    evaluated. The newest checkpoint knows of one that was evaluated after it had been saved.
    """
    if not manifests:
        return None
    newest = manifests[max(manifests)]
    known, name = newest.progress.get("best_step"), newest.settings.get("best.metric")
    if known in manifests and manifests[known].metric is None:
        return int(known)
    scores = {
        step: manifest.metric
        for step, manifest in manifests.items()
        if manifest.metric is not None and manifest.settings.get("best.metric") == name
    }
    return min(scores, key=lambda step: (scores[step], step)) if scores else None
