"""The record of a run's launches: a folder next to the run folder, local or in S3.

runs/mine/            the run folder, which only the trainer writes
runs/mine.launch/     job.json      the job, which the scheduler's script and every node read
                      plan.json     the plan that was printed
                      config.yaml   the resolved settings of the run
                      code-....tar.gz
                      events/       requests and answers, each a small file that never changes
                      logs/         output of the scheduler's script, and of every node and rank
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from launch.values import count, table, text, texts
from train.config import InputError, S3Config, check
from train.config.checks import LAST_UNIX_S
from train.machine.machine import cache_root
from train.run.command import Parser, add_s3_flags
from train.storage.folders import (
    LocalFolder,
    at_once,
    canonical_json,
    is_s3,
    open_folder,
    sha256_bytes,
)
from train.storage.schema import BadContent, FileName, Sha256, read_object, record

FORMAT = 2
MODULES = {"train": "train", "prepare": "prepare"}
SUFFIX = ".launch"
JOB, PLAN, CONFIG = "job.json", "plan.json", "config.yaml"
EVENTS = "events/"
Kind = TypeVar("Kind")
ENDS = ("done", "stopped", "failed", "refused")


@dataclass(frozen=True)
class Code:
    """The code that the job runs: a bundle in the run's record."""

    file: FileName
    sha256: Sha256
    revision: str  # git's commit, with a plus sign if files were changed; empty outside a checkout


@dataclass(frozen=True)
class Job:
    id: FileName  # name of the run folder, with a checksum of settings and code
    kind: str  # train | prepare
    run_dir: str  # the run folder, or a preparation's output folder
    overrides: list[str]  # settings of train or baretrain prepare
    config_sha256: Sha256  # checksum of the resolved settings
    python: str  # path of the interpreter on the nodes
    folder: str  # the working folder at submission, to which relative paths in the settings refer
    code: Code
    scheduler: str
    cluster: dict[str, Any]  # the scheduler's settings
    instance: str
    nodes: int
    spares: int
    processes_per_node: int
    environment: dict[str, str] = field(default_factory=dict)
    s3: dict[str, Any] = field(default_factory=dict)
    parts: int = 1  # number of parts of a preparation
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
        job = record(cls, values)
        check(job.kind in MODULES, f"the job's kind {job.kind!r} is not known")
        return job

    @property
    def module(self) -> str:
        return MODULES[self.kind]


