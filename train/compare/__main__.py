"""`python -m train.compare A B [...]`: finished runs beside the first one; `python -m train.compare key=value ...`: a
training run in several variants, one after the other, and the same page about them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.cli.command import DONE, EXITS, FAILED, STOPPED, Parser, add_s3_flags, command_parser, guarded, s3_of
from train.config import S3Config, check
from train.config.compare import TOLERANCE, CompareConfig
from train.report.locations import copies, open_run, plain
from train.storage.folders import local_path

if TYPE_CHECKING:
    from train.report.run import Run

SETTING = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)  # a folder with such a name can be written ./a=b
FOLDER = "comparison"  # of the page, beside the runs
PURPOSE = """Compare finished runs with the first one, the baseline: throughput, time, cost, memory, loss, quality.
With settings instead of runs: train a run in several variants, one after the other, and compare these."""
EXAMPLES = (
    "runs/native runs/compiled",
    "runs/native s3://bucket/runs/compiled --tolerance 0.02 --output reports/compiled",
    "experiment=compare_squad data.path=rajpurkar/squad run_dir=runs/compare 'compare.run=[none,layers]'",
)
USED: tuple[str, ...] = ("run_dir", "data.path", "compare.run", "compare.variants", "compare.largest_batch")
USED += (
    "compare.ranks",
    "compare.tolerance",
    "compare.output",
    "max_steps",
    "max_epochs",
    "micro_batch_size",
    "seq_len",
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "--cfg" in arguments or any(SETTING.fullmatch(each) for each in arguments):
        return main_of_variants(arguments)
    return guarded(lambda: compare_runs(folders_parser().parse_args(arguments)))


# ---- finished runs -------------------------------------------------------------------------------------------------


def folders_parser() -> Parser:
    exits = {**EXITS, STOPPED: "stopped on request; the same command goes on"}
    parser = command_parser("train.compare", PURPOSE, examples=EXAMPLES, exits=exits, settings=settings_help)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder, in S3 too; the first is the baseline")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help=f"folder of the page; default: {FOLDER} beside the first run, for one in S3 here",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="SHARE",
        help=f"by which the last validation score may differ from the baseline's and count as equal [{TOLERANCE}]",
    )
    add_s3_flags(parser, caches=False)
    return parser


def settings_help() -> str:
    """Help on the settings, which needs Hydra."""
    from train.cli import compose as cli
    from train.cli.help import settings_help

    cli.add_schema(CompareConfig, "compare", [])
    return settings_help(CompareConfig, "compare", USED)


def compare_runs(options: argparse.Namespace) -> int:
    locations = list(dict.fromkeys(map(plain, options.runs)))
    check(len(locations) > 1, f"{options.runs[0]} alone: give two runs or more, the baseline first")
    check(options.tolerance >= 0, f"--tolerance={options.tolerance:g} must be 0 or more")
    write_page(locations, s3_of(options), output=options.output, tolerance=options.tolerance)
    return DONE


def write_page(
    locations: Sequence[str],
    s3: S3Config,
    *,
    output: str | None,
    tolerance: float,
    failed: Sequence[tuple[str, str]] = (),
) -> None:
    check_page(output)
    from train.compare.page import compare, render, warnings_of

    with copies() as scratch:
        runs = [open_run(location, s3, scratch) for location in locations]
        entries, sentences = compare(runs, tolerance=tolerance)
        folder = default_output(runs[0]) if output is None else local_path(output)
        warnings = warnings_of(entries, failed)
        page = render(entries, sentences, warnings, folder.resolve(), tolerance=tolerance)
    print("\n".join([*sentences, *warnings]))
    print(f"\ncomparison: {page}")


def check_page(output: str | None) -> None:
    """InputError unless a page can be made, and `output` be its folder."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    check(not missing, f"{' and '.join(missing)} not installed: pip install 'baretrain[report]'")
    if output is not None:
        local_path(output)


def default_output(first: Run) -> Path:
    return Path(FOLDER) if first.location else first.path.parent / FOLDER


# ---- variants ------------------------------------------------------------------------------------------------------


def main_of_variants(arguments: Sequence[str]) -> int:
    from train.cli import compose as cli

    cli.add_schema(CompareConfig, "compare", [])
    parser = cli.settings_parser("train.compare", CompareConfig, PURPOSE, examples=EXAMPLES, keys=USED)
    given = [each for each in arguments if SETTING.fullmatch(each)]
    return cli.run(CompareConfig, functools.partial(run_variants, given), parser, arguments=arguments)


def run_variants(given: Sequence[str], cfg: CompareConfig) -> int:
    """Run what has not ended yet, and write the page; returns the exit code."""
    from train.compare.variants import Runner, check_tasks, make_variants

    check("LOCAL_RANK" not in os.environ, "compare starts the ranks itself, by compare.ranks; run it without torchrun")
    check_page(cfg.compare.output)
    variants = make_variants(cfg, given)
    check(len(variants) > 1, "there is one variant only: compare.run names two or more, the baseline first")
    check_tasks(variants)
    with Runner(cfg.compare) as runner:
        endings = {variant.name: runner.run(variant) for variant in variants}
    if any(ending.outcome == "stopped" for ending in endings.values()):
        print("stopped; the same command goes on", file=sys.stderr)
        return STOPPED
    done = [variant.location for variant in variants if endings[variant.name].outcome == "done"]
    failed = [(name, ending.reason) for name, ending in endings.items() if ending.outcome == "failed"]
    if done:
        compared = list(map(plain, done))
        write_page(compared, cfg.s3, output=cfg.compare.output, tolerance=cfg.compare.tolerance, failed=failed)
    for name, reason in failed:
        print(f"error: {name}: {reason}", file=sys.stderr)
    return FAILED if failed else DONE


if __name__ == "__main__":
    sys.exit(main())
