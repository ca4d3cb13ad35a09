"""What a build leaves if Packer could not clean up: found by its tag and removed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from ami.aws import Account, aws_errors
from train.config import Failure

BUILD = "baretrain:build"  # tag of all that exists only during a build
GONE_S, PAUSE_S = 600.0, 5.0  # for the removal of all; between two looks (EC2 lists new things late)
PACKER_ROLE = "packer-"  # begins the names of the roles that Packer makes


@dataclass(frozen=True)
class Thing:
    kind: str  # instance | volume | security group | key pair | role
    id: str
    region: str

    def __str__(self) -> str:
        return f"{self.kind} {self.id} ({self.region})"


def find(account: Account, region: str, build: str | None) -> list[Thing]:
    """What carries the tag of one build, or of any."""
    wanted = [{"Name": "tag-key", "Values": [BUILD]}]
    if build is not None:
        wanted = [{"Name": f"tag:{BUILD}", "Values": [build]}]
    ec2 = account.ec2(region)
    with aws_errors(f"remains of a build in {region}"):
        pages = ec2.get_paginator("describe_instances").paginate(Filters=wanted)
        machines = [each for page in pages for group in page["Reservations"] for each in group["Instances"]]
        found = [("instance", each["InstanceId"]) for each in machines if each["State"]["Name"] != "terminated"]
        volumes = [
            each for page in ec2.get_paginator("describe_volumes").paginate(Filters=wanted) for each in page["Volumes"]
        ]
        found += [("volume", each["VolumeId"]) for each in volumes if each["State"] != "deleting"]
        groups = ec2.get_paginator("describe_security_groups").paginate(Filters=wanted)
        found += [("security group", each["GroupId"]) for page in groups for each in page["SecurityGroups"]]
        found += [("key pair", each["KeyName"]) for each in ec2.describe_key_pairs(Filters=wanted)["KeyPairs"]]
    return [Thing(kind, id_, region) for kind, id_ in found] + list(roles(account, region, build))


def roles(account: Account, region: str, build: str | None) -> Iterator[Thing]:
    iam = account.client("iam", region)
    with aws_errors("roles of builds"):
        for page in iam.get_paginator("list_roles").paginate():
            for role in page["Roles"]:
                if role["RoleName"].startswith(PACKER_ROLE):
                    tags = {tag["Key"]: tag["Value"] for tag in iam.list_role_tags(RoleName=role["RoleName"])["Tags"]}
                    if BUILD in tags and build in (None, tags[BUILD]):
                        yield Thing("role", role["RoleName"], region)


def remove(account: Account, region: str, build: str | None) -> list[Thing]:
    """Remove all that carries the tag, and look again until two looks in a row see nothing. Returns what was removed;
    Failure with the ids if something stays.
    """
    removed: dict[Thing, None] = {}
    until_s, clean_looks = time.monotonic() + GONE_S, 0
    while True:
        left = find(account, region, build)
        clean_looks = 0 if left else clean_looks + 1
        if clean_looks == 2:
            return list(removed)
        if left and time.monotonic() > until_s:
            listed = ", ".join(map(str, left))
            raise Failure(f"a build left {listed}: remove these by hand, and look with python -m ami clean")
        for thing in left:
            removed[thing] = None
            with suppress(
                ClientError
            ):  # something else still needs it: the next round tries again, and says so at last
                remove_one(account, thing)
        time.sleep(PAUSE_S)


def remove_one(account: Account, thing: Thing) -> None:
    ec2: Any = account.ec2(thing.region)
    if thing.kind == "instance":
        ec2.terminate_instances(InstanceIds=[thing.id])
    elif thing.kind == "volume":
        ec2.delete_volume(VolumeId=thing.id)
    elif thing.kind == "security group":
        ec2.delete_security_group(GroupId=thing.id)
    elif thing.kind == "key pair":
        ec2.delete_key_pair(KeyName=thing.id)
    else:
        remove_role(account.client("iam", thing.region), thing.id)


def remove_role(iam: Any, name: str) -> None:
    for profile in iam.list_instance_profiles_for_role(RoleName=name)["InstanceProfiles"]:
        iam.remove_role_from_instance_profile(InstanceProfileName=profile["InstanceProfileName"], RoleName=name)
        iam.delete_instance_profile(InstanceProfileName=profile["InstanceProfileName"])
    for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
        iam.delete_role_policy(RoleName=name, PolicyName=policy)
    for policy in iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]:
        iam.detach_role_policy(RoleName=name, PolicyArn=policy["PolicyArn"])
    iam.delete_role(RoleName=name)
