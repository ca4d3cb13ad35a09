"""The record of a run's launches: a folder beside the run folder, local or in S3.

runs/mine/            the run folder, which only the trainer writes
runs/mine.launch/     job.json      what is started, read by the scheduler's script and every node
                      plan.json     the plan that was printed
                      config.yaml   the resolved settings of the run
                      code-....tar.gz
                      events/       what was asked for and what answered, one small file each, never changed
                      logs/         output of the scheduler's script, of every node and rank
"""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from launch.job import Job
from train.config import InputError, S3Config, check
from train.host.machine import cache_root
from train.storage.folders import LocalFolder, canonical_json, is_s3, open_folder, sha256_bytes
from train.storage.schema import BadContent, read_object, record

SUFFIX = ".launch"
JOB, PLAN, CONFIG = "job.json", "plan.json", "config.yaml"
EVENTS, DAMAGED = "events/", "damaged"
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Event:
    kind: str  # submitting, submitted, attempt_began, attempt_ended, gate, stop_asked, requeued, ended, ...
    time_unix_s: float
    host: str
    details: dict[str, Any] = field(default_factory=dict)


class Record:
    def __init__(self, run_dir: str, s3: S3Config) -> None:
        """The record of the run in `run_dir`, a run folder or its record; it need not exist."""
        self.run_dir = run_dir.rstrip("/").removesuffix(SUFFIX)
        check(bool(self.run_dir.strip("/.")), f"{run_dir} is not the name of a run folder")
        self.location = f"{self.run_dir}{SUFFIX}"
        self.s3 = s3
        self.folder = open_folder(self.location, s3)
        self.run = open_folder(self.run_dir, s3)

    @property
    def is_remote(self) -> bool:
        return is_s3(self.location)

    def local_folder(self) -> Path:
        """A folder of this machine for logs: in the record, or in the cache if the record is in S3."""
        if isinstance(self.folder, LocalFolder):
            return self.folder.path
        return cache_root() / "launch" / sha256_bytes(self.location.encode())[:16]

    def exists(self) -> bool:
        return self.folder.size(JOB) is not None

    def job(self) -> Job:
        """The job of the last submission. InputError if there is none, or if it is damaged."""
        try:
            content = self.folder.read(JOB)
        except FileNotFoundError:
            raise InputError(
                f"{self.run_dir} was not launched: {self.location}/{JOB} is missing; python -m launch list shows those "
                "that were"
            ) from None
        try:
            return Job.from_json(content)
        except BadContent as error:
            raise InputError(f"{self.location}/{JOB} cannot be read: {error}") from error

    def read(self, kind: type[Kind], name: str) -> Kind:
        """A file of the record. InputError if it is damaged."""
        try:
            return record(kind, read_object(self.folder.read(name)))
        except BadContent as error:
            raise InputError(f"{self.location}/{name} cannot be read: {error}") from error

    def write(self, job: Job, *, plan: dict[str, Any], config: str, bundle: bytes) -> None:
        """Write all that a job needs; job.json last."""
        if self.folder.size(job.code.file) != len(bundle):
            self.folder.write(job.code.file, bundle)
        self.folder.write(CONFIG, config.encode())
        self.folder.write(PLAN, canonical_json(plan))
        self.folder.write(JOB, job.to_json())

    def append_event(self, kind: str, /, **details: Any) -> None:
        """Add an event."""
        while not self.append_event_as(self.next_number(), kind, **details):
            pass  # another process was faster

    def next_number(self) -> int:
        """Of an event that is added now."""
        return 1 + max((int(name[len(EVENTS) :].removesuffix(".json")) for name in self.event_names()), default=0)

    def append_event_as(self, number: int, kind: str, /, **details: Any) -> bool:
        """Add an event with this number; False if there is one with it."""
        event = Event(kind, round(time.time(), 3), f"{platform.node()}:{os.getpid()}", details)
        return self.folder.create(f"{EVENTS}{number:05d}.json", canonical_json(asdict(event)))

    def event_names(self) -> list[str]:
        return [name for name in self.folder.names(EVENTS) if re.fullmatch(r"events/\d{5,}\.json", name)]

    def events(self) -> list[Event]:
        """All events in order. One that is damaged is of the kind "damaged": a job must be stopped all the same."""
        return [self.event(name) for name in self.event_names()]

    def event(self, name: str) -> Event:
        try:
            return record(Event, read_object(self.folder.read(name)))
        except BadContent:
            return Event(DAMAGED, 0.0, "", {"name": name})
