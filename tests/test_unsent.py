"""A save that S3 does not take: kept whole on this machine, tried again, and uploaded by the next start here."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from services.fault_proxy import Fault
from test_saver import built, save, saved, saver_of

from train.attempt import recovery
from train.checkpoints import writer as writer_module
from train.checkpoints.loader import newest_valid
from train.checkpoints.manifest import FILE, Manifest
from train.checkpoints.store_s3 import S3Store
from train.checkpoints.unsent import adopt
from train.config import CheckpointConfig, InputError, ShardsConfig, TrainConfig
from train.run_folder.lease import LeaseLost
from train.storage import folders
from train.storage.folders import open_folder
from train.tasks.mlm import MLMConfig

AWAY = Fault("status", match="/checkpoints/")
MACHINE = "node-1"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch, pauses):
    monkeypatch.setattr(writer_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(writer_module, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def store(bucket, tmp_path):
    return S3Store(open_folder(bucket.location("run"), bucket.config()), tmp_path / "staging")


def copies(store):
    return sorted(path.parent for path in store.local.glob(f"saving/*/{FILE}"))


def start(store, number, *, host=MACHINE, previous=MACHINE):
    """What the next start of the run does with the copies, before it loads."""
    before = {"number": number - 1, "host": previous}
    adopt(store.local, SimpleNamespace(number=number, previous=before, claim={"host": host}))
    store.send_kept(number)
    store.collect_garbage(ended_below=number)


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
    words = f"; step 6 is whole in {folder}: the next start on this machine uploads it"
    assert unsent.saver.newest_text == f"the newest checkpoint is of step 3 ({store.location}){words}"
    (line,) = [line.message for line in caplog.get_records("setup") if line.levelname == "ERROR"]
    assert line.startswith("saving step 6: Unreachable: s3://") and line.endswith(words)
    assert store.steps() == [3]


def test_the_next_start_on_this_machine_uploads_it_and_goes_on_from_there(store, unsent):
    wanted = unsent.trained[0].state_dict()
    start(store, 2)
    assert store.steps() == [3, 6] and copies(store) == []
    manifest, faults = newest_valid(store)
    assert (manifest.step, manifest.fence, faults) == (6, 2, [])
    uploaded = torch.load(store.path_of(manifest) / "model.pt", weights_only=True)
    assert all(torch.equal(uploaded[name], value) for name, value in wanted.items())


def test_a_start_that_fails_before_it_can_upload_hands_it_on(bucket, store, unsent):
    bucket.proxy.set(AWAY)
    with pytest.raises(writer_module.Unreachable):
        start(store, 2)
    bucket.proxy.set()
    assert len(copies(store)) == 1
    start(store, 3)
    assert store.steps() == [3, 6]


@pytest.mark.parametrize(
    "start_of",
    [{"number": 3}, {"number": 2, "previous": "node-2"}],
    ids=["another lease between", "another machine had its number"],
)
def test_it_is_left_out_if_the_run_was_elsewhere_since(store, unsent, caplog, start_of):
    start(store, **start_of)
    assert store.steps() == [3]
    (folder,) = copies(store)  # nothing else has this work
    assert [line for line in caplog.messages if f"the save of step 6 in {folder} is not uploaded" in line]


@pytest.mark.parametrize(("name", "fault"), [("model.pt", "has sha256"), (FILE, "it was changed after")])
def test_a_damaged_copy_is_left_out(store, unsent, caplog, name, fault):
    path = copies(store)[0] / name
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    start(store, 2)
    assert store.steps() == [3]
    assert [line for line in caplog.messages if name in line and fault in line]


def test_it_is_left_out_if_s3_has_as_new_a_step(store, unsent):
    """As after a kill between the commit and the removal of the copy."""
    store.commit(copies(store)[0], Manifest.from_json((copies(store)[0] / FILE).read_bytes()))
    committed = store.manifest(6)
    unsent.saver.store.keep(store.scratch(6, 0), Manifest(6, 1, {}, {}, {}, 1, "ddp", None))
    start(store, 2)
    assert store.manifest(6) == committed and store.aside() == []


def test_a_newer_save_takes_the_place_of_the_copy(bucket, store, unsent):
    bucket.proxy.set(AWAY)
    saved(unsent.saver, 9, unsent.trained)
    (folder,) = copies(store)
    assert f"step 9 is whole in {folder}" in unsent.saver.newest_text
    bucket.proxy.set()
    assert saved(unsent.saver, 12, unsent.trained) is None
    assert copies(store) == [] and "whole" not in unsent.saver.newest_text
    assert store.steps() == [3, 12]


def test_the_copy_makes_room_for_a_newer_save(store, unsent, monkeypatch):
    """A disk for one checkpoint."""
    check_room = folders.check_room

    def one_alone(folder, num_bytes):
        check_room(folder, 0 if len(list(folder.parent.iterdir())) == 1 else 2**60)

    monkeypatch.setattr("train.checkpoints.store_s3.check_room", one_alone)
    assert saved(unsent.saver, 9, unsent.trained) is None
    assert store.steps() == [3, 9]


def test_the_last_save_is_tried_again_while_there_is_time(bucket, store, caplog):
    saver = saver_of(store)
    bucket.proxy.set(Fault("status", match="^PUT .*/optimizer.pt", times=10))  # seven in the first attempt
    save(saver, 6, built(), patience_s=60.0)
    saver.wait()
    assert [result.failure for result in saver.take()] == [None]
    assert store.steps() == [6] and copies(store) == []
    (line,) = [line for line in caplog.messages if line.startswith("saving step 6: s3://")]
    assert "S3 answers 503" in line and "tried again for up to" in line
    assert len({key.split("/")[3] for key in bucket.keys("run/checkpoints/") if key.endswith(".pt")}) == 1


def test_a_job_that_lost_the_run_folder_keeps_no_copy(store, unsent):
    def lost():
        raise LeaseLost("another job owns it now")

    unsent.saver.writer.may_commit = lost
    assert "LeaseLost" in saved(unsent.saver, 9, unsent.trained)
    assert copies(store) == []


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (403, "AccessDenied", "no permission to write it"),
        (400, "ExpiredToken", "the AWS credentials have expired"),
        (403, "RequestTimeTooSkewed", "this machine's clock is wrong"),
        (404, "NoSuchBucket", "there is no bucket"),
        (503, "SlowDown", "S3 answers 503"),
    ],
)
def test_the_error_that_ends_a_run_names_the_cause(bucket, store, code, error, words):
    saver = saver_of(store, max_failures=2)
    bucket.proxy.set(Fault("status", match="/checkpoints/", code=code, error=error))
    for step in (3, 6):
        saved(saver, step, built())
    text = str(saver.failure)
    assert text.startswith("2 saves in a row failed") and words in text and "\n" not in text


def test_the_last_save_is_not_tried_again_after_max_run_s():
    def cfg(**changes):
        data = ShardsConfig(path="x")
        save = CheckpointConfig(patience_s=300.0)
        task = MLMConfig()
        return TrainConfig(
            run_dir="run", max_steps=1, micro_batch_size=1, task=task, data=data, checkpoint=save, **changes
        )

    now_s = time.monotonic()
    assert recovery.last_save_patience_s(cfg(), now_s) == 300.0
    assert recovery.last_save_patience_s(cfg(max_run_s=1000.0), now_s) == 300.0
    assert 0 < recovery.last_save_patience_s(cfg(max_run_s=1000.0), now_s - 900) <= 100.0
    assert recovery.last_save_patience_s(cfg(max_run_s=1000.0), now_s - 2000) == 0.0
    with pytest.raises(InputError, match="checkpoint.patience_s=-1.0 must be 0 or more"):
        CheckpointConfig(patience_s=-1.0)
