"""The run folder: the only thing a run writes to and the only thing a report reads.

    config.yaml  environment.json  metrics.jsonl  outcome.json  checkpoints/step_00001000/  lease/
    model/  tensorboard/  log/  export/  report/

A folder belongs to one run. Its identity (what is learnt, from which data, in which batches) may not change; where and
how fast it runs, and how long, may. One in S3 has a copy on each machine that is written to, under
`machine.cache_root()/runs`; rank 0's goes up at every checkpoint and at the end. Of the others only their last words
do, and TensorBoard's files and the stacks of a stuck rank stay where they are.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from train import machine
from train.config import (
    InputError,
    Plan,
    RecordsConfig,
    S3Config,
    TrainConfig,
    Unreachable,
    check,
    to_dict,
)
from train.environment import environment
from train.launched import launched
from train.outcome import NAME, Outcome, read_outcome, write_outcome
from train.ownership import LeaseLost, Owned, check_is_run_folder, check_location, check_no_links
from train.run_clock import RunClock
from train.storage import (
    Folder,
    LocalFolder,
    canonical_json,
    is_s3,
    local_path,
    open_folder,
    sha256_bytes,
    sync_file,
    write_atomic,
)

if TYPE_CHECKING:
    from train.s3 import S3Folder

logger = logging.getLogger("train")
MIRRORED = ("environment.json", "config.yaml", "data.json", "metrics.jsonl", "log/rank_0000.txt")


class RunFolder:
    """`folder` is where a run writes: `guard` is called before every change, and raises LeaseLost if the folder is
    another job's by now. `storage` is the same without the guard, for the lease itself.
    """

    def __init__(self, location: str, s3: S3Config | None = None) -> None:
        self.location = location
        if is_s3(location):
            name = f"{sha256_bytes(location.rstrip('/').encode())[:16]}-{platform.node()}"  # the disk may be shared
            self.path = machine.cache_root() / "runs" / name
            self.storage = open_folder(location, s3 or S3Config())
        else:
            self.path = local_path(location)
            self.storage = LocalFolder(self.path)
        self.folder = cast(Folder, Owned(self.storage, self.check_owner))
        self.guard: Callable[[], None] = lambda: None  # of a job; other programs write at their own risk
        self.is_lost = False  # another job owns it: nothing is written any more
        self.is_remote = is_s3(location)
        self.began_s = time.monotonic()
        self.previous: dict[str, Any] = {}  # how the last life ended, once open
        self.mirrored: dict[str, tuple[int, int]] = {}  # time and length of what has gone to S3
        self.versions: dict[str, str] = {}  # of the same files there
        self.mirroring = threading.Lock()
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.export = self.path / "export"
        self.log = self.path / "log"

    def check_is_ours(self, identity: dict[str, Any], *, data_path: str, force: bool) -> None:
        """Refuse a folder that is another run's, or is no run folder at all, before anything is written to it."""
        check_location(self.location, data_path)
        names = self.storage.names_here()
        before = check_is_run_folder(self.storage, names)
        if not self.is_remote:
            check_no_links(self.location)
        if before and names & {"metrics.jsonl", "checkpoints"}:
            check_same_run(before, identity, place=self.location, force=force)

    def check_owner(self) -> None:
        """LeaseLost if the folder is another job's by now."""
        try:
            self.guard()
        except LeaseLost:
            self.is_lost = True
            raise

    def may_append(self) -> bool:
        """Whether this machine's files of the run may still be written: those in S3 have copies, which are our own."""
        try:
            if not self.is_remote:
                self.check_owner()
        except LeaseLost:
            return False
        except (InputError, OSError):  # the lease cannot be read just now: lines wait if they cannot be written either
            pass
        return True

    def open(self) -> None:
        """Make the folder, or this machine's copy of it. Rank 0 removes what earlier attempts said of their end."""
        self.log.mkdir(exist_ok=True)
        if self.is_remote:
            self.exit_path.unlink(missing_ok=True)
        if launched().rank != 0:
            return
        self.previous = self.last_outcome()
        for name in (NAME, *self.folder.names("log/exit_rank_")):
            self.folder.remove(name)
        for name in MIRRORED if self.is_remote else ():
            self.bring_here(name)

    def bring_here(self, name: str) -> None:
        """A file from S3. This machine's own copy stays only if it goes on from there, by whole lines: since it was
        written the run may have been on another machine, or have been removed from S3 for a new one.
        """
        here = self.path / name
        try:
            content = self.folder.read(name)
        except FileNotFoundError:
            here.unlink(missing_ok=True)
            return
        if not (here.is_file() and here.read_bytes().startswith(content[: content.rfind(b"\n") + 1])):
            write_atomic(here, content)

    def describe(
        self, cfg: TrainConfig, identity: dict[str, Any], facts: dict[str, Any], details: dict[str, Any]
    ) -> None:
        """Write config.yaml, environment.json and, if there are details of the data, data.json. Rank 0 calls it."""
        self.check_owner()
        # The environment first: it is what tells the folder from somebody else's.
        found = {
            "identity": identity,
            "first_started_unix_s": self.clock.first_started_unix_s,
            **environment(),
            **facts,
        }
        write_atomic(self.environment, canonical_json(found))
        write_atomic(self.config, OmegaConf.to_yaml(to_dict(cfg)).encode())
        if details:
            write_atomic(self.path / "data.json", canonical_json(details))
        self.mirror()

    @cached_property
    def clock(self) -> RunClock:
        before = json.loads(self.environment.read_bytes()) if self.environment.is_file() else {}
        first = before.get("first_started_unix_s")
        return RunClock(first, age_s=machine.age_s(os.getpid()) if first is None else time.monotonic() - self.began_s)

    def mirror(self) -> None:
        """Bring what rank 0 has written to S3, where the run folder is there, else the metrics to the disk. The caller
        has just checked whose the folder is. The last line may be half written: who goes on from it cuts it off. Also
        the thread that saves calls it; of two calls the later one has the last word.
        """
        with self.mirroring:
            if not self.is_remote and self.metrics.is_file():
                sync_file(self.metrics)
            for name in MIRRORED if self.is_remote else ():
                here = self.path / name
                state = (here.stat().st_mtime_ns, here.stat().st_size) if here.is_file() else None  # before it is read
                if state is not None and self.mirrored.get(name) != state:
                    self.replace(name, here.read_bytes())
                    self.mirrored[name] = state

    def replace(self, name: str, content: bytes) -> None:
        """Write a file of this process to S3. A request that is late, after another job has written it, is refused."""
        remote = cast("S3Folder", self.storage)
        with suppress(FileExistsError, FileNotFoundError):  # also if it was ours, and its answer got lost
            if name in self.versions:
                self.versions[name] = remote.replace(name, content, self.versions[name])
                return
        self.check_owner()
        self.versions[name] = remote.replace(name, content, None)

    def mend_last_line(self) -> None:
        """Cut off a line of the metrics that a killed process left half written, so that the next one is its own."""
        if self.metrics.is_file():
            content = self.metrics.read_bytes()
            if content and not content.endswith(b"\n"):
                with self.metrics.open("rb+") as file:
                    file.truncate(content.rfind(b"\n") + 1)

    @property
    def exit_path(self) -> Path:
        return self.log / f"exit_rank_{launched().rank:04d}.json"

    def exit_file(self, reason: str, step: int | None) -> None:
        """Leave word of how this rank ended."""
        if self.log.is_dir():
            with self.last_words():
                content = canonical_json({"reason": reason, "step": step, "time_unix_s": round(time.time(), 1)})
                if self.is_remote:
                    write_atomic(self.exit_path, content)
                self.folder.write(f"log/{self.exit_path.name}", content)

    def outcome(self, outcome: Outcome, *, is_of_all: bool = False) -> None:
        """Leave word of how the run ended; launchers judge by it. No word means that it was killed. The first rank to
        say so is right: it is the cause of what others say. If all ended in order, what else is there is another job's.
        """
        if self.log.is_dir():
            with self.last_words():
                write_outcome(self.folder, outcome, replaces_all=is_of_all)
                if launched().rank == 0:
                    self.mirror()  # the log tells more

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """Where they cannot be left the log says so: an error here would hide the one they are about."""
        try:
            yield
        except LeaseLost as error:
            logger.warning("%s", error)
        except (InputError, Unreachable, OSError) as error:
            logger.error("no word of the end in %s: %s", self.location, error)

    def last_outcome(self) -> dict[str, Any]:
        """How the last life ended; empty if it left no word."""
        return read_outcome(self.storage)


