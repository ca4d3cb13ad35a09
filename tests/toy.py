"""A task that learns in microseconds, for tests of what the loop does: a line is fitted to two numbers a row.

Its runs go through `train.loop.run` with the real engine, backend, checkpoints and run folder; only model and data are
small. The fixture `toy` chooses what each loss and each evaluation returns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import running
import torch
from forks import DEVICE
from torch import Tensor, nn

from train import loop
from train.checkpoints.store import LocalStore
from train.config import (
    BackendConfig,
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    ShardsConfig,
    TaskConfig,
    TelemetryConfig,
    TrainConfig,
)
from train.data.shards.order import PADDING
from train.parallel import ranks
from train.run import stopping
from train.run.stopping import StopRequest
from train.run_folder.samples import Sample
from train.storage.folders import Folder
from train.tasks import TASKS, Task, TaskSpec

BERT = ModelConfig(
    architecture="bert",
    max_positions=64,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    intermediate_size=8,
)

ROWS, EVAL_ROWS = 160, 10
NAN = float("nan")


@dataclass(kw_only=True)
class ToyConfig(TaskConfig):
    learns_from: ClassVar[type[ShardsConfig]] = ShardsConfig
    kind: str = "toy"


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(2, 1), nn.Dropout(0.1)

    def head_parameters(self) -> list[nn.Parameter]:
        return []

    def join_projections(self) -> None:
        return

    def compile_encoder(self, optimised: Callable[[Any], Any]) -> int:
        self.forward = optimised(self.forward)  # type: ignore[method-assign]
        return 2

    def forward(self, numbers: Tensor) -> Tensor:
        return self.line(self.dropout(numbers)).squeeze(-1)


class Rows:
    def draw(self, items: np.ndarray) -> dict[str, Any]:
        rows = np.where(items == PADDING, 0, items % ROWS)
        numbers = torch.from_numpy(np.stack([np.sin(rows), np.cos(3 * rows)], -1)).float()
        counts = (items != PADDING).sum(-1).tolist()
        return {
            "inputs": {"input_ids": numbers, "labels": numbers.sum(-1)},
            "count": counts,
            "tokens": counts,
        }


class ToyTask(Task):
    """A line through points."""

    shard_rows, train_rows, eval_rows = (ROWS,), ROWS, EVAL_ROWS
    metrics, data_id, seq_len = ("loss", "error"), "toy", 2

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.facts: dict[str, float] = {}

    def build_model(self) -> Line:
        return Line()

    def train_data(self) -> Rows:
        return Rows()

    eval_data = train_data

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        self.toy.losses += 1
        return self.eval_statistics(model, inputs).sum() * self.toy.scale(self.toy.losses)

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return (model(inputs["input_ids"]) - inputs["labels"]).square()[:, None]

    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        assert rows.shape == (EVAL_ROWS, 1)
        loss = float(rows.mean()) if self.toy.scores is None else next(self.toy.scores)
        return {"loss": loss, "error": loss}

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float:
        return 12.0

    def describe_model(self, model: nn.Module, folder: Folder) -> None:
        return

    def export(self, model: nn.Module, folder: Path) -> None:
        torch.save(model.state_dict(), folder / "model.pt")

    def samples(self, export: Path, most: int) -> list[Sample]:
        return []


class Toy:
    """Runs in folders beside each other, by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses = 0  # how often a loss was computed
        # factor of each loss, by its number from 1; may raise
        self.scale: Callable[[int], float] = lambda call: 1.0
        # what evaluations give instead of the model's loss
        self.scores: Iterator[float] | None = None

    def config(self, name: str = "run", **changes: Any) -> TrainConfig:
        """Six steps of eight rows, saved and evaluated after the third and the last. `changes`: a section is a dict."""
        settings: dict[str, Any] = {
            "global_batch_size": 8,
            "max_steps": 6,
            "log_every": 1,
            "eval_every": 3,
        }
        settings |= {
            "export": False,
            "telemetry": TelemetryConfig(trackers=[]),
            "backend": BackendConfig(device=DEVICE, precision="fp32"),
        }
        settings |= changes
        sections = {
            "checkpoint": CheckpointConfig(every=3),
            "optim": OptimConfig(lr=0.01, warmup_steps=0),
        }
        settings |= {
            key: replace(section, **settings.get(key, {})) for key, section in sections.items()
        }
        cfg = TrainConfig(
            run_dir=str(self.folder / name),
            task=ToyConfig(),
            data=ShardsConfig(path="toy", num_workers=0),
            **settings,
        )
        cfg.watchdog.step_s = 0
        # its losses change from call to call, which a recording would not see
        if cfg.backend.cuda_graphs is None:
            cfg.backend = replace(cfg.backend, cuda_graphs=False)
        return cfg

    def train(
        self, name: str = "run", *, stop: StopRequest | None = None, **changes: Any
    ) -> tuple[str, int]:
        return loop.run(self.config(name, **changes), stop or StopRequest())

    def stopped_at_once(self, name: str = "run", **changes: Any) -> tuple[str, int]:
        """As if a signal had come during the first step."""
        asked = StopRequest()
        asked.ask("SIGTERM")
        return self.train(name, stop=asked, **changes)

    def lines(self, kind: str, name: str = "run") -> list[dict[str, Any]]:
        return running.lines(self.folder / name, kind)

    def values(self, kind: str, key: str, name: str = "run") -> list[Any]:
        return [line[key] for line in self.lines(kind, name)]

    def faults(self, name: str = "run") -> list[str]:
        return self.values("fault", "reason", name)

    def outcome(self, name: str = "run") -> dict[str, Any]:
        outcome: dict[str, Any] = json.loads((self.folder / name / "outcome.json").read_text())
        return outcome

    def saved(self, name: str = "run") -> dict[int, dict[str, Any]]:
        """The progress in each checkpoint, by its step."""
        store = LocalStore(self.folder / name / "checkpoints")
        return {step: store.manifest(step).progress for step in store.steps()}

    def weights(self, step: int, name: str = "run") -> list[float]:
        path = self.folder / name / f"checkpoints/step_{step:08d}/model.pt"
        return [
            number for tensor in torch.load(path).values() for number in tensor.flatten().tolist()
        ]


def spoilt(calls: Iterable[int]) -> Callable[[int], float]:
    """Losses of these calls are no numbers."""
    return lambda call: NAN if call in calls else 1.0


def spec_of(make: Callable[[], ToyTask]) -> TaskSpec:
    """The entry of a task in the table, whose module makes it so."""
    made = SimpleNamespace(of_run=lambda cfg: make())
    sys.modules["toy_task"] = SimpleNamespace(Toy=made)  # type: ignore[assignment]
    return replace(TASKS["mlm"], settings=ToyConfig, module="toy_task:Toy")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy = Toy(tmp_path)
    monkeypatch.setitem(TASKS, "toy", spec_of(lambda: ToyTask(toy)))
    monkeypatch.setattr(ranks, "POLL_S", 0.001)
    monkeypatch.setattr(stopping, "POLL_S", 0.05)
    return toy
