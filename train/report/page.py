"""Turns run folders into one HTML file to read, keep and send: `python -m train.report RUN [RUN ...] [--output DIR]`.

One run: RUN/report/report.html. Several: report/report.html beside the first run, so runs/report for the usual layout.
The report on runs in S3 is written to this machine: NAME-report/report.html in the current folder, report/ for several.
No torch here: a laptop that has only copies of the run folders can write the report.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import InputError, check
from train.report.cards import ability, cards, duration, side_by_side
from train.report.data import (
    Records,
    bad_rows,
    classes_table,
    f1_comparison,
    labels_table,
    metrics_table,
    read_records,
    splits_table,
)
from train.report.figures import MAX_POINTS, data_figures, draw, labels, look, panels, printable, x_axis
from train.report.run import Run, summarise
from train.run_folder import samples
from train.storage.atomic_io import write_atomic
from train.storage.folders import LocalFolder
from train.storage.schema import BadContent

if TYPE_CHECKING:
    from jinja2 import Template

# ---- table ---------------------------------------------------------------------------------------------------------

TITLES = ("Training report: ", "Comparison of ")  # of report.html.j2


COUNT, SECONDS = "{:,.0f}".format, "{:,.1f}".format
ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Task", "task", str),
    ("Model", "model", str),
    ("Parameters", "parameters", COUNT),
    ("Instance", "instance", str),
    ("World size (ranks)", "world_size", COUNT),
    ("Backend", "backend", str),
    ("Precision", "precision", str),
    ("Global batch (sequences)", "global_batch_size", COUNT),
    ("Sequence length (tokens)", "seq_len", COUNT),
    ("Steps done", "steps", COUNT),
    ("Steps planned", "steps_total", COUNT),
    ("Sequences consumed", "examples", COUNT),
    ("Tokens processed", "tokens", COUNT),
    ("Training time (h:mm:ss)", "train_s", duration),
    ("Tokens/s over the whole run", "tokens_per_s", COUNT),
    ("MFU", "mfu", "{:.1%}".format),
    ("Bubble: waiting for other stages", "bubble_share", "{:.1%}".format),
    ("Bubble at best", "bubble_share_ideal", "{:.1%}".format),
    ("Least peak memory of a rank (GB)", "least_rank_bytes", lambda value: f"{value / 1e9:,.2f}"),
    ("Highest peak memory of a rank (GB)", "most_rank_bytes", lambda value: f"{value / 1e9:,.2f}"),
    ("Cost", "cost_usd", "${:,.2f}".format),
    ("Final training loss", "train_loss", "{:,.4f}".format),
    ("Unigram entropy (nats)", "unigram_entropy", "{:.4f}".format),
    ("Goodput", "goodput", "{:.1%}".format),
    ("Time since the first start (h:mm:ss)", "wall_s", duration),
    ("Faults and alarms", "alarms", COUNT),
    ("Faults survived", "faults_survived", COUNT),
    ("Steps lost to them", "steps_lost", COUNT),
    ("Time to recover from them (s)", "recover_s", SECONDS),
    ("Mean time between them (h:mm:ss)", "mttf_s", duration),
    ("Steps skipped, gradient not finite", "skipped_steps", COUNT),
    ("Rollbacks", "rollbacks", COUNT),
    ("Checkpoints saved", "checkpoints", COUNT),
    ("Checkpoint size (MB)", "checkpoint_bytes", lambda value: f"{value / 1e6:,.1f}"),
    ("Checkpoint stall (s a save)", "stall_s", "{:,.3f}".format),
    ("Saving, from begin to commit (s)", "save_s", SECONDS),
    ("checkpoint.every (steps)", "checkpoint_every", COUNT),
    ("Suggested checkpoint.every (steps)", "suggested_every", COUNT),
    ("Suggested time between saves (s)", "suggested_interval_s", SECONDS),
    ("Attempts (first start and resumes)", "attempts", COUNT),
    ("Last attempt ended", "reason", str),
)


def facts(summary: dict[str, Any]) -> dict[str, str]:
    """The summary as labels and texts, in the order of the table."""
    result = {}
    for label, key, form in ROWS:
        value = summary[key]
        result[label] = "unknown" if value is None else printable(form(value))
        if key == "cost_usd" and value is not None and summary["cost_partial"]:
            result[label] = f"at least {result[label]}"
        if key == "train_loss":
            for name, score in summary["scores"].items():
                for which, (value, step) in score.items():
                    result[printable(f"Validation {name}, {which}".replace("_", " "))] = at_step(value, step)
    return result


def at_step(value: float | None, step: int) -> str:
    return f"{'no number' if value is None else f'{value:,.4f}'} at step {step:,}"


def table(summaries: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a label and a text for each run; rows unknown for every run are left out, but for the most important."""
    columns = [facts(summary) for summary in summaries]
    labels = {label: None for column in sorted(columns, key=len, reverse=True) for label in column}
    rows = [[label, *(column.get(label, "unknown") for column in columns)] for label in labels]
    return [row for row in rows if row[0] in ("MFU", "Cost", "Final training loss") or set(row[1:]) != {"unknown"}]