def identity_of(cfg: TrainConfig, plan: Plan, data_id: str) -> dict[str, Any]:
    """What must stay the same for a run to go on: one flat table of settings."""
    plain = to_dict(cfg)
    sections = {f"{name}.{key}": value for name in ("task", "model", "optim") for key, value in plain[name].items()}
    return {
        "data": data_id,
        "seed": cfg.seed,
        "global_batch_size": plan.global_batch_size,
        **sections,
        **({"data.lengths": cfg.data.lengths} if isinstance(cfg.data, RecordsConfig) else {}),  # the order is by them
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """ "key: old -> new" for each key of two flat tables that differs."""
    now = json.loads(canonical_json(now))
    keys = sorted({**before, **now})
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys if before.get(key) != now.get(key)]


def check_same_run(found: dict[str, Any], identity: dict[str, Any], *, place: object, force: bool) -> None:
    """Raise InputError with all differences if what was found in `place` is of another run, or warn if forced."""
    known = {key: value for key, value in identity.items() if key in found or value}  # not what is new and off
    changed = differences(found, known)
    if changed and force:
        logger.warning("going on, as resume.force=true says, with another run than %s: %s", place, ", ".join(changed))
        return
    check(
        not changed,
        f"{place} is of another run ({', '.join(changed)}); choose another run_dir, or go on with the new settings by "
        "resume.force=true",
    )


def set_up_logging(folder: Path | None, *, may_write: Callable[[], bool] = lambda: True) -> None:
    """Rank 0's messages and anybody's errors to the terminal; every rank's to its own file, once there is a folder."""
    root = logging.getLogger("train")
    root.setLevel(logging.INFO)
    root.propagate = False
    terminal = TerminalHandler(sys.stderr)
    terminal.setLevel(logging.INFO if launched().rank == 0 else logging.ERROR)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    root.handlers = [terminal]
    if folder is not None:
        file = LogFile(folder / f"rank_{launched().rank:04d}.txt")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        file.addFilter(lambda _: may_write())
        root.handlers = [file, terminal]


class LogFile(logging.FileHandler):
    """On a full disk lines are lost here, and still on the terminal: no traceback for each of them."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class TerminalHandler(logging.StreamHandler):
    """Prints above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)
