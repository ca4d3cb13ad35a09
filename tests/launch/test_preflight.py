"""The preflight before a run: which machines it lets train, and how it finds the one whose collectives fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from planning import node, plan

from launch.node import PREFLIGHT, rendezvous
from launch.preflight import run_preflight
from launch.record import Job, Record
from train.config import S3Config
from train.storage.folders import canonical_json

ALL = ["n1", "n2", "n3", "n4", "n5", "n6"]


class Machines:
    """Machines that answer as theirs do: some have a doctor's finding, some links between two carry nothing."""

    def __init__(
        self, record: Record, *, ill: Sequence[str] = (), cut: Sequence[set[str]] = ()
    ) -> None:
        self.record, self.ill, self.cut = record, ill, cut
        self.asked: list[tuple[str, int]] = []

    def run(self, command: str, nodes: Sequence[str], *, name: str, group: int = 0) -> int:
        self.asked.append((command, group))
        failed = (
            [node for node in nodes if node in self.ill]
            if command == "preflight"
            else self.apart(nodes, group)
        )
        for each in nodes:
            answer = {"ok": each not in failed, "fault": "it fails"}
            self.record.folder.write(PREFLIGHT.format(name, each), canonical_json(answer))
        return int(bool(failed))

    def apart(self, nodes: Sequence[str], group: int) -> list[str]:
        groups = [
            nodes[first : first + (group or len(nodes))]
            for first in range(0, len(nodes), group or len(nodes))
        ]
        return [
            each
            for of_group in groups
            if any(link <= set(of_group) for link in self.cut)
            for each in of_group
        ]


@pytest.fixture
def job() -> Job:
    return plan(["cluster=slurm", "nodes=4"], ["experiment=demo", "run_dir=runs/mine"])[1]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(str(tmp_path / "run"), S3Config())


@pytest.mark.parametrize(
    ("ill", "cut", "chosen", "failed"),
    [
        ([], [], ["n1", "n2", "n3", "n4"], []),
        (["n2"], [], ["n1", "n3", "n4", "n5"], ["n2"]),
        ([], [{"n3"}], ["n1", "n2", "n4", "n5"], ["n3"]),  # its own devices fail
        ([], [{"n1", "n2"}], ["n3", "n4", "n5", "n6"], ["n1", "n2"]),
        (["n6"], [{"n3"}, {"n5"}], ["n1", "n2", "n4"], ["n3", "n5", "n6"]),  # too few are left
        (
            [],
            [{"n1", "n4"}],
            ["n5", "n6"],
            ["n1", "n2", "n3", "n4"],
        ),  # no pair of neighbours shows it
    ],
)
def test_machines_that_fail_are_left_out_and_spares_take_their_ranks(
    job, record, ill, cut, chosen, failed
):
    machines = Machines(record, ill=ill, cut=cut)
    passed, reasons = run_preflight(record, job, ALL, machines.run, name="gate_1_0")
    assert (passed, sorted(reasons)) == (chosen, failed)
    event = record.events()[-1]
    assert (event.kind, event.details["passed"], sorted(event.details["failed"])) == (
        "gate",
        chosen,
        failed,
    )


def test_a_machine_whose_answer_cannot_be_read_is_left_out(job, record):
    machines = Machines(record)

    def run(*arguments, **options):
        code = machines.run(*arguments, **options)
        record.folder.write(PREFLIGHT.format("gate_1_0", "n2"), b'Welcome to n2!\n{"ok": true}')
        return code

    passed, reasons = run_preflight(record, job, ALL, run, name="gate_1_0")
    assert (
        passed == ["n1", "n3", "n4", "n5"]
        and "its answer cannot be read: it is not JSON" in reasons["n2"]
    )


def test_machines_are_tried_apart_only_if_they_fail_together(job, record):
    machines = Machines(record)
    run_preflight(record, job, ALL, machines.run, name="gate_1_0")
    assert machines.asked == [("preflight", 0), ("collectives", 0)]
    machines = Machines(record, cut=[{"n1", "n2"}])
    _, reasons = run_preflight(record, job, ALL, machines.run, name="gate_1_1")
    assert machines.asked[1:] == [
        ("collectives", 0),
        ("collectives", 1),
        ("collectives", 2),
        ("collectives", 0),
    ]
    assert reasons["n1"] == "collectives in pairs: it fails"


def test_a_machine_meets_those_of_its_group_alone(job, record, monkeypatch):
    record.write(job, plan={}, config="", bundle=b"")
    met = [
        rendezvous(node(monkeypatch, record, name, hosts="n1,n2,n3,n4", group=2), is_train=False)
        for name in ("n1", "n2")
    ]
    assert [options[1] for options in met] == ["--node-rank=0", "--node-rank=1"]
    assert {options[2] for options in met} == {"--master-addr=10.0.0.1"} and "timeout=120" in met[
        0
    ][-1]
    alone = node(monkeypatch, record, "n2", hosts="n1,n2", group=1)
    assert alone.hosts == ["n2"] and alone.addresses == ["10.0.0.2"]
