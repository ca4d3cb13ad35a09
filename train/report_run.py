"""A run folder read for the report: its lines, its lives, and the summary they come to. No torch here."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config import InputError, check, flatten
from train.untrusted import read_yaml

Line = dict[str, Any]

# ---- reading -------------------------------------------------------------------------------------------------------

STEP_KINDS = ("train", "eval", "checkpoint", "summary")  # a fault may come before any step


@dataclass
class Run:
    path: Path  # that of a copy, if it is in S3
    config: dict[str, Any]  # flat: "optim.lr"
    environment: dict[str, Any]  # flat too
    lives: list[list[Line]]  # all that happened, redone steps included: what time and money are counted from
    lines: dict[str, list[Line]]  # by kind, superseded train and eval lines left out: what curves are drawn from
    location: str = ""  # of one in S3, as the user wrote it


def read_run(path: Path) -> Run:
    """Read a run folder; InputError, one line, if it is none or if a file in it is damaged."""
    try:
        check(path.is_dir(), f"{path} is not a folder; give the run_dir of a training run")
        check((path / "metrics.jsonl").is_file(), f"{path} is not a run folder: it holds no metrics.jsonl")
        lines = read_metrics(path / "metrics.jsonl")
        config = read_mapping(path / "config.yaml", read_yaml)
        environment = read_mapping(path / "environment.json", json.loads)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or path}: {error.strerror}") from error
    return Run(path, dict(flatten(config)), dict(flatten(environment)), split_lives(lines), drop_superseded(lines))


def read_mapping(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    check(isinstance(value, dict), f"{path} is damaged: expected a mapping, found {type(value).__name__}")
    return {str(key): item for key, item in value.items()}


def read_metrics(path: Path) -> list[Line]:
    rows = [(place, row) for place, row in enumerate(path.read_bytes().split(b"\n"), 1) if row.strip()]
    lines: list[Line] = []
    for place, row in rows:
        try:
            line = json.loads(row)
        except ValueError as error:
            if place == rows[-1][0]:
                break  # the process was killed while it wrote
            raise InputError(f"{path} line {place} is not JSON: {error}") from error
        valid = isinstance(line, dict) and isinstance(line.get("kind"), str)
        valid = valid and (line["kind"] not in STEP_KINDS or isinstance(line.get("step"), int))
        check(valid, f"{path} line {place} is not a metrics line: expected an object with kind and step")
        lines.append(line)
    check(bool(lines), f"{path} holds no line yet: there is nothing to report")
    return lines


def drop_superseded(lines: list[Line]) -> dict[str, list[Line]]:
    """Lines by kind. Only curves are cut back where steps were redone: faults, saves and lives did all happen."""
    kept: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        series = kept[line["kind"]]
        while line["kind"] in ("train", "eval") and series and series[-1]["step"] >= line["step"]:
            series.pop()
        series.append(line)
    return kept


def split_lives(lines: list[Line]) -> list[list[Line]]:
    """A life ends with its summary or, if it was killed, where the next one redoes a step or says what the fault cost.
    A rollback redoes steps too, but within a life, and with other data: its examples go on.
    """
    told, cuts, before = starts(lines), [0], None
    for place, line in enumerate(lines):
        goes_back = line["kind"] == "train" and before is not None and line["step"] <= before["step"]
        redone = goes_back and (number(line, "examples") or 0) <= (number(before or {}, "examples") or 0)
        if place and (redone or place in told or lines[place - 1]["kind"] == "summary"):
            cuts.append(place)
            before = None
        before = line if line["kind"] == "train" else before
    lives = [lines[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(lines)], strict=True)]
    for begin, life in zip(cuts, lives, strict=True):
        count_steps(life, lines[:begin], told.get(begin))
    parted = [part for life in lives for part in part_silent(life)]
    return [life for life in parted if any(line["kind"] in ("train", "summary") for line in life)] or parted


def starts(lines: list[Line]) -> dict[int, int]:
    """Where lives begin that tell what a fault cost, and the step that each goes on from. They tell it after their
    first step, whose own lines may stand before.
    """
    found = {}
    for place, line in enumerate(lines):
        if line["kind"] == "fault" and number(line, "steps_lost") is not None:
            first = place
            while first and lines[first]["kind"] != "train" and lines[first - 1].get("step") == line["step"]:
                first -= 1
            found[first] = line["step"] - 1
    return found


def count_steps(life: list[Line], earlier: list[Line], resumed: int | None) -> None:
    """Give each train line `own_steps`, done by this life since the line before or since the state that it went on
    from (`resumed`, where that is known), and `window_steps`, those that the line speaks for: more, where it takes up
    the sums that were saved with that state.
    """
    if resumed is None and earlier and earlier[-1]["kind"] == "summary":
        resumed = earlier[-1]["step"]
    before, fault_steps = None, []
    for place, line in enumerate(life):
        if line["kind"] != "train":
            fault_steps += [line["step"]] if line["kind"] == "fault" and number(line, "step") is not None else []
            continue
        own = window = line["step"] - (before or 0)
        if before is None or own <= 0:
            if before is not None:  # rolled back: a line says so, at the step that the run went back to
                resumed = min(fault_steps, default=None)
            if resumed is None or resumed >= line["step"]:
                states = [each["step"] for each in earlier if each["kind"] in ("train", "checkpoint")]
                resumed = max((step for step in states if step < line["step"]), default=0)
            own = window = line["step"] - resumed
            if "goodput" in line:  # older versions saved no sums
                trained = [each["step"] for each in [*earlier, *life[:place]] if each["kind"] == "train"]
                window = line["step"] - max((step for step in trained if step <= resumed), default=0)
        line |= {"own_steps": max(1, own), "window_steps": max(1, window)}
        before, fault_steps = line["step"], []


def part_silent(life: list[Line]) -> list[list[Line]]:
    """A run that was killed right after a save redoes nothing: only the tokens of the next summary tell them apart."""
    left = number(life[-1], "tokens") if life[-1]["kind"] == "summary" else None
    for place in reversed(range(len(life))):
        if left is not None and life[place]["kind"] == "train":
            tokens = own_tokens(life[place])
            if left < tokens / 2:
                return [life[: place + 1], life[place + 1 :]]
            left -= tokens
    return [life]


def own_s(line: Line) -> float:
    return (number(line, "step_s") or 0.0) * line["own_steps"]


def own_tokens(line: Line) -> float:
    return (number(line, "tokens_per_s") or 0.0) * own_s(line)


def number(line: dict[str, Any], key: str) -> float | None:
    value = line.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# ---- summary -------------------------------------------------------------------------------------------------------

NOT_SCORES = re.compile("step|examples|epoch|unigram_entropy|.*_s")  # the other numbers of an eval line
LOWER_IS_BETTER = re.compile("loss|perplexity|error")
HIGHER_IS_BETTER = re.compile("accuracy|f1|exact_match|precision|recall")
MODEL_SIZES = (("{} layers", "model.num_layers"), ("hidden size {}", "model.hidden_size"))


def life_totals(life: list[Line]) -> dict[str, float | None]:
    """Time, tokens, MFU and cost of one life: its summary, or what its train lines add up to if it wrote none."""
    if life[-1]["kind"] == "summary":
        return {key: number(life[-1], key) for key in ("train_s", "tokens", "mfu", "cost_usd")}
    trained = [line for line in life if line["kind"] == "train"]
    return {
        "train_s": sum(own_s(line) for line in trained),
        "tokens": round(sum(own_tokens(line) for line in trained)),
        "mfu": mean([(number(line, "mfu"), own_s(line)) for line in trained]),
        "cost_usd": None,
    }


def mean(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """The mean of values weighted by seconds: of MFUs, all FLOPs over what the devices could have done meanwhile."""
    known = [(value, seconds) for value, seconds in pairs if value is not None and seconds]
    return sum(value * seconds for value, seconds in known) / sum(seconds for _, seconds in known) if known else None


def total(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) if known else None


def last(lines: list[Line], key: str) -> float | None:
    return next((value for line in reversed(lines) if (value := number(line, key)) is not None), None)


def scores(evaluations: list[Line]) -> dict[str, dict[str, tuple[float, int]]]:
    """(value, step) of the last and the best of every metric; no best where the better direction is not known."""
    result: dict[str, dict[str, tuple[float, int]]] = {}
    for name in {key: None for line in evaluations for key in line if not NOT_SCORES.fullmatch(key)}:
        reached = [(value, line["step"]) for line in evaluations if (value := number(line, name)) is not None]
        finite = [point for point in reached if math.isfinite(point[0])]
        sign = -1 if LOWER_IS_BETTER.search(name) else 1 if HIGHER_IS_BETTER.search(name) else 0
        best = {"best": max(finite, key=lambda point: sign * point[0])} if sign and finite else {}
        if reached:
            result[name] = {**best, "last": reached[-1]}
    return result


def sizes(run: Run, end: Line) -> dict[str, float | None]:
    """What the configuration may leave open: it came to this on the machines of the run."""
    config, environment, trained = run.config, run.environment, run.lines["train"]
    world_size = number(end, "world_size") or number(environment, "world_size")
    batch = number(config, "global_batch_size") or number(environment, "plan.global_batch_size")
    seq_len = number(config, "seq_len")
    if batch and not seq_len and trained:
        line = trained[-1]
        seq_len = round(own_tokens(line) / line["own_steps"] / batch) or None
    steps = number(end, "steps_total") or number(environment, "plan.total_steps") or number(config, "max_steps")
    examples = last(trained, "examples")
    if batch and examples is not None:  # a run that is stopped writes no line at its last step
        examples += batch * max(0, steps_done(run) - trained[-1]["step"])
    found = {"world_size": world_size, "global_batch_size": batch, "seq_len": seq_len, "steps_total": steps}
    return {**found, "examples": examples}


def steps_done(run: Run) -> int:
    """Of the last life: by its newest line, or by a save that was committed since."""
    steps = 0
    for line in run.lives[-1]:
        if line["kind"] in STEP_KINDS:
            steps = max(steps, line["step"]) if line["kind"] == "checkpoint" else line["step"]
    return steps


def reliability(run: Run, end: Line) -> dict[str, float | None]:
    """What faults and saves cost. Older versions told nothing of it, nor does a killed life of its skipped steps."""
    told = [line for life in run.lives for line in life if "goodput" in line]
    survived = [line for line in run.lines["fault"] if number(line, "steps_lost") is not None]
    closing = run.lives[-1][-1] if run.lives[-1][-1]["kind"] == "summary" else {}
    return {
        "goodput": last(told, "goodput"),
        "faults_survived": len(survived) if told else None,
        "steps_lost": sum(line["steps_lost"] for line in survived) if told else None,
        "recover_s": sum(number(line, "recover_s") or 0.0 for line in survived) if told else None,
        "stall_s": mean([(number(line, "stall_s"), 1.0) for line in run.lines["checkpoint"]]),
        "checkpoint_bytes": last(run.lines["checkpoint"], "bytes"),
        "checkpoint_every": number(run.config, "checkpoint.every"),
        "checkpoints": len(run.lines["checkpoint"]),
        "save_s": total([number(line, "save_s") for line in run.lines["checkpoint"]]),
        "alarms": len(run.lines["fault"]),
        **{key: number(closing, key) for key in ("skipped_steps", "rollbacks")},
        **{key: number(end, key) for key in ("wall_s", "mttf_s", "suggested_interval_s", "suggested_every")},
    }


def summarise(run: Run) -> dict[str, Any]:
    """What the summary table says, as plain values; None is unknown. Times and tokens are totals over all lives."""
    config, environment, lines = run.config, run.environment, run.lines
    lives = [life_totals(life) for life in run.lives]
    train_s, tokens = total([life["train_s"] for life in lives]), total([life["tokens"] for life in lives])
    end = lines["summary"][-1] if lines["summary"] else {}
    model = config.get("model.pretrained") or config.get("model.architecture")
    shape = [form.format(config[key]) for form, key in MODEL_SIZES if config.get(key)]
    entropy = last(lines["summary"] + lines["eval"], "unigram_entropy")
    return {
        **sizes(run, end),
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
        "mfu": mean([(life["mfu"], life["train_s"]) for life in lives]),
        "cost_usd": total([life["cost_usd"] for life in lives]),
        "cost_partial": any(life["cost_usd"] is None for life in lives),
        "train_loss": number(lines["train"][-1], "loss") if lines["train"] else None,  # null: it was no number
        "scores": scores(lines["eval"]),
        "unigram_entropy": number(environment, "unigram_entropy") if entropy is None else entropy,
        "lives": len(lives),
        "lives_without_summary": sum(life[-1]["kind"] != "summary" for life in run.lives),
        "reason": end.get("reason"),
    }
