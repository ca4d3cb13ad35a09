"""Lines on a disk that is full for a while: what it refuses waits, and nothing is there by half."""

import contextlib
import resource

import pytest
from torch.utils.tensorboard import SummaryWriter

from train.telemetry import lines as module
from train.telemetry.lines import LineFile
from train.telemetry.tensorboard import Board


@contextlib.contextmanager
def files_may_hold(num_bytes):
    """No file of this process may grow beyond it: a write is cut off there, the next one refused (setrlimit(2))."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


@pytest.fixture
def logged(monkeypatch):
    """What is logged. It does not go to pytest's own files, which may not grow either."""
    result = []
    for level in ("warning", "error"):
        monkeypatch.setattr(module.logger, level, lambda text, *values: result.append(text % values))
    return result


def test_what_is_refused_comes_later_in_order(tmp_path, logged):
    path = tmp_path / "lines"
    file = LineFile(path)
    file.write("first")
    with files_may_hold(9):
        file.write("second")
        file.write("third")
        assert path.read_bytes() == b"first\nsec"  # the disk took so much
    file.write("fourth")
    file.close()
    assert path.read_text().split() == ["first", "second", "third", "fourth"]
    assert logged == [f"{path}: File too large; its lines wait in memory"]


def test_a_line_that_never_got_through_leaves_nothing(tmp_path, logged):
    path = tmp_path / "lines"
    file = LineFile(path)
    file.write("first")
    with files_may_hold(9):
        file.write("second")
        file.close()
    assert path.read_text() == "first\n"
    assert logged[-1] == f"{path}: 1 lines could not be written"
    again = LineFile(path)
    again.write("second")
    again.close()
    assert path.read_text() == "first\nsecond\n"


def test_a_full_disk_costs_a_run_nothing_but_time(toy, monkeypatch):
    """From the third step to the sixth no file may grow: no line, no log, no checkpoint."""
    options = {"max_steps": 9, "eval_every": None, "checkpoint": {"every": 1, "max_failures": 99}, "tensorboard": True}
    toy.train("calm", **options)
    limit, toy.losses = contextlib.ExitStack(), 0

    def fill_and_free(call):
        if call == 3:
            limit.enter_context(files_may_hold((toy.folder / "run/metrics.jsonl").stat().st_size + 100))
        if call == 7:
            limit.close()
        return 1.0

    # Output that pytest catches goes to files as well.
    monkeypatch.setattr("tqdm.tqdm.write", lambda *_, **__: None)
    monkeypatch.setattr(module.logger, "propagate", False)
    toy.scale = fill_and_free
    with limit:
        assert toy.train(**options) == ("done", 9)
    assert toy.values("train", "loss") == toy.values("train", "loss", "calm") and len(toy.lines("train")) == 9
    assert any("checkpoint of step" in reason for reason in toy.faults())
    assert toy.outcome()["checkpoint"] == 9


@pytest.mark.parametrize("when", ["add", "close"])
def test_tensorboard_gives_up_without_the_run(tmp_path, monkeypatch, when):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    board = Board(tmp_path, first_step=1)
    monkeypatch.setattr(SummaryWriter, {"add": "add_scalar", "close": "close"}[when], refuse)
    board.add("train", {"step": 1, "loss": 1.0})
    board.close()
    board.add("train", {"step": 2, "loss": 1.0})
    assert board.writer is None
