"""The benchmark of saves in its smallest form: what it counts and checks, not what it times."""

import pytest
import torch

from benchmarks import checkpoint


@pytest.fixture
def state():
    return checkpoint.build_state("tiny")


@pytest.fixture
def threads():
    """The benchmark sets one for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_one_run_prints_the_tables_and_leaves_nothing(tmp_path, capsys, threads):
    small = "--model tiny --rounds 1 --alone-s 0.02 --sides torch.save ours --folder".split()
    checkpoint.main([*small, str(tmp_path)])
    told, touched, saves, loads = capsys.readouterr().out.strip().split("\n\n")
    assert told.startswith("tiny: 1 million parameters with moments, 0.01 GB; ")
    assert "Ours makes its memory beside the first steps" in touched
    rows = {row.split(" | ")[0]: row.split(" | ") for row in saves.splitlines()[2:]}
    memory = {label.strip("| "): float(cells[-1].strip("*| ")) for label, cells in rows.items()}
    assert memory["torch.save, synced"] < 0.5
    assert memory["**ours**"] < 4  # one copy; a state so small may fit into what this process has had before
    assert len(loads.splitlines()) == 2 + 3
    assert list(tmp_path.iterdir()) == []


def test_a_save_costs_its_stall_and_the_steps_that_were_not_taken():
    save = checkpoint.Save(stall_s=2.0, beside_s=8.0, steps_s=[1.0, 1.0, 6.0], alone_s=0.5)
    assert (save.durable_s, save.lost_s) == (10.0, 8.5)
    assert (save.share, save.slowest) == (3 * 0.5 / 8, 12.0)
    blocking = checkpoint.Save(stall_s=3.0, beside_s=1e-6, steps_s=[], alone_s=0.5)
    assert (blocking.lost_s, blocking.share, blocking.slowest) == (blocking.durable_s, 0.0, 0.0)
    first, *later = (checkpoint.Save(stall_s, 0.0, []) for stall_s in (9.0, 1.0, 3.0))
    assert checkpoint.Round(first, [first, *later]).later(lambda save: save.stall_s) == 2.0


@pytest.mark.parametrize("name", checkpoint.LOADED)
def test_what_a_side_gives_back_is_what_it_was_given(name, state, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    side = checkpoint.SIDES[name](state, tmp_path / name)
    found = checkpoint.measure_saves(side, saves=2, alone_s=0.01)
    assert len(found.saves) == 2
    assert [path.name for path in side.folder.iterdir() if path.is_dir()] == [side.place(1).name]
    assert checkpoint.measure_load(side, 1) > 0


def test_another_state_is_refused(state, tmp_path):
    side = checkpoint.TorchSave(state, tmp_path)
    state.set_mark(5)
    side.save(0)
    with pytest.raises(RuntimeError, match="gave back another state"):
        checkpoint.measure_load(side, 0)


def test_a_side_that_fails_ends_the_benchmark():
    with pytest.raises(RuntimeError, match="a side failed"):
        checkpoint.in_a_fork(lambda: 1 / 0)
