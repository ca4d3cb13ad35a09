"""A save that S3 does not take: tried again, and what it left removed."""

from __future__ import annotations

import pytest
from services.fault_proxy import Fault
from test_saver import built, save, saved, saver_of

from train.checkpoints import saver as saver_module
from train.checkpoints.store_s3 import S3Store
from train.run_folder.ownership import lease_name


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch, pauses):
    monkeypatch.setattr(saver_module, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def store(bucket, tmp_path):
    return S3Store(bucket.folder(), tmp_path / "staging")


@pytest.mark.parametrize("name", ["manifest.json", "optimizer.pt"])
def test_the_next_save_removes_from_s3_what_one_that_failed_has_left(bucket, store, name):
    """The files of an earlier owner, which may not have ended, stay."""
    saver = saver_of(store)
    trained = built()
    earlier = "run/checkpoints/step_00000001/00000000-01234567/model.pt"
    bucket.put(earlier, b"of a save that may be under way")
    bucket.proxy.set(Fault("status", match=f"^PUT .*/{name}", code=403, error="AccessDenied"))
    assert "no permission" in saved(saver, 3, trained)
    bucket.proxy.set()
    assert bucket.keys("run/checkpoints/step_00000003/")
    assert saved(saver, 6, trained) is None
    keys = bucket.keys("run/checkpoints/")
    assert keys[0] == earlier and len(keys) == 5
    assert keys[-1].endswith("step_00000006/manifest.json")


def test_the_last_save_is_tried_again_while_there_is_time(bucket, store, caplog):
    saver = saver_of(store)
    # seven in the first attempt
    bucket.proxy.set(Fault("status", match="^PUT .*/optimizer.pt", times=10))
    save(saver, 6, built(), patience_s=60.0)
    saver.wait()
    assert [result.failure for result in saver.take()] == [None]
    assert store.steps() == [6]
    (line,) = [line for line in caplog.messages if line.startswith("saving step 6: s3://")]
    assert "S3 answers 503" in line and "retrying for up to" in line
    assert (
        len({key.split("/")[3] for key in bucket.keys("run/checkpoints/") if key.endswith(".pt")})
        == 1
    )


def test_a_superseded_owner_takes_back_what_it_has_sent(bucket, store, monkeypatch):
    """Nobody else may come after the next owner's end to remove it."""
    saver = saver_of(store)
    trained = built()
    upload = store.folder.upload

    def upload_slowly(name, path):
        upload(name, path)
        store.folder.write(lease_name(2), b"the next owner's")

    monkeypatch.setattr(store.folder, "upload", upload_slowly)
    assert saved(saver, 6, trained).startswith("LeaseLost: ")
    assert not bucket.keys("run/checkpoints/")
