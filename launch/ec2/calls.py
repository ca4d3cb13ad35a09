"""What a launch asks EC2 to make: RUN.launch/ec2/calls/0001.json, written before the call is sent, and again with EC2's
answer: the ids of what was made, or its error. A file without an answer: nobody heard it.

Before a call is sent, and after it was signed, the launch reads the record again (`check`): one that was cancelled
sends nothing more. So a call without an answer was signed before the cancellation, and since EC2 rejects signatures
that are older than SIGNED_S, what it makes exists, and is listed, at a time that is known.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.record import Event, Record
from launch.values import count, table
from train.config import Failure, InputError
from train.host.processes import is_alive, read_process
from train.storage.folders import canonical_json
from train.storage.schema import BadContent, read_object, record

CALLS = "ec2/calls/"
RUN, SECURITY, PLACEMENT = "run_instances", "create_security_group", "create_placement_group"
STOPS = ("ended", "cancelling", "cancelled", "cleaning")  # events after which nothing is made
SIGNED_S = 900.0  # that EC2 accepts a signed request for (EC2 API reference, RequestExpired)
LISTS_S = 300.0  # after which EC2 lists what it has made (EC2 API reference, "Eventual consistency")


class Cancelled(Failure):
    """The record says that this launch is to make nothing more."""


class Superseded(Failure):
    """Another launch of the run has begun, to which everything belongs that it has."""


@dataclass
class Call:
    number: int  # counted over all launches of the run
    operation: str
    region: str
    submission: str  # id of what the settings came to, see launch.ec2.account
    process: dict[str, Any]  # that makes the call, see own_process
    sent_unix_s: float
    answered_unix_s: float | None = None
    made: list[str] = field(default_factory=list)  # ids of machines, of a security group; name of a placement group
    error: str = ""  # EC2's code

    @property
    def file(self) -> str:
        return f"{CALLS}{self.number:04d}.json"

    def answer(self, run: Record, *, now_unix_s: float, made: Iterable[str] = (), error: str = "") -> None:
        """Write down what EC2 has answered."""
        self.answered_unix_s, self.made, self.error = round(now_unix_s, 3), [*made], error
        run.folder.write(self.file, canonical_json(asdict(self)))

    def listed_unix_s(self, events: Iterable[Event]) -> float:
        """When EC2 lists whatever the call has made; infinity while its launch may still send it."""
        if self.answered_unix_s is not None:
            return self.answered_unix_s + LISTS_S
        stopped_unix_s = None  # since the last launch
        for event in events:
            if event.kind == "submitted":
                stopped_unix_s = None
            elif event.kind in STOPS and stopped_unix_s is None:
                stopped_unix_s = event.time_unix_s
        if stopped_unix_s is None:
            return float("inf")
        signed_s = 0.0 if is_running(self.process) is False else SIGNED_S
        return max(stopped_unix_s, self.sent_unix_s) + signed_s + LISTS_S  # clocks differ, hence the later one


def call_names(run: Record) -> list[str]:
    return [name for name in run.folder.names(CALLS) if re.fullmatch(rf"{CALLS}\d{{4,9}}\.json", name)]


def read_calls(run: Record) -> list[Call]:
    """All calls of a run, those of earlier launches too. InputError for a file that is damaged."""
    made = []
    for name in call_names(run):
        try:
            made.append(record(Call, read_object(run.folder.read(name))))
        except BadContent as error:
            raise InputError(f"{run.location}/{name} cannot be read: {error}") from error
    return made


def call_regions(run: Record) -> list[str]:
    """Where the run may have something."""
    return list(dict.fromkeys(call.region for call in read_calls(run)))


def begin(run: Record, operation: str, region: str, *, submission: str, now_unix_s: float) -> Call:
    """Write down a call that is about to be sent. Superseded if another process has done so meanwhile."""
    number = 1 + max((int(name.removeprefix(CALLS).removesuffix(".json")) for name in call_names(run)), default=0)
    call = Call(number, operation, region, submission, own_process(), round(now_unix_s, 3))
    if not run.folder.create(call.file, canonical_json(asdict(call))):
        raise Superseded(f"another launch of {run.run_dir} is under way; this one ends")
    return call


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
