"""The lines of a run: what is written is whole and read again, and curves that fail end only themselves."""

import errno
import io
import json
import logging
import multiprocessing
import os
import re
import threading
from pathlib import Path

import pytest
from rejections import rejects
from running import train_here
from tqdm import tqdm

from train.checkpoints.saver import AsyncSaver
from train.config import S3Config
from train.observe.journal import Journal
from train.observe.lines import read_back, read_lines
from train.run_folder import metrics_files as parts
from train.run_folder.ownership import LeaseLost
from train.run_folder.run_folder import RunFolder, TerminalHandler
from train.storage import atomic_io

LINE = {"kind": "train", "attempt": 1, "time_unix_s": 1.0, "step": 1}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_io, "said", set())
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
    seen = [(line["attempt"], line["step"]) for line in read_lines(folder.local)]
    assert seen == [(1, 1), (2, 2)] and second.cost_before_usd == 1.5
    assert json.loads(folder.metrics.read_text().splitlines()[0])["loss"] is None


@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.ESTALE], ids=os.strerror
)
def test_lines_that_the_disk_does_not_take_are_written_later_and_no_checkpoint_is_committed_without_them(
    folder, monkeypatch, caplog, error
):
    left = [1000]

    class Failing(io.FileIO):
        """A file that takes `left` bytes."""

        def write(self, content):
            if not left[0]:
                raise OSError(error, os.strerror(error))
            left[0] -= len(taken := bytes(content[: left[0]]))
            return super().write(taken)

    open_file = Path.open

    def open_failing(path, mode="r", *given, **options):
        return Failing(path, "a") if mode == "ab" else open_file(path, mode, *given, **options)

    monkeypatch.setattr(Path, "open", open_failing)
    journal = open_journal(folder)
    for step in range(20):
        journal.write("eval", {"step": step, "loss": 1.0})
    assert (
        folder.metrics.stat().st_size == 1000
        and caplog.text.count("kept in memory until they can be") == 1
    )
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        folder.mirror()
    left[0] = 10**6
    if error == errno.EIO:
        journal.write("train", {"step": 20})
    journal.close()
    assert [line["step"] for line in read_lines(folder.local)] == list(
        range(20 + (error == errno.EIO))
    )
    folder.mirror()


def test_steps_do_not_wait_for_their_lines_which_keep_their_order(folder):
    """The owner is looked for once for the lines that waited; of a lost folder all are left out."""
    may_look = threading.Event()
    looks = []
    shown = []

    def look():
        looks.append(len(shown))
        may_look.wait(10)

    folder.ownership.check = look
    journal = open_journal(folder)
    for step in range(10):
        journal.write("train", {"step": step}, lambda step=step: shown.append(step))
    assert folder.metrics.read_bytes() == b"" and not shown
    may_look.set()
    journal.write("eval", {"step": 10}, lambda: shown.append(10))
    assert [line["step"] for line in read_lines(folder.local)] == shown == list(
        range(11)
    ) and 1 <= len(looks) <= 3

    def lose():
        raise LeaseLost("another job has it")

    folder.ownership.check = lose
    journal.write("train", {"step": 11})
    journal.close()
    assert not journal.waiting and len(list(read_lines(folder.local))) == 11


def test_the_lines_of_the_steps_before_a_checkpoint_are_written_before_it(
    tmp_path, prepared, monkeypatch
):
    """A run that is killed right after it does not write them again when it resumes."""
    save = AsyncSaver.save
    seen = []

    def look(self, progress, *args, **kwargs):
        seen.append([line["step"] for line in read_lines(self.folder.local)])
        return save(self, progress, *args, **kwargs)

    monkeypatch.setattr(AsyncSaver, "save", look)
    monkeypatch.setattr(Journal, "_write_beside", lambda self: None)
    train_here(tmp_path / "run", prepared, "max_steps=4", "checkpoint.every=2", "eval_every=null")
    assert seen[0] == [1, 2] and set(seen[1]) >= {1, 2, 3, 4}


@pytest.mark.parametrize(
    "bad", ["{", "[" * 99_999, "[1]", {"step": -1}, {"step": 2**63}, {"kind": 3}, {"attempt": "1"}]
)
def test_a_damaged_line_is_left_out_and_named(folder, bad):
    rows = [
        json.dumps(LINE),
        bad if isinstance(bad, str) else json.dumps(LINE | bad),
        json.dumps(LINE),
    ]
    for half in ("", '{"kind": "tr'):
        folder.metrics.write_text("\n".join([*rows, half]))
        damage = []
        assert (
            list(read_lines(folder.local))
            == list(read_back(folder.local, damage=damage))
            == [LINE, LINE]
        )
        assert len(damage) == 1 and damage[0].startswith("a line is not ")
    folder.metrics.write_text("\n".join([rows[0], half]))
    damage = []
    assert list(read_back(folder.local, damage=damage)) == [LINE] and not damage
    assert open_journal(folder).attempt == 2


@pytest.mark.parametrize("number", [0, 1, 2, 9, 10, 11, 500])
def test_lines_are_the_same_from_either_end(folder, monkeypatch, number):
    """Blocks end within lines and at their ends."""
    monkeypatch.setattr(parts, "BLOCK_BYTES", 10)
    lines = [LINE | {"step": step, "text": "x" * (step % 37)} for step in range(number)]
    folder.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert list(read_lines(folder.local)) == list(read_back(folder.local))[::-1] == lines
    assert list(read_back(folder.local, containing=b'"step": 1,'))[::-1] == lines[1:2]


def test_a_line_without_an_end_is_not_read_as_a_whole(folder):
    folder.metrics.touch()
    os.truncate(folder.metrics, 2**40)  # it takes no space on the disk
    rejects("a line of metrics.jsonl has more than", list, read_lines(folder.local))
    rejects("a line has more than", list, read_back(folder.local))


def test_a_process_that_is_killed_while_it_logs_does_not_silence_the_others(capsys):
    """As the prefetching process is, when a run ends."""

    def write_and_end() -> None:
        tqdm.get_lock().acquire()
        os._exit(0)

    handler = TerminalHandler()
    record = logging.makeLogRecord({"msg": "still here"})
    handler.emit(record)
    child = multiprocessing.get_context("fork").Process(target=write_and_end)
    child.start()
    child.join()
    thread = threading.Thread(target=handler.emit, args=(record,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and capsys.readouterr().err == "still here\n" * 2
