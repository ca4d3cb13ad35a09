"""What a comparison says of runs: their figures as ratios to the baseline's, whether they did the same work, and
whether it came out equally well. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from train.config import lower_is_better
from train.config.checks import LARGEST, LARGEST_FLOAT
from train.report.figures import printable, shortened
from train.report.run import Line, Run, last, number, summarise, total

LONG = 1e6  # a ratio above it is written with an exponent
SAME_EXAMPLES = 0.01  # share by which as many sequences may differ: a batch does not divide every epoch
WORK = ("task.", "model.", "optim.", "seed", "data.lengths")  # settings that decide what is learnt
BATCH = ("global_batch_size", "steps")  # what runs at another batch cannot have in common
MACHINE = ("device", "instance", "world_size")


@dataclass(frozen=True)
class Entry:
    """A run of the comparison."""

    label: str
    run: Run
    facts: dict[str, Any]  # of train.report.run.summarise, and what a comparison adds; None is unknown


@dataclass(frozen=True)
class Quality:
    """The last value of a validation metric beside the baseline's."""

    metric: str
    value: float  # NaN: it was no number
    baseline: float
    tolerance: float
    is_same_data: bool  # that both were validated on

    @property
    def apart(self) -> float:
        """The difference as a share of the baseline's value."""
        difference = abs(self.value - self.baseline)
        return difference / abs(self.baseline) if self.baseline else difference and 1.0

    @property
    def is_equal(self) -> bool:
        return self.apart <= self.tolerance

    def __str__(self) -> str:
        if math.isnan(self.value + self.baseline):
            return f"quality: no number ({self.name} {self.value:.4g} against {self.baseline:.4g})"
        if not self.is_same_data:
            return (
                f"quality not comparable ({self.name} {self.value:.4g} against {self.baseline:.4g}, on different data)"
            )
        if self.is_equal:
            apart = f"{percent(self.apart)} apart" if self.apart else "the same"
            return f"equal quality ({self.name} {apart}, tolerance {percent(self.tolerance)})"
        is_better = (self.value < self.baseline) == lower_is_better(self.metric)
        return (
            f"unequal quality ({self.name} {self.value:.4g} against {self.baseline:.4g}, {percent(self.apart)} "
            f"{'better' if is_better else 'worse'}, tolerance {percent(self.tolerance)})"
        )

    @property
    def name(self) -> str:
        return printable(self.metric.replace("_", " "))


def factor(value: float) -> str:
    return f"{value:.2f}" if value < LONG else f"{value:.3g}"


def percent(share: float) -> str:
    if 0 < share < 1e-4:
        return "less than 0.01 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:{'.0f' if share <= LONG else '.3g'}} %"


# ---- figures of one run --------------------------------------------------------------------------------------------


def measure(run: Run) -> dict[str, Any]:
    """The figures of a run. Times, tokens and compiled graphs are totals over its attempts."""
    config, environment, known = run.config, run.environment, summarise(run)
    compile_s, graphs = (
        total([of_attempt(attempt, key) for attempt in run.attempts]) for key in ("compile_s", "graphs")
    )
    wall_s, train_s, examples = since_first_start(run, known["wall_s"]), known["train_s"], known["examples"]
    is_cpu = device(environment) == "cpu"  # its lines have the ranks' memory of the host as that of the device
    has_sequences = len(run.attempts) == 1 and examples and train_s  # redone steps are not among them
    return {
        **known,
        "device": device(environment),
        "compile": config.get("backend.compile"),
        "micro_batch_size": number(environment, "plan.micro_batch_size") or number(config, "micro_batch_size"),
        "accumulation": number(environment, "plan.accumulation"),
        "sequences_per_s": examples / train_s if has_sequences else None,
        "compile_s": compile_s,
        "graphs": graphs,
        "wall_s": wall_s,
        "wall_without_compile_s": None if wall_s is None else max(0.0, wall_s - (compile_s or 0.0)),
        "peak_device_bytes": highest(run.lines["summary"], "peak_device_bytes"),
        "monitored_device_bytes": None if is_cpu else highest(run.lines["train"], "device_memory_bytes"),
        "peak_host_bytes": highest(run.lines["summary"], "peak_host_bytes"),
        "versions": versions(environment),
        "data": environment.get("identity.data"),
        "metric": config.get("best.metric"),
    }


