"""Security groups and placement groups of a run: made once in a VPC or subnet, checked, and found again by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from launch.ec2.api import Api
from train.config import InputError
from train.storage.aws_errors import Rejected

VISIBLE_S, ASKS_S = 30.0, 2.0  # EC2 may not know at once what it has just made
DUPLICATE = ("InvalidGroup.Duplicate", "InvalidPermission.Duplicate", "InvalidPlacementGroup.Duplicate")
UNKNOWN = ("InvalidGroup.NotFound", "InvalidGroupId.Malformed", "InvalidPlacementGroup.Unknown")
CURE = (
    "aws ec2 authorize-security-group-{way} --group-id {group} --ip-permissions "
    "'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group}}}]'"
)


def is_unknown(error: BaseException) -> bool:
    return isinstance(error, Rejected) and error.code in UNKNOWN


def as_soon_as_known(call: Callable[[], Any]) -> Any:
    """Make a call that names something made just now, again while EC2 does not know it."""
    return Retrying(
        retry=retry_if_exception(is_unknown), stop=stop_after_delay(VISIBLE_S), wait=wait_fixed(ASKS_S), reraise=True
    )(call)


def made_once(call: Callable[[], Any]) -> Any:
    """Make something; None if it is there already."""
    try:
        return call()
    except Rejected as error:
        if error.code not in DUPLICATE:
            raise
        return None


# ---- security group --------------------------------------------------------------------------------------------------


def find_security_group(api: Api, region: str, name: str, vpc: str) -> Mapping[str, Any] | None:
    filters = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
    return next(iter(api.pages(region, "describe_security_groups", "SecurityGroups", Filters=filters)), None)


def read_security_group(api: Api, region: str, group: str) -> Mapping[str, Any]:
    seen = as_soon_as_known(lambda: api.ask(region, "describe_security_groups", GroupIds=[group]))
    first: Mapping[str, Any] = seen["SecurityGroups"][0]
    return first


def missing_rules(seen: Mapping[str, Any]) -> list[str]:
    """The directions in which a group does not allow all traffic with itself. 0.0.0.0/0 does not count for EFA."""
    ways = {"ingress": "IpPermissions", "egress": "IpPermissionsEgress"}
    return [
        way for way, key in ways.items() if not any(is_self_rule(rule, seen["GroupId"]) for rule in seen.get(key, ()))
    ]


def is_self_rule(rule: Mapping[str, Any], group: str) -> bool:
    pairs = rule.get("UserIdGroupPairs", ())
    return rule.get("IpProtocol") == "-1" and any(pair.get("GroupId") == group for pair in pairs)


def allow_itself(api: Api, region: str, group: str) -> None:
    """Add the rules that a group lacks, and read them again: EC2 counts, not what was asked."""
    permission = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    for way in missing_rules(read_security_group(api, region, group)):
        operation = f"authorize_security_group_{way}"
        made_once(lambda name=operation: api.ask(region, name, GroupId=group, IpPermissions=permission))  # type: ignore[misc]
    check_rules(read_security_group(api, region, group))


def check_rules(seen: Mapping[str, Any]) -> None:
    """InputError for a group in which machines do not reach one another over EFA: collectives would hang."""
    lacking = missing_rules(seen)
    if lacking:
        group = seen["GroupId"]
        cures = " && ".join(CURE.format(way=way, group=group) for way in lacking)
        raise InputError(
            f"security group {group} does not allow all traffic with itself ({' and '.join(lacking)}), which EFA "
            f"needs; 0.0.0.0/0 does not count: {cures}"
        )


# ---- placement group -------------------------------------------------------------------------------------------------


def find_placement_groups(api: Api, region: str, filters: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are there: a deleted one is shown for a while."""
    seen = api.ask(region, "describe_placement_groups", Filters=list(filters))["PlacementGroups"]
    return [each for each in seen if each.get("State") in ("pending", "available")]
