"""The command `baretrain report RUN [RUN ...] [--output DIR]`, which writes one HTML file about training runs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from train.config import S3Config, check
from train.machine.console import say
from train.observe.report import comparison
from train.observe.report.page import render, top_rows
from train.observe.report.run import Run, read_run
from train.observe.report.texts import aligned
from train.run.command import DONE, add_s3_flags, command_parser, run_flags
from train.storage.folders import is_s3, local_path, open_folder


def main(argv: Sequence[str]) -> int:
    parser = command_parser(
        "report",
        "Write an HTML report on training runs: curves, a table, settings. Several runs are compared with the first.",
        examples=("runs/mine", "runs/demo runs/mine", "runs/mine --output reports/mine"),
        imports=True,
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run_dir of a run: a folder or s3://bucket/prefix"
    )
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for report.html (default: RUN/report for one run, report next to the first run for "
        "several; for runs in S3, NAME-report or report in the current folder)",
    )
    add_s3_flags(parser, caches=False)

    def report(options: argparse.Namespace, s3: S3Config) -> int:
        write_report(options.runs, s3, output=options.output)
        return DONE

    return run_flags(parser, argv, report)


def write_report(
    locations: Sequence[str],
    s3: S3Config,
    *,
    output: str | None,
    failed: Sequence[str] = (),
) -> Path:
    """Write the report on runs, print its table and its warnings, and return the path of the HTML file."""
    check_output(output)
    places = [
        each.rstrip("/") if is_s3(each) else str(local_path(each).resolve()) for each in locations
    ]
    runs = [read_run(open_folder(place, s3)) for place in dict.fromkeys(places)]
    folder = default_output(runs)
    if output is not None:
        folder = local_path(output)
    html = render(runs, folder.resolve(), failed=failed)
    seeds = comparison.over_seeds(runs)
    rows = seeds or [["", *(run.label for run in runs)], *top_rows(runs)]
    say(*aligned(rows))
    warnings = [*failed, *comparison.unknown_tasks(runs)]
    if len(runs) > 1:
        warnings += comparison.warnings(runs)
    if warnings:
        say("", *warnings)
    say("", f"report: {html}")
    return html


def check_output(output: str | None) -> None:
    """Raise InputError if Matplotlib is not installed, or if `output` is not a valid local path."""
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    check(has_matplotlib, "matplotlib not installed: pip install 'baretrain[report]'")
    # A notebook sets MPLBACKEND to a backend that only its kernel can import.
    if "matplotlib" not in sys.modules:
        # This backend writes figures to files without showing them.
        os.environ["MPLBACKEND"] = "agg"
    if output is not None:
        local_path(output)


def default_output(runs: list[Run]) -> Path:
    """Return the default of --output, as its help text describes it."""
    location, is_one = runs[0].folder.location, len(runs) == 1
    if is_s3(location):
        return Path(f"{runs[0].name}-report" if is_one else "report")
    if is_one:
        return Path(location) / "report"
    return Path(location).parent / "report"
