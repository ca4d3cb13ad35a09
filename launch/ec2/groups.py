"""Security groups and placement groups of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.ec2.api import Api, explained
from train.config import InputError
from train.storage.aws_errors import Rejected

DUPLICATE = "InvalidPermission.Duplicate"
CURE = (
    "aws ec2 authorize-security-group-{way} --group-id {group} --ip-permissions "
    "'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group}}}]'"
)


def read_security_group(api: Api, region: str, group: str) -> Mapping[str, Any]:
    first: Mapping[str, Any] = api.ask(region, "describe_security_groups", GroupIds=[group])["SecurityGroups"][0]
    return first


def allow_itself(api: Api, region: str, group: str) -> None:
    """Let all traffic of a group's members with one another pass, both ways, once EC2 knows the group."""
    with explained(region, "describe_security_groups"):
        api.client(region).get_waiter("security_group_exists").wait(GroupIds=[group])
    permission = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    for way in ("ingress", "egress"):
        try:
            api.ask(region, f"authorize_security_group_{way}", GroupId=group, IpPermissions=permission)
        except Rejected as error:
            if error.code != DUPLICATE:
                raise


def check_rules(seen: Mapping[str, Any]) -> None:
    """InputError for a group in which machines do not reach one another over EFA: collectives would hang."""
    group, cures = seen["GroupId"], []
    for way, key in {"ingress": "IpPermissions", "egress": "IpPermissionsEgress"}.items():
        rules = [rule for rule in seen.get(key, ()) if rule.get("IpProtocol") == "-1"]
        if group not in [pair.get("GroupId") for rule in rules for pair in rule.get("UserIdGroupPairs", ())]:
            cures.append(CURE.format(way=way, group=group))
    if cures:
        raise InputError(
            f"security group {group} does not allow all traffic with itself, which EFA needs; 0.0.0.0/0 does not "
            f"count: {' && '.join(cures)}"
        )


def find_placement_groups(api: Api, region: str, filters: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are there: a deleted one is shown for a while."""
    seen = api.ask(region, "describe_placement_groups", Filters=list(filters))["PlacementGroups"]
    return [each for each in seen if each.get("State") in ("pending", "available")]
