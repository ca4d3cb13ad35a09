"""A save that S3 does not take: kept whole on this machine, tried again, and replaced by the next one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from services.fault_proxy import Fault
from test_saver import built, save, saved, saver_of

from train.checkpoints import saver as saver_module
from train.checkpoints.manifest import FILE, Manifest
from train.checkpoints.store_s3 import S3Store
from train.run.checkpoint_manager import last_save_patience_s
from train.run_folder.lease import name_of
from train.run_folder.ownership import LeaseLost
from train.storage import folders
from train.storage.folders import open_folder

AWAY = Fault("status", match="/checkpoints/")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch, pauses):
    monkeypatch.setattr(saver_module, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def store(bucket, tmp_path):
    return S3Store(open_folder(bucket.location("run"), bucket.config()), tmp_path / "staging")


def copies(store):
    return sorted(path.parent for path in store.local.glob(f"saving/*/{FILE}"))


@pytest.fixture
def unsent(bucket, store):
    """Step 3 is in S3, step 6 was saved while it was away. Both by lease 1."""
    saver, trained = saver_of(store), built()
    assert saved(saver, 3, trained) is None
    bucket.proxy.set(AWAY)
    assert "S3 answers 503" in saved(saver, 6, trained)
    bucket.proxy.set()
    return SimpleNamespace(saver=saver, trained=trained)


def test_a_save_that_s3_does_not_take_stays_whole_and_its_folder_is_named(store, unsent, caplog):
    (folder,) = copies(store)
    assert Manifest.from_json((folder / FILE).read_bytes()).step == 6
    words = f"; step 6 is complete in {folder}; docs/faults.md says how to upload it"
    assert (
        unsent.saver.newest_text == f"the newest checkpoint is of step 3 ({store.location}){words}"
    )
    (line,) = [line.message for line in caplog.get_records("setup") if line.levelname == "ERROR"]
    assert line.startswith("saving step 6: Unreachable: s3://") and line.endswith(words)
    assert store.steps() == [3]


@pytest.mark.parametrize(
    "name", [None, "5f0c1a2b3d4e4f5a8b9c0d1e2f3a4b5c"], ids=["now", "b14c56c"]
)
def test_a_start_names_the_copy_until_s3_has_the_step(store, unsent, caplog, name):
    """Its step is that of its manifest: commit b14c56c named the folder by a random number alone."""
    (folder,) = copies(store)
    folder = folder.rename(folder.with_name(name or folder.name))
    killed = store.begin(9, 0)
    store.collect_garbage(ended_below=2)
    assert copies(store) == [folder] and not killed.exists()
    assert [
        line for line in caplog.messages if f"{folder} contains a save that is not in S3" in line
    ]
    unsent.trained = built()
    assert saved(saver_of(S3Store(store.folder, store.local / "other")), 6, unsent.trained) is None
    store.collect_garbage(ended_below=2)
    assert copies(store) == []


def test_a_newer_save_takes_the_place_of_the_copy(bucket, store, unsent):
    bucket.proxy.set(AWAY)
    saved(unsent.saver, 9, unsent.trained)
    (folder,) = copies(store)
    assert f"step 9 is complete in {folder}" in unsent.saver.newest_text
    bucket.proxy.set()
    assert saved(unsent.saver, 12, unsent.trained) is None
    assert copies(store) == [] and "whole" not in unsent.saver.newest_text
    assert store.steps() == [3, 12]


@pytest.mark.parametrize("name", ["manifest.json", "optimizer.pt"])
def test_the_next_save_removes_from_s3_what_one_that_failed_has_left(bucket, store, name):
    """The files of an earlier owner, which may not have ended, stay."""
    saver, trained = saver_of(store), built()
    earlier = [
        f"run/checkpoints/step_00000001/00000000-01234567{end}"
        for end in (".unfinished", "/model.pt")
    ]
    bucket.put(earlier[0], b'{"files": ["model.pt"]}')
    bucket.put(earlier[1], b"of a save that may be under way")
    bucket.proxy.set(Fault("status", match=f"^PUT .*/{name}", code=403, error="AccessDenied"))
    assert "no permission" in saved(saver, 3, trained)
    bucket.proxy.set()
    assert len(bucket.keys("run/checkpoints/step_00000003/")) > 1
    assert saved(saver, 6, trained) is None
    keys = bucket.keys("run/checkpoints/")
    assert (
        keys[:2] == sorted(earlier)
        and len(keys) == 6
        and keys[-1].endswith("step_00000006/manifest.json")
    )


def test_the_copy_makes_room_for_a_newer_save(store, unsent, monkeypatch):
    """A disk for one checkpoint."""
    check_space = folders.check_space

    def one_alone(folder, num_bytes):
        check_space(folder, 0 if len(list(folder.parent.iterdir())) == 1 else 2**60)

    monkeypatch.setattr("train.checkpoints.store_s3.check_space", one_alone)
    assert saved(unsent.saver, 9, unsent.trained) is None
    assert store.steps() == [3, 9]


def test_the_last_save_is_tried_again_while_there_is_time(bucket, store, caplog):
    saver = saver_of(store)
    # seven in the first attempt
    bucket.proxy.set(Fault("status", match="^PUT .*/optimizer.pt", times=10))
    save(saver, 6, built(), patience_s=60.0)
    saver.wait()
    assert [result.failure for result in saver.take()] == [None]
    assert store.steps() == [6] and copies(store) == []
    (line,) = [line for line in caplog.messages if line.startswith("saving step 6: s3://")]
    assert "S3 answers 503" in line and "retrying for up to" in line
    assert (
        len({key.split("/")[3] for key in bucket.keys("run/checkpoints/") if key.endswith(".pt")})
        == 1
    )


def test_a_job_that_lost_the_run_folder_keeps_no_copy(store, unsent):
    def lost():
        raise LeaseLost("another job owns it now")

    unsent.saver.folder.ownership.check = lost
    assert "LeaseLost" in saved(unsent.saver, 9, unsent.trained)
    assert copies(store) == []


@pytest.mark.parametrize(
    ("max_run_s", "run_s", "least_s", "most_s"),
    [(None, 0, 300, 300), (1000.0, 0, 300, 300), (1000.0, 900, 1, 100), (1000.0, 2000, 0, 0)],
)
def test_the_last_save_is_not_tried_again_after_max_run_s(max_run_s, run_s, least_s, most_s):
    cfg = SimpleNamespace(max_run_s=max_run_s)
    assert least_s <= last_save_patience_s(cfg, time.monotonic() - run_s) <= most_s


def test_a_superseded_owner_takes_back_what_it_has_sent(bucket, store, monkeypatch):
    """Nobody else may come after the next owner's end to remove it."""
    saver, trained, upload = saver_of(store), built(), store.folder.upload

    def upload_slowly(name, path):
        upload(name, path)
        store.folder.write(name_of(2), b"the next owner's")

    monkeypatch.setattr(store.folder, "upload", upload_slowly)
    assert saved(saver, 6, trained).startswith("LeaseLost: ")
    assert not bucket.keys("run/checkpoints/")
