"""How tests make a run folder of a few metrics lines, without a training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BATCH, SEQ_LEN, STEP_S = 32, 64, 0.5
TOKENS_PER_STEP = BATCH * SEQ_LEN
CONFIG = {
    "run_dir": "runs/a",
    "seed": 0,
    "task": {"kind": "mlm"},
    "model": {"architecture": "albert", "num_layers": 2, "hidden_size": 64},
    "optim": {"name": "adamw", "lr": 0.001},
    "instance": {"name": "local", "usd_per_hour": None, "source": "https://example.com/prices"},
}
ENVIRONMENT = {
    "parameters": 123456,
    "plan": {"global_batch_size": BATCH, "total_steps": 40},
    "device": "NVIDIA H100",
    "world_size": 2,
    "seq_len": SEQ_LEN,
    "backend": "ddp",
    "precision": "fp32",
    "unigram_entropy": 7.5,
    "versions": {"torch": "2.9"},
}


def train_line(
    step: int, *, attempt: int = 1, since: int = 0, steps: int = 10, **more: Any
) -> dict[str, Any]:
    """`since`: the step at which the attempt began."""
    return {
        "kind": "train",
        "attempt": attempt,
        "step": step,
        "loss": 9 - step / 10,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "examples": step * BATCH,
        "tokens_per_s": TOKENS_PER_STEP / STEP_S,
        "data_wait_s": 0.5,
        "step_s": STEP_S,
        "steps": steps,
        "train_s": (step - since) * STEP_S,
        "tokens": (step - since) * TOKENS_PER_STEP,
        "goodput": 0.5,
        **more,
    }


def eval_line(step: int, **more: Any) -> dict[str, Any]:
    loss = 9 - step / 10
    metrics = {"loss": loss, "perplexity": 2**loss, "masked_accuracy": step / 100, "eval_s": 1.0}
    return {
        "kind": "eval",
        "attempt": 1,
        "step": step,
        "examples": step * BATCH,
        **metrics,
        **more,
    }


def save_line(step: int, **more: Any) -> dict[str, Any]:
    times = {"save_s": 1.5, "stall_s": 0.25}
    return {"kind": "checkpoint", "attempt": 1, "step": step, **times, "bytes": 3_000_000, **more}


def fault_line(step: int, reason: str = "slow", **more: Any) -> dict[str, Any]:
    return {"kind": "fault", "attempt": 1, "step": step, "reason": reason, **more}


def summary_line(step: int, steps: int, **more: Any) -> dict[str, Any]:
    """The end of an attempt that did so many steps."""
    known = {
        "train_s": steps * STEP_S,
        "tokens": steps * TOKENS_PER_STEP,
        "mfu": None,
        "cost_usd": None,
    }
    known |= {"reason": "done", "goodput": 0.5}
    return {"kind": "summary", "attempt": 1, "step": step, **known, **more}


def whole_run(**summary: Any) -> list[dict[str, Any]]:
    lines = [line for step in (10, 20, 30, 40) for line in (train_line(step), eval_line(step))]
    return [*lines, save_line(40), summary_line(40, 40, **summary)]


def write_run(
    folder: Path, lines: list[dict[str, Any]], *, config=None, environment=None, tail: str = ""
) -> Path:
    """`config` and `environment`: changes of whole sections."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({**CONFIG, **(config or {})}))  # JSON is YAML
    (folder / "environment.json").write_text(json.dumps({**ENVIRONMENT, **(environment or {})}))
    timed = [
        {"attempt": 1, "time_unix_s": 1.8e9 + number, **line} for number, line in enumerate(lines)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in timed) + tail
    )
    return folder


def shown(html: str) -> str:
    """The words of a report."""
    return " ".join(re.sub(r"<[^>]+>", " ", html.split("<main>")[1]).split())
