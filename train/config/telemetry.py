"""Settings of the experiment trackers."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.config.checks import Section, check, check_choice

TRACKERS = ("mlflow", "wandb")


@dataclass(kw_only=True)
class TelemetryConfig(Section, prefix="telemetry."):
    """Experiment trackers that receive the metrics of a run.

    Servers, projects, keys and passwords come from environment variables such as MLFLOW_TRACKING_URI and WANDB_PROJECT.
    """

    trackers: list[str] = field(default_factory=list)  # The trackers that receive the metrics: mlflow, wandb or both.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.trackers:
            check_choice("telemetry.trackers", name, TRACKERS)
        names = ",".join(self.trackers)
        check(len(set(self.trackers)) == len(self.trackers), f"telemetry.trackers=[{names}] names a tracker twice")
