"""What launch status, logs, stop and cancel say and do, with made-up records, run folders and schedulers."""

from __future__ import annotations

import functools
import json
import os
import platform
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from hostile import changed, names, quick, values
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import HANDLE, LEASE, NODES, FakeScheduler, Launched, in_table

from launch import local, logs, submit
from launch.commands import main
from launch.record import CANCEL, STOP
from launch.spec import State
from launch.status import lines_of, status
from train.config import InputError, Unreachable
from train.machine.processes import read_process
from train.run.command import DONE, FAILED, REJECTED
from train.run_folder.outcome import Outcome

WAITING = State(True, "PENDING (Resources)")
RUNNING = State(True, "RUNNING", NODES)
GONE = State(False, "no such job")


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    for name, value in {"POLL_S": 0.0, "POLL_S3_S": 0.0, "ASKS": 1}.items():
        monkeypatch.setattr(logs, name, value)


@pytest.fixture
def run(fake_scheduler, tmp_path, monkeypatch):
    """A run that was submitted and has not begun."""
    monkeypatch.chdir(tmp_path)
    return Launched("runs/mine", fake_scheduler).job().submit()


@pytest.fixture
def says(capsys):
    """Acts on a command line that ends with this exit code; returns what it printed."""

    def act(words: str, code: int = DONE) -> str:
        assert main(words.split()) == code
        return "".join(capsys.readouterr())

    return act


# ---- status ----------------------------------------------------------------------------------------------------------


def test_the_status_joins_scheduler_record_and_run_folder(run, says):
    run.begin().trained(step=40)
    run.record.run.write("lease/00000001.json", json.dumps({**LEASE, "step": 41}).encode())
    outcome = Outcome("failed", "other", "no", 41, 30, goes_on=True, time_unix_s=float("nan"))
    run.record.run.write("outcome.json", json.dumps(asdict(outcome)).encode())
    out = says("status runs/mine --json")
    seen = json.loads(out)
    assert "NaN" not in out and seen["progress"]["outcome"]["time_unix_s"] is None
    assert seen["state"] == "running"
    assert seen["answer"]["nodes"] == NODES and seen["history"]["submission"]["handle"] == HANDLE
    shown = seen["progress"]
    assert (shown["step"], shown["total_steps"], shown["checkpoint"]) == (41, 100, 30)
    assert (shown["loss"], shown["tokens_per_s"], shown["cost_usd"]) == (3.0, 5000.0, 1.25)
    # 30 s between lines that are 10 steps apart
    assert seen["time_left_s"] == pytest.approx(59 * 3.0)
    assert 0 <= seen["line_age_s"] < 600
    assert "  41 of 100 (41.0%)\n" in says("status runs/mine")


BEGUN = [Launched.begin]
PREFLIGHT = [lambda run: run.begin(is_training=False)]
ENDED = [*BEGUN, Launched.end]
REQUEUED = [*BEGUN, lambda run: run.end("stopped", "requeue")]
STOPPED, CANCELLED = ([lambda run, what=what: run.ask(what)] for what in (STOP, CANCEL))
REJECTION = [lambda run: run.submit(rejection="no such partition")]


@pytest.mark.parametrize(
    ("state", "happened", "expected"),
    [
        (WAITING, [], "waiting"),
        (RUNNING, [], "starting"),
        (RUNNING, PREFLIGHT, "starting"),
        (RUNNING, [*BEGUN, *STOPPED], "stopping"),
        (WAITING, REQUEUED, "waiting"),
        (RUNNING, ENDED, "ending"),
        (GONE, BEGUN, "vanished"),
        (GONE, ENDED, "done"),
        (GONE, [*BEGUN, *CANCELLED], "cancelled"),
        (Unreachable("slurmctld is silent"), BEGUN, "unknown"),
        (GONE, [*ENDED, *REJECTION], "not submitted"),
        (RUNNING, [*ENDED, Launched.submit, *BEGUN], "running"),
    ],
)
def test_the_state_is_one_term(run, fake_scheduler, state, happened, expected):
    fake_scheduler.states = [state]
    for act in happened:
        act(run)
    assert status(run.record).state == expected


