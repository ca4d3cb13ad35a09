"""The command `baretrain compare key=value ...`, which trains variants of a run and reports on them."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Sequence

from train.config import check
from train.config.train import TOLERANCE, CompareConfig
from train.machine.console import say
from train.observe.report.texts import printable
from train.run.command import DONE, FAILED, STOPPED
from train.tools.report import check_output, write_report
from train.tools.report import main as report

# A run folder named a=b can be given as ./a=b.
SETTING = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
PURPOSE = """Train a run in several variants, one after the other, and write a report that compares them with the first.
Given run folders instead of settings, only write the report on them, as baretrain report does."""
EXAMPLES = (
    "experiment=compare_squad data.path=rajpurkar/squad run_dir=runs/compare 'compare.run=[none,layers]'",
    "experiment=demo run_dir=runs/sizes 'compare.run=[none,wide]' 'compare.variants={wide: model.hidden_size=512}'",
    "runs/native s3://bucket/runs/compiled --tolerance 0.02 --output reports/compiled",
)
USED: tuple[str, ...] = (
    "run_dir",
    "data.path",
    "compare.run",
    "compare.variants",
    "compare.ranks",
)
USED += ("max_steps", "max_epochs", "micro_batch_size", "seq_len")


def main(arguments: Sequence[str]) -> int:
    given = [each for each in arguments if SETTING.fullmatch(each)]
    if not given and not {"--cfg", "--help", "-h"} & set(arguments):
        return report(arguments)
    from train.run import compose as cli

    cli.add_schema(CompareConfig, "compare", [])
    parser = cli.settings_parser("compare", CompareConfig, PURPOSE, examples=EXAMPLES, keys=USED)
    return cli.run(
        CompareConfig, functools.partial(run_variants, given), parser, arguments=arguments
    )


def run_variants(given: Sequence[str], cfg: CompareConfig) -> int:
    """Run the variants that are not done, write the report, and return the exit code."""
    from train.tools.variants import Runner, check_tasks, make_variants

    check(
        "LOCAL_RANK" not in os.environ,
        "compare starts the ranks itself (compare.ranks); run it without torchrun",
    )
    check_output(None)
    variants = make_variants(cfg, given)
    check(
        len(variants) > 1,
        "there is only one variant: name two or more in compare.run, the baseline first",
    )
    check_tasks(variants)
    with Runner(cfg.compare) as runner:
        endings = {variant.name: runner.run(variant) for variant in variants}
    if any(ending.outcome == "stopped" for ending in endings.values()):
        say("stopped; the same command resumes", file=sys.stderr)
        return STOPPED
    done = [variant.location for variant in variants if endings[variant.name].outcome == "done"]
    failed = {
        name: ending.reason for name, ending in endings.items() if ending.outcome == "failed"
    }
    if done:
        missing = [
            f"{name} is missing here because it failed: {printable(reason)}"
            for name, reason in failed.items()
        ]
        write_report(done, cfg.s3, output=None, tolerance=TOLERANCE, failed=missing)
    for name, reason in failed.items():
        say(f"error: {name}: {reason}", file=sys.stderr)
    return FAILED if failed else DONE
