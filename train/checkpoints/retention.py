"""The checkpoints to keep: the newest, the best, and damaged ones. Others may be removed."""

from __future__ import annotations

from train.checkpoints.manifest import Manifest
from train.checkpoints.store import Store

LEAST = 2  # of the newest checkpoints; an older one is loaded if the newest is damaged


def prune(store: Store, keep: int) -> list[int]:
    """Remove the steps that `retention` has no reason to keep, and return them. Raises NotPermitted."""
    removed = [step for step, reason in retention(store, keep).items() if reason is None]
    for step in removed:
        store.remove(step)
    return removed


def retention(store: Store, keep: int) -> dict[int, str | None]:
    """Return the reason to keep each step; None for a step that may be removed.

    The newest `keep` steps are kept (0: all steps), and so are damaged steps, since somebody may repair them.
    """
    steps = store.steps()
    newest = steps[-keep:]  # all of them if `keep` is 0
    reasons: dict[int, str | None] = dict.fromkeys(steps)
    if newest != steps:
        manifests, damaged = store.look_at_all()
        reasons |= {step: f"damaged: {error}" for step, error in damaged.items()}
        best_step = best(manifests)
        if best_step is not None:
            reasons[best_step] = "the best"
    return reasons | dict.fromkeys(newest, f"one of the newest {len(newest)}")


def best(manifests: dict[int, Manifest]) -> int | None:
    """Return the step with the best evaluation by the run's current metric; None without evaluations.

    Among equal evaluations, the first wins. If a step is evaluated after it was saved, only later
    checkpoints record that it is the best.
    """
    if not manifests:
        return None
    newest = manifests[max(manifests)]
    known = newest.progress.get("best_step")
    name = newest.settings.get("best.metric")
    if known in manifests and manifests[known].metric is None:
        return int(known)
    scores = {
        step: manifest.metric
        for step, manifest in manifests.items()
        if manifest.metric is not None and manifest.settings.get("best.metric") == name
    }
    if scores:
        return min(scores, key=lambda step: (scores[step], step))
    return None
