"""A run folder, read for the report: its lines, its attempts and a summary. This module does not import torch.

It reads metrics.jsonl, config.yaml, environment.json, outcome.json, data.json, evaluation.json and
export/baretrain.json; page.py also reads samples.json. To report a further value, let Recorder in
train/observe/metrics.py write it, let `summarise` compute it for the whole run, and add a row to ROWS in page.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from train.config import InputError, check, flatten
from train.observe.lines import read_back
from train.observe.report.data import Records, read_mapping, read_records
from train.observe.report.lines import (
    Attempt,
    Faults,
    Line,
    Reading,
    Saves,
    high,
    highest,
    number,
    number_list,
    numbers,
    total,
)
from train.observe.report.texts import printable
from train.run_folder.exported import marked
from train.run_folder.metrics_files import NAME, files_of
from train.run_folder.outcome import WRITTEN_UNIX_S, read_outcome
from train.storage.folders import Folder, LocalFolder
from train.storage.schema import read_json, read_yaml
from train.tasks import Metric, scores_of

Summary = dict[str, Any]  # see `summarise`
logger = logging.getLogger("train")

# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    folder: Folder
    config: dict[str, Any]  # settings by dotted key, such as "optim.lr"
    environment: dict[str, Any]  # environment.json, by dotted key
    attempts: list[Attempt] = field(default_factory=list)  # from all lines, for times and costs
    # train lines for the curves, without superseded ones
    train: list[Line] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)  # eval lines, without superseded ones
    summaries: list[Line] = field(default_factory=list)
    saves: Saves = field(default_factory=Saves)
    faults: Faults = field(default_factory=Faults)
    records: Records | None = None  # None if there is neither data.json nor evaluation.json
    # how the last attempt ended; {}: running or killed
    outcome: dict[str, Any] = field(default_factory=dict)
    # step of the exported weights; None if there is no export or it has no step
    exported_step: int | None = None
    label: str = ""  # the run's name in a report

    def add(self, lines: Iterable[Line]) -> None:
        """Add the run's lines: all of them, newest first."""
        start_s = number(self.environment, "first_started_unix_s")

        def told(known: list[Line]) -> set[int | None]:
            return {
                self.exported_step,
                *(step for each in scores(self, known).values() for _, step in each.values()),
            }

        reading = Reading(told)
        for line in lines:
            if start_s is not None and start_s > WRITTEN_UNIX_S:
                line["since_start_s"] = line["time_unix_s"] - start_s
            reading.add(line)
        self.attempts, self.train, self.evaluations = (
            reading.attempts(),
            reading.curve.lines,
            reading.evaluations[::-1],
        )
        self.summaries, self.saves, self.faults = reading.summaries, reading.saves, reading.faults

    @cached_property
    def summary(self) -> Summary:
        return summarise(self)

    def drawn(self, kind: str) -> list[Line]:
        return self.evaluations if kind == "eval" else self.train

    @cached_property
    def declared(self) -> dict[str, Metric]:
        """The scores that the run's task declares, by name; of a task that is not known, also best.metric."""
        prefix = "data.more_validation."
        splits = [key.removeprefix(prefix) for key in self.config if key.startswith(prefix)]
        wanted = str(self.config.get("best.metric"))
        return {
            wanted: Metric(wanted, None),
            **scores_of(str(self.config.get("task.kind")), splits),
        }

    def metric(self, name: str) -> Metric:
        """Return the task's declaration of a metric, with a printable name."""
        return replace(self.declared.get(name, Metric(name, None)), name=printable(name))

    @property
    def exported(self) -> Line | None:
        """The evaluation of the exported weights; None if there was none."""
        return next(
            (line for line in self.evaluations if line["step"] == self.exported_step), None
        )

    @property
    def name(self) -> str:
        return self.folder.location.rpartition("/")[2]


def read_run(folder: Folder | Path) -> Run:
    """Read a run folder. Raises InputError if it is not one or if a file in it is damaged."""
    folder = LocalFolder(folder) if isinstance(folder, Path) else folder
    if isinstance(folder, LocalFolder):
        check(
            folder.path.is_dir(),
            f"{folder.location} is not a folder; name the run_dir of a training run",
        )
    where, damage = f"{folder.location}/{NAME}", list[str]()
    lines = read_back(folder, damage=damage)
    newest = next(lines, None)
    if newest is None:
        check(
            bool(files_of(folder)),
            f"{folder.location} is not a run folder: it has no {NAME}",
        )
        raise InputError(
            f"{where}: {', '.join(damage) or 'no lines yet, so there is nothing to report'}"
        )
    config = dict(flatten(read_mapping(folder, "config.yaml", read_yaml)))
    environment = dict(flatten(read_mapping(folder, "environment.json", read_json)))
    run = Run(
        folder, config, environment, records=read_records(folder), outcome=read_outcome(folder)
    )
    run.exported_step = marked(folder, "weights")
    run.add(chain([newest], lines))
    if damage:
        logger.warning("%s: %s; such lines are left out", where, damage[0])
    run.label = printable(run.name)
    return run


