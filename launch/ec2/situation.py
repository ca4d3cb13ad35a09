"""What the record says of a run's machines since its last submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.record import Event, Record
from launch.values import text, texts

OVER = ("ended", "cancelling", "cancelled")
BOOT, SILENT, GONE, GATE, SURPLUS = "boot", "silent", "gone", "gate", "surplus"  # why a machine was given up


@dataclass
class Situation:
    """The events of one submission, in order."""

    began_unix_s: float = 0.0
    over: Event | None = None  # the first that ends the job
    lost: dict[str, str] = field(default_factory=dict)  # machine: kind of its loss
    boots: int = 0  # machines that have not come up since the last crew was named
    crews: int = 0
    waits_since_unix_s: float | None = None  # for capacity
    passed: list[str] | None = None  # by the gate, of the present crew; None: it has not been through it
    failed: dict[str, str] = field(default_factory=dict)  # by the gate: host and reason
    stop_asked_unix_s: float | None = None
    left: str = ""  # what the last attempt to clean has left

    def add(self, event: Event) -> None:
        details = event.details
        if event.kind in OVER and self.over is None:
            self.over = event
        elif event.kind == "machine_lost":
            self.lost[text(details, "instance")] = text(details, "cause")
            self.boots += text(details, "cause") == BOOT
        elif event.kind == "crew":
            self.crews, self.boots, self.passed, self.failed = self.crews + 1, 0, None, {}
        elif event.kind == "gate":
            failed = details.get("failed")
            self.passed = texts(details, "passed")
            self.failed = {str(host): str(why) for host, why in failed.items()} if isinstance(failed, dict) else {}
        elif event.kind == "waiting_for_capacity":
            self.waits_since_unix_s = self.waits_since_unix_s or event.time_unix_s
        elif event.kind == "machines":
            self.waits_since_unix_s = None
        elif event.kind == "stop_asked" and self.stop_asked_unix_s is None:
            self.stop_asked_unix_s = event.time_unix_s


def situation(events: Sequence[Event]) -> Situation:
    first = max((index for index, event in enumerate(events) if event.kind == "submitting"), default=0)
    now = Situation(began_unix_s=events[first].time_unix_s if events else 0.0)
    for event in events[first:]:
        now.add(event)
    return now


class Events:
    """The events of a record, each of which is read once: they never change."""

    def __init__(self, run: Record) -> None:
        self.run = run
        self.known: dict[str, Event] = {}

    def read(self) -> Situation:
        for name in self.run.event_names():
            if name not in self.known:
                self.known[name] = self.run.event(name)
        return situation([self.known[name] for name in sorted(self.known)])
