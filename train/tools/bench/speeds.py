"""The figures of a measurement: speeds, MFU, waits and memory. This module does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from train.config import plural

GIB = 2**30


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


def speeds(windows: Sequence[TimedSteps], *, peak: Peak) -> dict[str, Any]:
    """Return the speeds of all ranks together. The MFU is None if the model's FLOPs are unknown."""
    wall_s = sum(each.wall_s for each in windows)
    flops_per_s = sum(each.flops for each in windows) / wall_s or None
    tokens = sum(each.tokens for each in windows)
    return {
        "step_s": spread([each.wall_s / each.steps for each in windows]),
        "tokens_per_s": spread([each.tokens / each.wall_s for each in windows]),
        "padding_share": 1 - tokens / sum(each.slots for each in windows),
        "mfu": flops_per_s and flops_per_s / peak.flops_per_s,
        "flops_per_s": flops_per_s,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "data_wait_share": sum(each.wait_s for each in windows) / wall_s,
        "compile_s_in_timed_steps": sum(each.compile_s for each in windows),
        "timed_s": wall_s,
        "timed_tokens": tokens,
    }


def table(result: dict[str, Any]) -> str:
    threads = plural(result["threads"], "thread")
    parts = f"{result['micro_batch_size']} x {result['accumulation']} x {result['replicas']}"
    rows = {
        "device": f"{result['backend']} on {result['device']}, {result['precision']}, "
        f"{plural(result['world_size'], 'rank')} of {threads}, instance={result['instance']}",
        "batch": f"{result['global_batch_size']} sequences per step = {parts} (micro batch, accumulation, replicas)",
        "s/step": spread_text(result["step_s"], ".4g"),
        "tokens/s": f"{spread_text(result['tokens_per_s'], ',.0f')}, excluding {result['padding_share']:.1%} padding",
        "MFU": "unknown: no formula for the FLOPs of this model",
        "data wait": f"{result['data_wait_share']:.1%} of the time",
        "compiling": f"{result['compile_s']:.1f} s, {result['graphs']} graphs",
        "memory": f"{result['peak_process_bytes'] / GIB:.2f} GiB of host memory in the largest rank",
    }
    if result["mfu"] is not None:
        peak = f"{result['peak_flops_per_s'] / 1e12:.3g} TFLOP/s ({result['peak_source']})"
        rows["MFU"] = f"{result['mfu']:.1%} of {peak}"
    late_s = result["compile_s_in_timed_steps"]
    if late_s:
        rows["compiling"] += f"; {late_s:.1f} s in timed steps, not counted: raise warmup"
    if result["peak_device_bytes"] is not None:
        rows["memory"] += f", {result['peak_device_bytes'] / GIB:.2f} GiB of device memory"
    return "\n".join(f"{head:11}{text}" for head, text in rows.items())


def spread_text(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['least']:{form}} to {values['most']:{form}})"
