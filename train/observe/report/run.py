"""A run folder, read for the report: its lines, and a summary of all attempts. This module does not import torch.

It reads metrics.jsonl, config.yaml, environment.json, outcome.json, data.json, evaluation.json and
export/baretrain.json; page.py also reads samples.json. To report a further value, let Recorder in
train/observe/metrics.py write it, add it to NUMBERS, let `summarise` compute it for the whole run, and add a row to
ROWS in page.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas

from train.config import InputError, check, flatten
from train.observe.lines import Line, read_back
from train.observe.report.data import Records, number, read_mapping, read_records
from train.observe.report.texts import as_text, model_name, printable, shortened
from train.run_folder.exported import marked
from train.run_folder.metrics_files import NAME, files_of
from train.run_folder.outcome import WRITTEN_UNIX_S, read_outcome
from train.storage.folders import Folder, LocalFolder
from train.storage.schema import read_json, read_yaml
from train.tasks import TASKS, Metric, scores_of

Summary = dict[str, Any]  # see `summarise`
Table = Any  # a pandas.DataFrame; pandas has no types
logger = logging.getLogger("train")

MOST_BYTES = 10**9  # of metrics.jsonl: reading it takes about twice as much memory
TEXTS = ("kind", "reason")
WITH_STEPS = ("train", "eval", "summary")  # kinds of lines
NUMBERS = (  # the keys of metrics lines that the report reads, besides scores; anything else is ignored
    "attempt",
    "step",
    "time_unix_s",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "data_wait_s",
    "step_s",
    "steps",
    "examples",
    "epoch",
    "train_s",
    "tokens",
    "mfu",
    "bubble_share",
    "goodput",
    "compile_s",
    "cost_usd",
    "wall_s",
    "peak_device_bytes",
    "peak_host_bytes",
)

COMPARED = (
    "steps",
    "examples",
    "tokens_per_s",
    "train_s",
    "wall_s",
    "cost_usd",
    "peak_device_bytes",
    "peak_host_bytes",
)

# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    folder: Folder
    config: dict[str, Any]  # settings by dotted key, such as "optim.lr"
    environment: dict[str, Any]  # environment.json, by dotted key
    lines: Table  # all lines, oldest first; numbers that are unknown are NaN
    records: Records | None = None  # None if there is neither data.json nor evaluation.json
    outcome: dict[str, Any] = field(default_factory=dict)  # of the last attempt; {}: none
    exported_step: int | None = None  # of the exported weights; None: no export, or it has no step
    label: str = ""  # the run's name in a report

    @cached_property
    def train(self) -> Table:
        return standing(self.lines, "train")

    @cached_property
    def evaluations(self) -> Table:
        return standing(self.lines, "eval")

    def of_kind(self, kind: str) -> Table:
        return self.lines[self.lines.kind == kind]

    @cached_property
    def summary(self) -> Summary:
        return summarise(self)

    @cached_property
    def declared(self) -> dict[str, Metric]:
        return declared_scores(self.config)

    def metric(self, name: str) -> Metric:
        """Return the task's declaration of a metric, with a printable name."""
        return replace(self.declared.get(name, Metric(name, None)), name=printable(name))

    def value(self, key: str) -> Any:
        """Return a value of the summary, of environment.json or of config.yaml; None if it is unknown."""
        for values in (self.summary, self.environment, self.config):
            if key in values:
                return values[key]
        return None

    @property
    def name(self) -> str:
        return self.folder.location.rpartition("/")[2]


def read_run(folder: Folder | Path) -> Run:
    """Read a run folder. Raises InputError if it is not one or if a file in it is damaged."""
    if isinstance(folder, Path):
        folder = LocalFolder(folder)
    if isinstance(folder, LocalFolder):
        is_folder = folder.path.is_dir()
        check(is_folder, f"{folder.location} is not a folder; name the run_dir of a training run")
    where = f"{folder.location}/{NAME}"
    names = files_of(folder)
    check(bool(names), f"{folder.location} is not a run folder: it has no {NAME}")
    num_bytes = sum(folder.size(name) or 0 for name in names)
    check(
        num_bytes <= MOST_BYTES,
        f"{where} has more than {MOST_BYTES / 1e9:g} GB: report on a copy with fewer lines",
    )
    config = dict(flatten(read_mapping(folder, "config.yaml", read_yaml)))
    environment = dict(flatten(read_mapping(folder, "environment.json", read_json)))
    damage: list[str] = []
    table = table_of(read_back(folder, damage=damage), config, environment)
    if table.empty:
        why = ", ".join(damage) or "no lines yet, so there is nothing to report"
        raise InputError(f"{where}: {why}")
    run = Run(folder, config, environment, table)
    run.records = read_records(folder)
    run.outcome = read_outcome(folder)
    run.exported_step = marked(folder, "weights")
    run.label = printable(run.name)
    if damage:
        logger.warning("%s: %s; such lines are left out", where, damage[0])
    return run


