"""What the machines of a run on EC2 and the one that made them say to one another: small files in the record, in S3.

RUN.launch/ec2/crew.json             which machines train, in order of their ranks: written by launch.ec2.watch alone
              /hello/INSTANCE.json   a machine that has booted, by itself
              /beat/INSTANCE.json    the same machine, again and again: a machine whose beat is old is lost
              /orders/...            what the first machine of the crew has the others do, see launch/ec2/orders.py

A new crew, with the machines that are left at first and then those that replace the others, has the next generation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from launch.record import Record
from train.storage.folders import canonical_json
from train.storage.untrusted import BadContent, FileName, read_object, record

CREW, HELLO, BEAT = "ec2/crew.json", "ec2/hello/{}.json", "ec2/beat/{}.json"
BEAT_S = 10.0  # between two beats of a machine


@dataclass(frozen=True)
class Crew:
    generation: int = 0  # 0: none was named yet
    members: list[str] = field(default_factory=list)  # instance ids; the first one leads

    def __post_init__(self) -> None:
        check_content(self.generation >= 0, f"generation {self.generation} of the crew must be 0 or more")
        check_content(len(set(self.members)) == len(self.members), "a machine is in the crew twice")
        self.members[:] = map(FileName, self.members)


@dataclass(frozen=True)
class Hello:
    instance: FileName  # id, as i-0123456789abcdef0
    host: FileName
    address: str  # at which the others reach it
    launch_index: int  # among those that one request made
    zone: str
    time_unix_s: float


@dataclass(frozen=True)
class Beat:
    generation: int  # of the crew that it knows
    doing: str  # for people: waiting, gate, attempt_0003
    time_unix_s: float


def read_crew(run: Record) -> Crew:
    """The crew as it is now. BadContent for a file that holds none."""
    content = read(run, CREW)
    return Crew() if content is None else record(Crew, read_object(content))


def read_hello(run: Record, instance: str) -> Hello | None:
    """What a machine said when it had booted; None until then."""
    content = read(run, HELLO.format(FileName(instance)))
    return None if content is None else record(Hello, read_object(content))


def read_beat(run: Record, instance: str) -> Beat | None:
    """The last beat of a machine; None if there is none."""
    content = read(run, BEAT.format(FileName(instance)))
    return None if content is None else record(Beat, read_object(content))


def check_content(ok: bool, message: str) -> None:
    """Raise BadContent with the message unless `ok`: nobody who speaks this language writes such a file."""
    if not ok:
        raise BadContent(message)


def read(run: Record, name: str) -> bytes | None:
    try:
        return run.folder.read(name)
    except FileNotFoundError:
        return None


def write(run: Record, name: str, value: Crew | Hello | Beat) -> None:
    run.folder.write(name, canonical_json(asdict(value)))
