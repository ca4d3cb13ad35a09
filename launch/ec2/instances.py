"""The machines of a run, which EC2 lists by their tag, even if the launch was killed and its record is gone.

A launch writes into its submission when it asks EC2 for machines, and again when EC2 has answered. Before it asks, it
looks whether it was cancelled. So whoever has cancelled it knows by when EC2 lists the last machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.ec2.api import Api, growing
from launch.ec2.request import RUN_TAG, run_id
from launch.record import SUBMISSIONS, Record, Submission
from launch.values import number, shown_moment, table, text, value
from train.machine.console import say

ASKED = "asked"  # key of a submission's handle: the last request for machines
SIGNED_S = 900.0  # how long EC2 accepts a signed request (EC2 API reference, RequestExpired)
# how long EC2 may take to list new machines (EC2 API reference, "Eventual consistency")
LISTS_S = 300.0
FIRST_S, MOST_S = 5.0, 60.0  # first and longest pause between two looks
LIMIT_S = 1200.0  # machines with many network interfaces take minutes to end


@dataclass(frozen=True)
class Instance:
    region: str
    id: str
    state: str
    seen: Mapping[str, Any]  # EC2's description

    def __str__(self) -> str:
        return f"{self.id} ({self.state}, {self.region})"

    @property
    def is_alive(self) -> bool:
        """True if the machine can train."""
        return self.state in ("pending", "running")

    @property
    def is_left(self) -> bool:
        return self.state != "terminated"


def find(api: Api, record: Record, regions: Iterable[str]) -> list[Instance]:
    """Return the run's machines that EC2 lists. It lists terminated ones for about an hour."""
    by = {f"tag:{RUN_TAG}": [run_id(record)]}
    found = []
    for region in regions:
        for reservation in api.pages(region, "describe_instances", "Reservations", by=by):
            for seen in reservation["Instances"]:
                found.append(Instance(region, seen["InstanceId"], seen["State"]["Name"], seen))
    return found


def terminate(api: Api, machines: Sequence[Instance]) -> None:
    for region in dict.fromkeys(each.region for each in machines):
        ids = [each.id for each in machines if each.region == region]
        api.ask(region, "terminate_instances", InstanceIds=ids)


def end_all(
    api: Api, record: Record, regions: Sequence[str], *, leave_s: float = 0.0
) -> list[Instance]:
    """End the run's machines, and look until none is left and none can appear; return what is left after LIMIT_S.

    For `leave_s`, the machines may end by themselves. The caller must make sure that no launch asks for machines.
    """
    began_s = time.time()
    said = set[str]()
    for pause_s in growing(FIRST_S, MOST_S):
        found = find(api, record, regions)
        left = [each for each in found if each.is_left]
        until_unix_s = listed_unix_s(record, found)
        now_s = time.time()
        if not left and now_s >= until_unix_s:
            return []
        if left and now_s > max(began_s, until_unix_s) + leave_s + LIMIT_S:
            return left
        if now_s >= began_s + leave_s:
            terminate(api, left)
        lines = [f"ending {each}" for each in left]
        if not left:
            lines = [f"EC2 may list a machine until {shown_moment(until_unix_s)}"]
        say(*(line for line in lines if line not in said))
        said |= {*lines}
        time.sleep(pause_s)
    raise AssertionError


# ---- what the submissions say ----------------------------------------------------------------------------------------


def submissions(record: Record) -> list[Submission]:
    found = [record.sound(Submission, name) for name in record.numbered(SUBMISSIONS).values()]
    return [each for each in found if each is not None]


def regions_of(record: Record, more: Iterable[str | None] = ()) -> list[str]:
    """Return the regions in which a launch of the run may have made machines, and `more`."""
    regions = list(more)
    for submission in submissions(record):
        resolved = table(submission.handle, "resolved")
        for site in value(list[dict[str, Any]], resolved, "sites", []):
            regions.append(text(site, "region"))
    return list(dict.fromkeys(filter(None, regions)))


def listed_unix_s(record: Record, found: Sequence[Instance]) -> float:
    """Return the time by which EC2 lists all machines that launches of the run have asked for."""
    ids = {each.id for each in found}
    until_unix_s = 0.0
    for submission in submissions(record):
        asked = table(submission.handle, ASKED)
        asked_unix_s = number(asked, "unix_s")
        if asked_unix_s is None:
            continue
        if asked.get("is_answered") is not True:
            until_unix_s = max(until_unix_s, asked_unix_s + SIGNED_S + LISTS_S)
        elif not ids.issuperset(value(list[str], asked, "machines", [])):
            until_unix_s = max(until_unix_s, asked_unix_s + LISTS_S)
    return until_unix_s