def of_attempt(attempt: list[Line], key: str) -> float | None:
    """compile_s or graphs of an attempt, by its summary, or by its train lines if it wrote none."""
    if attempt[-1]["kind"] == "summary":
        return number(attempt[-1], key)
    return last(attempt, key) if key == "graphs" else total([number(line, key) for line in attempt])


def since_first_start(run: Run, wall_s: float | None) -> float | None:
    """Seconds from the first start of a run to its last line: what is billed, and the pauses between attempts.
    `wall_s`: the same as the last attempt's summary has it.
    """
    first, end = number(run.environment, "first_started_unix_s"), number(run.attempts[-1][-1], "time_unix_s")
    if wall_s is None and first is not None and end is not None:
        wall_s = end - first
    return wall_s if wall_s is not None and wall_s > 0 else None


def device(environment: dict[str, Any]) -> object:
    """Name of the device, the same with XLA as without."""
    name = environment.get("device")
    return name.removesuffix(" through XLA") if isinstance(name, str) else name


def highest(lines: list[Line], key: str) -> float | None:
    return max((value for line in lines if (value := number(line, key)) is not None), default=None)


def versions(environment: dict[str, Any]) -> str | None:
    """Names and versions of what the run's arithmetic depends on."""
    own = {"baretrain": environment.get("baretrain"), "commit": environment.get("commit")}
    packages = {
        key.removeprefix("versions."): value for key, value in environment.items() if key.startswith("versions.")
    }
    return ", ".join(f"{name} {value}" for name, value in {**own, **packages}.items() if value) or None


# ---- one run beside the baseline -----------------------------------------------------------------------------------


def ratio(entry: Entry, baseline: Entry, key: str) -> float | None:
    """How many times the baseline's figure a run has; None if either is unknown, or if the two cannot be measured."""
    value, base = entry.facts[key] or 0.0, baseline.facts[key] or 0.0
    return value / base if 0 < value < LARGEST_FLOAT and 1 / LARGEST_FLOAT < base < LARGEST_FLOAT else None


def quality(entry: Entry, baseline: Entry, tolerance: float) -> Quality | None:
    """The check of equal quality, by the metric that the baseline's best.metric names, or by the loss. None if the two
    have no such metric.
    """
    there, here = baseline.facts["scores"], entry.facts["scores"]
    for metric in (baseline.facts["metric"], "loss"):
        if isinstance(metric, str) and metric in there and metric in here:
            value, base = (
                math.nan if score is None else score for score, _ in (here[metric]["last"], there[metric]["last"])
            )
            return Quality(metric, value, base, tolerance, validated_on(entry) == validated_on(baseline))
    return None


def work_differences(entry: Entry, baseline: Entry, *, same_batch: bool) -> list[str]:
    """What makes the work of a run another one than the baseline's: "key: value there, value here"."""
    result = list(differing(work(baseline), work(entry)))
    there, here = (each.facts["examples"] for each in (baseline, entry))
    if there is not None and here is not None and abs(here - there) > SAME_EXAMPLES * there:
        result.append(f"sequences consumed: {count(there)} there, {count(here)} here")
    lengths = [{"seq_len": each.facts["seq_len"]} for each in (baseline, entry)]
    if all(each["seq_len"] for each in lengths):  # old runs do not record it, and do not differ by that
        result += differing(*lengths)
    if same_batch:
        result += differing(*({key: each.facts[key] for key in BATCH} for each in (baseline, entry)))
    return result


def work(entry: Entry) -> dict[str, Any]:
    """The settings that decide what is learnt, and the data's id."""
    settings = {key: value for key, value in entry.run.config.items() if key.startswith(WORK)}
    return {**settings, **validated_on(entry)}


def validated_on(entry: Entry) -> dict[str, Any]:
    return {"data": entry.facts["data"], "eval_examples": entry.run.config.get("eval_examples")}


def machine_differences(entry: Entry, baseline: Entry) -> list[str]:
    """What makes the machine of a run another one than the baseline's."""
    return list(differing(*({key: each.facts[key] for key in MACHINE} for each in (baseline, entry))))


