"""The least that the operator's and the machines' policies must allow. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.ec2.request import RUN_TAG
from train.config import check
from train.storage.folders import is_s3

READS = (
    "CapacityReservations Images InstanceTypeOfferings InstanceTypes Instances NetworkInterfaces PlacementGroups "
    "SecurityGroups SpotInstanceRequests Subnets Volumes"
)
ENDS = (
    "TerminateInstances CancelSpotInstanceRequests DeleteVolume DeleteNetworkInterface DeletePlacementGroup "
    "DeleteSecurityGroup AuthorizeSecurityGroupIngress AuthorizeSecurityGroupEgress"
)
WRITES = ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")
SESSION = (  # of the SSM agent
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)
MADE = ("volume", "network-interface", "spot-instances-request")  # by RunInstances, with tags
USED = ("subnet", "security-group", "placement-group", "capacity-reservation")


def machine_policy(runs: Sequence[str], data: Sequence[str]) -> dict[str, Any]:
    """Of the machines' role: the run's folders, the data, SSM's session. Nothing of EC2."""
    return policy(*folders(runs, writes=True), *folders(data), allow("Session", SESSION, ["*"]))


def trust_policy() -> dict[str, Any]:
    """Who may take the machines' role."""
    principal = {"Service": "ec2.amazonaws.com"}
    return policy({"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"})


def operator_policy(runs: Sequence[str], data: Sequence[str], role: str, account: str) -> dict[str, Any]:
    """Of whoever launches: machines with the run's tag only, which need IMDSv2, and one role to give them."""
    any_of = f"arn:aws:ec2:*:{account}:"
    iam = f"arn:aws:iam::{account}:role/"
    tagged = {"Null": {f"aws:RequestTag/{RUN_TAG}": "false"}}
    makes = ["RunInstances", "CreateSecurityGroup", "CreatePlacementGroup"]
    own = {"Null": {f"ec2:ResourceTag/{RUN_TAG}": "false"}}
    used = [*(f"{any_of}{kind}/*" for kind in USED), "arn:aws:ec2:*::image/*"]
    imds = {"StringEquals": {"ec2:MetadataHttpTokens": "required"}}
    groups = [f"{any_of}security-group/*", f"{any_of}placement-group/*"]
    to_ec2 = {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
    spot, for_spot = f"{iam}aws-service-role/spot.amazonaws.com/*", {"iam:AWSServiceName": "spot.amazonaws.com"}
    in_session = {"Null": {f"ssm:resourceTag/{RUN_TAG}": "false"}}
    return policy(
        allow("Look", [f"ec2:Describe{each}" for each in READS.split()], ["*"]),
        allow("Machines", ["ec2:RunInstances"], [f"{any_of}instance/*"], imds | tagged),
        allow("MadeWithThem", ["ec2:RunInstances"], [f"{any_of}{kind}/*" for kind in MADE], tagged),
        allow("UsedByThem", ["ec2:RunInstances"], used),
        allow("Groups", ["ec2:CreateSecurityGroup", "ec2:CreatePlacementGroup"], groups, tagged),
        allow("InTheVpc", ["ec2:CreateSecurityGroup"], [f"{any_of}vpc/*"]),
        allow("TagOnlyWhatIsMade", ["ec2:CreateTags"], [f"{any_of}*/*"], {"StringEquals": {"ec2:CreateAction": makes}}),
        allow("EndOnlyOwn", [f"ec2:{each}" for each in ENDS.split()], [f"{any_of}*/*"], own),
        allow("GiveOneRole", ["iam:PassRole"], [f"{iam}{role}"], to_ec2),
        allow("Images", ["ssm:GetParameter"], [f"arn:aws:ssm:*:{account}:parameter/baretrain/ami/*"]),
        allow("Quotas", ["servicequotas:ListServiceQuotas"], ["*"]),
        allow("Sessions", ["ssm:StartSession"], [f"{any_of}instance/*"], in_session),
        # For the first spot machine of an account.
        allow("SpotRole", ["iam:CreateServiceLinkedRole"], [spot], {"StringEquals": for_spot}),
        *folders(data),
        *folders(runs, writes=True),
        allow("NoOlderMetadata", ["ec2:ModifyInstanceMetadataOptions"], ["*"]) | {"Effect": "Deny"},
    )


def folders(locations: Sequence[str], *, writes: bool = False) -> list[dict[str, Any]]:
    """Statements about folders in S3."""
    made = []
    for index, location in enumerate(locations):
        check(is_s3(location), f"{location} is no folder in S3, as s3://bucket/runs")
        bucket, _, prefix = location.removeprefix("s3://").strip("/").partition("/")
        below, name = f"{prefix}/*" if prefix else "*", f"{'Write' if writes else 'Read'}{index}"
        actions = ["s3:GetObject", *(WRITES if writes else ())]
        made.append(allow(name, actions, [f"arn:aws:s3:::{bucket}/{below}"]))
        scope = {"StringLike": {"s3:prefix": [below]}}
        made.append(allow(f"{name}List", ["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"], scope))
    return made


def allow(
    ident: str, actions: Sequence[str], resources: Sequence[str], condition: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    made = {"Sid": ident, "Effect": "Allow", "Action": [*actions], "Resource": [*resources]}
    return {**made, "Condition": condition} if condition else made


def policy(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [*statements]}
