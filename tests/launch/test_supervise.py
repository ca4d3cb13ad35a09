"""What follows an attempt: another one, a requeue, or the end."""

from __future__ import annotations

import pytest
from launched import Launched

from launch import node
from launch.config import LocalConfig
from launch.record import Event, History, Record, read_history
from launch.slurm.config import SlurmConfig
from launch.supervise import Decision, StopFile, decide, recording_failure, retry, supervise
from train.config import InputError, S3Config, Unreachable, check
from train.run.command import REJECTED
from train.run_folder.outcome import STOP_FILE, Outcome, write_outcome

CLUSTER = SlurmConfig(attempts=5)
FIRST, ASKED = History(faults=1), History(faults=1, stop_asked_unix_s=0.0)
LIMIT = "the time limit is near"


def decided(ended="", kind="x", *, goes_on=True, history=FIRST, cluster=CLUSTER, **options):
    """What follows an attempt that ended so; an empty outcome is one that was killed with its machine."""
    outcome = {
        "outcome": ended,
        "kind": kind,
        "reason": "why",
        "step": 6,
        "checkpoint": 6,
        "goes_on": goes_on,
    }
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
        (
            ["stopped", "SIGTERM"],
            {},
            ("requeue", "stopped"),
        ),  # preempted: Slurm signals the tasks alone
        # A torchrun that is killed: no scheduler is there to requeue the job.
        (["stopped", "SIGTERM"], {"cluster": LocalConfig()}, ("again", "stopped")),
        (["stopped", "spot_notice"], {"cluster": LocalConfig()}, ("requeue", "stopped")),
        ([], {}, ("again", "failed")),
        ([], {"rejection": "no data"}, ("end", "refused")),  # before the run folder was taken
        (
            ["failed"],
            {"rejection": "no data"},
            ("end", "refused"),
        ),  # the outcome is an earlier attempt's
        # A stop that was asked for ends even a run that failed, but hides no failure for good.
        (["failed"], {"history": ASKED}, ("end", "stopped")),
        (["failed"], {"history": ASKED, "goes_on": False}, ("end", "failed")),
    ],
)
def test_what_follows_an_attempt(attempt, options, expected):
    decision = decided(*attempt, **options)
    assert (decision.next, decision.outcome) == expected


def event(kind, **details):
    return Event(kind, 0.0, "n1", details)


def test_a_rejection_counts_for_its_own_attempt_alone():
    begun = [event("attempt_began", number=number) for number in (1, 2)]
    history = read_history([*begun, event("refused", attempt="attempt_0001", reason="too late")])
    assert history.attempts[1].reason == ""
    history.add(event("refused", attempt="attempt_0002", reason="no data"))
    assert history.attempts[1].reason == "no data"


@pytest.mark.parametrize("kind", ["failed", "stopped"])
@pytest.mark.parametrize(
    ("limit", "history"),
    [("cluster.attempts", History(faults=5)), ("nothing new", History(faults=3, idle=2))],
)
def test_a_job_gives_up(kind, limit, history):
    decision = decided(kind, history=history, asked=LIMIT)
    assert (decision.next, decision.outcome) == ("end", "failed") and limit in decision.reason


BEGAN, SUBMITTING, REQUEUED = event("attempt_began"), event("submitting"), event("requeued")
IDLE = event("attempt_ended", made_progress=False, outcome="failed")
BUSY = event("attempt_ended", made_progress=True, outcome="failed")
STOPPED = event("attempt_ended", made_progress=True, outcome="stopped")


@pytest.mark.parametrize(
    ("events", "faults", "idle"),
    [
        (
            [BEGAN, IDLE, event("stop_asked"), SUBMITTING, BEGAN, BUSY, BEGAN, IDLE, BEGAN, IDLE],
            3,
            2,
        ),
        ([BEGAN, BUSY, BEGAN, IDLE, BEGAN, BUSY], 3, 0),
        ([BEGAN, STOPPED, REQUEUED] * 30, 0, 0),  # a chain of time limits, each with something new
        ([event("attempt_began", checkpoint=step) for step in (0, 20)], 1, 0),
        (
            [event("attempt_began", checkpoint=step) for step in (0, 20, 20, 20)],
            3,
            2,
        ),  # lost with their nodes
        ([REQUEUED, REQUEUED], 2, 2),  # the preflight alone was run, twice
        ([BEGAN, BUSY, REQUEUED, BEGAN, BUSY, REQUEUED], 2, 0),
    ],
)
def test_attempts_of_a_submission_are_counted(events, faults, idle):
    history = read_history([SUBMITTING, *events])
    assert (history.faults, history.idle, history.is_stop_asked) == (faults, idle, False)
    assert read_history([SUBMITTING, *events, event("cancelled")]).is_stop_asked


@pytest.fixture
def record(monkeypatch, tmp_path) -> Record:
    monkeypatch.setattr("launch.supervise.PAUSE_S", 0.0)
    return Record(str(tmp_path / "run"), S3Config())


def test_what_ends_the_launcher_is_in_the_record(record):
    with pytest.raises(InputError), recording_failure(record):
        check(False, "no such node")
    ended = record.history().ended
    assert ended is not None and (ended.outcome, ended.reason) == (
        "failed",
        "the launcher failed: no such node",
    )


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
    record: Record, *endings: tuple[str, int] | None, stop: StopFile | None = None
) -> Decision:
    """What comes of a run whose attempts end so; None: an attempt that leaves nothing."""
    rest = iter(endings)

    def attempt(number: int) -> int:
        assert record.run.size(STOP_FILE) is None
        if ending := next(rest):
            end(record, *ending, number)
        return 1

    return supervise(record, CLUSTER, attempt, nodes=["n1"], stop=stop or StopFile(record))


def test_attempts_are_made_until_the_run_is_done(record):
    record.run.write(STOP_FILE, b"")  # of a job that was killed
    decision = supervised(record, ("failed", 3), ("failed", 6), ("done", 9))
    assert (decision.outcome, decision.reason) == ("done", "attempt 3")
    assert [event.kind for event in record.events()] == ["attempt_began", "attempt_ended"] * 3
    assert [event.details["next"] for event in record.events()[1::2]] == ["again", "again", "end"]


def test_a_run_that_the_user_stopped_is_not_begun_again(record):
    record.append_event("stop_asked")
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


def test_an_outcome_of_an_earlier_attempt_is_not_this_ones(record):
    end(record, "done", 3, 0)
    decision = supervised(record, None, None)
    assert decision.outcome == "failed" and "left no outcome" in decision.reason


def test_machines_that_are_lost_again_and_again_end_the_job(record):
    for number in (1, 2):  # each left no end
        record.append_event("attempt_began", number=number, checkpoint=0)
    decision = supervised(record)
    assert (
        decision.outcome == "failed" and "2 attempts in a row saved nothing new" in decision.reason
    )


def test_a_request_waits_until_the_trainer_has_its_folder(record, tmp_path):
    stop = StopFile(record)
    stop.ask("the time limit is near")
    stop.ask("SIGTERM from Slurm")
    stop.write()
    assert not (
        tmp_path / "run"
    ).exists()  # the trainer would reject a folder that holds only STOP
    record.run.write("environment.json", b"{}")
    stop.write()
    assert record.run.size(STOP_FILE) == 0 and stop.reason == "the time limit is near"
    decision = supervised(record, stop=stop)  # no attempt begins after a request
    assert (decision.next, decision.outcome) == ("requeue", "stopped") and not record.events()
