"""The preflight before a run: what it says of machines that fail."""

from __future__ import annotations

import pytest
from planning import plan

from launch import supervise
from launch.node import PREFLIGHT
from launch.program import Program, run_preflight
from launch.record import Job, Record
from launch.schedulers import cluster_of
from train.config import S3Config

ALL = ["n1", "n2", "n3"]
GOOD = b'{"ok": true}'
BAD = b'{"ok": false, "findings": [{"state": "bad", "name": "disk", "text": "full", "cure": "free some"}]}'


@pytest.fixture
def job() -> Job:
    return plan(["cluster=slurm", "nodes=3"], ["experiment=demo", "run_dir=runs/mine"])[1]


@pytest.mark.parametrize(
    ("answers", "code", "says"),
    [
        ([GOOD, GOOD, GOOD], 0, ""),
        (
            [GOOD, BAD, None],
            0,
            "2 of 3 machines failed the preflight; n2: disk: full (free some); n3: no answer in ",
        ),
        ([GOOD, b"Welcome!\n" + GOOD, GOOD], 0, "n2: its answer cannot be read: it is not JSON"),
        ([GOOD, GOOD, GOOD], 1, "collectives over n1, n2, n3 fail: see "),
    ],
)
def test_machines_that_fail_are_named(job, tmp_path, answers, code, says):
    record = Record(str(tmp_path / "run"), S3Config())
    asked = []

    def run(command: str, name: str) -> int:
        asked.append(command)
        for host, answer in zip(ALL, answers, strict=True):
            if answer is not None:
                record.folder.write(PREFLIGHT.format(name, host), answer)
        return code

    reason = run_preflight(record, job, ALL, run, name="gate_1_0")
    assert says in reason and bool(says) == bool(reason)
    is_fit = answers == [GOOD] * 3
    assert asked == (["preflight", "collectives"] if is_fit else ["preflight"])


class Machines(Program):
    """Three machines that never answer and cannot train."""

    nodes = ALL

    def on_nodes(self, command: str, name: str) -> int:
        self.record.folder.write(f"asked/{command}/{name}", b"")
        return 1


@pytest.mark.parametrize(
    ("is_on", "asked", "says"),
    [
        (
            True,
            ["asked/preflight/gate_1_0"],
            "3 of 3 machines failed the preflight; n1: no answer",
        ),
        (
            False,
            ["asked/train/attempt_0001", "asked/train/attempt_0002"],
            "2 attempts in a row saved nothing new",
        ),
    ],
)
def test_a_job_examines_its_machines_first_unless_the_cluster_says_no(
    job, tmp_path, monkeypatch, is_on, asked, says
):
    monkeypatch.setattr(supervise, "PAUSE_S", 0.0)
    machines = Machines(Record(str(tmp_path / "run"), S3Config()), job)
    cluster = cluster_of(job)
    cluster.gate = is_on
    decision = machines.supervise(cluster, name="gate_1_0")
    assert (decision.next, decision.outcome) == ("end", "failed") and says in decision.reason
    assert sorted(machines.record.folder.names("asked/")) == asked
