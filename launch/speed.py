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

WITHOUT_BF16 = ("V100", "T4")
# Shares of the peak FLOP/s, from published speeds of BERT-large with 128 tokens. According to AWS's formula, which does
# not count the head, a sequence takes 236.8 GFLOP.
IN_16_BITS = {
    "Trainium": (
        0.288,
        "AWS: 3,697.71 sequences/s on a trn1.32xlarge (aws-neuron-sdk, Neuron 2.26)",
    ),
    "A100": (0.44, "NVIDIA: 580 sequences/s on an A100-80GB (DeepLearningExamples)"),
    "V100": (0.42, "NVIDIA: 224 sequences/s on a V100-32GB (DeepLearningExamples)"),
}
IN_FP32 = {
    "Trainium": (
        0.63,
        "AWS: 32,362.7 sequences/s on 16 trn1.32xlarge (aws-neuron-sdk, Neuron 2.28)",
    )
}


@dataclass(frozen=True)
class Calibration:
    """The measured speed of a run's steps, including the all-reduce and waits for data."""

    location: str
    instance: str
    precision: str
    world_size: int
    seq_len: int  # tokens
    sequences_per_s: float  # over all ranks
    flops_per_s: float  # per rank while it does not wait in a pipeline, counting only the model's arithmetic
    mfu: float | None  # share of a device's peak; None if the peak is unknown


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
    of_end = takewhile(lambda line: line["attempt"] == end["attempt"], lines)
    trained: list[dict[str, Any]] = []  # the first and the last train line
    for line in of_end:
        if line["kind"] == "train":
            trained = [line, *trained[-1:]]
    if len(trained) < 2:
        raise BadContent(
            f"its last attempt has {len(trained)} train lines, but 2 are needed: lower log_every"
        )
    sequences, seconds, tokens = (
        increase(trained, name) for name in ("examples", "train_s", "tokens")
    )
    world = of_type(int, end.get("world_size"), "world_size")
    precision = of_type(str, end.get("precision"), "precision")
    seq_len = cfg.seq_len or round(tokens / sequences)
    shape = read_shape(folder) or (find_shape(cfg.model) if knows_vocabulary(cfg.model) else None)
    flops = None if shape is None else flops_per_sequence(cfg, shape, seq_len)
    if not flops:
        raise InputError(
            f"calibrate={folder.location}: the size of its model is unknown, so its speed cannot be applied to other "
            "models; use a run with an export, or a run of a published model"
        )
    peak = cfg.instance.peak_flops_per_s(precision)
    bubble = whole_config(
        folder
    ).parallel.bubble  # not one of the settings that apply to the model
    flops_per_s = sequences / seconds * flops / world / (1 - bubble)
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
    """Return the increase of a number from the first line to the last one."""
    first, last = (of_type(float, line.get(name), name) for line in (lines[0], lines[-1]))
    if not 0 <= first < last:
        raise BadContent(
            f"{name} goes from {shown(first)} to {shown(last)}: the run was rolled back"
        )
    return float(last - first)


def flops_per_sequence(cfg: TrainConfig, shape: Shape, seq_len: int) -> float:
    """Return the number of FLOPs needed to train on one sequence, counted as for a run's MFU."""
    labels = len(cfg.data.labels) if isinstance(cfg.data, RecordsConfig) else 0
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

    Raises InputError if the run used another instance, and the peak of one of the two instances is unknown.
    """
    instance, precision = cfg.instance, precision_of(cfg)
    peak = instance.peak_flops_per_s(precision)
    if run is not None:
        note = f"as fast as {run.location}: {run.flops_per_s / 1e12:.3g} TFLOP/s per rank in {run.precision}"
        note += f", {run.world_size} ranks on {run.instance}"
        if run.instance == instance.name and (run.mfu is None or run.precision == precision):
            return run.flops_per_s, note
        if run.mfu is None or peak is None:
            raise InputError(
                f"calibrate={run.location} ran on instance={run.instance}, whose speed cannot be converted to "
                f"instance={instance.name}, since the peak of one of them is unknown; use a run on that instance"
            )
        return (
            run.mfu * peak,
            f"{note}; its {run.mfu:.1%} of the peak is applied to {instance.name} in {precision}",
        )
    if peak is None or instance.device is None:
        lacks = "the peak" if peak is None else "the accelerator"
        return (
            None,
            f"no time estimate: {lacks} of instance={instance.name} is unknown; calibrate=RUN uses RUN's speed",
        )
    chip, published = (
        instance.accelerator or "this chip",
        IN_FP32 if precision in ("fp32", "tf32") else IN_16_BITS,
    )
    nearest = "Trainium" if instance.device == "neuron" else "A100"
    share, source = published.get(chip, IN_16_BITS[nearest])
    note = f"{share:.1%} of the peak of {precision}, measured for BERT-large by {source}"
    if chip not in published:
        note += f"; this is the {nearest}'s figure in bf16, since none is published for {chip} in {precision}"
    return peak * share, note
