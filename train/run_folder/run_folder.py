"""The run folder: a run writes its results only to it, and a report reads only from it.

    config.yaml  environment.json  metrics.jsonl  outcome.json  checkpoints/step_00001000/  lease/
    model/  tensorboard/  wandb/  log/  export/  report/

A folder belongs to one run, whose identity (model, data, batches) may not change. If the folder is in S3, each machine
writes to a local copy under `machine.cache_root()/runs`. Rank 0's copy is uploaded at every checkpoint and at the end;
growing files are uploaded in parts (appended.py). The other ranks upload only their exit records. TensorBoard files,
wandb files and stack dumps are never uploaded.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from train.config import (
    InputError,
    LeaseConfig,
    NotPermitted,
    S3Config,
    TrainConfig,
    Unreachable,
    to_dict,
)
from train.machine import machine
from train.machine.console import LogFormatter, say
from train.machine.environment import environment
from train.machine.launched import launched
from train.machine.processes import age_s
from train.run_folder.appended import Appender, Mirrored, back
from train.run_folder.identity import check_is_run_folder, check_layout, check_same_run
from train.run_folder.outcome import NAME, WRITTEN_UNIX_S, Outcome, read_outcome, write_outcome
from train.run_folder.ownership import LeaseLost, OwnedFolder, Ownership
from train.storage.atomic_io import (
    discard,
    make_alike,
    open_alike,
    said,
    sync,
    warn_once,
    write_atomic,
)
from train.storage.folders import (
    Folder,
    LocalFolder,
    at_once,
    canonical_json,
    is_s3,
    local_path,
    open_folder,
    sha256_bytes,
)
from train.storage.schema import BadContent, read_object

logger = logging.getLogger("train")
MIRRORED = ("environment.json", "config.yaml", "data.json")
# seconds for which a record of an attempt's end is retried, and the pauses
END_PATIENCE_S, END_PAUSE_S = (
    6.0,
    0.5,
)
GROWING = ("metrics.jsonl", "log/rank_0000.txt")
CLOCKS_DIFFER_S = 60.0  # by which the clocks of two machines may differ, though both are right


class RunFolder:
    """The files of a run.

    A run writes to `folder`, which raises LeaseLost unless this job is still the owner. `storage` is the same folder
    without this check, for the lease itself.
    """

    def __init__(
        self, location: str, s3: S3Config | None = None, *, ttl_s: float = LeaseConfig.ttl_s
    ) -> None:
        self.location, self.s3 = location, s3 or S3Config()
        self.storage, self.is_remote = open_folder(location, self.s3), is_s3(location)
        name = f"{sha256_bytes(location.rstrip('/').encode())[:16]}-{platform.node()}"  # machines may share this disk
        self.path = (
            machine.cache_root() / "runs" / name if self.is_remote else local_path(location)
        )
        self.ownership = Ownership(self.storage, ttl_s)
        self.folder: Folder = OwnedFolder(self.storage, self.ownership)
        self.began_s = time.monotonic()
        self.previous: dict[str, Any] = {}  # the previous attempt's outcome, set by `open`
        self.removed: dict[
            str, bytes
        ] = {}  # the records that `open` removed, except exit records in S3
        # the local outcome that `open` removed, if the run folder is in S3
        self.local_outcome: bytes | None = None
        # the length of this rank's log before this attempt; None: there was no log
        self.log_bytes: int | None = None
        self.mirrored: dict[
            str, tuple[int, int]
        ] = {}  # modification time and length of each file at its last upload
        self.versions: dict[str, str] = {}  # the versions of the uploaded files in S3
        self.mirroring = threading.Lock()
        self.growing = {name: Mirrored(self.path / name, name) for name in GROWING}
        # this machine's copy of a folder in S3, or the run folder itself
        self.local = LocalFolder(self.path)
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.lines = Appender(self.metrics)  # the lines that rank 0 writes
        self.tensorboard = self.path / "tensorboard"
        self.export = self.path / "export"
        self.log = self.path / "log"
        self.log_file = self.log / f"rank_{launched().rank:04d}.txt"
        self.staging = self.path / "staging"  # files that are being copied to or from S3

    def check_is_ours(self, identity: dict[str, Any], *, force: bool) -> None:
        """Raise InputError if the folder belongs to another run or is not a run folder. Writes nothing."""
        if not self.is_remote:
            check_layout(self.location)
        names = self.storage.names_here()
        before = check_is_run_folder(self.storage, names)
        if before and names & {"metrics.jsonl", "checkpoints"}:
            check_same_run(before, identity, source=self.location, force=force)

    def open(self) -> None:
        """Make the folder, or this machine's copy of it. Rank 0 removes the records of how earlier attempts ended."""
        # `take_back` undoes this. If S3 and this machine both have an outcome, the one in S3 is newer.
        make_alike(self.log)
        self.log_bytes = self.log_file.stat().st_size if self.log_file.exists() else None
        if self.is_remote:
            discard(self.exit_path)
        if launched().rank != 0:
            return
        last_owner = self.ownership.previous
        is_elsewhere = last_owner is not None and last_owner["host"] != platform.node()
        self.previous = read_outcome(self.storage) if is_elsewhere else self.last_outcome()
        if self.is_remote and (self.path / NAME).is_file():
            self.local_outcome = (self.path / NAME).read_bytes()
        try:
            self._take_away(NAME)
            list(at_once(self._take_away, self.folder.names("log/exit_rank_")))
        except NotPermitted:
            self.folder.write(NAME, b"{}")  # an empty outcome counts as none
        if self.is_remote:
            discard(self.path / NAME)
            for name in MIRRORED:
                try:
                    write_atomic(self.path / name, self.folder.read(name))
                except FileNotFoundError:
                    discard(self.path / name)
            for each in self.growing.values():
                each.download(self.folder)

    def _take_away(self, name: str) -> None:
        """Remove a record of the previous attempt, and keep it for `take_back` (not exit records in S3: too many)."""
        if name == NAME or not self.is_remote:
            with suppress(FileNotFoundError):
                self.removed[name] = self.folder.read(name)
        self.folder.remove(name)

    def take_back(self) -> None:
        """Undo `open` after a rejected start. Only the owner may shorten a log file."""
        with self.logging_failures():
            self.ownership.check()
            if self.log_bytes is None:
                self.log_file.unlink(missing_ok=True)
            elif launched().rank == 0:
                os.truncate(self.log_file, self.log_bytes)
            for name, content in self.removed.items():
                self.folder.write(name, content)
            if self.local_outcome is not None:
                write_atomic(self.path / NAME, self.local_outcome)

    def describe(
        self,
        cfg: TrainConfig,
        identity: dict[str, Any],
        facts: dict[str, Any],
        details: dict[str, Any],
    ) -> None:
        """Write config.yaml, environment.json and, if the data has `details`, data.json. Only rank 0 calls this."""
        self.ownership.check()
        # environment.json comes first: it marks the folder as a run folder.
        description = {
            "identity": identity,
            "first_started_unix_s": self.first_started_unix_s,
            "run_id": self.run_id,
            **environment(),
            **facts,
        }
        write_atomic(self.environment, canonical_json(description))
        write_atomic(self.path / "config.yaml", OmegaConf.to_yaml(to_dict(cfg)).encode())
        if details:
            write_atomic(self.path / "data.json", canonical_json(details))
        self.mirror()

    @cached_property
    def described(self) -> dict[str, Any]:
        """The content of environment.json before this attempt; {} in the first attempt."""
        try:
            return read_object(self.environment.read_bytes()) if self.environment.is_file() else {}
        except BadContent as error:
            raise InputError(f"{self.environment} is damaged: {error}") from error

    @cached_property
    def run_id(self) -> str:
        """The 32 hexadecimal digits by which trackers identify the run. They are the same in all attempts."""
        known = self.described.get("run_id")
        return (
            known
            if isinstance(known, str) and re.fullmatch("[0-9a-f]{32}", known)
            else uuid.uuid4().hex
        )

    @cached_property
    def first_started_unix_s(self) -> float:
        """The Unix time at which the first attempt began, by the clock of that attempt's machine."""
        first = self.described.get("first_started_unix_s")
        return float(first) if isinstance(first, int | float) else time.time() - age_s(os.getpid())

    def attempt_s(self) -> float:
        return time.monotonic() - self.began_s

    def run_s(self) -> float | None:
        """Return the seconds since the first attempt began, but at least `attempt_s`: machines' clocks differ a little.

        Returns None if one of the clocks was wrong, as on a machine that starts in 1970.
        """
        elapsed_s, attempt_s = time.time() - self.first_started_unix_s, self.attempt_s()
        is_known = (
            self.first_started_unix_s > WRITTEN_UNIX_S and elapsed_s > attempt_s - CLOCKS_DIFFER_S
        )
        return max(elapsed_s, attempt_s) if is_known else None

    def mirror(self) -> None:
        """Upload rank 0's files to S3; on disk, sync the metrics. The caller must have just checked the ownership.

        Raises OSError if lines cannot be written: a run that resumes from a checkpoint does not write them again.
        """
        with self.mirroring:
            self.lines.append()
            if not self.is_remote and self.metrics.is_file():
                sync(self.metrics)
            for name in (*MIRRORED, *GROWING) if self.is_remote else ():
                path = self.path / name
                # before reading it
                state = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else None
                if state is not None and self.mirrored.get(name) != state:
                    if name in self.growing:
                        self.growing[name].upload(
                            self.folder, self.replace, f"{self.ownership.number:08d}"
                        )
                    else:
                        self.replace(name, path.read_bytes())
                    self.mirrored[name] = state

    def replace(self, name: str, content: bytes) -> None:
        """Write a file of this job to S3. S3 rejects a delayed request if another job has written the file since."""
        # also raised if S3's response to our first request was lost
        with suppress(FileExistsError, FileNotFoundError):
            if name in self.versions:
                self.versions[name] = self.storage.replace(name, content, self.versions[name])
                return
        self.ownership.check()
        self.versions[name] = self.storage.replace(name, content, None)

    def cut_half_written_line(self) -> None:
        """Cut off the last line of the metrics if a killed process left it half written."""
        if self.metrics.is_file():
            self.ownership.check()
            with self.metrics.open("rb+") as file:
                if half := next(back(file, 0)):
                    file.truncate(file.seek(0, os.SEEK_END) - len(half))

    @property
    def exit_path(self) -> Path:
        return self.log / f"exit_rank_{launched().rank:04d}.json"

    def exit_file(self, reason: str, step: int | None) -> None:
        """Write this rank's exit record."""
        if self.log.is_dir():
            content = canonical_json(
                {"reason": reason, "step": step, "time_unix_s": round(time.time(), 1)}
            )
            if self.is_remote:
                self.at_end(lambda: write_atomic(self.exit_path, content))
            self.at_end(lambda: self.folder.write(f"log/{self.exit_path.name}", content))

    def outcome(self, outcome: Outcome, *, is_of_all: bool = False) -> None:
        """Record how the attempt ended. Without this record, launchers assume that the attempt was killed.

        The outcome of the first rank that failed is kept. `is_of_all` says that all ranks ended without a failure: an
        existing outcome is then another attempt's, and is replaced. An outcome that cannot be written to S3 is written
        on this machine.
        """
        if self.log.is_dir():
            is_written = self.at_end(
                lambda: write_outcome(self.folder, outcome, replaces_all=is_of_all)
            )
            if not is_written and self.is_remote and not self.ownership.lost:
                self.at_end(lambda: write_outcome(self.local, outcome, replaces_all=is_of_all))
            if is_written and launched().rank == 0:
                self.at_end(self.mirror)

    def at_end(self, action: Callable[[], object]) -> bool:
        """Call `action`, which records the attempt's end, and return whether it succeeded. A failure is logged.

        On a disk, it is repeated for a while. S3Folder has already done so.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(OSError if self.is_remote else (InputError, OSError)),
            stop=stop_after_delay(END_PATIENCE_S),
            wait=wait_fixed(END_PAUSE_S),
            reraise=True,
        )
        with self.logging_failures():
            retrying(action)
            return True
        return False

    @contextmanager
    def logging_failures(self) -> Iterator[None]:
        """Log a failure to record the attempt's end. Raising it would hide the error that ended the attempt."""
        try:
            yield
        except LeaseLost as error:
            logger.warning("%s", error)
        except (InputError, Unreachable, OSError) as error:
            logger.error(
                "the end of this attempt cannot be recorded in %s: %s", self.location, error
            )

    def last_outcome(self) -> dict[str, Any]:
        """Return how the last attempt ended; {} if it left no outcome in S3 or on this machine."""
        return read_outcome(self.storage) or read_outcome(self.local)


