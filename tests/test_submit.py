"""Submissions of a run: one at a time, and none whose job nobody knows."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from launched import HANDLE, FakeScheduler, Launched
from planning import plan
from running import eventually

from launch import commands, local, submit
from launch.config import ClusterConfig
from launch.history import read_history
from launch.local import supervisor
from launch.record import Record
from launch.schedulers import SCHEDULERS, scheduler
from launch.spec import State
from train.cli.command import DONE, FAILED
from train.config import InputError, S3Config


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


@pytest.mark.parametrize("handle", [HANDLE, None])
def test_the_job_of_a_launcher_that_was_killed_is_looked_for(run, fake, monkeypatch, handle):
    run.note("submitting", scheduler="fake")
    monkeypatch.setattr(submit, "SUBMITTING_S", -1.0)  # it is long ago
    fake.there = handle
    if handle is None:
        assert submit.check_idle(run.record) == 3
        assert read_history(run.record.events()).submission.refusal.endswith("was ended before it had started the job")
    else:
        assert commands.main(["cancel", "runs/mine", "--yes"]) == DONE
        assert fake.cancelled == [HANDLE]


def test_a_launcher_that_was_killed_before_it_wrote_the_job_blocks_no_other(run, monkeypatch):
    run.note("submitting", scheduler="fake")
    run.record.folder.remove("job.json")
    monkeypatch.setattr(submit, "SUBMITTING_S", -1.0)
    assert submit.check_idle(run.record) == 3


def test_a_supervisor_of_this_machine_is_known_by_its_command(tmp_path):
    _, job = plan(["cluster=local"], ["experiment=demo", f"run_dir={tmp_path}/mine"])
    record = Record(job.run_dir, S3Config())
    assert scheduler("local").find(job, record) is None
    (tmp_path / "launch.local").write_text("read line")  # what a shell makes of the same arguments
    stands_in = subprocess.Popen(supervisor(job, record), executable="/bin/sh", cwd=tmp_path, stdin=subprocess.PIPE)
    handle = eventually(lambda: scheduler("local").find(job, record))
    assert handle["pid"] == stands_in.pid and scheduler("local").state(handle).is_active
    stands_in.communicate(b"end\n")
    assert scheduler("local").find(job, record) is None and not scheduler("local").state(handle).is_active


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
