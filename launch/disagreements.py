"""Where a run's scheduler, its record and its run folder contradict one another, each with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launch.values import shown_duration
from train.run_folder.outcome import STOP_FILE
from train.storage.folders import is_s3

if TYPE_CHECKING:
    from launch.status import Status

ENDING_S = 120.0  # that a job may take to leave its machines after it has noted its end
LEAVING_S = 600.0  # that a trainer may take to end once it has written how it ended
SILENT_S = 900.0  # without a line of the metrics; a compilation may take as long
SILENT_IN_S3_S = 3600.0  # the metrics go there with every checkpoint only
GAPS = 5  # times the longest time between two lines so far that a run may be silent


def disagreements(status: Status) -> Iterator[str]:
    """One line for each contradiction."""
    yield from of_submission(status)
    yield from of_end(status)
    if status.kind == "train" and status.history.submission is not None:
        yield from of_outcome(status)
        yield from of_writer(status)
        yield from of_silence(status)
    for name in status.history.damaged:
        yield f"{status.run_dir}.launch/{name} cannot be read, so that what it says is missing here; it may be removed"
    for damage in status.progress.damage:
        yield f"{damage}: damaged, or another program wrote it"


def of_submission(status: Status) -> Iterator[str]:
    """The job in the record against what was submitted."""
    run, submission = status.run_dir, status.history.submission
    if submission is None:
        yield f"{run} has a job, but no submission is recorded: launch it again"
        return
    if not submission.handle and not submission.refusal:
        yield (
            f"the record does not say whether {submission.scheduler} has taken the job: the command that asked was "
            f"killed; look there for a job named after {run}, cancel it, then python -m launch resume {run}"
        )
    if submission.config_sha256 not in ("", status.config_sha256):
        yield (
            f"the job in the record of {run} is not the one that was submitted: its settings have another checksum; "
            "restore it, or launch the run again"
        )


def of_end(status: Status) -> Iterator[str]:
    """The scheduler against the end in the record."""
    run, answer, history = status.run_dir, status.answer, status.history
    submission, ended = history.submission, history.ended
    if answer.is_active is False and not history.has_end and submission is not None and submission.handle:
        how = "it was ended from outside" if answer.outcome else "it was killed, with its machine or by hand"
        begin = "what is whole" if status.kind == "prepare" else "the last checkpoint"
        yield (
            f"{answer.scheduler} has no such job any more ({answer.text}), but the record has no end: {how}; python -m "
            f"launch resume {run} continues from {begin}"
        )
    end_unix_s = history.cancelled_unix_s if ended is None else ended.time_unix_s
    if answer.is_active and history.has_end and status.time_unix_s - (end_unix_s or 0.0) > ENDING_S:
        yield (
            f"the record says that the job ended, {answer.scheduler} that it does not ({answer.text}): python -m "
            f"launch cancel {run} --yes frees its machines"
        )


def of_outcome(status: Status) -> Iterator[str]:
    """outcome.json and a file STOP against record and scheduler."""
    run, history, end = status.run_dir, status.history, status.progress.outcome
    if status.progress.has_stop_file and status.answer.is_active is False:
        yield (
            f"{run}/{STOP_FILE} is left of a request that no attempt obeyed: python -m launch resume removes it; "
            "before any other start remove it by hand, or the run stops at once"
        )
    if end is None:
        return
    if history.ended is not None and (history.ended.outcome == "done") != (end.outcome == "done"):
        yield (
            f"the record says {history.ended.outcome}, {run}/outcome.json says {end.outcome} ({end.reason}): the run "
            "folder counts; another job has written one of the two"
        )
    age_s = status.time_unix_s - (end.time_unix_s or 0.0)
    if status.is_active and has_written_end(status) and age_s > LEAVING_S:
        yield (
            f"the trainer wrote {shown_duration(age_s)} ago how it ended ({end.outcome}), but its attempt goes on: a "
            f"rank hangs; python -m launch logs {run} shows which, python -m launch cancel {run} --yes ends it"
        )


def has_written_end(status: Status) -> bool:
    """Whether outcome.json is of the attempt that still runs."""
    attempt, end = status.history.running_attempt, status.progress.outcome
    return attempt is not None and end is not None and (end.time_unix_s or 0.0) > (attempt.began_unix_s or 0.0)


def of_writer(status: Status) -> Iterator[str]:
    """The owner of the run folder against the job."""
    owner, submission = status.progress.owner, status.history.submission
    since_s = 0.0 if submission is None else submission.time_unix_s or 0.0
    writes = owner is not None and not owner.is_released and (status.progress.line_unix_s or 0.0) > since_s
    if owner is not None and writes and not is_ours(owner.job, owner.host, status):
        yield f"{status.run_dir} is written by another job ({owner.text}): stop that one before you resume this"


def is_ours(job: str | None, host: str, status: Status) -> bool:
    """Whether a lease is of this job: it names the job, or a machine that the job has or had."""
    history = status.history
    names = {str(value) for value in (history.submission.handle if history.submission else {}).values()}
    attempts = history.attempts[history.attempts_before :]
    machines = [*status.answer.nodes, *(node for each in attempts for node in each.nodes)]
    is_named = job is not None and (job in names or job.startswith(f"{status.job_id}."))
    return is_named or host.split(".")[0] in {machine.split(".")[0] for machine in machines}


def of_silence(status: Status) -> Iterator[str]:
    """An attempt that runs and writes nothing."""
    attempt, progress, run = status.history.running_attempt, status.progress, status.run_dir
    if not status.is_active or attempt is None or attempt.began_unix_s is None or has_written_end(status):
        return
    silent_s = status.time_unix_s - max(attempt.began_unix_s, progress.line_unix_s or 0.0)
    usual_s = max(progress.line_gap_s, progress.save_gap_s)
    if silent_s > max(GAPS * usual_s, SILENT_IN_S3_S if is_s3(run) else SILENT_S):
        yield (
            f"no new line in {run}/metrics.jsonl for {shown_duration(silent_s)} while the job runs: python -m launch "
            f"logs {run} shows what it does; if it hangs, cancel it and resume"
        )
