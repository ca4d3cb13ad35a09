"""The interface of schedulers. The program that a job runs calls `launch.supervise` and starts `launch.node`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.config import LaunchConfig
from launch.record import Job, Record
from train.run.command import DONE

Handle = Mapping[str, Any]  # a scheduler's identifier of a job, as plain JSON


@dataclass(frozen=True)
class State:
    """The current state of a job, as its scheduler reports it."""

    # True if the job is waiting or running, so that no other may start; None if that is unknown.
    is_active: bool | None = None
    text: str = ""  # the state in the scheduler's terms, such as "PENDING (Resources)"
    nodes: list[str] = field(default_factory=list)
    # cancelled | failed; empty if the job is active or the scheduler reports neither
    outcome: str = ""
    scheduler: str = ""
    failure: str = ""  # why the scheduler did not answer; empty if it did


class Scheduler(ABC):
    @abstractmethod
    def request(self, job: Job, record: Record) -> list[str]:
        """Return the command that would start the job, for the plan. Nothing is sent."""

    @abstractmethod
    def preview(self, job: Job, record: Record, cfg: LaunchConfig, hours: float | None) -> str:
        """Return what the scheduler says about the job, without starting it. Raises InputError if it is rejected.

        `hours` is the expected duration; None if it is unknown.
        """

    @abstractmethod
    def submit(self, job: Job, record: Record) -> Handle:
        """Start the job. Raises InputError if it is rejected, Unreachable if the scheduler does not answer."""

    def attend(self, job: Job, record: Record, handle: Handle, *, detach: bool) -> int:
        """Finish the work of the submitting process; return its exit code. With `detach`, do not watch the job."""
        return DONE

    @abstractmethod
    def state(self, record: Record, handle: Handle) -> State:
        """Return the current state of the job. Raises Unreachable if the scheduler does not answer."""

    def unanswered(self, record: Record) -> State:
        """Return the state of a job whose submission the scheduler never answered."""
        return State(
            failure="the submission was never answered; check whether the scheduler has a job of this run"
        )

    @abstractmethod
    def cancel(self, record: Record, handle: Handle) -> None:
        """End the job immediately, without a checkpoint."""
