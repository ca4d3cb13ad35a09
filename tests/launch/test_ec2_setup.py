"""What `launch setup` makes, in moto, and what its policies allow. cfn-lint knows the properties of every resource."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from typing import Any

import boto3
import pytest
from cfnlint.api import ManualArgs, lint
from services.fake_ec2 import ACCOUNT, REGION, fake_ec2

from launch.__main__ import main
from launch.ec2 import setup
from launch.ec2.api import Api

WORDS = ["setup", "s3://bucket/alice", "--data", "s3://data/albert", "--region", REGION]
S3 = "arn:aws:s3:::{}".format
EC2 = f"arn:aws:ec2:{REGION}:{ACCOUNT}:{{}}".format


@pytest.fixture
def ec2(monkeypatch):
    with fake_ec2(monkeypatch) as fake:
        yield fake


def test_the_template_is_valid_and_its_group_trusts_itself_in_both_directions():
    """moto skips rules for outgoing traffic."""
    text = setup.TEMPLATE.read_text()
    assert lint(text, config=ManualArgs(regions=[REGION])) == []
    for way in ("SourceSecurityGroupId", "DestinationSecurityGroupId"):
        assert f'IpProtocol: "-1", {way}: !GetAtt Group.GroupId}}' in text


def test_setup_shows_what_it_would_make_then_makes_it_and_can_be_repeated(ec2, capsys):
    assert main(WORDS) == 0
    shown = capsys.readouterr().out
    for text in (
        "Runs = bucket/alice/",
        "baretrain-ZONE",
        "--yes makes it",
    ):
        assert text in shown
    assert ec2.client("cloudformation").list_stacks()["StackSummaries"] == [] and not ec2.groups
    for _ in range(2):
        assert main([*WORDS, "--yes"]) == 0
    zones = ec2.client().describe_availability_zones()["AvailabilityZones"]
    assert ec2.groups == {(REGION, f"baretrain-{each['ZoneName']}") for each in zones}
    outputs = setup.outputs(Api(), REGION)
    assert outputs["Operator"] in capsys.readouterr().out
    (group,) = ec2.client().describe_security_groups(GroupIds=[outputs["Group"]])["SecurityGroups"]
    (rule,) = group["IpPermissions"]
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [outputs["Group"]]
    profile = boto3.client("iam").get_instance_profile(InstanceProfileName=outputs["Profile"])
    assert len(profile["InstanceProfile"]["Roles"]) == 1


@pytest.mark.parametrize("folder", ["s3://bucket/*", "data/mine", "s3://b"])
def test_a_folder_that_a_policy_would_read_otherwise_is_rejected(ec2, capsys, folder):
    assert main(["setup", folder, "--region", REGION]) == 2
    assert "is not a folder in S3 with plain characters" in capsys.readouterr().err


def may(policy: dict[str, Any], action: str, resource: str, **keys: str) -> bool:
    """Return what IAM decides by a policy: denied by any statement, else allowed by one whose conditions hold."""

    def fits(each: dict[str, Any]) -> bool:
        at = any(fnmatchcase(resource, pattern) for pattern in each["Resource"])
        does = any(fnmatchcase(action, pattern) for pattern in each["Action"])
        return at and does and all(map(holds, each.get("Condition", {}).values()))

    def holds(wanted: dict[str, Any]) -> bool:
        for key, value in wanted.items():
            values = [value] if isinstance(value, str) else value
            if not any(fnmatchcase(keys.get(key, ""), each) for each in values):
                return False
        return True

    effects = {each["Effect"] for each in policy["Statement"] if fits(each)}
    return effects == {"Allow"}


@pytest.fixture
def policies(ec2):
    """The policies of an operator and of machines, and the stack's outputs."""
    assert main([*WORDS, "--yes"]) == 0
    outputs = setup.outputs(Api(), REGION)
    iam = boto3.client("iam")
    policy = iam.get_policy(PolicyArn=outputs["Operator"])["Policy"]
    version = {"PolicyArn": policy["Arn"], "VersionId": policy["DefaultVersionId"]}
    operator = iam.get_policy_version(**version)["PolicyVersion"]["Document"]
    profile = iam.get_instance_profile(InstanceProfileName=outputs["Profile"])["InstanceProfile"]
    role = profile["Roles"][0]
    machine = iam.get_role_policy(RoleName=role["RoleName"], PolicyName="machine")
    return operator, ast.literal_eval(machine["PolicyDocument"]), {**outputs, "Role": role["Arn"]}


def test_machines_use_the_folders_but_neither_ec2_nor_what_decides_which_code_runs(policies):
    operator, machine, _ = policies
    for statement in machine["Statement"]:
        assert not any(each.startswith(("ec2:", "iam:")) for each in statement["Action"])
        assert statement["Resource"] != ["*"] or statement["Sid"] == "Session"
    record = "alice/mine.launch"
    for name in (
        "alice/mine/metrics.jsonl",
        f"{record}/attempts/0001.json",
        f"{record}/logs/a.txt",
    ):
        assert may(machine, "s3:PutObject", S3(f"bucket/{name}"))
    files = ("job.json", "code-0.tar.gz", "config.yaml")
    for name in (*files, "submissions/0001.json", "requests/0001.json"):
        place = S3(f"bucket/{record}/{name}")
        assert may(machine, "s3:GetObject", place) and may(operator, "s3:PutObject", place)
        assert not may(machine, "s3:PutObject", place)
        assert not may(machine, "s3:DeleteObject", place)
    assert may(machine, "s3:GetObject", S3("data/albert/manifest.json"))
    assert not may(machine, "s3:PutObject", S3("data/albert/manifest.json"))
    for name in ("bob/mine/a", "alice2/mine/a"):
        assert not may(machine, "s3:GetObject", S3(f"bucket/{name}"))
        assert not may(operator, "s3:PutObject", S3(f"bucket/{name}"))


@pytest.mark.parametrize(("owner", "is_own"), [("alice", True), ("bob", False), ("alice2", False)])
def test_an_operator_starts_and_ends_only_machines_of_their_folder(policies, owner, is_own):
    operator, _, _ = policies
    run = f"s3://bucket/{owner}/run"
    machine = EC2("instance/i-1")
    asked = {"aws:RequestTag/baretrain:run-dir": run}
    tokens = {"ec2:MetadataHttpTokens": "required"}
    has = {"ec2:ResourceTag/baretrain:run-dir": run}
    assert may(operator, "ec2:RunInstances", machine, **asked, **tokens) is is_own
    assert may(operator, "ec2:RunInstances", EC2("volume/v-1"), **asked) is is_own
    assert may(operator, "ec2:TerminateInstances", machine, **has) is is_own
    session = {"ssm:resourceTag/baretrain:run-dir": run}
    assert may(operator, "ssm:StartSession", machine, **session) is is_own
    assert not may(operator, "ec2:RunInstances", machine, **asked)
    assert not may(operator, "ec2:TerminateInstances", machine)


def test_an_operator_gives_only_the_stacks_role_and_group(policies):
    operator, _, outputs = policies
    passed = {"iam:PassedToService": "ec2.amazonaws.com"}
    assert may(operator, "iam:PassRole", outputs["Role"], **passed)
    assert not may(operator, "iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/admin", **passed)
    group = EC2(f"security-group/{outputs['Group']}")
    assert may(operator, "ec2:RunInstances", group)
    assert not may(operator, "ec2:RunInstances", EC2("security-group/sg-1"))
