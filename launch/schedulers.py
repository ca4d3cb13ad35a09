"""What every scheduler can do, and the table of those there are. A new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from launch.config import ClusterConfig
from launch.job import Job
from launch.record import Event, Record
from launch.slurm.config import SlurmConfig
from train.config import InputError
from train.storage.untrusted import record

SETTINGS: dict[str, type[ClusterConfig]] = {"local": ClusterConfig, "slurm": SlurmConfig}
MODULES = {"local": "launch.local", "slurm": "launch.slurm.scheduler"}
Handle = Mapping[str, Any]  # what a scheduler calls a job; plain JSON


@dataclass(frozen=True)
class State:
    """What a scheduler says of a job now."""

    is_active: bool  # it waits or runs: nothing may be started beside it
    text: str  # in the scheduler's own terms, as "PENDING (Resources)"
    nodes: list[str] = field(default_factory=list)


class Scheduler(Protocol):
    def request(self, job: Job, record: Record) -> list[str]:
        """The command that starts the job, for the plan. It asks nobody."""

    def preview(self, job: Job, record: Record) -> str:
        """What the scheduler says to the job without starting it, one line. InputError if it would refuse."""

    def submit(self, job: Job, record: Record) -> Handle:
        """Start the job. InputError if it is refused, Unreachable if nobody answers."""

    def state(self, handle: Handle) -> State:
        """What it says of the job now. Unreachable if it does not answer."""

    def cancel(self, handle: Handle) -> None:
        """End the job at once, without a checkpoint."""


def scheduler(name: str) -> Scheduler:
    if name not in MODULES:
        raise InputError(f"scheduler {name!r} is not known; there are: {', '.join(MODULES)}")
    made: Scheduler = import_module(MODULES[name]).Scheduler()
    return made


def cluster_of(job: Job) -> ClusterConfig:
    """The settings of the job's cluster. InputError for a scheduler or a setting that is not known."""
    if job.scheduler not in SETTINGS:
        raise InputError(f"scheduler {job.scheduler!r} of the job is not known; there are: {', '.join(SETTINGS)}")
    return record(SETTINGS[job.scheduler], job.cluster, "cluster")


def last_submission(run: Record) -> Event | None:
    """The last event "submitted", whose details hold `scheduler` and `handle`; None if there is none."""
    return next((event for event in reversed(run.events()) if event.kind == "submitted"), None)
