"""MLflow and Weights & Biases: whatever they do, training is the same; a run that resumes is one run there."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import ROOT, eventually, run, train_overrides
from services.process import Process, free_port
from toy import Toy

from train.config import InputError, TelemetryConfig
from train.observe import trackers
from train.run import compose
from train.run.command import DONE
from train.run_folder.run_folder import RunFolder
from train.tools.bench import measure
from train.tools.bench.config import BenchConfig


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs set variables for the libraries; none of the user's are read."""
    for name in (*trackers.ENVIRONMENT, "MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


# ---- any tracker ---------------------------------------------------------------------------------------------------


class Fake:
    """A tracker that keeps what it is sent, after `before` has had its way with each call."""

    def __init__(self) -> None:
        self.runs: list[trackers.Run] = []
        self.lines: list[tuple[str, int]] = []
        self.statuses: list[str] = []
        self.before: Callable[[str], None] = lambda call: None

    def __call__(self, run: trackers.Run, _warn: object) -> Fake:
        self.before("connect")
        self.runs.append(run)
        return self

    def send(self, figures: dict[str, float], *, step: int, time_unix_s: float) -> None:
        self.before("send")
        (kind,) = {name.partition("/")[0] for name in figures}
        assert figures[f"{kind}/loss"] > 0
        assert not {"train/step", "train/attempt"} & figures.keys()
        self.lines.append((kind, step))

    def end(self, status: str) -> None:
        self.before("end")
        self.statuses.append(status)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setitem(trackers.CLIENTS, "wandb", fake)
    return fake


WANDB, MLFLOW = (TelemetryConfig(trackers=[name]) for name in ("wandb", "mlflow"))
ALL = [("train", 1), ("train", 2), ("train", 3), ("eval", 3)]
ALL += [("train", 4), ("train", 5), ("train", 6), ("eval", 6)]


def warnings(toy: Toy) -> list[str]:
    """Return those of a run's log that are of trackers."""
    log = (toy.folder / "run/log/rank_0000.txt").read_text()
    said = [line.partition(" WARNING ")[2] for line in log.splitlines()]
    return [text for text in said if text.startswith("tracker ")]


@pytest.mark.parametrize("fails_at", [None, "connect", "send", "end"])
def test_training_is_the_same_whatever_a_tracker_does(fails_at, toy, fake):
    def before(call: str) -> None:
        if call == fails_at:
            raise ConnectionError("no route\nto http://me:secret@server")

    assert toy.train("without") == ("done", 6)
    fake.before = before
    assert toy.train(telemetry=WANDB) == ("done", 6)
    assert toy.values("train", "loss") == toy.values("train", "loss", "without")
    assert fake.lines == ([] if fails_at in ("connect", "send") else ALL)
    assert fake.statuses == ([] if fails_at else ["FINISHED"])
    said = "tracker wandb: ConnectionError: no route to http://server; it may lack lines; the run continues"
    assert warnings(toy) == ([said] if fails_at else [])
    assert all(os.environ[name] == value for name, value in trackers.ENVIRONMENT.items())


def test_every_attempt_of_a_run_has_its_id_and_says_how_it_ended(toy, fake):
    toy.scale = lambda call: 1 / 0 if call == 2 else 1.0
    with pytest.raises(ZeroDivisionError):
        toy.train(telemetry=WANDB, checkpoint={"every": 1})
    toy.scale = lambda call: 1.0
    assert toy.stopped_at_once(telemetry=WANDB)[0] == "SIGTERM"
    assert toy.train(telemetry=WANDB) == ("done", 6)
    assert toy.train(telemetry=WANDB) == ("done", 6)  # of which there is nothing to send
    assert fake.statuses == ["FAILED", "KILLED", "FINISHED"]
    (run_id,) = {each.id for each in fake.runs}
    assert json.loads((toy.folder / "run/environment.json").read_text())["run_id"] == run_id
    assert fake.runs[0].name == "run" and fake.runs[0].settings["optim.lr"] == 0.01


@pytest.mark.parametrize("known", [None, "../etc"])
def test_an_id_that_no_run_has_is_replaced(known, tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"run_id": known}))
    first, second = (RunFolder(str(tmp_path)).run_id for _ in range(2))
    assert first != second and {len(first), len(second)} == {32}
    (tmp_path / "environment.json").write_text(json.dumps({"run_id": first}))
    assert RunFolder(str(tmp_path)).run_id == first


