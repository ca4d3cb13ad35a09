"""Settings of the trackers of experiments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from train.config.checks import Section, check, check_choice

TRACKERS = ("mlflow", "wandb")


@dataclass(kw_only=True)
class TelemetryConfig(Section, prefix="telemetry."):
    """Trackers that get the curves of a run. Projects, keys and passwords are those of the environment."""

    trackers: list[str] = field(default_factory=list)  # any of mlflow and wandb
    mlflow_uri: str | None = None  # of MLflow's server, http://host:5000; null: MLFLOW_TRACKING_URI

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.trackers:
            check_choice("telemetry.trackers", name, TRACKERS)
        names = ",".join(self.trackers)
        check(len(set(self.trackers)) == len(self.trackers), f"telemetry.trackers=[{names}] names a tracker twice")
        check(
            self.mlflow_uri is None or not re.search("//[^/]*@", self.mlflow_uri),
            "telemetry.mlflow_uri holds user:password@, and run folders would keep it; set MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD",
        )
