"""The trackers MLflow and Weights & Biases, to which rank 0 sends the lines that it writes to metrics.jsonl.

Both libraries queue what they send, in threads of their own. They are imported when the first line is written. The
first failure of a tracker is logged; after a failed call, it gets nothing more of this attempt, and training continues.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config import TelemetryConfig, TrainConfig, check, flat
from train.run_folder.run_folder import RunFolder

logger = logging.getLogger("train")
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
# MLflow's limits: parameters per call, and characters per value and name.
MOST_PARAMS = 100
MOST_CHARS = 500
MOST_KEY = 250
MLFLOW_QUEUE = "mlflow.utils.async_logging.async_logging_queue"  # the logger of failed batches
PACKAGES = {"mlflow": "mlflow-skinny", "wandb": "wandb"}
ENVIRONMENT = {  # defaults that limit the wait for a server that does not answer, and keep the libraries silent
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
}
INIT_S, FINISH_S = 30, 12  # seconds that Weights & Biases may take to begin and to end a run


@dataclass(frozen=True)
class Run:
    """The facts about a run that a tracker receives."""

    id: str  # 32 hexadecimal digits, the same in all attempts
    name: str
    folder: Path  # the run folder on this machine
    settings: dict[str, Any]


class MLflow:
    """The run in MLflow that has our run's id as a tag. It is created if it is missing."""

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        def warn_instead(record: logging.LogRecord) -> bool:
            warn(record.getMessage())
            return False

        # Not added: a process may train several runs in turn, and only the present one is to be warned.
        logging.getLogger(MLFLOW_QUEUE).filters = [warn_instead]
        self.client = client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        known = client.get_experiment_by_name(name)
        if known:
            experiment = known.experiment_id
        else:
            experiment = client.create_experiment(name)
        found = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if found:
            (mine,) = found
        else:
            mine = client.create_run(experiment, tags={TAG: run.id}, run_name=run.name)
        self.id = mine.info.run_id
        client.update_run(self.id, status="RUNNING")
        params = []
        for setting, value in run.settings.items():
            # A key may contain a label of the user's, as in data.label_map.
            key = re.sub(r"[^\w.\- ]", "_", setting)[:MOST_KEY]
            if key not in mine.data.params:  # MLflow rejects another value
                params.append(Param(key, str(value)[:MOST_CHARS]))
        for first in range(0, len(params), MOST_PARAMS):
            some = params[first : first + MOST_PARAMS]
            client.log_batch(self.id, params=some, synchronous=True)

    def send(self, figures: dict[str, float], *, step: int, time_unix_s: float) -> None:
        from mlflow.entities import Metric

        time_ms = round(1000 * time_unix_s)
        metrics = [Metric(key, value, time_ms, step) for key, value in figures.items()]
        self.client.log_batch(self.id, metrics=metrics, synchronous=False)

    def end(self, status: str) -> None:
        """Record how the attempt ended: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.id, status)


class WandB:
    """The run in Weights & Biases with our run's id. If a step is sent twice, the server keeps the first values."""

    def __init__(self, run: Run, _warn: Callable[[str], None]) -> None:
        import wandb

        is_online = (os.environ.get("WANDB_MODE") or "online") == "online"
        if is_online and not wandb.login(prompt=False):
            raise RuntimeError(
                "no API key for Weights & Biases: set WANDB_API_KEY, or run wandb login"
            )
        self.run = wandb.init(
            id=run.id,
            resume="allow",
            reinit="create_new",
            name=run.name,
            dir=str(run.folder),
            config=run.settings,
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=INIT_S, finish_timeout=FINISH_S
            ),
        )

    def send(self, figures: dict[str, float], *, step: int, time_unix_s: float) -> None:
        self.run.log(figures, step=step)

    def end(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "FINISHED"))


CLIENTS: dict[str, Callable[[Run, Callable[[str], None]], MLflow | WandB]] = {
    "mlflow": MLflow,
    "wandb": WandB,
}


class Tracker:
    """One tracker of a run, which connects when it gets its first line."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.client: MLflow | WandB | None = None
        self.has_failed = False
        self.has_warned = False

    def track(self, line: dict[str, Any]) -> None:
        """Send the numbers in a line of metrics.jsonl. Those that are not finite are left out."""
        figures = {}
        for key, value in line.items():
            if isinstance(value, int | float) and math.isfinite(value) and key not in NO_CURVES:
                figures[f"{line['kind']}/{key}"] = float(value)

        def send() -> None:
            if self.client is None:
                self.client = CLIENTS[self.name](self.run, self.warn)
            self.client.send(figures, step=line["step"], time_unix_s=line["time_unix_s"])

        self._try(send)

    def end(self, status: str) -> None:
        """End the attempt, unless it has sent nothing."""
        client = self.client
        if client is not None:
            self._try(lambda: client.end(status))

    def _try(self, call: Callable[[], None]) -> None:
        if self.has_failed:
            return
        try:
            call()
        except Exception as error:  # whatever the library raises, training continues
            self.has_failed = True
            self.warn(f"{type(error).__name__}: {error}")

    def warn(self, text: str) -> None:
        """Log the first failure, in one line without credentials."""
        if not self.has_warned:
            self.has_warned = True
            text = re.sub(r"//[^/@\s]*@", "//", " ".join(text.split()))
            logger.warning(
                "tracker %s: %s; it may lack lines; the run continues", self.name, text[:300]
            )


def check_trackers(cfg: TelemetryConfig) -> None:
    """Raise InputError if a tracker's package or its server's address is missing."""
    for name in cfg.services:
        check(
            importlib.util.find_spec(name) is not None,
            f"telemetry.trackers names {name}, whose package is not installed here: pip install {PACKAGES[name]}",
        )
    check(
        "mlflow" not in cfg.trackers or bool(os.environ.get("MLFLOW_TRACKING_URI")),
        "telemetry.trackers names mlflow, but its server is unknown: set MLFLOW_TRACKING_URI",
    )


def open_trackers(cfg: TrainConfig, folder: RunFolder) -> Sequence[Tracker]:
    """Return the trackers of a run, for rank 0. Nothing is imported or sent before the first line."""
    if cfg.telemetry.services:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    run = Run(folder.run_id, Path(folder.location).name, folder.path, flat(cfg))
    return [Tracker(name, run) for name in cfg.telemetry.services]
