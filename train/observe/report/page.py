"""The report on one or several runs: a single HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from train.observe.report import comparison
from train.observe.report.data import (
    Records,
    Table,
    classes_table,
    confusion_table,
    labels_table,
    metrics_table,
    number,
    reading,
    remarks,
    splits_of,
    splits_table,
    texts,
)
from train.observe.report.figures import WIDTH, curves, look, x_axis
from train.observe.report.run import (
    Run,
    differing_settings,
    ending,
    main_score,
    settled,
    tell_apart,
)
from train.observe.report.texts import (
    as_text,
    at_step,
    count,
    duration,
    figure,
    printable,
)
from train.run_folder import samples
from train.storage.folders import LocalFolder

ALWAYS = ("MFU", "Cost", "Final training loss")  # rows that are shown even if they are unknown
SAME = ("task.kind", "identity.data", "eval_examples")  # else scores are not comparable
MOST_FAULTS = 1000  # the newest ones are listed
TONES = {"done": "good", "failed": "bad", "refused": "bad", "diverged": "bad"}

# ---- table ---------------------------------------------------------------------------------------------------------


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.2f}"


TIME = "Training time (h:mm:ss)"
SPEED = "Tokens/s over the whole run"
COUNT = "{:,.0f}".format
SECONDS = "{:,.1f}".format
SHARE = "{:.1%}".format
ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Task", "task.kind", as_text),
    ("Model", "model", as_text),
    ("Parameters", "parameters", COUNT),
    ("Data", "identity.data", as_text),
    ("Instance", "instance.name", as_text),
    ("Device", "device", as_text),
    ("World size (ranks)", "world_size", COUNT),
    ("Backend", "backend", as_text),
    ("Precision", "precision", as_text),
    ("Global batch (sequences)", "plan.global_batch_size", COUNT),
    ("Sequence length (tokens)", "seq_len", COUNT),
    ("Steps done", "steps", COUNT),
    ("Sequences consumed", "examples", COUNT),
    (TIME, "train_s", duration),
    (SPEED, "tokens_per_s", COUNT),
    ("MFU", "mfu", SHARE),
    ("Pipeline bubble", "bubble_share", SHARE),
    ("Compiling (s)", "compile_s", SECONDS),
    ("Billable time: since the first start (h:mm:ss)", "wall_s", duration),
    ("Cost", "cost_usd", "${:,.2f}".format),
    ("Peak device memory of rank 0 (GB)", "peak_device_bytes", gigabytes),
    ("Peak host memory of rank 0 (GB)", "peak_host_bytes", gigabytes),
    ("Goodput", "goodput", SHARE),
    ("Versions", "versions", printable),
    ("Final training loss", "train_loss", "{:,.4f}".format),
)
TEXTS = (as_text, printable)  # other forms take numbers
ON_CARDS = ("Model", "Parameters", SPEED, "MFU", TIME, "Cost")
# Of the table on several runs, these rows are at the top of the page; all are in a folded table.
AT_TOP = ("Outcome", "Final training loss", *ON_CARDS)
MOST_SETTINGS = 8  # of those that differ, at the top of the page
WITH_RATIO = ("tokens_per_s", "train_s", "wall_s", "cost_usd")


def facts(run: Run, baseline: Run) -> dict[str, str]:
    """Return the text of each summary value by label, in the table's order, including ratios to the baseline."""
    summary = run.summary
    result = {}
    for name, points in summary["scores"].items():
        for which, (value, step) in points.items():
            label = printable(f"Validation {name}, {which}".replace("_", " "))
            result[label] = at_step(value, step)
    result["Outcome"] = ": ".join(filter(None, ending(run)))
    for label, key, form in ROWS:
        value = run.value(key)
        if form not in TEXTS:
            value = number({key: value}, key)
        shown = "unknown"
        if value is not None:
            shown = form(value)
        times = ""
        if key in WITH_RATIO:
            times = comparison.times(run, baseline, key)
        if times:
            shown += f" ({times})"
        result[label] = shown
    if summary["cost_usd"] is not None and summary["cost_partial"]:
        result["Cost"] = f"at least {result['Cost']}"
    return result


def table(runs: Sequence[Run]) -> Table:
    """Return rows of a label and a text per run. Rows unknown for all runs are left out, except ALWAYS."""
    columns = [facts(run, runs[0]) for run in runs]
    labels = {label: None for column in columns for label in column}
    rows = []
    for label in labels:
        values = [column.get(label, "unknown") for column in columns]
        if label in ALWAYS or set(values) != {"unknown"}:
            rows.append([label, *values])
    return rows


def top_rows(runs: Sequence[Run]) -> Table:
    """Return the rows that matter most: settings that differ, the score by which runs are judged, and AT_TOP."""
    score = runs[0].metric(str(main_score(runs[0])))
    wanted = (f"Validation {score.title}", *AT_TOP)
    rows = config_differences(runs)[:MOST_SETTINGS]
    for row in table(runs):
        label = row[0].partition(",")[0]
        if label in wanted:
            rows.append(row)
    return rows


