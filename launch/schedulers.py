"""What every scheduler can do, and the tables of schedulers and of engines. A new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from launch.code import Bundle
from launch.config import ClusterConfig, LaunchConfig
from launch.ec2.config import Ec2Config
from launch.engines import Engine
from launch.job import Job
from launch.parallelcluster import ParallelCluster
from launch.record import Event, Record
from launch.skypilot import SkyPilot
from launch.slurm.config import SlurmConfig
from train.config import InputError
from train.storage.untrusted import record

SETTINGS: dict[str, type[ClusterConfig]] = {"local": ClusterConfig, "slurm": SlurmConfig, "ec2": Ec2Config}
ENGINES: dict[str, type[Engine]] = {"parallelcluster": ParallelCluster, "skypilot": SkyPilot}  # which start no job
SETTINGS |= {name: engine.settings for name, engine in ENGINES.items()}
MODULES = {"local": "launch.local", "slurm": "launch.slurm.scheduler", "ec2": "launch.ec2.scheduler"}
REMOVED = ("torchrun_restarts",)  # settings of jobs that earlier versions have written
Handle = Mapping[str, Any]  # what a scheduler calls a job; plain JSON


@dataclass(frozen=True)
class State:
    """What a scheduler says of a job now."""

    is_active: bool  # it waits or runs: nothing may be started beside it
    text: str  # in the scheduler's own terms, as "PENDING (Resources)"
    nodes: list[str] = field(default_factory=list)
    outcome: str = ""  # of a job that is over, if the scheduler says it: cancelled | failed


class Scheduler(Protocol):
    lingers_s: float  # that a submission may still come after the process that asked for it was killed

    def request(self, job: Job, record: Record) -> list[str]:
        """The command that starts the job, for the plan. It asks nobody."""

    def preview(self, job: Job, record: Record, cfg: LaunchConfig) -> str:
        """What the scheduler says to the job without starting it, in lines. InputError if it would refuse."""

    def details(self, job: Job, record: Record, cfg: LaunchConfig) -> dict[str, Any]:
        """What the plan as JSON holds beside the command."""

    def submit(self, job: Job, record: Record) -> Handle:
        """Start the job. InputError if it is refused, Unreachable if nobody answers."""

    def attend(self, job: Job, record: Record, handle: Handle) -> int:
        """Do what is left for the process that has submitted the job; the exit code."""

    def find(self, job: Job, record: Record) -> Handle | None:
        """The job of this record that waits or runs, if its submission was not answered; None if there is none."""

    def state(self, handle: Handle) -> State:
        """What it says of the job now. Unreachable if it does not answer."""

    def cancel(self, handle: Handle) -> None:
        """End the job at once, without a checkpoint."""


def scheduler(name: str) -> Scheduler:
    if name not in MODULES:
        raise InputError(f"scheduler {name!r} is not known; there are: {', '.join(MODULES)}")
    made: Scheduler = import_module(MODULES[name]).Scheduler()
    return made


def engine(cfg: LaunchConfig, bundle: Bundle) -> Engine | None:
    """The engine of a launch that no scheduler of ours starts."""
    return ENGINES[cfg.cluster.kind](cfg, bundle) if cfg.cluster.kind in ENGINES else None


def cluster_of(job: Job) -> ClusterConfig:
    """The settings of the job's cluster. InputError for a scheduler or a setting that is not known."""
    if job.scheduler not in SETTINGS:
        raise InputError(f"scheduler {job.scheduler!r} of the job is not known; there are: {', '.join(SETTINGS)}")
    settings = {name: value for name, value in job.cluster.items() if name not in REMOVED}
    return record(SETTINGS[job.scheduler], settings, "cluster")


def last_submission(run: Record) -> Event | None:
    """The last event "submitted", whose details hold `scheduler` and `handle`; None if there is none."""
    return next((event for event in reversed(run.events()) if event.kind == "submitted"), None)
