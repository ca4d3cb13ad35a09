"""The comparison of runs with the first one, the baseline: ratios, and whether work and quality are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from train.config.checks import shortlist
from train.observe.report.run import Run, divergence, settled
from train.observe.report.texts import as_text, count, percent, shortened

SAME_EXAMPLES = 0.01  # a smaller relative difference is ignored: an epoch need not be a multiple of the batch size
WORK = ("task.", "model.", "optim.", "seed")  # prefixes of settings that determine what is learnt
MACHINE = ("device", "instance", "world_size")
MOST_TIMES = 1e6  # a ratio above this, or below its inverse, is an error


def times(run: Run, baseline: Run, key: str) -> str:
    """Return a value of the summary as a multiple of the baseline's; "" if it is unknown or implausible."""
    value, base = run.summary[key], baseline.summary[key]
    if run is baseline or not value or not base or value < 0 or base < 0:
        return ""
    ratio = value / base
    if 1 / MOST_TIMES < ratio < MOST_TIMES:
        return f"{ratio:.2f} times"
    return ""


def sentences(runs: Sequence[Run], tolerance: float) -> list[str]:
    return [sentence(run, runs[0], tolerance) for run in runs[1:]]


def sentence(run: Run, baseline: Run, tolerance: float) -> str:
    """Compare throughput and time with the baseline's in words, and say whether quality and work are the same."""
    speed = times(run, baseline, "tokens_per_s") or "an unknown multiple of"
    parts = [f"{run.label} reaches {speed} the tokens/s of {baseline.label}"]
    if wall := times(run, baseline, "wall_s"):
        parts[0] += f" in {wall} the billable time"
    here, there = (each.summary["global_batch_size"] for each in (run, baseline))
    if here != there:
        parts.append(f"with batches of {count(here)} instead of {count(there)}")
    parts.append(quality(run, baseline, tolerance))
    unfair = {
        "not the same work": work_differences(run, baseline),
        "not the same machine": summaries_differ(run, baseline, MACHINE),
    }
    for what, differences in unfair.items():
        if differences:
            shown = "; ".join(differences[:2])
            if len(differences) > 2:
                shown += f" and {len(differences) - 2} more"
            parts.append(f"{what} ({shown})")
    return ", ".join(parts)


def quality(run: Run, baseline: Run, tolerance: float) -> str:
    """Describe whether the validation scores by which runs are judged are equal: best.metric, or else the loss."""
    here, there = run.summary["scores"], baseline.summary["scores"]
    wanted = (str(baseline.config.get("best.metric")), "loss")
    name = next((name for name in wanted if name in there and name in here), None)
    if name is None:
        return "quality unknown (no score in common)"
    (value, _), (base, _) = settled(here[name]), settled(there[name])
    texts = ["no number" if each is None else f"{each:.4g}" for each in (value, base)]
    metric = run.metric(name)
    both = f"{metric.title} {' against '.join(texts)}"
    if value is None or base is None:
        return f"quality: no number ({both})"
    if validated_on(run) != validated_on(baseline):
        return f"quality not comparable ({both}, on different data)"
    apart = abs(value - base) / (abs(base) or abs(value) or 1.0)
    if apart <= tolerance:
        if apart:
            how_far = f"{percent(apart)} apart"
        else:
            how_far = "the same"
        return f"equal quality ({metric.title} {how_far}, tolerance {percent(tolerance)})"
    gain = metric.sign * (value - base)
    which = "different"
    if gain:
        which = "better" if gain > 0 else "worse"
    return f"unequal quality ({both}, {percent(apart)} {which}, tolerance {percent(tolerance)})"


# ---- the same work on the same machine -----------------------------------------------------------------------------


def work_differences(run: Run, baseline: Run) -> list[str]:
    """List how the run's work differs from the baseline's. Larger batches of the same sequences are no difference."""
    result = differing(work_of(baseline), work_of(run))
    there, here = (each.summary["examples"] for each in (baseline, run))
    if there is not None and here is not None and abs(here - there) > SAME_EXAMPLES * there:
        result.append(f"sequences consumed: {count(there)} there, {count(here)} here")
    return result + summaries_differ(run, baseline, ("seq_len", "lengths"))


def work_of(run: Run) -> dict[str, Any]:
    settings = {key: value for key, value in run.config.items() if key.startswith(WORK)}
    return settings | validated_on(run)


def validated_on(run: Run) -> dict[str, Any]:
    return {"data": run.summary["data"], "eval_examples": run.config.get("eval_examples")}


def summaries_differ(run: Run, baseline: Run, keys: Sequence[str]) -> list[str]:
    there, here = ({key: each.summary[key] for key in keys} for each in (baseline, run))
    return differing(there, here)


def differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return "key: value there, value here" for each key whose values differ. "There" is the baseline."""
    keys = [key for key in there | here if there.get(key) != here.get(key)]
    return [
        f"{shortened(key)}: {told(there.get(key))} there, {told(here.get(key))} here"
        for key in keys
    ]


def told(value: object) -> str:
    if value is None:
        return "unknown"
    return shortened(as_text(value))


# ---- several seeds, and what spoils a comparison -------------------------------------------------------------------


def over_seeds(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table of the mean and spread of best.metric, as `settled` takes it, over runs that differ only in seed.

    The first row is the header. The spread is the sample standard deviation. Without such runs, the result is [].
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.config.items() if key not in ("run_dir", "seed")}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(run)
    seeds = [{str(run.config.get("seed")) for run in group} for group in groups.values()]
    if max(map(len, seeds)) < 2:
        return []
    header = ["over seeds", "validation", "mean", "spread", "runs"]
    return [header, *(seeds_row(group) for group in groups.values())]


def seeds_row(runs: list[Run]) -> list[str]:
    name = str(runs[0].config.get("best.metric"))
    found = [run.summary["scores"][name] for run in runs if name in run.summary["scores"]]
    values = [settled(points)[0] for points in found]
    known = [value for value in values if value is not None]
    mean, spread, number = "unknown", "unknown", str(len(known))
    if known:
        mean = f"{fmean(known):.4g}"
    if len(known) > 1:
        spread = f"{stdev(known):.4g}"
    if len(known) < len(runs):
        number += f" of {len(runs)}"
    labels = shortlist([run.label for run in runs])
    return [labels, runs[0].metric(name).title, mean, spread, number]


def warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield warnings for readers who compare the runs."""
    for run in runs:
        known = run.summary
        if lost := divergence(run):
            yield f"{run.label} diverged: {lost}"
        if known["reason"] not in ("done", "early_stop"):
            failed = run.outcome.get("outcome") == "failed"
            state = "has failed" if failed else "has not ended"
            of = count(known["steps_total"])
            yield f"{run.label} {state}: step {known['steps']:,} of {of}"
        if known["attempts"] > 1:
            yield f"{run.label} took {known['attempts']} attempts: its billable time includes the pauses between them"
