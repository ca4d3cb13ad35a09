"""The submission of a new or a resumed job. The record is written before the job starts: no job is without a record."""

from __future__ import annotations

import time
from typing import Any

import yaml

from launch import launched
from launch.launched import job_to_start
from launch.plan import check_unchanged
from launch.record import CONFIG, Job, Record
from launch.schedulers import cluster_of, scheduler
from launch.spec import Handle
from train.config import InputError, PrepareConfig, ShardsConfig, TrainConfig, check, to_dict
from train.data.shards.format import read_manifest
from train.run_folder.identity import ENVIRONMENT, check_is_run_folder
from train.run_folder.outcome import STOP_FILE, read_outcome
from train.storage.folders import is_s3, open_folder
from train.storage.schema import read_yaml

SUBMITTING_S = 120.0  # time for a scheduler to answer, during which no other submission is allowed


def submit(
    record: Record,
    job: Job,
    run: TrainConfig | PrepareConfig,
    *,
    plan: dict[str, Any],
    bundle: bytes,
) -> Handle:
    """Write the record and start the job. Raises InputError if the run has an active job or changed settings."""
    settings = to_dict(run)
    number = check_idle(record)
    if record.exists() and record.run.size(ENVIRONMENT) is not None:
        check_unchanged(
            read_yaml(record.folder.read(CONFIG)) or {}, settings, run_dir=record.run_dir
        )
    # the trainer makes these checks too, but only after the machines have started
    if isinstance(run, TrainConfig):
        check_is_run_folder(record.run, record.run.names_here())
        if isinstance(run.data, ShardsConfig) and (
            cluster_of(job).is_here or is_s3(str(run.data.path))
        ):
            read_manifest(open_folder(str(run.data.path), run.s3))
    claim(record, job, number)
    record.write(
        job,
        plan=plan,
        config=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
        bundle=bundle,
    )
    return start(record, job)


def resume(record: Record) -> tuple[Job, Handle]:
    """Start the last job again, unchanged. Raises InputError if it is active, is done, or may have been forged."""
    number, job = check_idle(record), job_to_start(record)
    outcome = read_outcome(record.run)
    is_done = outcome.get("outcome") == "done"
    check(
        not is_done,
        f"{record.run_dir} is done ({outcome.get('reason')}); there is nothing to resume",
    )
    claim(record, job, number)
    return job, start(record, job)


def claim(record: Record, job: Job, number: int) -> None:
    """Record the submission as event `number`. Raises InputError if another launch has taken that number."""
    details = {
        "scheduler": job.scheduler,
        "nodes": job.nodes,
        "config_sha256": job.config_sha256,
        "id": job.id,
    }
    is_first = record.append_event_as(number, "submitting", **details)
    check(
        is_first,
        f"another launch of {record.run_dir} came first: see baretrain launch status {record.run_dir}",
    )


def start(record: Record, job: Job) -> Handle:
    if record.run.size(STOP_FILE) is not None:
        record.run.remove(STOP_FILE)  # the file asked an earlier job to stop
    if record.is_remote:
        launched.keep(record)
    try:
        handle = scheduler(job.scheduler).submit(job, record)
    except InputError as error:  # after any other error the job may exist
        record.append_event("not_submitted", reason=str(error))
        raise
    record.append_event("submitted", scheduler=job.scheduler, handle=dict(handle), nodes=job.nodes)
    if record.is_remote:
        launched.keep(record, dict(handle))
    return handle


def check_idle(record: Record) -> int:
    """Return the number of the run's next event. Raises InputError if its last job is still waiting or running."""
    number, history = record.next_number(), record.history()
    asked = history.submission
    if asked is None or asked.rejection:
        return number
    # the answer was lost or has not arrived: only the scheduler knows whether there is a job
    if not asked.handle:
        age_s = max(0.0, time.time() - asked.time_unix_s)
        check(
            history.has_end or age_s >= SUBMITTING_S,
            f"{record.run_dir} has been waiting for an answer to its submission for {age_s:.0f} s: try again in "
            f"{SUBMITTING_S - age_s:.0f} s",
        )
        return number
    state = scheduler(asked.scheduler).state(record, asked.handle)
    check(
        not state.is_active,
        f"{record.run_dir} has a job: {state.text}; watch it (baretrain launch status {record.run_dir}) or stop it "
        f"first (baretrain launch stop {record.run_dir})",
    )
    return number
