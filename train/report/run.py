"""A run folder as the report reads it: its lines, its attempts, and their summary. No torch here."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from train.config import InputError, check, flatten, lower_is_better
from train.config.checks import LARGEST, LARGEST_FLOAT
from train.report.texts import printable
from train.run_folder.outcome import KEYS, NAME, Outcome
from train.storage.schema import BadContent, read_yaml, record
from train.telemetry.lines import read_lines

Line = dict[str, Any]
Summary = dict[str, Any]  # see `summarise`

# ---- reading -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    path: Path  # of the copy, for a run in S3
    config: dict[str, Any]  # flat: "optim.lr"
    environment: dict[str, Any]  # flat too
    attempts: list[list[Line]]  # all that happened, redone steps included: time and money are counted from these
    lines: dict[str, list[Line]]  # by kind, superseded train and eval lines left out: curves are drawn from these
    location: str = ""  # of a run in S3, as the user wrote it
    outcome: Outcome | None = None  # of the last attempt; None: it is still running, or was killed
    label: str = ""  # its name among the runs of a report

    @cached_property
    def summary(self) -> Summary:
        return summarise(self)


def read_run(path: Path) -> Run:
    """Read a run folder; InputError, one line, if it is none or if a file in it is damaged."""
    try:
        check(path.is_dir(), f"{path} is not a folder; name the run_dir of a training run")
        check((path / "metrics.jsonl").is_file(), f"{path} is not a run folder: it holds no metrics.jsonl")
        lines = list(read_lines(path / "metrics.jsonl", is_strict=True))
        check(bool(lines), f"{path / 'metrics.jsonl'} holds no line yet: there is nothing to report")
        config = read_mapping(path / "config.yaml", read_yaml)
        environment = read_mapping(path / "environment.json", json.loads)
        outcome = read_outcome(path / NAME)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or path}: {error.strerror}") from error
    start_s = number(environment, "first_started_unix_s")
    if start_s is not None:
        lines = [{**line, "since_start_s": line["time_unix_s"] - start_s} for line in lines]
    attempts, kept = split_attempts(lines), drop_superseded(lines)
    described = dict(flatten(config)), dict(flatten(environment))
    return Run(path, *described, attempts, kept, outcome=outcome, label=printable(path.name))


def tell_apart(runs: list[Run]) -> None:
    """Label the runs by their folder names, with as many parent folders as make them different."""
    for depth in range(1, max(len(run.path.parts) for run in runs) + 1):
        for run in runs:
            run.label = printable(Path(*run.path.parts[-depth:]))
        if len({run.label for run in runs}) == len(runs):
            break


def read_outcome(path: Path) -> Outcome | None:
    """How the last attempt ended; None if it left no outcome, or if another program wrote the file."""
    known = {key: value for key, value in read_mapping(path, json.loads).items() if key in KEYS}
    try:
        return record(Outcome, known) if known.keys() == KEYS else None
    except BadContent as error:
        raise InputError(f"{path} is damaged: {error}") from error


def read_mapping(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """The mapping in a file, empty if there is no such file; InputError if it is damaged."""
    if not path.exists():
        return {}
    try:
        value = parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    check(isinstance(value, dict), f"{path} is damaged: expected a mapping, found {type(value).__name__}")
    return {str(key): item for key, item in value.items()}


def drop_superseded(lines: list[Line]) -> dict[str, list[Line]]:
    """Lines by kind. Only curves are cut back where steps were redone: faults, saves and attempts did all happen."""
    kept: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        series = kept[line["kind"]]
        while line["kind"] in ("train", "eval") and series and series[-1]["step"] >= line["step"]:
            series.pop()
        series.append(line)
    return kept


def split_attempts(lines: list[Line]) -> list[list[Line]]:
    """The lines of each attempt; attempts without a line of steps are left out, unless all are."""
    attempts: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        attempts[line["attempt"]].append(line)
    known = list(attempts.values())
    return [each for each in known if any(line["kind"] in ("train", "summary") for line in each)] or known


def number(line: dict[str, Any], key: str) -> float | None:
    """The value of a key if it is a finite number; None if not."""
    value = line.get(key)
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_FLOAT
    return value if known else None


# ---- summary -------------------------------------------------------------------------------------------------------

NOT_SCORES = re.compile("attempt|step|examples|epoch|unigram_entropy|.*_s")  # the other numbers of an eval line
HIGHER_IS_BETTER = re.compile("accuracy|f1|exact_match|precision|recall")
MODEL_SIZES = (("{} layers", "model.num_layers"), ("hidden size {}", "model.hidden_size"))


def of_attempt(attempt: list[Line], key: str) -> float | None:
    """A figure of an attempt, as train_s: by its summary, or by its train lines if it wrote none."""
    if attempt[-1]["kind"] == "summary":
        return number(attempt[-1], key)
    trained = [line for line in attempt if line["kind"] == "train"]
    if key == "compile_s":
        return total([number(line, key) for line in trained])
    if key == "mfu":
        ends_s = [0.0, *(number(line, "train_s") or 0.0 for line in trained)]
        seconds = [end_s - begin_s for begin_s, end_s in pairwise(ends_s)]
        return mean([(number(line, key), each_s) for line, each_s in zip(trained, seconds, strict=True)])
    return last(trained, key)


def mean(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """The mean of values weighted by seconds: of MFUs, all FLOPs over what the devices could have done meanwhile."""
    known = [(value, seconds) for value, seconds in pairs if value is not None and seconds]
    return sum(value * seconds for value, seconds in known) / sum(seconds for _, seconds in known) if known else None


def total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def last(lines: list[Line], key: str) -> float | None:
    return next((value for line in reversed(lines) if (value := number(line, key)) is not None), None)


def scores(evaluations: list[Line]) -> dict[str, dict[str, tuple[Any, int]]]:
    """(value, step) of the last and the best of every metric; no best where the better direction is not known. The last
    value is None if it was no finite number.
    """
    result: dict[str, dict[str, tuple[Any, int]]] = {}
    for name in {key: None for line in evaluations for key in line if not NOT_SCORES.fullmatch(key)}:
        reached = [(value, line["step"]) for line in evaluations if (value := number(line, name)) is not None]
        sign = -1 if lower_is_better(name) else 1 if HIGHER_IS_BETTER.search(name) else 0
        best = {"best": max(reached, key=lambda point: sign * point[0])} if sign and reached else {}
        if reached:
            end = next(line for line in reversed(evaluations) if name in line)
            result[name] = {**best, "last": (number(end, name), end["step"])}
    return result


def sizes(run: Run, end: Line) -> dict[str, float | None]:
    """What the configuration may leave open, as it was on the machines of the run."""
    config, environment, trained = run.config, run.environment, run.lines["train"]
    world_size = number(end, "world_size") or number(environment, "world_size")
    batch = number(config, "global_batch_size") or number(environment, "plan.global_batch_size")
    steps = number(end, "steps_total") or number(environment, "plan.total_steps") or number(config, "max_steps")
    examples = last(trained, "examples")
    if batch and examples is not None:  # a run that is stopped writes no line at its last step
        examples += batch * max(0, steps_done(run) - trained[-1]["step"])
    return {
        "world_size": world_size,
        "global_batch_size": batch,
        "seq_len": number(environment, "seq_len") or number(config, "seq_len"),
        "steps_total": steps,
        "examples": examples,
    }


def resources(run: Run) -> dict[str, Any]:
    """The machine of a run, what compiling cost on it, and peaks of memory. Totals and peaks are over all attempts."""
    environment, config = run.environment, run.config
    device, summaries = environment.get("device"), run.lines["summary"]
    if isinstance(device, str):
        device = device.removesuffix(" through XLA")  # the same device with XLA as without
    # On a CPU the device's memory is the host's.
    monitored = [] if device == "cpu" else run.lines["train"]
    own = {"baretrain": environment.get("baretrain"), "commit": environment.get("commit")}
    packages = {
        key.removeprefix("versions."): value for key, value in environment.items() if key.startswith("versions.")
    }
    return {
        "device": device,
        "compile": config.get("backend.compile"),
        "micro_batch_size": number(environment, "plan.micro_batch_size") or number(config, "micro_batch_size"),
        "accumulation": number(environment, "plan.accumulation"),
        "peak_device_bytes": highest(summaries, "peak_device_bytes"),
        "monitored_device_bytes": highest(monitored, "device_memory_bytes"),
        "peak_host_bytes": highest(summaries, "peak_host_bytes"),
        "versions": ", ".join(f"{name} {value}" for name, value in {**own, **packages}.items() if value) or None,
        "data": environment.get("identity.data"),
    }


def highest(lines: list[Line], key: str) -> float | None:
    return max((value for line in lines if (value := number(line, key)) is not None), default=None)


def billable_s(run: Run) -> float | None:
    """Seconds from the first start of a run to its last line, pauses between attempts included."""
    wall_s = number(closing(run), "wall_s")
    if wall_s is None:
        wall_s = number(run.attempts[-1][-1], "since_start_s")
    return wall_s if wall_s is not None and wall_s > 0 else None


def steps_done(run: Run) -> int:
    """The step that the last attempt reached, by its newest line or by a save that was committed since."""
    steps = 0
    for line in run.attempts[-1]:
        if line["kind"] != "fault":  # one may come before any step
            steps = max(steps, line["step"]) if line["kind"] == "checkpoint" else line["step"]
    return steps


def closing(run: Run) -> Line:
    """The summary of the last attempt; empty if it is still running, or was killed."""
    return run.attempts[-1][-1] if run.attempts[-1][-1]["kind"] == "summary" else {}


def reliability(run: Run, end: Line) -> dict[str, float | None]:
    """What faults and saves cost. An attempt that was killed leaves no count of its skipped steps and rollbacks."""
    survived = [line for line in run.lines["fault"] if number(line, "steps_lost") is not None]
    ending = closing(run)
    return {
        "goodput": last([line for attempt in run.attempts for line in attempt], "goodput"),
        "faults_survived": len(survived),
        "steps_lost": sum(line["steps_lost"] for line in survived),
        "recover_s": sum(number(line, "recover_s") or 0.0 for line in survived),
        "stall_s": mean([(number(line, "stall_s"), 1.0) for line in run.lines["checkpoint"]]),
        "checkpoint_bytes": last(run.lines["checkpoint"], "bytes"),
        "checkpoint_every": number(run.config, "checkpoint.every"),
        "checkpoints": len(run.lines["checkpoint"]),
        "save_s": total([number(line, "save_s") for line in run.lines["checkpoint"]]),
        "alarms": len(run.lines["fault"]),
        **{key: number(ending, key) for key in ("skipped_steps", "rollbacks")},
        **{key: number(end, key) for key in ("mttf_s", "suggested_interval_s", "suggested_every")},
    }


def summarise(run: Run) -> Summary:
    """What the summary table says, as plain values; None is unknown. Times and tokens are totals over all attempts."""
    config, environment, lines = run.config, run.environment, run.lines
    train_s, tokens, compile_s, graphs = (
        total([of_attempt(attempt, key) for attempt in run.attempts])
        for key in ("train_s", "tokens", "compile_s", "graphs")
    )
    end = lines["summary"][-1] if lines["summary"] else {}
    without_summary = sum(attempt[-1]["kind"] != "summary" for attempt in run.attempts)
    model = config.get("model.pretrained") or config.get("model.architecture")
    shape = [form.format(config[key]) for form, key in MODEL_SIZES if config.get(key)]
    entropy = last(lines["summary"] + lines["eval"], "unigram_entropy")
    of_ranks = end.get("peak_bytes_of_ranks")
    of_ranks = of_ranks if isinstance(of_ranks, list) else []
    peaks = [value for value in of_ranks if isinstance(value, int) and 0 <= value < LARGEST]
    counted, machine, wall_s = sizes(run, end), resources(run), billable_s(run)
    examples = counted["examples"] if len(run.attempts) == 1 else None  # steps that were redone are not among them
    return {
        **counted,
        **machine,
        **reliability(run, end),
        "task": config.get("task.kind"),
        "model": ", ".join([str(model), *shape]) if model else None,
        "parameters": number(environment, "parameters"),
        "instance": config.get("instance.name"),
        "backend": end.get("backend") or environment.get("backend") or config.get("backend.name"),
        "precision": end.get("precision") or environment.get("precision") or config.get("backend.precision"),
        "steps": steps_done(run),
        "tokens": tokens,
        "train_s": train_s,
        "tokens_per_s": tokens / train_s if tokens and train_s else None,
        "sequences_per_s": examples / train_s if examples and train_s else None,
        "wall_s": wall_s,
        "wall_without_compile_s": None if wall_s is None else max(0.0, wall_s - (compile_s or 0.0)),
        "compile_s": compile_s,
        "graphs": graphs,
        "mfu": mean([(of_attempt(attempt, "mfu"), of_attempt(attempt, "train_s")) for attempt in run.attempts]),
        "least_rank_bytes": min(peaks, default=None),
        "most_rank_bytes": max(peaks, default=None),
        **{key: number(end, key) for key in ("bubble_share", "bubble_share_ideal")},
        "cost_usd": last([line for attempt in run.attempts for line in attempt], "cost_usd"),  # of all until then
        "cost_partial": without_summary > 0 or any(number(each[-1], "cost_usd") is None for each in run.attempts),
        "train_loss": number(lines["train"][-1], "loss") if lines["train"] else None,  # null: it was no number
        "scores": scores(lines["eval"]),
        "unigram_entropy": number(environment, "unigram_entropy") if entropy is None else entropy,
        "attempts": len(run.attempts),
        "attempts_without_summary": without_summary,
        "reason": closing(run).get("reason"),
    }
