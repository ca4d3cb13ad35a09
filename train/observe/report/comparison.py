"""The comparison of runs with the first one, the baseline: ratios, and whether work and quality are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from train.config.checks import shortlist
from train.observe.report.run import Run, divergence, settled
from train.observe.report.texts import as_text, count, percent, printable, shortened

SAME_EXAMPLES = 0.01  # a smaller relative difference is ignored: an epoch need not be a multiple of the batch size
# prefixes of the settings that determine what is learnt
WORK = (
    "task.",
    "model.",
    "optim.",
    "seed",
)
MACHINE = ("device", "instance", "world_size")
MOST_TIMES = 1e6  # a ratio above this, or below its inverse, is an error


def ratio(run: Run, baseline: Run, key: str) -> float | None:
    """Return a run's value divided by the baseline's; None if either is unknown or the ratio is implausible."""
    value, base = run.summary[key] or 0.0, baseline.summary[key] or 0.0
    quotient = value / base if base > 0 else 0.0
    return quotient if 1 / MOST_TIMES < quotient < MOST_TIMES else None


def times(run: Run, baseline: Run, key: str) -> str:
    """Return the ratio in words; "" for the baseline itself and for an unknown ratio."""
    value = None if run is baseline else ratio(run, baseline, key)
    return "" if value is None else f"{value:.2f} times"


def quality(run: Run, baseline: Run, tolerance: float) -> str:
    """Describe whether the validation scores by which runs are judged are equal: best.metric, or else the loss."""
    there, here = baseline.summary["scores"], run.summary["scores"]
    wanted = [
        name for name in (baseline.config.get("best.metric"), "loss") if isinstance(name, str)
    ]
    name = next((name for name in wanted if name in there and name in here), None)
    if name is None:
        return "quality unknown (no score in common)"
    value, base = settled(here[name])[0], settled(there[name])[0]
    both = " against ".join(
        "no number" if each is None else f"{each:.4g}" for each in (value, base)
    )
    metric = run.metric(name)
    both = f"{metric.title} {both}"
    if value is None or base is None:
        return f"quality: no number ({both})"
    if validated_on(run) != validated_on(baseline):
        return f"quality not comparable ({both}, on different data)"
    apart = abs(value - base) / (abs(base) or abs(value) or 1.0)
    if apart <= tolerance:
        how_far = f"{percent(apart)} apart" if apart else "the same"
        return f"equal quality ({metric.title} {how_far}, tolerance {percent(tolerance)})"
    which = (
        "different"
        if not metric.sign
        else "better"
        if metric.sign * (value - base) > 0
        else "worse"
    )
    return f"unequal quality ({both}, {percent(apart)} {which}, tolerance {percent(tolerance)})"


# ---- the same work on the same machine -----------------------------------------------------------------------------


def work_differences(run: Run, baseline: Run) -> list[str]:
    """List how the run's work differs from the baseline's. Larger batches of the same sequences are no difference."""
    both = (baseline, run)
    settings = [
        {key: value for key, value in each.config.items() if key.startswith(WORK)} for each in both
    ]
    result = differing(
        *(known | validated_on(each) for known, each in zip(settings, both, strict=True))
    )
    there, here = (each.summary["examples"] for each in both)
    if there is not None and here is not None and abs(here - there) > SAME_EXAMPLES * there:
        result.append(f"sequences consumed: {count(there)} there, {count(here)} here")
    return result + summaries_differ(run, baseline, ("seq_len", "lengths"))


def validated_on(run: Run) -> dict[str, Any]:
    return {"data": run.summary["data"], "eval_examples": run.config.get("eval_examples")}


def summaries_differ(run: Run, baseline: Run, keys: Sequence[str]) -> list[str]:
    return differing(*({key: each.summary[key] for key in keys} for each in (baseline, run)))


def differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return "key: value there, value here" for each key whose values differ. "There" is the baseline."""
    texts = []
    for key in there | here:
        if there.get(key) != here.get(key):
            values = [
                "unknown" if each.get(key) is None else shortened(as_text(each[key]))
                for each in (there, here)
            ]
            texts.append(printable("{}: {} there, {} here".format(key, *values)))
    return texts


# ---- what the report says ------------------------------------------------------------------------------------------


