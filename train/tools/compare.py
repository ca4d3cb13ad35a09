"""The command `baretrain compare key=value ...`, which trains variants of a run and reports on them."""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from train.config import InputError, TrainConfig, check, to_dict
from train.config.train import VARIANTS, CompareConfig
from train.machine import processes
from train.machine.console import say, speech
from train.observe.report.texts import printable
from train.run import compose as cli
from train.run.command import DONE, FAILED, STOPPED
from train.run_folder.outcome import read_outcome
from train.storage import imported
from train.storage.folders import canonical_json, open_folder
from train.storage.schema import BadContent, FileName, read_yaml
from train.tasks import build_task
from train.tools.report import check_output, write_report

PURPOSE = """Train a run in several variants, one after the other, and write a report that compares them with the first.
For finished runs, baretrain report writes the same report."""
EXAMPLES = (
    "experiment=demo run_dir=runs/rates 'compare.variants={low: optim.lr=1e-3, high: optim.lr=3e-3}'",
    "experiment=compare_squad data.path=rajpurkar/squad run_dir=runs/compare",
    "experiment=demo run_dir=runs/sizes 'compare.variants={narrow: seed=1, wide: model.hidden_size=512}'",
)
USED = (
    "run_dir",
    "data.path",
    "compare.variants",
    "compare.ranks",
    "max_steps",
    "max_epochs",
    "micro_batch_size",
    "seq_len",
)


class Variant(NamedTuple):
    name: str
    location: str  # run folder
    overrides: list[str]
    cfg: TrainConfig  # configuration with these overrides


def main(arguments: Sequence[str]) -> int:
    given = [each for each in arguments if "=" in each and not each.startswith("-")]
    cli.add_schema(CompareConfig, "compare", [])
    parser = cli.settings_parser("compare", CompareConfig, PURPOSE, examples=EXAMPLES, keys=USED)
    run = functools.partial(run_variants, given)
    return cli.run(CompareConfig, run, parser, arguments=arguments)


def run_variants(given: Sequence[str], cfg: CompareConfig) -> int:
    """Run the variants that are not done, write the report, and return the exit code."""
    check(
        "LOCAL_RANK" not in os.environ,
        "compare starts the ranks itself (compare.ranks); run it without torchrun",
    )
    check_output(None)
    variants = make_variants(cfg, given)
    check(
        len(variants) > 1,
        "there is only one variant: name two or more in compare.variants, the baseline first",
    )
    for variant in variants:
        if not is_done(variant):
            with named(variant.name):
                build_task(variant.cfg)  # opens its files, and prepares labelled data
    failed = {}
    try:
        with interruptible():
            for variant in variants:
                reason = run_variant(variant, cfg.compare.ranks)
                if reason:
                    failed[variant.name] = printable(reason)
    except KeyboardInterrupt:
        say("stopped; the same command resumes", file=sys.stderr)
        return STOPPED
    done = [variant.location for variant in variants if variant.name not in failed]
    if done:
        missing = [
            f"{name} is missing here because it failed: {reason}"
            for name, reason in failed.items()
        ]
        write_report(done, cfg.s3, output=None, failed=missing)
    for name, reason in failed.items():
        say(f"error: {name}: {reason}", file=sys.stderr)
    if failed:
        return FAILED
    return DONE


# ---- variants ------------------------------------------------------------------------------------------------------


def make_variants(cfg: CompareConfig, given: Sequence[str]) -> list[Variant]:
    """Return the runs of a comparison, the baseline first. `given` are the overrides from which `cfg` was composed."""
    common = [override for override in given if not re.match(r"compare[.=]", override)]
    made = []
    for name, text in (cfg.compare.variants or VARIANTS).items():
        with named(name):
            made.append(make_variant(cfg, common, FileName(name), text))
    return made


def make_variant(cfg: CompareConfig, common: Sequence[str], name: str, text: str) -> Variant:
    location = f"{cfg.run_dir.rstrip('/')}/{name}"
    try:
        own = shlex.split(text)
    except ValueError as error:
        raise InputError(f"{text}: {error}") from error
    for setting in own:
        is_plain = "=" in setting and not setting.startswith("run_dir=")
        check(is_plain, f"{setting} must be a key=value setting, and not run_dir")
    own.append(f"run_dir={cli.quoted(location)}")
    keys = tuple(f"{override.partition('=')[0]}=" for override in own)
    overrides = [override for override in common if not override.startswith(keys)] + own
    return Variant(name, location, overrides, cli.load_config(TrainConfig, overrides))


def is_done(variant: Variant) -> bool:
    """Return whether the run is done with exactly these settings. If they differ, the run itself decides what to do."""
    folder = open_folder(variant.location, variant.cfg.s3)
    if read_outcome(folder).get("outcome") != "done":
        return False
    with suppress(FileNotFoundError, BadContent, TypeError):  # TypeError: it is not a mapping
        there = {**read_yaml(folder.read("config.yaml")), "run_dir": None}
        here = {**to_dict(variant.cfg), "run_dir": None}
        return canonical_json(there) == canonical_json(here)
    return False


@contextmanager
def named(variant: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"variant {variant}: {error}") from error


# ---- running them --------------------------------------------------------------------------------------------------


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for each signal that asks to stop."""
    before = {number: signal.getsignal(number) for number in processes.FORWARDED}
    for number, handler in before.items():
        # A signal that this process ignores, such as SIGHUP under nohup, must remain ignored.
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_variant(variant: Variant, num_ranks: int) -> str:
    """Run or resume a variant unless it is done. Return why it failed; "" if it is done.

    Raises KeyboardInterrupt, once the run has ended, if it or this process was asked to stop.
    """
    if is_done(variant):
        say(f"{variant.name}: {variant.location} is done")
        return ""
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "train.machine.local_torchrun", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "train", *imported.flags(), *variant.overrides]
    command += ["--quiet"] * speech.is_quiet
    folder = open_folder(variant.location, variant.cfg.s3)
    before = read_outcome(folder)
    say(f"{variant.name}: python {shlex.join(command[1:])}")
    process = processes.start(command, env=os.environ)
    try:
        code = processes.exit_code(process)
    except KeyboardInterrupt:
        # after Ctrl-C in a terminal, the run gets two signals; it ignores the second
        process.send_signal(signal.SIGINT)
        processes.exit_code(process)
        raise
    if code == DONE:
        return ""
    outcome = read_outcome(folder)
    if outcome == before:  # the run ended without writing an outcome
        outcome = {}
    # A notice that stops one run, such as one that EC2 takes the machine back, also stops the other variants.
    if code == STOPPED or outcome.get("outcome") == "stopped":
        raise KeyboardInterrupt
    return str(outcome.get("reason") or f"exit code {code}")
