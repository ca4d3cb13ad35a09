"""How fast a finished run was, to estimate others by. Whoever wrote the run's files, they are checked before use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from launch.arithmetic import flops_per_sequence
from train.cli.saved import read_config
from train.config import InputError, S3Config, TrainConfig, check
from train.models.model_sizes import find_shape, knows_vocabulary, read_shape
from train.storage.folders import Folder, open_folder
from train.storage.schema import BadContent, of_type, shown
from train.telemetry.lines import parse_lines

MAX_RANKS, MAX_TOKENS = 2**20, 2**20
MAX_METRICS_BYTES = 2**30
MOST = 1e18  # of any number in a line


@dataclass(frozen=True)
class Calibration:
    """The speed of a run's steps, its all-reduce and waits for data included."""

    location: str
    instance: str
    backend: str
    precision: str
    world_size: int
    seq_len: int  # tokens
    sequences_per_s: float  # of all ranks
    flops_per_s: float  # of the model's arithmetic, of one rank
    mfu: float | None  # share of a device's peak; None for an instance without a known peak


@dataclass(frozen=True)
class Timed:
    """What an attempt had done at a line of its metrics."""

    examples: float
    train_s: float  # of its steps
    tokens: float


def read_calibration(location: str, s3: S3Config) -> Calibration:
    """Read the speed of a finished run from its folder, local or in S3. InputError for a folder without one.

    It is taken between the first train line of the last attempt and its last one, so that what a start costs (first
    allocations, reading ahead) is left out.
    """
    folder = open_folder(location, s3)
    try:
        size = folder.size("metrics.jsonl") or 0
        check(size <= MAX_METRICS_BYTES, f"calibrate={location}: metrics.jsonl is of {size} bytes, too many to read")
        content = folder.read("metrics.jsonl")
    except FileNotFoundError as error:
        raise InputError(f"calibrate={location} is no run folder: it holds no metrics.jsonl") from error
    cfg = read_config(folder)
    try:
        return measured(cfg, folder, last_attempt(content))
    except BadContent as error:
        raise InputError(f"calibrate={location}: its metrics.jsonl tells no speed: {error}") from error


def last_attempt(content: bytes) -> list[dict[str, Any]]:
    """The lines of the attempt of the last summary, that summary last. BadContent if there is none."""
    lines = list(parse_lines(content))
    ends = [number for number, line in enumerate(lines) if line["kind"] == "summary"]
    if not ends:
        raise BadContent("it has no summary: the run has not ended yet, or was killed")
    end = lines[ends[-1]]
    return [line for line in lines[: ends[-1]] if line["attempt"] == end["attempt"]] + [end]


def measured(cfg: TrainConfig, folder: Folder, lines: list[dict[str, Any]]) -> Calibration:
    """The speed between the train lines of one attempt. BadContent for lines that no run writes."""
    end = lines[-1]
    world = of_type(int, end.get("world_size"), "world_size")
    if not 1 <= world <= MAX_RANKS:
        raise BadContent(f"world_size={world} is no number of ranks")
    sequences, seconds, tokens = steady([timed(line) for line in lines if line.get("kind") == "train"])
    seq_len = cfg.seq_len or round(tokens / sequences)
    if not 1 <= seq_len <= MAX_TOKENS:
        raise BadContent(f"{tokens:g} tokens in {sequences:g} sequences are not those of a run")
    shape = read_shape(folder) or (find_shape(cfg.model) if knows_vocabulary(cfg.model) else None)
    work = None if shape is None else flops_per_sequence(cfg, shape, seq_len)
    check(
        bool(work),
        f"calibrate={folder.location}: the size of its model is unknown, so its speed says nothing of others; take a "
        "run with an export, or of a model that is published",
    )
    precision = of_type(str, end.get("precision"), "precision")
    peak = cfg.instance.peak_flops_per_s(precision)
    flops_per_s = sequences / seconds * (work or 0.0) / world
    return Calibration(
        location=folder.location,
        instance=cfg.instance.name,
        backend=of_type(str, end.get("backend"), "backend"),
        precision=precision,
        world_size=world,
        seq_len=seq_len,
        sequences_per_s=sequences / seconds,
        flops_per_s=flops_per_s,
        mfu=None if peak is None else flops_per_s / peak,
    )


def timed(line: dict[str, Any]) -> Timed:
    """BadContent for a line whose numbers are not those of steps."""
    numbers = {name: of_type(float, line.get(name), name) for name in ("examples", "train_s", "tokens")}
    for name, number in numbers.items():
        if not (math.isfinite(number) and 0 <= number <= MOST):
            raise BadContent(f"{name}={shown(number)} is not that of steps")
    return Timed(**numbers)


def steady(done: list[Timed]) -> tuple[float, float, float]:
    """Sequences, seconds and tokens between the first line and the last one."""
    if len(done) < 2:
        raise BadContent(f"its last attempt has {len(done)} train lines, and a speed needs 2: set log_every lower")
    first, last = done[0], done[-1]
    differences = last.examples - first.examples, last.train_s - first.train_s, last.tokens - first.tokens
    if min(differences) <= 0:
        raise BadContent("its train lines are not in the order of time, or the run was rolled back")
    return differences
