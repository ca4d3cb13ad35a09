"""Launched runs that stand still before steps until a test lets them go on: what the test does to a run then comes in
time on any machine, and the run needs few steps.

A run that notices a request to stop goes on by itself: it is to stop as others do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import code

HELD = "HELD"  # the variable that names the folder with a file for each step before which the run stands still
START_CODE = b"""import os, runpy, sys, time
from pathlib import Path


def hold():
    import train.parallel.optim
    from train.run import stopping
    from train.run.stopping import StopRequest

    stopping.POLL_S = 0.1
    rate, ask, asked = train.parallel.optim.learning_rate, StopRequest.ask, []

    def noted(self, reason, **settings):
        asked.append(reason)
        ask(self, reason, **settings)

    def held(step, **settings):
        while (file := Path(os.environ["HELD"], str(step))).exists():
            file.with_suffix(".reached").touch()
            if asked:
                file.unlink(missing_ok=True)  # all ranks go on, since they stop together
            time.sleep(0.02)
        return rate(step, **settings)

    StopRequest.ask, train.parallel.optim.learning_rate = noted, held


if __name__ == "__main__":
    if sys.argv[1] == "train":  # the other modules start without torch
        hold()
    module = sys.argv.pop(1) if "." in sys.argv[1] else "train"
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class Holds:
    """The steps before which the run of a test stands still."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def before(self, *steps: int) -> None:
        for step in steps:
            (self.folder / str(step)).touch()

    def reached(self, step: int) -> bool:
        """Whether a rank stands still there, or did."""
        return (self.folder / f"{step}.reached").exists()

    def let_go(self, step: int) -> None:
        (self.folder / str(step)).unlink(missing_ok=True)


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Holds:
    """Of what the test launches."""
    monkeypatch.setattr(code, "START_CODE", START_CODE)
    monkeypatch.setenv(HELD, str(tmp_path / "held"))
    return Holds(tmp_path / "held")