def test_the_job_that_ends_while_it_is_asked_for_has_not_vanished(run, fake_scheduler):
    fake_scheduler.states = [lambda: run.end() and GONE]
    run.begin().trained()
    assert status(run.record).state == "done"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("status runs/x", "runs/x was not launched"),
        ("logs runs/x", "runs/x was not launched"),
    ],
)
def test_wrong_arguments_are_rejected_in_one_line(arguments, said, says):
    err = says(arguments, REJECTED)
    assert said in err and err.count("\n") == 1


# ---- logs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--lines 2",
            "job.txt: from the job | attempt_0002/n1.txt: b, c | attempt_0002/n2.txt: no end",
        ),
        ("--attempt 1", "job.txt: from the job | attempt_0001/n1.txt: old"),
    ],
)
def test_logs_are_those_of_the_job_and_of_the_last_attempt_or_another(run, says, flags, expected):
    assert "there are no logs yet" in says("logs runs/mine")
    run.begin().end(next="again").begin()
    run.log("job.txt", "from the job\n").log("attempt_0001/n1.txt", "old\n")
    run.log("attempt_0002/n1.txt", "a\nb\nc\n").log("attempt_0002/n2.txt", "no end")
    run.log("attempt_0002/n2/mine-1.1_x/attempt_0/1/stderr.log", "rank 3\n")
    out = says(f"logs runs/mine {flags}")
    files = [each.partition(" <==\n")[::2] for each in out.split("==> ")[1:]]
    assert (
        " | ".join(f"{title}: {', '.join(text.splitlines())}" for title, text in files) == expected
    )


def test_logs_are_followed_over_attempts_until_the_job_has_ended(run, fake_scheduler, capsys):
    fake_scheduler.states = [
        lambda: run.begin().log("attempt_0001/n1.txt", "one\nhalf of") and RUNNING,
        lambda: run.log("attempt_0001/n1.txt", "one\nhalf of two\n") and RUNNING,
        Unreachable("slurmctld is silent"),
        lambda: run.end().begin().log("attempt_0002/n2.txt", "three\n") and RUNNING,
        lambda: run.log("attempt_0002/n2.txt", "three\nno end").end() and GONE,
    ]
    run.log("job.txt", "".join(f"line {number}\n" for number in range(5)))
    logs.follow(run.record, 1)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        *["==> job.txt <==", "line 4", "==> attempt_0001/n1.txt <==", "one", "half of two"],
        *["==> attempt_0002/n2.txt <==", "three", "no end"],
    ]
    assert err == "slurmctld is silent; asking again\n"


def test_control_characters_of_a_log_do_not_reach_the_terminal(run, says):
    run.begin().log(
        "attempt_0001/n1.txt",
        b"\x1b[2J\ttab\xc2\x9b31m \xff \xe2\x80\xae\r\nr\xc3\xa9sum\xc3\xa9\n",
    )
    run.log("attempt_0001/n2\x1b[2J\u2028.txt", "of no machine\n")
    shown = r"\x1b[2J" + "\ttab" + r"\x9b31m \xff \u202e"
    assert says("logs runs/mine").splitlines() == ["==> attempt_0001/n1.txt <==", shown, "résumé"]


@pytest.mark.parametrize("words", [["-c", "sleep 99; :"], ["-m", "launch.local", "/other/run"]])
def test_a_forged_handle_ends_no_other_process(tmp_path, monkeypatch, says, words):
    """A process of this user, with the right start time, which is not the supervisor of this run."""
    monkeypatch.chdir(tmp_path)
    Path("launch.local").write_text("sleep 99; :")
    with subprocess.Popen(["sh", *words], process_group=0) as process:
        try:
            handle = {
                "host": platform.node(),
                "pid": process.pid,
                "started": read_process(process.pid).started,
            }
            Launched("runs/mine", None).job(scheduler="local").submit(
                scheduler="local", handle=handle
            )
            for command in ("cancel runs/mine --yes", "stop runs/mine"):
                assert "runs/mine has no job (vanished)" in says(command)
            assert process.poll() is None
        finally:
            os.killpg(process.pid, signal.SIGKILL)


