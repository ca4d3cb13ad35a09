"""What launch list, status, logs, stop and cancel say and do, with made-up records, run folders and schedulers."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hostile import changed, names, quick, values
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import HANDLE, NODES, FakeScheduler, Launched, in_table

from launch import commands, local, logs, submit
from launch.commands import COMMANDS, main
from launch.logs import Wanted
from launch.spec import State
from launch.status import lines_of, status
from launch.values import columns, count, moment, number, shown_duration
from train.cli.command import DONE, FAILED, REJECTED
from train.config import InputError, Unreachable
from train.run_folder.outcome import KEYS as OUTCOME_KEYS
from train.storage.folders import LocalFolder

WAITING, RUNNING = State(True, "PENDING (Resources)"), State(True, "RUNNING", NODES)
GONE = State(False, "no such job")


@pytest.fixture
def run(fake_scheduler, tmp_path, monkeypatch):
    """A run that was submitted and has not begun."""
    monkeypatch.chdir(tmp_path)
    return Launched("runs/mine", fake_scheduler).job().submit()


# ---- status ----------------------------------------------------------------------------------------------------------


def test_the_status_joins_scheduler_record_and_run_folder(run, capsys):
    run.begin().trained(step=40).lease(step=41)
    assert main(["status", "runs/mine", "--json"]) == DONE
    seen = json.loads(capsys.readouterr().out)
    assert seen["state"] == "running"
    assert seen["answer"]["nodes"] == NODES and seen["history"]["submission"]["handle"] == HANDLE
    shown = seen["progress"]
    assert (shown["step"], shown["total_steps"], shown["checkpoint"]) == (41, 100, 30)
    assert (shown["loss"], shown["tokens_per_s"], shown["goodput"], shown["cost_usd"]) == (3.0, 5000.0, 0.9, 1.25)
    assert shown["scores"] == {"loss": 3.25, "masked_accuracy": 0.5}
    assert seen["time_left_s"] == pytest.approx(59 * 3.0)  # 30 s between lines that are 10 steps apart
    assert 0 <= seen["line_age_s"] < 600


@pytest.mark.parametrize(
    ("state", "events", "expected"),
    [
        (WAITING, [], "waiting"),
        (RUNNING, [], "starting"),
        (RUNNING, ["attempt_began"], "running"),
        (RUNNING, ["attempt_began", "stop_asked"], "stopping"),
        (WAITING, ["attempt_began", "attempt_ended", "requeued"], "waiting"),
        (RUNNING, ["attempt_began", "ended"], "ending"),
        (GONE, ["attempt_began"], "vanished"),
        (GONE, ["attempt_began", "ended"], "done"),
        (GONE, ["attempt_began", "cancelled"], "cancelled"),
        (Unreachable("slurmctld is silent"), ["attempt_began"], "unknown"),
        (GONE, ["attempt_began", "ended", "submitting", "not_submitted"], "not submitted"),
        (WAITING, ["attempt_began", "stop_asked", "ended", "submitting", "submitted"], "waiting"),
        (RUNNING, ["ended", "submitting", "attempt_began", "submitted"], "running"),
    ],
)
def test_the_state_is_one_term(run, fake_scheduler, state, events, expected):
    fake_scheduler.states = [state]
    for kind in events:
        run.note(kind, outcome="done", scheduler="fake", handle=HANDLE)
    assert status(run.record).state == expected


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (Unreachable("slurmctld is silent"), "fake: does not answer: slurmctld is silent"),
        (GONE, "python -m launch resume runs/mine"),  # it vanished
        (RUNNING, "step        40 of 100 (40.0%)\n"),
    ],
)
def test_the_status_is_plain_lines(run, fake_scheduler, capsys, state, said):
    run.begin().trained(step=40)
    fake_scheduler.states = [state]
    assert main(["status", "runs/mine"]) == DONE
    assert said in capsys.readouterr().out


def test_numbers_that_json_does_not_have_are_null(run, capsys):
    run.begin().trained()
    outcome = {**dict.fromkeys(OUTCOME_KEYS, "failed"), "loss": float("nan")}
    run.record.run.write("outcome.json", json.dumps(outcome).encode())
    assert main(["status", "runs/mine", "--json"]) == DONE
    out = capsys.readouterr().out
    assert "NaN" not in out and json.loads(out)["progress"]["outcome"]["loss"] is None


def test_the_job_that_ends_while_it_is_asked_for_has_not_vanished(run, fake_scheduler):
    fake_scheduler.states = [lambda: run.note("ended", outcome="done") and GONE]
    run.begin().trained()
    assert status(run.record).state == "done"


def test_a_preparation_has_no_steps_and_is_not_stopped(run, fake_scheduler, capsys):
    run.job(kind="prepare")
    assert main(["status", "runs/mine"]) == DONE
    out = capsys.readouterr().out
    assert out.startswith("runs/mine: running\n") and "step" not in out
    assert main(["stop", "runs/mine"]) == REJECTED
    assert "cancel runs/mine --yes" in capsys.readouterr().err and fake_scheduler.cancelled == []


def test_a_watch_prints_a_line_for_each_change(run, fake_scheduler, capsys):
    run.begin().trained(step=40)
    fake_scheduler.states = [RUNNING, RUNNING, Unreachable("slurmctld is silent"), GONE]
    assert main(["status", "runs/mine", "--watch", "0.1"]) == DONE
    first, silent, last = capsys.readouterr().out.splitlines()
    assert "running  40 of 100" in first and "slurmctld is silent" in silent and "vanished  40" in last
    fake_scheduler.states = [RUNNING, RUNNING, GONE]
    assert main(["status", "runs/mine", "--watch", "0.1", "--json"]) == DONE
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["running", "running", "vanished"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("status x --watch nan", "--watch nan"),
        ("status x --watch 0", "--watch 0"),
        ("logs x --lines -1", "-1"),
        ("logs x --rank a", "--rank"),
        ("stop", "RUN"),
        ("status runs/x", "runs/x was not launched"),
    ],
)
def test_wrong_arguments_are_rejected_in_one_line(arguments, said, capsys):
    assert main(arguments.split()) == REJECTED
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"python -m launch {command}" in capsys.readouterr().out


def test_a_duration_has_days():
    assert [shown_duration(each) for each in (99.6, 4 * 86400 - 60, 1e300)][:2] == ["0:01:40", "3 days, 23:59:00"]


# ---- list ------------------------------------------------------------------------------------------------------------


def test_the_list_shows_runs_that_were_launched_and_no_damaged_one_hides_them(run, fake_scheduler, capsys):
    run.begin().trained(step=40)
    Launched("runs/second", fake_scheduler).job(nodes=3).submit(nodes=3).describe()
    Launched("runs/damaged", fake_scheduler).job().submit().record.folder.write("job.json", b"[]")
    LocalFolder(Path("runs/by_hand")).write("environment.json", b"{}")
    assert main(["list"]) == DONE
    out, err = capsys.readouterr()
    head, *rows = [line.split() for line in out.splitlines()]
    assert head == ["run", "state", "step", "nodes", "submitted"]
    assert [row[:6] for row in rows] == [
        ["runs/mine", "running", "40", "of", "100", "(40.0%)"],
        ["runs/second", "starting", "none", "yet", "of", "100"],
    ]
    assert err.startswith("runs/damaged: runs/damaged.launch/job.json cannot be read")
    assert main(["list", "elsewhere"]) == DONE
    assert "no run was launched in elsewhere" in capsys.readouterr().err


def test_a_damaged_event_hides_no_job(run, fake_scheduler, capsys):
    run.begin().record.folder.write("events/00003.json", b"[]")
    assert main(["cancel", "runs/mine", "--yes"]) == DONE
    assert fake_scheduler.cancelled == [HANDLE]
    assert main(["status", "runs/mine"]) == DONE
    assert "runs/mine.launch/events/00003.json" in capsys.readouterr().out


# ---- logs ------------------------------------------------------------------------------------------------------------


def rank_log(host, local_rank, name="stderr", attempt=1):
    return f"attempt_{attempt:04d}/{host}/mine-1.1_x/attempt_0/{local_rank}/{name}.log"


def test_logs_are_those_of_the_job_and_of_the_last_attempt(run, capsys):
    assert main(["logs", "runs/mine"]) == DONE
    assert "there are no logs yet" in capsys.readouterr().err
    run.begin(1).begin(2)
    run.log("job.txt", "from the job\n").log("attempt_0001/n1.txt", "old\n").log("attempt_0002/n1.txt", "a\nb\nc\n")
    run.log("attempt_0002/n2.txt", "no end").log(rank_log("n1", 0, attempt=2), "of a rank\n")
    assert main(["logs", "runs/mine", "--lines", "2"]) == DONE
    assert capsys.readouterr().out.splitlines() == [
        *["==> job.txt <==", "from the job"],
        *["==> attempt_0002/n1.txt <==", "b", "c"],
        *["==> attempt_0002/n2.txt <==", "no end"],
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rank 3", [f"==> {rank_log('n2', 1)} <==", "rank 3", "==> the run's log/rank_0003.txt <==", "trainer 3"]),
        ("--rank 3 --attempt 1", [f"==> {rank_log('n2', 1)} <==", "rank 3"]),
        ("--node n2", ["==> attempt_0001/n2.txt <==", "machine 2"]),
        ("--node n2 --lines 0", []),
    ],
)
def test_logs_of_a_rank_and_of_a_machine(run, capsys, flags, expected):
    run.begin().log("job.txt", "from the job\n").log("attempt_0001/n2.txt", "machine 2\n")
    run.log(rank_log("n1", 1), "rank 1\n").log(rank_log("n2", 1), "rank 3\n")
    run.record.run.write("log/rank_0003.txt", b"trainer 3\n")
    assert main(["logs", "runs/mine", *flags.split()]) == DONE
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--rank 4", "there is no rank 4 in attempt 1: it has ranks 0 to 3"),
        ("--node n9", "there is no machine n9 in attempt 1; there are: n1, n2"),
        ("--attempt 5", "there is no attempt 5; there are: 1"),
        ("--attempt 5 -f", "there is no attempt 5; there are: 1"),
    ],
)
def test_logs_that_the_job_does_not_have_are_rejected(run, capsys, flags, says):
    run.begin().log("attempt_0001/n2.txt", "")
    assert main(["logs", "runs/mine", *flags.split()]) == REJECTED
    assert says in capsys.readouterr().err


def test_logs_are_followed_over_attempts_until_the_job_has_ended(run, fake_scheduler, capsys):
    fake_scheduler.states = [
        lambda: run.begin(1).log("attempt_0001/n1.txt", "one\nhalf of") and RUNNING,
        lambda: run.log("attempt_0001/n1.txt", "one\nhalf of two\n") and RUNNING,
        Unreachable("slurmctld is silent"),
        lambda: run.note("attempt_ended", number=1).begin(2).log("attempt_0002/n2.txt", "three\n") and RUNNING,
        lambda: run.log("attempt_0002/n2.txt", "three\nno end").note("ended", outcome="done") and GONE,
    ]
    run.log("job.txt", "".join(f"line {number}\n" for number in range(5)))
    logs.follow(run.record, Wanted(lines=1), poll_s=0.01, ask_s=0)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        *["==> job.txt <==", "line 4", "==> attempt_0001/n1.txt <==", "one", "half of two"],
        *["==> attempt_0002/n2.txt <==", "three", "no end"],
    ]
    assert err == "slurmctld is silent; asked again\n"


def test_a_machine_may_be_followed_before_the_first_attempt(run, fake_scheduler, capsys):
    begins = lambda: run.begin().log("attempt_0001/n2.txt", "begins\n") and RUNNING  # noqa: E731
    fake_scheduler.states = [WAITING, begins, GONE]
    logs.follow(run.record, Wanted(node="n2"), poll_s=0.01, ask_s=0)
    assert capsys.readouterr().out.splitlines() == ["==> attempt_0001/n2.txt <==", "begins"]


def test_control_characters_of_a_log_do_not_reach_the_terminal(run, capsys):
    run.begin().log("attempt_0001/n1.txt", b"\x1b[2J\ttab\xc2\x9b31m \xff \xe2\x80\xae\r\nr\xc3\xa9sum\xc3\xa9\n")
    run.log("attempt_0001/n2\x1b[2J\u2028.txt", "of no machine\n")
    assert main(["logs", "runs/mine"]) == DONE
    assert capsys.readouterr().out.splitlines() == [
        *["==> attempt_0001/n1.txt <==", r"\x1b[2J" + "\ttab" + r"\x9b31m \xff \u202e", "résumé"],
    ]


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        (b"", 3, []),
        (b"a\nb\nc\n", 2, ["b", "c"]),
        (b"a\nb\nno end", 2, ["b", "no end"]),
        (b"a\n\n", 1, [""]),
        (b"a\nb\n", 0, []),
        (b"a\r\nb\n", 9, ["a", "b"]),
    ],
)
def test_the_last_lines_are_those_of_the_whole_file(tmp_path, content, lines, expected):
    (tmp_path / "a.txt").write_bytes(content)
    assert logs.Log("a", LocalFolder(tmp_path), "a.txt").take(is_last=True, lines=lines) == expected


# ---- stop and cancel -------------------------------------------------------------------------------------------------


def kinds(run):
    return [event.kind for event in run.record.events()]


def test_stop_asks_the_run_once(run, fake_scheduler, capsys):
    run.begin().trained()
    assert main(["stop", "runs/mine"]) == main(["stop", "runs/mine"]) == DONE
    assert run.record.run.size("STOP") is not None and kinds(run).count("stop_asked") == 1
    assert fake_scheduler.cancelled == []
    assert "was asked to stop with a checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "is_requeued"), [(WAITING, False), (RUNNING, False), (WAITING, True)])
def test_a_job_that_does_not_train_is_cancelled_instead_of_stopped(run, fake_scheduler, capsys, state, is_requeued):
    if is_requeued:
        run.begin().trained().note("attempt_ended", number=1, next="requeue")
    fake_scheduler.states = [state]
    assert main(["stop", "runs/mine"]) == DONE
    assert fake_scheduler.cancelled == [HANDLE] and kinds(run)[-1] == "cancelled"
    assert run.record.run.size("STOP") is None  # a folder with this file alone would be no run's
    assert f"({state.text})" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["stop"], ["cancel", "--yes"]])
@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        (GONE, DONE, "runs/mine has no job (failed)"),
        (Unreachable("slurmctld is silent"), FAILED, "slurmctld is silent"),
    ],
)
def test_without_a_job_or_an_answer_nothing_is_done(run, fake_scheduler, capsys, command, state, code, said):
    run.begin().trained().note("ended", outcome="failed")
    fake_scheduler.states = [state]
    before = kinds(run)
    assert main([*command, "runs/mine"]) == code
    assert said in "".join(capsys.readouterr())
    assert kinds(run) == before and fake_scheduler.cancelled == [] and run.record.run.size("STOP") is None


def test_cancel_says_what_is_lost_and_does_it_when_asked_twice(run, fake_scheduler, capsys):
    run.begin().trained(step=40)
    lost = "step 40 was reached, the newest checkpoint is of step 30: the steps between may be lost"
    assert main(["cancel", "runs/mine"]) == DONE
    assert lost in capsys.readouterr().out and fake_scheduler.cancelled == []
    assert main(["cancel", "runs/mine", "--yes"]) == DONE
    assert lost in capsys.readouterr().out and fake_scheduler.cancelled == [HANDLE]
    assert run.record.events()[-1].kind == "cancelled"
    run.submit().begin().record.run.remove("checkpoints/step_00000030/manifest.json")
    assert main(["cancel", "runs/mine"]) == DONE
    assert "all 40 steps may be lost" in capsys.readouterr().out


# ---- submissions: one at a time, and none whose job nobody knows -----------------------------------------------------


def test_of_two_launches_at_once_one_is_rejected(run, fake_scheduler):
    fake_scheduler.states = [GONE]
    job, (first, second) = run.record.job(), (submit.check_idle(run.record) for _ in range(2))
    submit.claim(run.record, job, first)
    with pytest.raises(InputError, match="another launch of runs/mine came first"):
        submit.claim(run.record, job, second)
    with pytest.raises(InputError, match="is being launched for .*try again in 120 s"):
        submit.check_idle(run.record)


def test_a_submission_that_nobody_answered_blocks_another_one_for_a_while_only(
    run, fake_scheduler, capsys, monkeypatch
):
    run.record.folder.remove("events/00002.json")
    assert main(["cancel", "runs/mine", "--yes"]) == FAILED
    assert "never answered the submission; look there" in capsys.readouterr().err and not fake_scheduler.cancelled
    monkeypatch.setattr(submit, "SUBMITTING_S", -1.0)  # it is long ago
    run.record.folder.remove("job.json")  # or it was killed before it wrote that
    assert submit.check_idle(run.record) == 2


def test_the_end_of_an_earlier_job_is_not_this_ones(run, fake_scheduler):
    run.note("ended", outcome="done", reason="done").submit()
    fake_scheduler.states = [GONE]
    assert local.Scheduler().attend(run.record.job(), run.record, {}, detach=False) == FAILED


# ---- what others wrote -----------------------------------------------------------------------------------------------

EVENT = {"kind": "attempt_began", "time_unix_s": 1.8e9, "host": "n1:5", "details": {"number": 1, "nodes": ["n1"]}}
EVENT["details"] |= {"scheduler": "fake", "handle": {"job_id": 7}, "failed": {"n2": "red"}, "reason": "x", "step": 3}
KINDS = ["submitting", "submitted", "not_submitted", "attempt_began", "attempt_ended", "gate", "stop_asked"]
KINDS += ["cancelled", "requeued", "ended"]
LINE = {"kind": "train", "attempt": 1, "step": 3, "time_unix_s": 1.8e9, "loss": 2.0, "tokens_per_s": 1.0}
LINE |= {"goodput": 1.0}
EVALUATED = {"kind": "eval", "attempt": 1, "step": 3, "time_unix_s": 1.8e9, "loss": 2.0}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 10**400, -(10**400), True, "1", None, [1]], ids=lambda value: ascii(value)[:9]
)
def test_a_value_that_is_no_sensible_number_is_unknown(value):
    assert number({"key": value}, "key") is count({"key": value}, "key") is moment({"key": value}, "key") is None


text = st.one_of(names, st.sampled_from(["\x1b[2J", "\x9b31m", "\u2028", "[red]x[/red]", "\x1b]0;x\x07"]))


def check_output(shown):
    assert all(char.isprintable() or char == "\n" for char in shown), shown


@settings(quick, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.one_of(changed(EVENT), changed(EVENT["details"]))), max_size=6),
    st.lists(st.one_of(changed(LINE), changed(EVALUATED), values), max_size=4),
    changed({"identity": {}, "plan": {"total_steps": 100}}),
    text,
    st.sampled_from([RUNNING, WAITING, GONE]),
)
def test_whatever_record_and_run_folder_hold_the_status_is_plain_text(
    tmp_path_factory, events, lines, environment, name, state
):
    folder = tmp_path_factory.mktemp("run")
    says = State(state.is_active, name, [name] * len(state.nodes))
    scheduler = FakeScheduler([says])
    run = Launched(str(folder / "mine"), scheduler).job().submit()
    for index, (kind, event) in enumerate(events, 3):
        content = event if "details" in event else {**EVENT, "details": {**event, "reason": name}}
        path = Path(run.record.location, "events", f"{index:05d}.json")
        path.write_text(json.dumps({**content, "kind": kind}))
    (folder / "mine").mkdir()
    (folder / "mine" / "environment.json").write_text(json.dumps(environment))
    (folder / "mine" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, LINE]))
    try:
        with in_table(scheduler):
            seen = status(run.record)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert json.loads(seen.to_json())["run_dir"] == seen.run_dir and seen.to_json().isascii()
    check_output("\n".join([*lines_of(seen), *columns([commands.row(seen)])]))


# ---- S3 --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(fake_scheduler, bucket, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = Launched(bucket.location("runs/mine"), fake_scheduler, bucket.config())
    run.job().submit().begin().trained(step=40)
    run.flags = bucket.config().flags()
    return run


def test_a_run_in_s3_is_listed_and_stopped(remote, bucket, capsys):
    assert main(["list", bucket.location("runs"), *remote.flags]) == DONE
    assert f"{remote.run_dir}  running  40 of 100 (40.0%)" in capsys.readouterr().out
    assert main(["stop", remote.run_dir, *remote.flags]) == DONE
    assert bucket.get("runs/mine/STOP") == b"" and kinds(remote)[-1] == "stop_asked"


def test_logs_of_a_run_in_s3_are_the_trainers_until_those_of_the_attempt_arrive(remote, fake_scheduler, bucket, capsys):
    bucket.put("runs/mine/log/rank_0000.txt", b"from the trainer\n")
    put = functools.partial(bucket.put, "runs/mine.launch/logs/attempt_0001/n1.txt")
    fake_scheduler.states = [RUNNING, lambda: put(b"one\n") or RUNNING, lambda: put(b"one\ntwo\n") or GONE]
    logs.follow(remote.record, Wanted(), poll_s=0.01, ask_s=0)
    assert capsys.readouterr().out.splitlines() == [
        *["==> the run's log/rank_0000.txt <==", "from the trainer"],
        *["==> attempt_0001/n1.txt <==", "one", "two"],
    ]


def test_of_two_copies_of_a_log_the_longer_one_is_shown(remote, bucket, capsys):
    bucket.put("runs/mine.launch/logs/attempt_0001/n1.txt", b"one\n")
    remote.log("attempt_0001/n1.txt", "one\ntwo\n")
    assert main(["logs", remote.run_dir, "--node", "n1", *remote.flags]) == DONE
    assert capsys.readouterr().out.splitlines()[1:] == ["one", "two"]
    bucket.put("runs/mine.launch/logs/attempt_0001/n1.txt", b"one\ntwo\nthree\n")
    logs.show(remote.record, Wanted(node="n1"))
    assert capsys.readouterr().out.splitlines()[1:] == ["one", "two", "three"]
