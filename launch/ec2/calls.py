"""The resources of a run on EC2, their removal, and proof that nothing is left.

Resources are found in two ways: EC2 lists them by tag in every region, even if the launch was killed; and the record of
calls adds those that EC2 may not list yet.

RUN.launch/ec2/calls/0001.json describes a call that makes a resource. The file is written before the call is sent, and
again with EC2's answer: the ids of the new resources, or an error. A file without an answer means that none arrived.

After a call is signed, and before it is sent, the launch reads the record again (`check`). A cancelled launch sends
nothing more, so any call without an answer was signed before the cancellation. Since EC2 rejects signatures older than
SIGNED_S, there is a time by which EC2 must list the resources of that call, if they exist.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from launch.ec2.api import Api
from launch.ec2.request import RUN_TAG, run_id
from launch.ec2.sweep import GONE, UNANSWERED, UNLISTED, Resource, delete, find, sweep
from launch.record import SUBMISSIONS, Record, Request, Submission, file_of
from train.config import Failure
from train.machine.processes import is_gone, owner_name
from train.storage.folders import at_once, canonical_json
from train.storage.schema import BadContent

CALLS = "ec2/calls/"
RUN, SECURITY, PLACEMENT = "run_instances", "create_security_group", "create_placement_group"
KINDS = (
    "spot-instances-request",
    "instance",
    "volume",
    "network-interface",
    "security-group",
    "placement-group",
)
MADE = {RUN: "instance", PLACEMENT: "placement-group", SECURITY: "security-group"}
# EC2's filters
BY_ID = {
    "instance": "instance-id",
    "placement-group": "group-name",
    "security-group": "group-id",
}
SIGNED_S = 900.0  # how long EC2 accepts a signed request (EC2 API reference, RequestExpired)
LISTS_S = 300.0  # how long EC2 may take to list new resources (EC2 API reference, "Eventual consistency")


class Cancelled(Failure):
    """An error raised because, according to the record, this launch must not make any more resources."""


class Superseded(Failure):
    """An error raised because another launch of the run has begun, to which the run's resources now belong."""


@dataclass
class Call:
    number: int  # counted over all launches of the run
    operation: str
    region: str
    submission: str  # id of the resolved settings, see launch.ec2.account
    process: str  # owner_name of the process that makes the call
    sent_unix_s: float
    answered_unix_s: float | None = None
    # ids of machines or of a security group, or a placement group's name
    made: list[str] = field(default_factory=list)
    error: str = ""  # EC2's code, or why there is no answer yet

    def __post_init__(self) -> None:
        if self.operation not in MADE:
            raise BadContent(f"{self.operation!r} is not a call that makes a resource")

    @property
    def file(self) -> str:
        return f"{CALLS}{self.number:04d}.json"

    def write(self, run: Record) -> None:
        run.folder.write(self.file, canonical_json(asdict(self)))

    def listed_unix_s(self, run: Record) -> float:
        """Return the time by which EC2 lists all resources of the call; infinity while its launch may still send it."""
        if self.answered_unix_s is not None:
            return self.answered_unix_s + LISTS_S
        stopped = stopped_unix_s(run, self.submission)
        if stopped is None:
            return float("inf")
        signed_s = 0.0 if is_gone(self.process) else SIGNED_S
        # the later one, because clocks differ
        return max(stopped, self.sent_unix_s) + signed_s + LISTS_S


def stopped_unix_s(run: Record, ident: str) -> float | None:
    """Return when a launch with this id of resolved settings ended, was cancelled or was followed by another."""
    of_launch, later = None, list[float]()
    for name in run.numbered(SUBMISSIONS).values():
        each = run.sound(Submission, name)
        if each is None:
            continue
        if of_launch is not None:
            later.append(each.time_unix_s)
        elif each.handle.get("submission") == ident:
            of_launch = each
    if of_launch is None:
        of_launch = run.last_submission()
    if of_launch is None:
        return None
    request = run.sound(Request, file_of("requests", of_launch.number))
    if request is not None and request.what == "cancel":
        later.append(request.time_unix_s)
    for attempt in run.history().attempts:
        if attempt.submission == of_launch.number and attempt.next == "end":
            later.append(attempt.ended_unix_s or 0.0)
    return min(later, default=None)


