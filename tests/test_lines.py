"""The lines of a run: what is written is whole and read again."""

import json

import pytest
from rejections import rejects

from train.config import S3Config
from train.run_folder.folder import RunFolder
from train.telemetry.journal import Journal
from train.telemetry.lines import parse_lines, read_lines

LINE = {"kind": "train", "attempt": 1, "time_unix_s": 1.0, "step": 1}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(str(tmp_path), S3Config())


def open_journal(folder):
    return Journal(folder, first_step=1, tensorboard=False)


def test_an_attempt_goes_on_after_the_last_whole_line(folder):
    first = open_journal(folder)
    first.write("train", {"step": 1, "loss": float("nan"), "cost_usd": 1.5})
    first.close()
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind": "tra')
    second = open_journal(folder)
    second.write("train", {"step": 2})
    second.close()
    seen = [(line["attempt"], line["step"]) for line in read_lines(folder.metrics, is_strict=True)]
    assert seen == [(1, 1), (2, 2)] and second.cost_before_usd == 1.5
    assert json.loads(folder.metrics.read_text().splitlines()[0])["loss"] is None


@pytest.mark.parametrize(
    "bad", ["{", "[" * 99_999, "[1]", {"step": -1}, {"step": 2**63}, {"kind": 3}, {"attempt": "1"}]
)
def test_a_damaged_line_is_left_out_or_named(bad):
    rows = [json.dumps(LINE), bad if isinstance(bad, str) else json.dumps(LINE | bad), json.dumps(LINE)]
    content = "\n".join([*rows, '{"kind": "tr']).encode()
    assert list(parse_lines(content)) == [LINE, LINE]
    rejects(r"^x line 2 is not", list, parse_lines(content, where="x", is_strict=True))


def test_lines_of_an_earlier_version_are_rejected():
    old = json.dumps({key: value for key, value in LINE.items() if key != "attempt"}).encode()
    rejects("earlier version", list, parse_lines(old))
