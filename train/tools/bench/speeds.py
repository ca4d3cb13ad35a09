"""The figures of a measurement: speeds, MFU, waits, memory and cost. This module does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from train.config import InstanceConfig, plural

GIB = 2**30
FLOPS_SOURCE = "train/models/model_sizes.py: a multiply-add is 2 operations; a backward pass is twice a forward pass"


@dataclass(frozen=True)
class TimedSteps:
    """Figures of consecutive steps of all ranks together."""

    steps: int
    wall_s: float  # seconds since the previous log line, without compilation
    tokens: float  # number of tokens without padding
    slots: float  # number of tokens with padding
    flops: float  # model's floating-point operations; 0 if unknown
    wait_s: float  # mean over the ranks of the seconds spent waiting for data
    compile_s: float = 0.0


@dataclass(frozen=True)
class Peak:
    """The peak operations per second of all ranks' devices together, and the source of this figure."""

    flops_per_s: float
    source: str


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def speeds(windows: Sequence[TimedSteps], *, global_batch_size: int, peak: Peak) -> dict[str, Any]:
    """Return the speeds of all ranks together. The MFU is None if the model's FLOPs are unknown."""
    wall_s, flops = sum(each.wall_s for each in windows), sum(each.flops for each in windows)
    tokens, slots = sum(each.tokens for each in windows), sum(each.slots for each in windows)
    flops_per_s = flops / wall_s or None
    return {
        "step_s": spread([each.wall_s / each.steps for each in windows]),
        "steps_per_s": spread([each.steps / each.wall_s for each in windows]),
        "sequences_per_s": spread(
            [each.steps * global_batch_size / each.wall_s for each in windows]
        ),
        "tokens_per_s": spread([each.tokens / each.wall_s for each in windows]),
        "padding_share": 1 - tokens / slots,
        "mfu": flops_per_s / peak.flops_per_s if flops_per_s else None,
        "flops_per_s": flops_per_s,
        "flops_source": FLOPS_SOURCE,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "data_wait_share": sum(each.wait_s for each in windows) / wall_s,
        "compile_s_in_timed_steps": sum(each.compile_s for each in windows),
        "timed_s": wall_s,
    }


def cost(instance: InstanceConfig, *, machines: int, sequences_per_s: float) -> dict[str, Any]:
    """Return the on-demand price in dollars of the steps for a million sequences; None if unknown."""
    price = instance.usd_per_hour
    usd = None if price is None else price * machines * 1e6 / (3600 * sequences_per_s)
    return {
        "usd_per_million_sequences": usd,
        "usd_per_hour": price,
        "price_date": instance.price_date,
    }


def table(result: dict[str, Any]) -> str:
    def spread_text(key: str, form: str) -> str:
        values = result[key]
        return f"{values['median']:{form}} ({values['least']:{form}} to {values['most']:{form}})"

    ranks = f"{plural(result['world_size'], 'rank')} of {plural(result['threads'], 'thread')}"
    parts = f"{result['micro_batch_size']} x {result['accumulation']} x {result['replicas']}"
    padding, mfu = result["padding_share"], "unknown: no formula for the FLOPs of this model"
    if result["mfu"] is not None:
        mfu = f"{result['mfu']:.1%} of {result['peak_flops_per_s'] / 1e12:.3g} TFLOP/s ({result['peak_source']})"
    compiling, late_s = "nothing was compiled", result["compile_s_in_timed_steps"]
    if result["compile_s"]:
        compiling = f"{result['compile_s']:.1f} s, {result['graphs']} graphs"
    if late_s:
        compiling += (
            f"; {late_s:.1f} s of it in timed steps (left out of the speeds): raise warmup"
        )
    memory = f"{result['peak_process_bytes'] / GIB:.2f} GiB of host memory in the largest rank"
    if result["peak_device_bytes"] is not None:
        memory = f"{result['peak_device_bytes'] / GIB:.2f} GiB of device memory, {memory}"
    usd = result["usd_per_million_sequences"]
    rows = {
        "device": f"{result['backend']} on {result['device']}, {result['precision']}, {ranks}, "
        f"instance={result['instance']}",
        "batch": f"{result['global_batch_size']} sequences per step = {parts} (micro batch, accumulation, replicas)",
        "steps/s": spread_text("steps_per_s", ".4g"),
        "tokens/s": spread_text("tokens_per_s", ",.0f")
        + (f", excluding {padding:.1%} padding" if padding else ""),
        "MFU": mfu,
        "data wait": f"{result['data_wait_share']:.1%} of the time",
        "compiling": compiling,
        "memory": memory,
        "cost": f"unknown: instance={result['instance']} has no price"
        if usd is None
        else f"${usd:,.2f} per million sequences",
    }
    return "\n".join(f"{head:11}{text}" for head, text in rows.items())
