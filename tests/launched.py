"""A run that was launched, made up: its record, its run folder, and a scheduler that says what a test wants."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from planning import plan

from launch.config import ClusterConfig
from launch.record import Attempt, Record
from launch.schedulers import SCHEDULERS
from launch.spec import Scheduler, State
from train.config import S3Config

HANDLE = {"job_id": 7}
NODES = ["n1", "n2"]
LEASE = {
    "owner": "x",
    "host": "n1",
    "pid": 5,
    "process_start": 1,
    "boot_id": None,
    "pid_namespace": None,
}
LEASE |= {
    "job": "mine-1.1",
    "started": "",
    "ttl_s": 30,
    "heartbeats": 1,
    "step": 0,
    "released": False,
}


@dataclass
class FakeScheduler:
    """Says `states` one after another, or what they return, the last one again and again."""

    states: list[Any] = field(default_factory=lambda: [State(True, "RUNNING", list(NODES))])
    cancelled: list[Mapping[str, Any]] = field(default_factory=list)

    def state(self, record: Record, handle: Mapping[str, Any]) -> State:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        answer = state() if callable(state) else state
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, State)
        return answer

    def unanswered(self, record: Record) -> State:
        return Scheduler.unanswered(self, record)  # type: ignore[arg-type]

    def cancel(self, record: Record, handle: Mapping[str, Any]) -> None:
        self.cancelled.append(handle)


@contextmanager
def in_table(scheduler: FakeScheduler) -> Iterator[FakeScheduler]:
    """The scheduler "fake" of the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fake_scheduler", SimpleNamespace(Scheduler=lambda: scheduler))
        patch.setitem(SCHEDULERS, "fake", (ClusterConfig, "fake_scheduler"))
        yield scheduler


@pytest.fixture
def fake_scheduler() -> Iterator[FakeScheduler]:
    with in_table(FakeScheduler()) as made:
        yield made


@dataclass
class Launched:
    """`submit`, `begin` and `end` write the record, `trained` the run folder, `log` a log file."""

    run_dir: str
    scheduler: FakeScheduler
    s3: S3Config = field(default_factory=S3Config)

    def __post_init__(self) -> None:
        self.record = Record(self.run_dir, self.s3)

    def job(self, **changes: Any) -> Launched:
        job = plan(["cluster=local"], ["experiment=demo", "run_dir=runs/mine"])[1]
        settings = {
            "scheduler": "fake",
            "cluster": {},
            "nodes": 2,
            "processes_per_node": 2,
            **changes,
        }
        self.record.write(replace(job, run_dir=self.run_dir, **settings), config="", bundle=b"")
        return self

    def submit(self, scheduler: str = "fake", nodes: int = 2, **answer: Any) -> Launched:
        """A submission with the scheduler's answer: a handle, or a rejection."""
        claimed = self.record.claim(self.record.next_submission(), scheduler, nodes)
        assert claimed is not None
        self.record.keep_answer(replace(claimed, **(answer or {"handle": HANDLE})))
        return self

    def begin(self, *, is_training: bool = True, begun_at: int = 0) -> Launched:
        attempt = self.record.begin(NODES, begun_at)
        assert attempt is not None
        self.record.keep(replace(attempt, is_training=is_training))
        return self

    def end(self, outcome: str = "done", next: str = "end", **more: Any) -> Launched:
        """The end of the last attempt."""
        attempt = replace(self.last, outcome=outcome, next=next, ended_unix_s=time.time(), **more)
        self.record.keep(attempt)
        return self

    def ask(self, what: str) -> Launched:
        self.record.ask(what)
        return self

    @property
    def last(self) -> Attempt:
        return self.record.history().attempts[-1]

    def describe(self) -> Launched:
        content = {"identity": {"task.kind": "mlm"}, "plan": {"total_steps": 100}}
        self.record.run.write("environment.json", json.dumps(content).encode())
        return self

    def trained(self, step: int = 40) -> Launched:
        """A run in its first attempt at this step, with a checkpoint ten steps before; a line every ten seconds."""
        numbers = {"tokens_per_s": 5000.0, "step_s": 1.0, "cost_usd": 1.25}
        lines = [
            {"kind": "train", "step": step - 10, "loss": 3.5, **numbers},
            {
                "kind": "eval",
                "step": step - 10,
                "loss": 3.25,
                "masked_accuracy": 0.5,
                "eval_s": 1.0,
            },
            {"kind": "checkpoint", "step": step - 10, "save_s": 2.0},
            {"kind": "train", "step": step, "loss": 3.0, **numbers},
        ]
        began_unix_s = time.time() - 30
        full = [
            {"attempt": 1, "time_unix_s": began_unix_s + 10 * at, **line}
            for at, line in enumerate(lines)
        ]
        self.describe().record.run.write(
            "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in full).encode()
        )
        self.record.run.write(f"checkpoints/step_{step - 10:08d}/manifest.json", b"{}")
        self.record.run.write(f"checkpoints/step_{step:08d}/model.pt", b"not committed")
        return self

    def log(self, name: str, content: str | bytes) -> Launched:
        path = self.record.local_folder() / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return self
