"""The estimated duration and cost of a run: a published speed times the price of the machines, with the assumptions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from train.config import InputError, InstanceConfig, RecordsConfig, TrainConfig, make_plan
from train.machine.launched import Launched, check_launch
from train.models.memory_estimate import state_gib
from train.models.model_sizes import Shape, check_layers, find_shape, knows_vocabulary

MANY_ROWS = 2**50  # used for data of unknown size: more sequences than any run reads
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
# For AWS's runs in this note, the estimate is 59,163 sequences/s, and AWS reports 55,617 (Neuron SDK 2.26, a batch of
# 1,048,576) and 25,853 (Neuron SDK 2.20, a batch of 16,384).
MESSAGES = (
    "messages between ranks are not counted: many machines with few micro batches per step take longer (AWS's "
    "BERT-large on 16 trn1.32xlarge: 1.06 times with a batch of 1,048,576, 2.3 times with one of 16,384)"
)


@dataclass(frozen=True)
class Estimate:
    """The estimate for the planned machines. Unknown values are None."""

    nodes: int
    world_size: int
    replicas: int  # number of groups of ranks that read different rows
    global_batch_size: int
    micro_batch_size: int | None = None
    accumulation: int | None = None
    steps: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None
    usd: float | None = None
    notes: tuple[str, ...] = ()


def estimate(
    cfg: TrainConfig,
    *,
    nodes: int,
    processes_per_node: int,
    seq_len: int | None,
    rows: int | None,
    vocab_size: int | None = None,
) -> Estimate:
    """Estimate a run on `nodes` machines.

    `rows` is the number of training sequences, each of up to `seq_len` tokens. `vocab_size` is the tokenizer's. None
    means unknown. Raises InputError if the machines cannot run this.
    """
    flops_per_s, source = speed(cfg)
    shape = find_shape(cfg.model, vocab_size=vocab_size)
    expected = planned(cfg, nodes, processes_per_node, rows=rows, seq_len=seq_len)
    notes = [source]
    if shape is None or seq_len is None:
        notes.append(note_of_open_time(cfg, seq_len))
    else:
        flops = flops_per_sequence(cfg, shape, seq_len)
        notes.append(f"{flops / 1e9:,.4g} GFLOP to train on a sequence of {seq_len} tokens")
        if flops_per_s is not None:
            sequence_s = flops / flops_per_s / (1 - cfg.parallel.bubble)
            expected = timed(expected, cfg.instance, sequence_s, seq_len)
            notes += notes_of_ranks(cfg)
        notes += notes_of_memory(cfg, shape, expected.world_size, processes_per_node)
    if shape is not None and not knows_vocabulary(cfg.model, vocab_size=vocab_size):
        notes.append(
            f"a vocabulary of {shape.vocab_size:,} tokens, the default of {shape.model_type}, is assumed"
        )
    notes += notes_of_data(cfg, rows, seq_len)
    notes += notes_of_price(cfg.instance)
    return replace(expected, notes=tuple(notes))


def planned(
    cfg: TrainConfig, nodes: int, processes: int, *, rows: int | None, seq_len: int | None
) -> Estimate:
    """Return the batch sizes and steps. Raises InputError if the machines cannot run this."""
    world = nodes * processes
    known_rows = MANY_ROWS if rows is None else rows
    try:
        check_launch(
            cfg.instance,
            Launched(world_size=world, local_world_size=processes, is_distributed=True),
        )
        cfg.parallel.check_goes_with(replace(cfg.backend, precision=precision_of(cfg)))
        check_layers(cfg)
        plan = make_plan(cfg, world_size=world, rows=known_rows, seq_len=seq_len)
    except InputError as error:
        raise InputError(f"nodes={nodes}: {error}") from error
    expected = Estimate(nodes, world, plan.replicas, plan.global_batch_size)
    if seq_len is not None or cfg.instance.micro_batch_tokens is None:
        # Otherwise the micro batch depends on the length.
        expected = replace(
            expected, micro_batch_size=plan.micro_batch_size, accumulation=plan.accumulation
        )
    if rows is not None or cfg.max_steps is not None or cfg.max_examples is not None:
        # Otherwise the run lasts for epochs of unknown size.
        expected = replace(expected, steps=plan.total_steps)
    return expected


def timed(
    expected: Estimate, instance: InstanceConfig, sequence_s: float, seq_len: int
) -> Estimate:
    """Return the estimate with times and prices. `sequence_s` is the time that one rank needs for one sequence."""
    batch = expected.global_batch_size
    step_s = sequence_s * batch / expected.world_size
    expected = replace(expected, step_s=step_s, tokens_per_s=batch * seq_len / step_s)
    if expected.steps is None:
        return expected
    hours = expected.steps * step_s / 3600
    expected = replace(expected, hours=hours)
    if instance.usd_per_hour is None:
        return expected
    return replace(expected, usd=hours * expected.nodes * instance.usd_per_hour)


# ---- speed -----------------------------------------------------------------------------------------------------------


def flops_per_sequence(cfg: TrainConfig, shape: Shape, seq_len: int) -> float:
    """Return the number of FLOPs needed to train on one sequence, counted as for a run's MFU."""
    labels = 0
    if isinstance(cfg.data, RecordsConfig):
        labels = len(cfg.data.labels)
    head = cfg.task.head_size(seq_len, labels)
    return shape.train_flops(head, seq_len=seq_len, frozen=cfg.model.freeze_layers)


