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
NO_SCORE = {"last": (None, 0)}


def times(run: Run, baseline: Run, key: str) -> str:
    """Return a value of the summary as a multiple of the baseline's; "" if it is unknown or implausible."""
    value = run.summary[key]
    base = baseline.summary[key]
    if run is baseline or not value or not base:
        return ""
    is_known = value > 0 and base > 0
    if is_known and 1 / MOST_TIMES < value / base < MOST_TIMES:
        return f"{value / base:.2f} times"
    return ""


# ---- several seeds -------------------------------------------------------------------------------------------------


def over_seeds(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table of the mean and spread of best.metric, as `settled` takes it, over runs that differ only in seed.

    The first row is the header. The spread is the sample standard deviation. Without such runs, the result is [].
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = dict(run.config)
        for key in ("run_dir", "seed"):
            same.pop(key, None)
        settings = json.dumps(same, sort_keys=True, default=str)
        groups.setdefault(settings, []).append(run)
    most_seeds = 0
    for group in groups.values():
        seeds = {str(run.config.get("seed")) for run in group}
        most_seeds = max(most_seeds, len(seeds))
    if most_seeds < 2:
        return []
    header = ["over seeds", "validation", "mean", "spread", "runs"]
    return [header, *map(seeds_row, groups.values())]


def seeds_row(runs: list[Run]) -> list[str]:
    name = str(runs[0].config.get("best.metric"))
    known = []
    for run in runs:
        points = run.summary["scores"].get(name, NO_SCORE)
        value, _ = settled(points)
        if value is not None:
            known.append(value)
    mean = "unknown"
    if known:
        mean = f"{fmean(known):.4g}"
    spread = "unknown"
    if len(known) > 1:
        spread = f"{stdev(known):.4g}"
    number = str(len(known))
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
    keys = {**baseline.config, **run.config}
    settings = [key for key in keys if key.startswith(WORK)]
    result = differing(run, baseline, [*settings, *DATA])
    there = baseline.summary["examples"]
    here = run.summary["examples"]
    are_known = there is not None and here is not None
    if are_known and abs(here - there) > SAME_EXAMPLES * there:
        result.append("sequences consumed")
    return result


def differing(run: Run, baseline: Run, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if run.value(key) != baseline.value(key)]
