"""How fast a finished run was, to estimate others by. Whoever wrote the run's files, they are checked before use."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from train.cli.saved import read_config
from train.config import InputError, RecordsConfig, S3Config, TrainConfig, check
from train.models.model_sizes import Shape, find_shape, knows_vocabulary, read_shape
from train.storage.folders import Folder, open_folder
from train.storage.schema import BadContent, of_type, shown
from train.telemetry.lines import read_back

MAX_RANKS, MAX_TOKENS, MAX_VALUE = 2**20, 2**20, 1e18  # MAX_VALUE: of any number in a line


@dataclass(frozen=True)
class Calibration:
    """The speed of a run's steps, its all-reduce and waits for data included."""

    location: str
    instance: str
    precision: str
    world_size: int
    seq_len: int  # tokens
    sequences_per_s: float  # of all ranks
    flops_per_s: float  # of the model's arithmetic, of one rank
    mfu: float | None  # share of a device's peak; None for an instance without a known peak


def read_calibration(location: str, s3: S3Config) -> Calibration:
    """Read the speed of a finished run from its folder, local or in S3. InputError for a folder without one."""
    folder = open_folder(location, s3)
    check(folder.size("metrics.jsonl") is not None, f"calibrate={location} is no run folder: it holds no metrics.jsonl")
    cfg = read_config(folder)
    try:
        return measured(cfg, folder)
    except BadContent as error:
        raise InputError(f"calibrate={location}: its metrics.jsonl tells no speed: {error}") from error


def measured(cfg: TrainConfig, folder: Folder) -> Calibration:
    """Return the speed between the first train line of the last attempt that ended and its last one, so that what a
    start costs (first allocations, reading ahead) is left out. BadContent for lines that no run writes.
    """
    lines = read_back(folder)
    end = next((line for line in lines if line["kind"] == "summary"), None)
    if end is None:
        raise BadContent("it has no summary: the run has not ended yet, or was killed")
    of_end = takewhile(lambda line: line["attempt"] == end["attempt"], lines)
    trained: list[dict[str, Any]] = []  # the first one and the last one
    for line in of_end:
        if line["kind"] == "train":
            trained = [line, *trained[-1:]]
    if len(trained) < 2:
        raise BadContent(f"its last attempt has {len(trained)} train lines, and a speed needs 2: set log_every lower")
    sequences, seconds, tokens = (increase(trained, name) for name in ("examples", "train_s", "tokens"))
    world = of_type(int, end.get("world_size"), "world_size")
    precision = of_type(str, end.get("precision"), "precision")
    seq_len = cfg.seq_len or round(tokens / sequences)
    if not (1 <= world <= MAX_RANKS and 1 <= seq_len <= MAX_TOKENS):
        raise BadContent(f"{tokens:g} tokens in {sequences:g} sequences on {world} ranks are not those of a run")
    shape = read_shape(folder) or (find_shape(cfg.model) if knows_vocabulary(cfg.model) else None)
    flops = None if shape is None else flops_per_sequence(cfg, shape, seq_len)
    if not flops:
        raise InputError(
            f"calibrate={folder.location}: the size of its model is unknown, so its speed says nothing of others; take "
            "a run with an export, or of a model that is published"
        )
    peak = cfg.instance.peak_flops_per_s(precision)
    flops_per_s = sequences / seconds * flops / world
    return Calibration(
        location=folder.location,
        instance=cfg.instance.name,
        precision=precision,
        world_size=world,
        seq_len=seq_len,
        sequences_per_s=sequences / seconds,
        flops_per_s=flops_per_s,
        mfu=None if peak is None else flops_per_s / peak,
    )


def increase(lines: list[dict[str, Any]], name: str) -> float:
    """Return by how much a number grew from the first line to the last one."""
    first, last = (of_type(float, line.get(name), name) for line in (lines[0], lines[-1]))
    if not 0 <= first < last <= MAX_VALUE:
        raise BadContent(
            f"{name} goes from {shown(first)} to {shown(last)}: the run was rolled back, or no run wrote it"
        )
    return float(last - first)


def flops_per_sequence(cfg: TrainConfig, shape: Shape, seq_len: int) -> float:
    """FLOPs to train on one sequence, as the run's own MFU counts them."""
    labels = len(cfg.data.labels) if isinstance(cfg.data, RecordsConfig) else 0
    head = cfg.task.head_size(seq_len, labels)
    return shape.train_flops(head, seq_len=seq_len, frozen=cfg.model.freeze_layers)