def set_up_logging(path: Path | None, *, may_write: Callable[[], bool] = lambda: True) -> None:
    """Send rank 0's messages and every rank's errors to the terminal, and all messages to the file `path`."""
    root = logging.getLogger("train")
    root.setLevel(logging.INFO)
    root.propagate = False
    terminal = TerminalHandler(sys.stderr)
    terminal.setLevel(logging.INFO if launched().rank == 0 else logging.ERROR)
    terminal.setFormatter(LogFormatter("%(message)s"))
    root.handlers = [terminal]
    if path is not None:
        open_alike(
            path, "ab"
        ).close()  # the handler alone would create a file that everybody can read
        file = LogFile(path)
        file.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))
        file.addFilter(lambda _: may_write())
        root.handlers = [file, terminal]


@contextmanager
def side_channel(what: str) -> Iterator[None]:
    """Log the first failure of the block as a warning: training continues without `what`. Raises LeaseLost."""
    try:
        yield
    except LeaseLost:
        raise
    except Exception as error:  # libraries that cannot be imported raise anything
        reason = (str(error).splitlines() or [""])[0]
        warn_once(
            ("side channel", what), f"{what}: {type(error).__name__}: {reason}; the run continues"
        )


class LogFile(logging.FileHandler):
    """A log file. Text that the disk does not take is kept in its buffer; logging would print a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        if ("log", self.baseFilename) not in said:
            said.add(("log", self.baseFilename))
            say(
                f"cannot write to {self.baseFilename}: {sys.exc_info()[1]}; the run continues",
                file=sys.stderr,
            )


class TerminalHandler(logging.StreamHandler):
    """A handler that prints above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)
