"""Whole runs of several variants in interleaved rounds, start-up and compiling included: medians, spreads and ratios.

    python -m benchmarks.compare [--rounds 3] experiment=demo run_dir=runs/rounds "compare.run=[none,layers]"

The settings are those of `python -m train.compare`, which runs each variant once and draws the page: a difference of a
few per cent between two runs may be the machine's. Here every round runs all variants, by turns from the first to the
last and from the last to the first, each into run_dir/round_N/NAME. Ratios are taken within a round. The same command
continues where it was stopped. Caches of compiled kernels are as the rounds before left them: the first round shows it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from train.cli import compose as cli
from train.compare.variants import Runner, Variant, make_variants
from train.config import Failure, check
from train.config.compare import CompareConfig
from train.report.comparison import quality, ratio, work_differences
from train.report.run import Run, read_run

MEASURES = {
    "tokens_per_s": "tokens/s, in steps",
    "wall_s": "whole run, s",
    "wall_without_compile_s": "the same without compiling, s",
    "compile_s": "compiling, s",
    "peak_device_bytes": "peak device memory of rank 0, bytes",
    "peak_host_bytes": "peak host memory of rank 0, bytes",
}
Rounds = dict[str, list[Run]]  # by variant


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", metavar="key=value", help="as of python -m train.compare")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cli.add_schema(CompareConfig, "compare", [])
    return cli.guarded(lambda: run(options.settings, options.rounds))


def run(given: list[str], rounds: int) -> int:
    results: Rounds = {}
    first = cli.load_config(CompareConfig, given)
    with Runner(first.compare) as runner:
        for number in range(1, rounds + 1):
            overrides = [each for each in given if not each.startswith("run_dir=")]
            overrides.append(f"run_dir={cli.quoted(f'{first.run_dir}/round_{number}')}")
            variants = make_variants(cli.load_config(CompareConfig, overrides), overrides)
            check(len(variants) > 1, "there is one variant only: compare.run names two or more")
            ended = {each.name: run_one(runner, each) for each in (variants if number % 2 else variants[::-1])}
            for variant in variants:  # in their own order
                results.setdefault(variant.name, []).append(ended[variant.name])
    print_results(results, first.compare.tolerance)
    return cli.DONE


def run_one(runner: Runner, variant: Variant) -> Run:
    ending = runner.run(variant)
    if ending.outcome != "done":
        raise Failure(f"{variant.location}: {ending.outcome} {ending.reason}".strip())
    return read_run(Path(variant.location).resolve())


def print_results(results: Rounds, tolerance: float) -> None:
    baseline = next(iter(results.values()))
    for key, name in MEASURES.items():
        if not any(run.summary[key] for runs in results.values() for run in runs):
            continue
        print(f"\n{name}")
        for variant, runs in results.items():
            ratios = [ratio(run, base, key) for run, base in zip(runs, baseline, strict=True)]
            times = "" if runs is baseline else f"   {spread(ratios, '{:.3f}')} times"
            print(f"  {variant:24} {spread([run.summary[key] for run in runs], '{:,.4g}')}{times}")
    print()
    for variant, runs in list(results.items())[1:]:
        for number, (run, base) in enumerate(zip(runs, baseline, strict=True), 1):
            differences = work_differences(run, base, same_batch="_batch_" not in variant)
            work = "; ".join(differences) or "the same"
            print(f"{variant}, round {number}: {quality(run, base, tolerance)}; work: {work}")


def spread(values: list[float | None], form: str) -> str:
    """Median, lowest and highest."""
    known = [value for value in values if value is not None]
    if not known:
        return "unknown"
    low, middle, high = (form.format(each) for each in (min(known), statistics.median(known), max(known)))
    return f"{middle} ({low} to {high})" if len(known) > 1 else middle


if __name__ == "__main__":
    sys.exit(main())
