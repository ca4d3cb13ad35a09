"""The least that the operator's and the machines' policies must allow. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch.ec2.request import RUN_TAG
from train.config import check
from train.storage.folders import is_s3

VERSION = "2012-10-17"
READS = (
    "CapacityReservations Images InstanceTypeOfferings InstanceTypes Instances NetworkInterfaces PlacementGroups "
    "SecurityGroups SpotInstanceRequests SpotPriceHistory Subnets Volumes"
)
MADE = ("instance", "volume", "network-interface", "spot-instances-request")  # tagged by RunInstances
USED = ("image", "subnet", "security-group", "placement-group", "capacity-reservation")


def statement(ident: str, actions: Sequence[str], resources: Sequence[str], **rest: Any) -> dict[str, Any]:
    return {"Sid": ident, "Effect": "Allow", "Action": [*actions], "Resource": [*resources], **rest}


def arns(kinds: Sequence[str], account: str) -> list[str]:
    return [f"arn:aws:ec2:*::{kind}/*" if kind == "image" else f"arn:aws:ec2:*:{account}:{kind}/*" for kind in kinds]


def buckets(locations: Sequence[str], *, writes: bool) -> list[dict[str, Any]]:
    """Statements about folders in S3."""
    made = []
    for index, location in enumerate(locations):
        check(is_s3(location), f"{location} is no folder in S3, as s3://bucket/runs")
        bucket, _, prefix = location.removeprefix("s3://").strip("/").partition("/")
        below = f"{prefix}/*" if prefix else "*"
        verbs = ["s3:GetObject", *(["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"] if writes else [])]
        ident = f"{'Write' if writes else 'Read'}{index}"
        made.append(statement(ident, verbs, [f"arn:aws:s3:::{bucket}/{below}"]))
        scope = {"StringLike": {"s3:prefix": [below]}}
        made.append(statement(f"{ident}List", ["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"], Condition=scope))
    return made


def machine_policy(runs: Sequence[str], data: Sequence[str]) -> dict[str, Any]:
    """Of the machines' role: the run's folders, the data, SSM's session. Nothing of EC2."""
    session = ["ssm:UpdateInstanceInformation", "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel"]
    session += ["ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel"]
    made = [*buckets(runs, writes=True), *buckets(data, writes=False), statement("Session", session, ["*"])]
    return {"Version": VERSION, "Statement": made}


def trust_policy() -> dict[str, Any]:
    """Who may take the machines' role."""
    principal = {"Service": "ec2.amazonaws.com"}
    return {
        "Version": VERSION,
        "Statement": [{"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"}],
    }


def operator_policy(runs: Sequence[str], data: Sequence[str], role: str, account: str) -> dict[str, Any]:
    """Of whoever launches: machines with the run's tag only, which need IMDSv2, and one role to give them."""
    tagged = {"Null": {f"aws:RequestTag/{RUN_TAG}": "false"}}
    own = {"Null": {f"ec2:ResourceTag/{RUN_TAG}": "false"}}
    makes = ["RunInstances", "CreateSecurityGroup", "CreatePlacementGroup"]
    groups = ["ec2:AuthorizeSecurityGroupIngress", "ec2:AuthorizeSecurityGroupEgress", "ec2:DeleteSecurityGroup"]
    ends = ["ec2:TerminateInstances", "ec2:CancelSpotInstanceRequests", "ec2:DeleteVolume"]
    ends += ["ec2:DeleteNetworkInterface", "ec2:DeletePlacementGroup", *groups]
    imds = {"StringEquals": {"ec2:MetadataHttpTokens": "required"}, **tagged}
    return {
        "Version": VERSION,
        "Statement": [
            statement("Look", [f"ec2:Describe{each}" for each in READS.split()], ["*"]),
            statement("Machines", ["ec2:RunInstances"], arns(MADE[:1], account), Condition=imds),
            statement("MadeWithThem", ["ec2:RunInstances"], arns(MADE[1:], account), Condition=tagged),
            statement("UsedByThem", ["ec2:RunInstances"], arns(USED, account)),
            statement(
                "Groups",
                ["ec2:CreateSecurityGroup", "ec2:CreatePlacementGroup"],
                arns(["security-group", "placement-group"], account),
                Condition=tagged,
            ),
            statement("InTheVpc", ["ec2:CreateSecurityGroup"], arns(["vpc"], account)),
            statement(
                "TagOnlyWhatIsMade",
                ["ec2:CreateTags"],
                [f"arn:aws:ec2:*:{account}:*/*"],
                Condition={"StringEquals": {"ec2:CreateAction": makes}},
            ),
            statement("EndOnlyOwn", ends, [f"arn:aws:ec2:*:{account}:*/*"], Condition=own),
            statement(
                "GiveOneRole",
                ["iam:PassRole"],
                [f"arn:aws:iam::{account}:role/{role}"],
                Condition={"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
            ),
            statement("Images", ["ssm:GetParameter"], [f"arn:aws:ssm:*:{account}:parameter/baretrain/ami/*"]),
            statement("Quotas", ["servicequotas:ListServiceQuotas"], ["*"]),
            statement("Sessions", ["ssm:StartSession"], arns(["instance"], account), Condition=session_tag()),
            statement(  # for the first spot machine of an account
                "SpotRole",
                ["iam:CreateServiceLinkedRole"],
                [f"arn:aws:iam::{account}:role/aws-service-role/spot.amazonaws.com/*"],
                Condition={"StringEquals": {"iam:AWSServiceName": "spot.amazonaws.com"}},
            ),
            *buckets(data, writes=False),
            *buckets(runs, writes=True),
            {
                "Sid": "NoOlderMetadata",
                "Effect": "Deny",
                "Action": ["ec2:ModifyInstanceMetadataOptions"],
                "Resource": ["*"],
            },
        ],
    }


def session_tag() -> dict[str, Any]:
    return {"Null": {f"ssm:resourceTag/{RUN_TAG}": "false"}}
