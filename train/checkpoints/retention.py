"""Which checkpoints may be removed: all but the newest, the best, and the last two that are valid."""

from __future__ import annotations

from itertools import islice

from train.checkpoints.manifest import Damaged, Manifest
from train.checkpoints.store import Store
from train.config import NotPermitted

ALWAYS_VALID = 2


class Retention:
    """Decides which steps stay, and reads each once to verify it."""

    def __init__(self, store: Store, keep: int) -> None:
        self.store, self.keep = store, keep
        self.verified: set[int] = set()

    def prune(self) -> list[int]:
        """Remove the steps that need not stay, and return them. Without the permission all stay from now on."""
        removed = [step for step, reason in self.reasons().items() if reason is None]
        try:
            for step in removed:
                self.store.remove(step)
        except NotPermitted:
            self.keep, removed = 0, []
        return removed

    def reasons(self) -> dict[int, str | None]:
        """The reason why each step stays; None for a step that may be removed. A damaged step stays: somebody may
        repair it.
        """
        steps = self.store.steps()
        newest = steps[-self.keep :] if self.keep else steps
        reasons: dict[int, str | None] = dict.fromkeys(steps)
        if newest != steps:
            manifests, damaged = look_at_all(self.store)
            reasons |= {step: f"damaged: {error}" for step, error in damaged.items()}
            valid = islice(filter(self.is_valid, sorted(manifests, reverse=True)), ALWAYS_VALID)
            best_step = best(manifests)
            reasons |= dict.fromkeys(valid, f"one of the last {ALWAYS_VALID} that are valid")
            reasons |= {best_step: "the best"} if best_step is not None else {}
        return reasons | dict.fromkeys(newest, f"one of the newest {len(newest)}")

    def is_valid(self, step: int) -> bool:
        """Whether the files match the manifest. They are read once, unless S3 has compared them as it took them."""
        if not self.store.compares_when_written and step not in self.verified:
            try:
                self.store.fetch(step)
            except Damaged:
                return False
        self.verified.add(step)
        return True


def look_at_all(store: Store) -> tuple[dict[int, Manifest], dict[int, Damaged]]:
    """The manifests of the steps whose files are there with their lengths, and what is wrong with the other steps."""
    manifests: dict[int, Manifest] = {}
    damaged: dict[int, Damaged] = {}
    for step in store.steps():
        try:
            manifests[step] = store.look(step)
        except Damaged as error:
            damaged[step] = error
    return manifests, damaged


def best(manifests: dict[int, Manifest]) -> int | None:
    """The step with the best evaluation by the run's present metric, the first of equal ones; None if none was
    evaluated. A step may be evaluated after it was saved: then only the newest checkpoint knows that it is the best.
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
