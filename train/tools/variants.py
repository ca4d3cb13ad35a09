"""The variants of a comparison, and a context that trains them one after the other with `baretrain train`."""

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
from train.machine import processes
from train.machine.console import say
from train.run import compose as cli
from train.run.command import DONE, STOPPED
from train.run_folder.outcome import read_outcome
from train.storage import imported
from train.storage.folders import canonical_json, open_folder
from train.storage.schema import BadContent, FileName, read_yaml
from train.tasks import build_task


class Variant(NamedTuple):
    name: str
    location: str  # run folder
    overrides: list[str]
    cfg: TrainConfig  # configuration with these overrides


class Ending(NamedTuple):
    outcome: str  # done | stopped | failed
    reason: str = ""


# ---- variants ------------------------------------------------------------------------------------------------------


def make_variants(cfg: CompareConfig, given: Sequence[str]) -> list[Variant]:
    """Return the runs of a comparison, the baseline first. `given` are the overrides from which `cfg` was composed."""
    common = [override for override in given if not re.match(r"compare[.=]", override)]
    made = {
        name: make_variant(cfg, common, FileName(name))
        for name in {*cfg.compare.names, *cfg.compare.added}
    }
    return [made[name] for name in cfg.compare.names]


def make_variant(cfg: CompareConfig, common: Sequence[str], name: str) -> Variant:
    location = f"{cfg.run_dir.rstrip('/')}/{name}"
    try:
        own = shlex.split(cfg.compare.variants[name])
    except ValueError as error:
        raise InputError(f"compare.variants: {cfg.compare.variants[name]}: {error}") from error
    is_plain = all("=" in each and not each.startswith("run_dir=") for each in own)
    check(
        is_plain,
        f"compare.variants: {name}: {shlex.join(own)} must be key=value settings without run_dir",
    )
    own.append(f"run_dir={cli.quoted(location)}")
    keys = tuple(f"{override.partition('=')[0]}=" for override in own)
    overrides = [*(override for override in common if not override.startswith(keys)), *own]
    with named(name):
        cli.check_typed(TrainConfig, own)
        return Variant(name, location, overrides, cli.load_config(TrainConfig, overrides))


def check_tasks(variants: Sequence[Variant]) -> None:
    """Raise InputError if files of a variant that is not done cannot be opened. This also prepares labelled data."""
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


# ---- running them --------------------------------------------------------------------------------------------------


class Runner:
    """A context that runs variants and forwards signals to the running one. After a signal, it starts no others."""

    def __init__(self, compare: VariantsConfig) -> None:
        self.compare = compare
        self.process: Popen[bytes] | None = None
        self.is_asked_to_stop = False

    def __enter__(self) -> Runner:
        # A signal that this process ignores, such as SIGHUP under nohup, must remain ignored.
        numbers = [
            each for each in processes.FORWARDED if signal.getsignal(each) != signal.SIG_IGN
        ]
        self.before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked_to_stop = True
        # After Ctrl-C, the run gets two signals; it ignores the second.
        if self.process is not None:
            self.process.send_signal(number)

    def run(self, variant: Variant) -> Ending:
        """Run or resume a variant unless it is done, and return how it ended."""
        if self.is_asked_to_stop:
            return Ending("stopped")
        if is_done(variant):
            say(f"{variant.name}: {variant.location} is done")
            return Ending("done")
        ranks = self.compare.ranks
        torchrun = (
            ["-m", "train.machine.local_torchrun", f"--nproc-per-node={ranks}"]
            if ranks > 1
            else []
        )
        command = [sys.executable, *torchrun, "-m", "train", *imported.flags(), *variant.overrides]
        folder = open_folder(variant.location, variant.cfg.s3)
        before = read_outcome(folder)
        say(f"{variant.name}: python {shlex.join(command[1:])}")
        self.process = processes.start(command, env=os.environ)
        if self.is_asked_to_stop:  # The signal came before the process existed.
            self.process.terminate()
        code = processes.exit_code(self.process)
        self.process, outcome = None, read_outcome(folder)
        if code == DONE:
            return Ending("done")
        if outcome == before:  # The run ended without writing an outcome.
            outcome = {}
        # A notice that stops one run, such as one that EC2 takes the machine back, also stops the other variants.
        self.is_asked_to_stop |= code == STOPPED or outcome.get("outcome") == "stopped"
        if self.is_asked_to_stop:
            return Ending("stopped")
        return Ending("failed", str(outcome.get("reason") or f"exit code {code}"))


def is_done(variant: Variant) -> bool:
    """Return whether the run is done with exactly these settings. If they differ, the run itself decides what to do."""
    folder = open_folder(variant.location, variant.cfg.s3)
    if read_outcome(folder).get("outcome") == "done":
        # TypeError: the file is not a mapping.
        with suppress(FileNotFoundError, BadContent, TypeError):
            settings = read_yaml(folder.read("config.yaml")), to_dict(variant.cfg)
            there, here = (canonical_json({**each, "run_dir": None}) for each in settings)
            return there == here
    return False