def test_measurements_are_of_runs_with_any_tracker():
    compose.add_schema(BenchConfig, "bench", [])
    given = ["experiment=demo", "data.path=d", "telemetry.trackers=[wandb]"]
    cfg = measure.short_run(compose.load_config(BenchConfig, given), "r")
    assert cfg.telemetry.trackers == []


def test_a_tracker_whose_package_is_missing_is_rejected_before_anything_is_written(
    toy, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        InputError, match=r"^telemetry.trackers names wandb, .* pip install wandb$"
    ):
        toy.train(telemetry=WANDB)
    assert not (toy.folder / "run").exists()


# ---- Weights & Biases ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_are_one_run_of_wandb(tmp_path, prepared):
    pytest.importorskip("wandb")
    more = ["max_steps=4", "eval_every=4", "telemetry.trackers=[wandb]"]
    done = run(
        train_overrides(tmp_path / "run", prepared, *more), ranks=2, env={"WANDB_MODE": "offline"}
    )
    assert (
        done.returncode == DONE
        and "tracker" not in done.stderr
        and "wandb" not in done.stderr + done.stdout
    )
    run_id = json.loads((tmp_path / "run/environment.json").read_text())["run_id"]
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    assert file.name == f"run-{run_id}.wandb"
    content = file.read_bytes()
    assert all(name in content for name in (b"train/loss", b"eval/loss", b"max_steps"))


# ---- a server of MLflow --------------------------------------------------------------------------------------------


@dataclass
class Server:
    uri: str
    process: Process

    def run(self) -> Any:
        from mlflow import MlflowClient

        (only,) = MlflowClient(self.uri).search_runs(["0"]) or [None]
        return only

    def steps(self, kind: str = "train") -> list[int]:
        from mlflow import MlflowClient

        run = self.run()
        history = (
            MlflowClient(self.uri).get_metric_history(run.info.run_id, f"{kind}/loss")
            if run
            else []
        )
        return [each.step for each in history]

    def kill(self) -> None:
        """With the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.shell.pid, signal.SIGKILL)
        self.process.shell.wait()


@pytest.fixture
def mlflow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("mlflow")
    python = ROOT / ".venv/mlflow/bin/python"
    if not python.exists():
        pytest.skip("no server of MLflow to test with: make mlflow-server")
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    port = free_port()
    store = f"sqlite:///{tmp_path}/mlflow.db"
    words = [
        str(python),
        "-m",
        "mlflow",
        "server",
        f"--port={port}",
        "--workers=1",
        f"--backend-store-uri={store}",
    ]
    server = Server(
        f"http://127.0.0.1:{port}", Process(words, log=tmp_path / "server.log", cwd=tmp_path)
    )
    try:
        server.process.wait_for_port(port)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        yield server
    finally:
        server.kill()


def test_a_run_that_fails_and_resumes_is_one_run_of_mlflow(toy, mlflow_server):
    """It fails in its fourth step and goes on from its second: the third step is sent twice, with the same loss."""
    toy.scale = lambda call: 1 / 0 if call == 4 else 1.0
    settings: dict[str, Any] = {"max_steps": 4, "eval_every": 2, "telemetry": MLFLOW}
    with pytest.raises(ZeroDivisionError):
        toy.train(checkpoint={"every": 2}, **settings)
    eventually(lambda: mlflow_server.steps() == [1, 2, 3])
    assert mlflow_server.run().info.status == "FAILED"
    toy.scale = lambda call: 1.0
    assert toy.train(checkpoint={"every": 4}, **settings) == ("done", 4)
    eventually(lambda: sorted(mlflow_server.steps()) == [1, 2, 3, 3, 4])
    eventually(lambda: sorted(mlflow_server.steps("eval")) == [2, 4])
    run = mlflow_server.run()
    assert run.info.status == "FINISHED" and run.info.run_name == "run" and warnings(toy) == []
    assert run.data.params["max_steps"] == "4" and run.data.params["checkpoint.every"] == "2"
    assert run.data.metrics["train/loss"] == pytest.approx(toy.values("train", "loss")[-1])
