"""While long work goes on, standard error says which and how far it is; nothing is said of short work."""

from __future__ import annotations

import io
import sys

import pytest
from running import eventually, prepare_config

from train import prepare
from train.cli import progress
from train.cli.progress import Stage
from train.data.text import encoding


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)


def test_lines_name_the_stage_and_how_far_it_is(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def has_said(*parts: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return all(part in said for part in parts)

    with progress.reported():
        progress.begin(Stage("reading", 3_000_000, "bytes"))
        eventually(lambda: has_said("... reading (0 s)\n"))
        progress.advance(1_500_000)
        eventually(lambda: has_said("... reading: 1.5 MB of 3.0 MB (0 s)\n"))
        progress.begin(Stage("tokenising"))
        progress.advance(1234)
        eventually(lambda: has_said("... tokenising: 1,234 rows (0 s)\n"))


def test_nothing_is_said_of_short_work_nor_by_other_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.reported():
        pass
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    with progress.reported(speaks=False):
        pass
    assert capsys.readouterr().err == ""


def test_standard_error_that_is_closed_stops_no_work(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    closed = Closed()
    monkeypatch.setattr(sys, "stderr", closed)
    with progress.reported():
        eventually(lambda: closed.writes > 2)


def test_a_preparation_reports_each_of_its_stages(corpus, tmp_path, soon: None, capsys, monkeypatch) -> None:
    """Each stage waits until it has been named."""
    said = ""

    def until_named(name: str) -> None:
        def is_named() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return name in said

        eventually(is_named)

    encode, train = encoding.encode, prepare.training_texts

    def slow_encode(*arguments):
        until_named("... tokenising and packing")
        return encode(*arguments)

    def slow_texts(*arguments):
        texts = train(*arguments)
        yield next(texts)
        until_named("... reading text for the tokenizer: ")
        yield from texts
        until_named("... training the tokenizer")

    monkeypatch.setattr(encoding, "encode", slow_encode)
    monkeypatch.setattr(prepare, "training_texts", slow_texts)
    assert prepare.run(prepare_config(tmp_path / "out", corpus)) == 0
