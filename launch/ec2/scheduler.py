"""EC2 as a scheduler: a launch resolves its settings, makes the machines, and waits until the run has ended.

The plan shows the request to EC2, its maximum cost, and how to undo it. With check=true, EC2 checks the request.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from launch import spec
from launch.config import INSTANCE_TYPE, LaunchConfig
from launch.ec2 import calls, sweep
from launch.ec2.account import (
    EFA,
    EFA_ONLY,
    INTERFACE,
    OWN_IMAGE,
    Resolved,
    Site,
    check_addresses,
    layout,
    resolve,
)
from launch.ec2.api import Api
from launch.ec2.config import Ec2Config
from launch.ec2.launcher import Launcher, undo
from launch.ec2.request import MOST_BYTES, SPARE_S, name_of, placement_name, run_instances
from launch.record import Job, Record
from launch.schedulers import cluster_of
from launch.spec import Handle, State
from launch.values import shown_duration, text
from train.config import Failure, check
from train.config.backend import CUDA
from train.machine.console import say
from train.machine.processes import is_gone, owner_name
from train.run.command import INTERRUPTED
from train.storage import schema
from train.storage.aws_errors import Rejected
from train.storage.folders import sha256_bytes


class Scheduler(spec.Scheduler):
    def request(self, job: Job, record: Record) -> list[str]:
        check_job(job, cluster_of(job, Ec2Config), record)
        return []

    def preview(self, job: Job, record: Record, cfg: LaunchConfig, hours: float | None) -> str:
        return "\n".join(plan_lines(job, cluster_of(job, Ec2Config), record, cfg, hours))

    def submit(self, job: Job, record: Record) -> Handle:
        """Resolve the settings. The machines are made later, by `attend`."""
        cluster, api = cluster_of(job, Ec2Config), open_api(record)
        check_job(job, cluster, record)
        resolved = resolve(job, cluster, record, api)
        left = calls.left_over(api, record, calls.regions_of(record, resolved.regions))
        there = [str(each) for each in left if each.kind == "instance"]
        check(
            not there,
            f"EC2 has, or may have, machines of this run already: {', '.join(there)}; baretrain launch clean "
            f"{record.run_dir} --yes removes them",
        )
        return {
            "submission": resolved.id,
            "resolved": asdict(resolved),
            "process": owner_name(os.getpid()),
        }

    def attend(self, job: Job, record: Record, handle: Handle, *, detach: bool) -> int:
        """Make the machines, wait for the end of the run, and return its exit code."""
        resolved = schema.record(Resolved, handle["resolved"])
        try:
            return Launcher(
                record, job, cluster_of(job, Ec2Config), resolved, open_api(record)
            ).run()
        except KeyboardInterrupt:
            say(
                f"this launch ends; its machines continue to train, and then shut down. {undo(record)}"
            )
            return INTERRUPTED

    def state(self, record: Record, handle: Handle) -> State:
        seen = calls.resources(open_api(record), record, calls.regions_of(record), "instance")
        alive = [each for each in seen if each.is_alive]
        may_be = calls.unlisted(record, {each.id for each in seen})
        zones = ", ".join(
            sorted({str(each.seen["Placement"]["AvailabilityZone"]) for each in alive})
        )
        pending = sum(each.state == "pending" for each in alive)
        says = f"machines in {zones}: {len(alive)}{f' ({pending} pending)' if pending else ''}"
        others = [
            *(str(each) for each in may_be if each.kind == "instance"),
            asks_text(record, handle),
        ]
        said = [each for each in (says if alive else "", *others) if each]
        hosts = [str(each.seen.get("PrivateDnsName") or each.id).split(".")[0] for each in alive]
        return State(is_active=bool(said), text="; ".join(said) or "no machines", nodes=hosts)

    def unanswered(self, record: Record) -> State:
        """Return the state before the submission is recorded: only an earlier launch may have machines."""
        seen = self.state(record, {}) if calls.regions_of(record) else State(is_active=False)
        if seen.is_active:
            return seen
        return State(
            is_active=not record.history().has_end,
            text="its launch has not yet asked EC2 for machines",
        )

    def cancel(self, record: Record, handle: Handle) -> None:
        """End the machines. The cancellation must have been recorded. Raises Failure if machines may still train."""
        api, regions = open_api(record), calls.regions_of(record)
        sweep.delete(api, calls.left_over(api, record, regions))
        left = calls.left_over(api, record, regions)
        states = ("pending", "running", sweep.UNLISTED, sweep.UNANSWERED)
        may_run = [str(each) for each in left if each.kind == "instance" and each.state in states]
        proof = f"baretrain launch clean {record.run_dir} --yes verifies that nothing is left"
        if may_run:
            raise Failure(f"EC2 may still have {', '.join(may_run)}; {proof}, and ends them")
        say(proof)


def check_job(job: Job, cluster: Ec2Config, record: Record) -> None:
    """Raise InputError if no AWS account could run a job with these settings."""
    s3, where, profile = record.s3, f"run_dir={record.run_dir}", record.s3.profile
    is_type = re.fullmatch(INSTANCE_TYPE, job.instance) is not None
    no_region = "s3.region is missing: machines have no ~/.aws with the bucket's region"
    no_role = "cluster.instance_profile is missing: the name of the machines' role, without which they cannot use S3"
    check(
        job.kind == "train",
        "cluster=ec2 can only train; prepare=true is for cluster=local and cluster=slurm",
    )
    check(
        record.is_remote,
        f"{where} must be in S3 (s3://bucket/runs/mine): machines have no other shared storage",
    )
    check(
        is_type,
        f"instance={job.instance} is not an EC2 instance type: name one, such as instance=trn1.32xlarge",
    )
    check(
        profile is None,
        f"s3.profile={profile}: machines have a role but no ~/.aws; set AWS_PROFILE here instead",
    )
    check(
        bool(s3.region or s3.endpoint), f"{no_region}; set it (after --), as s3.region=us-east-1"
    )
    check(bool(cluster.instance_profile), f"{no_role}; baretrain launch iam prints what it needs")


def open_api(record: Record) -> Api:
    return Api(record.s3.profile, record.s3.region)


def asks_text(record: Record, handle: Handle) -> str:
    """Say how long ago the launch asked for machines; "" if it has machines or is known to have ended."""
    history = record.history()
    submission = history.submission
    if submission is None or history.has_end or is_gone(text(handle, "process")):
        return ""
    asked = [
        call for call in calls.read_calls(record) if call.submission == handle.get("submission")
    ]
    if any(call.operation == calls.RUN and call.made for call in asked[-1:]):
        return ""  # it has machines
    age_s = time.time() - max([submission.time_unix_s, *(call.sent_unix_s for call in asked)])
    if age_s > 2 * calls.LISTS_S:  # a running launch asks more often
        return ""
    error = (
        next((call.error for call in reversed(asked) if call.operation == calls.RUN), "")
        or "no answer yet"
    )
    return f"its launch asks for machines ({error}, {shown_duration(max(0.0, age_s))} ago)"


# ---- the plan --------------------------------------------------------------------------------------------------------


def planned(
    job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig
) -> tuple[Resolved, dict[str, Any]]:
    """Return the resolved settings, and the request for the first subnet, without the groups that a launch makes.

    With check=true, EC2 is asked about each subnet. Raises InputError if it would reject a request.
    """
    api = open_api(record) if cfg.check else None
    resolved = resolve(job, cluster, record, api) if api else assumed(job, cluster, record, cfg)
    requests = []
    for site in resolved.sites:
        name, is_made = placement_name(record, cluster, site, job.nodes)
        request = partial(
            run_instances, job, cluster, record, resolved, site, max_run_s=cluster.max_run_s
        )
        group, placement = cluster.security_group, None if is_made else name
        requests.append(request(number=1, group=group, placement=placement))
        try:
            if api:
                api.ask(site.region, "run_instances", DryRun=True, **requests[-1])
        except Rejected as error:
            # this code means that EC2 would accept the request
            if error.code != "DryRunOperation":
                raise
    return resolved, requests[0]


def assumed(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> Resolved:
    """Return the settings with placeholders for values that only EC2 could provide."""
    region = (cluster.regions or [record.s3.region or "<AWS_DEFAULT_REGION>"])[0]
    types = [INTERFACE, *([EFA, EFA_ONLY] if cfg.instance.efa_interfaces else [])]
    cards = [
        {"NetworkCardIndex": card, "MaximumNetworkInterfaces": 2, "InterfaceTypes": types}
        for card in range(cfg.instance.network_cards or 1)
    ]
    network = {
        "NetworkCards": cards,
        "EfaInfo": {"MaximumEfaInterfaces": cfg.instance.efa_interfaces or 0},
    }
    given = cluster.image or OWN_IMAGE.format(cfg.instance.device or CUDA)
    image = given if given.startswith("ami-") else f"<resolve:ssm:{given}>"
    subnets = cluster.subnets or ["<of the default VPC>"]
    sites = [Site(region, subnet, "<zone>", "<VPC>", image, "<root device>") for subnet in subnets]
    info = {"InstanceType": job.instance, "NetworkInfo": network}
    interfaces = layout(info, cluster, job.nodes)
    check_addresses(len(interfaces), [] if cluster.subnets else ["the default VPC's subnets"])
    return Resolved("plan", job.id, "", sites, interfaces)


def interface_lines(interfaces: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each kind of network interface in a request."""
    cards: dict[str, list[int]] = {}
    for each in interfaces:
        others = {key: value for key, value in each.items() if key != "NetworkCardIndex"}
        kind = " ".join(f"{key}={json.dumps(value)}" for key, value in others.items())
        cards.setdefault(kind, []).append(each["NetworkCardIndex"])
    return [
        f"on network card {on[0]}{f' to {on[-1]}' if on[1:] else ''}: {kind}"
        for kind, on in cards.items()
    ]


