"""What every scheduler can do. The program inside its jobs calls `launch.supervise` and starts `launch.node`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.config import LaunchConfig
from launch.record import Job, Record
from train.config import S3Config
from train.run.command import DONE

Handle = Mapping[str, Any]  # what a scheduler calls a job; plain JSON


@dataclass(frozen=True)
class State:
    """What a scheduler says of a job now."""

    is_active: bool | None = None  # it waits or runs: nothing may be started beside it; None: that is not known
    text: str = ""  # in the scheduler's own terms, as "PENDING (Resources)"
    nodes: list[str] = field(default_factory=list)
    outcome: str = ""  # of a job that is over, if the scheduler says it: cancelled | failed
    scheduler: str = ""
    failure: str = ""  # why the scheduler says nothing


class Scheduler(ABC):
    @abstractmethod
    def request(self, job: Job, record: Record) -> list[str]:
        """The command that starts the job, for the plan. It asks nobody."""

    @abstractmethod
    def preview(self, job: Job, record: Record, cfg: LaunchConfig) -> str:
        """What the scheduler says to the job without starting it, in lines. InputError if it would reject it."""

    def details(self, job: Job, record: Record, cfg: LaunchConfig) -> dict[str, Any]:
        """What the plan as JSON holds beside the command."""
        return {}

    def found_type(self, cfg: LaunchConfig, s3: S3Config) -> list[str]:
        """Return settings of a machine type that conf/instance does not have, `devices` among them."""
        raise NotImplementedError

    @abstractmethod
    def submit(self, job: Job, record: Record) -> Handle:
        """Start the job. InputError if it is rejected, Unreachable if nobody answers."""

    def attend(self, job: Job, record: Record, handle: Handle, *, detach: bool) -> int:
        """Do what is left for the process that has submitted the job, or nothing with `detach`; the exit code."""
        return DONE

    @abstractmethod
    def state(self, record: Record, handle: Handle) -> State:
        """What it says of the job now. Unreachable if it does not answer."""

    def unanswered(self, record: Record) -> State:
        """Return what is known of a job whose submission has left no answer."""
        return State(failure="it never answered the submission; look there for a job of this run")

    @abstractmethod
    def cancel(self, record: Record, handle: Handle) -> None:
        """End the job at once, without a checkpoint."""
