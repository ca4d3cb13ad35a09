"""The estimated duration and cost of a run on 1 to 16 machines, with the assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.speed import Calibration, flops_per_sequence, precision_of, speed
from train.config import InputError, InstanceConfig, ShardsConfig, TrainConfig, make_plan
from train.config.parallel import Held
from train.data.shards.format import DataManifest
from train.data.shards.order import WINDOW_SHARDS, ShardSampler, lanes_of, window_of_lane
from train.models.memory_estimate import GIB, advice, memory_of
from train.models.model_sizes import Shape, check_layers, find_shape, knows_vocabulary
from train.system.launched import Launched, check_launch

MANY_ROWS = 2**50  # used for data of unknown size: more sequences than any run reads
COUNTS = (1, 2, 4, 8, 16)
NETWORK_HOP_S = 50e-6  # assumed time per message between two machines, including software
DEVICE_HOP_S = 10e-6  # assumed time per message between two devices of a machine


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
    compute_s: float | None = None  # seconds per step
    allreduce_s: float | None = None  # seconds per step
    step_s: float | None = None
    sequences_per_s: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None
    usd_on_demand: float | None = None
    usd_spot: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Estimate:
    rows: tuple[ClusterSize, ...]
    assumptions: tuple[str, ...]


def estimate(
    cfg: TrainConfig,
    *,
    nodes: int,
    processes_per_node: int,
    seq_len: int,
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
    shape, processes = find_shape(cfg.model, vocab_size=vocab_size), processes_per_node
    flops, sent = (None, 0) if shape is None else (flops_per_sequence(cfg, shape, seq_len), gradient_bytes(cfg, shape))
    table = [planned(cfg, each, processes, rows=rows, seq_len=seq_len) for each in sorted({*counts, nodes})]
    at = next(each for each in table if each.nodes == nodes)
    if flops is None:
        name = cfg.model.init_from or cfg.model.pretrained or cfg.model.architecture
        notes = [f"the time is not estimated: no formula for {name} and task={cfg.task.kind}", speed_note]
    else:
        notes = [f"{flops / 1e9:,.4g} GFLOP to train on a sequence of {seq_len} tokens", speed_note]
        if flops_per_s is not None:
            notes += notes_of_network(cfg, sent, processes)
            table = [timed(each, cfg.instance, flops / flops_per_s, sent, seq_len) for each in table]
    if shape is not None:
        notes += notes_of_memory(cfg, shape, at, seq_len)
        if not knows_vocabulary(cfg.model, vocab_size=vocab_size):
            notes.append(f"a vocabulary of {shape.vocab_size:,} tokens, the default of {shape.model_type}, is assumed")
    if rows is None and cfg.max_epochs is not None:
        notes.append(f"max_epochs={cfg.max_epochs:g} is ignored: the size of the data is unknown")
    notes += [*notes_of_price(cfg.instance), "hours count only steps, not starts, compilation, evaluations or saves"]
    return Estimate(tuple(table), tuple(notes))


def planned(cfg: TrainConfig, nodes: int, processes: int, *, rows: int | None, seq_len: int) -> ClusterSize:
    """Return the batch sizes and steps for one number of machines."""
    world = nodes * processes
    try:
        check_launch(cfg.instance, Launched(world_size=world, local_world_size=processes, is_distributed=True))
        cfg.parallel.check_goes_with(replace(cfg.backend, precision=precision_of(cfg)))
        check_layers(cfg)
        plan = make_plan(cfg, world_size=world, rows=MANY_ROWS if rows is None else rows, seq_len=seq_len)
    except InputError as error:
        return ClusterSize(nodes, world, reason=str(error))
    is_open = rows is None and cfg.max_steps is cfg.max_examples is None  # the run lasts for epochs of unknown size
    sizes = plan.global_batch_size, plan.micro_batch_size, plan.accumulation
    return ClusterSize(nodes, world, plan.replicas, *sizes, None if is_open else plan.total_steps)


def timed(
    row: ClusterSize, instance: InstanceConfig, sequence_s: float, gradient_bytes: int, seq_len: int
) -> ClusterSize:
    """Return the row with times and prices. `sequence_s` is the time that one rank needs for one sequence."""
    if row.global_batch_size is None:
        return row
    compute_s = sequence_s * row.global_batch_size / row.world_size
    allreduce_s = all_reduce_s(
        gradient_bytes, instance, nodes=row.nodes, processes_per_node=row.world_size // row.nodes
    )
    step_s = compute_s + (allreduce_s or 0.0)
    hours = None if row.steps is None else row.steps * step_s / 3600
    prices = instance.usd_per_hour, instance.usd_per_hour_spot
    on_demand, spot = (None if hours is None or usd is None else hours * row.nodes * usd for usd in prices)
    return replace(
        row,
        compute_s=compute_s,
        allreduce_s=allreduce_s,
        step_s=step_s,
        sequences_per_s=row.global_batch_size / step_s,
        tokens_per_s=row.global_batch_size * seq_len / step_s,
        hours=hours,
        usd_on_demand=on_demand,
        usd_spot=spot,
    )


# ---- communication ---------------------------------------------------------------------------------------------------


def gradient_bytes(cfg: TrainConfig, shape: Shape) -> int:
    """Return the size in bytes of a rank's gradients, which are all-reduced once per step."""
    trained = shape.trained_parameters(
        cfg.task.head_size(1), freeze_embeddings=cfg.model.freeze_embeddings, freeze_layers=cfg.model.freeze_layers
    )
    is_half = cfg.backend.grad_compression == "bf16" or cfg.backend.precision == "bf16_stochastic"
    return trained * (2 if is_half else 4)


