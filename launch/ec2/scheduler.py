"""Machines of EC2 as a scheduler: a launch resolves what its settings mean, and then stays until the run has ended."""

from __future__ import annotations

import re
import time
from typing import Any

from launch import spec
from launch.config import LaunchConfig
from launch.ec2 import calls, clean, preview, sweep
from launch.ec2.account import read_resolved, resolve
from launch.ec2.api import Api
from launch.ec2.clean import Machine, look
from launch.ec2.config import Ec2Config
from launch.ec2.launcher import Launcher, undo
from launch.engines import INSTANCE
from launch.job import Job
from launch.record import Record
from launch.schedulers import cluster_of
from launch.spec import Handle, State
from launch.values import shown_duration, table, texts
from train.cli.command import INTERRUPTED, printable
from train.config import InputError, check


class Scheduler(spec.Scheduler):
    def request(self, job: Job, record: Record) -> list[str]:
        check_job(job, cluster_of(job, Ec2Config), record)
        return []

    def preview(self, job: Job, record: Record, cfg: LaunchConfig) -> str:
        return "\n".join(preview.lines(job, cluster_of(job, Ec2Config), record, cfg))

    def details(self, job: Job, record: Record, cfg: LaunchConfig) -> dict[str, Any]:
        return {"run_instances": preview.planned(job, cluster_of(job, Ec2Config), record, cfg)[1]}

    def submit(self, job: Job, record: Record) -> Handle:
        """Find out what the settings come to. It makes nothing: `attend` does."""
        check_job(job, cluster_of(job, Ec2Config), record)
        api = open_api(record)
        resolved = resolve(job, cluster_of(job, Ec2Config), record, api)
        regions = list(dict.fromkeys([*resolved.regions, *calls.call_regions(record)]))
        left = clean.left_over(api, record, regions, set(), time.time())
        there = [str(each) for each in left if each.kind == "instance"]
        check(
            not there,
            f"EC2 has machines of this run already, or may have: {', '.join(there)}; python -m launch clean "
            f"{record.run_dir} --yes",
        )
        resolved.write(record)
        return {"regions": resolved.regions, "submission": resolved.id, "process": calls.own_process()}

    def attend(self, job: Job, record: Record, handle: Handle, *, detach: bool) -> int:
        """Have the machines made, and wait for the end of the run; its exit code."""
        resolved = read_resolved(record)
        if resolved is None or resolved.id != handle.get("submission"):
            raise InputError(f"another launch of {record.run_dir} has begun; this one ends")
        try:
            return Launcher(record, job, cluster_of(job, Ec2Config), resolved, open_api(record)).run()
        except KeyboardInterrupt:
            print(printable(f"this launch ends; its machines train on, and end by themselves. {undo(record)}"))
            return INTERRUPTED

    def state(self, record: Record, handle: Handle) -> State:
        seen = look(open_api(record), texts(handle, "regions"), record)
        alive = [each for each in seen if each.is_alive]
        may_be = clean.unlisted(record, {each.id for each in seen}, time.time())
        asks = asks_text(record, handle)
        parts = [text_of(alive), *(str(each) for each in may_be if each.kind == "instance"), *([asks] if asks else [])]
        hosts = [each.host or each.id for each in alive]
        return State(is_active=bool(alive or len(parts) > 1), text="; ".join(parts), nodes=hosts)

    def cancel(self, record: Record, handle: Handle) -> None:
        """End the machines now. The record says so first, so that the launch makes nothing more."""
        api = open_api(record)
        record.append_event("cancelling")
        sweep.delete(api, clean.left_over(api, record, texts(handle, "regions"), set(), time.time()))
        print(printable(f"python -m launch clean {record.run_dir} --yes proves that nothing is left"))


def check_job(job: Job, cluster: Ec2Config, record: Record) -> None:
    """InputError for what no account could change."""
    check(job.kind == "train", "cluster=ec2 trains; prepare=true is for cluster=local and cluster=slurm")
    check(
        job.spares == 0,
        f"spares={job.spares}: cluster=ec2 replaces no single machine; cluster=parallelcluster with Slurm does",
    )
    check(
        record.is_remote, f"run_dir={record.run_dir} must be in S3 (s3://bucket/runs/mine): machines share nothing else"
    )
    check(
        re.fullmatch(INSTANCE, job.instance) is not None,
        f"instance={job.instance} is no type of EC2: name one, as instance=trn1.32xlarge",
    )
    check(
        record.s3.profile is None,
        f"s3.profile={record.s3.profile}: machines have no ~/.aws but a role; leave it out, and set AWS_PROFILE here",
    )
    check(
        record.s3.region is not None or record.s3.endpoint is not None,
        "s3.region is missing: machines have no ~/.aws that says where the bucket is; set it (after --), as "
        "s3.region=us-east-1",
    )
    check(
        cluster.instance_profile is not None,
        "cluster.instance_profile is missing: the name of the machines' role, without which they reach no bucket; "
        "python -m launch iam prints what it needs",
    )
    local = [each for each in job.overrides if re.match(r"(data\.path|model\.init_from|model\.tokenizer)=/", each)]
    check(not local, f"{' '.join(local)}: machines of EC2 do not see this machine's folders; copy it to S3")


def open_api(record: Record) -> Api:
    return Api(record.s3.profile, record.s3.region)


def asks_text(record: Record, handle: Handle) -> str:
    """What the launch does while it has no machines: empty if it has ended, as far as the record shows."""
    kinds = ("submitted", "requeued", "machines", *calls.STOPS)
    last = next((each for each in reversed(record.events()) if each.kind in kinds), None)
    if last is None or last.kind not in ("submitted", "requeued"):
        return ""
    asked = [call for call in calls.read_calls(record) if call.submission == handle.get("submission")]
    age_s = time.time() - max([last.time_unix_s, *(call.sent_unix_s for call in asked)])
    is_running = calls.is_running(table(handle, "process"))
    if is_running or (is_running is None and age_s < 2 * calls.LISTS_S):
        error = next((call.error for call in reversed(asked) if call.operation == calls.RUN), "") or "no answer yet"
        return f"its launch asks for machines ({error}, {shown_duration(max(0.0, age_s))} ago)"
    return ""


def text_of(alive: list[Machine]) -> str:
    """The machines in a few words."""
    if not alive:
        return "no machines"
    zones = ", ".join(sorted({each.zone for each in alive}))
    waiting = sum(each.state == "pending" for each in alive)
    return f"{len(alive)} machines in {zones}{f', {waiting} of them pending' if waiting else ''}"
