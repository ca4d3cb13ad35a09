"""Checkpoints are whole or not there; what is damaged is passed over, named and kept."""

import json
import shutil

import pytest
import torch
from rejections import rejects
from running import contents, lines, outcome, train_here
from saved_steps import copy_step, flip, step_folder, store_of

from train.checkpoints import store as stores
from train.checkpoints.loader import newest_valid
from train.checkpoints.manifest import Manifest, NoneValid, OtherVersion, Untrusted, check_files
from train.checkpoints.retention import prune
from train.checkpoints.store import LocalStore
from train.run_folder.ownership import LeaseLost
from train.storage import checksums as manifests
from train.storage.atomic_io import write_atomic
from train.storage.folders import sha256_file


def aside(run_dir, word):
    return [name for name in store_of(run_dir).quarantined() if f".{word}-" in name]


def test_the_manifest_says_what_the_files_are(finished):
    manifest = store_of(finished).manifest(6)
    assert (manifest.step, manifest.fence, manifest.world_size, manifest.progress["examples"]) == (
        6,
        1,
        1,
        48,
    )
    assert manifest.files.keys() == {"model.pt", "optimizer.pt", "ranks.pt"}
    check_files(step_folder(finished, 6), manifest)
    assert store_of(finished).steps() == [3, 6]
    assert lines(finished, "checkpoint")[-1]["bytes"] == manifest.num_bytes
    assert manifest.metric == lines(finished, "eval")[-1]["loss"]
    assert manifest.settings["optim.lr"] == 3e-3


def damage(run_dir, step, how, name="model.pt"):
    path = step_folder(run_dir, step) / name
    if how == "missing":
        path.unlink()
    elif how == "bit":
        flip(path)
    elif how == "changed":
        path.write_text(path.read_text().replace('"step": 6', '"step": 5'))
    else:
        path.write_bytes({"short": path.read_bytes()[:-100], "empty": b"", "{}": b"{}"}[how])


def lose():
    raise LeaseLost("it is lost")


DAMAGES = [(how, "model.pt") for how in ("bit", "short", "missing")]
DAMAGES += [(how, "manifest.json") for how in ("bit", "changed", "{}", "missing")]


@pytest.mark.parametrize(("how", "name"), DAMAGES)
def test_a_damaged_checkpoint_is_quarantined_for_an_older_one(run_dir, how, name):
    damage(run_dir, 6, how, name)
    rejects("is lost", newest_valid, store_of(run_dir), check_owner=lose, error=LeaseLost)
    assert not aside(run_dir, "damaged")
    manifest, (fault,) = newest_valid(store_of(run_dir))
    assert manifest.step == 3
    assert fault.startswith(f"checkpoint of step 6 is damaged ({name}")
    assert len(aside(run_dir, "damaged")) == 1


def test_a_disk_that_may_come_back_is_not_a_damaged_checkpoint(run_dir, monkeypatch):
    def stale(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(manifests, "sha256_file", stale)
    rejects("Stale", newest_valid, store_of(run_dir), error=OSError)
    assert store_of(run_dir).steps() == [3, 6] and not store_of(run_dir).quarantined()


def test_a_checkpoint_of_another_version_is_left_alone(run_dir, prepared):
    path = step_folder(run_dir, 6) / "manifest.json"
    path.write_text(path.read_text().replace('"format": 5', '"format": 2'))
    before = path.read_bytes()
    rejects(
        "of step 6 has format 2; this version reads 5",
        train_here,
        run_dir,
        prepared,
        error=OtherVersion,
    )
    assert store_of(run_dir).steps() == [3, 6] and path.read_bytes() == before
    assert (outcome(run_dir)["kind"], outcome(run_dir)["goes_on"]) == ("other_version", False)


def test_only_damaged_checkpoints_stop_the_run_instead_of_starting_over(run_dir, prepared):
    damage(run_dir, 3, "bit")
    damage(run_dir, 6, "short")
    # a second start does not take the first one's rejection for an empty folder
    for _ in range(2):
        with pytest.raises(
            NoneValid, match="none of the checkpoints.*model.pt has .*model.pt has sha256"
        ):
            train_here(run_dir, prepared)
    ended = outcome(run_dir)
    assert (ended["outcome"], ended["kind"], ended["goes_on"]) == (
        "failed",
        "no_valid_checkpoint",
        False,
    )
    assert store_of(run_dir).steps() == [3, 6] and not store_of(run_dir).quarantined()


@pytest.mark.parametrize("how", ["quarantined", "vanished"])
def test_checkpoints_that_are_gone_are_no_reason_to_start_over(run_dir, prepared, how):
    """A disk that is not mounted, a rule that deletes."""
    for step in (3, 6) if how == "quarantined" else ():
        store_of(run_dir).quarantine(step, "damaged")
    if how == "vanished":
        shutil.rmtree(run_dir / "checkpoints")
    words = (
        "all are in quarantine"
        if how == "quarantined"
        else "metrics.jsonl says that step 6 was saved"
    )
    rejects(words, train_here, run_dir, prepared, error=NoneValid)


def plant(run_dir, name, state):
    """Another state under the newest manifest, with its right checksum; None: none, and the manifest names none."""
    path = step_folder(run_dir, 6) / name
    content = json.loads((path.parent / "manifest.json").read_text())
    del content["sha256"], content["format"]
    path.unlink()
    if state is None:
        del content["files"][name]
    else:
        torch.save(state, path)
        content["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (path.parent / "manifest.json").write_bytes(Manifest(**content).to_json())


class Bomb:
    def __reduce__(self):
        return (open, ("executed", "w"))


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("model.pt", {}, "does not contain the state of this model"),
        ("model.pt", None, "is missing, and its manifest does not name it"),
        ("model.pt", {"model": Bomb()}, "contains more than tensors"),
        ("optimizer.pt", {"param_groups": 5}, "does not contain the state"),
        ("ranks.pt", {"ranks": []}, "does not contain the state"),
    ],
)
def test_a_planted_state_is_one_line_and_not_executed(
    run_dir, prepared, tmp_path, monkeypatch, name, state, words
):
    plant(run_dir, name, state)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Untrusted, match=rf"{words}.*who wrote it$") as rejected:
        train_here(run_dir, prepared)
    assert "\n" not in str(rejected.value) and not (tmp_path / "executed").exists()


