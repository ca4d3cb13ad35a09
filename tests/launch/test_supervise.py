"""What follows an attempt: another one, a requeue, or the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launched import Launched

from launch import node
from launch.config import LocalConfig
from launch.record import CANCEL, STOP, Attempt, History, Record, Request, Submission
from launch.slurm.config import SlurmConfig
from launch.supervise import (
    Decision,
    StopFile,
    conclude,
    decide,
    recording_failure,
    retry,
    supervise,
)
from train.config import InputError, Unreachable, check
from train.run.command import REJECTED
from train.run_folder.outcome import STOP_FILE, Outcome, write_outcome

CLUSTER = SlurmConfig()
LIMIT = "the time limit is near"
SUBMISSION = Submission(2, "fake", 1, 0.0)


def tried(outcome: str = "failed", *, saved: bool = False, submission: int = 2, **more) -> Attempt:
    """An attempt that is over."""
    given = {"checkpoint": 10 if saved else 0, "ended_unix_s": 1.0, "outcome": outcome, **more}
    return Attempt(1, submission, ["n1"], "n1:1", 0.0, 0, **given)


def history(*attempts: Attempt, asked: str = "") -> History:
    return History(SUBMISSION, Request(asked, 0.0) if asked else None, list(attempts))


FIRST = history(tried())
ASKED = history(tried(), asked=STOP)


def decided(ended="", kind="x", *, goes_on=True, history=FIRST, cluster=CLUSTER, **options):
    """What follows an attempt that ended so; an empty outcome is one that was killed with its machine."""
    outcome = {"outcome": ended, "kind": kind, "reason": "why", "goes_on": goes_on}
    decision = decide(outcome if ended else {}, history, cluster, exit_code=1, **options)
    assert decision.reason
    return decision


@pytest.mark.parametrize(
    ("attempt", "options", "expected"),
    [
        (["done"], {}, ("end", "done")),
        (["refused"], {"goes_on": False}, ("end", "refused")),
        (["failed"], {"goes_on": False}, ("end", "failed")),
        (["failed"], {}, ("again", "failed")),
        (["failed"], {"asked": LIMIT}, ("requeue", "failed")),
        (["stopped", "stop_file"], {}, ("end", "stopped")),
        (["stopped", "stop_file"], {"asked": LIMIT}, ("requeue", "stopped")),
        (["stopped", "max_run_s"], {}, ("end", "stopped")),
        (["stopped", "spot_notice"], {}, ("requeue", "stopped")),
        # Preempted: Slurm signals the tasks alone.
        (["stopped", "SIGTERM"], {}, ("requeue", "stopped")),
        # A torchrun that is killed: no scheduler is there to requeue the job.
        (["stopped", "SIGTERM"], {"cluster": LocalConfig()}, ("again", "stopped")),
        (["stopped", "spot_notice"], {"cluster": LocalConfig()}, ("requeue", "stopped")),
        ([], {}, ("again", "failed")),
        # Before the run folder was taken; the outcome may be an earlier attempt's.
        ([], {"rejection": "no data"}, ("end", "refused")),
        (["failed"], {"rejection": "no data"}, ("end", "refused")),
        # A stop that was asked for ends even a run that failed, but hides no failure for good.
        (["failed"], {"history": ASKED}, ("end", "stopped")),
        (["failed"], {"history": ASKED, "goes_on": False}, ("end", "failed")),
    ],
)
def test_what_follows_an_attempt(attempt, options, expected):
    decision = decided(*attempt, **options)
    assert (decision.next, decision.outcome) == expected


@pytest.mark.parametrize("kind", ["failed", "stopped"])
@pytest.mark.parametrize(
    ("limit", "attempts"),
    [("20 attempts failed", [tried(saved=True)] * 20), ("nothing new", [tried()] * 2)],
)
def test_a_job_gives_up(kind, limit, attempts):
    decision = decided(kind, history=history(*attempts), asked=LIMIT)
    assert (decision.next, decision.outcome) == ("end", "failed") and limit in decision.reason


@pytest.fixture
def record(monkeypatch, tmp_path) -> Record:
    monkeypatch.setattr("launch.supervise.PAUSE_S", 0.0)
    return Launched(str(tmp_path / "run"), None).submit().record


def test_what_ends_the_launcher_is_in_the_record(record):
    with pytest.raises(InputError), recording_failure(record):
        check(False, "no such node")
    ended = record.history().ended
    assert ended is not None and (ended.outcome, ended.reason) == (
        "failed",
        "the launcher failed: no such node",
    )


def test_an_end_is_in_the_last_attempt_and_a_requeue_never_in_one_that_is_over(record):
    conclude(record, Decision("requeue", "failed", "a machine was lost before it began"))
    conclude(record, Decision("requeue", "failed", "once more"))
    conclude(record, Decision("end", "stopped", "time is up"))
    seen = record.history()
    assert [each.next for each in seen.attempts] == ["requeue", "end"]
    assert seen.ended is not None and seen.ended.reason == "time is up"


def test_a_service_that_does_not_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr("launch.supervise.ASKS_S", 0.0)
    failures = [OSError("disk"), Unreachable("S3 is away")]

    def ask(name):
        if failures:
            raise failures.pop()
        return f"here, {name}"

    assert retry(ask, "you") == "here, you"
    with pytest.raises(InputError):
        retry(lambda: check(False, "no retry helps"))


def end(record: Record, kind: str, step: int, number: int) -> None:
    """What a trainer leaves: an outcome, and a checkpoint of a step."""
    record.run.write(f"checkpoints/step_{step:08d}/manifest.json", b"{}")
    made = Outcome(
        kind, kind, f"attempt {number}", step, step, goes_on=kind == "failed", launch=[]
    )
    write_outcome(record.run, made, replaces_all=True)


def supervised(
    record: Record,
    *endings: tuple[str, int] | None,
    stop: StopFile | None = None,
    examine: Callable[[], str] | None = None,
) -> Decision:
    """What comes of a run whose attempts end so; None: an attempt that leaves nothing."""
    rest = iter(endings)

    def attempt(number: int) -> int:
        assert record.run.size(STOP_FILE) is None
        running = record.history().running_attempt
        assert running is not None and running.is_training and running.number == number
        if ending := next(rest):
            end(record, *ending, number)
        return 1

    stop = stop or StopFile(record)
    return supervise(record, CLUSTER, attempt, nodes=["n1"], stop=stop, examine=examine)


def test_attempts_are_made_until_the_run_is_done(record):
    record.run.write(STOP_FILE, b"")  # of a job that was killed
    examined = []
    decision = supervised(
        record, ("failed", 3), ("failed", 6), ("done", 9), examine=lambda: examined.append(1) or ""
    )
    assert (decision.outcome, decision.reason, len(examined)) == ("done", "attempt 3", 1)
    attempts = record.history().attempts
    assert [each.next for each in attempts] == ["again", "again", "end"]
    assert [(each.begun_at, each.checkpoint) for each in attempts] == [(0, 3), (3, 6), (6, 9)]


def test_machines_that_fail_the_preflight_do_not_train(record):
    decision = supervised(record, examine=lambda: "n2: no driver")
    assert (decision.next, decision.reason) == ("end", "n2: no driver")
    assert not record.history().attempts[0].is_training


@pytest.mark.parametrize("what", [STOP, CANCEL])
def test_a_run_that_the_user_stopped_is_not_begun_again(record, what):
    record.ask(what)
    assert supervised(record).outcome == "stopped"


def test_what_a_node_rejects_is_not_tried_again(record, fake_scheduler):
    Launched(record.run_dir, fake_scheduler).job()  # its code is not what it should be
    start = ["train", record.run_dir, "--attempt=attempt_0001"]
    codes: list[int] = []
    decision = supervise(
        record,
        CLUSTER,
        lambda _: codes.append(node.main(start)) or codes[-1],
        nodes=["n1"],
        stop=StopFile(record),
    )
    assert codes == [REJECTED] and decision.outcome == "refused"
    assert "the code bundle does not match its checksum" in decision.reason
    assert record.rejection(2) == ""  # it counts for its own attempt alone


def test_an_outcome_of_an_earlier_attempt_is_not_this_ones(record):
    end(record, "done", 3, 0)
    decision = supervised(record, None, None)
    assert decision.outcome == "failed" and "left no outcome" in decision.reason


def test_machines_that_are_lost_again_and_again_end_the_job(record):
    record.begin(["n1"], 0)  # its supervisor was lost with its machine
    assert supervised(record, None).next == "end"
    lost, last = record.history().attempts
    assert lost.is_over and "its machine was lost" in lost.reason
    assert "2 attempts in a row saved nothing new" in last.reason


def test_a_request_waits_until_the_trainer_has_its_folder(record, tmp_path):
    stop = StopFile(record)
    stop.ask("the time limit is near")
    stop.ask("SIGTERM from Slurm")
    stop.write()
    # The trainer would reject a folder that holds only STOP.
    assert not (tmp_path / "run").exists()
    record.run.write("environment.json", b"{}")
    stop.write()
    assert record.run.size(STOP_FILE) == 0 and stop.reason == "the time limit is near"
    decision = supervised(record, stop=stop)  # no attempt trains after a request
    assert (decision.next, decision.outcome) == ("requeue", "stopped")
    assert record.history().idle == 0
