"""The trackers MLflow and Weights & Biases, to which rank 0 sends the lines that it writes to metrics.jsonl.

Each tracker has a thread, which starts with the first line. It imports the library, connects and sends; training only
puts lines into a queue. The first failure to send is logged, and unsent lines are sent together with the next line.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import posixpath
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from train.config import TelemetryConfig, TrainConfig, check, flat, plural
from train.run_folder.run_folder import RunFolder

logger = logging.getLogger("train")
MOST_LINES = 1000  # maximum number of lines waiting to be sent
END_WAIT_S = 15.0  # seconds to wait at the end, for all trackers together
END_TRIES, RETRY_S = 3, 0.5  # tries to send after the last line, and the seconds between them
unended: list[Tracker] = []  # trackers whose libraries may keep the process from exiting
TAG = "baretrain.run_id"
NO_CURVES = (
    "kind",
    "attempt",
    "time_unix_s",
    "step",
    "steps",
    "examples",
    "epoch",
    "train_s",
    "tokens",
)
# a value that every line of this kind has
IN_EVERY_LINE = {
    "train": "train/step_s",
    "eval": "eval/eval_s",
}
# MLflow's limits: parameters per call, characters per value and name
MOST_PARAMS, MOST_CHARS, MOST_KEY = (
    100,
    500,
    250,
)
PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb"}
ENVIRONMENT = {  # defaults that limit the wait for a server that does not answer, and keep the libraries silent
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
}


@dataclass(frozen=True)
class Line:
    """The numbers in a line of metrics.jsonl, under names such as train/loss."""

    kind: str
    step: int
    time_unix_s: float
    figures: dict[str, float]


@dataclass(frozen=True)
class Run:
    """The facts about a run that a tracker receives."""

    id: str  # 32 hexadecimal digits, the same in all attempts
    name: str
    folder: Path  # the run folder on this machine
    settings: dict[str, Any]


class MLflow:
    """The run in MLflow that has our run's id as a tag. It is created if it is missing."""

    def __init__(self, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        found = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        mine = (
            found[0]
            if found
            else client.create_run(experiment, tags={TAG: run.id}, run_name=run.name)
        )
        self.id = mine.info.run_id
        client.update_run(self.id, status="RUNNING")
        settings = {
            mlflow_key(key): str(value)[:MOST_CHARS] for key, value in run.settings.items()
        }
        params = [
            Param(key, value) for key, value in settings.items() if key not in mine.data.params
        ]
        for start in range(0, len(params), MOST_PARAMS):
            client.log_batch(self.id, params=params[start : start + MOST_PARAMS], synchronous=True)
        histories = {
            kind: client.get_metric_history(self.id, key)
            for kind, key in IN_EVERY_LINE.items()
            if found
        }
        self.sent = {
            kind: max((each.step for each in known), default=-1)
            for kind, known in histories.items()
        }

    def send(self, line: Line) -> None:
        from mlflow.entities import Metric

        # earlier steps were sent by an earlier attempt
        if line.step > self.sent.get(line.kind, -1):
            time_ms = round(1000 * line.time_unix_s)
            metrics = [
                Metric(mlflow_key(key), value, time_ms, line.step)
                for key, value in line.figures.items()
            ]
            self.client.log_batch(self.id, metrics=metrics, synchronous=True)

    def end(self, status: str) -> None:
        """Record how the attempt ended: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.id, status)


def mlflow_key(name: str) -> str:
    """Return a name as MLflow accepts it: the names of validation sets are the user's."""
    key = re.sub(r"[^\w.\- /]", "_", name)[:MOST_KEY]
    # MLflow may use it as a file's name
    is_path = posixpath.normpath(key) == key and not key.startswith((".", "/"))
    return key if is_path else "_" + key.replace("/", "_")[1:]


class WandB:
    """The run in Weights & Biases with our run's id. If a step is sent twice, the server keeps the first values."""

    def __init__(self, run: Run) -> None:
        import wandb

        if (os.environ.get("WANDB_MODE") or "online") == "online" and not wandb.login(
            prompt=False
        ):
            raise RuntimeError(
                "no API key for Weights & Biases: set WANDB_API_KEY, or run wandb login"
            )
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=30, finish_timeout=0.8 * END_WAIT_S
        )
        self.run = wandb.init(
            id=run.id,
            resume="allow",
            reinit="create_new",
            name=run.name,
            dir=str(run.folder),
            config=run.settings,
            allow_val_change=True,
            settings=settings,
        )

    def send(self, line: Line) -> None:
        self.run.log(line.figures, step=line.step)

    def end(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "FINISHED" else 1)


