"""Runs that tests launch for real, and what they write: shared by the tests of this machine and of Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import eventually, run, train_overrides

from launch.record import Attempt, Record
from launch.run_progress import newest_checkpoint
from launch.schedulers import scheduler
from launch.spec import State
from train.run.command import DONE
from train.run_folder.metrics_files import rows

LONG = [
    "max_steps=80",
    "checkpoint.every=20",
    "checkpoint.keep=2",
    "eval_every=40",
    "log_every=20",
]
LONG += ["export=false", "lease.ttl_s=5"]


@pytest.fixture(scope="session")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> list[float]:
    """The losses of LONG on one rank of this machine."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run(train_overrides(folder, prepared, *LONG))
    assert done.returncode == DONE, done.stderr
    return losses((folder / "metrics.jsonl").read_bytes())


def losses(metrics: bytes) -> list[float]:
    """Of the evaluations, which see all of the model; of a step that was done twice the last."""
    found = [json.loads(line) for line in metrics.splitlines()]
    return list({line["step"]: line["loss"] for line in found if line["kind"] == "eval"}.values())


def settings_of_run(run_dir: object, data: object, *overrides: str) -> list[str]:
    """What follows -- in a launch of LONG; of a setting that is given twice the last one counts."""
    given = [
        *train_overrides(Path("-"), Path("-"), *LONG),
        f"run_dir={run_dir}",
        f"data.path={data}",
        *overrides,
    ]
    return list({each.partition("=")[0]: each for each in given}.values())


class LaunchedRun(Record):
    """The record of a launch, and what becomes of it."""

    @property
    def attempts(self) -> list[Attempt]:
        return self.history().attempts

    @property
    def handle(self) -> dict[str, Any]:
        submission = self.last_submission()
        assert submission is not None
        return submission.handle

    @property
    def state(self) -> State:
        return scheduler(self.job().scheduler).state(self, self.handle)

    @property
    def losses(self) -> list[float]:
        return losses(b"\n".join(rows(self.run)))

    def logs(self) -> str:
        files = sorted((self.local_folder() / "logs").rglob("*.txt"))
        return "\n".join(f"== {path}\n{path.read_text()}" for path in files)

    def wait_for(self, number: int, *, is_over: bool = False) -> Attempt:
        """The attempt with this number, once it trains, or once it is over."""

        def come() -> Attempt | None:
            found = [each for each in self.attempts if each.number == number]
            if found and (found[0].is_over if is_over else found[0].is_training):
                return found[0]
            assert self.history().ended is None, (self.attempts, self.logs())
            return None

        return eventually(come)

    def wait_for_checkpoint(self, *, after: int = 0) -> int:
        """A committed step beyond `after`."""
        return eventually(lambda: max(0, (newest_checkpoint(self.run) or 0) - after)) + after

    def ended(self) -> Attempt:
        """The attempt with which the last job ended, once it has."""
        ended = eventually(lambda: self.history().ended)
        eventually(lambda: not self.state.is_active)
        return ended
