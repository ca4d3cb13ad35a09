"""The variants of a training run, one after the other: each a `python -m train`, alone or under torchrun."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from subprocess import Popen
from types import FrameType
from typing import NamedTuple

from train.config import InputError, TrainConfig, check, to_dict
from train.config.train import CompareConfig, VariantsConfig
from train.run import compose as cli
from train.run.command import DONE, STOPPED
from train.system import imported, processes
from train.system.folders import canonical_json, open_folder
from train.system.outcome import read_outcome
from train.system.schema import FileName, read_yaml
from train.tasks import build_task


class Variant(NamedTuple):
    name: str
    location: str  # of its run folder
    overrides: list[str]
    cfg: TrainConfig  # the resulting configuration


class Ending(NamedTuple):
    outcome: str  # done | stopped | failed
    reason: str = ""


# ---- what is to be run ---------------------------------------------------------------------------------------------


def make_variants(cfg: CompareConfig, given: Sequence[str]) -> list[Variant]:
    """Return the runs of a comparison, the baseline first. `given`: the overrides that led to `cfg`."""
    common = [override for override in given if not re.match(r"compare[.=]", override)]
    made = {name: make_variant(cfg, common, FileName(name)) for name in {*cfg.compare.names, *cfg.compare.added}}
    return [made[name] for name in cfg.compare.names]


def make_variant(cfg: CompareConfig, common: Sequence[str], name: str) -> Variant:
    location = f"{cfg.run_dir.rstrip('/')}/{name}"
    try:
        own = shlex.split(cfg.compare.variants[name])
    except ValueError as error:
        raise InputError(f"compare.variants: {cfg.compare.variants[name]}: {error}") from error
    is_plain = all("=" in each and not each.startswith("run_dir=") for each in own)
    check(is_plain, f"compare.variants: {name}: {shlex.join(own)} must be settings, key=value, and none is run_dir")
    own.append(f"run_dir={cli.quoted(location)}")
    keys = tuple(f"{override.partition('=')[0]}=" for override in own)
    overrides = [*(override for override in common if not override.startswith(keys)), *own]
    with named(name):
        cli.check_typed(TrainConfig, own)
        return Variant(name, location, overrides, cli.load_config(TrainConfig, overrides))


def settings(cfg: TrainConfig) -> bytes:
    """Return all settings but the run folder, as bytes."""
    return canonical_json({**to_dict(cfg), "run_dir": None})


def check_tasks(variants: Sequence[Variant]) -> None:
    """Raise InputError if a variant that is to be run cannot open its files. Labelled data is prepared here, once."""
    for variant in variants:
        if not is_done(variant):
            with named(variant.name):
                build_task(variant.cfg)


@contextmanager
def named(variant: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"variant {variant}: {error}") from error


# ---- running it ----------------------------------------------------------------------------------------------------


class Runner:
    """A context that runs variants and passes signals on to the running one; after a signal no other is started."""

    def __init__(self, compare: VariantsConfig) -> None:
        self.compare = compare
        self.process: Popen[bytes] | None = None
        self.is_asked_to_stop = False

    def __enter__(self) -> Runner:
        numbers = [each for each in processes.FORWARDED if signal.getsignal(each) != signal.SIG_IGN]  # nohup
        self.before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked_to_stop = True
        if self.process is not None:  # a terminal signals it too: a run counts the same signal within seconds once
            self.process.send_signal(number)

    def run(self, variant: Variant) -> Ending:
        """Run or resume a variant, unless it has ended."""
        if self.is_asked_to_stop:
            return Ending("stopped")
        if is_done(variant):
            print(f"{variant.name}: {variant.location} is done", flush=True)
            return Ending("done")
        ranks = self.compare.ranks
        torchrun = ["-m", "train.system.local_torchrun", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, "-m", "train", *imported.flags(), *variant.overrides]
        folder = open_folder(variant.location, variant.cfg.s3)
        before = read_outcome(folder)
        print(f"{variant.name}: python {shlex.join(command[1:])}", flush=True)
        self.process = processes.start(command, env=os.environ)
        if self.is_asked_to_stop:  # before the process could be signalled
            self.process.terminate()
        code = processes.exit_code(self.process)
        self.process, outcome = None, read_outcome(folder)
        if code == DONE:
            return Ending("done")
        if outcome == before:  # this start left none
            outcome = {}
        # A notice that stops a run, of a machine that goes away, applies to the others too.
        self.is_asked_to_stop |= code == STOPPED or outcome.get("outcome") == "stopped"
        if self.is_asked_to_stop:
            return Ending("stopped")
        return Ending("failed", str(outcome.get("reason") or f"exit code {code}"))


def is_done(variant: Variant) -> bool:
    """Return whether the run has ended with these settings; with others the run itself decides whether to resume."""
    folder = open_folder(variant.location, variant.cfg.s3)
    if read_outcome(folder).get("outcome") == "done":
        with suppress(FileNotFoundError, InputError):
            there = read_yaml(folder.read("config.yaml"))
            return isinstance(there, dict) and canonical_json({**there, "run_dir": None}) == settings(variant.cfg)
    return False
