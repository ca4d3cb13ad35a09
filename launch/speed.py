"""The speed of a rank, from a published figure or from a finished run, whose files are validated first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from train.config import InputError, RecordsConfig, S3Config, TrainConfig, check
from train.models.model_sizes import Shape, find_shape, knows_vocabulary, read_shape
from train.observe.lines import read_back
from train.run.saved import read_config, whole_config
from train.run_folder.metrics_files import files_of
from train.storage.folders import Folder, open_folder
from train.storage.schema import BadContent, of_type, shown

WITHOUT_BF16 = ("T4",)
# Shares of the peak FLOP/s, from published speeds of BERT-large with 128 tokens. According to AWS's formula, which does
# not count the head, a sequence takes 236.8 GFLOP.
TRAINIUM = (0.288, "AWS: 3,697.71 sequences/s on a trn1.32xlarge (aws-neuron-sdk, Neuron 2.26)")
TRAINIUM_FP32 = (
    0.63,
    "AWS: 32,362.7 sequences/s on 16 trn1.32xlarge (aws-neuron-sdk, Neuron 2.28)",
)
A100 = (0.44, "NVIDIA: 580 sequences/s on an A100-80GB (DeepLearningExamples)")
PUBLISHED = {  # chip, and whether products of matrices are in 16 bits
    ("Trainium", True): TRAINIUM,
    ("Trainium", False): TRAINIUM_FP32,
    ("A100", True): A100,
}


@dataclass(frozen=True)
class Calibration:
    """The measured speed of a run's steps, including the all-reduce and waits for data."""

    location: str
    instance: str
    precision: str
    world_size: int
    flops_per_s: float  # per rank while it does not wait in a pipeline, counting only the model's arithmetic


def read_calibration(location: str, s3: S3Config) -> Calibration:
    """Read the speed of a finished run from its folder, local or in S3. Raises InputError if it has none."""
    folder = open_folder(location, s3)
    check(
        bool(files_of(folder)),
        f"calibrate={location} is not a run folder: metrics.jsonl is missing",
    )
    cfg = read_config(folder)
    try:
        return measured(cfg, folder)
    except BadContent as error:
        raise InputError(
            f"calibrate={location}: its metrics.jsonl has no speed measurement: {error}"
        ) from error


def measured(cfg: TrainConfig, folder: Folder) -> Calibration:
    """Return the speed between the first and the last train line of the last attempt that ended.

    This leaves out the cost of a start (first allocations, reading ahead). Raises BadContent if the lines cannot come
    from a run.
    """
    lines = read_back(folder)
    end = next((line for line in lines if line["kind"] == "summary"), None)
    if end is None:
        raise BadContent("it has no summary: the run has not ended yet, or was killed")
    of_attempt = takewhile(lambda line: line["attempt"] == end["attempt"], lines)
    trained = [line for line in of_attempt if line["kind"] == "train"]  # the newest comes first
    if len(trained) < 2:
        raise BadContent(
            f"its last attempt has {len(trained)} train lines, but 2 are needed: lower log_every"
        )
    first, last = trained[-1], trained[0]
    sequences = increase(first, last, "examples")
    seconds = increase(first, last, "train_s")
    seq_len = cfg.seq_len or round(increase(first, last, "tokens") / sequences)
    world = of_type(int, end.get("world_size"), "world_size")
    shape = read_shape(folder)
    if shape is None and knows_vocabulary(cfg.model):
        shape = find_shape(cfg.model)
    if shape is None:
        raise InputError(
            f"calibrate={folder.location}: the size of its model is unknown, so its speed cannot be applied to other "
            "models; use a run with an export, or a run of a published model"
        )
    flops = sequences * flops_per_sequence(cfg, shape, seq_len)
    bubble = whole_config(folder).parallel.bubble  # not one of the settings that `cfg` has
    return Calibration(
        location=folder.location,
        instance=cfg.instance.name,
        precision=of_type(str, end.get("precision"), "precision"),
        world_size=world,
        flops_per_s=flops / seconds / world / (1 - bubble),
    )


def increase(first: dict[str, Any], last: dict[str, Any], name: str) -> float:
    """Return the increase of a number from one line to another."""
    before = of_type(float, first.get(name), name)
    after = of_type(float, last.get(name), name)
    if not 0 <= before < after:
        raise BadContent(
            f"{name} goes from {shown(before)} to {shown(after)}: the run was rolled back"
        )
    return float(after - before)


def flops_per_sequence(cfg: TrainConfig, shape: Shape, seq_len: int) -> float:
    """Return the number of FLOPs needed to train on one sequence, counted as for a run's MFU."""
    if isinstance(cfg.data, RecordsConfig):
        labels = len(cfg.data.labels)
    else:
        labels = 0
    head = cfg.task.head_size(seq_len, labels)
    return shape.train_flops(head, seq_len=seq_len, frozen=cfg.model.freeze_layers)


def precision_of(cfg: TrainConfig) -> str:
    """Return the precision that a run would choose: fp32 on CPUs, and on machines with an unknown device."""
    if cfg.backend.precision != "auto":
        return cfg.backend.precision
    if cfg.instance.device is None:
        return "fp32"
    return "fp16" if cfg.instance.accelerator in WITHOUT_BF16 else "bf16"


def speed(cfg: TrainConfig, run: Calibration | None) -> tuple[float | None, str]:
    """Return the FLOP/s of a rank (None if unknown) and the source of this figure.

    Raises InputError if `run` used another instance or precision.
    """
    if run is None:
        return published(cfg)
    instance, precision = cfg.instance, precision_of(cfg)
    # The precision that a machine with an unknown device chooses is unknown, too.
    is_alike = run.instance == instance.name and (
        run.precision == precision or instance.device is None
    )
    check(
        is_alike,
        f"calibrate={run.location} ran on instance={run.instance} in {run.precision}, but this run uses "
        f"instance={instance.name} in {precision}; use a run with the same instance and precision",
    )
    note = f"as fast as {run.location}: {run.flops_per_s / 1e12:.3g} TFLOP/s per rank in {run.precision}"
    return run.flops_per_s, f"{note}, {run.world_size} ranks on {run.instance}"


def published(cfg: TrainConfig) -> tuple[float | None, str]:
    """Return the FLOP/s of a rank according to the makers of chips, and the source."""
    instance, precision = cfg.instance, precision_of(cfg)
    peak = instance.peak_flops_per_s(precision)
    if peak is None or instance.device is None:
        lacks = "the peak" if peak is None else "the accelerator"
        note = f"no time estimate: {lacks} of instance={instance.name} is unknown; calibrate=RUN uses RUN's speed"
        return None, note
    chip = instance.accelerator or "this chip"
    found = PUBLISHED.get((chip, precision not in ("fp32", "tf32")))
    nearest = ""
    if found is None:
        name, found = ("Trainium", TRAINIUM) if instance.device == "neuron" else ("A100", A100)
        nearest = f"; this is the {name}'s figure in bf16, since none is published for {chip} in {precision}"
    share, source = found
    note = f"{share:.1%} of the peak of {precision}, measured for BERT-large by {source}{nearest}"
    return peak * share, note