@dataclass(frozen=True)
class Event:
    kind: str  # submitting, submitted, attempt_began, attempt_ended, gate, stop_asked, requeued, ended, ...
    time_unix_s: float
    host: str
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.time_unix_s < LAST_UNIX_S:  # also true for NaN
            raise BadContent("time_unix_s is not a time that can be shown")


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
        self.s3, self.job_sha256 = s3, job_sha256
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
        return [
            *self.s3.flags(),
            *([f"--job-sha256={self.job_sha256}"] if self.job_sha256 else []),
        ]

    def exists(self) -> bool:
        return self.folder.size(JOB) is not None

    def job(self) -> Job:
        """Return the job of the last submission. Raises InputError if job.json is missing, damaged or changed."""
        try:
            content = self.folder.read(JOB)
        except FileNotFoundError:
            raise InputError(
                f"{self.run_dir} was not launched: {self.location}/{JOB} is missing; baretrain launch list shows the "
                "launched runs"
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
            return record(kind, read_object(self.folder.read(name)))
        except BadContent as error:
            raise InputError(f"{self.location}/{name} cannot be read: {error}") from error

    def write(self, job: Job, *, plan: dict[str, Any], config: str, bundle: bytes) -> None:
        """Write all files that a job needs; job.json last."""
        if self.folder.size(job.code.file) != len(bundle):
            self.folder.write(job.code.file, bundle)
        self.folder.write(CONFIG, config.encode())
        self.folder.write(PLAN, canonical_json(plan))
        self.folder.write(JOB, job.to_json())

    def append_event(self, kind: str, /, **details: Any) -> None:
        while not self.append_event_as(self.next_number(), kind, **details):
            pass  # another process took the number

    def next_number(self) -> int:
        return 1 + max(
            (int(name[len(EVENTS) :].removesuffix(".json")) for name in self.event_names()),
            default=0,
        )

    def append_event_as(self, number: int, kind: str, /, **details: Any) -> bool:
        """Add an event with this number; return False if the number is taken."""
        event = Event(kind, round(time.time(), 3), f"{platform.node()}:{os.getpid()}", details)
        return self.folder.create(f"{EVENTS}{number:05d}.json", canonical_json(asdict(event)))

    def event_names(self) -> list[str]:
        return [
            name
            for name in self.folder.names(EVENTS)
            if re.fullmatch(r"events/\d{5,}\.json", name)
        ]

    def history(self) -> History:
        return read_history(self.events())

    def events(self) -> list[Event]:
        """Return all events in order. Damaged events get the kind "damaged", so that `launch stop` still works."""
        return list(at_once(self.event, self.event_names()))

    def event(self, name: str) -> Event:
        try:
            return record(Event, read_object(self.folder.read(name)))
        except BadContent:
            return Event("damaged", 0.0, "")


# ---- history, from the events ----------------------------------------------------------------------------------------


@dataclass
class Submission:
    """A request to a scheduler to start a job, and the scheduler's identifier of the job."""

    scheduler: str
    time_unix_s: float
    nodes: int | None = None
    # the job's identifier; empty before the scheduler answers
    handle: dict[str, Any] = field(default_factory=dict)
    rejection: str = ""  # why the job could not be started; empty if it could


def attempt_name(number: int) -> str:
    """Return the name of an attempt, which is also the name of its folder in logs/."""
    return f"attempt_{number:04d}"


@dataclass
class AttemptEntry:
    number: int
    nodes: list[str]
    began_unix_s: float
    ended_unix_s: float | None = None
    exit_code: int | None = None
    outcome: str = ""
    reason: str = ""
    step: int | None = None
    checkpoint: int | None = None
    begun_at: int = 0  # step of the newest checkpoint when the attempt began
    next: str = ""  # again | requeue | end
    is_over: bool = False


@dataclass
class Ended:
    outcome: str
    reason: str
    time_unix_s: float


@dataclass
class History:
    """All attempts of a run, and the state of its last submission."""

    submissions: int = 0
    submission: Submission | None = None
    attempts: list[AttemptEntry] = field(default_factory=list)
    attempts_before: int = 0  # number of attempts of earlier submissions
    failed_gate: dict[str, str] = field(default_factory=dict)  # reasons by node
    stop_asked_unix_s: float | None = None
    cancelled_unix_s: float | None = None
    # nodes on which the requeued job must not run
    excluded: list[str] = field(default_factory=list)
    ended: Ended | None = None
    # number of attempts that failed or saved nothing new, plus requeues without an attempt
    faults: int = 0
    idle: int = 0  # number of attempts in a row that saved nothing new; those that never began are not counted
    requeued: str = ""  # why the job was requeued; empty once an attempt begins or the job ends
    is_tried: bool = False  # whether an attempt was made since the last requeue

    @property
    def has_end(self) -> bool:
        return self.ended is not None or self.cancelled_unix_s is not None

    @property
    def is_stop_asked(self) -> bool:
        """True if the user wants no further attempt."""
        return self.stop_asked_unix_s is not None or self.cancelled_unix_s is not None

    @property
    def last_attempt(self) -> AttemptEntry | None:
        """The last attempt of the last submission."""
        return self.attempts[-1] if len(self.attempts) > self.attempts_before else None

    @property
    def running_attempt(self) -> AttemptEntry | None:
        last = self.last_attempt
        return None if last is None or last.is_over or self.ended is not None else last

    def add(self, event: Event) -> None:
        details, last, at_unix_s = event.details, self.last_attempt, event.time_unix_s
        match event.kind:
            case "submitted":
                self.submission = submission_of(event)
            case "not_submitted" if self.submission is not None:
                self.submission.rejection = text(details, "reason") or "rejected"
            case "attempt_began":
                begun_at = count(details, "checkpoint") or 0
                # its machine was lost; only checkpoints show its progress
                if last is not None and not last.is_over:
                    self.add_try(progressed=begun_at > last.begun_at)
                number, nodes = count(details, "number") or 0, texts(details, "nodes")
                self.attempts.append(AttemptEntry(number, nodes, at_unix_s, begun_at=begun_at))
                self.ended, self.is_tried, self.requeued = None, True, ""
            case "refused" if last is not None and details.get("attempt") == attempt_name(
                last.number
            ):
                last.reason = last.reason or text(details, "reason")
            case "attempt_ended" if last is not None:
                last.ended_unix_s, last.exit_code, last.is_over = (
                    at_unix_s,
                    count(details, "exit_code"),
                    True,
                )
                last.step, last.checkpoint = count(details, "step"), count(details, "checkpoint")
                last.outcome, last.reason = text(details, "outcome"), text(details, "reason")
                last.next = text(details, "next")
                self.add_try(
                    progressed=details.get("made_progress") is True,
                    in_order=last.outcome == "stopped",
                    never_began=details.get("never_began") is True,
                )
            case "gate":
                self.failed_gate = {
                    node: str(reason) for node, reason in table(details, "failed").items()
                }
            case "stop_asked":
                self.stop_asked_unix_s = at_unix_s
            case "cancelled":
                self.cancelled_unix_s = at_unix_s
            case "requeued":
                if not self.is_tried:
                    self.add_try(progressed=False, never_began=details.get("never_began") is True)
                self.requeued = text(details, "reason")
                self.excluded = sorted({*self.excluded, *texts(details, "excluded")})
                self.is_tried = False
            case "ended":
                outcome, self.requeued = text(details, "outcome"), ""
                self.ended = Ended(
                    outcome if outcome in ENDS else "ended", text(details, "reason"), at_unix_s
                )

    def add_try(
        self, *, progressed: bool, in_order: bool = False, never_began: bool = False
    ) -> None:
        # an attempt that never began does not count
        self.idle = 0 if progressed else self.idle + (not never_began)
        self.faults += not (progressed and in_order)


def read_history(events: Sequence[Event]) -> History:
    """Return the history from the events. Details of a wrong type count as missing; unknown events are skipped."""
    history = History()
    for event in events:
        if event.kind == "submitting":
            before = history.attempts
            history = History(history.submissions + 1, submission_of(event), before, len(before))
        else:
            history.add(event)
    return history


def submission_of(event: Event) -> Submission:
    details = event.details
    nodes, handle = count(details, "nodes"), table(details, "handle")
    return Submission(text(details, "scheduler"), event.time_unix_s, nodes, handle)
