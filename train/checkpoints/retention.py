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
        """Remove what need not be kept; gives the steps removed. What is damaged stays: somebody may mend it."""
        steps = self.store.steps()
        if not self.keep or len(steps) <= self.keep:
            return []
        manifests: dict[int, Manifest] = {}
        valid: list[int] = []
        for step in reversed(steps):
            try:
                manifests[step] = self.store.look(step)
            except Damaged:
                continue
            if len(valid) < ALWAYS_VALID and self.is_valid(step):
                valid.append(step)
        removed = [step for step in steps[: -self.keep] if step in manifests and step not in (*valid, best(manifests))]
        for step in removed:
            self.store.remove(step)
        return removed

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
    """The step of the lowest validation loss; None if none was evaluated."""
    losses = {step: manifest.metric for step, manifest in manifests.items() if manifest.metric is not None}
    return min(losses, key=lambda step: (losses[step], -step)) if losses else None
