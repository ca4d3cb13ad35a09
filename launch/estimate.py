"""The estimated duration and cost of a run on 1 to 16 machines, with the assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.speed import Calibration, flops_per_sequence, precision_of, speed
from train.config import (
    InputError,
    InstanceConfig,
    RecordsConfig,
    ShardsConfig,
    TrainConfig,
    check,
    make_plan,
)
from train.data.shards.format import DataManifest
from train.data.shards.order import WINDOW_SHARDS, ShardSampler, lanes_of, window_of_lane
from train.machine.launched import Launched, check_launch
from train.models.memory_estimate import GIB, advice, memory_of
from train.models.model_sizes import Shape, check_layers, find_shape, knows_vocabulary

MANY_ROWS = 2**50  # used for data of unknown size: more sequences than any run reads
COUNTS = (1, 2, 4, 8, 16)


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
    flops_per_s, speed_note = speed(cfg, calibration)
    shape = find_shape(cfg.model, vocab_size=vocab_size)
    numbers = sorted({*counts, nodes})
    table = [
        planned(cfg, each, processes_per_node, rows=rows, seq_len=seq_len) for each in numbers
    ]
    at = next(each for each in table if each.nodes == nodes)
    notes = [speed_note]
    if seq_len is None:
        notes.append(
            "the time and the price are open: the length of the sequences is unknown; set seq_len after --"
        )
    elif shape is None:
        name = cfg.model.init_from or cfg.model.pretrained or cfg.model.architecture
        notes.append(f"the time is not estimated: no formula for {name} and task={cfg.task.kind}")
    else:
        flops = flops_per_sequence(cfg, shape, seq_len)
        notes = [
            f"{flops / 1e9:,.4g} GFLOP to train on a sequence of {seq_len} tokens",
            speed_note,
        ]
        if isinstance(cfg.data, RecordsConfig):
            notes.append(
                f"each row counts as {seq_len} tokens (seq_len); shorter rows take less time"
            )
        if flops_per_s is not None:
            notes += notes_of_ranks(cfg)
            rank_flops_per_s = flops_per_s * (1 - cfg.parallel.bubble)
            table = [
                timed(each, cfg.instance, flops / rank_flops_per_s, seq_len) for each in table
            ]
        notes += notes_of_memory(cfg, shape, at, seq_len)
    if shape is not None and not knows_vocabulary(cfg.model, vocab_size=vocab_size):
        notes.append(
            f"a vocabulary of {shape.vocab_size:,} tokens, the default of {shape.model_type}, is assumed"
        )
    if rows is None and cfg.max_epochs is not None:
        notes.append(f"max_epochs={cfg.max_epochs:g} is ignored: the size of the data is unknown")
    notes += [
        *notes_of_price(cfg.instance),
        "hours count only steps, not starts, compilation, evaluations or saves",
    ]
    return Estimate(tuple(table), tuple(notes))


def planned(
    cfg: TrainConfig, nodes: int, processes: int, *, rows: int | None, seq_len: int | None
) -> ClusterSize:
    """Return the batch sizes and steps for one number of machines."""
    world = nodes * processes
    try:
        check_launch(
            cfg.instance,
            Launched(world_size=world, local_world_size=processes, is_distributed=True),
        )
        cfg.parallel.check_goes_with(replace(cfg.backend, precision=precision_of(cfg)))
        check_layers(cfg)
        plan = make_plan(
            cfg, world_size=world, rows=MANY_ROWS if rows is None else rows, seq_len=seq_len
        )
    except InputError as error:
        return ClusterSize(nodes, world, reason=str(error))
    # the run lasts for epochs of unknown size
    is_open = rows is None and cfg.max_steps is cfg.max_examples is None
    row = ClusterSize(nodes, world, plan.replicas, plan.global_batch_size)
    # else the micro batch depends on the length
    if seq_len is not None or cfg.instance.micro_batch_tokens is None:
        row = replace(row, micro_batch_size=plan.micro_batch_size, accumulation=plan.accumulation)
    return replace(row, steps=None if is_open else plan.total_steps)


def timed(
    row: ClusterSize, instance: InstanceConfig, sequence_s: float, seq_len: int
) -> ClusterSize:
    """Return the row with times and prices. `sequence_s` is the time that one rank needs for one sequence."""
    if row.global_batch_size is None:
        return row
    step_s = sequence_s * row.global_batch_size / row.world_size
    hours = None if row.steps is None else row.steps * step_s / 3600
    prices = instance.usd_per_hour, instance.usd_per_hour_spot
    on_demand, spot = (
        None if hours is None or usd is None else hours * row.nodes * usd for usd in prices
    )
    return replace(
        row,
        step_s=step_s,
        tokens_per_s=row.global_batch_size * seq_len / step_s,
        hours=hours,
        usd_on_demand=on_demand,
        usd_spot=spot,
    )


# ---- assumptions -----------------------------------------------------------------------------------------------------


def notes_of_ranks(cfg: TrainConfig) -> list[str]:
    """Return notes on the time in which ranks wait for one another."""
    # For AWS's runs in this note, the estimate is 59,163 sequences/s, and AWS reports 55,617 (Neuron SDK 2.26, a batch
    # of 1,048,576) and 25,853 (Neuron SDK 2.20, a batch of 16,384).
    bubble = cfg.parallel.bubble
    waits = (
        [f"ranks wait {bubble:.1%} of the time for other stages of the pipeline"] if bubble else []
    )
    text = "messages between ranks are not counted: many machines with few micro batches per step take longer (AWS's "
    text += "BERT-large on 16 trn1.32xlarge: 1.06 times with a batch of 1,048,576, 2.3 times with one of 16,384)"
    return [*waits, text]


def notes_of_memory(cfg: TrainConfig, shape: Shape, at: ClusterSize, seq_len: int) -> list[str]:
    """Return a note on how much memory a rank of the planned machines needs, and whether its device has that much."""
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
    return [
        f"{needed}: MORE than the device's {device_gib:g}; {advice(cfg, world_size=at.world_size)}"
    ]


def notes_of_data(cfg: TrainConfig, at: ClusterSize, manifest: DataManifest) -> list[str]:
    """Return notes on how much data each planned machine fetches from S3; [] if some ranks read the same rows."""
    if (
        at.global_batch_size is None
        or at.replicas != at.world_size
        or not isinstance(cfg.data, ShardsConfig)
    ):
        return []
    shards, ranks = manifest.splits["train"], at.world_size // at.nodes
    machines = [range(first, first + ranks) for first in range(0, at.world_size, ranks)]
    lanes = lanes_of(at.global_batch_size, min(len(shards), WINDOW_SHARDS))
    order = ShardSampler(
        [shard.rows for shard in shards],
        seed=cfg.seed,
        global_batch_size=at.global_batch_size,
        rank=0,
        world_size=at.world_size,
        machine_ranks=machines[0],
        lanes=lanes,
        window_shards=window_of_lane(WINDOW_SHARDS, lanes),
    )
    part, first = order.lanes.shards_of(order.lanes_here), {*order.upcoming_shards()[0].tolist()}
    gb = [
        sum(shards[number].bytes for number in numbers) / 1e9
        for numbers in (part, range(len(shards)), first)
    ]
    note = f"each machine fetches about {gb[0]:.3g} of {gb[1]:.3g} GB of training data, {gb[2]:.3g} GB of it before "
    note += "its first step"
    more = order.fetched_more(machines)
    return [note] if more is None else [note, more]


def notes_of_price(instance: InstanceConfig) -> list[str]:
    prices = {"on demand": instance.usd_per_hour, "on spot": instance.usd_per_hour_spot}
    known = [f"${usd:,.2f} an hour {market}" for market, usd in prices.items() if usd is not None]
    unknown = [market for market, usd in prices.items() if usd is None]
    date = f", as of {instance.price_date}" if instance.price_date else ""
    notes = [f"a {instance.name} costs {' and '.join(known)}{date}"] if known else []
    return [*notes, *([f"the price {' and '.join(unknown)} is unknown"] if unknown else [])]


# ---- as text ---------------------------------------------------------------------------------------------------------

HEADER = ["machines", "ranks", "batch", "steps", "step", "tokens/s", "hours", "on demand", "spot"]
FORMATS = {"steps": "{:,d}", "step_s": "{:.3g} s", "tokens_per_s": "{:,.0f}"}
FORMATS |= {"hours": "{:,.3g}", "usd_on_demand": "${:,.2f}", "usd_spot": "${:,.2f}"}


def cells(each: ClusterSize) -> list[str]:
    """Return the cells of a row. If the number of machines is impossible, the third and last cell is the reason."""
    ranks = [str(each.nodes), str(each.world_size)]
    if each.reason is not None:
        return [*ranks, each.reason]
    batch = f"{each.global_batch_size:,}"
    if each.micro_batch_size is not None:
        batch += f" = {each.replicas} x {each.accumulation} x {each.micro_batch_size}"
    figures = [(getattr(each, name), form) for name, form in FORMATS.items()]
    return [
        *ranks,
        batch,
        *("?" if value is None else form.format(value) for value, form in figures),
    ]
