"""A run's metrics lines, read for the report: newest first, in memory that does not grow with their number.

After a resume, lost steps are repeated, and their new lines supersede the old ones. As lines are read newest first, a
line is superseded if one of its kind with the same or a lower step has already been read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from train.config.checks import LARGEST_FLOAT

Line = dict[str, Any]
MAX_LINES = 1000  # lines to keep per kind, five per point of a curve; at twice this number, they are thinned out


def number(line: Line, key: str) -> float | None:
    """Return the value of a key if it is a finite number, else None."""
    value = line.get(key)
    known = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < LARGEST_FLOAT
    )
    return value if known else None


def numbers(lines: Iterable[Line], key: str) -> list[float]:
    return [value for line in lines if (value := number(line, key)) is not None]


def number_list(line: Line, key: str) -> list[float]:
    """Return the finite numbers in a list."""
    values = line.get(key)
    return numbers([{key: value} for value in values], key) if isinstance(values, list) else []


def total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def seconds_in_steps(line: Line) -> float | None:
    """Return how many seconds the steps of a train line took, including waits for data; None if unknown."""
    step_s, steps = number(line, "step_s"), number(line, "steps")
    return step_s * steps if step_s and steps else None


class Group(dict[str, Any]):
    """The mean of several train lines, and the lowest and the highest value of each key."""

    def __init__(self, lines: list[Line]) -> None:
        columns = {
            key: numbers(lines, key)
            for key in dict.fromkeys(key for line in lines for key in line)
        }
        super().__init__({key: fmean(values) for key, values in columns.items() if values})
        self["step"] = round(self["step"])
        self.lows = {
            key: min(low(line, key) for line in lines if number(line, key) is not None)
            for key in self
        }
        self.highs = {
            key: max(high(line, key) for line in lines if number(line, key) is not None)
            for key in self
        }


def low(line: Line, key: str) -> float:
    """Return the lowest value of a key in a line or group."""
    return float(line.lows[key] if isinstance(line, Group) else line[key])


def high(line: Line, key: str) -> float:
    return float(line.highs[key] if isinstance(line, Group) else line[key])


def highest(lines: list[Line], key: str) -> float | None:
    return max((high(line, key) for line in lines if number(line, key) is not None), default=None)


class Points(NamedTuple):
    """The points of a curve, and for each the lowest and the highest value of the lines that it averages."""

    xs: list[float]
    ys: list[float]
    lows: list[float]
    highs: list[float]


def points(lines: list[Line], key: str, x: str) -> Points:
    known = [
        line for line in lines if number(line, x) is not None and number(line, key) is not None
    ]
    extremes = [[of(line, key) for line in known] for of in (low, high)]
    return Points([line[x] for line in known], [line[key] for line in known], *extremes)


@dataclass
class Curve:
    """The train lines: the newest, the oldest, and between these at most 2 * MAX_LINES groups of equal size."""

    ends: list[Line] = field(default_factory=list)
    groups: list[Line] = field(default_factory=list)
    group: list[Line] = field(default_factory=list)  # the group that is being filled
    size: int = 1  # lines per group

    def add(self, line: Line) -> None:
        if len(self.ends) == 2:
            self.group.append(self.ends.pop())
        self.ends.append(line)
        if len(self.group) == self.size:
            self.groups.append(joined(self.group))
            self.group = []
        if len(self.groups) == 2 * MAX_LINES:
            self.groups = [
                joined(self.groups[index : index + 2]) for index in range(0, len(self.groups), 2)
            ]
            self.size *= 2

    @property
    def lines(self) -> list[Line]:
        """The lines in the order of their steps."""
        rest = [joined(self.group)] if self.group else []
        return [*self.ends[1:], *rest, *reversed(self.groups), *self.ends[:1]]


def joined(lines: list[Line]) -> Line:
    return lines[0] if len(lines) == 1 else Group(lines)


@dataclass
class Attempt:
    """Facts about an attempt, from all its lines, including superseded ones."""

    last: Line  # its newest line
    # its last step, from its newest train, eval or summary line, or a later checkpoint line
    step: int = 0
    is_step_known: bool = False
    has_steps: bool = False  # whether it has a train line or a summary
    # the newest known cost_usd and goodput, from any line
    newest: Line = field(default_factory=dict)
    # from train lines: newest known values, summed compile_s, mean mfu
    trained: Line = field(default_factory=dict)
    flops_s: float = 0.0  # the sum of MFU x seconds in steps
    known_s: float = 0.0  # seconds in steps for which the MFU is known

    def add(self, line: Line) -> None:
        """Add a line that is older than all lines added so far."""
        kind = line["kind"]
        self.has_steps |= kind in ("train", "summary")
        for key in ("cost_usd", "goodput"):
            if key not in self.newest and (value := number(line, key)) is not None:
                self.newest[key] = value
        if kind != "fault" and not self.is_step_known:  # a fault line may precede the first step
            self.step, self.is_step_known = max(self.step, line["step"]), kind != "checkpoint"
        if kind == "train":
            for key in ("train_s", "tokens", "graphs"):
                if key not in self.trained and (value := number(line, key)) is not None:
                    self.trained[key] = value
            if (compile_s := number(line, "compile_s")) is not None:
                self.trained["compile_s"] = self.trained.get("compile_s", 0.0) + compile_s
            mfu, in_steps_s = number(line, "mfu"), seconds_in_steps(line)
            if mfu is not None and in_steps_s:
                self.flops_s, self.known_s = (
                    self.flops_s + mfu * in_steps_s,
                    self.known_s + in_steps_s,
                )
                self.trained["mfu"] = self.flops_s / self.known_s

    def figure(self, key: str) -> float | None:
        """Return a value such as train_s for the attempt: from its summary, or without one, from its train lines."""
        return number(self.last if self.last["kind"] == "summary" else self.trained, key)


@dataclass
class Saves:
    """The checkpoints of all attempts."""

    number: int = 0
    bytes: float | None = None  # size of the newest checkpoint
    save_s: float = 0.0
    stall_s: float = 0.0

    def add(self, line: Line) -> None:
        self.number += 1
        self.bytes = number(line, "bytes") if self.bytes is None else self.bytes
        self.save_s += number(line, "save_s") or 0.0
        self.stall_s += number(line, "stall_s") or 0.0


@dataclass
class Faults:
    """The faults of all attempts, and the newest fault lines."""

    number: int = 0
    survived: int = 0
    steps_lost: float = 0
    recover_s: float = 0
    lines: list[Line] = field(default_factory=list)

    def add(self, line: Line) -> None:
        self.number += 1
        if (steps := number(line, "steps_lost")) is not None:
            self.survived += 1
            self.steps_lost += steps
            self.recover_s += number(line, "recover_s") or 0
        if len(self.lines) < MAX_LINES:
            self.lines.insert(0, line)


@dataclass
class Reading:
    """The lines of a run, which must be added newest first."""

    # returns the steps whose evaluations must be kept
    told: Callable[[list[Line]], set[int | None]]
    by_number: dict[int, Attempt] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    evaluations: list[Line] = field(default_factory=list)
    summaries: list[Line] = field(default_factory=list)
    saves: Saves = field(default_factory=Saves)
    faults: Faults = field(default_factory=Faults)
    # lowest step so far, by kind: train or eval
    reached: dict[str, int] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        kind, step = line["kind"], line["step"]
        if line["attempt"] not in self.by_number:
            self.by_number[line["attempt"]] = Attempt(line)
        self.by_number[line["attempt"]].add(line)
        if kind in ("train", "eval"):
            if step >= self.reached.get(kind, step + 1):
                return
            self.reached[kind] = step
        if kind == "train":
            waited_s, in_steps_s = number(line, "data_wait_s"), seconds_in_steps(line)
            if waited_s is not None and in_steps_s:
                line["data_wait_share"] = waited_s / in_steps_s
            self.curve.add(line)
        elif kind == "eval":
            self.evaluations.append(line)
            if len(self.evaluations) == 2 * MAX_LINES:
                told = self.told(self.evaluations[::-1])
                self.evaluations = [
                    each
                    for index, each in enumerate(self.evaluations)
                    if index % 2 == 0 or each["step"] in told
                ]
        elif kind == "summary":
            self.summaries.insert(0, line)
        elif kind == "checkpoint":
            self.saves.add(line)
        elif kind == "fault":
            self.faults.add(line)

    def attempts(self) -> list[Attempt]:
        """Return the attempts with steps, or all if none has any. All lines must have been added."""
        known = list(reversed(self.by_number.values()))
        return [attempt for attempt in known if attempt.has_steps] or known
