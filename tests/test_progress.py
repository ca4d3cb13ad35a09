"""While long work goes on, standard error says which and how far it is; nothing is said of short work."""

from __future__ import annotations

import io
import os
import sys

import pytest
from running import eventually, prepare_config

from train import prepare
from train.cli import progress
from train.cli.progress import Phase
from train.data.text import encoding


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)


class Heard:
    """What was printed on standard error until it held all that a test waits for."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.text = capsys, ""

    def until(self, part: str) -> None:
        def is_said() -> bool:
            self.text += self.capsys.readouterr().err
            return part in self.text

        eventually(is_said)


def test_lines_name_the_stage_and_how_far_it_is(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    heard = Heard(capsys)
    with progress.reported():
        progress.begin(Phase("reading", 3_000_000, "bytes"))
        heard.until("... reading (0 s)\n")
        progress.advance(1_500_000)
        heard.until("... reading: 1.5 MB of 3.0 MB (0 s)\n")
        progress.begin(Phase("tokenising"))
        progress.advance(1234)
        heard.until("... tokenising: 1,234 rows (0 s)\n")


def test_nothing_is_said_of_short_work_nor_by_other_ranks(capsys, monkeypatch) -> None:
    for first_s, speaks in ((progress.FIRST_S, True), (0.0, False)):
        monkeypatch.setattr(progress, "FIRST_S", first_s)
        with progress.reported(speaks=speaks):
            pass
    assert capsys.readouterr().err == ""


def test_standard_error_that_is_closed_stops_no_work(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, writes = io.StringIO(), []
    monkeypatch.setattr(closed, "write", lambda text: writes.append(text) or os.close(-1))  # an OSError
    monkeypatch.setattr(sys, "stderr", closed)
    with progress.reported():
        eventually(lambda: len(writes) > 2)


def test_a_preparation_reports_each_of_its_stages(corpus, tmp_path, soon: None, capsys, monkeypatch) -> None:
    """Each phase waits until it has been named."""
    heard = Heard(capsys)
    encode, train = encoding.encode, prepare.training_texts

    def slow_encode(*arguments):
        heard.until("... tokenising and packing")
        return encode(*arguments)

    def slow_texts(*arguments):
        texts = train(*arguments)
        yield next(texts)
        heard.until("... reading text for the tokenizer: ")
        yield from texts
        heard.until("... training the tokenizer")

    monkeypatch.setattr(encoding, "encode", slow_encode)
    monkeypatch.setattr(prepare, "training_texts", slow_texts)
    assert prepare.run(prepare_config(tmp_path / "out", corpus)) == 0