def config_differences(runs: list[Run]) -> list[list[str]]:
    """Rows of a key and a value for each run, for the keys that differ; run_dir always does and is left out."""
    keys = sorted({key for run in runs for key in run.config} - {"run_dir"})
    rows = [[key, *(as_text(run.config[key]) if key in run.config else "-" for run in runs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


# ---- file ----------------------------------------------------------------------------------------------------------


def as_text(value: object) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))


def why_unknown(run: Run, figure: str, precision: object) -> str:
    if not run.lines["summary"]:
        return "the run has not written a summary yet: it is still going, or it was killed"
    peak = "instance.device_tflops_fp32" if precision == "fp32" else "instance.device_tflops_bf16"
    what, key = {"mfu": ("peak FLOP/s", peak), "cost_usd": ("price", "instance.usd_per_hour")}[figure]
    if run.config.get(key) is not None:
        return f"the run recorded none, though {key} is set"
    return f"no {what} is known for the instance {as_text(run.config.get('instance.name', '(no name)'))} ({key})"


def describe(run: Run, records: Records | None, label: str, number: int) -> dict[str, Any]:
    """The values that the template shows of one run."""
    summary = summarise(run)
    return {
        "label": label,
        "path": printable(run.location or run.path),
        "stroke": look(number),
        "summary": summary,
        "cards": cards(run, summary, records),
        "why": {
            key: why_unknown(run, key, summary["precision"]) for key in ("mfu", "cost_usd") if summary[key] is None
        },
        "faults": [(f"step {line['step']:,}", as_text(line.get("reason"))) for line in run.lines["fault"]],
        "bad_rows": [(split, printable(text)) for split, text in bad_rows(records)],
        "config": [(key, as_text(value)) for key, value in run.config.items()],
        "environment": [(key, as_text(value)) for key, value in run.environment.items()],
    }


def sections(records: Records) -> list[tuple[str, list[tuple[str, list[list[str]]]]]]:
    """(title, [(caption, table)]) of the data and of the best evaluation; empty ones are left out."""
    by_label = [(f"Labels of {split.name}", classes_table(split)) for split in records.evaluated]
    titled = [
        ("Data", [("", splits_table(records)), ("", labels_table(records))]),
        (
            "Best evaluation" if records.step is None else f"Best evaluation, at step {records.step:,}",
            [("", metrics_table(records)), *by_label],
        ),
    ]
    shown = [(title, [(caption, printed(rows)) for caption, rows in tables if rows]) for title, tables in titled]
    return [(title, tables) for title, tables in shown if tables]


def samples_of(run: Run) -> samples.Samples | None:
    """What the model answered to some validation examples. InputError, one line, for a damaged file."""
    try:
        return samples.read(LocalFolder(run.path))
    except BadContent as error:
        raise InputError(f"{run.path / samples.NAME} is damaged: {error}") from error


def printed(rows: list[list[str]]) -> list[list[str]]:
    return [[printable(cell) for cell in row] for row in rows]


def template(path: Path) -> Template:
    """The template of a page, which may extend base.html.j2 of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([path.parent, Path(__file__).parent])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["printable"] = printable
    return environment.get_template(path.name)


def render(runs: list[Run], output: Path) -> Path:
    """Write report.html and its PNGs to the folder `output`; returns the path of the HTML.

    What readers look for comes first: cards, curves, samples. The long table and all settings fold below.
    """
    learnt = samples_of(runs[0]) if len(runs) == 1 else None
    read, names, x = [read_records(run.path) for run in runs], labels(runs), x_axis(runs)
    drawn = [(panel, draw(panel, runs, x)) for panel in panels(runs)]
    figures = [(panel, png) for panel, png in drawn if png is not None]
    only = read[0] if len(runs) == 1 else None
    pictures = list(data_figures(only)) if only is not None else []
    described = [describe(*each, number) for number, each in enumerate(zip(runs, read, names, strict=True))]
    html = template(Path(__file__).parent / "report.html.j2").render(
        runs=described,
        rows=side_by_side([run["cards"] for run in described]),
        samples=learnt,
        ability="" if learnt is None else ability(described[0]["summary"]),
        table=table([run["summary"] for run in described]),
        differences=config_differences(runs),
        figures=[(panel.title, base64.b64encode(png).decode()) for panel, png in figures],
        sections=sections(only) if only is not None else [],
        pictures=[(title, base64.b64encode(png).decode()) for _, title, png in pictures],
        comparison=f1_comparison(read, names) if len(runs) > 1 else [],
        by_sequences=x == "examples",
        averaged=any(len(run.lines["train"]) > MAX_POINTS for run in runs),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    files = {f"{panel.name}.png": png for panel, png in figures} | {f"{name}.png": png for name, _, png in pictures}
    files["report.html"] = html.encode()
    try:
        output.mkdir(parents=True, exist_ok=True)
        foreign = [name for name in files if (output / name).exists() and not is_report(output / "report.html")]
        check(not foreign, f"{output} holds {', '.join(foreign[:3])} of no report; --output names another folder")
        for name, content in files.items():
            write_atomic(output / name, content)
    except OSError as error:
        raise InputError(f"cannot write the report to {output}: {error.strerror}") from error
    return output / "report.html"


def is_report(path: Path) -> bool:
    """Whether `render` wrote this file."""
    return path.is_file() and any(f"<title>{title}".encode() in path.read_bytes() for title in TITLES)
