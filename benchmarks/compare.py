"""Interleaved rounds of whole runs of several variants, including startup and compiling: medians, spreads and ratios.

    python -m benchmarks.compare [--rounds 3] experiment=demo run_dir=runs/rounds "compare.run=[none,layers]"

The settings are those of `python -m train.compare`, which runs each variant once and writes a report. A difference of a
few per cent between two runs may be noise, so here every round runs all variants, in alternating order, each in
run_dir/round_N/NAME. Ratios compare runs of the same round. After an interruption, the same command continues. Caches
of compiled kernels persist from round to round, so the first round may compile more than the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import spread, table, turns
from train.config import Failure, check
from train.config.train import TOLERANCE, CompareConfig
from train.observe.report.comparison import quality, ratio, work_differences
from train.observe.report.run import Run, read_run
from train.run import compose as cli
from train.tools.variants import Runner, make_variants

MEASURES = {
    "tokens_per_s": "tokens/s during steps",
    "wall_s": "whole run, s",
    "wall_without_compile_s": "whole run without compiling, s",
    "compile_s": "compiling, s",
    "peak_device_bytes": "peak device memory of rank 0, bytes",
    "peak_host_bytes": "peak host memory of rank 0, bytes",
}


def run(given: list[str], rounds: int) -> int:
    first = cli.load_config(CompareConfig, given)
    folders = [f"run_dir={cli.quoted(f'{first.run_dir}/round_{number + 1}')}" for number in range(rounds)]
    kept = [each for each in given if not each.startswith("run_dir=")]
    of_rounds = [make_variants(cli.load_config(CompareConfig, [*kept, own]), [*kept, own]) for own in folders]
    names = [variant.name for variant in of_rounds[0]]
    check(len(names) > 1, "there is only one variant: compare.run must name two or more")
    results: dict[str, list[Run]] = {name: [] for name in names}
    with Runner(first.compare) as runner:
        for number, index in turns(rounds, range(len(names))):
            variant = of_rounds[number][index]
            ending = runner.run(variant)
            if ending.outcome != "done":
                raise Failure(f"{variant.location}: {ending.outcome} {ending.reason}".strip())
            results[names[index]].append(read_run(Path(variant.location).resolve()))
    print_results(results)
    return cli.DONE


def print_results(results: dict[str, list[Run]]) -> None:
    (baseline, bases), *others = results.items()
    rows = []
    for key, label in MEASURES.items():
        rows.append([label, *(spread([run.summary[key] for run in runs], 4) for runs in results.values())])
        rows[-1] += [spread(ratio(run, base, key) for run, base in zip(runs, bases, strict=True)) for _, runs in others]
    head = ["", *results, *(f"{variant} / {baseline}" for variant, _ in others)]
    print(table(head, [row for row in rows if any(row[1:])]), end="\n\n")
    for variant, runs in others:
        for number, (run, base) in enumerate(zip(runs, bases, strict=True), 1):
            work = "; ".join(work_differences(run, base)) or "the same"
            print(f"{variant}, round {number}: {quality(run, base, TOLERANCE)}; work: {work}")


def main() -> int:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("settings", nargs="+", metavar="key=value", help="settings of python -m train.compare")
    options = parser.parse_args()
    cli.add_schema(CompareConfig, "compare", [])
    return cli.guarded(lambda: run(options.settings, options.rounds))


if __name__ == "__main__":
    sys.exit(main())
