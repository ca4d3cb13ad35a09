"""What a launch asks EC2 to make, in the record before the call is sent; and the answer.

RUN.launch/ec2/intents/0001.json   the call: what, where, and who makes it
              /answers/0001.json   the ids of what was made, or EC2's error; missing if nobody heard the answer

Before a call is sent, and after it was signed, the launch reads the record again (`Intents.check`): one that was
cancelled sends nothing more. So a call without an answer was signed before the cancellation, and since EC2 rejects
signatures that are older than SIGNED_S, what it makes exists, and is listed, at a time that is known.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from launch.record import Event, Record
from launch.values import count, table
from train.config import Failure, InputError
from train.host.processes import is_alive, read_process
from train.storage.folders import canonical_json
from train.storage.schema import BadContent, FileName, read_object, record

INTENTS, ANSWERS = "ec2/intents/", "ec2/answers/"
RUN, SECURITY, PLACEMENT = "run_instances", "create_security_group", "create_placement_group"
STOPS = ("ended", "cancelling", "cancelled", "cleaning")  # events after which nothing is made
SIGNED_S = 900.0  # that EC2 accepts a signed request for (EC2 API reference, RequestExpired)
LISTS_S = 300.0  # after which EC2 lists what it has made (EC2 API reference, "Eventual consistency")
Kind = TypeVar("Kind")


class Cancelled(Failure):
    """The record says that this launch is to make nothing more."""


class Superseded(Failure):
    """Another launch of the run has begun, to which everything belongs that it has."""


@dataclass(frozen=True)
class Intent:
    number: int
    operation: str
    region: str
    target: str  # the subnet of machines, the VPC of a security group, the name of a placement group
    submission: FileName  # see launch.ec2.resolved
    process: dict[str, Any]  # that makes the call, see own_process
    time_unix_s: float

    @property
    def file(self) -> str:
        return f"{self.number:04d}.json"


@dataclass(frozen=True)
class Answer:
    time_unix_s: float
    made: list[str] = field(default_factory=list)  # ids of machines, of a security group; name of a placement group
    error: str = ""  # EC2's code


class Intents:
    """All intents of a run, those of earlier submissions too."""

    def __init__(self, run: Record) -> None:
        self.run = run
        self.all = [read(run, Intent, name) for name in names(run, INTENTS)]
        heard = {name.rpartition("/")[2]: name for name in names(run, ANSWERS)}
        self.answers = {each.number: read(run, Answer, heard[each.file]) for each in self.all if each.file in heard}

    @property
    def next(self) -> int:
        return max((each.number for each in self.all), default=0) + 1

    @property
    def regions(self) -> list[str]:
        return list(dict.fromkeys(each.region for each in self.all))

    def begin(self, operation: str, region: str, target: str, *, submission: str, now_unix_s: float) -> Intent:
        """Write an intent. Failure if another process has written one of this number: then that one goes on."""
        at = round(now_unix_s, 3)
        intent = Intent(self.next, operation, region, target, FileName(submission), own_process(), at)
        if not self.run.folder.create(f"{INTENTS}{intent.file}", canonical_json(asdict(intent))):
            raise Superseded(f"another launch of {self.run.run_dir} goes on; this one ends")
        self.all.append(intent)
        return intent

    def end(self, intent: Intent, *, now_unix_s: float, made: Iterable[str] = (), error: str = "") -> None:
        answer = Answer(round(now_unix_s, 3), [*made], error)
        self.run.folder.write(f"{ANSWERS}{intent.file}", canonical_json(asdict(answer)))
        self.answers[intent.number] = answer

    def open_until(self, intent: Intent, events: Iterable[Event]) -> float:
        """When EC2 lists whatever an open intent has made; infinity while its launch may still send it."""
        stops = list[float]()
        for event in events:
            if event.kind == "submitted":
                stops = []
            elif event.kind in STOPS:
                stops.append(event.time_unix_s)
        if not stops:
            return float("inf")
        # Clocks differ: what a launch notes after the stop it does not send.
        return max(stops[0], intent.time_unix_s) + LISTS_S + (0.0 if is_running(intent.process) is False else SIGNED_S)


def own_process() -> dict[str, Any]:
    process = read_process(os.getpid())
    return {"host": platform.node(), "pid": os.getpid(), "started": process.started if process else 0}


def is_running(process: Mapping[str, Any]) -> bool | None:
    """Whether the process of `own_process` runs; None: it is of another computer."""
    pid, started = count(process, "pid"), count(process, "started")
    if process.get("host") != platform.node() or pid is None:
        return None
    return is_alive(pid, started)


def check(run: Record, submission: str) -> None:
    """Superseded unless the last submission is this one, Cancelled if something has stopped it."""
    last = next((each for each in reversed(run.events()) if each.kind in ("submitting", "submitted", *STOPS)), None)
    if last is not None and last.kind in STOPS:
        raise Cancelled(f"{run.run_dir}: nothing more is made, since the record says {last.kind}")
    handle = {} if last is None else table(last.details, "handle")
    if handle.get("submission") != submission:
        raise Superseded(f"another launch of {run.run_dir} has begun, or its record is gone; this one ends")


def names(run: Record, prefix: str) -> list[str]:
    return [name for name in run.folder.names(prefix) if re.fullmatch(rf"{prefix}\d{{4,9}}\.json", name)]


def read(run: Record, kind: type[Kind], name: str) -> Kind:
    try:
        return record(kind, read_object(run.folder.read(name)))
    except BadContent as error:
        raise InputError(f"{run.location}/{name} cannot be read: {error}") from error
