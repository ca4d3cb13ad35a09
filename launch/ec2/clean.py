"""Removal of all that a run has on EC2, and proof that nothing is left: by tag, in every region, and by the record,
which knows what EC2 may not list yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.ec2.api import Api, growing
from launch.ec2.calls import PLACEMENT, RUN, call_names, read_calls
from launch.ec2.groups import find_placement_groups
from launch.ec2.machines import ALIVE, GONE, by_run, look
from launch.ec2.request import run_id
from launch.record import Record
from launch.values import count, shown_moment
from train.storage.aws_errors import Rejected

FIRST_S, MOST_S = 5.0, 60.0  # between two looks
LIMIT_S = 1200.0  # machines with many network interfaces take minutes to end
# What a call says of something that is gone already, or that goes as soon as the machines are gone.
PASSING = {"DependencyViolation", "InvalidPlacementGroup.InUse", "InvalidPlacementGroup.Unknown", "VolumeInUse"}
PASSING |= {"InvalidNetworkInterface.InUse", "InvalidParameterValue", "IncorrectState"}
UNLISTED, UNANSWERED = "not listed yet", "may exist"
TAGGED = {  # what describes it: operation, key of the answer, key of the id
    "spot-instances-request": (
        "describe_spot_instance_requests",
        "SpotInstanceRequests",
        "SpotInstanceRequestId",
    ),
    "volume": ("describe_volumes", "Volumes", "VolumeId"),
    "network-interface": ("describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"),
    "security-group": ("describe_security_groups", "SecurityGroups", "GroupId"),
}
KINDS = {RUN: "instance", PLACEMENT: "placement-group"}  # of what calls make; else a security group


@dataclass(frozen=True)
class Clock:
    """The time, which tests replace."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()


@dataclass(frozen=True)
class Left:
    """Something of the run that is there, or that may be."""

    region: str
    kind: str
    id: str
    state: str
    until_unix_s: float = 0.0  # when EC2 will have listed it, if it exists

    def __str__(self) -> str:
        until = f" until {shown_moment(self.until_unix_s)}" if 0 < self.until_unix_s < math.inf else ""
        return f"{self.kind} {self.id} ({self.state}{until}, {self.region})"


def left_over(api: Api, record: Record, regions: Sequence[str], seen: set[str], now_unix_s: float) -> list[Left]:
    """All that a run has, and all that it may have. Terminated machines are no longer anything. Ids that EC2 has listed
    are in `seen`, to which this adds.
    """
    left, ident = [], run_id(record)
    for region in regions:
        machines, filters = look(api, [region], ident), by_run(ident)
        seen.update(each.id for each in machines)
        left += [Left(region, "instance", each.id, each.state) for each in machines if each.state not in GONE]
        for kind, (operation, key, name) in TAGGED.items():
            for each in api.pages(region, operation, key, Filters=filters):
                state = str(each.get("State") or each.get("Status") or "there")
                if kind != "spot-instances-request" or state in ("open", "active"):
                    left.append(Left(region, kind, str(each[name]), state))
        for each in find_placement_groups(api, region, filters):
            left.append(Left(region, "placement-group", str(each["GroupName"]), str(each["State"])))
    seen.update(each.id for each in left)
    return left + unlisted(record, seen, now_unix_s)


def unlisted(record: Record, seen: set[str], now_unix_s: float) -> list[Left]:
    """What was asked of EC2 since the last proof that nothing was left, as long as it may come to be listed."""
    events, left = record.events(), list[Left]()
    proven = max((count(each.details, "calls") or 0 for each in events if each.kind == "cleaned"), default=0)
    for call in read_calls(record):
        until_s, kind = call.listed_unix_s(events), KINDS.get(call.operation, "security-group")
        if call.number <= proven or now_unix_s >= until_s:
            continue
        if call.answered_unix_s is None:
            left.append(Left(call.region, kind, f"of call {call.number}", UNANSWERED, until_s))
        left += [Left(call.region, kind, each, UNLISTED, until_s) for each in call.made if each not in seen]
    return left


def remove(
    api: Api,
    record: Record,
    regions: Sequence[str],
    clock: Clock,
    *,
    say: Callable[[str], None] = lambda _: None,
    only: Sequence[str] = (),
) -> list[Left]:
    """End and delete all of it, or the kinds `only`, until nothing is there and nothing more can come to be listed.
    Returns what is left after LIMIT_S. The record must say by now that the run makes nothing more.
    """
    until_s, seen, said = clock.now() + LIMIT_S, set[str](), set[str]()
    for pause_s in growing(FIRST_S, MOST_S):
        now_s = clock.now()
        left = left_over(api, record, regions, seen, now_s)
        left = [each for each in left if not only or each.kind in only]
        if not left or now_s > max([until_s, *(each.until_unix_s for each in left if each.until_unix_s < math.inf)]):
            break
        for line in [str(each) for each in left if str(each) not in said]:
            said.add(line)
            say(f"to be removed: {line}")
        end(api, left)
        clock.sleep(pause_s)
    if not left and not only and record.event_names():
        record.append_event("cleaned", regions=[*regions], calls=len(call_names(record)))
    return left


def end(api: Api, left: Sequence[Left]) -> None:
    """One round: spot requests before they start a machine, machines, and the rest once the machines are gone."""
    for region in dict.fromkeys(each.region for each in left):
        here = [each for each in left if each.region == region and each.state != UNANSWERED]
        spot = [each.id for each in here if each.kind == "spot-instances-request"]
        machines = [each for each in here if each.kind == "instance"]
        alive = [each.id for each in machines if each.state in (*ALIVE, "stopping", "stopped")]
        if spot:
            call(api, region, "cancel_spot_instance_requests", {"SpotInstanceRequestIds": spot})
        for ids in (alive, *([each.id] for each in machines if each.state == UNLISTED)):
            if ids:  # EC2 ends none of several machines if it does not know one of them yet
                call(api, region, "terminate_instances", {"InstanceIds": ids})
        for each in here if not machines else ():
            if each.kind == "placement-group":
                call(api, region, "delete_placement_group", {"GroupName": each.id})
            elif each.id not in spot and each.state not in ("in-use", "deleting", "attaching", "detaching"):
                call(api, region, f"delete_{each.kind.replace('-', '_')}", {TAGGED[each.kind][2]: each.id})


def call(api: Api, region: str, operation: str, parameters: Mapping[str, Any]) -> None:
    """Delete; what is gone already, or is still in use, is looked at again by the caller."""
    try:
        api.ask(region, operation, **parameters)
    except Rejected as error:
        if error.code not in PASSING and not error.code.endswith((".NotFound", ".Malformed")):
            raise
