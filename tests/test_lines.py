"""The lines of a run: what is written is whole and read again, and curves that fail end only themselves."""

import json

import pytest
from rejections import rejects

from train.config import Failure, S3Config
from train.run_folder.folder import RunFolder
from train.telemetry.journal import Journal
from train.telemetry.lines import parse_lines, read_lines

LINE = {"kind": "train", "attempt": 1, "time_unix_s": 1.0, "step": 1}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(str(tmp_path), S3Config())


def open_journal(folder, *, tensorboard=False):
    return Journal(folder, first_step=1, tensorboard=tensorboard)


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


def test_a_disk_that_is_full_ends_the_run_with_its_file_named(folder):
    folder.metrics.symlink_to("/dev/full")
    journal = open_journal(folder)
    with pytest.raises(Failure, match=r"cannot write to .*metrics\.jsonl: No space left on device"):
        journal.write("train", {"step": 1})
    journal.write("fault", {"step": 1})  # as the run does while it ends
    journal.close()


def test_curves_that_cannot_be_written_are_left_out(folder):
    folder.tensorboard.write_text("a file where the folder would be")
    journal = open_journal(folder, tensorboard=True)
    journal.write("train", {"step": 1, "loss": 2.0})
    journal.close()
    assert [line["loss"] for line in read_lines(folder.metrics)] == [2.0]


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
