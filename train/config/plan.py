"""The plan of a run: its batch sizes and its length in steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from train.config.backend import XLAConfig
from train.config.checks import check
from train.config.learning import WSD, OptimConfig
from train.config.train import TrainConfig


@dataclass(frozen=True)
class Plan:
    """Batch sizes and step counts, computed from the configuration, the number of ranks and the amount of data."""

    world_size: int
    # groups of ranks that train on different rows: one per rank, or one per pipeline
    replicas: int
    # sequences per optimizer step
    global_batch_size: int
    # sequences per replica and forward pass
    micro_batch_size: int
    # forward passes per replica and optimizer step
    accumulation: int
    # sequences per replica and evaluation batch
    eval_batch_size: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int


def make_plan(
    cfg: TrainConfig,
    *,
    world_size: int,
    rows: int,
    seq_len: int | None,
    cut: Callable[[int, int], int] | None = None,
) -> Plan:
    """Plan a run over `rows` sequences of at most `seq_len` tokens. Raises InputError if this is impossible.

    `cut` returns into how many micro batches a step's sequences per replica are cut, given their number and that of the
    replicas, if neither settings nor memory cut them.
    """
    replicas = cfg.parallel.replicas(world_size)
    # TrainConfig requires one of them
    global_batch = cfg.global_batch_size or (cfg.micro_batch_size or 0) * replicas
    over = ranks_in_words(replicas, world_size)
    micro, accumulation = split(cfg, global_batch, replicas, over, seq_len)
    steps_per_epoch = epoch_steps(rows, global_batch, over)
    total = length(cfg, global_batch, steps_per_epoch)
    warmup = warmup_of(cfg.optim, total)
    eval_batch = min(cfg.eval_batch_size or micro, fitting(cfg, seq_len) or sys.maxsize)
    # neither settings nor memory have cut the batch
    if cut is not None and cfg.micro_batch_size is None and accumulation == 1:
        accumulation = cut(micro, replicas)
        micro //= accumulation
    return Plan(
        world_size,
        replicas,
        global_batch_size=global_batch,
        micro_batch_size=micro,
        accumulation=accumulation,
        eval_batch_size=eval_batch,
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
        warmup_steps=warmup,
    )


def ranks_in_words(replicas: int, world_size: int) -> str:
    """Name in messages what a batch is split over."""
    if replicas == world_size:
        return f"{replicas} ranks"
    return f"{replicas} replicas of {world_size // replicas} ranks"


def epoch_steps(rows: int, global_batch: int, over: str) -> int:
    """Return the steps per epoch. Raises InputError if the data does not fill one."""
    check(
        rows >= global_batch,
        f"the data has {rows} training sequences, fewer than one batch of {global_batch} over {over}; "
        "prepare more text or lower global_batch_size",
    )
    # rows that do not fill a batch are left out, different ones each epoch
    return rows // global_batch


def length(cfg: TrainConfig, global_batch: int, steps_per_epoch: int) -> int:
    """Return the steps of the run: the fewest that a limit allows. Raises InputError if there is not one."""
    limits = []
    if cfg.max_steps is not None:
        limits.append(cfg.max_steps)
    if cfg.max_examples is not None:
        limits.append(cfg.max_examples // global_batch)
    if cfg.max_epochs is not None:
        # Rounded first: 1.15 * 100 is 114.99999999999999.
        limits.append(int(round(cfg.max_epochs * steps_per_epoch, 6)))
    total = min(limits)
    check(
        total > 0,
        f"the run is shorter than one step of {global_batch} sequences; raise max_examples or max_epochs",
    )
    return total


def warmup_of(optim: OptimConfig, total: int) -> int:
    """Return the steps of the warm-up. Raises InputError if it does not end before the decay begins."""
    if optim.warmup_steps is not None:
        warmup = optim.warmup_steps
    else:
        warmup = round(total * optim.warmup_fraction)
    check(
        warmup <= total,
        f"optim.warmup_steps={warmup} is longer than the run of {total} steps; lower it, or use optim.warmup_fraction",
    )
    begin = optim.decay_begin(total)
    check(
        optim.schedule != WSD or warmup <= begin,
        f"optim.warmup_steps={warmup} lasts beyond step {begin} of {total}, where the decay of wsd begins; lower it "
        "or optim.decay_fraction",
    )
    return warmup


def split(
    cfg: TrainConfig, global_batch: int, replicas: int, over: str, seq_len: int | None
) -> tuple[int, int]:
    """Return the micro batch size and the micro batches per step. Raises InputError if the batch cannot be split."""
    check(
        global_batch % replicas == 0,
        f"global_batch_size={global_batch} cannot be split evenly over {over}",
    )
    share = global_batch // replicas
    micro = micro_batch(cfg, share, seq_len)
    check(
        share % micro == 0,
        f"global_batch_size={global_batch} is not a multiple of micro_batch_size={micro} x {over}",
    )
    per_graph = 1
    if isinstance(cfg.backend, XLAConfig):
        per_graph = cfg.backend.batches_per_execution
    accumulation = share // micro
    check(
        accumulation % per_graph == 0,
        f"backend.batches_per_execution={per_graph} does not divide the {accumulation} micro batches per rank and step",
    )
    return micro, accumulation


def micro_batch(cfg: TrainConfig, share: int, seq_len: int | None) -> int:
    """Return the number of sequences per replica and forward pass; `share` is the number per replica and step."""
    micro = cfg.micro_batch_size or share
    fits = fitting(cfg, seq_len)
    cuts = cfg.parallel.cuts
    if fits is not None:
        sizes = range(min(micro, fits * cuts, share), 0, -1)
        micro = next((size for size in sizes if share % size == 0 and size % cuts == 0), micro)
    check(
        micro % cuts == 0,
        f"micro_batch_size={micro} is not a multiple of parallel.micro_batches={cuts}, the number of its parts",
    )
    return micro


def fitting(cfg: TrainConfig, seq_len: int | None) -> int | None:
    """Return the largest batch, in sequences, that this instance allows; None if there is no limit."""
    tokens = cfg.instance.micro_batch_tokens
    if tokens is None:
        return None
    return max(1, tokens // (seq_len or 1))
