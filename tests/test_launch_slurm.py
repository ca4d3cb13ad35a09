"""Runs launched on a real Slurm cluster of three nodes: what becomes of them, and that their losses stay the same."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from running import eventually, run, train_overrides
from s3_fixtures import Bucket
from services.slurm_cluster import SlurmCluster

from launch import submit
from launch.__main__ import main
from launch.record import Event, Record
from launch.schedulers import last_submission
from launch.slurm.scheduler import Scheduler
from launch.status import status
from launch.supervise import look
from train.cli.command import DONE, REFUSED
from train.config import S3Config
from train.run_folder.outcome import STOP_FILE, read_outcome

pytestmark = pytest.mark.parametrize("shared_slurm", [3], indirect=True)
LONG = ["max_steps=80", "checkpoint.every=20", "checkpoint.keep=2", "eval_every=40", "log_every=20"]
LONG += ["lease.ttl_s=5", "preempt.poll_s=0.2", "export=false"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> list[float]:
    """The losses of LONG on one rank of this machine."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run(train_overrides(folder, prepared, *LONG))
    assert done.returncode == DONE, done.stderr
    return losses((folder / "metrics.jsonl").read_bytes())


def losses(metrics: bytes) -> list[float]:
    """Of the evaluations, which see all of the model; of a step that was done twice the last."""
    found = [json.loads(line) for line in metrics.splitlines()]
    return list({line["step"]: line["loss"] for line in found if line["kind"] == "eval"}.values())


def launch(run_dir: object, data: object, *overrides: str, settings: tuple[str, ...] = ()) -> Record:
    """Submit a run of two nodes; its record."""
    own = ["cluster=slurm", "nodes=2", "cluster.gate=false", *settings, "submit=true"]
    settings_of_run = [each for each in train_overrides(Path("-"), Path("-")) if not each.startswith(NAMED)]
    of_run = [*settings_of_run, f"run_dir={run_dir}", f"data.path={data}", *LONG, *overrides]
    given = {each.partition("=")[0]: each for each in of_run}  # the last one counts
    assert main([*own, "--", *given.values()]) == DONE
    return Record(str(run_dir), s3_of(overrides))


NAMED = ("run_dir=", "data.path=")


def s3_of(overrides: tuple[str, ...]) -> S3Config:
    given = dict(each.split("=", 1) for each in overrides if each.startswith("s3."))
    if not given:
        return S3Config()
    return S3Config(endpoint=given["s3.endpoint"], region=given["s3.region"], path_style=True)


def state(record: Record) -> str:
    event = last_submission(record)
    assert event is not None
    return Scheduler().state(event.details["handle"]).text


def job_id(record: Record) -> int:
    event = last_submission(record)
    assert event is not None
    return int(event.details["handle"]["job_id"])


def events(record: Record, kind: str) -> list[Event]:
    return [event for event in record.events() if event.kind == kind]


def wait_for(record: Record, kind: str, number: int = 1) -> Event:
    """The event of this kind and number."""

    def come() -> Event | None:
        ended = events(record, "ended")
        assert kind == "ended" or not ended, (ended, logs(record))
        return (events(record, kind) + [None] * number)[number - 1]

    return eventually(come)


def wait_for_checkpoint(record: Record, *, after: int = 0) -> int:
    """A committed step beyond `after`, of a job that has not ended."""

    def newest() -> int | None:
        step = look(record).checkpoint
        assert step > after or not events(record, "ended"), logs(record)
        return step if step > after else None

    return eventually(newest)


def logs(record: Record) -> str:
    top = record.local_folder() / "logs"
    return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted(top.rglob("*.txt")))


def ended(record: Record) -> dict:
    details = wait_for(record, "ended").details
    eventually(lambda: not state_is_active(record))
    return details


def state_is_active(record: Record) -> bool:
    event = last_submission(record)
    assert event is not None
    return Scheduler().state(event.details["handle"]).is_active


@pytest.fixture
def s3(slurm: SlurmCluster, bucket: Bucket) -> Iterator[list[str]]:
    """Settings of S3 that hold on this machine and on the nodes."""
    with slurm.reaching(urlsplit(bucket.service.endpoint).port) as address:
        yield [f"s3.endpoint=http://{address}", *bucket.overrides()[1:]]