def over_seeds(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table of the mean and spread of best.metric, as `settled` takes it, over runs that differ only in seed.

    The first row is the header. The spread is the sample standard deviation. Without such runs, the result is [].
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.config.items() if key not in ("run_dir", "seed")}
        groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(run)
    if not any(
        len({str(run.config.get("seed")) for run in group}) > 1 for group in groups.values()
    ):
        return []
    rows = [["over seeds", "validation", "mean", "spread", "runs"]]
    for group in groups.values():
        name = str(group[0].config.get("best.metric"))
        found = [run.summary["scores"].get(name) for run in group]
        values = [settled(points)[0] for points in found if points is not None]
        known = [value for value in values if value is not None]
        missing = "" if len(known) == len(group) else f" of {len(group)}"
        mean = f"{fmean(known):.4g}" if known else "unknown"
        spread = f"{stdev(known):.4g}" if len(known) > 1 else "unknown"
        labels = shortlist([run.label for run in group])
        rows.append([labels, group[0].metric(name).title, mean, spread, f"{len(known)}{missing}"])
    return rows


def sentences(runs: Sequence[Run], tolerance: float) -> list[str]:
    return [sentence(run, runs[0], tolerance) for run in runs[1:]]


def is_same_work(runs: Sequence[Run]) -> bool:
    """Return whether all runs did the same work as the first one, as far as `work_differences` can tell."""
    return not any(work_differences(run, runs[0]) for run in runs[1:])


def sentence(run: Run, baseline: Run, tolerance: float) -> str:
    """Compare throughput and time with the baseline's in words, and say whether quality and work are the same."""
    speed = ratio(run, baseline, "tokens_per_s")
    does = (
        f"{speed:.2f} times the tokens/s"
        if speed is not None
        else "an unknown multiple of the tokens/s"
    )
    parts = [f"{run.label} reaches {does} of {baseline.label}{time_text(run, baseline)}"]
    here, there = (each.summary["global_batch_size"] for each in (run, baseline))
    if here != there:
        parts.append(f"with batches of {count(here)} instead of {count(there)}")
    parts.append(quality(run, baseline, tolerance))
    for what, differences in (
        ("not the same work", work_differences(run, baseline)),
        ("not the same machine", summaries_differ(run, baseline, MACHINE)),
    ):
        if differences:
            more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
            parts.append(f"{what} ({'; '.join(differences[:2])}{more})")
    return ", ".join(parts)


def time_text(run: Run, baseline: Run) -> str:
    """Return the billable time as a multiple of the baseline's, with and without compiling; "" if it is unknown."""
    whole, without = (ratio(run, baseline, key) for key in ("wall_s", "wall_without_compile_s"))
    if whole is None:
        return ""
    compiles = any(each.summary["compile_s"] for each in (run, baseline))
    aside = (
        f" ({without:.2f} without compiling{repaid_text(run, baseline)})"
        if compiles and without
        else ""
    )
    return f" in {whole:.2f} times the billable time{aside}"


def repaid_text(run: Run, baseline: Run) -> str:
    """Say after how many steps faster steps make up for longer compiling; "" if they never do, or it is unknown."""
    ours, theirs = run.summary, baseline.summary
    known = [each[key] for each in (ours, theirs) for key in ("train_s", "steps", "compile_s")]
    if (
        None in known
        or not all((ours["steps"], theirs["steps"]))
        or ours["examples"] != theirs["examples"]
    ):
        return ""
    # seconds per step
    saved_s = theirs["train_s"] / theirs["steps"] - ours["train_s"] / ours["steps"]
    spent_s = ours["compile_s"] - theirs["compile_s"]
    return (
        f", which pays off after {spent_s / saved_s:,.0f} steps"
        if saved_s > 0 and spent_s > 0
        else ""
    )


def warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield warnings for readers who compare the runs."""
    for run in runs:
        known = run.summary
        if lost := divergence(run):
            yield f"{run.label} diverged: {lost}"
        if known["reason"] not in ("done", "early_stop"):
            of = "" if known["steps_total"] is None else f" of {count(known['steps_total'])}"
            state = "has failed" if run.outcome.get("outcome") == "failed" else "has not ended"
            yield f"{run.label} {state}: step {known['steps']:,.0f}{of}"
        if known["attempts"] > 1:
            yield f"{run.label} took {known['attempts']} attempts: its billable time includes the pauses between them"
        if known["cost_usd"] is not None and known["cost_partial"]:
            yield f"{run.label}: the cost is a lower bound: an attempt did not record its whole cost"
