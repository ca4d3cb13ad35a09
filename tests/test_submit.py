"""Submissions of a run: one at a time, and none whose job nobody knows."""

from __future__ import annotations

import pytest
from launched import Launched

from launch import commands, local, submit
from launch.spec import State
from train.cli.command import FAILED
from train.config import InputError


@pytest.fixture
def run(fake_scheduler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Launched("runs/mine", fake_scheduler).job()


def test_of_two_launches_at_once_one_is_rejected(run):
    job = run.record.job()
    first, second = submit.check_idle(run.record), submit.check_idle(run.record)
    submit.claim(run.record, job, first)
    with pytest.raises(InputError, match="another launch of runs/mine came first"):
        submit.claim(run.record, job, second)
    with pytest.raises(InputError, match="is being launched for .*try again in 120 s"):
        submit.check_idle(run.record)


def test_a_submission_that_nobody_answered_blocks_another_one_for_a_while_only(
    run, fake_scheduler, capsys, monkeypatch
):
    run.note("submitting", scheduler="fake")
    assert commands.main(["cancel", "runs/mine", "--yes"]) == FAILED
    assert (
        "never answered the submission; look there for a job" in capsys.readouterr().err
        and not fake_scheduler.cancelled
    )
    monkeypatch.setattr(submit, "SUBMITTING_S", -1.0)  # it is long ago
    run.record.folder.remove("job.json")  # or it was killed before it wrote that
    assert submit.check_idle(run.record) == 2


def test_the_end_of_an_earlier_job_is_not_this_ones(run, fake_scheduler):
    run.submit().note("ended", outcome="done", reason="done")
    run.note("submitting").submit()
    fake_scheduler.states = [State(False, "no such job")]
    assert local.Scheduler().attend(run.record.job(), run.record, {}, detach=False) == FAILED
