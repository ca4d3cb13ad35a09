"""Orders of the machine that leads: verbs of launch.node for machines of the crew, one after another, in the record.

RUN.launch/ec2/orders/GENERATION_NUMBER.json            the verb, and the machines that are to run it together
                     /GENERATION_NUMBER/INSTANCE.json   how it ended on a machine
                     /GENERATION_NUMBER.end             those on which it has not ended end it
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from launch.ec2.crew import check_content, read
from launch.record import Record
from train.storage.folders import canonical_json
from train.storage.untrusted import FileName, read_object, record

FOLDER = "ec2/orders/"
NAME = re.compile(rf"{FOLDER}(\d{{4,9}})_(\d{{4,9}})\.json")
VERBS = ("gate", "collectives", "train")


@dataclass(frozen=True)
class Order:
    verb: str
    name: FileName  # of what is tried, for logs and answers
    instances: list[str]  # in the order of their ranks
    hosts: list[str]
    addresses: list[str]
    port: int
    group: int = 0  # machines that meet one another; 0: all

    def __post_init__(self) -> None:
        check_content(self.verb in VERBS, f"an order has the verb {self.verb!r}, none of {', '.join(VERBS)}")
        lengths = {len(self.instances), len(self.hosts), len(self.addresses)}
        check_content(
            len(lengths) == 1 and 0 not in lengths, "an order must name machines, each with its host and its address"
        )
        for name in map(FileName, [*self.instances, *self.hosts]):
            check_content("," not in name, f"{name!r} is no name of a machine")
        for address in self.addresses:
            check_content(re.fullmatch(r"[0-9a-f.:]+", address) is not None, f"{address!r} is no address")
        check_content(0 < self.port < 2**16, f"port {self.port} is none")

    def arguments(self) -> list[str]:
        """Those of launch.node, without the run folder."""
        meeting = [f"--hosts={','.join(self.hosts)}", f"--addresses={','.join(self.addresses)}", f"--port={self.port}"]
        return [*meeting, f"--attempt={self.name}", f"--group={self.group}"]


@dataclass(frozen=True, order=True)
class Number:
    """Of an order: they are counted anew in each generation of the crew."""

    generation: int
    order: int

    def __str__(self) -> str:
        return f"{FOLDER}{self.generation:04d}_{self.order:04d}"

    def next(self) -> Number:
        return Number(self.generation, self.order + 1)


@dataclass(frozen=True)
class Answer:
    exit_code: int


def numbers(run: Record) -> list[Number]:
    """Of all orders that there are, in order."""
    matches = map(NAME.fullmatch, run.folder.names(FOLDER))
    return sorted(Number(int(match[1]), int(match[2])) for match in matches if match)


def give(run: Record, number: Number, order: Order) -> None:
    run.folder.write(f"{number}.json", canonical_json(asdict(order)))


def read_order(run: Record, number: Number) -> Order | None:
    """An order; None if it is not given yet. BadContent for a file that holds none."""
    content = read(run, f"{number}.json")
    return None if content is None else record(Order, read_object(content))


def answer(run: Record, number: Number, instance: str, exit_code: int) -> None:
    run.folder.write(f"{number}/{FileName(instance)}.json", canonical_json(asdict(Answer(exit_code))))


def answered(run: Record, number: Number) -> set[str]:
    """The machines on which an order has ended."""
    names = run.folder.names(f"{number}/")
    return {name.removeprefix(f"{number}/").removesuffix(".json") for name in names}


def exit_code(run: Record, number: Number, instance: str) -> int:
    """How an order has ended on a machine that is among those `answered`."""
    return record(Answer, read_object(run.folder.read(f"{number}/{FileName(instance)}.json"))).exit_code


def end(run: Record, number: Number) -> None:
    """Have every machine end an order on which it has not ended yet."""
    run.folder.write(f"{number}.end", b"")


def must_end(run: Record, number: Number) -> bool:
    return run.folder.size(f"{number}.end") is not None
