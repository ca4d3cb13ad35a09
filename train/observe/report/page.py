"""The report on one or several runs: a single HTML file, and its figures as PNG files."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from train.config import check
from train.config.train import TOLERANCE
from train.observe.report import comparison
from train.observe.report.cards import cards, ending
from train.observe.report.data import (
    Records,
    Table,
    classes_table,
    labels_table,
    metrics_table,
    reading,
    splits_table,
)
from train.observe.report.data_figures import data_figures
from train.observe.report.figures import DPI, MAX_POINTS, WIDTH, curves, look, x_axis
from train.observe.report.run import Run, tell_apart
from train.observe.report.texts import as_text, at_step, duration, percent, printable
from train.run_folder import samples
from train.storage.folders import LocalFolder

TITLES = ("Training report: ", "Comparison of ")  # how the titles in report.html.j2 begin
ALWAYS = ("MFU", "Cost", "Final training loss")  # rows that are shown even if they are unknown
MOST_FAULTS = 1000  # the newest ones are listed

# ---- table ---------------------------------------------------------------------------------------------------------


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.2f}"


COUNT, SECONDS, SHARE = "{:,.0f}".format, "{:,.1f}".format, "{:.1%}".format
ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Task", "task", as_text),
    ("Model", "model", as_text),
    ("Parameters", "parameters", COUNT),
    ("Data", "data", as_text),
    ("Instance", "instance", as_text),
    ("Device", "device", as_text),
    ("World size (ranks)", "world_size", COUNT),
    ("Backend", "backend", as_text),
    ("backend.compile", "compile", as_text),
    ("Precision", "precision", as_text),
    ("Global batch (sequences)", "global_batch_size", COUNT),
    ("Sequence length (tokens)", "seq_len", COUNT),
    ("Steps done", "steps", COUNT),
    ("Sequences consumed", "examples", COUNT),
    ("Training time (h:mm:ss)", "train_s", duration),
    ("Tokens/s over the whole run", "tokens_per_s", COUNT),
    ("MFU", "mfu", SHARE),
    ("Pipeline bubble", "bubble_share", SHARE),
    ("Compiling (s)", "compile_s", SECONDS),
    ("Billable time: since the first start (h:mm:ss)", "wall_s", duration),
    ("Cost", "cost_usd", "${:,.2f}".format),
    ("Peak device memory of rank 0 (GB)", "peak_device_bytes", gigabytes),
    ("Peak host memory of rank 0 (GB)", "peak_host_bytes", gigabytes),
    ("Goodput", "goodput", SHARE),
    ("Steps lost to faults", "steps_lost", COUNT),
    ("Checkpoint stall (s per save)", "stall_s", "{:,.3f}".format),
    ("Suggested checkpoint.every (steps)", "suggested_every", COUNT),
    ("Versions", "versions", printable),
    ("Final training loss", "train_loss", "{:,.4f}".format),
)
WITH_RATIO = ("tokens_per_s", "train_s", "wall_s", "cost_usd")


def facts(run: Run, baseline: Run) -> dict[str, str]:
    """Return the text of each summary value by label, in the table's order, including ratios to the baseline."""
    summary = run.summary
    result = {"Outcome": ": ".join(filter(None, ending(run)))}
    for label, key, form in ROWS:
        value = summary[key]
        if value is None:
            result[label] = "unknown"
        else:
            result[label] = form(value)
        if key in WITH_RATIO:
            times = comparison.times(run, baseline, key)
        else:
            times = ""
        if times:
            result[label] += f" ({times})"
    if summary["cost_usd"] is not None and summary["cost_partial"]:
        result["Cost"] = f"at least {result['Cost']}"
    for name, points in summary["scores"].items():
        for which, (value, step) in points.items():
            label = printable(f"Validation {name}, {which}".replace("_", " "))
            result[label] = at_step(value, step)
    return result


def table(runs: Sequence[Run]) -> Table:
    """Return rows of a label and a text per run. Rows unknown for all runs are left out, except ALWAYS."""
    columns = [facts(run, runs[0]) for run in runs]
    labels = {label: None for column in columns for label in column}
    rows = [[label, *(column.get(label, "unknown") for column in columns)] for label in labels]
    return [row for row in rows if row[0] in ALWAYS or set(row[1:]) != {"unknown"}]


