"""How long a run takes and what it costs, on 1 to 16 machines, before anything starts. Assumptions are part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.arithmetic import (
    DEVICE_HOP_S,
    NETWORK_HOP_S,
    all_reduce_s,
    flops_per_sequence,
    gradient_bytes,
    precision_of,
)
from launch.calibration import Calibration
from train.config import InputError, InstanceConfig, TrainConfig, check, make_plan
from train.config.parallel import Held
from train.host.launched import Launched, check_launch
from train.models.memory import GIB, advice, memory_of
from train.models.model_sizes import Shape, check_layers, find_shape, knows_vocabulary

MANY_ROWS = 2**50  # more than any run reads: with them the data is no limit
COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Published:
    """A share of the peak that somebody measured, on BERT-large with 128 tokens: 236.8 GFLOP a sequence, by AWS's own
    formula, in which the head is not counted.
    """

    chip: str
    mfu: float
    source: str


TRAINIUM = Published("Trainium", 0.288, "AWS: 3,697.71 sequences/s on a trn1.32xlarge (aws-neuron-sdk, Neuron 2.26)")
TRAINIUM_FP32 = Published(
    "Trainium", 0.63, "AWS: 32,362.7 sequences/s on 16 trn1.32xlarge (aws-neuron-sdk, Neuron 2.28)"
)
A100 = Published("A100", 0.44, "NVIDIA: 580 sequences/s on an A100-80GB (DeepLearningExamples)")
V100 = Published("V100", 0.42, "NVIDIA: 224 sequences/s on a V100-32GB (DeepLearningExamples)")
IN_16_BITS = {figure.chip: figure for figure in (TRAINIUM, A100, V100)}
IN_FP32 = {"Trainium": TRAINIUM_FP32}


@dataclass(frozen=True)
class Row:
    """One number of machines. What is unknown is None; `reason` says why a number of machines is impossible."""

    nodes: int
    world_size: int
    replicas: int | None = None  # groups of ranks that see rows of their own
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    steps: int | None = None
    compute_s: float | None = None  # of a step
    allreduce_s: float | None = None  # of a step
    step_s: float | None = None
    sequences_per_s: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None
    usd_on_demand: float | None = None
    usd_spot: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Estimate:
    rows: tuple[Row, ...]
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """What a run computes and sends, and how fast its ranks compute. Unknown figures are None."""

    flops: float | None  # of a sequence
    gradient_bytes: int
    flops_per_s: float | None  # of a rank


def estimate(
    cfg: TrainConfig,
    *,
    nodes: int,
    processes_per_node: int,
    seq_len: int,
    rows: int | None,
    mfu: float | None,
    calibration: Calibration | None,
    counts: Sequence[int] = COUNTS,
    vocab_size: int | None = None,
) -> Estimate:
    """Estimate a run on `nodes` machines and on others of `counts`. `rows` is the number of training sequences of up to
    `seq_len` tokens, and `vocab_size` that of their tokenizer; None: unknown. InputError for a speed that says nothing
    of these machines.
    """
    rate, speed_note = speed(cfg, mfu, calibration)
    shape = find_shape(cfg.model, vocab_size=vocab_size)
    flops = None if shape is None else flops_per_sequence(cfg, shape, seq_len)
    work = Work(flops, 0 if shape is None else gradient_bytes(cfg, shape), rate)
    numbers = sorted({*counts, nodes})
    table = tuple(row(cfg, each, processes_per_node, seq_len=seq_len, rows=rows, work=work) for each in numbers)
    notes = [*notes_of_work(cfg, work, seq_len), speed_note, *notes_of_network(cfg, work, processes_per_node)]
    at = next(each for each in table if each.nodes == nodes)
    notes += [] if shape is None else notes_of_memory(cfg, shape, at, seq_len)
    if shape is not None and not knows_vocabulary(cfg.model, vocab_size=vocab_size):
        notes.append(f"a vocabulary of {shape.vocab_size:,}, the default of {shape.model_type}")
    if rows is None and cfg.max_epochs is not None:
        notes.append(f"max_epochs={cfg.max_epochs:g} is left out: the size of the data is unknown")
    notes += [*notes_of_price(cfg.instance), "hours of steps alone, without starts, compiling, evaluations and saves"]
    return Estimate(table, tuple(notes))


def row(cfg: TrainConfig, nodes: int, processes: int, *, seq_len: int, rows: int | None, work: Work) -> Row:
    """The estimate for one number of machines."""
    instance, world = cfg.instance, nodes * processes
    try:
        check_launch(instance, Launched(world_size=world, local_world_size=processes, is_distributed=True))
        cfg.parallel.check_goes_with(replace(cfg.backend, precision=precision_of(cfg)))
        check_layers(cfg)
        plan = make_plan(cfg, world_size=world, rows=MANY_ROWS if rows is None else rows, seq_len=seq_len)
    except InputError as error:
        return Row(nodes, world, reason=str(error))
    is_open = rows is None and cfg.max_steps is cfg.max_examples is None  # its length is in passes over unknown data
    steps = None if is_open else plan.total_steps
    sizes = plan.global_batch_size, plan.micro_batch_size, plan.accumulation
    planned = Row(nodes, world, plan.replicas, *sizes, steps)
    if work.flops is None or work.flops_per_s is None:
        return planned
    compute_s = work.flops * plan.global_batch_size / (work.flops_per_s * world)
    allreduce_s = all_reduce_s(work.gradient_bytes, instance, nodes=nodes, processes_per_node=processes)
    step_s = compute_s + (allreduce_s or 0.0)
    hours = None if steps is None else steps * step_s / 3600
    machine_hours = None if hours is None else hours * nodes
    return replace(
        planned,
        compute_s=compute_s,
        allreduce_s=allreduce_s,
        step_s=step_s,
        sequences_per_s=plan.global_batch_size / step_s,
        tokens_per_s=plan.global_batch_size * seq_len / step_s,
        hours=hours,
        usd_on_demand=product(machine_hours, instance.usd_per_hour),
        usd_spot=product(machine_hours, instance.usd_per_hour_spot),
    )


def product(hours: float | None, usd_per_hour: float | None) -> float | None:
    return None if hours is None or usd_per_hour is None else hours * usd_per_hour


# ---- how fast a rank computes --------------------------------------------------------------------------------------


def speed(cfg: TrainConfig, mfu: float | None, calibration: Calibration | None) -> tuple[float | None, str]:
    """FLOP/s of a rank, None if nothing is known of it, and where the figure is from."""
    instance, precision = cfg.instance, precision_of(cfg)
    peak = instance.peak_flops_per_s(precision)
    if mfu is not None:
        check(0 < mfu <= 1, f"mfu={mfu:g} must be a share of the peak, above 0 and at most 1")
        wants = f"mfu={mfu:g}: the peak of instance={instance.name} is unknown; give calibrate=RUN instead"
        check(peak is not None, wants)
        return (peak or 0.0) * mfu, f"{mfu:.1%} of the peak of {precision}, as given"
    if calibration is not None:
        return calibrated(calibration, instance, precision, peak)
    if peak is None or instance.device is None:
        lacks = "the peak" if peak is None else "the accelerator"
        return None, f"no time: {lacks} of instance={instance.name} is unknown; calibrate=RUN takes a finished run's"
    chip, published = instance.accelerator or "this chip", IN_FP32 if precision in ("fp32", "tf32") else IN_16_BITS
    figure = published.get(chip, TRAINIUM if instance.device == "neuron" else A100)
    note = f"{figure.mfu:.1%} of the peak of {precision}, from BERT-large by {figure.source}"
    if chip not in published:
        note += f"; that of the {figure.chip} in bf16, as none is published for {chip} in {precision}"
    return peak * figure.mfu, note


def calibrated(run: Calibration, instance: InstanceConfig, precision: str, peak: float | None) -> tuple[float, str]:
    """The speed of a finished run, by FLOPs. InputError for a run on another machine of which no peak is known."""
    note = f"as fast as {run.location}: {run.flops_per_s / 1e12:.3g} TFLOP/s a rank in {run.precision}"
    note += f", {run.world_size} ranks on {run.instance}"
    note += ", whose all-reduce is in that figure and counts twice" if run.world_size > 1 else ""
    if run.instance == instance.name and (run.mfu is None or run.precision == precision):
        return run.flops_per_s, note
    if run.mfu is None or peak is None:
        raise InputError(
            f"calibrate={run.location} ran on instance={run.instance}, and without the peaks of both its speed says "
            f"nothing of instance={instance.name}; take a run on that, or give mfu"
        )
    return run.mfu * peak, f"{note}; its {run.mfu:.1%} of the peak, here of {instance.name} in {precision}"


# ---- what is assumed -----------------------------------------------------------------------------------------------


def notes_of_work(cfg: TrainConfig, work: Work, seq_len: int) -> list[str]:
    if work.flops is None:
        name = cfg.model.init_from or cfg.model.pretrained or cfg.model.architecture
        return [f"no formula for {name} and task={cfg.task.kind}: no estimate of time"]
    return [f"{work.flops / 1e9:,.4g} GFLOP to train on a sequence, each of {seq_len} tokens"]


def notes_of_network(cfg: TrainConfig, work: Work, processes: int) -> list[str]:
    instance = cfg.instance
    if work.flops is None or work.flops_per_s is None:
        return []
    inside, between = instance.device_link_gbyte_per_s, instance.network_gbit_per_s
    known = [
        *([f"{inside:g} GB/s and {DEVICE_HOP_S * 1e6:g} µs a message inside a machine"] if inside else []),
        *([f"{between:g} Gbit/s and {NETWORK_HOP_S * 1e6:g} µs between machines"] if between else []),
    ]
    notes = [
        f"an all-reduce of {work.gradient_bytes / 1e6:,.4g} MB a step by rings, none of it behind the backward pass"
        + (f"; {', '.join(known)}" if known else "")
    ]
    if cfg.parallel.held(2) != Held():
        notes.append("weights that ranks send each other, because each has its part of a state, are not counted")
    if inside is None and processes > 1:
        notes.append(f"the all-reduce inside a {instance.name} is not counted: its bandwidth is unknown")
    if known:
        # The estimate of that run is 53,000 sequences/s, AWS's figure 25,853 (aws-neuron-sdk, Neuron 2.20).
        notes.append(
            "bandwidths are data sheets', and the update of the weights is not counted: with few micro batches a step, "
            "many machines take longer (twice as long in AWS's BERT-large with batches of 16,384 on 16 trn1.32xlarge)"
        )
    if between is None:
        notes.append(f"the all-reduce between machines is not counted: the network of {instance.name} is unknown")
    return notes


def notes_of_memory(cfg: TrainConfig, shape: Shape, at: Row, seq_len: int) -> list[str]:
    """What a rank of the planned machines holds, and whether its device is large enough."""
    if at.micro_batch_size is None or at.accumulation is None:
        return []
    needed = memory_of(
        cfg,
        shape,
        world_size=at.world_size,
        micro_batch_size=at.micro_batch_size,
        accumulation=at.accumulation,
        seq_len=seq_len,
        precision=precision_of(cfg),
    )
    device_gib = cfg.instance.device_memory_gib
    if device_gib is None:
        return [str(needed)]
    if needed.total <= device_gib * GIB:
        return [f"{needed}, of the device's {device_gib:g}"]
    return [f"{needed}: MORE than the device's {device_gib:g}; {advice(cfg, world_size=at.world_size)}"]


def notes_of_price(instance: InstanceConfig) -> list[str]:
    spot, on_demand = instance.usd_per_hour_spot, instance.usd_per_hour
    known = [
        *([f"${on_demand:,.2f} an hour on demand"] if on_demand else []),
        *([f"${spot:,.2f} on spot"] if spot else []),
    ]
    date = f", as of {instance.price_date}" if instance.price_date else ""
    unknown = [name for name, price in (("on demand", on_demand), ("on spot", spot)) if price is None]
    notes = [f"a {instance.name} for {' and '.join(known)}{date}"] if known else []
    return [*notes, *([f"the price {' and '.join(unknown)} is unknown"] if unknown else [])]


# ---- as text -------------------------------------------------------------------------------------------------------

HEADER = ["machines", "ranks", "batch", "steps", "step", "all-reduce", "tokens/s", "hours", "on demand", "spot"]


def table(result: Estimate) -> list[list[str]]:
    """The rows as text, with a header. A row of an impossible number of machines has the reason in its third cell."""
    return [HEADER, *(cells(each) for each in result.rows)]


def cells(each: Row) -> list[str]:
    first = [str(each.nodes), str(each.world_size)]
    if each.reason is not None:
        return [*first, each.reason]
    batch = f"{each.global_batch_size:,} = {each.replicas} x {each.accumulation} x {each.micro_batch_size}"
    return [
        *first,
        batch,
        shown(each.steps, ",d"),
        shown(each.step_s, ".3g", " s"),
        shown(each.allreduce_s, ".2g", " s"),
        shown(each.tokens_per_s, ",.0f"),
        shown(each.hours, ",.3g"),
        "?" if each.usd_on_demand is None else f"${each.usd_on_demand:,.2f}",
        "?" if each.usd_spot is None else f"${each.usd_spot:,.2f}",
    ]


def shown(value: float | None, form: str, unit: str = "") -> str:
    return "?" if value is None else f"{value:{form}}{unit}"
