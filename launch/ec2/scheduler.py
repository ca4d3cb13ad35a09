"""Machines of EC2 as a scheduler: a launch resolves what its settings mean, and starts the watcher."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from launch.config import LaunchConfig
from launch.ec2 import watchers
from launch.ec2.config import Ec2Config
from launch.ec2.request import run_id
from launch.ec2.resolved import read_resolved
from launch.job import Job
from launch.record import Record
from launch.schedulers import Handle, State, cluster_of
from launch.values import texts
from train.config import InputError, S3Config, check
from train.host.processes import is_alive, read_process
from train.storage.untrusted import record as checked

if TYPE_CHECKING:
    from launch.ec2.api import Api
    from launch.ec2.machines import Machine

TYPE = re.compile(r"[a-z][a-z0-9-]*\.[a-z0-9-]+")
LOG = "watch.txt"


class Scheduler:
    def request(self, job: Job, record: Record) -> list[str]:
        check_job(job, settings(job), record)
        return watcher(record)

    def preview(self, job: Job, record: Record, cfg: LaunchConfig) -> str:
        from launch.ec2.preview import lines

        return "\n".join(lines(job, settings(job), record, cfg))

    def submit(self, job: Job, record: Record) -> Handle:
        from launch.ec2.machines import look
        from launch.ec2.quota import check_quotas
        from launch.ec2.resolve import resolve

        cluster = settings(job)
        check_job(job, cluster, record)
        api = open_api(record)
        resolved = resolve(job, cluster, record, api)
        if cluster.capacity_reservation is None:
            check_quotas(api, resolved.regions, job.instance, job.nodes + job.spares, cluster.market)
        there = [each.id for each in look(api, resolved.regions, run_id(record)) if each.is_alive]
        check(
            not there,
            f"EC2 has machines of this run already ({', '.join(there)}): python -m launch clean {record.run_dir} --yes",
        )
        resolved.write(record)
        return start_watcher(record, resolved.regions)

    def find(self, job: Job, record: Record) -> Handle | None:
        resolved = read_resolved(record)
        if resolved is None:
            return None
        seen = watchers.read_watcher(record)
        process = (seen.host, seen.pid, seen.started) if seen is not None else ("", 0, 0)
        handle = handle_of(record, resolved.regions, *process)
        return handle if self.state(handle).is_active else None

    def state(self, handle: Handle) -> State:
        record, regions = of_handle(handle)
        api, now_s = open_api(record), time.time()
        from launch.ec2.machines import look

        alive = [each for each in look(api, regions, run_id(record)) if each.is_alive]
        seen = watchers.read_watcher(record)
        has_begun = seen is not None and seen.is_there(now_unix_s=now_s)
        is_watched = has_begun or is_starting(handle)
        return State(
            is_active=bool(alive) or is_watched,
            text=f"{text_of(alive)}; {watcher_text(seen, is_watched, record)}",
            nodes=[each.host or each.id for each in alive],
        )

    def cancel(self, handle: Handle) -> None:
        """End the machines now. The watcher removes the rest; without one it is done here."""
        from launch.ec2 import clean
        from launch.ec2.clock import Clock
        from launch.ec2.machines import look, terminate

        record, regions = of_handle(handle)
        api = open_api(record)
        record.note("cancelling")  # first, or the watcher would replace what ends here
        seen = watchers.read_watcher(record)
        if seen is not None and seen.is_there(now_unix_s=time.time()):
            terminate(api, look(api, regions, run_id(record)))
            return
        if left := clean.remove(api, regions, run_id(record), Clock()):
            raise InputError(f"left on EC2: {', '.join(map(str, left))}: python -m launch clean {record.run_dir} --yes")


def check_job(job: Job, cluster: Ec2Config, record: Record) -> None:
    """InputError for what no account could change."""
    check(job.kind == "train", "cluster=ec2 trains; prepare=true is for cluster=local and cluster=slurm")
    check(
        record.is_remote, f"run_dir={record.run_dir} must be in S3 (s3://bucket/runs/mine): machines share nothing else"
    )
    check(
        TYPE.fullmatch(job.instance) is not None,
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
    check(
        "preempt.rebalance=leave" not in job.overrides,
        "preempt.rebalance=leave: nobody replaces a machine that still lives; leave it out with cluster=ec2",
    )
    local = [each for each in job.overrides if re.match(r"(data\.path|model\.init_from|model\.tokenizer)=/", each)]
    check(not local, f"{' '.join(local)}: machines of EC2 do not see this machine's folders; copy it to S3")


def settings(job: Job) -> Ec2Config:
    cluster = cluster_of(job)
    assert isinstance(cluster, Ec2Config)
    return cluster


def open_api(record: Record) -> Api:
    from launch.ec2.api import Api  # boto3 takes long to import, and a plan does without

    return Api(record.s3.profile, record.s3.region)


# ---- watcher ---------------------------------------------------------------------------------------------------------


def watcher(record: Record) -> list[str]:
    return [sys.executable, "-m", "launch.ec2.watch", record.run_dir, *record.s3.flags()]


def start_watcher(record: Record, regions: list[str]) -> Handle:
    """Start the watcher in the background, where it survives this terminal."""
    logs = record.local_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / LOG).open("ab") as output:
        process = subprocess.Popen(
            watcher(record),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = read_process(process.pid)
    return handle_of(record, regions, platform.node(), process.pid, started.started if started else 0)


def handle_of(record: Record, regions: list[str], host: str, pid: int, started: int) -> Handle:
    return {
        "host": host,
        "pid": pid,
        "started": started,
        "regions": regions,
        "run_dir": record.run_dir,
        "s3": asdict(record.s3),
    }


def is_starting(handle: Handle) -> bool:
    """Whether the process that the launch has started runs, which may not have said anything yet."""
    pid, started = handle.get("pid"), handle.get("started")
    is_here = handle.get("host") == platform.node() and isinstance(pid, int) and pid > 1
    return is_here and is_alive(int(pid or 0), started if isinstance(started, int) else None) is not False


def watcher_text(seen: watchers.Watcher | None, is_watched: bool, record: Record) -> str:
    if not is_watched:
        again = f"python -m launch watch {record.run_dir} starts it again"
        return "its watcher has ended" if seen and seen.doing.startswith("done") else f"its watcher is gone: {again}"
    return "its watcher starts" if seen is None else f"its watcher on {seen.host}: {seen.doing}"


def of_handle(handle: Handle) -> tuple[Record, list[str]]:
    """The record and the regions that a handle names. BadContent for one that names none."""
    run_dir, s3 = handle.get("run_dir"), handle.get("s3")
    if not isinstance(run_dir, str):
        raise InputError(f"the record names no run: {run_dir!r}")
    return Record(run_dir, checked(S3Config, s3, "s3")), texts(handle, "regions")


def text_of(alive: list[Machine]) -> str:
    """The machines in a few words."""
    if not alive:
        return "no machines"
    zones = ", ".join(sorted({each.zone for each in alive}))
    waiting = sum(each.state == "pending" for each in alive)
    return f"{len(alive)} machines in {zones}{f', {waiting} of them pending' if waiting else ''}"
