"""Removal of all that a run has on EC2, and proof that nothing is left: by tag, in every region, and by the record,
which knows what EC2 may not list yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launch.ec2.api import Api
from launch.ec2.calls import PLACEMENT, RUN, call_names, read_calls
from launch.ec2.machines import by_run
from launch.ec2.request import run_id
from launch.ec2.sweep import UNANSWERED, UNLISTED, Clock, Left, delete, find, sweep
from launch.record import Record
from launch.values import count

KINDS = ("spot-instances-request", "instance", "volume", "network-interface", "security-group", "placement-group")
MADE = {RUN: "instance", PLACEMENT: "placement-group"}  # by calls; else a security group


def left_over(api: Api, record: Record, regions: Sequence[str], seen: set[str], now_unix_s: float) -> list[Left]:
    """All that a run has, and all that it may have. Terminated machines are no longer anything. Ids that EC2 has listed
    are in `seen`, to which this adds.
    """
    filters = by_run(run_id(record))
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
