"""The comparison of runs with the first one, the baseline: ratios, means over seeds, and what makes it unfair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from train.config.checks import shortlist
from train.observe.report.data import number
from train.observe.report.run import Run, ending, has_diverged, settled
from train.observe.report.texts import as_text, count
from train.tasks import TASKS

SAME_EXAMPLES = 0.01  # a smaller relative difference is ignored: an epoch need not be a multiple of the batch size
WORK = ("task.", "model.", "optim.", "seed")  # prefixes of settings that determine what is learnt
DATA = ("identity.data", "identity.data.lengths", "eval_examples", "seq_len")
MACHINE = ("device", "instance.name", "world_size")
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


# ---- several seeds -------------------------------------------------------------------------------------------------


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


# ---- what makes a comparison unfair --------------------------------------------------------------------------------


def warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield warnings for readers who compare the runs."""
    for run in runs:
        known = run.summary
        if has_diverged(run):
            yield f"{run.label}: {': '.join(ending(run))}"
        if known["reason"] not in ("done", "early_stop"):
            state = "has not ended"
            if run.outcome.get("outcome") == "failed":
                state = "has failed"
            of = count(number(run.environment, "plan.total_steps"))
            yield f"{run.label} {state}: step {known['steps']:,} of {of}"
        if known["attempts"] > 1:
            yield f"{run.label} took {known['attempts']} attempts: its billable time includes the pauses between them"
    if over_seeds(runs):
        return
    baseline = runs[0]
    for run in runs[1:]:
        unfair = {
            "work": work_differences(run, baseline),
            "machine": differing(run, baseline, MACHINE),
        }
        for what, keys in unfair.items():
            if keys:
                yield f"{run.label} and {baseline.label}: not the same {what} ({shortlist(keys)})"


def unknown_tasks(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a warning for each run whose scores cannot be shown, because its task is in a file of the user's."""
    for run in runs:
        kind = run.config.get("task.kind")
        if kind is not None and kind not in TASKS:
            yield f"{run.label}: task.kind={as_text(kind)} is not known; --import its file to see all scores"


def work_differences(run: Run, baseline: Run) -> list[str]:
    """List what differs in the runs' work. Larger batches of the same sequences are no difference."""
    settings = [key for key in {**baseline.config, **run.config} if key.startswith(WORK)]
    result = differing(run, baseline, [*settings, *DATA])
    there, here = baseline.summary["examples"], run.summary["examples"]
    if there is not None and here is not None and abs(here - there) > SAME_EXAMPLES * there:
        result.append("sequences consumed")
    return result


def differing(run: Run, baseline: Run, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if run.value(key) != baseline.value(key)]
