"""Submission of a job, and of the same job again: the record first, so that nothing runs that it does not know."""

from __future__ import annotations

from typing import Any

import yaml

from launch.job import Job
from launch.plan import check_unchanged
from launch.record import CONFIG, Record
from launch.schedulers import Handle, last_submission, scheduler
from train.config import InputError, PrepareConfig, TrainConfig, to_dict
from train.run_folder.outcome import STOP_FILE, read_outcome
from train.storage.untrusted import read_yaml


def submit(
    record: Record, job: Job, run: TrainConfig | PrepareConfig, *, plan: dict[str, Any], bundle: bytes
) -> Handle:
    """Write the record and start the job. InputError if the run has another job, or if its settings have changed."""
    settings = to_dict(run)
    if record.exists():
        check_idle(record)
        check_unchanged(read_yaml(record.folder.read(CONFIG)) or {}, settings, run_dir=record.run_dir)
    record.write(job, plan=plan, config=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), bundle=bundle)
    return start(record, job)


def resume(record: Record) -> Handle:
    """Start the last job again, with the code and the settings of then. InputError if it runs, or has nothing to do."""
    job = record.job()
    check_idle(record)
    outcome = read_outcome(record.run)
    if outcome.get("outcome") == "done":
        raise InputError(f"{record.run_dir} is done ({outcome['reason']}); there is nothing to resume")
    return start(record, job)


def start(record: Record, job: Job) -> Handle:
    if record.run.size(STOP_FILE) is not None:
        record.run.remove(STOP_FILE)  # a request to a job that has ended
    record.note("submitting", scheduler=job.scheduler, nodes=job.nodes, config_sha256=job.config_sha256, id=job.id)
    try:
        handle = scheduler(job.scheduler).submit(job, record)
    except InputError as error:  # after any other error nobody knows whether there is a job
        record.note("not_submitted", reason=str(error))
        raise
    record.note("submitted", scheduler=job.scheduler, handle=dict(handle), nodes=job.nodes)
    return handle


def check_idle(record: Record) -> None:
    """InputError if the last job of the run waits or runs."""
    event = last_submission(record)
    if event is None:
        return
    state = scheduler(str(event.details.get("scheduler"))).state(event.details.get("handle", {}))
    if state.is_active:
        raise InputError(
            f"{record.run_dir} has a job: {state.text}; watch it (python -m launch status {record.run_dir}) or stop "
            f"it first (python -m launch stop {record.run_dir})"
        )