CLIENTS: dict[str, type[MLflow | WandB]] = {"mlflow": MLflow, "wandb": WandB}


@dataclass
class Tracker:
    """The thread that sends lines, and finally the status of the attempt, to one tracker."""

    name: str
    connect: Callable[[], MLflow | WandB]
    waiting: queue.SimpleQueue[Line | str] = field(default_factory=queue.SimpleQueue)
    unsent: deque[Line | str] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    has_warned: bool = False
    num_added: int = 0  # lines
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self.client: MLflow | WandB | None = None

    def add(self, line: Line) -> None:
        """Queue a line to be sent, without waiting."""
        self.num_added += 1
        if self.thread.ident is None:
            self.thread.start()
        if self.waiting.qsize() < MOST_LINES:
            self.waiting.put(line)
        else:
            self.warn(f"{MOST_LINES} lines are waiting to be sent; further lines are dropped")

    def _work(self) -> None:
        is_over = False
        while not is_over:
            self.unsent.append(self.waiting.get())
            while not self.waiting.empty():
                self.unsent.append(self.waiting.get())
            is_over = isinstance(self.unsent[-1], str)
            for number in range(END_TRIES if is_over else 1):
                time.sleep(RETRY_S if number else 0)
                if self._try_to_send():
                    break
        missing = self.num_added - self.num_sent  # more than in `unsent` if lines were dropped
        parts = [plural(missing, "line")] * (missing > 0) + ["the final status"] * bool(
            self.unsent
        )
        if parts:
            logger.info("tracker %s: not sent: %s", self.name, " and ".join(parts))

    def _try_to_send(self) -> bool:
        """Send the lines in `unsent`, and return whether all were sent. Those that remain can be sent later."""
        try:
            if self.client is None:
                self.client = self.connect()
            while self.unsent:
                item = self.unsent[0]
                if isinstance(item, str):
                    self.client.end(item)
                else:
                    self.client.send(item)
                    self.num_sent += 1
                self.unsent.popleft()
        except Exception as error:  # whatever the library raises, training continues
            self.warn(f"{type(error).__name__}: {error}"[:300])
            return False
        return True

    def warn(self, text: str) -> None:
        """Log the first failure, in one line without credentials."""
        if not self.has_warned:
            self.has_warned = True
            text = re.sub(r"//[^/@\s]*@", "//", " ".join(text.split()))
            logger.warning("tracker %s: %s; the run continues", self.name, text)


def check_trackers(cfg: TelemetryConfig) -> None:
    """Raise InputError if a tracker's package or its server's address is missing."""
    for name in cfg.trackers:
        check(
            importlib.util.find_spec(name) is not None,
            f"telemetry.trackers names {name}, whose package is not installed here: pip install {PACKAGES[name]}",
        )
    check(
        "mlflow" not in cfg.trackers or bool(os.environ.get("MLFLOW_TRACKING_URI")),
        "telemetry.trackers names mlflow, but its server is unknown: set MLFLOW_TRACKING_URI",
    )


def open_trackers(cfg: TrainConfig, folder: RunFolder) -> list[Tracker]:
    """Return the trackers of a run, for rank 0. Nothing is imported or sent before the first line."""
    if cfg.telemetry.trackers:
        os.environ.update(
            {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
        )
    run = Run(folder.run_id, Path(folder.location).name, folder.path, flat(cfg))
    return [Tracker(name, partial(CLIENTS[name], run)) for name in cfg.telemetry.trackers]


def track(trackers: Sequence[Tracker], line: dict[str, Any]) -> None:
    """Queue a line of metrics.jsonl for all trackers. Numbers that are not finite are left out."""
    kind = line["kind"]
    numbers = {
        key: value
        for key, value in line.items()
        if isinstance(value, int | float) and key not in NO_CURVES
    }
    figures = {
        f"{kind}/{key}": float(value) for key, value in numbers.items() if math.isfinite(value)
    }
    for tracker in trackers:
        tracker.add(Line(kind, line["step"], line["time_unix_s"], figures))


def end(trackers: Sequence[Tracker], status: str, *, waits: bool) -> None:
    """End the trackers that have received a line. If `waits`, wait for them briefly."""
    begun = [tracker for tracker in trackers if tracker.thread.ident is not None]
    for tracker in begun:
        tracker.waiting.put(status)
    until_s = time.monotonic() + END_WAIT_S
    for tracker in begun if waits else ():
        tracker.thread.join(max(0.0, until_s - time.monotonic()))
        if tracker.thread.is_alive():
            tracker.warn("it does not answer; its last lines and final status may be missing")
    unended.extend(tracker for tracker in begun if tracker.unsent or tracker.thread.is_alive())
