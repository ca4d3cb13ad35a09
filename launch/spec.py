"""The interface of schedulers. The program inside their jobs calls `launch.supervise` and starts `launch.node`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.config import LaunchConfig
from launch.record import Job, Record
from train.config import S3Config
from train.run.command import DONE

Handle = Mapping[str, Any]  # a scheduler's name for a job; plain JSON


@dataclass(frozen=True)
class State:
    """A scheduler's present answer about a job."""

    is_active: bool | None = None  # it waits or runs, so nothing may be started for the run; None: unknown
    text: str = ""  # in the scheduler's terms, such as "PENDING (Resources)"
    nodes: list[str] = field(default_factory=list)
    outcome: str = ""  # of a job that is over, if the scheduler tells: cancelled | failed
    scheduler: str = ""
    failure: str = ""  # why the scheduler does not answer


class Scheduler(ABC):
    @abstractmethod
    def request(self, job: Job, record: Record) -> list[str]:
        """Return the command that starts the job, for the plan. It sends no request."""

    @abstractmethod
    def preview(self, job: Job, record: Record, cfg: LaunchConfig) -> str:
        """Return the scheduler's lines on the job without starting it. Raises InputError if it would reject it."""

    def details(self, job: Job, record: Record, cfg: LaunchConfig) -> dict[str, Any]:
        """Return the plan's JSON fields other than the command."""
        return {}

    def found_type(self, cfg: LaunchConfig, s3: S3Config) -> list[str]:
        """Return settings of a machine type that conf/instance does not have, `devices` among them."""
        raise NotImplementedError

    @abstractmethod
    def submit(self, job: Job, record: Record) -> Handle:
        """Start the job. Raises InputError if it is rejected, Unreachable if there is no answer."""

    def attend(self, job: Job, record: Record, handle: Handle, *, detach: bool) -> int:
        """Do the remaining work of the submitting process, or nothing with `detach`; return the exit code."""
        return DONE

    @abstractmethod
    def state(self, record: Record, handle: Handle) -> State:
        """Return the present state of the job. Raises Unreachable if the scheduler does not answer."""

    def unanswered(self, record: Record) -> State:
        """Return what is known of a job whose submission has left no answer."""
        return State(failure="it never answered the submission; look there for a job of this run")

    @abstractmethod
    def cancel(self, record: Record, handle: Handle) -> None:
        """End the job immediately, without a checkpoint."""
