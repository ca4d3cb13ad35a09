"""Checkpoints in S3: stopped, disturbed, damaged and taken over, there is a whole one or none."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from rejections import rejects
from services.fault_proxy import Fault

from train.checkpoints.loader import newest_valid
from train.checkpoints.manifest import Manifest
from train.checkpoints.retention import prune
from train.checkpoints.store import LocalStore
from train.checkpoints.store_s3 import S3Store
from train.config import InputError
from train.run_folder.ownership import LeaseLost, Ownership, lease_name
from train.storage import s3
from train.storage.folders import sha256_bytes

pytestmark = pytest.mark.usefixtures("pauses")
NAMES = ("model.pt", "optimizer.pt", "ranks.pt")
PART_BYTES = 5 * 2**20  # the least that S3 takes
FOLDER = r"00000001-[0-9a-f]{8}"


@pytest.fixture
def store(bucket, tmp_path):
    return store_of(bucket, tmp_path)


def store_of(bucket, tmp_path, prefix="run"):
    return S3Store(bucket.folder(prefix), tmp_path / "staging")


def content_of(step, name):
    return f"{name} of step {step}".encode() * 1000


def save(store, step, *, fence=1, metric=None, model=b""):
    scratch = store.begin(step, 0)
    files = {}
    for name in NAMES:
        content = model if name == "model.pt" and model else content_of(step, name)
        (scratch / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": sha256_bytes(content)}
    manifest = store.prepare(Manifest(step, fence, {}, {}, {}, 1, "ddp", metric, files=files))
    store.send(scratch, manifest, list(NAMES))
    store.commit(scratch, manifest)
    shutil.rmtree(scratch)


def assert_loads(store, step):
    """This step and no newer one, each file as it was saved."""
    manifest, _ = newest_valid(store)
    assert manifest.step == step
    for name in NAMES:
        assert (store.path_of(manifest) / name).read_bytes() == content_of(step, name)
    store.release(store.path_of(manifest))


def files_of(bucket, step, prefix="run"):
    top = f"{prefix}/checkpoints/step_{step:08d}/"
    return [key.removeprefix(top) for key in bucket.keys(top)]


def is_whole(names):
    return (
        len(names) == 4
        and names[3] == "manifest.json"
        and all(re.match(FOLDER, name) for name in names[:3])
    )


# ---- a save ---------------------------------------------------------------------------------------------------------


def test_a_save_stopped_before_any_of_its_requests_leaves_the_checkpoint_before_it(
    bucket, tmp_path, monkeypatch
):
    """As by a kill: no request comes after it. The model goes in parts."""
    monkeypatch.setattr(s3.TRANSFER, "multipart_threshold", PART_BYTES)
    monkeypatch.setattr(s3.TRANSFER, "multipart_chunksize", PART_BYTES)
    # begin, two parts, end; two files, the lease, the manifest
    for number in range(9):
        prefix = f"stop-{number}"
        store = store_of(bucket, tmp_path, prefix)
        save(store, 3)
        bucket.proxy.set(Fault("status", skip=number, code=501, error="Stopped"))
        with suppress(InputError):
            save(store, 6, model=b"6" * (PART_BYTES + 1))
        is_stopped = any(seen.fault for seen in bucket.proxy.requests())
        bucket.proxy.set()
        is_committed = number >= 8
        num_files = 4 if is_committed else max(0, min(number - 3, 3))
        assert (len(files_of(bucket, 6, prefix)), is_stopped) == (num_files, not is_committed)
        assert store.steps() == ([3, 6] if is_committed else [3])
        store.collect_garbage(ended_below=9)
        assert len(files_of(bucket, 6, prefix)) == (4 if is_committed else 0)
        assert is_whole(files_of(bucket, 3, prefix))
        if not is_committed:
            assert_loads(store, 3)


@pytest.mark.parametrize("do", ["status", "lose", "delay"])
def test_a_disturbed_save_is_committed_once(bucket, tmp_path, do):
    """The answer to the manifest's creation is lost too: what is there then is not taken for another job's."""
    # 1 s for an attempt
    store = S3Store(bucket.folder(timeout_s=6.0), tmp_path / "staging")
    bucket.proxy.set(Fault(do, match="^PUT .*manifest.json", times=1 if do == "delay" else 2))
    save(store, 6)
    assert do in [seen.fault for seen in bucket.proxy.requests()]
    bucket.proxy.set()
    assert is_whole(files_of(bucket, 6))
    assert_loads(store, 6)


def test_a_step_that_is_saved_again_replaces_the_older_one_which_stays(bucket, store):
    """Stopped before each request: a whole checkpoint is found, and what is in quarantine keeps its files."""
    save(store, 3)
    for number in range(20):
        save(store, 6, fence=1)
        bucket.proxy.set(Fault("status", skip=number, code=501, error="Stopped"))
        try:
            save(store, 6, fence=2)
        except InputError:
            bucket.proxy.set()
            manifest, _ = newest_valid(store)
            assert manifest.step in (3, 6)
        else:
            break
        finally:
            bucket.proxy.set()
            store.collect_garbage(ended_below=9)
    assert number > 8
    assert store.manifest(6).fence == 2
    assert_loads(store, 6)
    for name in store.quarantined():
        kept = Manifest.from_json(bucket.get(f"run/checkpoints/{name}"))
        assert all(store.folder.size(store.key(6, f"{kept.folder}/{part}")) for part in NAMES)
    assert any("manifest.replaced-" in name for name in store.quarantined())


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt", "manifest.json"])
def test_a_bit_that_flips_on_the_way_is_read_again(bucket, store, name):
    save(store, 3)
    save(store, 6)
    bucket.proxy.set(Fault("flip", match=f"^GET .*step_00000006/.*{name}", after=150, times=2))
    assert_loads(store, 6)
    assert [seen.fault for seen in bucket.proxy.requests(f"^GET .*{name}")][:2] == ["flip", "flip"]
    assert store.quarantined() == []


def damage(bucket, step, name, how):
    key = next(
        key for key in bucket.keys("run/") if f"step_{step:08d}/" in key and key.endswith(name)
    )
    content = bytearray(bucket.get(key))
    if how == "missing":
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
        return
    content[150] ^= 1
    bucket.put(key, bytes(content) if how == "bit" else bytes(content[:-1]))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("model.pt", "bit"),
        ("ranks.pt", "short"),
        ("model.pt", "missing"),
        ("manifest.json", "bit"),
    ],
)
def test_what_is_damaged_in_the_bucket_is_quarantined_for_an_older_one(bucket, store, name, how):
    """Its files stay."""
    save(store, 3)
    save(store, 6)
    damage(bucket, 6, name, how)
    manifest, faults = newest_valid(store)
    assert manifest.step == 3
    assert (
        len(faults) == 1 and "checkpoint of step 6 is damaged" in faults[0] and name in faults[0]
    )
    kept = files_of(bucket, 6)
    store.collect_garbage(ended_below=9)
    assert files_of(bucket, 6) == kept and len(kept) == (3 if how == "missing" else 4)
    assert store.steps() == [3] and len(store.quarantined()) == 1
    save(store, 6)
    assert_loads(store, 6)


# ---- two owners -----------------------------------------------------------------------------------------------------


def test_an_owner_that_slept_through_its_replacement_commits_nothing(bucket, store, monkeypatch):
    """Between its last file and the manifest."""
    save(store, 3)
    upload = store.folder.upload

    def upload_slowly(name, path):
        upload(name, path)
        store.folder.write(lease_name(2), b"the next owner's")

    with monkeypatch.context() as slow:
        slow.setattr(store.folder, "upload", upload_slowly)
        with pytest.raises(
            LeaseLost, match="has a newer owner, lease/00000002.json: nothing is committed"
        ):
            save(store, 6, fence=1)
    assert store.steps() == [3]
    save(store, 6, fence=2)
    assert_loads(store, 6)
    store.collect_garbage(ended_below=9)
    assert len(files_of(bucket, 6)) == 4


def test_a_step_that_the_next_owner_has_committed_is_not_replaced(bucket, store, monkeypatch):
    """It went to sleep even later, after it had looked."""
    create = store.folder.create

    def create_late(name, content):
        monkeypatch.setattr(store.folder, "create", create)
        store.folder.write(lease_name(2), b"the next owner's")
        save(store, 6, fence=2)
        return create(name, content)

    monkeypatch.setattr(store.folder, "create", create_late)
    rejects("has a newer owner", save, store, 6, error=LeaseLost, fence=1)
    assert store.manifest(6).fence == 2 and store.quarantined() == []


# ---- what may go ----------------------------------------------------------------------------------------------------


def test_removal_begins_with_the_manifest(bucket, store):
    for step in (1, 2, 3, 4):
        save(store, step)
    bucket.proxy.set()
    assert prune(store, 2) == [1, 2]
    removed = [seen.path for seen in bucket.proxy.requests("^DELETE")]
    assert len(removed) == 8 and bucket.proxy.requests("^HEAD") == []
    assert removed[0].endswith("step_00000001/manifest.json") and removed[4].endswith(
        "step_00000002/manifest.json"
    )
    assert files_of(bucket, 1) == files_of(bucket, 2) == []
    save(store, 5)
    bucket.proxy.set(Fault("status", match="^DELETE", skip=1, code=501, error="Stopped"))
    rejects("Stopped", prune, store, 2)
    assert store.steps() == [4, 5] and len(files_of(bucket, 3)) == 3
    bucket.proxy.set()
    store.collect_garbage(ended_below=9)
    assert files_of(bucket, 3) == []


def test_a_run_that_was_copied_from_s3_to_a_disk_or_back_has_the_same_checkpoints(
    bucket, store, tmp_path
):
    for step in (3, 6):
        save(store, step)
    for key in bucket.keys("run/checkpoints/"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(bucket.get(key))
    disk = LocalStore(tmp_path / "run/checkpoints")
    assert_loads(disk, 6)
    with suppress(FileNotFoundError):  # its folder is renamed by the commit
        save(disk, 9)
    disk.remove(3)
    for path in filter(Path.is_file, disk.path.rglob("*")):
        bucket.put(f"back/checkpoints/{path.relative_to(disk.path).as_posix()}", path.read_bytes())
    back = store_of(bucket, tmp_path, "back")
    assert_loads(back, 9)
    back.remove(9)
    back.collect_garbage(ended_below=9)
    assert_loads(back, 6)
    assert files_of(bucket, 9, "back") == []


def test_what_failed_saves_have_left_is_removed_and_nothing_else(bucket, store):
    """Files of the user lie among those of step 6."""
    save(store, 3)
    with Ownership(store.folder, 600.0) as owner, pytest.raises(InputError, match="Stopped"):
        bucket.proxy.set(Fault("status", match="^PUT .*/manifest.json", code=501, error="Stopped"))
        save(store, 6, fence=owner.number)
    bucket.proxy.set()
    left = bucket.keys("run/checkpoints/step_00000006/")
    own = ["notes.txt", "notes/model.pt", "00000001-01234567x/model.pt"]
    own = [f"step_00000006/{name}" for name in own]
    own += ["step_00000003/notes.txt", "step_x/x", "step_x/00000001-0123abcd/model.pt"]
    for name in own:
        bucket.put(f"run/checkpoints/{name}", b"mine")
    before = set(bucket.keys())
    store.collect_garbage(ended_below=owner.number)
    assert set(bucket.keys()) == before
    store.collect_garbage(ended_below=owner.number + 1)
    assert before - set(bucket.keys()) == set(left)
    assert_loads(store, 3)


def test_what_an_owner_that_may_only_be_silent_has_written_stays_and_its_late_commit_is_whole(
    bucket, store, monkeypatch
):
    """It went to sleep after it had looked at the lease; the next owner cannot know whether it ever wakes up."""
    save(store, 3)
    create = store.folder.create

    def create_late(name, content):
        monkeypatch.setattr(store.folder, "create", create)
        store.folder.write(lease_name(2), b"the next owner's")
        S3Store(store.folder, store.local / "of the next owner").collect_garbage(ended_below=1)
        return create(name, content)

    monkeypatch.setattr(store.folder, "create", create_late)
    save(store, 6, fence=1)
    assert_loads(store, 6)