def config_differences(runs: Sequence[Run]) -> Table:
    """Return rows of a key and a value per run for the settings that differ."""
    rows = []
    for key in differing_settings(runs):
        rows.append([key, *(as_text(run.config.get(key, "-")) for run in runs)])
    return rows


# ---- cards ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    title: str
    value: str
    notes: list[str] = field(default_factory=list)
    tone: str = ""  # good | bad


def best_of(runs: Sequence[Run]) -> int | None:
    """Return the number of the run with the best score; None without a score, or if scores cannot be compared."""
    name = str(main_score(runs[0]))
    sign = runs[0].metric(name).sign
    differ = any(comparison.differing(run, runs[0], SAME) for run in runs)
    if differ or not sign or comparison.over_seeds(runs):
        return None
    known = {}
    for index, run in enumerate(runs):
        points = run.summary["scores"].get(name, comparison.NO_SCORE)
        value, _ = settled(points)
        if value is not None:
            known[index] = sign * value
    return max(known, key=known.__getitem__, default=None)


def cards(run: Run) -> list[Card]:
    """Return the score by which a run is judged, how it ended, and rows of the table that are known."""
    result = []
    name = main_score(run)
    if name is not None:
        value, step = settled(run.summary["scores"][name])
        title = f"Validation {run.metric(name).title}"
        result.append(Card(title, figure(value), [f"at step {step:,}"]))
    end, reason = ending(run)
    planned = number(run.environment, "plan.total_steps")
    far = f"step {run.summary['steps']:,} of {count(planned)}"
    result.append(Card("Outcome", end, [far, reason], TONES.get(end, "")))
    known = facts(run, run)
    for label in ON_CARDS:
        if known[label] != "unknown":
            result.append(Card(label, known[label]))
    return result


# ---- page ----------------------------------------------------------------------------------------------------------


def describe(run: Run, index: int) -> dict[str, Any]:
    """Return the values that the template shows for one run."""
    records = run.records or Records()
    bad_rows = {
        name: texts(split, "bad_examples") for name, split in splits_of(records.data).items()
    }
    faults = run.of_kind("fault").tail(MOST_FAULTS)
    return {
        "label": run.label,
        "location": run.folder.location,
        "stroke": look(index),
        "summary": run.summary,
        "cards": cards(run),
        "folded": {
            "Faults and alarms": [
                (f"step {step:,.0f}", reason)
                for step, reason in zip(faults.step, faults.reason, strict=True)
            ],
            "Bad rows, left out": [(name, text) for name in bad_rows for text in bad_rows[name]],
            "Configuration": [(key, as_text(value)) for key, value in run.config.items()],
            "Environment": [(key, as_text(value)) for key, value in run.environment.items()],
        },
    }


def sections(records: Records) -> dict[str, list[tuple[str, Table]]]:
    """Return tables with their captions, by title: of the data and of an evaluation. A table may be empty."""
    step = ""
    if records.step is not None:
        step = f" at step {count(records.step)}"
    evaluation = [("", metrics_table(records))]
    for name, split in splits_of(records.evaluation).items():
        evaluation.append((f"Labels of {name}", classes_table(split)))
        evaluation.append((f"Confusion of {name}", confusion_table(split)))
    return {
        "Data": [("", splits_table(records)), ("", labels_table(records))],
        f"Evaluation{step}": evaluation,
    }


def samples_of(run: Run) -> samples.Samples | None:
    """Return the model's answers to some validation examples. Raises InputError if the file is damaged."""
    with reading(run.folder, samples.NAME):
        return samples.read(run.folder)


def fill_template(
    name: str, values: dict[str, Any], *, show: Callable[[object], str] = printable
) -> str:
    """Return a text or page in which every value was passed through `show`, and is escaped in HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    is_page = name.endswith(".html.j2")

    def finalize(value: object) -> object:
        if isinstance(value, Markup):
            return value
        shown = show(value)
        if is_page:
            return shown
        return Markup(shown)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=finalize,
    )
    return environment.get_template(name).render(values)


def render(runs: list[Run], output: Path, *, failed: Sequence[str] = ()) -> Path:
    """Write report.html to the folder `output`; return its path.

    `failed` has a line for each run that could not be read. The page begins with the most important facts: of one run,
    its cards; of several, how they compare.
    """
    tell_apart(runs)
    records = Records()
    answers = None
    warnings = list(failed)
    if len(runs) == 1:
        records = runs[0].records or records
        answers = samples_of(runs[0])
        warnings += remarks(records)
    else:
        warnings += comparison.warnings(runs)
    warnings += comparison.unknown_tasks(runs)
    html = fill_template(
        "report.html.j2",
        {
            "runs": [describe(run, index) for index, run in enumerate(runs)],
            "seeds": comparison.over_seeds(runs),
            "warnings": warnings,
            "samples": answers,
            "best": best_of(runs),
            "most_settings": MOST_SETTINGS,
            "table": table(runs),
            "top": top_rows(runs),
            "differences": config_differences(runs),
            "figures": curves(runs),
            "width": WIDTH * 72,  # at this width, 1/72 inch is a pixel
            "sections": sections(records),
            "by_sequences": x_axis(runs) == "examples",
            "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        },
    )
    LocalFolder(output).write("report.html", html.encode())
    return output / "report.html"
