"""The run folder: a run writes its results only to it, and a report reads only from it.

    config.yaml  environment.json  metrics.jsonl  outcome.json  checkpoints/step_00001000/  lease/
    model/  tensorboard/  wandb/  log/  export/  report/

A folder belongs to one run, whose identity (model, data, batches) may not change. If the folder is in S3, each machine
writes to a local copy under `cache_root()/runs`. Rank 0's metrics and log are uploaded at every checkpoint and at the
end, each file as a whole. TensorBoard files, wandb files, stack dumps and the logs of other ranks are never uploaded.
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
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from train.config import (
    InputError,
    LeaseConfig,
    NotPermitted,
    S3Config,
    TrainConfig,
    Unreachable,
    to_dict,
)
from train.machine import host
from train.machine.console import RESULT, LogFormatter, say, speech
from train.machine.environment import environment
from train.machine.launched import launched
from train.machine.processes import age_s
from train.run_folder.identity import (
    ENVIRONMENT,
    check_is_run_folder,
    check_layout,
    check_same_run,
)
from train.run_folder.metrics_files import (
    FOLDER,
    Appender,
    cut_half_written_line,
    files_of,
    next_file,
)
from train.run_folder.metrics_files import NAME as METRICS
from train.run_folder.outcome import NAME, WRITTEN_UNIX_S, Outcome, read_outcome, write_outcome
from train.run_folder.ownership import LeaseLost, OwnedFolder, Ownership
from train.storage.atomic_io import (
    discard,
    said,
    sync,
    temporary_for,
    warn_once,
    write_atomic,
)
from train.storage.folders import (
    Folder,
    LocalFolder,
    canonical_json,
    is_s3,
    local_path,
    open_folder,
    sha256_bytes,
)
from train.storage.schema import BadContent, read_object

logger = logging.getLogger("train")
TERMINAL = threading.RLock()  # for lines of this process
LOG = "log/rank_0000.txt"
CLOCKS_DIFFER_S = 60.0  # by which the clocks of two machines may differ, though both are right


class RunFolder:
    """The files of a run.

    A run writes to `folder`, which raises LeaseLost unless this job is still the owner. `storage` is the same folder
    without this check, for the lease itself. `path` is this machine's copy of a folder in S3, or the folder itself.
    """

    def __init__(
        self, location: str, s3: S3Config | None = None, *, ttl_s: float = LeaseConfig.ttl_s
    ) -> None:
        self.location = location
        self.s3 = s3 or S3Config()
        self.storage = open_folder(location, self.s3)
        self.is_remote = is_s3(location)
        if self.is_remote:
            digest = sha256_bytes(location.rstrip("/").encode())[:16]
            # Machines may share the disk of the cache.
            self.path = host.cache_root() / "runs" / f"{digest}-{platform.node()}"
        else:
            self.path = local_path(location)
        self.ownership = Ownership(self.storage, ttl_s)
        self.folder: Folder = OwnedFolder(self.storage, self.ownership)
        self.began_s = time.monotonic()
        self.previous: dict[str, Any] = {}  # the previous attempt's outcome, set by `open`
        self.uploaded: dict[str, int] = {}  # the lengths of the growing files in S3
        self.mirroring = threading.Lock()
        self.local = LocalFolder(self.path)
        self.environment = self.path / ENVIRONMENT
        self.metrics = self.path / METRICS  # the file with this attempt's lines
        self.lines = Appender(self.metrics)
        self.tensorboard = self.path / "tensorboard"
        self.export = self.path / "export"
        self.log = self.path / "log"
        self.log_file = self.log / f"rank_{launched().rank:04d}.txt"
        self.staging = self.path / "staging"  # files that are being copied to or from S3

    # ---- the start of an attempt ---------------------------------------------------------------------------------

    def check_is_ours(self, identity: dict[str, Any], *, force: bool) -> None:
        """Raise InputError if the folder belongs to another run or is not a run folder. Writes nothing."""
        if not self.is_remote:
            check_layout(self.location)
        names = self.storage.names_here()
        before = check_is_run_folder(self.storage, names)
        if before and names & {METRICS, FOLDER.rstrip("/"), "checkpoints"}:
            check_same_run(before, identity, source=self.location, force=force)

    def open(self) -> None:
        """Make the folder, or this machine's copy of it. Rank 0 removes the outcome of the previous attempt."""
        self.log.mkdir(parents=True, exist_ok=True)
        if launched().rank != 0:
            return
        self.previous = read_outcome(self.storage)
        try:
            self.folder.remove(NAME)
        except NotPermitted:
            self.folder.write(NAME, b"{}")  # an empty outcome counts as none
        if self.is_remote:
            self._fetch_growing()
        if self.is_remote or self.folder.names(FOLDER):
            self.metrics = self.path / next_file(self.storage, self.ownership.number)
            self.lines = Appender(self.metrics)
            self.metrics.parent.mkdir(exist_ok=True)

    def _fetch_growing(self) -> None:
        """Copy the metrics and the log of earlier attempts from S3, unless this machine has a longer copy."""
        in_s3 = [*files_of(self.folder), LOG]
        for name in files_of(self.local):
            if name not in in_s3:  # of a run that was removed from S3
                discard(self.path / name)
        for name in in_s3:
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            copy = temporary_for(path)
            try:
                self.folder.download(name, copy)
            except FileNotFoundError:
                continue
            content = copy.read_bytes()
            self.uploaded[name] = len(content)
            # An attempt that was killed may have left lines here that are not in S3.
            if path.is_file() and path.read_bytes().startswith(content):
                discard(copy)
            else:
                copy.replace(path)

    def put_back_outcome(self) -> None:
        """Undo what `open` did to the previous attempt's outcome, because this attempt is rejected."""
        if launched().rank == 0 and self.previous:
            with self.logging_failures():
                self.folder.write(NAME, canonical_json(self.previous))

    def describe(
        self,
        cfg: TrainConfig,
        identity: dict[str, Any],
        facts: dict[str, Any],
        details: dict[str, Any],
    ) -> None:
        """Write config.yaml, environment.json and, if the data has `details`, data.json. Only rank 0 calls this."""
        description = {
            "identity": identity,
            "first_started_unix_s": self.first_started_unix_s,
            "run_id": self.run_id,
            **environment(),
            **facts,
        }
        # environment.json comes first: it marks the folder as a run folder.
        self._write_here_too(ENVIRONMENT, canonical_json(description))
        self._write_here_too("config.yaml", OmegaConf.to_yaml(to_dict(cfg)).encode())
        if details:
            self._write_here_too("data.json", canonical_json(details))
        else:
            discard(self.path / "data.json")
        self.mirror()

    def _write_here_too(self, name: str, content: bytes) -> None:
        """Write a file to the folder and, if that is in S3, to this machine's copy."""
        self.folder.write(name, content)
        if self.is_remote:
            write_atomic(self.path / name, content)

    @cached_property
    def described(self) -> dict[str, Any]:
        """The content of environment.json before this attempt; {} in the first attempt."""
        try:
            return read_object(self.storage.read(ENVIRONMENT))
        except FileNotFoundError:
            return {}
        except BadContent as error:
            raise InputError(f"{self.location}/{ENVIRONMENT} is damaged: {error}") from error

    @cached_property
    def run_id(self) -> str:
        """The 32 hexadecimal digits by which trackers identify the run. They are the same in all attempts."""
        known = self.described.get("run_id")
        if isinstance(known, str) and re.fullmatch("[0-9a-f]{32}", known):
            return known
        return uuid.uuid4().hex

    @cached_property
    def first_started_unix_s(self) -> float:
        """The Unix time at which the first attempt began, by the clock of that attempt's machine."""
        first = self.described.get("first_started_unix_s")
        if isinstance(first, int | float):
            return float(first)
        return time.time() - age_s(os.getpid())

    def attempt_s(self) -> float:
        return time.monotonic() - self.began_s

    def run_s(self) -> float | None:
        """Return the seconds since the first attempt began, but at least `attempt_s`: machines' clocks differ a little.

        Returns None if one of the clocks was wrong, as on a machine that starts in 1970.
        """
        elapsed_s = time.time() - self.first_started_unix_s
        attempt_s = self.attempt_s()
        if self.first_started_unix_s <= WRITTEN_UNIX_S or elapsed_s <= attempt_s - CLOCKS_DIFFER_S:
            return None
        return max(elapsed_s, attempt_s)

    # ---- metrics and log -----------------------------------------------------------------------------------------

    def mirror(self) -> None:
        """Upload rank 0's metrics and log to S3; on disk, sync the metrics. The caller must have checked the ownership.

        Raises OSError if lines cannot be written: a run that resumes from a checkpoint does not write them again.
        """
        with self.mirroring:
            self.lines.append()
            if self.is_remote:
                self._upload_growing()
            elif self.metrics.is_file():
                sync(self.metrics)

    def _upload_growing(self) -> None:
        for name in (*files_of(self.local), LOG):
            path = self.path / name
            if not path.is_file() or path.stat().st_size == self.uploaded.get(name, 0):
                continue
            content = path.read_bytes()
            self.folder.write(name, content)
            self.uploaded[name] = len(content)

    def cut_half_written_line(self) -> None:
        """Cut off the last line of the metrics if a killed process left it half written."""
        if self.metrics.is_file():
            self.ownership.check()
            cut_half_written_line(self.metrics)

    # ---- the end of an attempt -----------------------------------------------------------------------------------

    def outcome(self, outcome: Outcome, *, is_of_all: bool = False) -> None:
        """Record how the attempt ended. Without this record, launchers assume that the attempt was killed.

        The outcome of the first rank that failed is kept. `is_of_all` says that all ranks ended without a failure: an
        existing outcome is then another attempt's, and is replaced.
        """
        if not self.log.is_dir():
            return
        with self.logging_failures():
            write_outcome(self.folder, outcome, replaces_all=is_of_all)
            if launched().rank == 0:
                self.mirror()

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


def set_up_logging(path: Path | None, *, may_write: Callable[[], bool] = lambda: True) -> None:
    """Send rank 0's messages and every rank's errors to the terminal, and all messages to the file `path`."""
    root = logging.getLogger("train")
    root.setLevel(logging.INFO)
    root.propagate = False
    terminal = TerminalHandler(sys.stderr)
    level = logging.ERROR
    if launched().rank == 0:
        level = RESULT if speech.is_quiet else logging.INFO
    terminal.setLevel(level)
    terminal.setFormatter(LogFormatter("%(message)s"))
    root.handlers = [terminal]
    if path is not None:
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

        # tqdm's own lock is shared with forks, and a fork that is killed while it writes would keep it.
        tqdm.set_lock(TERMINAL)
        tqdm.write(self.format(record), file=sys.stderr)
