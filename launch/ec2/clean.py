"""Removal of all that a run has on EC2, and proof that nothing is left: by tag, in every region, looked at twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launch.ec2.api import Api, Refused
from launch.ec2.clock import Clock
from launch.ec2.groups import find_placement_groups
from launch.ec2.machines import ALIVE, GONE, by_run, look

SECOND_LOOK_S = 6.0  # EC2 may show what was made just now only some seconds later
POLL_S, LIMIT_S = 5.0, 1200.0  # machines with many network interfaces take minutes to end
# What a call says of something that is gone already, or that goes as soon as the machines are gone.
PASSING = {"DependencyViolation", "InvalidPlacementGroup.InUse", "InvalidPlacementGroup.Unknown", "VolumeInUse"}
PASSING |= {"InvalidNetworkInterface.InUse", "InvalidParameterValue", "IncorrectState"}
KINDS = ("instance", "spot-instances-request", "volume", "network-interface", "placement-group", "security-group")


@dataclass(frozen=True)
class Left:
    """Something of the run that is still there."""

    region: str
    kind: str  # see KINDS
    id: str
    state: str

    def __str__(self) -> str:
        return f"{self.kind} {self.id} ({self.state}, {self.region})"


def left_over(api: Api, regions: Iterable[str], run_id: str) -> list[Left]:
    """All that EC2 shows of a run. Terminated machines are no longer anything."""
    left = []
    for region in regions:
        machines = [each for each in look(api, [region], run_id) if each.state not in GONE]
        left += [Left(region, "instance", each.id, each.state) for each in machines]
        filters = by_run(run_id)
        for kind, operation, key, ident in (
            (
                "spot-instances-request",
                "describe_spot_instance_requests",
                "SpotInstanceRequests",
                "SpotInstanceRequestId",
            ),
            ("volume", "describe_volumes", "Volumes", "VolumeId"),
            ("network-interface", "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"),
            ("security-group", "describe_security_groups", "SecurityGroups", "GroupId"),
        ):
            for each in api.pages(region, operation, key, Filters=filters):
                state = str(each.get("State") or each.get("Status") or "there")
                if kind != "spot-instances-request" or state in ("open", "active"):
                    left.append(Left(region, kind, str(each[ident]), state))
        for each in find_placement_groups(api, region, filters):
            left.append(Left(region, "placement-group", str(each["GroupName"]), str(each["State"])))
    return sorted(left, key=lambda each: KINDS.index(each.kind))


def remove(
    api: Api,
    regions: Iterable[str],
    run_id: str,
    clock: Clock,
    *,
    say: Callable[[str], None] = lambda _: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Left]:
    """End and delete all of it, again and again until two looks have seen nothing; what is left after LIMIT_S."""
    regions, until_s = list(regions), clock.now() + LIMIT_S
    said: set[str] = set()
    while True:
        left = left_over(api, regions, run_id)
        if not left:
            clock.sleep(SECOND_LOOK_S)
            left = left_over(api, regions, run_id)
        if not left or clock.now() > until_s:
            return left
        for each in left:
            if str(each) not in said:
                said.add(str(each))
                say(f"to be removed: {each}")
        end(api, left)
        meanwhile()
        clock.sleep(POLL_S)


def end(api: Api, left: list[Left]) -> None:
    """One round: machines first, the rest once they are gone."""
    for region in dict.fromkeys(each.region for each in left):
        here = [each for each in left if each.region == region]
        machines = [each for each in here if each.kind == "instance"]
        alive = [each.id for each in machines if each.state in (*ALIVE, "stopping", "stopped")]
        requests = [each.id for each in here if each.kind == "spot-instances-request"]
        if requests:  # first, or one may start another machine
            call(api, region, "cancel_spot_instance_requests", {"SpotInstanceRequestIds": requests})
        if alive:
            call(api, region, "terminate_instances", {"InstanceIds": alive})
        if machines:
            continue
        for each in here:
            if each.kind in DELETES and each.state not in ("in-use", "deleting", "attaching", "detaching"):
                operation, parameter = DELETES[each.kind]
                call(api, region, operation, {parameter: each.id})


DELETES = {
    "volume": ("delete_volume", "VolumeId"),
    "network-interface": ("delete_network_interface", "NetworkInterfaceId"),
    "placement-group": ("delete_placement_group", "GroupName"),
    "security-group": ("delete_security_group", "GroupId"),
}


def call(api: Api, region: str, operation: str, parameters: Mapping[str, Any]) -> None:
    """Delete; what is gone already, or is still in use, is looked at again by the caller."""
    try:
        api.ask(region, operation, **parameters)
    except Refused as error:
        if error.code not in PASSING and not error.code.endswith(".NotFound"):
            raise
