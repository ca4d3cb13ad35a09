"""The commands `baretrain launch clean | iam` for EC2. boto3 is imported only when a command needs it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from string import Template
from typing import Any

import yaml

from launch.record import CANCEL, CONFIG, JOB, PLAN, SUFFIX, Record
from train.config import InputError, S3Config, check
from train.machine.console import say
from train.run.command import DONE, FAILED, Parser

POLICIES = Path(__file__).with_name("policies.yaml")
# Files of a record that decide which code runs, or which machines exist: the run's machines must not write them.
OPERATORS = (JOB, "code-*", PLAN, CONFIG, "submissions/*", "requests/*", "ec2/calls/*")
WRITES = ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload")


def region_list(text: str) -> list[str]:
    regions = text.split(",")
    for each in regions:
        check(
            re.fullmatch(r"[a-z]{2}(-[a-z]+)+-[0-9]", each) is not None,
            f"{each!r} is not a region (e.g. us-east-1)",
        )
    return regions


# ---- clean -----------------------------------------------------------------------------------------------------------


def clean_flags(parser: Parser) -> None:
    run = "run_dir of a launched run: s3://bucket/prefix; its record may be gone"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument(
        "--yes", action="store_true", help="remove the resources; without --yes, only list them"
    )
    parser.add_argument(
        "--regions", metavar="A,B", type=region_list, default=[], help="further regions to search"
    )


def clean(options: argparse.Namespace, s3: S3Config) -> int:
    """Remove a run's resources on EC2 until none can appear. Prints those that remain, and returns FAILED if any do."""
    from launch.ec2 import calls
    from launch.ec2.api import Api

    record, api = Record(options.run, s3), Api(s3.profile, s3.region)
    regions = api.regions(
        calls.regions_of(record, [*options.regions, *filter(None, [api.default_region])])
    )
    where = ", ".join(regions)
    if not options.yes:
        left = calls.left_over(api, record, regions)
        lines = [f"found: {each}" for each in left] or [
            f"EC2 lists nothing of {record.run_dir} in {where}"
        ]
        say(
            *lines,
            "nothing was removed; --yes removes it"
            if left
            else "--yes waits until nothing more can appear",
        )
        return FAILED if left else DONE
    is_known = record.last_submission() is not None
    if is_known and not record.history().has_end:
        record.ask(CANCEL)  # written first: a running launch then stops
    left = calls.remove(api, record, regions)
    if left:
        say(*(f"still there: {each}" for each in left))
        return FAILED
    if not is_known:
        say(f"{record.location} is gone: resources requested in the last minutes may still appear")
    say(f"nothing of {record.run_dir} is left in {where}")
    return DONE


# ---- iam -------------------------------------------------------------------------------------------------------------


def iam_flags(parser: Parser) -> None:
    run = "run_dir of the run whose machines get the role: s3://bucket/runs/mine; the operator gets its parent folder"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument(
        "--data", metavar="FOLDER", action="append", default=[], help="data folder; repeatable"
    )
    role = "NAME in the name of each run's role, NAME-RUN (baretrain-machine)"
    parser.add_argument("--role", metavar="NAME", default="baretrain-machine", help=role)
    parser.add_argument("--account", default="*", help="account number (any)")


def iam(options: argparse.Namespace, s3: S3Config) -> int:
    """Print, as JSON, the minimal policies for the operator of a runs folder and for the machines of one run."""
    run = options.run.rstrip("/").removesuffix(SUFFIX)
    runs = f"{run.rpartition('/')[0]}/"
    data = [folder_statement(f"Data{number}", each) for number, each in enumerate(options.data)]
    of_run, own = (
        folder_statement("Run", f"{run}/", f"{run}{SUFFIX}/"),
        folder_statement("Runs", runs),
    )
    of_run[0]["Action"] = own[0]["Action"] = ["s3:GetObject", *WRITES]
    [record] = [each for each in of_run[0]["Resource"] if each.endswith(f"{SUFFIX}/*")]
    kept = [f"{record[:-1]}{name}" for name in OPERATORS]
    of_run.append(
        {
            "Sid": "NoJob",
            "Effect": "Deny",
            "Action": ["s3:PutObject*", "s3:DeleteObject*"],
            "Resource": kept,
        }
    )
    text = Template(POLICIES.read_text()).substitute(
        account=options.account, role=options.role, runs=f"{runs}*"
    )
    policies = {}
    for name, statements in yaml.safe_load(text).items():
        folders = {"operator": [*data, own], "machine": [*data, of_run]}.get(name, [])
        statements += [statement for each in folders for statement in each]
        policies[name] = {"Version": "2012-10-17", "Statement": statements}
    say(*json.dumps(policies, indent=2).splitlines())
    return DONE


def folder_statement(sid: str, *folders: str) -> list[dict[str, Any]]:
    """Return statements that allow reading and listing folders of one bucket."""
    bucket, below = "", []
    for each in folders:
        match = re.fullmatch(
            r"s3://([a-z0-9][a-z0-9.-]+[a-z0-9])((?:/[\w.+=@-]+)*)/*", each, re.ASCII
        )
        if match is None:
            raise InputError(
                f"{each} is not a folder in S3 with plain characters, such as s3://bucket/runs/mine"
            )
        bucket, prefix = match[1], match[2].strip("/")
        below.append(f"{prefix}/*" if prefix else "*")
    read = {
        "Action": ["s3:GetObject"],
        "Resource": [f"arn:aws:s3:::{bucket}/{each}" for each in below],
    }
    listing = {"Action": ["s3:ListBucket"], "Resource": [f"arn:aws:s3:::{bucket}"]}
    condition = {"Condition": {"StringLike": {"s3:prefix": below}}}
    return [
        {"Sid": sid, "Effect": "Allow", **read},
        {"Sid": f"{sid}List", "Effect": "Allow", **listing, **condition},
    ]
