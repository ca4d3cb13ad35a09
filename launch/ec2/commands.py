"""`python -m launch clean | iam | quota`: what only machines of EC2 need. AWS is imported when a command needs it."""

from __future__ import annotations

import argparse
import json
import re

from launch.ec2.config import MARKETS, Ec2Config
from launch.history import read_history
from launch.record import Record
from launch.schedulers import cluster_of
from train.cli.command import DONE, FAILED, Parser, printable
from train.config import InputError, S3Config, check

QUOTAS = {
    "on-demand": re.compile(r"Running On-Demand (.+) instances"),
    "spot": re.compile(r"All (.+) Spot Instance Requests"),
}


def region_list(text: str) -> list[str]:
    regions = text.split(",")
    for each in regions:
        check(re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", each) is not None, f"{each!r} is no region, as us-east-1")
    return regions


# ---- clean -----------------------------------------------------------------------------------------------------------


def clean_flags(parser: Parser) -> None:
    run = "run_dir of a run that was launched: s3://bucket/prefix; its record need not exist any more"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument("--yes", action="store_true", help="remove it; without, only say what is there")
    parser.add_argument(
        "--regions", metavar="A,B", type=region_list, default=[], help="to look in, besides those of the record"
    )


def clean(options: argparse.Namespace, s3: S3Config) -> int:
    """Remove all that EC2 has of a run, and prove it. FAILED, with the ids, until nothing is there or may come."""
    from launch.ec2 import clean as cleaning
    from launch.ec2 import sweep
    from launch.ec2.api import Api
    from launch.ec2.calls import call_regions

    record, clock = Record(options.run, s3), sweep.CLOCK
    api = Api(s3.profile, s3.region)
    cluster = cluster_of(record.job()) if record.exists() else None
    regions = [*call_regions(record), *(cluster.regions if isinstance(cluster, Ec2Config) else []), *options.regions]
    regions = list(dict.fromkeys([*regions, *([api.default_region] if api.default_region else [])]))
    check(bool(regions), f"{record.location} names no region: give --regions us-east-1,...")
    where = ", ".join(regions)
    if not options.yes:
        left = cleaning.left_over(api, record, regions, set(), clock.now())
        lines = [printable(f"there is: {each}") for each in left] or [f"{where} lists nothing of {record.run_dir}"]
        print(*lines, "nothing was removed; --yes does it" if left else "--yes proves it", sep="\n")
        return FAILED if left else DONE
    is_known, has_ended = bool(record.event_names()), read_history(record.events()).has_end
    if is_known:
        record.append_event("cleaning")  # first: a launch that still runs makes nothing from here on
    left = cleaning.remove(api, record, regions, clock, say=lambda text: print(printable(text), flush=True))
    if is_known and not has_ended:
        record.append_event("cancelled", reason="launch clean")
    if left:
        print(*(printable(f"still there: {each}") for each in left), sep="\n")
        return FAILED
    if not is_known:
        print(f"{record.location} is gone: what was asked for in the last minutes may still come to be listed")
    print(printable(f"nothing of {record.run_dir} is left in {where}"))
    return DONE


# ---- iam -------------------------------------------------------------------------------------------------------------


def iam_flags(parser: Parser) -> None:
    parser.add_argument("runs", metavar="RUNS", help="folder of the runs: s3://bucket/runs")
    parser.add_argument("--data", metavar="FOLDER", action="append", default=[], help="that machines read; repeatable")
    parser.add_argument("--role", default="baretrain-machine", help="of the machines (baretrain-machine)")
    parser.add_argument("--account", default="*", help="number of the account; without, any that the role is in")


def iam(options: argparse.Namespace, s3: S3Config) -> int:
    """Print the least that operator and machines need, as JSON."""
    from launch.ec2.iam import machine_policy, operator_policy, trust_policy

    check(
        re.fullmatch(r"\d{12}|\*", options.account) is not None, f"--account {options.account} is no account's number"
    )
    check(re.fullmatch(r"[\w+=,.@-]{1,64}", options.role) is not None, f"--role {options.role} is no role's name")
    policies = {
        "operator": operator_policy([options.runs], options.data, options.role, options.account),
        "machine": machine_policy([options.runs], options.data),
        "machine_trust": trust_policy(),
    }
    print(json.dumps(policies, indent=2))
    return DONE


# ---- quota -----------------------------------------------------------------------------------------------------------


def quota_flags(parser: Parser) -> None:
    parser.add_argument("instance", metavar="TYPE", help="as trn1.32xlarge")
    parser.add_argument("--nodes", type=int, default=1, help="machines (1)")
    parser.add_argument("--market", choices=MARKETS[:2], default=MARKETS[0], help="a capacity block needs no quota")
    parser.add_argument("--regions", metavar="A,B", type=region_list, default=[])


def quota(options: argparse.Namespace, s3: S3Config) -> int:
    """Say whether the account may run the machines; FAILED if it lacks quota in all regions."""
    from launch.ec2.api import Api

    instance, nodes, pattern = options.instance, options.nodes, QUOTAS[options.market]
    family = re.match(r"[a-z]+\d+", instance)  # trn1 of trn1.32xlarge, p5 of p5en.48xlarge
    check(nodes > 0, f"--nodes {nodes} must be above 0")
    if family is None:
        raise InputError(f"{instance} is no type of EC2, as trn1.32xlarge")
    api, is_enough = Api(s3.profile, s3.region), False
    regions = options.regions or ([api.default_region] if api.default_region else [])
    check(bool(regions), "no region is named: give --regions us-east-1,...")
    for region in regions:
        [info] = api.ask(region, "describe_instance_types", InstanceTypes=[instance])["InstanceTypes"]
        needed = nodes * int(info["VCpuInfo"]["DefaultVCpus"])
        rank, name, code, vcpus = 0, "", "", 0.0
        for each in api.pages(region, "list_service_quotas", "Quotas", service="service-quotas", ServiceCode="ec2"):
            match = pattern.fullmatch(each["QuotaName"])
            if match and covers(match[1], family[0]) > rank:
                rank, name, code = covers(match[1], family[0]), match[0], str(each["QuotaCode"])
                vcpus = float(each["Value"])
        check(rank > 0, f"Service Quotas of {region} shows no {options.market} quota for {instance}; see the console")
        line = f"{region}: {name} ({code}): {vcpus:,.0f} vCPUs, {needed:,} are needed"
        is_enough = is_enough or vcpus >= needed
        cure = (
            f"too few; aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code} "
            f"--desired-value {needed} --region {region} (takes hours to days)"
        )
        print(f"{line}; others' use counts too" if vcpus >= needed else f"{line}: {cure}")
    return DONE if is_enough else FAILED


def covers(families: str, family: str) -> int:
    """How well the text of a quota ("P4, P3 and P2", "Standard (A, C, ...)") names a family: 0 not, 2 exactly."""
    words = {word.lower() for word in re.findall(r"[A-Za-z]+\d*", families)} - {"and", "standard"}
    return 2 if family in words else 1 if family.rstrip("0123456789") in words else 0
