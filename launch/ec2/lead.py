"""On the first machine of the crew: the gate, then attempts of the run, each by orders to all machines of the crew.

launch.ec2.agent starts this for every generation of the crew that its machine leads, and kills it when there is a newer
one. What is under way is in the record, so that the next one goes on from there, perhaps on another machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

from launch.ec2 import orders
from launch.ec2.config import Ec2Config
from launch.ec2.crew import BEAT_S, Beat, Crew, Hello, read_beat, read_crew, read_hello
from launch.ec2.orders import Number, Order
from launch.gate import is_shared, pass_gate, too_few
from launch.history import read_history
from launch.job import Job
from launch.record import Record
from launch.schedulers import cluster_of
from launch.supervise import (
    CODES,
    PAUSE_S,
    StopRequest,
    Verdict,
    attempt_name,
    patiently,
    settled,
    supervise,
)
from train.cli.command import add_s3_flags, command_parser, run_flags
from train.config import Failure, S3Config, check
from train.storage.untrusted import FileName

FIRST_PORT, PORTS = 20_000, 10_000  # below the range from which Linux gives ports to clients
POLL_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "launch.ec2.lead",
        "Lead the machines of a run on EC2. The agent of the first one starts this.",
        examples=("s3://bucket/runs/mine --generation 1",),
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--generation", type=int, required=True, help="of the crew")
    add_s3_flags(parser, caches=False)
    return run_flags(parser, arguments, act)


def act(options: argparse.Namespace, s3: S3Config) -> int:
    record = Record(options.run, s3)
    crew = patiently(read_crew, record)
    check(crew.generation == options.generation, f"the crew has generation {crew.generation} by now")
    verdict = Lead(record, record.job(), crew).run()
    patiently(record.note, "ended", outcome=verdict.outcome, reason=verdict.reason)
    return CODES[verdict.outcome]


class Lost(Failure):
    """A machine says nothing any more, and nobody has replaced it."""


class Lead:
    def __init__(self, record: Record, job: Job, crew: Crew, *, pause_s: float = PAUSE_S) -> None:
        self.record, self.job, self.crew, self.pause_s = record, job, crew, pause_s
        cluster = cluster_of(job)
        assert isinstance(cluster, Ec2Config)
        self.cluster = cluster
        hellos = [said(patiently(read_hello, record, instance), instance) for instance in crew.members]
        self.machines: dict[str, Hello] = {hello.host: hello for hello in hellos}
        check(len(self.machines) == len(crew.members), "two machines of the crew have the same host name")
        self.nodes = list(self.machines)[: job.nodes]
        self.number = Number(crew.generation, 0)  # of the last order
        self.beats: dict[str, Beat | None] = {}  # the last one of each machine that was seen
        self.since_s = {host: time.monotonic() for host in self.machines}  # when it was first seen

    def run(self) -> Verdict:
        """Lead until the run is over; the verdict is an end."""
        try:
            self.end_last_order()
            verdict = self.gate() if self.cluster.gate else None
            if verdict is None:
                stop = StopRequest(self.record)  # EC2's notices reach the trainers without this process
                verdict = supervise(
                    self.record,
                    self.cluster,
                    self.attempt,
                    nodes=self.nodes,
                    stop=stop,
                    pause_s=self.pause_s,
                    meet=self.meet,
                )
            verdict = settled(verdict, self.record, self.cluster)
            return verdict if verdict.next == "end" else self.wait_for_replacements(verdict)
        except Lost as error:
            return Verdict("end", "stopped" if self.is_stop_asked() else "failed", str(error))

    def end_last_order(self) -> None:
        """End what an earlier lead has left under way on the machines that are still there."""
        given = patiently(orders.numbers, self.record)
        order = patiently(orders.read_order, self.record, given[-1]) if given else None
        if order is not None:
            patiently(orders.end, self.record, given[-1])
            here = [host for host, hello in self.machines.items() if hello.instance in order.instances]
            self.wait_for(given[-1], here, ends_together=False)
            self.number = max(self.number, given[-1])

    def gate(self) -> Verdict | None:
        """Examine all machines and choose those that train; a verdict if there are too few."""
        name = f"gate_{self.crew.generation:04d}_{self.number.order + 1:04d}"
        chosen, failed = pass_gate(self.record, self.job, list(self.machines), self.order, name=name)
        for host, reason in failed.items():
            print(f"gate: {host} is left out: {reason}", flush=True)
        if len(chosen) == self.job.nodes:
            self.nodes = chosen
            return None
        reason = too_few(list(self.machines), failed, self.job)
        return Verdict("end" if is_shared(failed, list(self.machines)) else "requeue", "failed", reason)

    def attempt(self, number: int) -> int:
        return self.order("train", self.nodes, name=attempt_name(number))

    def order(self, verb: str, nodes: Sequence[str], *, name: str, group: int = 0) -> int:
        """Have machines run a verb of launch.node at the same time; 0 if it ended well on all. Where all of them meet,
        one that fails ends it on the others.
        """
        self.number = self.number.next()
        port = FIRST_PORT + (self.number.generation * 101 + self.number.order) % PORTS  # late packets meet nobody
        hellos = [self.machines[node] for node in nodes]
        instances, addresses = [hello.instance for hello in hellos], [hello.address for hello in hellos]
        order = Order(verb, FileName(name), [*instances], [*nodes], addresses, port, group)
        patiently(orders.give, self.record, self.number, order)
        return self.wait_for(self.number, nodes, ends_together=verb != "gate" and not group)

    def wait_for(self, number: Number, nodes: Sequence[str], *, ends_together: bool) -> int:
        """Wait until an order has ended on machines; the first exit code that is not 0."""
        waits_for = {str(self.machines[node].instance): node for node in nodes}
        result, looked_s = 0, time.monotonic()
        while waits_for:
            for instance in patiently(orders.answered, self.record, number) & waits_for.keys():
                code = patiently(orders.exit_code, self.record, number, instance)
                del waits_for[instance]
                if code and not result:
                    result = code
                    if ends_together:
                        patiently(orders.end, self.record, number)
            if time.monotonic() - looked_s > BEAT_S:
                self.look_for_beats(waits_for.values())
                looked_s = time.monotonic()
            time.sleep(POLL_S if waits_for else 0)
        return result

    def look_for_beats(self, nodes: Iterable[str]) -> None:
        """Note new beats. Lost for a machine that had none for as long as a replacement may take."""
        limit_s = self.cluster.lost_s + (0 if self.is_stop_asked() else self.cluster.max_wait_s)
        for node in nodes:
            beat = patiently(read_beat, self.record, self.machines[node].instance)
            if beat != self.beats.get(node):
                self.beats[node], self.since_s[node] = beat, time.monotonic()
            silent_s = time.monotonic() - self.since_s[node]
            if silent_s > limit_s:
                name = f"{self.machines[node].instance} ({node})"
                raise Lost(f"machine {name} has been silent for {silent_s:.0f} s, and nobody has replaced it")

    def meet(self) -> None:
        """Wait for a new beat of each machine: where one is lost, the next generation of the crew comes first."""
        self.look_for_beats(self.nodes)
        began_s = time.monotonic()
        while (late := [node for node in self.nodes if self.since_s[node] < began_s]) and not self.is_stop_asked():
            time.sleep(POLL_S)
            self.look_for_beats(late)

    def is_stop_asked(self) -> bool:
        return read_history(patiently(self.record.events)).is_stop_asked

    def wait_for_replacements(self, verdict: Verdict) -> Verdict:
        """Wait for the next generation of the crew, whose coming ends this process; the verdict if none comes."""
        patiently(self.record.note, "requeued", reason=verdict.reason)
        until_s = time.monotonic() + self.cluster.max_wait_s
        while time.monotonic() < until_s:
            time.sleep(min(BEAT_S, self.cluster.max_wait_s))
            if self.is_stop_asked():
                return Verdict("end", "stopped", "stopped as asked")
        waited = f"no machine was replaced in {self.cluster.max_wait_s} s (cluster.max_wait_s)"
        return Verdict("end", "failed", f"{verdict.reason}; {waited}")


def said(hello: Hello | None, instance: str) -> Hello:
    check(hello is not None, f"the crew names {instance}, which has not said hello")
    assert hello is not None
    return hello


if __name__ == "__main__":
    sys.exit(main())