def precision_of(cfg: TrainConfig) -> str:
    """Return the precision that a run would choose: fp32 on CPUs, and on machines with an unknown device."""
    if cfg.backend.precision != "auto":
        return cfg.backend.precision
    if cfg.instance.device is None:
        return "fp32"
    return "fp16" if cfg.instance.accelerator in WITHOUT_BF16 else "bf16"


def speed(cfg: TrainConfig) -> tuple[float | None, str]:
    """Return the FLOP/s of a rank according to the makers of chips (None if unknown), and the source."""
    instance = cfg.instance
    precision = precision_of(cfg)
    peak = instance.peak_flops_per_s(precision)
    if peak is None or instance.device is None:
        lacks = "the peak" if peak is None else "the accelerator"
        return None, f"no time estimate: {lacks} of instance={instance.name} is unknown"
    chip = instance.accelerator or "this chip"
    found = PUBLISHED.get((chip, precision not in ("fp32", "tf32")))
    nearest = ""
    if found is None:
        name, found = ("Trainium", TRAINIUM) if instance.device == "neuron" else ("A100", A100)
        nearest = f"; this is the {name}'s figure in bf16, since none is published for {chip} in {precision}"
    share, source = found
    note = f"{share:.1%} of the peak of {precision}, measured for BERT-large by {source}{nearest}"
    return peak * share, note


# ---- assumptions -----------------------------------------------------------------------------------------------------


def note_of_open_time(cfg: TrainConfig, seq_len: int | None) -> str:
    if seq_len is None:
        return "the time and the price are open: the length of the sequences is unknown; set seq_len after --"
    name = cfg.model.pretrained or cfg.model.architecture
    return f"the time is not estimated: no formula for {name} and task={cfg.task.kind}"


def notes_of_data(cfg: TrainConfig, rows: int | None, seq_len: int | None) -> list[str]:
    notes = []
    if isinstance(cfg.data, RecordsConfig) and seq_len is not None:
        notes.append(f"each row counts as {seq_len} tokens (seq_len); shorter rows take less time")
    if rows is None and cfg.max_epochs is not None:
        notes.append(f"max_epochs={cfg.max_epochs:g} is ignored: the size of the data is unknown")
    return notes


def notes_of_ranks(cfg: TrainConfig) -> list[str]:
    """Return notes on the time in which ranks wait for one another."""
    bubble = cfg.parallel.bubble
    if bubble:
        waits = f"ranks wait {bubble:.1%} of the time for other stages of the pipeline"
        return [waits, MESSAGES]
    return [MESSAGES]


def notes_of_memory(
    cfg: TrainConfig, shape: Shape, world_size: int, ranks_per_machine: int
) -> list[str]:
    """Return a note on how much memory the model state of a rank takes, and whether its device has that much."""
    needed_gib = state_gib(
        cfg,
        shape,
        world_size=world_size,
        ranks_per_machine=ranks_per_machine,
        precision=precision_of(cfg),
    )
    note = f"weights, gradients and moments take {needed_gib:.3g} GiB of memory per rank"
    device_gib = cfg.instance.device_memory_gib
    if device_gib is None:
        return [note]
    if needed_gib <= device_gib:
        return [f"{note}, of the device's {device_gib:g}; activations are not counted"]
    return [f"{note}: MORE than the device's {device_gib:g}; use {cfg.parallel.frees}"]


def notes_of_price(instance: InstanceConfig) -> list[str]:
    note = f"the price of a {instance.name} is unknown"
    if instance.usd_per_hour is not None:
        note = f"a {instance.name} costs ${instance.usd_per_hour:,.2f} an hour (instance.usd_per_hour)"
    return [note, "hours count only steps, not starts, compilation, evaluations or saves"]


# ---- as text ---------------------------------------------------------------------------------------------------------

FORMATS = {
    "steps": "{:,d}",
    "step_s": "{:.3g} s",
    "tokens_per_s": "{:,.0f}",
    "hours": "{:,.3g}",
    "usd": "${:,.2f}",
}


def figures(expected: Estimate) -> dict[str, str]:
    """Return the known figures as texts, by name."""
    batch = f"{expected.global_batch_size:,}"
    if expected.micro_batch_size is not None:
        batch += f" = {expected.replicas} x {expected.accumulation} x {expected.micro_batch_size}"
    shown = {"batch": batch}
    for name, form in FORMATS.items():
        value = getattr(expected, name)
        if value is not None:
            shown[name] = form.format(value)
    return shown
