"""The command `launch setup`: it makes what all runs in one region of an account share, see stack.yaml."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.config import InputError, S3Config
from train.machine.console import say
from train.run.command import DONE, Parser

if TYPE_CHECKING:
    from launch.ec2.api import Api  # imported late: other commands do not need boto3

TEMPLATE = Path(__file__).with_name("stack.yaml")
STACK = "baretrain"  # the name of the stack
FOLDER = r"s3://([a-z0-9][a-z0-9.-]+[a-z0-9])((?:/[\w.+=@-]+)*)/*"  # no wildcards: it stands in a policy


def add_flags(parser: Parser) -> None:
    runs = "folder in S3 below which all runs lie: s3://bucket/runs"
    data = "folder in S3 that machines may read; repeatable (the folder of the runs)"
    parser.add_argument("runs", metavar="FOLDER", help=runs)
    parser.add_argument("--data", metavar="FOLDER", action="append", default=[], help=data)
    parser.add_argument("--vpc", help="VPC of the machines (the default VPC)")
    parser.add_argument("--yes", action="store_true", help="make it; without --yes, only show it")


def setup(options: argparse.Namespace, s3: S3Config) -> int:
    """Show the stack and the placement groups and, with --yes, make them, or change the folders of an earlier stack."""
    from launch.ec2.api import Api

    parameters = folder_parameters(options.runs, options.data or [options.runs])
    parameters["Vpc"] = options.vpc or "the default VPC"
    api = Api(s3.region)
    (region,) = api.regions([])
    say(f"stack {STACK} in {region}, from {TEMPLATE}, with")
    say(*(f"  {name} = {value}" for name, value in parameters.items()))
    say(f"  a placement group {placement_group('ZONE')} in each zone")
    if not options.yes:
        say("nothing was made; --yes makes it. It costs nothing")
        return DONE
    if options.vpc is None:
        parameters["Vpc"] = default_vpc(api, region)
    make_stack(api, region, parameters)
    make_placement_groups(api, region)
    policy = outputs(api, region)["Operator"]
    say(f"done; attach the policy {policy} to whoever launches, unless they may do everything")
    return DONE


def folder_parameters(runs: str, data: Sequence[str]) -> dict[str, str]:
    """Return the parameters of the stack that name folders. Raises InputError if one is not a plain folder in S3."""
    bucket, prefix = bucket_and_prefix(runs)
    folders = [bucket_and_prefix(each) for each in data]
    return {
        "Runs": f"{bucket}/{prefix}",
        "RunBucket": bucket,
        "RunPrefix": prefix,
        "DataObjects": ",".join(f"arn:aws:s3:::{name}/{below}*" for name, below in folders),
        "DataBuckets": ",".join(dict.fromkeys(f"arn:aws:s3:::{name}" for name, _ in folders)),
        "DataPrefixes": ",".join(dict.fromkeys(f"{below}*" for _, below in folders)),
    }


def bucket_and_prefix(folder: str) -> tuple[str, str]:
    """Return a folder's bucket, and its prefix with a slash at the end; "" for a whole bucket."""
    match = re.fullmatch(FOLDER, folder, re.ASCII)
    if match is None:
        raise InputError(
            f"{folder} is not a folder in S3 with plain characters, such as s3://bucket/runs"
        )
    return match[1], f"{match[2]}/".removeprefix("/")


def default_vpc(api: Api, region: str) -> str:
    found = api.pages(region, "describe_vpcs", "Vpcs", by={"is-default": ["true"]})
    if not found:
        raise InputError(f"{region} has no default VPC: name the one of your subnets (--vpc)")
    return str(found[0]["VpcId"])


# ---- making it -------------------------------------------------------------------------------------------------------


def outputs(api: Api, region: str) -> dict[str, str]:
    """Return the outputs of the stack: Group, Profile and Operator. Raises InputError if the region has no stack."""
    from train.storage.aws_errors import Rejected

    try:
        answer = api.ask(region, "describe_stacks", service="cloudformation", StackName=STACK)
    except Rejected as error:
        if error.code != "ValidationError":
            raise
        raise InputError(
            f"{region} has no stack {STACK} with the machines' role and security group: run baretrain launch setup "
            f"s3://BUCKET/RUNS --region {region}"
        ) from error
    return {each["OutputKey"]: each["OutputValue"] for each in answer["Stacks"][0]["Outputs"]}


def make_stack(api: Api, region: str, parameters: Mapping[str, str]) -> None:
    """Make the stack, or update it, and wait until it is complete."""
    from train.storage.aws_errors import Rejected

    given = {
        "StackName": STACK,
        "TemplateBody": TEMPLATE.read_text(),
        "Parameters": [
            {"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()
        ],
        "Capabilities": ["CAPABILITY_IAM"],
    }
    way = "create"
    try:
        api.ask(region, "create_stack", service="cloudformation", **given)
    except Rejected as error:
        if error.code != "AlreadyExistsException":
            raise
        way = "update"
        try:
            api.ask(region, "update_stack", service="cloudformation", **given)
        except Rejected as second:
            if "No updates" not in str(second):
                raise
            return
    api.wait(region, f"stack_{way}_complete", service="cloudformation", StackName=STACK)


def placement_group(zone: str) -> str:
    """Return the name of a zone's group. The stack has none, since a template has no loop over zones."""
    return f"baretrain-{zone}"


def make_placement_groups(api: Api, region: str) -> None:
    from train.storage.aws_errors import Rejected

    for zone in api.pages(region, "describe_availability_zones", "AvailabilityZones"):
        name = placement_group(zone["ZoneName"])
        try:
            api.ask(region, "create_placement_group", GroupName=name, Strategy="cluster")
        except Rejected as error:
            if error.code != "InvalidPlacementGroup.Duplicate":
                raise