def test_the_newest_and_the_best_are_kept(run_dir):
    for step, metric in ((1, 2.0), (2, None), (4, 1.0), (5, 3.0), (7, None), (8, 9.0), (9, 9.0)):
        copy_step(run_dir, 3, step, metric=metric)
    assert prune(store_of(run_dir), 0) == []
    assert prune(store_of(run_dir), 2) == [1, 2, 3, 5, 6, 7]
    assert store_of(run_dir).steps() == [4, 8, 9]
    damage(run_dir, 8, "short")
    assert prune(store_of(run_dir), 1) == []  # what is damaged stays


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("global_batch_size=16", "global_batch_size: 8 -> 16"),
        ("model.hidden_size=64", "model.hidden_size: 32 -> 64"),
        ("data.path=another", "data: "),
    ],
)
def test_a_folder_of_another_run_is_rejected_and_left_alone(
    run_dir, prepared, shards, override, says
):
    before = contents(run_dir)
    rejects(
        rf"to another run \({says}",
        train_here,
        run_dir,
        prepared,
        override.replace("another", str(shards)),
    )
    assert contents(run_dir) == before


def test_a_change_of_the_run_has_to_be_forced_and_continues_at_the_same_sequence(
    run_dir, prepared
):
    more = [
        "max_steps=8",
        "log_every=2",
        "seed=7",
        "optim.lr=1e-3",
        "global_batch_size=16",
        "backend.precision=bf16",
    ]
    rejects(
        r"optim.lr: 0.003 -> 0.001, seed: 0 -> 7\); .*resume.force=true",
        train_here,
        run_dir,
        prepared,
        *more,
    )
    assert train_here(run_dir, prepared, *more, "resume.force=true") == ("done", 8)
    log = (run_dir / "log/rank_0000.txt").read_text()
    assert "resume.force=true" in log
    changed = "backend.precision: fp32 -> bf16, global_batch_size: 8 -> 16, log_every: 1 -> 2, max_steps: 6 -> 8"
    assert f"changed since step 6: {changed}, optim.lr: 0.003 -> 0.001" in log
    last = lines(run_dir, "train")[-1]
    assert (last["step"], last["examples"]) == (8, 6 * 8 + 2 * 16)
    assert lines(run_dir, "summary")[-1]["precision"] == "bf16"


def test_an_owner_that_slept_while_the_next_one_began_does_not_replace_what_that_one_saved(
    tmp_path, monkeypatch
):
    """It had looked at the lease and written all: the rename was still to come."""
    store = LocalStore(tmp_path)
    ours, theirs = (Manifest(6, fence, {}, {}, {}, 1, "ddp", None) for fence in (1, 2))
    sync_and_write = write_atomic

    def wake_up_late(path, content):
        sync_and_write(path, content)
        if path.parent == scratch:
            store.collect_garbage(ended_below=1)
            store.commit(store.begin(6, 0), theirs)

    scratch = store.begin(6, 0)
    monkeypatch.setattr(stores, "write_atomic", wake_up_late)
    with pytest.raises(FileNotFoundError):
        store.commit(scratch, ours)
    assert store.manifest(6) == theirs and store.quarantined() == []


def test_a_run_that_was_killed_after_its_last_save_gets_its_summary(run_dir, prepared):
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(
        "".join(line for line in metrics.read_text().splitlines(True) if '"summary"' not in line)
    )
    for _ in range(2):  # the second start finds the summary
        assert train_here(run_dir, prepared) == ("done", 6)
    assert [(line["step"], line["reason"]) for line in lines(run_dir, "summary")] == [(6, "done")]
