"""Finding and removing tagged resources on EC2: those of a run, and those of an image's build."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.ec2.api import Api, growing
from launch.values import shown_moment
from train.machine.console import say
from train.storage.aws_errors import Rejected

FIRST_S, MOST_S = 5.0, 60.0  # first and longest pause between two rounds
# time limit of a sweep: machines with many network interfaces take minutes to end
LIMIT_S = 1200.0
# Errors about a resource that is already removed, or can be removed once the machines are gone.
PASSING = {
    "DependencyViolation",
    "InvalidPlacementGroup.InUse",
    "InvalidPlacementGroup.Unknown",
    "VolumeInUse",
}
PASSING |= {"InvalidNetworkInterface.InUse", "InvalidParameterValue", "IncorrectState"}
# states of a resource that only the run's record lists
UNLISTED, UNANSWERED = (
    "not listed yet",
    "may exist",
)
# states that forbid deletion
BUSY = (
    "in-use",
    "deleting",
    "attaching",
    "detaching",
    "shutting-down",
)
# EC2 shows removed resources for a while
GONE = (
    "terminated",
    "deleted",
    "closed",
    "cancelled",
    "failed",
    "disabled",
)
KINDS = {  # how to list each kind: operation, key of the answer, key of the id
    "spot-instances-request": (
        "describe_spot_instance_requests",
        "SpotInstanceRequests",
        "SpotInstanceRequestId",
    ),
    "instance": ("describe_instances", "Reservations", "InstanceId"),
    "volume": ("describe_volumes", "Volumes", "VolumeId"),
    "network-interface": (
        "describe_network_interfaces",
        "NetworkInterfaces",
        "NetworkInterfaceId",
    ),
    "security-group": ("describe_security_groups", "SecurityGroups", "GroupId"),
    "placement-group": ("describe_placement_groups", "PlacementGroups", "GroupName"),
    "key-pair": ("describe_key_pairs", "KeyPairs", "KeyName"),
}


@dataclass(frozen=True)
class Resource:
    """A resource that exists or may still appear in the listing."""

    region: str
    kind: str
    id: str
    state: str
    until_unix_s: float = 0.0  # the time by which EC2 lists it, if it exists
    seen: Mapping[str, Any] = field(default_factory=dict)  # EC2's description

    def __str__(self) -> str:
        until = (
            f" until {shown_moment(self.until_unix_s)}" if 0 < self.until_unix_s < math.inf else ""
        )
        return f"{self.kind} {self.id} ({self.state}{until}, {self.region})"

    @property
    def is_alive(self) -> bool:
        """True if the resource is a machine that can train."""
        return self.state in ("pending", "running")


def find(
    api: Api, region: str, by: Mapping[str, Sequence[str]], kinds: Iterable[str]
) -> list[Resource]:
    """Return all resources that EC2 lists for the filters `by`, including removed ones."""
    found = []
    for kind in kinds:
        operation, key, name = KINDS[kind]
        listed = api.pages(region, operation, key, by=by)
        if kind == "instance":
            listed = [each for reservation in listed for each in reservation["Instances"]]
        for each in listed:
            state = each.get("State") or each.get("Status") or "there"
            state = str(state["Name"] if isinstance(state, Mapping) else state)
            found.append(Resource(region, kind, str(each[name]), state, seen=each))
    return found


def delete(api: Api, left: Sequence[Resource]) -> None:
    """Cancel spot requests before they start machines, end machines, and delete all else once no machine is left."""
    for region in dict.fromkeys(each.region for each in left):
        here = [each for each in left if each.region == region and each.state != UNANSWERED]
        spot = [each.id for each in here if each.kind == "spot-instances-request"]
        machines = [each for each in here if each.kind == "instance"]
        if spot:
            call(api, region, "cancel_spot_instance_requests", SpotInstanceRequestIds=spot)
        listed = [each.id for each in machines if each.state not in (UNLISTED, *BUSY)]
        for ids in (listed, *([each.id] for each in machines if each.state == UNLISTED)):
            if ids:  # TerminateInstances fails for the whole batch if one id is not visible yet
                call(api, region, "terminate_instances", InstanceIds=ids)
        for each in here if not machines else ():
            if each.id not in spot and each.state not in BUSY:
                call(
                    api,
                    region,
                    f"delete_{each.kind.replace('-', '_')}",
                    **{KINDS[each.kind][2]: each.id},
                )


def call(api: Api, region: str, operation: str, **parameters: Any) -> None:
    """Call a removal. Errors about resources that are gone or in use are ignored, since the next round looks again."""
    try:
        api.ask(region, operation, **parameters)
    except Rejected as error:
        if error.code not in PASSING and not error.code.endswith((".NotFound", ".Malformed")):
            raise


def sweep(
    look: Callable[[], list[Resource]], remove: Callable[[list[Resource]], None], *, looks: int = 1
) -> list[Resource]:
    """Remove what `look` finds until it finds nothing `looks` times in a row. After LIMIT_S, return what is left."""
    until_s, said, empty = time.time() + LIMIT_S, set[str](), 0
    for pause_s in growing(FIRST_S, MOST_S):
        left = look()
        empty = 0 if left else empty + 1
        last_s = max(
            [until_s, *(each.until_unix_s for each in left if each.until_unix_s < math.inf)]
        )
        if empty == looks or (left and time.time() > last_s):
            return left
        for line in map(str, left):
            if line not in said:
                say(f"to be removed: {line}")
            said.add(line)
        remove(left)
        time.sleep(pause_s)
    raise AssertionError
