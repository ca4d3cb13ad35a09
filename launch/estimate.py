"""The estimated duration and cost of a run on 1 to 16 machines: speed times price, with the assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.speed import Calibration, flops_per_sequence, precision_of, speed
from train.config import (
    InputError,
    InstanceConfig,
    RecordsConfig,
    TrainConfig,
    check,
    make_plan,
)
from train.machine.launched import Launched, check_launch
from train.models.memory_estimate import state_gib
from train.models.model_sizes import Shape, check_layers, find_shape, knows_vocabulary

MANY_ROWS = 2**50  # used for data of unknown size: more sequences than any run reads
COUNTS = (1, 2, 4, 8, 16)
# For AWS's runs in this note, the estimate is 59,163 sequences/s, and AWS reports 55,617 (Neuron SDK 2.26, a batch of
# 1,048,576) and 25,853 (Neuron SDK 2.20, a batch of 16,384).
MESSAGES = (
    "messages between ranks are not counted: many machines with few micro batches per step take longer (AWS's "
    "BERT-large on 16 trn1.32xlarge: 1.06 times with a batch of 1,048,576, 2.3 times with one of 16,384)"
)


@dataclass(frozen=True)
class ClusterSize:
    """The estimate for one number of machines. Unknown values are None; `reason` says why this number is impossible."""

    nodes: int
    world_size: int
    replicas: int | None = None  # number of groups of ranks that read different rows
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    steps: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None
    usd_on_demand: float | None = None
    usd_spot: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Estimate:
    rows: tuple[ClusterSize, ...]
    assumptions: tuple[str, ...]

    def at(self, nodes: int) -> ClusterSize:
        """Return the row of this number of machines. Raises InputError if they cannot run this."""
        row = next(each for each in self.rows if each.nodes == nodes)
        check(row.reason is None, f"nodes={nodes}: {row.reason}")
        return row


def estimate(
    cfg: TrainConfig,
    *,
    nodes: int,
    processes_per_node: int,
    seq_len: int | None,
    rows: int | None,
    calibration: Calibration | None,
    counts: Sequence[int] = COUNTS,
    vocab_size: int | None = None,
) -> Estimate:
    """Estimate a run on `nodes` machines, and on each number of machines in `counts`.

    `rows` is the number of training sequences, each of up to `seq_len` tokens. `vocab_size` is the tokenizer's. None
    means unknown. Raises InputError if the calibration cannot be applied to these machines.
    """
    flops_per_s, source = speed(cfg, calibration)
    shape = find_shape(cfg.model, vocab_size=vocab_size)
    table = [
        planned(cfg, each, processes_per_node, rows=rows, seq_len=seq_len)
        for each in sorted({*counts, nodes})
    ]
    notes = [source]
    if shape is None or seq_len is None:
        notes.append(note_of_open_time(cfg, seq_len))
    else:
        flops = flops_per_sequence(cfg, shape, seq_len)
        notes.append(f"{flops / 1e9:,.4g} GFLOP to train on a sequence of {seq_len} tokens")
        if flops_per_s is not None:
            sequence_s = flops / flops_per_s / (1 - cfg.parallel.bubble)
            table = [timed(each, cfg.instance, sequence_s, seq_len) for each in table]
            notes += notes_of_ranks(cfg)
        at = next(each for each in table if each.nodes == nodes)
        notes += notes_of_memory(cfg, shape, at.world_size)
    if shape is not None and not knows_vocabulary(cfg.model, vocab_size=vocab_size):
        notes.append(
            f"a vocabulary of {shape.vocab_size:,} tokens, the default of {shape.model_type}, is assumed"
        )
    notes += notes_of_data(cfg, rows, seq_len)
    notes += notes_of_price(cfg.instance)
    return Estimate(tuple(table), tuple(notes))


def planned(
    cfg: TrainConfig, nodes: int, processes: int, *, rows: int | None, seq_len: int | None
) -> ClusterSize:
    """Return the batch sizes and steps for one number of machines."""
    world = nodes * processes
    launch = Launched(world_size=world, local_world_size=processes, is_distributed=True)
    known_rows = MANY_ROWS if rows is None else rows
    try:
        check_launch(cfg.instance, launch)
        cfg.parallel.check_goes_with(replace(cfg.backend, precision=precision_of(cfg)))
        check_layers(cfg)
        plan = make_plan(cfg, world_size=world, rows=known_rows, seq_len=seq_len)
    except InputError as error:
        return ClusterSize(nodes, world, reason=str(error))
    row = ClusterSize(nodes, world, plan.replicas, plan.global_batch_size)
    if seq_len is not None or cfg.instance.micro_batch_tokens is None:
        # Otherwise the micro batch depends on the length.
        row = replace(row, micro_batch_size=plan.micro_batch_size, accumulation=plan.accumulation)
    if rows is not None or cfg.max_steps is not None or cfg.max_examples is not None:
        # Otherwise the run lasts for epochs of unknown size.
        row = replace(row, steps=plan.total_steps)
    return row


def timed(
    row: ClusterSize, instance: InstanceConfig, sequence_s: float, seq_len: int
) -> ClusterSize:
    """Return the row with times and prices. `sequence_s` is the time that one rank needs for one sequence."""
    if row.global_batch_size is None:
        return row
    step_s = sequence_s * row.global_batch_size / row.world_size
    row = replace(row, step_s=step_s, tokens_per_s=row.global_batch_size * seq_len / step_s)
    if row.steps is None:
        return row
    hours = row.steps * step_s / 3600
    return replace(
        row,
        hours=hours,
        usd_on_demand=price(hours * row.nodes, instance.usd_per_hour),
        usd_spot=price(hours * row.nodes, instance.usd_per_hour_spot),
    )


def price(hours: float, usd_per_hour: float | None) -> float | None:
    if usd_per_hour is None:
        return None
    return hours * usd_per_hour


# ---- assumptions -----------------------------------------------------------------------------------------------------


def note_of_open_time(cfg: TrainConfig, seq_len: int | None) -> str:
    if seq_len is None:
        return "the time and the price are open: the length of the sequences is unknown; set seq_len after --"
    name = cfg.model.init_from or cfg.model.pretrained or cfg.model.architecture
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


def notes_of_memory(cfg: TrainConfig, shape: Shape, world_size: int) -> list[str]:
    """Return a note on how much memory the model state of a rank takes, and whether its device has that much."""
    needed_gib = state_gib(cfg, shape, world_size=world_size, precision=precision_of(cfg))
    note = f"weights, gradients and moments take {needed_gib:.3g} GiB of memory per rank"
    device_gib = cfg.instance.device_memory_gib
    if device_gib is None:
        return [note]
    if needed_gib <= device_gib:
        return [f"{note}, of the device's {device_gib:g}; activations are not counted"]
    return [f"{note}: MORE than the device's {device_gib:g}; use {cfg.parallel.frees}"]


def notes_of_price(instance: InstanceConfig) -> list[str]:
    known, unknown = [], []
    prices = {"on demand": instance.usd_per_hour, "on spot": instance.usd_per_hour_spot}
    for market, usd in prices.items():
        if usd is None:
            unknown.append(market)
        else:
            known.append(f"${usd:,.2f} an hour {market}")
    notes = []
    if known:
        if instance.price_date:
            date = f", as of {instance.price_date}"
        else:
            date = ""
        notes.append(f"a {instance.name} costs {' and '.join(known)}{date}")
    if unknown:
        notes.append(f"the price {' and '.join(unknown)} is unknown")
    return [*notes, "hours count only steps, not starts, compilation, evaluations or saves"]


# ---- as text ---------------------------------------------------------------------------------------------------------

HEADER = ["machines", "ranks", "batch", "steps", "step", "tokens/s", "hours", "on demand", "spot"]
FORMATS = {
    "steps": "{:,d}",
    "step_s": "{:.3g} s",
    "tokens_per_s": "{:,.0f}",
    "hours": "{:,.3g}",
    "usd_on_demand": "${:,.2f}",
    "usd_spot": "${:,.2f}",
}


def cells(each: ClusterSize) -> list[str]:
    """Return the cells of a row. If the number of machines is impossible, the third and last cell is the reason."""
    ranks = [str(each.nodes), str(each.world_size)]
    if each.reason is not None:
        return [*ranks, each.reason]
    batch = f"{each.global_batch_size:,}"
    if each.micro_batch_size is not None:
        batch += f" = {each.replicas} x {each.accumulation} x {each.micro_batch_size}"
    figures = []
    for name, form in FORMATS.items():
        value = getattr(each, name)
        figures.append("?" if value is None else form.format(value))
    return [*ranks, batch, *figures]
