"""What is about to be made on EC2, written into the record before the call; and what came of it.

RUN.launch/ec2/intents/0001.json   the call, without the user's secrets: what, where, and the checksum of the request
              /answers/0001.json   the ids of the machines, or EC2's error; missing if nobody heard the answer
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from launch.record import Record
from train.config import Failure, InputError
from train.storage.folders import canonical_json
from train.storage.untrusted import BadContent, FileName, Sha256, read_object, record

INTENTS, ANSWERS = "ec2/intents/", "ec2/answers/"
Kind = TypeVar("Kind")
RUN, SECURITY, PLACEMENT = "run_instances", "create_security_group", "create_placement_group"


@dataclass(frozen=True)
class Intent:
    number: int
    operation: str
    region: str
    target: str  # the subnet of machines, the VPC of a security group, the name of a placement group
    count: int  # machines
    submission: FileName  # see launch.ec2.resolved
    sha256: Sha256  # of the request
    time_unix_s: float

    @property
    def file(self) -> str:
        return f"{self.number:04d}.json"


@dataclass(frozen=True)
class Answer:
    time_unix_s: float
    instances: list[FileName] = field(default_factory=list)
    error: str = ""  # EC2's code


class Intents:
    """All intents of a run, those of earlier submissions too. One process at a time adds to them."""

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

    def begin(self, intent: Intent) -> Intent:
        """Write an intent. Failure if another process has written one of this number: then that one goes on."""
        if not self.run.folder.create(f"{INTENTS}{intent.file}", canonical_json(asdict(intent))):
            raise Failure(f"another watcher has this run: {self.run.location}/{INTENTS}{intent.file} is not this one's")
        self.all.append(intent)
        return intent

    def end(self, intent: Intent, *, instances: list[str] | None = None, error: str = "") -> None:
        answer = Answer(round(time.time(), 3), [FileName(each) for each in instances or []], error)
        self.run.folder.write(f"{ANSWERS}{intent.file}", canonical_json(asdict(answer)))
        self.answers[intent.number] = answer

    def open(self, operation: str, submission: str) -> list[Intent]:
        """The intents of a submission whose answer nobody heard."""
        return [
            each
            for each in self.all
            if each.operation == operation and each.submission == submission and each.number not in self.answers
        ]


def names(run: Record, prefix: str) -> list[str]:
    return [name for name in run.folder.names(prefix) if re.fullmatch(rf"{prefix}\d{{4,9}}\.json", name)]


def read(run: Record, kind: type[Kind], name: str) -> Kind:
    try:
        return record(kind, read_object(run.folder.read(name)))
    except BadContent as error:
        raise InputError(f"{run.location}/{name} cannot be read: {error}") from error
