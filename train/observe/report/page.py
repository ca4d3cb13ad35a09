"""The report on one or several runs: a single HTML file, and its figures as PNG files."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from train.config import InputError, check
from train.config.train import TOLERANCE
from train.observe.report import comparison
from train.observe.report.cards import cards, side_by_side
from train.observe.report.data import (
    Records,
    Table,
    classes_table,
    labels_table,
    metrics_table,
    splits_table,
)
from train.observe.report.data_figures import data_figures
from train.observe.report.figures import DPI, MAX_POINTS, WIDTH, curves, look, x_axis
from train.observe.report.run import Run, tell_apart
from train.observe.report.texts import as_text, at_step, duration, percent, printable
from train.run_folder import samples
from train.storage.folders import LocalFolder
from train.storage.schema import BadContent

TITLES = ("Training report: ", "Comparison of ")  # how the titles in report.html.j2 begin

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
    ("Micro batch (sequences)", "micro_batch_size", COUNT),
    ("Micro batches per step and rank", "accumulation", COUNT),
    ("Sequence length (tokens)", "seq_len", COUNT),
    ("Steps done", "steps", COUNT),
    ("Steps planned", "steps_total", COUNT),
    ("Sequences consumed", "examples", COUNT),
    ("Tokens processed", "tokens", COUNT),
    ("Training time (h:mm:ss)", "train_s", duration),
    ("Tokens/s over the whole run", "tokens_per_s", COUNT),
    ("Sequences/s", "sequences_per_s", SECONDS),
    ("MFU", "mfu", SHARE),
    ("Pipeline bubble", "bubble_share", SHARE),
    ("Ideal pipeline bubble", "bubble_share_ideal", SHARE),
    ("Compiling (s)", "compile_s", SECONDS),
    ("Compiled graphs", "graphs", COUNT),
    ("Billable time: since the first start (h:mm:ss)", "wall_s", duration),
    ("Billable time without compiling (h:mm:ss)", "wall_without_compile_s", duration),
    ("Cost", "cost_usd", "${:,.2f}".format),
    ("Peak device memory of rank 0 (GB)", "peak_device_bytes", gigabytes),
    ("Peak device memory seen by the monitor (GB)", "monitored_device_bytes", gigabytes),
    ("Peak host memory of rank 0 (GB)", "peak_host_bytes", gigabytes),
    ("Lowest peak memory of a rank (GB)", "least_rank_bytes", gigabytes),
    ("Highest peak memory of a rank (GB)", "most_rank_bytes", gigabytes),
    ("Final training loss", "train_loss", "{:,.4f}".format),
    ("Unigram entropy (nats)", "unigram_entropy", "{:.4f}".format),
    ("Accuracy of guessing from both neighbours", "neighbour_accuracy", SHARE),
    ("Goodput", "goodput", SHARE),
    ("Faults and alarms", "alarms", COUNT),
    ("Faults survived", "faults_survived", COUNT),
    ("Steps lost to faults", "steps_lost", COUNT),
    ("Time to recover from faults (s)", "recover_s", SECONDS),
    ("Mean time between faults (h:mm:ss)", "mttf_s", duration),
    ("Steps skipped, gradient not finite", "skipped_steps", COUNT),
    ("Rollbacks", "rollbacks", COUNT),
    ("Checkpoints saved", "checkpoints", COUNT),
    ("Checkpoint size (MB)", "checkpoint_bytes", lambda value: f"{value / 1e6:,.1f}"),
    ("Checkpoint stall (s per save)", "stall_s", "{:,.3f}".format),
    ("Saving, from start to commit (s)", "save_s", SECONDS),
    ("checkpoint.every (steps)", "checkpoint_every", COUNT),
    ("Suggested checkpoint.every (steps)", "suggested_every", COUNT),
    ("Suggested time between saves (s)", "suggested_interval_s", SECONDS),
    ("Attempts (first start and resumes)", "attempts", COUNT),
    ("Last attempt ended", "reason", as_text),
    ("Versions", "versions", printable),
)
WITH_RATIO = (
    "tokens_per_s",
    "sequences_per_s",
    "train_s",
    "wall_s",
    "wall_without_compile_s",
    "cost_usd",
)


def facts(run: Run, baseline: Run) -> dict[str, str]:
    """Return the text of each summary value by label, in the table's order, including ratios to the baseline."""
    result, summary = {}, run.summary
    for label, key, form in ROWS:
        value = summary[key]
        result[label] = "unknown" if value is None else form(value)
        if key == "cost_usd" and value is not None and summary["cost_partial"]:
            result[label] = f"at least {result[label]}"
        if key in WITH_RATIO and (times := comparison.times(run, baseline, key)):
            result[label] += f" ({times})"
        if key == "train_loss":
            for name, score in summary["scores"].items():
                for which, (value, step) in score.items():
                    result[printable(f"Validation {name}, {which}".replace("_", " "))] = at_step(
                        value, step
                    )
    return result


def table(runs: Sequence[Run]) -> Table:
    """Return rows of a label and a text per run. Rows unknown for all runs are left out, except MFU, cost and loss."""
    columns = [facts(run, runs[0]) for run in runs]
    labels = {label: None for column in sorted(columns, key=len, reverse=True) for label in column}
    rows = [[label, *(column.get(label, "unknown") for column in columns)] for label in labels]
    return [
        row
        for row in rows
        if row[0] in ("MFU", "Cost", "Final training loss") or set(row[1:]) != {"unknown"}
    ]