def differing(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    for key in there | here:
        if there.get(key) != here.get(key):
            yield printable(f"{key}: {text(there.get(key))} there, {text(here.get(key))} here")


def text(value: object) -> str:
    """A value of a run folder, short."""
    return (
        "unknown" if value is None else shortened(value if isinstance(value, str) else json.dumps(value, default=str))
    )


# ---- groups --------------------------------------------------------------------------------------------------------


def at_same_batch(entries: Sequence[Entry]) -> list[Entry]:
    """The runs with the baseline's global batch; empty if there is no other one."""
    batch = entries[0].facts["global_batch_size"]
    same = [entry for entry in entries if entry.facts["global_batch_size"] == batch]
    return same if len(same) > 1 else []


def at_largest_batch(entries: Sequence[Entry]) -> list[Entry]:
    """The run with the largest batch of each variant, the baseline's first; empty if all have the same batch. Runs are
    of one variant if backend, split over ranks and machine are the same.
    """
    largest: dict[str, Entry] = {}
    for entry in entries:
        key = variant(entry)
        if key not in largest or batches(entry) > batches(largest[key]):
            largest[key] = entry
    return list(largest.values()) if len(largest) > 1 and len({*map(batches, largest.values())}) > 1 else []


def batches(entry: Entry) -> tuple[float, float]:
    """Micro and global batch."""
    return entry.facts["micro_batch_size"] or 0.0, entry.facts["global_batch_size"] or 0.0


def variant(entry: Entry) -> str:
    """What tells a variant from the others."""
    settings = {key: value for key, value in entry.run.config.items() if key.startswith(("backend.", "parallel."))}
    facts = {key: entry.facts[key] for key in (*MACHINE, "backend", "precision")}
    return json.dumps([settings, facts], sort_keys=True, default=str)


# ---- the verdict ---------------------------------------------------------------------------------------------------


def verdict(entry: Entry, baseline: Entry, *, tolerance: float, same_batch: bool) -> str:
    """A sentence: how many times the throughput, in which share of the time, and whether it is the same result of the
    same work.
    """
    speed = ratio(entry, baseline, "tokens_per_s")
    does = f"{factor(speed)} times the tokens/s" if speed is not None else "an unknown number of tokens/s"
    parts = [f"{entry.label} does {does} of {baseline.label}{time_text(entry, baseline)}"]
    if not same_batch:
        here, there = (count(each.facts["global_batch_size"]) for each in (entry, baseline))
        parts[0] += f", each at its own largest batch ({here} against {there})"
    score = quality(entry, baseline, tolerance)
    parts.append("quality unknown (no evaluation of both)" if score is None else str(score))
    for what, differences in (
        ("not the same work", work_differences(entry, baseline, same_batch=same_batch)),
        ("not the same machine", machine_differences(entry, baseline)),
    ):
        if differences:
            more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
            parts.append(f"{what} ({'; '.join(differences[:2])}{more})")
    return ", ".join(parts)


def time_text(entry: Entry, baseline: Entry) -> str:
    """The share of the baseline's billable time, and the same without compiling; empty if it is unknown."""
    whole, without = (ratio(entry, baseline, key) for key in ("wall_s", "wall_without_compile_s"))
    if whole is None:
        return ""
    compiles = any(each.facts["compile_s"] for each in (entry, baseline))
    aside = f" ({factor(without)} without compiling)" if compiles and without is not None else ""
    return f" in {factor(whole)} {'of' if whole < 1 else 'times'} the time{aside}"


def count(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}" if abs(value) < LARGEST else f"{value:.3g}"


def unfinished(entry: Entry) -> str | None:
    """Why a run is not to be judged by yet; None if it has ended."""
    facts = entry.facts
    if facts["reason"] in ("done", "early_stop"):
        return None
    of = "" if facts["steps_total"] is None else f" of {count(facts['steps_total'])}"
    return f"{entry.label} has not ended: step {facts['steps']:,.0f}{of}"


def notes(entry: Entry) -> Iterator[str]:
    """What a reader must know of a run before they judge by it."""
    if (reason := unfinished(entry)) is not None:
        yield reason
    attempts = entry.facts["attempts"]
    if attempts > 1:
        yield f"{entry.label} took {attempts} attempts: its billable time includes the pauses between them"
    if entry.facts["cost_usd"] is not None and entry.facts["cost_partial"]:
        yield f"{entry.label}: the cost is a lower bound, not every attempt recorded its own to the end"