def tell_apart(runs: list[Run]) -> None:
    """Label each run with its folder name, and with the parent folders needed to tell equal names apart."""
    paths = [run.folder.location.split("/") for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        for run, parts in zip(runs, paths, strict=True):
            run.label = printable("/".join(parts[-depth:]))
        if len({run.label for run in runs}) == len(runs):
            break


# ---- values of lines -----------------------------------------------------------------------------------------------


def last(lines: list[Line], key: str) -> float | None:
    return next(iter(numbers(lines[::-1], key)), None)


def mean(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """Return the mean of the values, weighted by their seconds. For MFUs, this is total FLOPs over peak FLOPs."""
    known = [(value, seconds) for value, seconds in pairs if value is not None and seconds]
    return (
        sum(value * seconds for value, seconds in known) / sum(seconds for _, seconds in known)
        if known
        else None
    )


# ---- summary -------------------------------------------------------------------------------------------------------

MODEL_SIZES = (("{} layers", "model.num_layers"), ("hidden size {}", "model.hidden_size"))
# numbers
OF_ENVIRONMENT = (
    "parameters",
    "world_size",
    "seq_len",
    "unigram_entropy",
    "neighbour_accuracy",
)
OF_PLAN = ("global_batch_size", "micro_batch_size", "accumulation")
OF_SUMMARY = (
    "bubble_share",
    "bubble_share_ideal",
    "mttf_s",
    "suggested_interval_s",
    "suggested_every",
)


def scores(run: Run, evaluations: list[Line]) -> dict[str, dict[str, tuple[Any, int]]]:
    """Return each declared score's "last" (value, step), and if they are known, "exported" and "best".

    A value that is not finite is None. "exported" is that of the exported weights; a score without a direction has no
    "best".
    """
    result: dict[str, dict[str, tuple[Any, int]]] = {}
    for name in {key: None for line in evaluations for key in line if key in run.declared}:
        reached = [
            (value, line["step"])
            for line in evaluations
            if (value := number(line, name)) is not None
        ]
        sign = run.metric(name).sign
        best = (
            {"best": max(reached, key=lambda point: sign * point[0])} if sign and reached else {}
        )
        if reached:
            end = next(line for line in reversed(evaluations) if name in line)
            result[name] = {**best, "last": (number(end, name), end["step"])}
            line = next((line for line in evaluations if line["step"] == run.exported_step), None)
            if line is not None:
                result[name]["exported"] = number(line, name), line["step"]
    return result


def settled(points: Mapping[str, tuple[Any, int]]) -> tuple[Any, int]:
    """Return the (value, step) by which a run is judged: of the exported weights, or the last without an export."""
    return points.get("exported", points["last"])


def summarise(run: Run) -> Summary:
    """Return the values of the summary table; None means unknown. Times, tokens and peaks cover all attempts."""
    return {
        **setting(run),
        **speed(run),
        **reliability(run),
        "scores": scores(run, run.evaluations),
    }


def setting(run: Run) -> Summary:
    """Return what was trained, on which data and machines. Instead of auto, return the value that was used."""
    config, environment = run.config, run.environment
    # then the architecture is unknown
    from_elsewhere = config.get("model.pretrained") or config.get("model.init_from")
    model = from_elsewhere or config.get("model.architecture")
    shape = [form.format(config[key]) for form, key in MODEL_SIZES if config.get(key)]
    device = environment.get("device")
    if isinstance(device, str):
        device = device.removesuffix(" through XLA")  # the device is the same with and without XLA
    versions = {"baretrain": environment.get("baretrain"), "commit": environment.get("commit")}
    versions |= {
        key[9:]: value for key, value in environment.items() if key.startswith("versions.")
    }
    return {
        "task": config.get("task.kind"),
        "model": ", ".join([str(model), *shape]) if model else None,
        "data": environment.get("identity.data"),
        "instance": config.get("instance.name"),
        "device": device,
        "lengths": environment.get("identity.data.lengths"),
        **{key: environment.get(key) for key in ("backend", "compile", "precision")},
        **{key: number(environment, key) for key in OF_ENVIRONMENT},
        **{key: number(environment, f"plan.{key}") for key in OF_PLAN},
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value)
        or None,
    }


def speed(run: Run) -> Summary:
    """Return the run's progress, speed, memory and cost."""
    environment, newest = run.environment, run.train[-1:]
    train_s, tokens, compile_s, graphs = (
        total([attempt.figure(key) for attempt in run.attempts])
        for key in ("train_s", "tokens", "compile_s", "graphs")
    )
    steps, wall_s, examples = run.attempts[-1].step, billable_s(run), last(run.train, "examples")
    batch = number(environment, "plan.global_batch_size")
    if batch and examples is not None:  # a stopped run may lack a line for its last steps
        examples += batch * max(0, steps - run.train[-1]["step"])
    # `examples` leaves out redone steps, `train_s` does not
    once = examples if len(run.attempts) == 1 else None
    without_summary = sum(attempt.last["kind"] != "summary" for attempt in run.attempts)
    # with or without XLA: device memory is host memory
    is_cpu = str(environment.get("device")).startswith("cpu")
    peaks = number_list(newest_summary(run), "peak_bytes_of_ranks")
    return {
        "steps": steps,
        "steps_total": number(environment, "plan.total_steps"),
        "examples": examples,
        "tokens": tokens,
        "train_s": train_s,
        "tokens_per_s": tokens / train_s if tokens and train_s else None,
        "sequences_per_s": once / train_s if once and train_s else None,
        "wall_s": wall_s,
        "wall_without_compile_s": None
        if wall_s is None
        else max(0.0, wall_s - (compile_s or 0.0)),
        "compile_s": compile_s,
        "graphs": graphs,
        "mfu": mean(
            [(attempt.figure("mfu"), attempt.figure("train_s")) for attempt in run.attempts]
        ),
        "peak_device_bytes": max(numbers(run.summaries, "peak_device_bytes"), default=None),
        "monitored_device_bytes": None if is_cpu else highest(run.train, "device_memory_bytes"),
        "peak_host_bytes": max(numbers(run.summaries, "peak_host_bytes"), default=None),
        "least_rank_bytes": min(peaks, default=None),
        "most_rank_bytes": max(peaks, default=None),
        "cost_usd": last(
            [attempt.newest for attempt in run.attempts], "cost_usd"
        ),  # the sum over all attempts so far
        "cost_partial": without_summary > 0
        or any(number(each.last, "cost_usd") is None for each in run.attempts),
        "train_loss": number(newest[0], "loss") if newest else None,  # None: it was not finite
        "attempts": len(run.attempts),
        "attempts_without_summary": without_summary,
        "reason": closing(run).get("reason"),
    }


def reliability(run: Run) -> Summary:
    """Return values on faults and saves. Skipped steps and rollbacks are unknown if the last attempt was killed."""
    saves, faults, end = run.saves, run.faults, newest_summary(run)
    planned = number(run.environment, "plan.total_steps")
    of_end = {key: number(end, key) for key in OF_SUMMARY}
    if planned and of_end["suggested_every"]:  # a short run needs only the save at its end
        of_end["suggested_every"] = min(planned, of_end["suggested_every"])
    return {
        "goodput": last([attempt.newest for attempt in run.attempts], "goodput"),
        "faults_survived": faults.survived,
        "steps_lost": faults.steps_lost,
        "recover_s": faults.recover_s,
        "stall_s": saves.stall_s / saves.number if saves.number else None,
        "checkpoint_bytes": saves.bytes,
        "checkpoint_every": number(run.config, "checkpoint.every"),
        "checkpoints": saves.number,
        "save_s": saves.save_s if saves.number else None,
        "alarms": faults.number,
        **{key: number(closing(run), key) for key in ("skipped_steps", "rollbacks")},
        **of_end,
    }


def last_finite(run: Run) -> Line | None:
    """Return the last train line with a finite loss if the run diverged ({} if it has none); None if it did not."""
    if not run.train or "loss" not in run.train[-1] or number(run.train[-1], "loss") is not None:
        return None
    return next((line for line in reversed(run.train) if number(line, "loss") is not None), {})


def divergence(run: Run) -> str:
    """Describe when the loss of a diverged run stopped being finite, with advice; "" for other runs."""
    line = last_finite(run)
    if line is None:
        return ""
    since = f"after step {high(line, 'step'):,.0f}" if line else "at any step"
    return f"no finite loss {since}: try a lower optim.lr, and check the weights and the data"


def newest_summary(run: Run) -> Line:
    """Return the newest summary line of all attempts; {} if there is none."""
    return run.summaries[-1] if run.summaries else {}


def closing(run: Run) -> Line:
    """Return the summary line of the last attempt; {} if it is still running or was killed."""
    return run.attempts[-1].last if run.attempts[-1].last["kind"] == "summary" else {}


def billable_s(run: Run) -> float | None:
    """Return the seconds from the first start of a run to its last line, including pauses between attempts."""
    wall_s = number(closing(run), "wall_s")
    if wall_s is None:
        wall_s = number(run.attempts[-1].last, "since_start_s")
    return wall_s if wall_s is not None and wall_s > 0 else None
