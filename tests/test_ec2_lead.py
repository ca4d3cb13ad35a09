"""The machine that leads, and the agents that follow, with programs that only say what they were asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from running import eventually

from launch.ec2 import agent as agent_module
from launch.ec2 import lead as lead_module
from launch.ec2 import orders
from launch.ec2.agent import KILLED, Agent
from launch.ec2.crew import BEAT, CREW, HELLO, Beat, Crew, Hello, read_beat, write
from launch.ec2.lead import Lead
from launch.ec2.orders import Number, Order
from launch.ec2.watchers import WATCHER
from launch.job import Code, Job
from launch.node import GATE
from launch.record import Record
from launch.supervise import Verdict
from train.config import S3Config
from train.run_folder.outcome import Outcome, write_outcome
from train.storage.untrusted import BadContent, FileName

MACHINES = {f"i-0000000{number}": f"machine{number}" for number in range(4)}
FIT = b'{"ok": true}'
BROKEN = json.dumps({"ok": False, "fault": "it burns"}).encode()
FAILED_FOR_GOOD = Outcome("failed", "not_finite", "it burns", 5, 5, False, [], 0.0)
STOPPED_HERE = Outcome("stopped", "SIGTERM", "SIGTERM at rank 0", 5, 5, True, [], 0.0)
STOPPED_BY_SPOT = Outcome("stopped", "EC2", "EC2 spot notice: terminate at 12:00", 5, 5, True, [], 0.0)
DONE = Outcome("done", "last_step", "done", 9, 9, False, [], 1.0)


def hello(instance: str) -> Hello:
    number = int(instance[-1])
    return Hello(FileName(instance), FileName(MACHINES[instance]), f"10.0.0.{number}", number, "us-east-1a", 0.0)


def job_of(record: Record, **cluster: Any) -> Job:
    return Job(
        id=FileName("mine-1"),
        kind="train",
        run_dir=record.run_dir,
        overrides=[],
        config_sha256="0" * 64,
        python="python",
        folder="",
        code=Code("code-1.tar.gz", "1" * 64, ""),
        scheduler="ec2",
        cluster={"kind": "ec2", "gate": False, "lost_s": 1, "max_wait_s": 1, **cluster},
        instance="local",
        nodes=2,
        spares=0,
        processes_per_node=1,
    )


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """That of a run whose machines have all said hello."""
    for module, name in ((lead_module, "POLL_S"), (lead_module, "BEAT_S"), (agent_module, "POLL_S")):
        monkeypatch.setattr(module, name, 0.02)
    made = Record(str(tmp_path / "run"), S3Config())
    made.note("submitting")
    for instance in MACHINES:
        write(made, HELLO.format(instance), hello(instance))
    return made


# ---- who leads -------------------------------------------------------------------------------------------------------

Do = Callable[[Order, str], int | None]  # what a machine does with an order; None: it says nothing more


@contextmanager
def followed(record: Record, do: Do, *, beats: bool = False) -> Iterator[list[str]]:
    """All machines follow orders, in their turn. Gives what they were ordered."""
    over, seen, given = threading.Event(), set(), []

    def follow() -> None:
        while not over.wait(0.01):
            for instance in MACHINES if beats else ():
                write(record, BEAT.format(instance), Beat(1, "waiting", time.time()))
            for number in orders.numbers(record):
                if number not in seen and (order := orders.read_order(record, number)):
                    seen.add(number)
                    given.append(f"{number.generation} {order.verb} {order.name} {','.join(order.hosts)}")
                    for instance in order.instances:
                        if (code := do(order, instance)) is not None:
                            orders.answer(record, number, instance, code)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield given
    finally:
        over.set()
        thread.join()


def lead(record: Record, job: Job, *members: str, generation: int = 1) -> Verdict:
    return Lead(record, job, Crew(generation, [*members]), pause_s=0).run()


def trained(record: Record, outcome: Outcome) -> Do:
    def do(order: Order, instance: str) -> int:
        if instance == order.instances[0]:
            write_outcome(record.run, outcome, replaces_all=True)
        return 0

    return do


def test_all_machines_of_the_crew_train(record):
    with followed(record, trained(record, DONE)) as given:
        verdict = lead(record, job_of(record), "i-00000002", "i-00000000", generation=3)
    assert verdict == Verdict("end", "done", "done")
    assert given == ["3 train attempt_0001 machine2,machine0"]
    order = orders.read_order(record, Number(3, 1))
    assert order is not None and order.addresses == ["10.0.0.2", "10.0.0.0"]


def test_a_machine_that_fails_ends_the_attempt_on_the_others(record):
    def do(order: Order, instance: str) -> int | None:
        if instance == "i-00000001":
            return trained(record, FAILED_FOR_GOOD)(order, order.instances[0]) or 1
        threading.Thread(target=answer_once_ended).start()
        return None

    def answer_once_ended() -> None:
        eventually(lambda: orders.must_end(record, Number(1, 1)))
        orders.answer(record, Number(1, 1), "i-00000000", 143)

    with followed(record, do):
        verdict = lead(record, job_of(record, lost_s=60), "i-00000000", "i-00000001")
    assert verdict == Verdict("end", "failed", "it burns")
    assert record.events()[-1].details["exit_code"] == 1


@pytest.mark.parametrize("beats", [True, False])
def test_another_attempt_waits_for_a_beat_of_each_machine(record, beats):
    """SIGTERM to the trainer is no notice of EC2, so that this crew tries again."""
    outcomes = [STOPPED_HERE, DONE]

    def do(order: Order, instance: str) -> int:
        if instance == order.instances[0]:
            trained(record, outcomes.pop(0))(order, instance)
        return len(outcomes)

    with followed(record, do, beats=beats) as given:
        verdict = lead(record, job_of(record), "i-00000000", "i-00000001")
    assert [each.split()[2] for each in given] == ["attempt_0001", "attempt_0002"][: 1 + beats]
    assert (verdict.outcome, "has been silent" in verdict.reason) == ("done" if beats else "failed", not beats)


def test_machines_that_fail_the_gate_wait_for_others(record):
    def do(order: Order, instance: str) -> int:
        host = MACHINES[instance]
        is_fit = order.verb == "collectives" or instance != "i-00000001"
        record.folder.write(GATE.format(order.name, host), FIT if is_fit else BROKEN)
        return trained(record, DONE)(order, instance) if order.verb == "train" else 0

    job = job_of(record, gate=True)
    with followed(record, do) as given:
        alone = lead(record, job, "i-00000000", "i-00000001")
        verdict = lead(record, job, "i-00000000", "i-00000002", generation=2)
    assert (alone.next, alone.outcome) == ("end", "failed")
    assert "1 of 2 nodes passed the gate, 2 are needed; machine1: it burns; no machine was replaced" in alone.reason
    assert verdict.outcome == "done"
    kinds = [event.kind for event in record.events()]
    assert kinds == ["submitting", "gate", "requeued", "gate", "attempt_began", "attempt_ended"]
    assert given == [
        "1 gate gate_0001_0001 machine0,machine1",
        "2 gate gate_0002_0001 machine0,machine2",
        "2 collectives gate_0002_0001_2 machine0,machine2",
        "2 train attempt_0001 machine0,machine2",
    ]


def test_a_gate_that_all_fail_ends_the_run(record):
    def do(order: Order, instance: str) -> int:
        record.folder.write(GATE.format(order.name, MACHINES[instance]), BROKEN)
        return 0

    with followed(record, do):
        verdict = lead(record, job_of(record, gate=True, max_wait_s=600), "i-00000000", "i-00000001")
    assert verdict.next == "end" and "0 of 2 nodes passed the gate" in verdict.reason


def test_after_a_spot_notice_a_stop_is_still_heard(record):
    with followed(record, trained(record, STOPPED_BY_SPOT)):
        stop = threading.Timer(0.5, record.note, ["stop_asked"])
        stop.start()
        verdict = lead(record, job_of(record, max_wait_s=600), "i-00000000", "i-00000001")
    assert verdict == Verdict("end", "stopped", "stopped as asked")
    (reason,) = (event.details["reason"] for event in record.events() if event.kind == "requeued")
    assert reason == STOPPED_BY_SPOT.reason


def test_a_machine_that_is_silent_and_not_replaced_ends_the_run(record):
    with followed(record, lambda order, instance: None if instance == "i-00000001" else 1):
        verdict = lead(record, job_of(record), "i-00000000", "i-00000001")
    assert verdict.outcome == "failed"
    assert verdict.reason.startswith("machine i-00000001 (machine1) has been silent for 2 s, and nobody has replaced")


def test_a_stop_ends_the_run(record):
    """As `launch stop` does it; the trainer obeys."""

    def do(order: Order, instance: str) -> int:
        if instance == order.instances[0]:
            record.note("stop_asked")
        return trained(record, replace(STOPPED_BY_SPOT, reason="the file STOP in the run folder"))(order, instance)

    with followed(record, do) as given:
        verdict = lead(record, job_of(record, max_wait_s=600), "i-00000000", "i-00000001")
    assert verdict == Verdict("end", "stopped", "stopped as asked") and len(given) == 1


def test_what_an_earlier_lead_left_is_ended_first(record):
    """One of its machines is there no more; the other answers."""
    old = Number(1, 4)
    names = ["i-00000000", "i-00000001"], ["machine0", "machine1"], ["10.0.0.0", "10.0.0.1"]
    orders.give(record, old, Order("train", FileName("attempt_0001"), *names, 20001))
    threading.Timer(0.3, orders.answer, [record, old, "i-00000000", 143]).start()
    began_s = time.monotonic()

    def do(order: Order, instance: str) -> int | None:
        if order.name == "attempt_0001" and time.monotonic() - began_s < 0.3:
            return None
        return trained(record, DONE)(order, instance)

    with followed(record, do) as given:
        assert lead(record, job_of(record, lost_s=60), "i-00000000", "i-00000002", generation=2).outcome == "done"
    assert orders.must_end(record, old) and given[-1].startswith("2 train")


# ---- who follows -----------------------------------------------------------------------------------------------------

PROGRAM = """#!/bin/bash
# In place of Python: the code's entry point, a module and its arguments.
echo "$*" >>"$SAID"
trap 'exit 143' TERM
if [[ $* == *" collectives "* ]]; then exit 7; fi
while true; do sleep 0.05; done
"""


@dataclass
class Followed:
    agent: Agent
    record: Record
    said: Path

    def until(self, is_so: Callable[[], object]) -> None:
        def step() -> object:
            self.agent.step()
            return is_so()

        eventually(step)

    def order(self, number: Number, verb: str, instance: str = "i-00000001") -> None:
        order = Order(verb, FileName("attempt_0001"), [instance], [MACHINES[instance]], ["10.0.0.1"], 20001)
        orders.give(self.record, number, order)

    def commands(self) -> list[list[str]]:
        return [line.split()[1:] for line in self.said.read_text().splitlines()] if self.said.exists() else []


@pytest.fixture
def follower(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    program, said, state = tmp_path / "program", tmp_path / "said", tmp_path / "state"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    state.mkdir()
    monkeypatch.setenv("SAID", str(said))
    made = Agent(record, replace(job_of(record), python=str(program)), hello("i-00000001"), state)
    yield Followed(made, record, said)
    for task in (made.task, made.lead):
        if task is not None:
            task.kill()
            task.process.wait()


def test_a_machine_follows_orders_of_its_crew(follower, record):
    follower.order(Number(1, 1), "collectives")
    follower.order(Number(1, 2), "train", "i-00000002")
    follower.order(Number(1, 3), "train")
    follower.agent.step()
    assert follower.commands() == [] and (follower.agent.state / "alive").exists()
    beat = read_beat(record, "i-00000001")
    assert beat is not None and (beat.generation, beat.doing) == (0, "waiting")
    write(record, CREW, Crew(1, ["i-00000000", "i-00000001", "i-00000002"]))
    follower.until(lambda: orders.answered(record, Number(1, 1)))
    assert orders.exit_code(record, Number(1, 1), "i-00000001") == 7
    follower.until(lambda: len(follower.commands()) == 2)
    assert not orders.answered(record, Number(1, 2)) and not orders.answered(record, Number(1, 3))
    arguments = "--hosts=machine1 --addresses=10.0.0.1 --port=20001 --attempt=attempt_0001 --group=0"
    assert follower.commands()[1] == ["launch.node", "train", record.run_dir, *arguments.split()]
    orders.end(record, Number(1, 3))
    follower.until(lambda: orders.answered(record, Number(1, 3)))
    assert orders.exit_code(record, Number(1, 3), "i-00000001") == 143


def test_a_new_generation_ends_what_the_last_one_did(follower, record):
    write(record, CREW, Crew(1, ["i-00000001", "i-00000000"]))
    follower.order(Number(1, 1), "train")
    follower.until(lambda: len(follower.commands()) == 2)
    leads = [command for command in follower.commands() if command[0] == "launch.ec2.lead"]
    assert leads == [["launch.ec2.lead", record.run_dir, "--generation=1"]]
    first = follower.agent.lead
    follower.order(Number(2, 1), "train")
    write(record, CREW, Crew(2, ["i-00000001", "i-00000002"]))
    follower.until(lambda: orders.answered(record, Number(1, 1)))
    follower.until(lambda: follower.agent.task is not None)
    assert first.process.returncode == -9 and follower.agent.lead is not first
    write(record, CREW, Crew(3, ["i-00000002"]))
    follower.until(lambda: follower.agent.over and follower.agent.task is None)
    assert follower.agent.over == "it was replaced" and follower.agent.lead is None


def test_an_order_that_has_ended_before_it_began_is_not_begun(follower, record):
    write(record, CREW, Crew(1, ["i-00000000", "i-00000001"]))
    follower.order(Number(1, 1), "train")
    orders.end(record, Number(1, 1))
    follower.until(lambda: orders.answered(record, Number(1, 1)))
    assert orders.exit_code(record, Number(1, 1), "i-00000001") == KILLED and follower.commands() == []


def test_an_order_of_the_last_generation_that_came_too_late_is_answered(follower, record):
    write(record, CREW, Crew(1, ["i-00000000", "i-00000001"]))
    follower.agent.step()
    follower.order(Number(1, 1), "train")
    write(record, CREW, Crew(2, ["i-00000000", "i-00000001"]))
    follower.agent.step()
    assert orders.exit_code(record, Number(1, 1), "i-00000001") == KILLED and follower.commands() == []


@pytest.mark.parametrize("members", [[], ["i-00000000", "i-00000001"]])
def test_a_machine_leaves_that_nobody_watches_or_leads(follower, record, monkeypatch, members):
    monkeypatch.setattr(agent_module, "BEAT_S", 0.0)
    follower.agent.cluster = replace(follower.agent.cluster, boot_s=1)
    if members:
        write(record, CREW, Crew(1, members))
    numbers = count()

    def has_left_while(name: str) -> object:
        record.folder.write(name, str(next(numbers)).encode())
        return time.monotonic() > until_s

    until_s = time.monotonic() + 3.0  # longer than the limits of both
    for name in (WATCHER, *([BEAT.format(members[0])] if members else [])):
        until_s = time.monotonic() + 3.0
        follower.until(lambda name=name: has_left_while(name))
        assert not follower.agent.over  # one of them is enough
    follower.until(lambda: follower.agent.over)
    assert [event.kind for event in record.events()] == ["submitting", *(["ended"] if members else [])]


@pytest.mark.parametrize("kind", ["ended", "cancelled"])
def test_the_end_of_the_run_is_that_of_the_machine(follower, record, kind):
    write(record, CREW, Crew(1, ["i-00000000", "i-00000001"]))
    follower.order(Number(1, 1), "train")
    follower.until(lambda: follower.commands())
    threading.Timer(0.2, record.note, [kind]).start()
    follower.until(lambda: follower.agent.over and follower.agent.task is None)
    code = orders.exit_code(record, Number(1, 1), "i-00000001")
    assert code == (KILLED if kind == "cancelled" else 143)


def test_an_end_of_an_earlier_submission_is_none(follower, record):
    for kind in ("ended", "submitting"):
        record.note(kind)
    follower.agent.look_at_events(since_submission=True)
    assert not follower.agent.over


def test_a_lead_that_fails_itself_ends_the_run(follower, record):
    write(record, CREW, Crew(1, ["i-00000001", "i-00000000"]))
    follower.until(lambda: follower.commands())
    follower.agent.lead.kill()
    follower.until(lambda: follower.agent.over)
    details = record.events()[-1].details
    assert details["reason"] == "launch.ec2.lead ended with exit code 137, see logs/lead_0001.txt"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (CREW, {"generation": 1, "members": ["../up"]}),
        (CREW, {"generation": 1, "members": ["i-1", "i-1"]}),
        (f"{Number(1, 1)}.json", {"verb": "prepare"}),
        (f"{Number(1, 1)}.json", {"hosts": ["a,b"]}),
        (f"{Number(1, 1)}.json", {"addresses": ["--log-dir=/"]}),
        (f"{Number(1, 1)}.json", {"port": 70000}),
        (f"{Number(1, 1)}.json", {"name": "a/b"}),
    ],
)
def test_what_no_lead_and_no_watcher_writes_is_refused(follower, record, name, content):
    good = {"verb": "train", "name": "a", "instances": ["i-00000001"], "hosts": ["h"], "addresses": ["10.0.0.1"]}
    record.folder.remove(HELLO.format("i-00000001"))  # this is its first boot
    write(record, CREW, Crew(1, ["i-00000000", "i-00000001"]))
    record.folder.write(name, json.dumps(content if name == CREW else {**good, "port": 1, **content}).encode())
    with pytest.raises(BadContent):
        follower.agent.run()
    assert follower.commands() == []
