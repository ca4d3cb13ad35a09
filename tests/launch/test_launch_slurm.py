"""Runs launched on a real Slurm cluster of three nodes: what becomes of them, and that their losses stay the same."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from launching import LaunchedRun, settings_of_run
from running import eventually, train_overrides
from s3_fixtures import Bucket
from services.slurm_cluster import SlurmCluster

from launch import submit
from launch.__main__ import main
from launch.status import status
from train.config import S3Config
from train.run.command import DONE, REJECTED
from train.run_folder.outcome import STOP_FILE, read_outcome


def launch(
    run_dir: object, data: object, *overrides: str, settings: tuple[str, ...] = ()
) -> LaunchedRun:
    """Submit a run of two nodes; its record."""
    own = ["cluster=slurm", "nodes=2", "cluster.gate=false", *settings, "submit=true"]
    assert main([*own, "--", *settings_of_run(run_dir, data, *overrides)]) == DONE
    given = dict(each.split("=", 1) for each in overrides if each.startswith("s3."))
    s3 = {"endpoint": given["s3.endpoint"], "region": given["s3.region"]} if given else {}
    return LaunchedRun(str(run_dir), S3Config(**s3))


@pytest.fixture
def s3(slurm: SlurmCluster, bucket: Bucket) -> Iterator[list[str]]:
    """Settings of S3 that hold on this machine and on the nodes."""
    with slurm.reaching(urlsplit(bucket.service.endpoint).port) as address:
        yield [f"s3.endpoint=http://{address}", *bucket.overrides()[1:]]


def test_a_run_in_s3_is_the_run_of_one_rank(slurm, s3, bucket, prepared, undisturbed_losses):
    for path in prepared.rglob("*"):
        if path.is_file():
            bucket.client.upload_file(
                str(path), bucket.name, f"data/{path.relative_to(prepared).as_posix()}"
            )
    record = launch(bucket.location("runs/mine"), bucket.location("data"), *s3, "export=true")
    assert record.state.text.split()[2] in ("PENDING", "RUNNING")
    assert record.ended().outcome == "done", record.logs()
    assert record.state.text.endswith("COMPLETED")
    assert record.losses == pytest.approx(undisturbed_losses, rel=1e-5)
    names = record.folder.names("logs/")
    assert {f"logs/attempt_0001/{node}.txt" for node in ("n1", "n2")} <= set(names)
    assert record.run.names("export/")


def test_the_time_limit_and_a_lost_node_cost_no_step(
    slurm, hold, prepared, undisturbed_losses, tmp_path
):
    hold.before(25, 45)
    began_s = time.monotonic()
    record = launch(
        tmp_path / "run",
        prepared,
        settings=('cluster.sbatch_args=["--time=30","--signal=B:USR1@115"]',),
    )
    record.wait_for_checkpoint()
    # one to two are left; Slurm looks now and then
    minutes = 2 + int(time.monotonic() - began_s) // 60
    slurm.run("scontrol", "update", f"JobId={record.handle['job_id']}", f"TimeLimit={minutes}")
    first = record.wait_for(1, is_over=True)
    assert (first.next, first.outcome) == ("requeue", "stopped"), record.logs()
    assert first.reason == "the time limit is near"
    hold.let_go(25)  # a slow machine may have stopped before it
    eventually(lambda: "PENDING" in record.state.text)
    slurm.run("scontrol", "update", f"JobId={record.handle['job_id']}", "TimeLimit=30")
    record.wait_for(2)
    record.wait_for_checkpoint(after=first.checkpoint)
    slurm.lose("n2")
    record.wait_for(3)
    hold.let_go(45)
    assert slurm.run("scontrol", "show", "job", str(record.handle["job_id"])).count("Restarts=2")
    assert record.ended().outcome == "done", record.logs()
    assert record.attempts[-1].nodes == ["n1", "n3"]
    assert record.losses == pytest.approx(undisturbed_losses, rel=1e-5)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_lost_node_that_comes_back_costs_no_step_without_another_to_move_to(
    slurm, hold, prepared, undisturbed_losses, tmp_path, is_known
):
    """Back before Slurm knows of its loss, its old step keeps the node busy; back while the job waits to be started
    again, slurmctld may give the job a node on which it then makes no step.
    """
    hold.before(25)
    settings = ('cluster.sbatch_args=["--exclude=n3"]', f"cluster.gate={str(is_known).lower()}")
    record = launch(tmp_path / "run", prepared, settings=settings)
    record.wait_for_checkpoint()
    slurm.lose("n2")
    if is_known:
        eventually(lambda: "PENDING" in record.state.text)
    slurm.start("n2")
    hold.let_go(25)
    assert record.ended().outcome == "done", record.logs()
    assert record.losses == pytest.approx(undisturbed_losses, rel=1e-5)
    if not is_known:
        reasons = " ".join(attempt.reason for attempt in record.attempts)
        assert "Slurm did not start the step: Unable to create step" in reasons


URGENT = (
    "sbatch",
    "--partition=urgent",
    "--nodes=3",
    "--exclusive",
    "--output=/dev/null",
    "--wrap=sleep 2",
)


def test_a_run_is_preempted_stopped_and_resumed(
    slurm, hold, prepared, undisturbed_losses, tmp_path
):
    hold.before(25, 45, 65)
    record = launch(tmp_path / "run", prepared)
    step = record.wait_for_checkpoint()
    # of SIGTERM to the ranks alone
    slurm.run("scontrol", "update", "PartitionName=main", "GraceTime=30")
    slurm.run(*URGENT)
    preempted = record.wait_for(1, is_over=True)
    assert (preempted.outcome, preempted.next) == ("stopped", "requeue")
    assert preempted.checkpoint > step
    hold.let_go(25)  # a slow machine may have stopped before it
    record.wait_for(2)
    # KillWait after SIGTERM to all
    slurm.run("scontrol", "update", "PartitionName=main", "GraceTime=0")
    record.wait_for_checkpoint(after=preempted.checkpoint)
    slurm.run(*URGENT)
    record.wait_for(3)
    with pytest.raises(Exception, match="has a job: job"):
        submit.resume(record)
    hold.let_go(45)  # unless the ranks noticed that they were to stop before they were killed
    record.wait_for_checkpoint(after=50)
    assert main(["stop", str(tmp_path / "run")]) == DONE
    eventually(lambda: not record.state.is_active)
    ended = record.ended()
    assert (ended.outcome, ended.reason) == ("stopped", "stopped as asked"), record.logs()
    assert "FAILED" in record.state.text  # by exit code 75
    assert read_outcome(record.run)["outcome"] == "stopped" and record.run.size(STOP_FILE) is None
    hold.let_go(65)
    assert main(["resume", str(tmp_path / "run")]) == DONE
    assert record.ended().outcome == "done"
    assert record.losses == pytest.approx(undisturbed_losses, rel=1e-5)


def test_a_job_that_is_cancelled_past_launch_does_not_come_back(slurm, hold, prepared, tmp_path):
    hold.before(25)
    record = launch(tmp_path / "run", prepared)
    record.wait_for_checkpoint()
    slurm.run("scancel", str(record.handle["job_id"]))
    eventually(lambda: not record.state.is_active)
    assert status(record).state == "cancelled" and len(record.attempts) == 1
    assert not slurm.run("squeue", "--noheader")


def test_a_node_that_does_not_see_the_record_is_named(slurm, prepared, tmp_path):
    parent = tmp_path / "runs"
    parent.mkdir()
    slurm.exec("n2", "mount", "-t", "tmpfs", "tmpfs", str(parent))
    try:
        examined = "cluster.gate=true"
        record = launch(parent / "run", prepared, "max_steps=20", settings=(examined,))
        ended = record.ended()
        assert ended.outcome == "failed" and not ended.is_training, record.logs()
        assert "1 of 2 machines failed the preflight; n2: no answer in" in ended.reason
        others = (examined, 'cluster.sbatch_args=["--exclude=n2"]')
        other = launch(parent / "other", prepared, "max_steps=20", settings=others)
        assert other.ended().outcome == "done", other.logs()
        assert other.attempts[0].nodes == ["n1", "n3"]
    finally:
        slurm.exec("n2", "umount", str(parent))


def test_what_the_site_cannot_give_is_rejected_before_anything_is_written(
    slurm, prepared, tmp_path, capsys
):
    of_run = ["--", *train_overrides(tmp_path / "run", prepared)]
    assert main(["cluster=slurm", "nodes=2", *of_run]) == DONE
    shown = capsys.readouterr().out
    assert re.search(r"scheduler +to start at 20.*on nodes n\[1-2\] in partition main", shown), (
        shown
    )
    assert main(["cluster=slurm", "nodes=4", "submit=true", *of_run]) == REJECTED
    said = capsys.readouterr().err
    assert "node configuration is not available; `sinfo --summarize` shows" in said
    assert not list(tmp_path.glob("run*")) and not slurm.run("squeue", "--noheader")