def test_a_run_in_s3_is_the_run_of_one_rank(slurm, s3, bucket, prepared, undisturbed):
    for path in prepared.rglob("*"):
        if path.is_file():
            bucket.client.upload_file(str(path), bucket.name, f"data/{path.relative_to(prepared).as_posix()}")
    record = launch(bucket.location("runs/mine"), bucket.location("data"), *s3, "export=true")
    assert state(record).split()[2] in ("PENDING", "RUNNING")
    details = ended(record)
    assert details == {"outcome": "done", "reason": "done"}, logs(record)
    assert state(record).endswith("COMPLETED")
    assert losses(record.run.read("metrics.jsonl")) == pytest.approx(undisturbed, rel=1e-5)
    names = record.folder.names("logs/")
    assert {f"logs/attempt_0001/{node}.txt" for node in ("n1", "n2")} <= set(names)
    assert record.run.names("export/")


def test_the_time_limit_and_a_lost_node_cost_no_step(slurm, hold, prepared, undisturbed, tmp_path):
    hold.before(25, 45)
    began_s = time.monotonic()
    record = launch(tmp_path / "run", prepared, settings=("cluster.time_limit=30", "cluster.stop_before_s=115"))
    wait_for_checkpoint(record)
    minutes = 2 + int(time.monotonic() - began_s) // 60  # one to two are left; Slurm looks now and then
    slurm.run("scontrol", "update", f"JobId={job_id(record)}", f"TimeLimit={minutes}")
    first = wait_for(record, "attempt_ended").details
    assert (first["next"], first["outcome"]) == ("requeue", "stopped"), logs(record)
    hold.let_go(25)  # a slow machine may have stopped before it
    assert wait_for(record, "requeued").details["reason"] == "the time limit is near"
    eventually(lambda: "PENDING" in state(record))
    slurm.run("scontrol", "update", f"JobId={job_id(record)}", "TimeLimit=30")
    wait_for(record, "attempt_began", 2)
    wait_for_checkpoint(record, after=first["checkpoint"])
    slurm.lose("n2")
    wait_for(record, "attempt_began", 3)
    hold.let_go(45)
    assert slurm.run("scontrol", "show", "job", str(job_id(record))).count("Restarts=2")
    assert ended(record)["outcome"] == "done", logs(record)
    assert events(record, "attempt_began")[-1].details["nodes"] == ["n1", "n3"]
    assert losses(record.run.read("metrics.jsonl")) == pytest.approx(undisturbed, rel=1e-5)


