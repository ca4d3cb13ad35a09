"""What a run has on EC2, its removal, and proof that nothing is left: by tag, in every region, which is true whatever
happened to the launch, and by the record, which knows what EC2 may not list yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.ec2.api import Api
from launch.ec2.calls import PLACEMENT, RUN, call_names, read_calls
from launch.ec2.request import RUN_TAG, run_id
from launch.ec2.sweep import UNANSWERED, UNLISTED, Clock, Left, delete, find, sweep
from launch.record import Record
from launch.values import count

KINDS = ("spot-instances-request", "instance", "volume", "network-interface", "security-group", "placement-group")
MADE = {RUN: "instance", PLACEMENT: "placement-group"}  # by calls; else a security group


@dataclass(frozen=True)
class Machine:
    """A machine as EC2 shows it, for an hour after its end too."""

    id: str
    zone: str
    state: str  # pending, running, shutting-down, terminated, stopping, stopped
    host: str  # as the machine names itself
    reason: str  # why it ended, in EC2's words

    @property
    def is_alive(self) -> bool:
        return self.state in ("pending", "running")


def look(api: Api, regions: Iterable[str], record: Record) -> list[Machine]:
    """The machines of a run."""
    seen = []
    for region in regions:
        for made in api.pages(region, "describe_instances", "Reservations", Filters=by_run(record)):
            for each in made["Instances"]:
                reason = each.get("StateReason", {}).get("Message") or each.get("StateTransitionReason", "")
                zone, host = each.get("Placement", {}).get("AvailabilityZone", ""), each.get("PrivateDnsName", "")
                state = str(each["State"]["Name"])
                seen.append(Machine(str(each["InstanceId"]), str(zone), state, str(host).split(".")[0], str(reason)))
    return seen


def by_run(record: Record) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{RUN_TAG}", "Values": [run_id(record)]}]


# ---- removal --------------------------------------------------------------------------------------------------------


def left_over(api: Api, record: Record, regions: Sequence[str], seen: set[str], now_unix_s: float) -> list[Left]:
    """All that a run has, and all that it may have. Terminated machines are no longer anything. Ids that EC2 has listed
    are in `seen`, to which this adds.
    """
    filters = by_run(record)
    listed = [each for region in regions for each in find(api, region, filters, KINDS)]
    seen.update(each.id for each in listed)
    return [each for each in listed if not each.is_gone] + unlisted(record, seen, now_unix_s)


def unlisted(record: Record, seen: set[str], now_unix_s: float) -> list[Left]:
    """What was asked of EC2 since the last proof that nothing was left, as long as it may come to be listed."""
    events, left = record.events(), list[Left]()
    proven = max((count(each.details, "calls") or 0 for each in events if each.kind == "cleaned"), default=0)
    for call in read_calls(record):
        until_s, kind = call.listed_unix_s(events), MADE.get(call.operation, "security-group")
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
    Returns what is left. The record must say by now that the run makes nothing more.
    """
    seen = set[str]()

    def look() -> list[Left]:
        left = left_over(api, record, regions, seen, clock.now())
        return [each for each in left if not only or each.kind in only]

    left = sweep(look, lambda found: delete(api, found), clock, say=say)
    if not left and not only and record.event_names():
        record.append_event("cleaned", regions=[*regions], calls=len(call_names(record)))
    return left
