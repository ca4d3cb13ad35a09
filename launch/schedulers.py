"""The table of schedulers. A new scheduler needs a module and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar

from launch.config import ClusterConfig, LocalConfig
from launch.ec2.config import Ec2Config
from launch.record import Job
from launch.slurm.config import SlurmConfig
from launch.spec import Scheduler
from train.config import InputError
from train.storage.schema import record

# The settings class, and the module with a class Scheduler.
SCHEDULERS: dict[str, tuple[type[ClusterConfig], str]] = {
    "local": (LocalConfig, "launch.local"),
    "slurm": (SlurmConfig, "launch.slurm.scheduler"),
    "ec2": (Ec2Config, "launch.ec2.scheduler"),
}
SETTINGS = {name: settings for name, (settings, _) in SCHEDULERS.items()}
Settings = TypeVar("Settings", bound=ClusterConfig)


def row(name: str) -> tuple[type[ClusterConfig], str]:
    if name not in SCHEDULERS:
        raise InputError(f"scheduler {name!r} is not known; available: {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]


def scheduler(name: str) -> Scheduler:
    made: Scheduler = import_module(row(name)[1]).Scheduler()
    return made


def cluster_of(job: Job, kind: type[Settings] = ClusterConfig) -> Settings:  # type: ignore[assignment]
    """Return the job's cluster settings as an instance of `kind`. Raises InputError if they are not valid."""
    settings = record(row(job.scheduler)[0], job.cluster, "cluster")
    assert isinstance(settings, kind)
    return settings
