"""The record of a run's launches: a folder next to the run folder, local or in S3.

runs/mine/            the run folder, which only the trainer writes
runs/mine.launch/     job.json      the job, which the scheduler's script and every node read
                      config.yaml   the resolved settings of the run
                      code-....tar.gz
                      submissions/  0001.json: a request to the scheduler, and the scheduler's answer
                      requests/     0001.json: what the user asked of submission 1, to stop or to be cancelled
                      attempts/     0001.json: the status of an attempt; 0001.txt: why the trainer rejected it
                      logs/         output of the scheduler's script, and of every node and rank

The user's computer writes submissions and requests. The supervisor of the job writes an attempt's file when the attempt
begins, and again when it ends. If the supervisor is lost, the file keeps no end: the next supervisor adds it, and until
then the scheduler says whether the job still exists.
"""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from train.config import InputError, S3Config, check
from train.config.checks import LAST_UNIX_S
from train.machine.host import cache_root
from train.run.command import Parser, add_s3_flags, printable
from train.storage.folders import (
    LocalFolder,
    at_once,
    canonical_json,
    is_s3,
    open_folder,
    sha256_bytes,
)
from train.storage.schema import BadContent, FileName, Sha256, read_object, record

FORMAT = 4
SUFFIX = ".launch"
JOB, CONFIG = "job.json", "config.yaml"
SUBMISSIONS, REQUESTS, ATTEMPTS = "submissions", "requests", "attempts"
ATTEMPT = "attempt_"  # the start of an attempt's name
STOP, CANCEL = "stop", "cancel"  # what the user can ask of a job
ENDS = ("done", "stopped", "failed", "refused")
AGAIN, REQUEUE, END = "again", "requeue", "end"  # what follows an attempt
Kind = TypeVar("Kind")


# ---- files of a record -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """The code that the job runs: a bundle in the run's record."""

    file: FileName
    sha256: Sha256
    revision: str  # git's commit, with a plus sign if files were changed; empty outside a checkout


@dataclass(frozen=True)
class Job:
    id: FileName  # name of the run folder, with a checksum of settings and code
    run_dir: str
    overrides: list[str]  # settings of the run
    config_sha256: Sha256  # checksum of the resolved settings
    python: str  # path of the interpreter on the nodes
    folder: str  # the working folder at submission, to which relative paths in the settings refer
    code: Code
    scheduler: str
    cluster: dict[str, Any]  # the scheduler's settings
    instance: str
    nodes: int
    processes_per_node: int
    environment: dict[str, str] = field(default_factory=dict)
    s3: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> bytes:
        return canonical_json(asdict(self))

    @property
    def sha256(self) -> str:
        return sha256_bytes(self.to_json())

    @classmethod
    def from_json(cls, content: bytes) -> Job:
        """Parse a job. Raises BadContent if the content is not a job, InputError if another version wrote it."""
        values = read_object(content)
        check(
            values.get("format") == FORMAT,
            f"the job has format {values.get('format')!r}; this version reads {FORMAT}: use the version that wrote it",
        )
        return record(cls, values)


@dataclass(frozen=True)
class Submission:
    """A request to a scheduler to start a job, and the scheduler's identifier of the job."""

    number: int
    scheduler: str
    nodes: int
    time_unix_s: float
    handle: dict[str, Any] = field(default_factory=dict)  # empty before the scheduler answers
    rejection: str = ""  # why the job could not be started; empty if it could

    def __post_init__(self) -> None:
        check_time(self.time_unix_s)


@dataclass(frozen=True)
class Request:
    """A request of the user about a submission: STOP or CANCEL."""

    what: str
    time_unix_s: float

    def __post_init__(self) -> None:
        check_time(self.time_unix_s)


@dataclass(frozen=True)
class Attempt:
    """The status of an attempt of a job. The first one of a job on its machines includes their preflight."""

    number: int  # counted over all submissions
    submission: int
    nodes: list[str]
    host: str  # the supervisor's machine and process
    began_unix_s: float
    begun_at: int  # step of the newest checkpoint when the attempt began
    is_training: bool = False  # whether the preflight is over
    ended_unix_s: float | None = None
    outcome: str = ""  # done | stopped | failed | refused
    reason: str = ""
    step: int | None = None
    checkpoint: int | None = None
    next: str = ""  # again | requeue | end
    never_began: bool = False  # whether the scheduler did not start the trainer

    def __post_init__(self) -> None:
        check_time(self.began_unix_s)
        check_time(self.ended_unix_s or 0.0)
        if self.outcome not in ("", *ENDS):
            raise BadContent("outcome is not known")

    @property
    def is_over(self) -> bool:
        return self.ended_unix_s is not None

    @property
    def has_saved(self) -> bool:
        """True if the attempt left a newer checkpoint."""
        return (self.checkpoint or 0) > self.begun_at