# ---- stop and cancel -------------------------------------------------------------------------------------------------


def asked(run) -> str:
    request = run.record.history().request
    return request.what if request is not None else ""


def test_stop_asks_the_run_once(run, fake_scheduler, says):
    run.begin().trained()
    for _ in range(2):
        assert "was asked to save a checkpoint" in says("stop runs/mine")
    assert run.record.run.size("STOP") is not None and asked(run) == STOP
    assert fake_scheduler.cancelled == []


@pytest.mark.parametrize(
    ("state", "is_requeued"), [(WAITING, False), (RUNNING, False), (WAITING, True)]
)
def test_a_job_that_does_not_train_is_cancelled_instead_of_stopped(
    run, fake_scheduler, says, state, is_requeued
):
    if is_requeued:
        run.begin().trained().end("stopped", "requeue")
    fake_scheduler.states = [state]
    assert f"({state.text})" in says("stop runs/mine")
    assert fake_scheduler.cancelled == [HANDLE] and asked(run) == CANCEL
    assert run.record.run.size("STOP") is None  # a folder with this file alone would be no run's


@pytest.mark.parametrize("command", ["stop runs/mine", "cancel runs/mine --yes"])
@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        (GONE, DONE, "runs/mine has no job (failed)"),
        (Unreachable("slurmctld is silent"), FAILED, "slurmctld is silent"),
    ],
)
def test_without_a_job_or_an_answer_nothing_is_done(
    run, fake_scheduler, says, command, state, code, said
):
    run.begin().trained().end("failed")
    fake_scheduler.states = [state]
    assert said in says(command, code)
    assert asked(run) == "" and fake_scheduler.cancelled == []
    assert run.record.run.size("STOP") is None


def test_cancel_says_what_is_lost_and_does_it_when_asked_twice(run, fake_scheduler, says):
    run.begin().trained(step=40)
    for name in ("attempts/0002.json", "submissions/0002.json", "requests/0001.json"):
        run.record.folder.write(name, b"[]")  # damage hides no job
    lost = (
        "step 40 was reached, but the newest checkpoint is from step 30: later steps may be lost"
    )
    assert lost in says("cancel runs/mine") and fake_scheduler.cancelled == []
    assert lost in says("cancel runs/mine --yes") and fake_scheduler.cancelled == [HANDLE]
    assert asked(run) == CANCEL
    run.submit().begin().record.run.remove("checkpoints/step_00000030/manifest.json")
    assert "but there is no checkpoint yet" in says("cancel runs/mine")


def test_a_job_of_another_scheduler_than_the_submission_is_not_touched(run, says):
    """Whoever can write submissions must not end another job with the user's rights."""
    run.begin().submit(
        scheduler="local", handle={"host": platform.node(), "pid": 99, "started": 1}
    )
    for command in ("stop runs/mine", "cancel runs/mine --yes"):
        said = says(command, FAILED)
        assert "names cluster=local, but job.json names cluster=fake: nothing was done" in said


# ---- submissions: one at a time, and none whose job nobody knows -----------------------------------------------------


def test_of_two_launches_at_once_one_is_rejected(run, fake_scheduler):
    fake_scheduler.states = [GONE]
    job = run.record.job()
    (first, second) = (submit.check_idle(run.record) for _ in range(2))
    submit.claim(run.record, job, first)
    with pytest.raises(InputError, match="another launch of runs/mine came first"):
        submit.claim(run.record, job, second)
    with pytest.raises(
        InputError, match="has been waiting for an answer to its submission for 0 s: .*in 120 s"
    ):
        submit.check_idle(run.record)


def test_a_submission_that_nobody_answered_blocks_another_one_for_a_while_only(
    run, fake_scheduler, says, monkeypatch
):
    run.submit(handle={})
    assert "submission was never answered; check whether the scheduler" in says(
        "cancel runs/mine --yes", FAILED
    )
    assert not fake_scheduler.cancelled
    monkeypatch.setattr(submit, "SUBMITTING_S", -1.0)  # it is long ago
    run.record.folder.remove("job.json")  # or it was killed before it wrote that
    assert submit.check_idle(run.record) == 3


