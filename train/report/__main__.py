"""`python -m train.report RUN [RUN ...] [--output DIR]`: one HTML file about training runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from train.cli.command import DONE, add_s3_flags, command_parser, guarded, s3_of
from train.config import check
from train.report.figures import labels
from train.report.locations import copies, default_output, open_run, plain
from train.report.page import render, table
from train.report.run import Run, summarise
from train.storage.folders import local_path


def print_table(runs: list[Run]) -> None:
    rows = [["", *labels(runs)], *table([summarise(run) for run in runs])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(argv: list[str] | None = None) -> int:
    parser = command_parser(
        "train.report",
        "Write an HTML report on training runs: curves, a table, settings; several runs are compared.",
        examples=("runs/mine", "runs/demo runs/mine", "runs/mine --output reports/mine"),
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder: the run_dir of a training run, in S3 too")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for report.html and its images; default: RUN/report for one run, report beside the first for "
        "more; for runs in S3: NAME-report or report, here",
    )
    add_s3_flags(parser, caches=False)
    return guarded(lambda: report(parser.parse_args(argv)))


def report(options: argparse.Namespace) -> int:
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    check(not missing, f"{' and '.join(missing)} not installed: pip install 'baretrain[report]'")
    with copies() as scratch:
        runs = [open_run(location, s3_of(options), scratch) for location in dict.fromkeys(map(plain, options.runs))]
        output = default_output(runs) if options.output is None else local_path(options.output)
        html = render(runs, output.resolve())
    print_table(runs)
    print(f"\nreport: {html}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
