"""While long work goes on, standard error says which and how far it is; nothing is said of short work."""

from __future__ import annotations

import pytest
from running import eventually

from train.machine import progress
from train.machine.progress import Phase


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)


def test_lines_name_the_stage_and_how_far_it_is(
    soon: None, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def is_said(part: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return part in said

    with progress.reported():
        progress.begin(Phase("reading", 3_000_000, "bytes"))
        eventually(lambda: is_said("... reading (0 s)\n"))
        progress.advance(1_500_000)
        eventually(lambda: is_said("... reading: 1.5 MB of 3.0 MB, 50% (0 s)\n"))
        progress.begin(Phase("tokenising"))
        progress.advance(1234)
        eventually(lambda: is_said("... tokenising: 1,234 rows (0 s)\n"))


def test_nothing_is_said_of_short_work_nor_by_other_ranks(capsys, monkeypatch) -> None:
    for first_s, speaks in ((progress.FIRST_S, True), (0.0, False)):
        monkeypatch.setattr(progress, "FIRST_S", first_s)
        with progress.reported(speaks=speaks):
            pass
    assert capsys.readouterr().err == ""
