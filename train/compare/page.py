"""The page of a comparison: comparison.html, one file that loads nothing, and comparison.png."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from train.compare.figures import panels, picture, poster
from train.compare.measures import (
    Entry,
    at_largest_batch,
    at_same_batch,
    factor,
    measure,
    notes,
    percent,
    quality,
    ratio,
    text,
    verdict,
    work_differences,
)
from train.config import InputError, check
from train.report.figures import labels, look, printable
from train.report.page import at_step, config_differences, duration, printed, template
from train.report.run import Run
from train.storage.atomic_io import write_atomic

TITLE = "Comparison of training runs: "  # of compare.html.j2
COUNT = "{:,.0f}".format
Form = Callable[[Any], str]
ROWS: tuple[tuple[str, str, Form], ...] = (
    ("Task", "task", text),
    ("Model", "model", text),
    ("Parameters", "parameters", COUNT),
    ("Data", "data", text),
    ("Instance", "instance", text),
    ("Device", "device", text),
    ("World size (ranks)", "world_size", COUNT),
    ("Backend", "backend", text),
    ("backend.compile", "compile", text),
    ("Precision", "precision", text),
    ("Global batch (sequences)", "global_batch_size", COUNT),
    ("Micro batch (sequences)", "micro_batch_size", COUNT),
    ("Micro batches a step and rank", "accumulation", COUNT),
    ("Sequence length (tokens)", "seq_len", COUNT),
    ("Steps", "steps", COUNT),
    ("Sequences consumed", "examples", COUNT),
    ("Tokens processed", "tokens", COUNT),
    ("Tokens/s", "tokens_per_s", COUNT),
    ("Sequences/s", "sequences_per_s", "{:,.1f}".format),
    ("MFU", "mfu", "{:.1%}".format),
    ("Time in steps (h:mm:ss)", "train_s", duration),
    ("Compiling (s)", "compile_s", "{:,.1f}".format),
    ("Compiled graphs", "graphs", COUNT),
    ("Billable time (h:mm:ss)", "wall_s", duration),
    ("Billable time without compiling (h:mm:ss)", "wall_without_compile_s", duration),
    ("Cost", "cost_usd", "${:,.2f}".format),
    ("Peak device memory of rank 0 (GB)", "peak_device_bytes", lambda value: f"{value / 1e9:,.2f}"),
    ("Most device memory that the monitor saw (GB)", "monitored_device_bytes", lambda value: f"{value / 1e9:,.2f}"),
    ("Peak host memory of rank 0 (GB)", "peak_host_bytes", lambda value: f"{value / 1e9:,.2f}"),
    ("Final training loss", "train_loss", "{:,.4f}".format),
    ("Attempts", "attempts", COUNT),
    ("Ended", "reason", text),
    ("Versions", "versions", printable),
)
RATIOS = (  # of the tables by batch
    ("Tokens/s", "tokens_per_s", COUNT),
    ("Sequences/s", "sequences_per_s", "{:,.1f}".format),
    ("Billable time", "wall_s", duration),
    ("without compiling", "wall_without_compile_s", duration),
    ("Cost", "cost_usd", "${:,.2f}".format),
)


# ---- tables --------------------------------------------------------------------------------------------------------


def statistics(entries: Sequence[Entry]) -> list[list[str]]:
    """Rows of a label and a text for each run; rows unknown for every run are left out."""
    rows = [[label, *(shown(entry, key, form) for entry in entries)] for label, key, form in ROWS]
    metrics = {name: None for entry in entries for name in entry.facts["scores"]}
    for name in metrics:
        for which in ("best", "last"):
            points = [entry.facts["scores"].get(name, {}).get(which) for entry in entries]
            cells = ["unknown" if point is None else at_step(*point) for point in points]
            rows.append([printable(f"Validation {name}, {which}".replace("_", " ")), *cells])
    return [row for row in rows if set(row[1:]) != {"unknown"}]


def by_batch(entries: Sequence[Entry], *, tolerance: float, same_batch: bool) -> list[list[str]]:
    """A row for each run beside the first one: batch, figures with their ratios, quality, work. The first row is the
    header.
    """
    if not entries:
        return []
    baseline = entries[0]
    used = [each for each in RATIOS if any(entry.facts[each[1]] is not None for entry in entries)]
    rows = [["", "Batch (micro batch)", *(label for label, _, _ in used), "Quality", "Work"]]
    for entry in entries:
        batch = " ".join((shown(entry, "global_batch_size", COUNT), f"({shown(entry, 'micro_batch_size', COUNT)})"))
        cells = [with_ratio(entry, baseline, key, form) for _, key, form in used]
        score = quality(entry, baseline, tolerance)
        differences = work_differences(entry, baseline, same_batch=same_batch)
        judged = ["baseline", "baseline"]
        if entry is not baseline:
            judged = ["unknown" if score is None else str(score), "; ".join(differences) or "the same"]
        rows.append([entry.label, batch, *cells, *judged])
    return rows


def with_ratio(entry: Entry, baseline: Entry, key: str, form: Form) -> str:
    value = None if entry is baseline else ratio(entry, baseline, key)
    return shown(entry, key, form) + ("" if value is None else f" ({factor(value)} times)")


def shown(entry: Entry, key: str, form: Form) -> str:
    value = entry.facts[key]
    return "unknown" if value is None else form(value)


# ---- the page ------------------------------------------------------------------------------------------------------


def compare(runs: list[Run], *, tolerance: float) -> tuple[list[Entry], list[str]]:
    """The entries of the page, the baseline first, and what it says of them above all."""
    entries = [Entry(label, run, measure(run)) for label, run in zip(labels(runs), runs, strict=True)]
    same, largest = at_same_batch(entries), at_largest_batch(entries)
    sentences = [verdict(each, same[0], tolerance=tolerance, same_batch=True) for each in same[1:]]
    for entry in largest[1:]:
        if not (entry in same and largest[0] in same):  # that has been said
            sentences.append(verdict(entry, largest[0], tolerance=tolerance, same_batch=False))
    if not sentences:  # runs of one variant that differ in batch
        sentences = [verdict(each, entries[0], tolerance=tolerance, same_batch=True) for each in entries[1:]]
    return entries, sentences


def warnings_of(entries: Sequence[Entry], failed: Sequence[tuple[str, str]]) -> list[str]:
    """What readers must know before they judge. `failed` has name and reason of each variant without a finished run."""
    missing = [f"{name} is missing here, it failed: {printable(reason)}" for name, reason in failed]
    return missing + [note for entry in entries for note in notes(entry)]


def render(
    entries: list[Entry],
    sentences: list[str],
    warnings: list[str],
    output: Path,
    *,
    tolerance: float,
) -> Path:
    """Write comparison.html and comparison.png to the folder `output`; returns the path of the HTML."""
    page, poster_path = output / "comparison.html", output / "comparison.png"
    foreign = [path.name for path in (page, poster_path) if path.exists() and not is_comparison(page)]
    check(not foreign, f"{output} holds {', '.join(foreign)} of no comparison; --output names another folder")
    drawn = list(panels(entries))
    same, largest = at_same_batch(entries), at_largest_batch(entries)
    html = template(Path(__file__).parent / "compare.html.j2").render(
        title=TITLE + ", ".join(entry.label for entry in entries),
        runs=[{"label": entry.label, "path": path_of(entry.run), **look(i)} for i, entry in enumerate(entries)],
        sentences=sentences,
        warnings=warnings,
        tables=[
            ("Same batch", by_batch(same, tolerance=tolerance, same_batch=True)),
            ("Each at its own largest batch", by_batch(largest, tolerance=tolerance, same_batch=False)),
        ],
        tolerance=percent(tolerance),
        statistics=statistics(entries),
        differences=printed(config_differences([entry.run for entry in entries])),
        figures=[(panel.title, base64.b64encode(picture(panel)).decode()) for panel in drawn],
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomic(page, html.encode())
        write_atomic(poster_path, poster(drawn, "\n".join([*sentences, *warnings])))
    except OSError as error:
        raise InputError(f"cannot write the comparison to {output}: {error.strerror}") from error
    return page


def path_of(run: Run) -> str:
    return printable(run.location or run.path)


def is_comparison(path: Path) -> bool:
    """Whether `render` wrote this file."""
    return path.is_file() and f"<title>{TITLE}".encode() in path.read_bytes()
