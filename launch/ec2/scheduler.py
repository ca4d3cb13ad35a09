"""EC2 as a scheduler: a launch resolves its settings, makes the machines, and waits until the run has ended.

The plan shows the highest cost, and how to undo everything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict

from launch import spec
from launch.config import LaunchConfig
from launch.ec2.account import OWN_IMAGE, Resolved, resolve
from launch.ec2.api import Api
from launch.ec2.config import Ec2Config
from launch.ec2.instances import find, regions_of, terminate
from launch.ec2.launcher import Launcher, undo
from launch.ec2.request import SPARE_S
from launch.record import Job, Record
from launch.schedulers import cluster_of
from launch.spec import Handle, State
from launch.values import shown_duration, text
from train.config import Failure, check
from train.config.backend import CUDA
from train.machine.console import say
from train.machine.host import is_ec2_type
from train.machine.processes import is_gone, owner_name
from train.run.command import INTERRUPTED
from train.storage import schema


class Scheduler(spec.Scheduler):
    def request(self, job: Job, record: Record) -> list[str]:
        check_job(job, record)
        return []

    def preview(self, job: Job, record: Record, cfg: LaunchConfig, hours: float | None) -> str:
        cluster = cluster_of(job, Ec2Config)
        image = cluster.image or OWN_IMAGE.format(cfg.instance.device or CUDA)
        subnets = ", ".join(cluster.subnets) or "those of the default VPC"
        lines = [
            f"image {image}; subnets {subnets}; {cluster.market}",
            *cost_lines(cluster, cfg, hours),
            f"undo: {undo(record)}",
            "EC2 was not asked",
        ]
        return "\n".join(lines)

    def submit(self, job: Job, record: Record) -> Handle:
        """Resolve the settings. The machines are made later, by `attend`."""
        check_job(job, record)
        api = open_api(record)
        resolved = resolve(job, cluster_of(job, Ec2Config), record, api)
        regions = regions_of(record, [site.region for site in resolved.sites])
        there = [str(each) for each in find(api, record, regions) if each.is_left]
        check(
            not there,
            f"EC2 has machines of this run already: {', '.join(there)}. {undo(record)}",
        )
        return {"resolved": asdict(resolved), "process": owner_name(os.getpid())}

    def attend(self, job: Job, record: Record, handle: Handle, *, detach: bool) -> int:
        """Make the machines, wait for the end of the run, and return its exit code."""
        resolved = schema.record(Resolved, handle["resolved"])
        cluster = cluster_of(job, Ec2Config)
        try:
            return Launcher(record, job, cluster, resolved, open_api(record)).run()
        except KeyboardInterrupt:
            say(
                f"this launch ends; its machines continue to train, and then shut down. {undo(record)}"
            )
            return INTERRUPTED

    def state(self, record: Record, handle: Handle) -> State:
        found = find(open_api(record), record, regions_of(record))
        alive = [each for each in found if each.is_alive]
        if alive:
            zones = sorted({str(each.seen["Placement"]["AvailabilityZone"]) for each in alive})
            hosts = [str(each.seen.get("PrivateDnsName") or each.id) for each in alive]
            return State(
                is_active=True,
                text=f"machines in {', '.join(zones)}: {len(alive)}",
                nodes=[host.partition(".")[0] for host in hosts],
            )
        if record.history().has_end or is_gone(text(handle, "process")):
            return State(is_active=False, text="no machines")
        return State(is_active=True, text="its launch asks EC2 for machines")

    def unanswered(self, record: Record) -> State:
        """Return the state before the submission is recorded: only an earlier launch may have machines."""
        return self.state(record, {})

    def cancel(self, record: Record, handle: Handle) -> None:
        """End the machines. The cancellation must have been recorded. Raises Failure if machines may still train."""
        api = open_api(record)
        regions = regions_of(record)
        terminate(api, [each for each in find(api, record, regions) if each.is_left])
        left = [str(each) for each in find(api, record, regions) if each.is_alive]
        if left:
            raise Failure(f"EC2 still has {', '.join(left)}. {undo(record)}")
        say(f"baretrain launch clean {record.run_dir} --yes looks until none can appear")


def open_api(record: Record) -> Api:
    return Api(record.s3.region)


def check_job(job: Job, record: Record) -> None:
    """Raise InputError if no AWS account could run a job with these settings."""
    s3 = record.s3
    check(
        record.is_remote,
        f"run_dir={record.run_dir} must be in S3 (s3://bucket/runs/mine): machines have no other shared storage",
    )
    check(
        is_ec2_type(job.instance),
        f"instance={job.instance} is not an EC2 instance type: name one, such as instance=trn1.32xlarge",
    )
    check(
        bool(s3.region or s3.endpoint),
        "s3.region is missing: machines have no ~/.aws with the bucket's region; set it (after --), as "
        "s3.region=us-east-1",
    )


# ---- the plan --------------------------------------------------------------------------------------------------------


def cost_lines(cluster: Ec2Config, cfg: LaunchConfig, hours: float | None) -> Iterator[str]:
    """Yield the highest cost: a timer ends the machines SPARE_S after max_run_s."""
    price = cfg.instance.usd_per_hour
    longest_s = cluster.max_run_s + SPARE_S
    limit = (
        f"{shown_duration(longest_s)} (cluster.max_run_s, plus {shown_duration(SPARE_S)} to save)"
    )
    if price is None:
        yield f"cost: {cfg.nodes} machines for at most {limit}; the price is unknown (instance.usd_per_hour)"
        return
    per_hour = cfg.nodes * price
    most_usd = math.ceil(per_hour * longest_s / 3600)
    yield f"cost: at most ${most_usd:,}: {cfg.nodes} x ${price:.2f} an hour x {limit}; disks cost extra"
    if hours is not None and hours * 3600 > cluster.max_run_s:
        yield f"that is for a part of the run; the whole costs about ${math.ceil(per_hour * hours):,}"