def plan_lines(
    job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig, hours: float | None
) -> Iterator[str]:
    resolved, request = planned(job, cluster, record, cfg)
    data = request["UserData"].encode()
    request["UserData"] = f"{len(data):,} bytes of {MOST_BYTES:,}, sha256 {sha256_bytes(data)}"
    request["NetworkInterfaces"] = interface_lines(request["NetworkInterfaces"])
    yield f"RunInstances in {resolved.sites[0].region}, in one subnet at a time:"
    yield from json.dumps(request, indent=1).splitlines()
    yield f"subnets, in order: {', '.join(f'{site.subnet} ({site.zone})' for site in resolved.sites)}"
    if cluster.security_group is None:
        yield f"security group {name_of(record)} will be made: all traffic among the machines, none from outside"
    name, is_made = placement_name(record, cluster, resolved.sites[0], job.nodes)
    if is_made:
        yield f"placement group {name} will be made"
    price_name = "usd_per_hour_spot" if cluster.market == "spot" else "usd_per_hour"
    # then a timer ends the machines
    price, longest_s = (
        getattr(cfg.instance, price_name),
        cluster.max_run_s + SPARE_S,
    )
    limit = (
        f"{shown_duration(longest_s)} (cluster.max_run_s, plus {shown_duration(SPARE_S)} to save)"
    )
    if price is None:
        yield f"cost: {cfg.nodes} machines for at most {limit}; the price is unknown (instance.{price_name})"
    else:
        usd, expected_usd = (
            cfg.nodes * price * longest_s / 3600,
            cfg.nodes * price * (hours or 0.0),
        )
        most = f"at most ${math.ceil(usd):,}"
        if hours is not None and hours * 3600 > cluster.max_run_s:
            most = f"${math.ceil(usd):,} for a part of the run, of about ${math.ceil(expected_usd):,} for the whole"
        yield f"cost: {most}: {cfg.nodes} x ${price:.2f} an hour x {limit}; disks cost extra"
    yield f"undo: baretrain launch cancel {record.run_dir} --yes; baretrain launch clean {record.run_dir} --yes"
    yield (
        "EC2 would accept the request (DryRun in each subnet, which does not check capacity)"
        if cfg.check
        else "EC2 was not asked: values in <> or from conf/instance may differ; check=true asks it"
    )