def check_time(unix_s: float) -> None:
    if not 0 <= unix_s < LAST_UNIX_S:  # also true for NaN
        raise BadContent("a time in it cannot be shown")


def attempt_name(number: int) -> str:
    """Return the name of an attempt, which is also the name of its folder in logs/."""
    return f"{ATTEMPT}{number:04d}"


# ---- history ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """All attempts of a run, its last submission, and what the user asked of this submission."""

    submission: Submission | None = None
    request: Request | None = None
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def of_submission(self) -> list[Attempt]:
        number = self.submission.number if self.submission is not None else 0
        return [attempt for attempt in self.attempts if attempt.submission == number]

    @property
    def last_attempt(self) -> Attempt | None:
        """The last attempt of the last submission."""
        attempts = self.of_submission
        if attempts:
            return attempts[-1]
        return None

    @property
    def running_attempt(self) -> Attempt | None:
        last = self.last_attempt
        if last is not None and not last.is_over:
            return last
        return None

    @property
    def ended(self) -> Attempt | None:
        """The attempt with which the last submission's job ended; None if it has not ended."""
        last = self.last_attempt
        if last is not None and last.next == END:
            return last
        return None

    @property
    def is_stop_asked(self) -> bool:
        """True if the user wants no further attempt."""
        return self.request is not None

    @property
    def is_cancelled(self) -> bool:
        return self.request is not None and self.request.what == CANCEL

    @property
    def has_end(self) -> bool:
        return self.ended is not None or self.is_cancelled

    @property
    def faults(self) -> int:
        """The number of the submission's attempts that failed or saved nothing new."""
        over = [attempt for attempt in self.of_submission if attempt.is_over]
        return sum(attempt.outcome != "stopped" or not attempt.has_saved for attempt in over)

    @property
    def idle(self) -> int:
        """The number of last attempts in a row that saved nothing new. Those that never began are not counted."""
        number = 0
        for attempt in reversed(self.of_submission):
            if attempt.is_over and attempt.has_saved:
                break
            if attempt.is_over and not attempt.never_began:
                number += 1
        return number


# ---- the record ------------------------------------------------------------------------------------------------------


def add_record_flags(parser: Parser) -> None:
    add_s3_flags(parser, caches=False)
    parser.add_argument(
        "--job-sha256", metavar="DIGEST", default="", help="checksum that job.json must have"
    )


