"""What a run has on EC2, by its tag: the only source that is true after whatever happened to whoever made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launch.ec2.api import Api
from launch.ec2.request import INTENT_TAG, RUN_TAG

ALIVE = ("pending", "running")
GONE = ("terminated",)


@dataclass(frozen=True)
class Machine:
    id: str
    region: str
    subnet: str
    zone: str
    state: str  # pending, running, shutting-down, terminated, stopping, stopped
    intent: int  # number of the intent that made it
    launch_index: int
    host: str  # as the machine names itself
    launched_unix_s: float
    reason: str  # why it ended, in EC2's words

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def look(api: Api, regions: Iterable[str], run_id: str) -> list[Machine]:
    """All machines of a run that EC2 still shows, in the order in which they were asked for."""
    seen = []
    for region in regions:
        reservations = api.pages(region, "describe_instances", "Reservations", Filters=by_run(run_id))
        seen += [machine(region, each) for made in reservations for each in made["Instances"]]
    return sorted(seen, key=lambda each: (each.intent, each.launch_index, each.id))


def by_run(run_id: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{RUN_TAG}", "Values": [run_id]}]


def machine(region: str, seen: Mapping[str, Any]) -> Machine:
    number = {tag["Key"]: tag["Value"] for tag in seen.get("Tags", ())}.get(INTENT_TAG, "")
    return Machine(
        id=str(seen["InstanceId"]),
        region=region,
        subnet=str(seen.get("SubnetId", "")),
        zone=str(seen.get("Placement", {}).get("AvailabilityZone", "")),
        state=str(seen["State"]["Name"]),
        intent=int(number) if number.isdecimal() else 0,
        launch_index=int(seen.get("AmiLaunchIndex", 0)),
        host=str(seen.get("PrivateDnsName", "")).split(".")[0],
        launched_unix_s=seen["LaunchTime"].timestamp(),
        reason=str(seen.get("StateReason", {}).get("Message", "") or seen.get("StateTransitionReason", "")),
    )
