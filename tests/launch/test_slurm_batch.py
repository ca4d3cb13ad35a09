"""What a Slurm job does at its time limit, where Slurm rejects something, and when a node never answers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from planning import plan, script, two_nodes

from launch.program import run_preflight
from launch.record import Record
from launch.slurm import batch as module
from launch.slurm.batch import Batch
from train.config import Failure, S3Config


@pytest.fixture
def batch(monkeypatch, tmp_path) -> Batch:
    two_nodes(monkeypatch, tmp_path / "bin")
    monkeypatch.setattr(module, "REQUEUED_S", 0.0)  # Slurm does not end this process
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    _, job = plan(
        ["cluster=slurm", "nodes=2"],
        ["experiment=demo", "run_dir=runs/mine"],
    )
    record = Record(str(tmp_path / "run"), S3Config())
    record.claim(1, "slurm", 2)
    return Batch(record, job, 7)


def requests(tmp_path: Path) -> str:
    log = tmp_path / "bin" / "said"
    return log.read_text() if log.exists() else ""


def answering(tmp_path: Path, answer: str) -> None:
    script(tmp_path / "bin" / "scontrol", f"echo \"$*\" >> '{tmp_path}/bin/said'; {answer}")


@pytest.mark.parametrize("container", [[], ["apptainer", "exec", "/fsx/train.sif"]])
def test_an_attempt_runs_in_the_sites_container(batch, tmp_path, container):
    batch.cluster.container = container
    assert batch.attempt(1) == 0
    words = (tmp_path / "bin/arguments").read_text().split("\0")
    at = words.index(batch.job.python)
    assert words[at - len(container) - 1 : at] == ["--label", *container]
    assert {"--nodelist=n1,n2", "--kill-on-bad-exit=1"} <= {*words[:at]}


def test_a_node_that_never_answers_does_not_hold_the_others(batch, monkeypatch, tmp_path):
    script(tmp_path / "bin" / "srun", "exec sleep 600")
    monkeypatch.setitem(module.LIMITS_S, "preflight", 0.0)
    batch.record.folder.write("gate/gate_7_0/n1.json", b'{"ok": true}')
    said = run_preflight(batch.record, batch.job, batch.nodes, batch.on_nodes, name="gate_7_0")
    assert said.startswith("1 of 2 machines failed the preflight; n2: no answer")


@pytest.mark.parametrize("has_preflight", [False, True])
def test_what_slurm_does_not_start_is_requeued_and_says_nothing_of_run_or_nodes(
    batch, monkeypatch, tmp_path, has_preflight
):
    """Its line of an earlier step, and what a task prints, do not count."""
    log = tmp_path / "log"
    line = "Unable to create step for job 7: Requested node configuration is not available"
    log.write_text("srun: error: Unable to create step for job 7: an earlier one\n")
    monkeypatch.setattr(batch, "log", lambda: log)
    answering(tmp_path, "exit 0")
    batch.cluster.gate = has_preflight
    task = "0: srun: error: Unable to create step for job 7: x"
    script(tmp_path / "bin" / "srun", f"echo '{task}' >> '{log}'; exit 1")
    assert batch.attempt(1) == 1
    script(tmp_path / "bin" / "srun", f"echo 'srun: error: {line}' >> '{log}'; exit 1")
    for times in range(1, 4):  # more often than a job may save nothing
        with pytest.raises(Failure, match="did not end it"):
            batch.train()
        history = batch.record.history()
        assert requests(tmp_path).count("requeue 7") == times
        assert (history.faults, history.idle) == (times, 0)
        assert line in history.attempts[-1].reason