def table_of(
    lines: Iterable[Line], config: Mapping[str, Any], environment: Mapping[str, Any]
) -> Table:
    """Return a table of the lines, which come newest first: NUMBERS, the declared scores, TEXTS and `since_start_s`."""
    names = list(dict.fromkeys([*NUMBERS, *declared_scores(config)]))
    rows = []
    for line in lines:
        row: list[Any] = [number(line, name) for name in names]
        row += [as_text(line.get(name, "")) for name in TEXTS]
        rows.append(row)
    table = pandas.DataFrame(rows[::-1], columns=[*names, *TEXTS])
    table = table.astype(dict.fromkeys(names, float))
    start_s = number(environment, "first_started_unix_s") or 0.0
    table["since_start_s"] = float("nan")
    if start_s > WRITTEN_UNIX_S:
        table["since_start_s"] = table.time_unix_s - start_s
    table["data_wait_share"] = table.data_wait_s / (table.step_s * table.steps)
    return table


def declared_scores(config: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the scores that the run's task declares, by name; of a task that is not known, also best.metric."""
    prefix = "data.more_validation."
    splits = [key.removeprefix(prefix) for key in config if key.startswith(prefix)]
    wanted = str(config.get("best.metric"))
    declared = {wanted: Metric(wanted, None)}
    declared |= scores_of(str(config.get("task.kind")), splits)
    for name in (*NUMBERS, *TEXTS):
        if name != "loss":
            declared.pop(name, None)
    return declared


def standing(lines: Table, kind: str) -> Table:
    """Return the lines of a kind that no later one supersedes: after a resume, lost steps are repeated."""
    own = lines[lines.kind == kind]
    lowest_later = own.step[::-1].cummin().shift()[::-1]
    return own[~(own.step >= lowest_later)]


def tell_apart(runs: list[Run]) -> None:
    """Label each run with its folder name, and with the parent folders needed to tell equal names apart."""
    paths = [run.folder.location.split("/") for run in runs]
    deepest = max(map(len, paths))
    for depth in range(1, deepest + 1):
        for run, parts in zip(runs, paths, strict=True):
            run.label = printable("/".join(parts[-depth:]))
        labels = {run.label for run in runs}
        if len(labels) == len(runs):
            break


# ---- values --------------------------------------------------------------------------------------------------------


def known(value: float) -> float | None:
    if pandas.isna(value):
        return None
    return float(value)


def last(column: Table) -> float | None:
    """Return the last known value of a column; None if there is none."""
    values = column.dropna()
    if len(values):
        return float(values.iloc[-1])
    return None


def total(column: Table) -> float | None:
    return known(column.sum(min_count=1))


# ---- summary -------------------------------------------------------------------------------------------------------


def summarise(run: Run) -> Summary:
    """Return the values that are computed from the lines; None means unknown. Totals are of all attempts."""
    environment = run.environment
    # The architecture of weights from elsewhere is unknown.
    from_elsewhere = run.config.get("model.pretrained")
    device = environment.get("device")
    if isinstance(device, str):
        device = device.removesuffix(" through XLA")  # the device is the same with and without XLA
    named = {"baretrain": environment.get("baretrain"), "commit": environment.get("commit")}
    for key, value in environment.items():
        if key.startswith("versions."):
            named[key.removeprefix("versions.")] = value
    versions = [f"{name} {value}" for name, value in named.items() if value]
    return {
        "model": model_name(from_elsewhere or run.config.get("model.architecture") or "unknown"),
        "device": device,
        "versions": ", ".join(versions) or None,
        "scores": scores(run),
        **speed(run),
    }


def scores(run: Run) -> dict[str, dict[str, tuple[float | None, int]]]:
    """Return each declared score's "last" (value, step), and if they are known, "exported" and "best".

    A value that is not finite is None. "exported" is that of the exported weights; a score without a direction has no
    "best".
    """
    result: dict[str, dict[str, tuple[float | None, int]]] = {}
    lines = run.evaluations.set_index(run.evaluations.step.astype(int))
    for name in run.declared:
        column = lines[name]
        if column.isna().all():
            continue
        steps = {"last": int(column.index[-1])}
        sign = run.metric(name).sign
        if sign:
            steps["best"] = int((sign * column).idxmax())
        exported = run.exported_step
        if exported is not None and exported in column.index:
            steps["exported"] = exported
        result[name] = {which: (known(column[step]), step) for which, step in steps.items()}
    return result


def settled(points: Mapping[str, tuple[Any, int]]) -> tuple[Any, int]:
    """Return the (value, step) by which a run is judged: of the exported weights, or the last without an export."""
    return points.get("exported", points["last"])


def final_scores(run: Run) -> dict[str, float]:
    """Return the value of each score by which a run is judged; NaN if it is not finite."""
    values = {}
    for name, points in run.summary["scores"].items():
        value, _ = settled(points)
        if value is None:
            value = float("nan")
        values[name] = value
    return values


def beside(runs: list[Run]) -> Table:
    """Return a table with a row for each run: the settings that differ, the scores, and numbers of the summary."""
    differing = differing_settings(runs)
    rows = []
    for run in runs:
        settings = {key: run.config.get(key) for key in differing}
        numbers = {key: run.summary[key] for key in COMPARED}
        rows.append({**settings, **final_scores(run), **numbers})
    return pandas.DataFrame(rows, index=[run.label for run in runs])


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the keys of the settings that differ, without run_dir, which always does."""
    keys = {key for run in runs for key in run.config} - {"run_dir"}
    differing = []
    for key in sorted(keys):
        values = {str(run.config.get(key)) for run in runs}
        if len(values) > 1:
            differing.append(key)
    return differing


def speed(run: Run) -> Summary:
    """Return the run's progress, speed, memory and cost."""
    lines = worked_lines(run.lines)
    # Each attempt counts from 0; the time to compile, each train line.
    reached = lines.groupby("attempt")[["train_s", "tokens"]].max()
    train_s = total(reached.train_s)
    tokens = total(reached.tokens)
    tokens_per_s = None
    if tokens and train_s:
        tokens_per_s = tokens / train_s
    compiled = lines[lines.kind == "train"].groupby("attempt").compile_s.sum(min_count=1)
    summaries = lines[lines.kind == "summary"].groupby("attempt").last()
    train_loss = None
    if len(run.train):
        train_loss = known(run.train.loss.iloc[-1])
    return {
        "steps": last_step(lines),
        "examples": last(run.train.examples),
        "tokens": tokens,
        "train_s": train_s,
        "tokens_per_s": tokens_per_s,
        "compile_s": total(summaries.compile_s.combine_first(compiled)),
        "mfu": last(lines.mfu),
        "bubble_share": last(lines.bubble_share),
        "peak_device_bytes": known(lines.peak_device_bytes.max()),
        "peak_host_bytes": known(lines.peak_host_bytes.max()),
        "cost_usd": last(lines.cost_usd),  # of all attempts so far
        "train_loss": train_loss,
        "goodput": last(run.lines.goodput),
        **ends_of(lines),
    }


def worked_lines(lines: Table) -> Table:
    """Return the lines of the attempts that came to a step: the others count for nothing, unless all are such."""
    worked = lines.attempt[lines.kind.isin(WITH_STEPS)]
    if len(worked):
        return lines[lines.attempt.isin(worked)]
    return lines


def ends_of(lines: Table) -> Summary:
    """Return the number of attempts, how they ended, and what is known of the time and the cost up to the end."""
    ends = lines.groupby("attempt").tail(1)
    is_cut = ends.kind != "summary"
    lacks_cost = is_cut | ends.cost_usd.isna()
    reason = None
    if not is_cut.iloc[-1]:
        reason = ends.reason.iloc[-1]
    return {
        "wall_s": billable_s(ends.iloc[-1]),
        "cost_partial": bool(lacks_cost.any()),
        "attempts": len(ends),
        "attempts_without_summary": int(is_cut.sum()),
        "reason": reason,
    }


def last_step(lines: Table) -> int:
    """Return the last step of the last attempt. A fault or a checkpoint may be of an earlier step."""
    own = lines[lines.attempt == lines.attempt.iloc[-1]]
    own = own[own.kind.isin(WITH_STEPS)]
    if len(own):
        return int(own.step.iloc[-1])
    return 0


def billable_s(end: Any) -> float | None:
    """Return the seconds from the first start of a run to its last line `end`, including pauses between attempts."""
    wall_s = known(end.since_start_s if pandas.isna(end.wall_s) else end.wall_s)
    if wall_s is None or wall_s <= 0:
        return None
    return wall_s


# ---- the end of a run ----------------------------------------------------------------------------------------------


def ending(run: Run) -> tuple[str, str]:
    """Return in a word how the last attempt ended, and the reason; "" if the word says it all."""
    end = "no end recorded"
    reason = "it is still running, or was killed"
    if run.outcome:
        end = shortened(run.outcome["outcome"])
        reason = shortened(" ".join(str(run.outcome["reason"]).split()), 300)
    if run.outcome.get("kind") == "early_stop":
        reason = "stopped early: no later evaluation was better"
    if has_diverged(run):
        end = "diverged"
        reason = "the loss is not finite: try a lower optim.lr, and check the weights and the data"
    if reason == end:
        reason = ""
    return end, reason


def has_diverged(run: Run) -> bool:
    """Return whether the loss of the last train line is not finite, or the run ended for that reason."""
    if run.outcome.get("kind") == "not_finite":
        return True
    return len(run.train) > 0 and pandas.isna(run.train.loss.iloc[-1])


def main_score(run: Run) -> str | None:
    """Return the name of the score by which a run is judged; None if it was not evaluated."""
    scores = run.summary["scores"]
    spec = TASKS.get(str(run.config.get("task.kind")))
    if spec is not None:
        for metric in spec.metrics:
            if metric.name in scores:
                return metric.name
    return next(iter(scores), None)