def test_the_end_of_an_earlier_job_is_not_this_ones(run, fake_scheduler):
    run.begin().end().submit()
    fake_scheduler.states = [GONE]
    assert local.Scheduler().attend(run.record.job(), run.record, {}, detach=False) == FAILED


# ---- what others wrote -----------------------------------------------------------------------------------------------

LINE = {
    "kind": "train",
    "attempt": 1,
    "step": 3,
    "time_unix_s": 1.8e9,
    "loss": 2.0,
    "tokens_per_s": 1.0,
}


text = st.one_of(names, st.sampled_from(["\x1b[2J", "\x9b31m", "\u2028", "\x1b]0;x\x07"]))


@settings(quick, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["nodes", "reason", "outcome", "began_unix_s"]), values)),
    st.lists(st.one_of(changed(LINE), values), max_size=4),
    changed({"identity": {}, "plan": {"total_steps": 100}}),
    text,
    st.sampled_from([RUNNING, WAITING, GONE]),
)
def test_whatever_record_and_run_folder_hold_the_status_is_plain_text(
    tmp_path_factory, changes, lines, environment, name, state
):
    folder = tmp_path_factory.mktemp("run")
    says = State(state.is_active, name, [name] * len(state.nodes))
    scheduler = FakeScheduler([says])
    run = Launched(str(folder / "mine"), scheduler).job().submit(rejection=name, handle=HANDLE)
    run.submit().begin().end("failed", name, reason=name, nodes=[name])
    attempt = json.loads(run.record.folder.read("attempts/0001.json"))
    for index, (key, value) in enumerate(changes, 2):
        content = {**attempt, "number": index, key: value}
        Path(run.record.location, f"attempts/{index:04d}.json").write_text(json.dumps(content))
    (folder / "mine").mkdir()
    (folder / "mine" / "environment.json").write_text(json.dumps(environment))
    (folder / "mine" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, LINE])
    )
    try:
        with in_table(scheduler):
            seen = status(run.record)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert json.loads(seen.to_json())["run_dir"] == seen.run_dir and seen.to_json().isascii()
    shown = lines_of(seen)
    assert all(char.isprintable() for line in shown for char in line), shown


# ---- S3 --------------------------------------------------------------------------------------------------------------


def test_a_run_in_s3_is_followed_and_stopped(
    fake_scheduler, bucket, capsys, monkeypatch, tmp_path
):
    """Its logs are the trainer's until those of the attempt arrive; of two copies this machine's is shown."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = Launched(bucket.location("runs/mine"), fake_scheduler, bucket.config())
    flags = bucket.config().flags()
    run.job().submit().begin().trained(step=40)
    assert main(["status", run.run_dir, *flags]) == DONE
    assert "40 of 100 (40.0%)" in capsys.readouterr().out

    bucket.put("runs/mine/log/rank_0000.txt", b"from the trainer\n")
    put = functools.partial(bucket.put, "runs/mine.launch/logs/attempt_0001/n1.txt")
    fake_scheduler.states = [
        RUNNING,
        lambda: put(b"one\n") or RUNNING,
        lambda: put(b"one\ntwo\n") or GONE,
    ]
    logs.follow(run.record, logs.LINES)
    assert capsys.readouterr().out.splitlines() == [
        *["==> the run's log/rank_0000.txt <==", "from the trainer"],
        *["==> attempt_0001/n1.txt <==", "one", "two"],
    ]
    run.log("attempt_0001/n1.txt", "one\ntwo\nthree\n")
    assert main(["logs", run.run_dir, *flags]) == DONE
    assert capsys.readouterr().out.splitlines()[1:] == ["one", "two", "three"]

    fake_scheduler.states = [RUNNING]
    assert main(["stop", run.run_dir, *flags]) == DONE
    assert bucket.get("runs/mine/STOP") == b"" and asked(run) == STOP
