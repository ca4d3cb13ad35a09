"""`python -m train.report RUN [RUN ...] [--output DIR]`: one HTML file about training runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from train.cli.command import DONE, add_s3_flags, command_parser, guarded, s3_of
from train.config import InputError, S3Config, check
from train.config.compare import TOLERANCE
from train.report import comparison
from train.report.page import render, table
from train.report.run import Run, read_run
from train.storage.folders import is_s3, local_path, open_folder, scratch_folder

FILES = (  # all that a report reads
    "metrics.jsonl",
    "config.yaml",
    "environment.json",
    "outcome.json",
    "data.json",
    "evaluation.json",
    "samples.json",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "train.report",
        "Write an HTML report on training runs: curves, a table, settings; several runs stand beside the first one.",
        examples=("runs/mine", "runs/demo runs/mine", "runs/mine --output reports/mine"),
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder: the run_dir of a training run, in S3 too")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for report.html and its images; default: RUN/report for one run, report beside the first for "
        "more; for runs in S3: NAME-report or report, here",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="SHARE",
        help=f"by which the last validation score may differ from the first run's and count as equal [{TOLERANCE}]",
    )
    add_s3_flags(parser, caches=False)

    def report() -> int:
        options = parser.parse_args(argv)
        check(options.tolerance >= 0, f"--tolerance={options.tolerance:g} must be 0 or more")
        write_report(options.runs, s3_of(options), output=options.output, tolerance=options.tolerance)
        return DONE

    return guarded(report)


def write_report(
    locations: Sequence[str], s3: S3Config, *, output: str | None, tolerance: float, failed: Sequence[str] = ()
) -> Path:
    """Write the page about runs, see `render`, and print what it says; returns the path of the HTML."""
    check_output(output)
    with copies() as scratch:
        runs = [open_run(location, s3, scratch) for location in dict.fromkeys(map(plain, locations))]
        folder = default_output(runs) if output is None else local_path(output)
        html = render(runs, folder.resolve(), tolerance=tolerance, failed=failed)
    rows = [["", *(run.label for run in runs)], *table(runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(runs) > 1:
        print("", *comparison.sentences(runs, tolerance), *failed, *comparison.warnings(runs), sep="\n")
    print(f"\nreport: {html}")
    return html


def check_output(output: str | None) -> None:
    """Raise InputError unless a page can be made, and `output` be its folder."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    check(not missing, f"{' and '.join(missing)} not installed: pip install 'baretrain[report]'")
    if output is not None:
        local_path(output)


# ---- folders of this machine, and S3, from which files are copied --------------------------------------------------


def plain(location: str) -> str:
    """The one spelling of a location."""
    return location.rstrip("/") if is_s3(location) else str(local_path(location).resolve())


@contextmanager
def copies() -> Iterator[Path]:
    """Make a temporary folder for copies of bucket/folder; errors name the original."""
    with scratch_folder() as folder:
        scratch = folder.resolve()
        try:
            yield scratch
        except InputError as error:
            raise InputError(str(error).replace(f"{scratch}/", "s3://")) from error


def open_run(location: str, s3: S3Config, scratch: Path) -> Run:
    """Read a run; one in S3 is copied to `scratch` first."""
    if not is_s3(location):
        return read_run(Path(location))
    folder, parts = open_folder(location, s3), location.removeprefix("s3://").split("/")
    check(not {"", ".", ".."} & set(parts), f"{location} is not a folder in S3; write s3://bucket/folder")
    copy = scratch.joinpath(*parts)
    copy.mkdir(parents=True)
    for name in FILES:
        with suppress(FileNotFoundError):
            (copy / name).write_bytes(folder.read(name))
    return replace(read_run(copy), location=location)


def default_output(runs: list[Run]) -> Path:
    """The folder of a report without --output: beside its runs, or in the current folder for runs in S3."""
    first = runs[0]
    if first.location:
        return Path(f"{first.path.name}-report" if len(runs) == 1 else "report")
    return (first.path if len(runs) == 1 else first.path.parent) / "report"


if __name__ == "__main__":
    sys.exit(main())
