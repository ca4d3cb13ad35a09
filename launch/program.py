"""The program inside a job, which makes the attempts on its machines. Each scheduler has its own `Program`.

Before the first attempt, the preflight runs the doctor on each machine, and then collectives over all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from launch.config import ClusterConfig
from launch.node import PREFLIGHT
from launch.record import Job, Record, attempt_name
from launch.supervise import Decision, StopFile, retry, supervise
from train.run.command import printable
from train.storage.schema import BadContent, read_object

MAX_CHARS = 300  # maximum length of a reason

Run = Callable[[str, str], int]  # `Program.on_nodes`


class Program(ABC):
    """The program inside a job. Signal handlers and notices call `stop.ask`, which ends the run with a checkpoint."""

    nodes: list[str]  # the machines, in rank order

    def __init__(self, record: Record, job: Job) -> None:
        self.record = record
        self.job = job
        self.stop = StopFile(record)

    @abstractmethod
    def on_nodes(self, command: str, name: str) -> int:
        """Run `launch.node COMMAND --attempt=NAME` on all machines at the same time. Returns 0 if all of them succeed.

        Meanwhile, call `stop.write` every few seconds. Afterwards, wait for ranks that outlive the command: they could
        still write to the run folder. Raises NeverBegan if the scheduler does not start the command.
        """

    def attempt(self, number: int) -> int:
        return self.on_nodes("train", attempt_name(number))

    def supervise(self, cluster: ClusterConfig, *, name: str) -> Decision:
        """Make attempts until the run is over or machines are lost; record and return what comes next.

        With cluster.gate, a preflight comes first. Its `name` differs between the starts of a job.
        """
        examine = None
        if cluster.gate:
            examine = partial(
                run_preflight, self.record, self.job, self.nodes, self.on_nodes, name=name
            )
        return supervise(
            self.record, cluster, self.attempt, nodes=self.nodes, stop=self.stop, examine=examine
        )


def run_preflight(record: Record, job: Job, nodes: Sequence[str], run: Run, *, name: str) -> str:
    """Return why the machines cannot train; "" if they can."""
    run("preflight", name)
    failed = []
    for node in nodes:
        reason = retry(failure_of, record, PREFLIGHT.format(name, node))
        if reason:
            failed.append(f"{node}: {printable(reason)[:MAX_CHARS]}")
    if failed:
        count = f"{len(failed)} of {len(nodes)} machines failed the preflight"
        return "; ".join([count, *failed])
    is_alone = len(nodes) * job.processes_per_node == 1
    if not is_alone and run("collectives", name) != 0:
        return f"collectives over {', '.join(nodes)} fail: see {record.location}/logs/{name}"
    return ""


def failure_of(record: Record, name: str) -> str:
    """Return why the machine that wrote this answer failed the preflight; "" if it passed."""
    try:
        answer = read_object(record.folder.read(name))
    except FileNotFoundError:
        return f"no answer in {record.location}: the machine cannot access that folder or start baretrain doctor"
    except BadContent as error:  # other programs may have written to the doctor's output
        return f"its answer cannot be read: {error}"
    if answer.get("ok") is True:
        return ""
    texts = []
    for finding in answer.get("findings", []):
        if isinstance(finding, dict) and finding.get("state") == "bad":
            texts.append(f"{finding.get('name')}: {finding.get('text')} ({finding.get('cure')})")
    return "; ".join(texts) or str(answer.get("fault") or "baretrain doctor reported no findings")
