"""Submissions of a run: one at a time, and none whose job nobody knows."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from launched import FakeScheduler, Launched

from launch import commands, local, submit
from launch.config import ClusterConfig
from launch.schedulers import SCHEDULERS
from launch.spec import State
from train.cli.command import FAILED
from train.config import InputError


@pytest.fixture
def fake(monkeypatch):
    made = FakeScheduler()
    monkeypatch.setitem(sys.modules, "fake_scheduler", SimpleNamespace(Scheduler=lambda: made))
    monkeypatch.setitem(SCHEDULERS, "fake", (ClusterConfig, "fake_scheduler"))
    return made


@pytest.fixture
def run(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Launched("runs/mine", fake).job()


def test_of_two_launches_at_once_one_is_refused(run):
    job = run.record.job()
    first, second = submit.check_idle(run.record), submit.check_idle(run.record)
    submit.claim(run.record, job, first)
    with pytest.raises(InputError, match="another launch of runs/mine came first"):
        submit.claim(run.record, job, second)
    with pytest.raises(InputError, match="is being launched by .*try again in 120 s"):
        submit.check_idle(run.record)


def test_a_submission_that_nobody_answered_blocks_another_one_for_a_while_only(run, fake, capsys, monkeypatch):
    run.note("submitting", scheduler="fake")
    assert commands.main(["cancel", "runs/mine", "--yes"]) == FAILED
    assert "never answered the submission; look there for a job" in capsys.readouterr().err and not fake.cancelled
    monkeypatch.setattr(submit, "SUBMITTING_S", -1.0)  # it is long ago
    run.record.folder.remove("job.json")  # or it was killed before it wrote that
    assert submit.check_idle(run.record) == 2


def test_settings_may_change_until_the_run_has_begun(run, monkeypatch):
    run.note("submitting").note("ended", outcome="refused", reason="no data")
    run.record.folder.write("config.yaml", b"seed: 1\n")
    started = []
    monkeypatch.setattr(submit, "start", lambda record, job: started.append(job))
    monkeypatch.setattr(submit, "to_dict", lambda settings: {"seed": 2})
    submit.submit(run.record, run.record.job(), None, plan={}, bundle=b"")
    assert len(started) == 1
    run.record.run.write("environment.json", b"{}")
    run.record.folder.write("config.yaml", b"seed: 1\n")
    run.note("ended", outcome="failed", reason="x")
    monkeypatch.setattr(submit, "check_idle", lambda record: record.next_number())
    with pytest.raises(InputError, match="changed since it began .seed: 1 -> 2"):
        submit.submit(run.record, run.record.job(), None, plan={}, bundle=b"")


def test_the_end_of_an_earlier_job_is_not_this_ones(run, fake):
    run.submit().note("ended", outcome="done", reason="done")
    run.note("submitting").submit()
    fake.states = [State(False, "no such job")]
    assert local.Scheduler().attend(run.record.job(), run.record, {}, detach=False) == FAILED