def config_differences(runs: Sequence[Run]) -> Table:
    """Return rows of a key and a value per run for the keys that differ. run_dir, which always differs, is left out."""
    keys = sorted({key for run in runs for key in run.config} - {"run_dir"})
    rows = []
    for key in keys:
        values = [as_text(run.config.get(key, "-")) for run in runs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


# ---- page ----------------------------------------------------------------------------------------------------------


def describe(run: Run, index: int) -> dict[str, Any]:
    """Return the values that the template shows for one run."""
    splits = run.records.splits if run.records else []
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
            "Bad rows, left out": [
                (each.name, text) for each in splits for text in each.bad_examples
            ],
            "Configuration": [(key, as_text(value)) for key, value in run.config.items()],
            "Environment": [(key, as_text(value)) for key, value in run.environment.items()],
        },
    }


def sections(records: Records) -> dict[str, list[tuple[str, Table]]]:
    """Return tables with their captions, by title: of the data and of an evaluation. A table may be empty."""
    if records.step is None:
        step = ""
    else:
        step = f" at step {records.step:,}"
    by_label = [(f"Labels of {split.name}", classes_table(split)) for split in records.evaluated]
    return {
        "Data": [("", splits_table(records)), ("", labels_table(records))],
        f"Evaluation{step}": [("", metrics_table(records)), *by_label],
    }


def samples_of(run: Run) -> samples.Samples | None:
    """Return the model's answers to some validation examples. Raises InputError if the file is damaged."""
    with reading(run.folder, samples.NAME):
        return samples.read(run.folder)


def shown_figures(figures: Sequence[tuple[str, str, bytes]]) -> list[tuple[str, str, int]]:
    """Return (title, PNG in base64, minimum width in pixels) per figure. At this width, 1/72 inch is a pixel."""
    result = []
    for _, title, png in figures:
        width = int.from_bytes(png[16:20], "big")  # from the header of a PNG
        result.append((title, base64.b64encode(png).decode(), width * 72 // DPI))
    return result


def fill_template(values: dict[str, Any]) -> str:
    """Return the HTML. Every value in it is escaped and made printable."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    return environment.get_template("report.html.j2").render(values)


def render(
    runs: list[Run], output: Path, *, tolerance: float = TOLERANCE, failed: Sequence[str] = ()
) -> Path:
    """Write report.html and its PNGs to the folder `output`; return the path of the HTML.

    `failed` has a line for each run that could not be read. The page begins with the most important facts: of one run,
    its cards; of several, how they compare.
    """
    tell_apart(runs)
    is_one = len(runs) == 1
    records, answers = Records(), None
    sentences: list[str] = []
    warnings = list(failed)
    seeds = comparison.over_seeds(runs)
    if is_one:
        records, answers = runs[0].records or records, samples_of(runs[0])
    else:
        warnings += comparison.warnings(runs)
    if not seeds:
        sentences = comparison.sentences(runs, tolerance)
    figures, pictures = curves(runs), list(data_figures(records))
    html = fill_template(
        {
            "runs": [describe(run, index) for index, run in enumerate(runs)],
            "seeds": seeds,
            "sentences": sentences,
            "warnings": warnings,
            "tolerance": percent(tolerance),
            "samples": answers,
            "table": table(runs),
            "differences": config_differences(runs),
            "figures": shown_figures(figures),
            "sections": sections(records),
            "pictures": shown_figures(pictures),
            "column": WIDTH * 72,
            "by_sequences": x_axis(runs) == "examples",
            "averaged": any(len(run.train) > MAX_POINTS for run in runs),
            "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
    )
    files = {f"{name}.png": png for name, _, png in [*figures, *pictures]}
    write_files(LocalFolder(output), files | {"report.html": html.encode()})
    return output / "report.html"


def write_files(folder: LocalFolder, files: dict[str, bytes]) -> None:
    """Write the files of a report. Raises InputError if one would replace a file that no report wrote."""
    if folder.size("report.html") is not None:
        there = folder.read("report.html")
    else:
        there = b""
    is_ours = any(f"<title>{title}".encode() in there for title in TITLES)
    foreign = [name for name in files if name in folder.names_here() and not is_ours]
    check(
        not foreign,
        f"{folder.path} contains files that no report wrote ({', '.join(foreign[:3])}); choose another folder with "
        "--output",
    )
    for name, content in files.items():
        folder.write(name, content)
