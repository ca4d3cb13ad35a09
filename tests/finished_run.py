"""A run folder as a finished run leaves it, with what others must not see in the places where that may stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.run_folder.exported import MARK

LABELS = ["negative", "neutral", "positive"]
SECRETS = ("/home/jane", "gpu-17.lan", "minio.lan", "private-bucket", "a private tweet")
CONFIG = {
    "run_dir": "/home/jane/runs/tweets",
    "seed": 3,
    "task": {"kind": "classify", "label_smoothing": 0.1, "class_weights": None},
    "model": {
        "pretrained": "/home/jane/runs/pretrained",
        "architecture": "albert",
    },
    "data": {
        "more_validation": {"other": "other.csv"},
        "path": "/home/jane/data/tweets.csv",
        "format": "csv",
        "lengths": "auto",
        "name": None,
    },
    "s3": {"endpoint": "http://minio.lan:9000"},
    "optim": {"name": "adamw", "lr": 0.002, "schedule": "linear", "weight_decay": 0.01},
    "best": {"metric": "f1_macro", "export": True},
    "instance": {"name": "trn1.2xlarge", "usd_per_hour": 1.34},
    "hub": {"push_to": None, "private": True},
}
ENVIRONMENT = {
    "baretrain": "0.6",
    "host": "gpu-17.lan",
    "code": ["/home/jane/baretrain"],
    "commit": "abc123def456",
    "device": "Trainium",
    "parameters": 1234567,
    "precision": "bf16",
    "seq_len": 64,
    "world_size": 2,
    "identity": {"data": "sha-of-the-data", "data.lengths": [32, 64]},
    "plan": {"global_batch_size": 8, "micro_batch_size": 4, "total_steps": 30, "warmup_steps": 10},
    "versions": {"torch": "2.9.1", "torch-neuronx": None, "transformers": "5.0"},
}
DATA = {
    "kind": "classify",
    "labels": LABELS,
    "lengths": [32, 64],
    "splits": {
        "validation": {
            "rows": 100,
            "examples": 100,
            "used_rows": 100,
            "bad_rows": 0,
            "label_counts": {"negative": 50, "neutral": 30, "positive": 20},
            "length_histogram": {"up_to": [8, 16, 32, 64], "counts": [10, 20, 30, 40]},
            "padding_share": 0.375,
            "notes": {"truncated": 1.0},
        },
        "train": {
            "rows": 1000,
            "examples": 1000,
            "used_rows": 1000,
            "bad_rows": 2,
            "bad_examples": [
                "/home/jane/data/tweets.csv:17: no label",
                "/home/jane/data/tweets.csv:99: <b>?</b>",
            ],
            "left_out": 7,
            "label_counts": {"negative": 600, "neutral": 300, "positive": 100},
            "length_histogram": {"up_to": [8, 16, 32, 64], "counts": [100, 200, 300, 400]},
            "padding_share": 0.25,
            "notes": {"truncated": 12.0},
        },
    },
}
EVALUATION = {
    "step": 20,
    "splits": {
        "validation": {
            "metrics": {"accuracy": 0.81, "f1_macro": 0.75},
            "labels": LABELS,
            "per_class": {
                "negative": {"precision": 0.9, "recall": 0.88, "f1": 0.8899, "support": 50},
                "neutral": {"precision": 0.7, "recall": 0.8, "f1": 0.7467, "support": 30},
                "positive": {"precision": 0.6, "recall": 0.5, "f1": 0.5455, "support": 20},
            },
            "confusion": [[44, 4, 2], [3, 24, 3], [5, 5, 10]],
        },
        "other": {"metrics": {"accuracy": 0.66}},
    },
}


def lines() -> list[dict[str, Any]]:
    """The evaluation at step 20 is the best by f1_macro, the one at step 30 by loss."""
    result: list[dict[str, Any]] = []
    for step, f1, loss in ((10, 0.5, 0.9), (20, 0.75, 0.8), (30, 0.7, 0.7)):
        numbers = {
            "lr": 0.002,
            "examples": 8 * step,
            "epoch": step / 125,
            "tokens_per_s": 1000.0,
            "step_s": 0.25,
        }
        result.append({"kind": "train", "step": step, "loss": loss, **numbers})
        metrics = {
            "loss": loss,
            "accuracy": f1 + 0.06,
            "f1_macro": f1,
            "other_accuracy": f1 - 0.09,
        }
        result.append(
            {"kind": "eval", "step": step, "examples": 8 * step, **metrics, "eval_s": 1.0}
        )
    result.append(
        {
            "kind": "fault",
            "step": 20,
            "reason": "gpu-17.lan: no such file /home/jane/x",
            "steps_lost": None,
        }
    )
    end = {"reason": "done", "train_s": 7200.0, "tokens": 7_200_000, "mfu": None, "cost_usd": 2.68}
    result.append({"kind": "summary", "step": 30, **end})
    return [
        {"attempt": 1, "time_unix_s": 1.8e9 + number, **line} for number, line in enumerate(result)
    ]


def write(folder: Path, *, weights: int = 20, **config: dict[str, Any]) -> Path:
    """All that the loop writes, but of the export only the step of its `weights`. `config`: changes of its sections."""
    (folder / "export").mkdir(parents=True)
    (folder / "export" / MARK).write_text(json.dumps({"step": 30, "weights": weights}))
    changed = {
        key: {**value, **config[key]} if key in config else value for key, value in CONFIG.items()
    }
    files = {
        "config.yaml": changed,
        "environment.json": ENVIRONMENT,
        "data.json": DATA,
        "evaluation.json": EVALUATION,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))  # JSON is YAML
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    (folder / "predictions").mkdir()
    (folder / "predictions" / "validation.jsonl").write_text('{"text": "a private tweet"}\n')
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1732215000.gpu-17.lan.4711.0").write_bytes(
        b"curves"
    )
    return folder