class Record:
    def __init__(self, run_dir: str, s3: S3Config, job_sha256: str = "") -> None:
        """Open a run's record. `run_dir` is the run folder or its record; neither has to exist.

        `job_sha256` is the checksum that job.json must have. If it is empty, any job is accepted.
        """
        self.run_dir = run_dir.rstrip("/").removesuffix(SUFFIX)
        check(bool(self.run_dir.strip("/.")), f"{run_dir} is not the name of a run folder")
        self.location = f"{self.run_dir}{SUFFIX}"
        self.s3 = s3
        self.job_sha256 = job_sha256
        self.folder = open_folder(self.location, s3)
        self.run = open_folder(self.run_dir, s3)

    @property
    def is_remote(self) -> bool:
        return is_s3(self.location)

    def local_folder(self) -> Path:
        """Return this machine's folder for logs: the record or, if the record is in S3, a folder in the cache."""
        if isinstance(self.folder, LocalFolder):
            return self.folder.path
        return cache_root() / "launch" / sha256_bytes(self.location.encode())[:16]

    def flags(self) -> list[str]:
        """Return the flags of `add_record_flags` with which another program opens this record."""
        flags = list(self.s3.flags())
        if self.job_sha256:
            flags.append(f"--job-sha256={self.job_sha256}")
        return flags

    # ---- the job ----

    def exists(self) -> bool:
        return self.folder.size(JOB) is not None

    def job(self) -> Job:
        """Return the job of the last submission. Raises InputError if job.json is missing, damaged or changed."""
        try:
            content = self.folder.read(JOB)
        except FileNotFoundError:
            raise InputError(
                f"{self.run_dir} was not launched: {self.location}/{JOB} is missing"
            ) from None
        found = sha256_bytes(content)
        check(
            self.job_sha256 in ("", found),
            f"{self.location}/{JOB} was changed: its sha256 is {found}, but the launched job had "
            f"{self.job_sha256}; launch the run again",
        )
        try:
            return Job.from_json(content)
        except BadContent as error:
            raise InputError(f"{self.location}/{JOB} cannot be read: {error}") from error

    def read(self, kind: type[Kind], name: str) -> Kind:
        """Read a file of the record. Raises InputError if it is damaged."""
        try:
            return self._read(kind, name)
        except BadContent as error:
            raise InputError(f"{self.location}/{name} cannot be read: {error}") from error

    def _read(self, kind: type[Kind], name: str) -> Kind:
        return record(kind, read_object(self.folder.read(name)))

    def write(self, job: Job, *, config: str, bundle: bytes) -> None:
        """Write all files that a job needs; job.json last."""
        if self.folder.size(job.code.file) != len(bundle):
            self.folder.write(job.code.file, bundle)
        self.folder.write(CONFIG, config.encode())
        self.folder.write(JOB, job.to_json())

    # ---- submissions and requests ----

    def numbered(self, folder: str) -> dict[int, str]:
        """Return the names of the files folder/0001.json, folder/0002.json, ..., by number, in order."""
        pattern = re.compile(rf"{folder}/(\d{{4,9}})\.json", re.ASCII)
        found = {}
        for name in self.folder.names(f"{folder}/"):
            match = pattern.fullmatch(name)
            if match is not None:
                found[int(match[1])] = name
        return dict(sorted(found.items()))

    def next_submission(self) -> int:
        return 1 + max(self.numbered(SUBMISSIONS), default=0)

    def claim(self, number: int, scheduler: str, nodes: int) -> Submission | None:
        """Record a submission before the scheduler is asked; return None if another launch has taken the number."""
        submission = Submission(number, scheduler, nodes, now_unix_s())
        if self.folder.create(file_of(SUBMISSIONS, number), to_json(submission)):
            return submission
        return None

    def keep_answer(self, submission: Submission) -> None:
        """Write a submission again, with the scheduler's answer."""
        self.folder.write(file_of(SUBMISSIONS, submission.number), to_json(submission))

    def last_submission(self) -> Submission | None:
        """Return the last submission. A damaged one counts as missing, so that it hides no job."""
        for name in reversed(self.numbered(SUBMISSIONS).values()):
            submission = self.sound(Submission, name)
            if submission is not None:
                return submission
        return None

    def ask(self, what: str) -> None:
        """Record that the user wants the last submission's job to stop (STOP) or to be cancelled (CANCEL)."""
        submission = self.last_submission()
        if submission is not None:
            request = Request(what, now_unix_s())
            self.folder.write(file_of(REQUESTS, submission.number), to_json(request))

    # ---- attempts ----

    def begin(self, nodes: list[str], begun_at: int) -> Attempt | None:
        """Record a new attempt; return None if another program has taken its number."""
        submission = self.last_submission()
        attempt = Attempt(
            number=1 + max(self.numbered(ATTEMPTS), default=0),
            submission=submission.number if submission is not None else 0,
            nodes=nodes,
            host=f"{platform.node()}:{os.getpid()}",
            began_unix_s=now_unix_s(),
            begun_at=begun_at,
        )
        name = file_of(ATTEMPTS, attempt.number)
        if self.folder.create(name, to_json(attempt)):
            return attempt
        # S3's answer to the first request may have been lost, and the request repeated.
        there = self.sound(Attempt, name)
        return there if there == attempt else None

    def keep(self, attempt: Attempt) -> None:
        """Write the status of an attempt again."""
        self.folder.write(file_of(ATTEMPTS, attempt.number), to_json(attempt))

    def reject(self, attempt: str, reason: str) -> None:
        """Record why the trainer rejected the attempt with this name. Any machine of the attempt may do so."""
        name = FileName(f"{attempt.removeprefix(ATTEMPT)}.txt")
        self.folder.write(f"{ATTEMPTS}/{name}", reason.encode())

    def rejection(self, number: int) -> str:
        """Return why the trainer rejected an attempt; "" if it did not."""
        try:
            content = self.folder.read(f"{ATTEMPTS}/{number:04d}.txt")
        except FileNotFoundError:
            return ""
        return printable(content.decode(errors="replace"))

    # ---- history ----

    def history(self) -> History:
        """Read the history of the run. Damaged files count as missing: the run's machines may have written them."""
        submission = self.last_submission()
        request = None
        if submission is not None:
            request = self.sound(Request, file_of(REQUESTS, submission.number))
        read = partial(self.sound, Attempt)
        attempts = at_once(read, self.numbered(ATTEMPTS).values())
        return History(submission, request, [each for each in attempts if each is not None])

    def sound(self, kind: type[Kind], name: str) -> Kind | None:
        """Return the content of a file; None if the file is missing or damaged."""
        try:
            return self._read(kind, name)
        except (FileNotFoundError, BadContent):
            return None


def now_unix_s() -> float:
    return round(time.time(), 3)


def file_of(folder: str, number: int) -> str:
    return f"{folder}/{number:04d}.json"


def to_json(values: Any) -> bytes:
    return canonical_json(asdict(values))
