"""What a Slurm job does at its time limit, where Slurm rejects something, and when a node never answers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from planning import plan, script, two_nodes

from launch.preflight import run_preflight
from launch.record import Record, read_history
from launch.slurm import batch as module
from launch.slurm.batch import Batch
from launch.supervise import Decision
from train.config import S3Config


@pytest.fixture
def batch(monkeypatch, tmp_path) -> Batch:
    two_nodes(monkeypatch, tmp_path / "bin")
    monkeypatch.setattr(module, "REQUEUED_S", 0.0)  # Slurm does not end this process
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    _, job = plan(
        ["cluster=slurm", "nodes=2", "cluster.stop_before_s=60"],
        ["experiment=demo", "run_dir=runs/mine"],
    )
    record = Record(str(tmp_path / "run"), S3Config())
    record.append_event("submitting")
    return Batch(record, job, 7)


def requests(tmp_path: Path) -> str:
    log = tmp_path / "bin" / "said"
    return log.read_text() if log.exists() else ""


def answering(tmp_path: Path, answer: str) -> None:
    script(tmp_path / "bin" / "scontrol", f"echo \"$*\" >> '{tmp_path}/bin/said'; {answer}")


def test_a_run_that_does_not_stop_before_the_limit_comes_back(batch, tmp_path):
    answering(tmp_path, "exit 0")
    batch.ask(signal.SIGUSR1, None)
    batch.ask(signal.SIGTERM, None)  # before the limit: somebody else ends the job
    batch.meanwhile()
    assert batch.is_ending and not requests(tmp_path)
    batch.limit_s = 0.0  # it has come
    batch.ask(signal.SIGTERM, None)
    batch.meanwhile()
    assert requests(tmp_path) == "requeue 7\n"
    events = batch.record.events()
    assert [event.kind for event in events] == ["submitting", "requeued", "ended"]
    assert "did not stop in 60 s (cluster.stop_before_s)" in events[1].details["reason"]


def test_a_cancelled_job_that_does_not_stop_before_the_limit_does_not_come_back(batch, tmp_path):
    answering(tmp_path, "exit 0")
    batch.record.append_event("cancelled")
    batch.is_overdue = True
    batch.meanwhile()
    assert not requests(tmp_path)


def test_a_job_that_was_requeued_too_often_ends(batch, tmp_path):
    answering(tmp_path, "exit 0")
    batch.record.append_event("requeued")
    decision = batch.requeue(Decision("requeue", "failed", "no node is fit"))
    assert (decision.next, decision.outcome) == (
        "end",
        "failed",
    ) and "saved nothing new" in decision.reason
    assert not requests(tmp_path)


def test_a_node_that_never_answers_does_not_hold_the_others(batch, monkeypatch, tmp_path):
    script(tmp_path / "bin" / "srun", "exec sleep 600")
    monkeypatch.setitem(module.LIMITS_S, "preflight", 0.0)
    batch.record.folder.write("gate/gate_7_0/n1.json", b'{"ok": true}')
    chosen, failed = run_preflight(
        batch.record, batch.job, ["n1", "n2"], batch.examine, name="gate_7_0"
    )
    assert (chosen, list(failed)) == (["n1"], ["n2"]) and failed["n2"].startswith("no answer")
    assert read_history(batch.record.events()).failed_gate == failed


@pytest.mark.parametrize("has_preflight", [False, True])
def test_what_slurm_does_not_start_is_requeued_and_says_nothing_of_run_or_nodes(
    batch, monkeypatch, tmp_path, has_preflight
):
    """Its line of an earlier step, and what a task prints, do not count."""
    log, line = (
        tmp_path / "log",
        "Unable to create step for job 7: Requested node configuration is not available",
    )
    log.write_text("srun: error: Unable to create step for job 7: an earlier one\n")
    monkeypatch.setattr(batch, "log", lambda: log)
    answering(tmp_path, "exit 0")
    batch.cluster.gate = has_preflight
    script(
        tmp_path / "bin" / "srun",
        f"echo '0: srun: error: Unable to create step for job 7: x' >> '{log}'; exit 1",
    )
    assert batch.attempt(1) == 1
    script(tmp_path / "bin" / "srun", f"echo 'srun: error: {line}' >> '{log}'; exit 1")
    for times in range(1, 4):  # more often than a job may save nothing
        requested = requests(tmp_path).count("requeue 7")
        batch.train()
        history = read_history(batch.record.events())
        assert requests(tmp_path).count("requeue 7") == requested + 1
        assert (history.faults, history.idle, history.failed_gate) == (times, 0, {})
        assert (
            line
            in [each for each in batch.record.events() if each.kind == "requeued"][-1].details[
                "reason"
            ]
        )
