"""Submission of a job, and of the same job again: the record first, so that nothing runs that it does not know."""

from __future__ import annotations

import time
from typing import Any

import yaml

from launch.job import Job
from launch.plan import check_unchanged
from launch.record import CONFIG, Record
from launch.schedulers import cluster_of, last_submission, scheduler
from launch.spec import Handle
from train.config import InputError, PrepareConfig, ShardsConfig, TrainConfig, check, to_dict
from train.data.shards.format import read_manifest
from train.run_folder.outcome import STOP_FILE, read_outcome
from train.run_folder.ownership import ENVIRONMENT, check_is_run_folder
from train.storage.folders import is_s3, open_folder
from train.storage.schema import read_yaml

SUBMITTING_S = 120.0  # that a scheduler may take to answer: nobody else submits meanwhile
SUBMISSION = ("submitting", "submitted", "not_submitted", "cancelled", "ended")  # events that begin or settle one


def submit(
    record: Record, job: Job, run: TrainConfig | PrepareConfig, *, plan: dict[str, Any], bundle: bytes
) -> Handle:
    """Write the record and start the job. InputError if the run has another job, or if its settings have changed."""
    settings = to_dict(run)
    number = check_idle(record)
    if record.exists() and record.run.size(ENVIRONMENT) is not None:
        check_unchanged(read_yaml(record.folder.read(CONFIG)) or {}, settings, run_dir=record.run_dir)
    if isinstance(run, TrainConfig):
        check_startable(record, run, is_here=cluster_of(job).is_here)
    claim(record, job, number)
    record.write(job, plan=plan, config=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), bundle=bundle)
    return start(record, job)


def check_startable(record: Record, run: TrainConfig, *, is_here: bool) -> None:
    """InputError for what the trainer would reject on the machines, as far as this one sees what they see."""
    data_path = str(run.data.path)
    check_is_run_folder(record.run, record.run.names_here())
    if isinstance(run.data, ShardsConfig) and (is_here or is_s3(data_path)):
        read_manifest(open_folder(data_path, run.s3))


def resume(record: Record) -> Handle:
    """Start the last job again, with the code and the settings of then. InputError if it runs, or has nothing to do."""
    job = record.job()
    number = check_idle(record)
    outcome = read_outcome(record.run)
    if outcome.get("outcome") == "done":
        raise InputError(f"{record.run_dir} is done ({outcome['reason']}); there is nothing to resume")
    claim(record, job, number)
    return start(record, job)


def claim(record: Record, job: Job, number: int) -> None:
    """Note the submission as the event of this number. InputError if another one came first."""
    details = {"scheduler": job.scheduler, "nodes": job.nodes, "config_sha256": job.config_sha256, "id": job.id}
    if not record.append_event_as(number, "submitting", **details):
        raise InputError(f"another launch of {record.run_dir} came first: python -m launch status {record.run_dir}")


def start(record: Record, job: Job) -> Handle:
    if record.run.size(STOP_FILE) is not None:
        record.run.remove(STOP_FILE)  # a request to a job that has ended
    try:
        handle = scheduler(job.scheduler).submit(job, record)
    except InputError as error:  # after any other error nobody knows whether there is a job
        record.append_event("not_submitted", reason=str(error))
        raise
    record.append_event("submitted", scheduler=job.scheduler, handle=dict(handle), nodes=job.nodes)
    return handle


def check_idle(record: Record) -> int:
    """The number of the next event of a run without a job. InputError if its last job waits or runs."""
    number = record.next_number()
    asked = next((each for each in reversed(record.events()) if each.kind in SUBMISSION), None)
    if asked is not None and asked.kind == "submitting":  # if its answer was lost, the scheduler knows of the job
        age_s = max(0.0, time.time() - asked.time_unix_s)
        check(
            age_s >= SUBMITTING_S,
            f"{record.run_dir} is being launched by {asked.host} for {age_s:.0f} s: try again in {SUBMITTING_S:.0f} s",
        )
    event = last_submission(record)
    if event is None:
        return number
    state = scheduler(str(event.details.get("scheduler"))).state(record, event.details.get("handle", {}))
    if state.is_active:
        raise InputError(
            f"{record.run_dir} has a job: {state.text}; watch it (python -m launch status {record.run_dir}) or stop "
            f"it first (python -m launch stop {record.run_dir})"
        )
    return number
