"""The submission of a new or a resumed job. The record is written before the job starts: no job is without a record."""

from __future__ import annotations

import time
from dataclasses import replace

import yaml

from launch import launched
from launch.launched import job_to_start
from launch.record import Job, Record, Submission
from launch.schedulers import cluster_of, scheduler
from launch.spec import Handle
from train.config import InputError, ShardsConfig, TrainConfig, check, to_dict
from train.data.shards.manifest import read_manifest
from train.run_folder.identity import check_is_run_folder
from train.run_folder.outcome import STOP_FILE, read_outcome
from train.storage.folders import is_s3, open_folder

SUBMITTING_S = 120.0  # time for a scheduler to answer, during which no other submission is allowed


def submit(record: Record, job: Job, run: TrainConfig, bundle: bytes) -> Handle:
    """Write the record and start the job. Raises InputError if the run has an active job."""
    number = check_idle(record)
    check_run(record, job, run)
    submission = claim(record, job, number)
    text = yaml.safe_dump(to_dict(run), sort_keys=False, allow_unicode=True)
    record.write(job, config=text, bundle=bundle)
    return start(record, job, submission)


def check_run(record: Record, job: Job, run: TrainConfig) -> None:
    """Raise InputError if the trainer would reject the run folder or the data, after the machines have started."""
    check_is_run_folder(record.run, record.run.names_here())
    if isinstance(run.data, ShardsConfig):
        path = str(run.data.path)
        if is_s3(path) or cluster_of(job).is_here:
            read_manifest(open_folder(path, run.s3))


def resume(record: Record) -> tuple[Job, Handle]:
    """Start the last job again, unchanged. Raises InputError if it is active, is done, or may have been forged."""
    number = check_idle(record)
    job = job_to_start(record)
    outcome = read_outcome(record.run)
    is_done = outcome.get("outcome") == "done"
    check(
        not is_done,
        f"{record.run_dir} is done ({outcome.get('reason')}); there is nothing to resume",
    )
    submission = claim(record, job, number)
    return job, start(record, job, submission)


def claim(record: Record, job: Job, number: int) -> Submission:
    """Record the submission. Raises InputError if another launch has taken its number."""
    submission = record.claim(number, job.scheduler, job.nodes)
    if submission is None:
        raise InputError(
            f"another launch of {record.run_dir} came first: see baretrain launch status {record.run_dir}"
        )
    return submission


def start(record: Record, job: Job, submission: Submission) -> Handle:
    if record.run.size(STOP_FILE) is not None:
        record.run.remove(STOP_FILE)  # the file asked an earlier job to stop
    if record.is_remote:
        launched.keep(record)
    try:
        handle = scheduler(job.scheduler).submit(job, record)
    except InputError as error:  # after any other error the job may exist
        record.keep_answer(replace(submission, rejection=str(error) or "rejected"))
        raise
    record.keep_answer(replace(submission, handle=dict(handle)))
    if record.is_remote:
        launched.keep(record, dict(handle))
    return handle


def check_idle(record: Record) -> int:
    """Return the number of the run's next submission. Raises InputError if its last job is still waiting or running."""
    number = record.next_submission()
    history = record.history()
    last = history.submission
    if last is None or last.rejection:
        return number
    if not last.handle:
        # The answer was lost or has not arrived: only the scheduler knows whether there is a job.
        age_s = max(0.0, time.time() - last.time_unix_s)
        check(
            history.has_end or age_s >= SUBMITTING_S,
            f"{record.run_dir} has been waiting for an answer to its submission for {age_s:.0f} s: try again in "
            f"{SUBMITTING_S - age_s:.0f} s",
        )
        return number
    state = scheduler(last.scheduler).state(record, last.handle)
    check(
        not state.is_active,
        f"{record.run_dir} has a job: {state.text}; watch it (baretrain launch status {record.run_dir}) or stop it "
        f"first (baretrain launch stop {record.run_dir})",
    )
    return number