def all_reduce_s(num_bytes: float, instance: InstanceConfig, *, nodes: int, processes_per_node: int) -> float | None:
    """Return the seconds that a ring all-reduce takes, first among the devices of each machine, then among machines.

    A ring of n members needs 2 (n - 1) messages in sequence, and sends 2 (n - 1) / n of the bytes over each link.
    Between machines, all network cards work in parallel. Links of unknown bandwidth are not counted. The result is None
    if several ranks communicate and no bandwidth is known.
    """
    inside, between = instance.device_link_gbyte_per_s, instance.network_gbit_per_s
    rings = [(processes_per_node, inside and inside * 1e9, DEVICE_HOP_S)]
    rings += [(nodes, between and between * 1e9 / 8, NETWORK_HOP_S)]
    known = [(members, rate, hop_s) for members, rate, hop_s in rings if members > 1 and rate is not None]
    if not known and nodes * processes_per_node > 1:
        return None
    return sum(2 * (n - 1) * (num_bytes / n / rate + hop_s) for n, rate, hop_s in known)


# ---- assumptions -----------------------------------------------------------------------------------------------------


def notes_of_network(cfg: TrainConfig, num_bytes: int, processes: int) -> list[str]:
    inside, between = cfg.instance.device_link_gbyte_per_s, cfg.instance.network_gbit_per_s
    known = [f"{inside:g} GB/s and {DEVICE_HOP_S * 1e6:g} µs per message inside a machine"] if inside else []
    known += [f"{between:g} Gbit/s and {NETWORK_HOP_S * 1e6:g} µs between machines"] if between else []
    unknown = ["inside a machine"] if inside is None and processes > 1 else []
    unknown += ["between machines"] if between is None else []
    what = f"a ring all-reduce of {num_bytes / 1e6:,.4g} MB per step, which does not overlap with the backward pass"
    notes = ["; ".join([what, *known])]
    if cfg.parallel.held(2) != Held():
        notes.append("weights that ranks send to one another, because each holds only a shard, are not counted")
    if known:
        # For AWS's run in this note, the estimate is 53,000 sequences/s; AWS reports 25,853 (Neuron SDK 2.20).
        notes.append(
            "bandwidths are from data sheets, and the weight update is not counted: with few micro batches per step, a "
            "run on many machines takes longer (twice as long for AWS's BERT-large on 16 trn1.32xlarge, batch 16,384)"
        )
    name = cfg.instance.name
    return [*notes, *(f"the all-reduce {each} is not counted: the bandwidth of {name} is unknown" for each in unknown)]


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
    return [f"{needed}: MORE than the device's {device_gib:g}; {advice(cfg, world_size=at.world_size)}"]


def notes_of_data(cfg: TrainConfig, at: ClusterSize, manifest: DataManifest) -> list[str]:
    """Return notes on how much data each planned machine fetches from S3; [] if some ranks read the same rows."""
    if at.global_batch_size is None or at.replicas != at.world_size or not isinstance(cfg.data, ShardsConfig):
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
    gb = [sum(shards[number].bytes for number in numbers) / 1e9 for numbers in (part, range(len(shards)), first)]
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

HEADER = ["machines", "ranks", "batch", "steps", "step", "all-reduce", "tokens/s", "hours", "on demand", "spot"]
FORMATS = {"steps": "{:,d}", "step_s": "{:.3g} s", "allreduce_s": "{:.2g} s", "tokens_per_s": "{:,.0f}"}
FORMATS |= {"hours": "{:,.3g}", "usd_on_demand": "${:,.2f}", "usd_spot": "${:,.2f}"}


def cells(each: ClusterSize) -> list[str]:
    """Return the cells of a row. If the number of machines is impossible, the third and last cell is the reason."""
    ranks = [str(each.nodes), str(each.world_size)]
    if each.reason is not None:
        return [*ranks, each.reason]
    batch = f"{each.global_batch_size:,} = {each.replicas} x {each.accumulation} x {each.micro_batch_size}"
    figures = [(getattr(each, name), form) for name, form in FORMATS.items()]
    return [*ranks, batch, *("?" if value is None else form.format(value) for value, form in figures)]
