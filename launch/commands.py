"""The commands `baretrain launch status | logs | stop | resume | cancel`. Those for EC2 are in launch/ec2."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch import logs, submit
from launch.ec2 import commands as ec2
from launch.ec2 import setup
from launch.record import CANCEL, JOB, STOP, Record
from launch.schedulers import scheduler
from launch.status import Status, lines_of, status
from train.config import Failure, S3Config
from train.machine.console import say
from train.run.command import DONE, Parser, add_s3_flags, command_parser, run_flags
from train.run_folder.outcome import STOP_FILE


@dataclass(frozen=True)
class Command:
    purpose: str
    examples: tuple[str, ...]
    add_flags: Callable[[Parser], None]
    act: Callable[[argparse.Namespace, S3Config], int]


def main(arguments: Sequence[str]) -> int:
    """Run a command line that begins with a name in TABLE; return the exit code."""
    name = arguments[0]
    command = TABLE[arguments[0]]
    parser = command_parser(f"launch {name}", command.purpose, examples=command.examples)
    command.add_flags(parser)
    add_s3_flags(parser, caches=False)
    return run_flags(parser, arguments[1:], command.act)


def of_run(parser: Parser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="run_dir of a launched run: a folder or s3://bucket/prefix"
    )


# ---- status, logs ----------------------------------------------------------------------------------------------------


def status_flags(parser: Parser) -> None:
    of_run(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def show_status(options: argparse.Namespace, s3: S3Config) -> int:
    seen = status(Record(options.run, s3))
    if options.json:
        say(seen.to_json())
    else:
        say(*lines_of(seen))
    return DONE


def logs_flags(parser: Parser) -> None:
    of_run(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "-f", "--follow", action="store_true", help="print new lines until the job has ended"
    )
    which.add_argument("--attempt", type=int, metavar="N", help="show this attempt (the last)")
    last = f"number of lines to print from the end of each file ({logs.LINES})"
    parser.add_argument("--lines", type=int, metavar="N", default=logs.LINES, help=last)


def show_logs(options: argparse.Namespace, s3: S3Config) -> int:
    record = Record(options.run, s3)
    record.job()  # raises InputError if the run was not launched
    if options.follow:
        logs.follow(record, options.lines)
    else:
        logs.show(record, options.attempt, options.lines)
    return DONE


# ---- stop, resume, cancel --------------------------------------------------------------------------------------------


def stop(options: argparse.Namespace, s3: S3Config) -> int:
    record = Record(options.run, s3)
    seen = active(record, "stop")
    if seen is None:
        return DONE
    # The trainer rejects a folder that contains only STOP.
    has_begun = bool(seen.answer.nodes) and seen.progress.exists
    if not has_begun:
        end(record, seen)
        say(
            f"{record.run_dir}: the job was cancelled, since training had not begun ({seen.answer.text})"
        )
        return DONE
    if not seen.history.is_stop_asked:
        # Record the request first: a supervisor removes a STOP file for which there is no request.
        record.ask(STOP)
    record.run.write(STOP_FILE, b"")
    say(f"{record.run_dir} was asked to save a checkpoint and stop after its next step")
    say(f"baretrain launch logs {record.run_dir} -f ends when it has stopped")
    return DONE


def resume_flags(parser: Parser) -> None:
    of_run(parser)
    vouched = (
        "checksum that the launch printed; needed for a run in S3 that another computer launched"
    )
    parser.add_argument("--job-sha256", metavar="DIGEST", default="", help=vouched)


def resume(options: argparse.Namespace, s3: S3Config) -> int:
    record = Record(options.run, s3, options.job_sha256)
    job, handle = submit.resume(record)
    say(f"{record.run_dir} was submitted again: baretrain launch status {record.run_dir}")
    return scheduler(job.scheduler).attend(job, record, handle, detach=True)


def cancel_flags(parser: Parser) -> None:
    of_run(parser)
    parser.add_argument(
        "--yes",
        action="store_true",
        help="cancel the job; without --yes, only say what would be lost",
    )


def cancel(options: argparse.Namespace, s3: S3Config) -> int:
    record = Record(options.run, s3)
    seen = active(record, "cancel")
    if seen is None:
        return DONE
    if options.yes:
        end(record, seen)
        say(f"{record.run_dir}: the job was cancelled; {lost(seen)}")
        return DONE
    say(f"{record.run_dir}: the job would end immediately ({seen.answer.text}); {lost(seen)}")
    say("nothing was cancelled: --yes cancels the job; launch stop ends it with a checkpoint")
    return DONE


def active(record: Record, name: str) -> Status | None:
    """Return the status of a run that has an active job. If it has none, say that there is nothing to do; return None.

    Raises Failure if the scheduler does not answer, or if the scheduler in the record differs from that of the job.
    """
    seen = status(record)
    submission = seen.history.submission
    if submission is not None and submission.scheduler != record.job().scheduler:
        # Whoever can write to the record must neither end another job nor hide this one.
        raise Failure(
            f"{record.location}/submissions names cluster={submission.scheduler}, but {JOB} names "
            f"cluster={record.job().scheduler}: nothing was done"
        )
    if seen.answer.is_active is None:
        raise Failure(f"{record.run_dir}: {seen.answer.failure}")
    if not seen.answer.is_active:
        say(f"nothing to {name}: {record.run_dir} has no job ({seen.state})")
        return None
    return seen


def end(record: Record, seen: Status) -> None:
    submission = seen.history.submission
    assert submission is not None
    # Record the request first: it keeps supervisors from starting attempts, and launches on EC2 from starting machines.
    record.ask(CANCEL)
    if record.run.size(STOP_FILE) is not None:
        record.run.remove(STOP_FILE)  # otherwise it would stop the next job
    scheduler(submission.scheduler).cancel(record, submission.handle)


def lost(seen: Status) -> str:
    """Say what a run loses if it ends now."""
    if seen.progress.step is None or seen.history.running_attempt is None:
        return "no step is lost"
    saved = "there is no checkpoint yet"
    if seen.progress.checkpoint is not None:
        saved = f"the newest checkpoint is from step {seen.progress.checkpoint:,}"
    return f"step {seen.progress.step:,} was reached, but {saved}: later steps may be lost"


# ---- table -----------------------------------------------------------------------------------------------------------

TABLE = {
    "status": Command(
        "Show the state of a run from its scheduler, its record and its run folder.",
        ("runs/mine", "s3://bucket/runs/mine --json"),
        status_flags,
        show_status,
    ),
    "logs": Command(
        "Print the logs of a run's job, and of the machines of its last attempt.",
        ("runs/mine", "runs/mine -f", "runs/mine --attempt 3 --lines 20"),
        logs_flags,
        show_logs,
    ),
    "stop": Command(
        "Stop a run with a checkpoint; resume continues it.", ("runs/mine",), of_run, stop
    ),
    "resume": Command(
        "Start the job of a run again, with the same code and settings.",
        ("runs/mine",),
        resume_flags,
        resume,
    ),
    "cancel": Command(
        "End the job of a run immediately, without a checkpoint.",
        ("runs/mine",),
        cancel_flags,
        cancel,
    ),
    "clean": Command(
        "End all machines of a run on EC2, and verify that none is left.",
        ("s3://bucket/runs/mine", "s3://bucket/runs/mine --yes"),
        ec2.clean_flags,
        ec2.clean,
    ),
    "setup": Command(
        "Make what all runs on EC2 share: the machines' role, security group and placement groups.",
        ("s3://bucket/runs --data s3://bucket/albert --region us-east-1",),
        setup.add_flags,
        setup.setup,
    ),
}