def test_a_run_is_preempted_stopped_and_resumed(slurm, hold, prepared, undisturbed, tmp_path):
    hold.before(25, 45, 65)
    record = launch(tmp_path / "run", prepared)
    step = wait_for_checkpoint(record)
    slurm.run("scontrol", "update", "PartitionName=main", "GraceTime=30")  # of SIGTERM to the ranks alone
    urgent = ("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    slurm.run(*urgent)
    preempted = wait_for(record, "attempt_ended").details
    assert (preempted["outcome"], preempted["next"]) == ("stopped", "requeue") and preempted["checkpoint"] > step
    hold.let_go(25)  # a slow machine may have stopped before it
    wait_for(record, "attempt_began", 2)
    slurm.run("scontrol", "update", "PartitionName=main", "GraceTime=0")  # KillWait after SIGTERM to all
    wait_for_checkpoint(record, after=preempted["checkpoint"])
    slurm.run(*urgent)
    eventually(lambda: len(events(record, "attempt_began")) == 3)
    with pytest.raises(Exception, match="has a job: job"):
        submit.resume(record)
    hold.let_go(45)  # unless the ranks noticed that they were to stop before they were killed
    wait_for_checkpoint(record, after=50)
    assert main(["stop", str(tmp_path / "run")]) == DONE
    eventually(lambda: not state_is_active(record))
    assert events(record, "ended")[-1].details == {"outcome": "stopped", "reason": "stopped as asked"}, logs(record)
    assert "FAILED" in state(record)  # by exit code 75
    assert read_outcome(record.run)["outcome"] == "stopped" and record.run.size(STOP_FILE) is None
    hold.let_go(65)
    assert main(["resume", str(tmp_path / "run")]) == DONE
    eventually(lambda: events(record, "ended")[-1].details["outcome"] == "done")
    assert losses(record.run.read("metrics.jsonl")) == pytest.approx(undisturbed, rel=1e-5)


def test_a_cancelled_job_does_not_come_back(slurm, hold, prepared, tmp_path):
    hold.before(25, 45)
    record = launch(tmp_path / "run", prepared)
    wait_for_checkpoint(record)
    assert main(["cancel", str(tmp_path / "run"), "--yes"]) == DONE
    eventually(lambda: not state_is_active(record))
    assert "CANCELLED" in state(record) and not events(record, "requeued")
    assert not slurm.run("squeue", "--noheader")
    again = launch(tmp_path / "run", prepared)  # the record and the run folder are as they were
    eventually(lambda: len(events(again, "attempt_began")) == 2)
    slurm.run("scancel", str(job_id(again)))  # past launch
    eventually(lambda: not state_is_active(again))
    assert "CANCELLED" in state(again) and not events(again, "requeued")


def test_a_node_that_does_not_see_the_record_is_replaced_by_the_spare(slurm, prepared, tmp_path):
    parent = tmp_path / "runs"
    parent.mkdir()
    slurm.exec("n2", "mount", "-t", "tmpfs", "tmpfs", str(parent))
    try:
        settings = ("cluster.gate=true", "spares=1", "cluster.drain=true")
        record = launch(parent / "run", prepared, "max_steps=20", settings=settings)
        assert ended(record)["outcome"] == "done", logs(record)
        gate = events(record, "gate")[0].details
        assert gate["passed"] == ["n1", "n3"] and "does not see that folder" in gate["failed"]["n2"]
        assert events(record, "attempt_began")[0].details["nodes"] == ["n1", "n3"]
        assert "drain" not in slurm.run("sinfo", "--noheader", "--nodes=n2", "--format=%T").lower()
        other = launch(parent / "other", prepared, "max_steps=20", settings=("cluster.gate=true",))
        eventually(lambda: events(other, "requeued"))
        assert ended(other)["outcome"] == "done", logs(other)
        assert events(other, "attempt_began")[0].details["nodes"] == ["n1", "n3"]  # n2 is excluded
    finally:
        slurm.exec("n2", "umount", str(parent))


def test_a_corpus_is_prepared_in_an_array_and_merged(slurm, corpus, tmp_path):
    of_run = ["corpus=text", f"corpus.path={corpus}", f"output={tmp_path}/data", "seq_len=32"]
    of_run += ["tokenizer.vocab_size=120", "validation_fraction=0.25"]
    assert main(["cluster=slurm", "prepare=true", "parts=3", "submit=true", "--", *of_run]) == DONE
    record = Record(f"{tmp_path}/data", S3Config())
    assert ended(record)["outcome"] == "done", logs(record)
    assert (tmp_path / "data" / "manifest.json").is_file() and state(record).endswith("COMPLETED")
    wrong = [*of_run[:1], f"corpus.path={tmp_path}/nothing", f"output={tmp_path}/other", *of_run[3:]]
    assert main(["cluster=slurm", "prepare=true", "parts=2", "submit=true", "--", *wrong]) == DONE
    other = Record(f"{tmp_path}/other", S3Config())
    eventually(lambda: status(other).state == "refused" and not status(other).is_active)  # the merge is gone too
    assert all("ended with exit code 2" in event.details["reason"] for event in events(other, "ended"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("nodes=4",), "nodes=4 is more than a job in partition main can have; ask for at most 3"),
        (("cluster.time_limit=2-00:00:00",), "more than the 1-00:00:00 of partition main"),
        (("cluster.partition=nowhere",), "there is no partition 'nowhere'; choose one of: main, urgent"),
    ],
    ids=["nodes", "time", "partition"],
)
def test_what_the_site_cannot_give_is_refused_before_anything_is_written(
    slurm, prepared, tmp_path, capsys, settings, message
):
    own = ["cluster=slurm", "nodes=2", *settings, "submit=true", "--"]
    given = {each.partition("=")[0]: each for each in own[:-1]}
    assert main([*given.values(), "--", *train_overrides(tmp_path / "run", prepared)]) == REFUSED
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("run*")) and not slurm.run("squeue", "--noheader")