def config_differences(runs: Sequence[Run]) -> Table:
    """Return rows of a key and a value per run for the keys that differ. run_dir, which always differs, is left out."""
    keys = sorted({key for run in runs for key in run.config} - {"run_dir"})
    rows = [
        [key, *(as_text(run.config[key]) if key in run.config else "-" for run in runs)]
        for key in keys
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


# ---- page ----------------------------------------------------------------------------------------------------------


def why_unknown(run: Run, figure: str) -> str:
    if not run.summaries:
        return "the run has not written a summary yet: it is still running, or it was killed"
    peak = "instance.device_tflops_" + ("fp32" if run.summary["precision"] == "fp32" else "bf16")
    what, key = {"mfu": ("peak FLOP/s", peak), "cost_usd": ("price", "instance.usd_per_hour")}[
        figure
    ]
    return f"no {what} is known for the instance {as_text(run.config.get('instance.name', '(no name)'))} ({key})"


def describe(run: Run, index: int) -> dict[str, Any]:
    """Return the values that the template shows for one run."""
    splits = run.records.splits if run.records else []
    return {
        "label": run.label,
        "location": run.folder.location,
        "stroke": look(index),
        "summary": run.summary,
        "cards": cards(run),
        "why": {
            key: why_unknown(run, key) for key in ("mfu", "cost_usd") if run.summary[key] is None
        },
        "folded": {
            "Faults and alarms": [
                (f"step {line['step']:,}", as_text(line.get("reason")))
                for line in run.faults.lines
            ],
            "Bad rows, left out": [
                (split.name, text) for split in splits for text in split.bad_examples
            ],
            "Configuration": [(key, as_text(value)) for key, value in run.config.items()],
            "Environment": [(key, as_text(value)) for key, value in run.environment.items()],
        },
    }


def sections(records: Records) -> list[tuple[str, list[tuple[str, Table]]]]:
    """Return (title, [(caption, table)]) for the data and an evaluation. Empty tables are left out."""
    evaluation = "Evaluation" if records.step is None else f"Evaluation at step {records.step:,}"
    by_label = [(f"Labels of {split.name}", classes_table(split)) for split in records.evaluated]
    titled = (
        ("Data", [("", splits_table(records)), ("", labels_table(records))]),
        (evaluation, [("", metrics_table(records)), *by_label]),
    )
    known = [
        (title, [(caption, rows) for caption, rows in tables if rows]) for title, tables in titled
    ]
    return [(title, tables) for title, tables in known if tables]


def samples_of(run: Run) -> samples.Samples | None:
    """Return the model's answers to some validation examples. Raises InputError if the file is damaged."""
    try:
        return samples.read(run.folder)
    except BadContent as error:
        raise InputError(f"{run.folder.location}/{samples.NAME} is damaged: {error}") from error


def shown_figures(figures: Sequence[tuple[str, str, bytes]]) -> list[tuple[str, str, int]]:
    """Return (title, PNG in base64, minimum width in pixels) per figure. At this width, 1/72 inch is a pixel."""
    # read from the header of a PNG
    widths = [int.from_bytes(png[16:20], "big") * 72 // DPI for _, _, png in figures]
    encoded = [(title, base64.b64encode(png).decode()) for _, title, png in figures]
    return [(*each, width) for each, width in zip(encoded, widths, strict=True)]


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

    `failed` has a line for each run that could not be read. The page begins with the most important facts. Below
    them, the long table and all settings are collapsed.
    """
    tell_apart(runs)
    is_one = len(runs) == 1
    learnt, only = (samples_of(runs[0]), runs[0].records) if is_one else (None, None)
    seeds = comparison.over_seeds(runs)
    figures, pictures = curves(runs), [] if only is None else list(data_figures(only))
    described = [describe(run, index) for index, run in enumerate(runs)]
    html = fill_template(
        {
            "runs": described,
            "rows": side_by_side(runs, [each["cards"] for each in described]),
            "seeds": seeds,
            "sentences": [] if seeds else comparison.sentences(runs, tolerance),
            "warnings": [*failed, *comparison.warnings(runs)] if not is_one or failed else [],
            "tolerance": percent(tolerance),
            "samples": learnt,
            "table": table(runs),
            "differences": config_differences(runs),
            "figures": shown_figures(figures),
            "sections": sections(only) if only is not None else [],
            "pictures": shown_figures(pictures),
            "column": WIDTH * 72,
            "by_sequences": x_axis(runs) == "examples",
            "averaged": any(len(run.train) > MAX_POINTS for run in runs),
            "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
    )
    files = {f"{name}.png": png for name, _, png in [*figures, *pictures]} | {
        "report.html": html.encode()
    }
    folder = LocalFolder(output)
    there = folder.read("report.html") if folder.size("report.html") is not None else b""
    is_ours = any(f"<title>{title}".encode() in there for title in TITLES)
    foreign = [name for name in files if name in folder.names_here() and not is_ours]
    check(
        not foreign,
        f"{output} contains files that no report wrote ({', '.join(foreign[:3])}); choose another folder with --output",
    )
    for name, content in files.items():
        folder.write(name, content)
    return output / "report.html"
