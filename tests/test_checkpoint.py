"""Checkpoints are whole or not there; what is damaged is passed over, named and kept."""

import json
import pickle
import shutil

import pytest
import torch
from running import lines, train_config

from train import checkpoint, loop
from train.backend.ddp import DDP
from train.config import BackendConfig, InputError
from train.preempt import StopRequest


def train(run_dir, data, *overrides):
    return loop.run(train_config(run_dir, data, *overrides), StopRequest())


def step_folder(run_dir, step):
    return run_dir / "checkpoints" / f"step_{step:08d}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prepared):
    """A run of six steps with checkpoints at 3 and 6."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert train(run_dir, prepared) == ("done", 6)
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_the_manifest_tells_what_the_files_are(finished):
    manifest = json.loads((step_folder(finished, 6) / "manifest.json").read_text())
    assert manifest["step"] == 6
    assert manifest["files"]["state.pt"]["bytes"] == (step_folder(finished, 6) / "state.pt").stat().st_size
    assert checkpoint.damage(finished / "checkpoints", 6) is None
    assert checkpoint.steps(finished / "checkpoints") == [3, 6]
    assert lines(finished, "checkpoint")[-1]["bytes"] == manifest["files"]["state.pt"]["bytes"]


def test_the_state_is_tensors_and_plain_containers(finished):
    state = torch.load(step_folder(finished, 6) / "state.pt", weights_only=True)
    assert state.keys() == {"model", "optimizer", "rng", "progress"}
    assert state["progress"]["step"] == 6


def damage_state(run_dir, step, how):
    path = step_folder(run_dir, step) / "state.pt"
    content = bytearray(path.read_bytes())
    if how == "bit":
        content[len(content) // 2] ^= 1
    elif how == "short":
        content = content[:-100]
    elif how == "empty":
        content = b""
    path.write_bytes(content)
    if how == "missing":
        path.unlink()
    if how == "manifest":
        (step_folder(run_dir, step) / "manifest.json").write_text("{}")
    if how == "no manifest":
        (step_folder(run_dir, step) / "manifest.json").unlink()


@pytest.mark.parametrize("how", ["bit", "short", "empty", "missing", "manifest", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(run_dir, prepared, how):
    damage_state(run_dir, 6, how)
    assert checkpoint.newest_whole(run_dir / "checkpoints")[0] == 3
    whole = torch.load(step_folder(run_dir, 3) / "state.pt", weights_only=True)
    assert train(run_dir, prepared) == ("done", 6)
    assert checkpoint.damage(run_dir / "checkpoints", 6) is None
    assert len(list((run_dir / "checkpoints").glob("step_00000006.broken-*"))) == 1
    assert whole["progress"]["step"] == 3
    assert "checkpoint of step 6 is damaged" in lines(run_dir, "fault")[-1]["reason"]


def test_only_damaged_checkpoints_stop_the_run_instead_of_starting_over(run_dir, prepared):
    damage_state(run_dir, 3, "bit")
    damage_state(run_dir, 6, "short")
    with pytest.raises(RuntimeError, match="none of the 2 checkpoints"):
        train(run_dir, prepared)


def test_a_planted_pickle_is_not_executed(run_dir, prepared, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    path = step_folder(run_dir, 6) / "state.pt"
    torch.save({"model": Bomb()}, path)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"]["state.pt"] = {
        "bytes": path.stat().st_size,
        "sha256": checkpoint.sha256_file(path),
    }
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(pickle.UnpicklingError):
        train(run_dir, prepared)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("dies_in", ["save", "sync_file", "write_atomic", "sync_folder"])
def test_a_save_that_dies_leaves_the_older_checkpoint_the_newest(run_dir, prepared, monkeypatch, dies_in):
    """At each stage: while the state is written, before it is synced, before the manifest, before the rename counts."""

    def die(*_arguments, **_settings):
        raise OSError(28, "No space left on device")

    shutil.rmtree(step_folder(run_dir, 6))
    with monkeypatch.context() as patch:
        if dies_in == "save":
            patch.setattr(DDP, "save", die)
        else:
            patch.setattr(checkpoint, dies_in, die)
        with pytest.raises(OSError, match="No space left"):
            train(run_dir, prepared)
    wanted = 6 if dies_in == "sync_folder" else 3  # by then it has its name
    assert checkpoint.newest_whole(run_dir / "checkpoints")[0] == wanted
    assert train(run_dir, prepared) == ("done", 6)


def test_the_newest_are_kept(tmp_path, prepared):
    train(tmp_path / "run", prepared, "checkpoint.every=1", "checkpoint.keep=2", "export=false")
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [5, 6]
    train(tmp_path / "all", prepared, "checkpoint.every=1", "checkpoint.keep=0", "export=false")
    assert checkpoint.steps(tmp_path / "all" / "checkpoints") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=7", "seed=0, this one has 7"),
        ("global_batch_size=16", "global_batch_size=8, this one has 16"),
        ("optim.lr=1e-4", "optim.lr=0.003, this one has 0.0001"),
        ("model.hidden_size=64", "model.hidden_size=32, this one has 64"),
        ("task.mask_rate=0.2", "task.mask_rate=0.15, this one has 0.2"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_left_alone(run_dir, prepared, override, says):
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=says):
        train(run_dir, prepared, override)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_folder_that_is_no_run_is_left_alone(tmp_path, prepared):
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(InputError, match="holds files that are not a run's"):
        train(tmp_path, prepared)
    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_a_run_folder_that_cannot_be_written_is_refused(prepared, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for place in ("/proc/baretrain", str(tmp_path / "file" / "run")):
        with pytest.raises(InputError, match="cannot write to"):
            train(place, prepared)


def test_a_checkpoint_of_another_model_is_refused(run_dir, prepared):
    environment = json.loads((run_dir / "environment.json").read_text())
    environment["identity"]["seed"] = 7  # a folder put together by hand
    (run_dir / "environment.json").write_text(json.dumps(environment))
    with pytest.raises(InputError, match="is of a run with seed=0, this one has 7"):
        train(run_dir, prepared, "seed=7")


def test_a_finished_run_is_not_trained_again(run_dir, prepared):
    before = len(lines(run_dir, "train"))
    assert train(run_dir, prepared) == ("done", 6)
    assert len(lines(run_dir, "train")) == before
    assert len(lines(run_dir, "summary")) == 1


def test_precision_is_chosen_by_name_and_shown(tmp_path, prepared):
    assert DDP(BackendConfig(device="cpu", precision="bf16")).precision == "bf16"
    train(tmp_path / "run", prepared, "backend.precision=bf16", "export=false")
    assert lines(tmp_path / "run", "summary")[0]["precision"] == "bf16"
