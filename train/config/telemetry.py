"""Settings of the trackers of experiments."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.config.checks import Section, check, check_choice

TRACKERS = ("mlflow", "wandb")


@dataclass(kw_only=True)
class TelemetryConfig(Section, prefix="telemetry."):
    """Trackers that get the curves of a run.

    Servers, projects, keys and passwords are those of the environment: MLFLOW_TRACKING_URI, WANDB_PROJECT and the like.
    """

    trackers: list[str] = field(default_factory=list)  # The trackers that get the metrics, any of mlflow and wandb.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.trackers:
            check_choice("telemetry.trackers", name, TRACKERS)
        names = ",".join(self.trackers)
        check(len(set(self.trackers)) == len(self.trackers), f"telemetry.trackers=[{names}] names a tracker twice")