def read_calls(run: Record) -> list[Call]:
    """Return all calls of a run, including those of earlier launches. Raises InputError if a file is damaged."""
    return list(at_once(partial(run.read, Call), run.folder.names(CALLS)))


def regions_of(run: Record, more: Iterable[str] = ()) -> list[str]:
    """Return the regions of a run's calls, whose files the run's machines cannot change, and `more`."""
    return list(dict.fromkeys([*(call.region for call in read_calls(run)), *more]))


def begin(run: Record, operation: str, region: str, *, submission: str) -> Call:
    """Record a call that is about to be sent. Raises Superseded if another process took the same number."""
    number = 1 + len(run.folder.names(CALLS))
    call = Call(
        number, operation, region, submission, owner_name(os.getpid()), round(time.time(), 3)
    )
    if not run.folder.create(call.file, canonical_json(asdict(call))):
        raise Superseded(f"another launch of {run.run_dir} has begun; this one ends")
    return call


def check(run: Record, submission: str) -> None:
    """Raise Superseded if another launch has begun, Cancelled if this launch has ended or was cancelled."""
    history = run.history()
    last = history.submission
    if last is None or last.handle.get("submission") != submission:
        raise Superseded(
            f"another launch of {run.run_dir} has begun, or its record is gone; this one ends"
        )
    if history.has_end:
        stop = "cancelled" if history.is_cancelled else "ended"
        raise Cancelled(f"{run.run_dir}: no more resources are made, since the record says {stop}")


# ---- resources -------------------------------------------------------------------------------------------------------


def resources(api: Api, record: Record, regions: Iterable[str], *kinds: str) -> list[Resource]:
    """Return the resources of a run that EC2 lists. It lists removed resources for about an hour."""
    by_run = {f"tag:{RUN_TAG}": [run_id(record)]}
    return [each for region in regions for each in find(api, region, by_run, kinds)]


def left_over(
    api: Api, record: Record, regions: Sequence[str], seen: set[str] | None = None
) -> list[Resource]:
    """Return all resources that a run has or may have. Ids that EC2 has listed are added to `seen`."""
    listed, seen = resources(api, record, regions, *KINDS), set() if seen is None else seen
    seen |= {each.id for each in listed}
    waited = [
        each
        for each in unlisted(record, seen)
        if each.id in seen or not is_of_others(api, record, each)
    ]
    return [*(each for each in listed if each.state not in GONE), *waited]


def is_of_others(api: Api, record: Record, what: Resource) -> bool:
    """Return whether EC2 lists a recorded resource without the run's tag: a forged record may name any resource."""
    if what.state != UNLISTED:
        return False
    found = find(api, what.region, {BY_ID[what.kind]: [what.id]}, [what.kind])
    return any(
        {"Key": RUN_TAG, "Value": run_id(record)} not in each.seen.get("Tags", ())
        for each in found
    )


def unlisted(record: Record, seen: set[str]) -> list[Resource]:
    """Return the requested resources that EC2 may not list yet."""
    left = list[Resource]()
    for call in read_calls(record):
        until_s, kind = call.listed_unix_s(record), MADE[call.operation]
        if time.time() >= until_s:
            continue
        if call.answered_unix_s is None:
            left.append(Resource(call.region, kind, f"of call {call.number}", UNANSWERED, until_s))
        left += [
            Resource(call.region, kind, each, UNLISTED, until_s)
            for each in call.made
            if each not in seen
        ]
    return left


def remove(
    api: Api, record: Record, regions: Sequence[str], *, only: Sequence[str] = KINDS
) -> list[Resource]:
    """Delete all resources of the kinds `only` until none is listed and none can appear; return what is left.

    The caller must make sure that no other process makes resources of the run meanwhile.
    """
    seen = set[str]()
    return sweep(
        lambda: [each for each in left_over(api, record, regions, seen) if each.kind in only],
        lambda found: delete(api, found),
    )
