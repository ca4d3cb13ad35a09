"""Files and folders that are whole or absent, and the check of many of them."""

from __future__ import annotations

import errno
import os
import shutil
import stat

import pytest

from train.config import NotPermitted
from train.machine.processes import is_gone, owner_name
from train.storage import atomic_io
from train.storage.atomic_io import (
    made_once,
    new_folder,
    remove_temporaries,
    temporary_for,
)
from train.storage.folders import LocalFolder, files_below


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(folder, text="new"):
    (folder / "file").write_text(text)


def test_a_folder_takes_a_name_that_is_free_or_replaces_what_is_there(tmp_path):
    with new_folder(tmp_path / "a") as folder:
        fill(folder, "old")
        assert not (tmp_path / "a").exists()
    with pytest.raises(FileExistsError), new_folder(tmp_path / "a") as folder:
        fill(folder)
    assert (tmp_path / "a" / "file").read_text() == "old"
    with new_folder(tmp_path / "a", replaces=True) as folder:
        fill(folder)
    assert names(tmp_path) == ["a"] and (tmp_path / "a" / "file").read_text() == "new"


def test_a_folder_that_somebody_removes_during_a_listing_is_left_out(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name)
    fill(tmp_path)
    listing = files_below(tmp_path)
    assert next(listing).parent == tmp_path
    shutil.rmtree(tmp_path / "a")
    assert [path.parent.name for path in listing] == ["b"]
    saving = temporary_for(tmp_path / "c")
    saving.mkdir()
    fill(saving)
    assert LocalFolder(tmp_path).names() == ["b/file", "file"]
    assert LocalFolder(tmp_path).size("file") == 3 and LocalFolder(tmp_path).size("a/file") is None
    assert (
        LocalFolder(tmp_path).names("b/") == ["b/file"]
        and LocalFolder(tmp_path).names("nothing/") == []
    )


def test_only_temporaries_of_the_name_are_removed(tmp_path):
    mine = temporary_for(tmp_path / "a")
    other = temporary_for(tmp_path / "b")
    mine.mkdir()
    fill(mine)
    for path in (other, tmp_path / ".a.tmp-mine", tmp_path / "a"):
        path.touch()
    remove_temporaries(tmp_path, "a")
    assert names(tmp_path) == sorted([other.name, ".a.tmp-mine", "a"])


@pytest.fixture
def busy(monkeypatch):
    """As NFS answers for a file that is open: nothing named "file" can be removed."""
    unlink = os.unlink

    def reject(path, *arguments, **options):
        if str(path).endswith("file"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", reject)
    monkeypatch.setattr(atomic_io, "said", set())


def test_what_cannot_be_removed_is_left_with_one_warning(tmp_path, busy, caplog):
    for text in ("old", "new", "newest"):
        with new_folder(tmp_path / "a", replaces=True) as folder:
            fill(folder, text)
            (folder / "other").touch()
    assert (tmp_path / "a" / "file").read_text() == "newest" and len(names(tmp_path)) == 3
    assert remove_temporaries(tmp_path, "a") == []
    assert [list(map(str, names(tmp_path / name))) for name in names(tmp_path)[:2]] == [
        ["file"],
        ["file"],
    ]
    fill(tmp_path)
    with pytest.raises(NotPermitted, match="busy"):
        LocalFolder(tmp_path).remove("file")
    assert [("Device or resource busy" in each.message) for each in caplog.records] == [True]


def test_a_disk_without_hard_links_and_without_fsync_of_folders_will_do(
    tmp_path, monkeypatch, caplog
):
    fsync = os.fsync

    def fail_for_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(handle)

    def fail(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(atomic_io, "said", set())
    monkeypatch.setattr(os, "fsync", fail_for_folders)
    monkeypatch.setattr(os, "link", fail)
    folder = LocalFolder(tmp_path)
    assert [folder.create("a", text) for text in (b"first", b"second")] == [True, False]
    assert (names(tmp_path), folder.read("a"), len(caplog.records)) == (["a"], b"first", 1)


def test_a_folder_is_made_once_and_what_a_killed_process_left_of_it_goes(tmp_path):
    temporary_for(tmp_path / "a").mkdir()
    made = [made_once(tmp_path / "a", fill), made_once(tmp_path / "a", pytest.fail)]
    assert made == [tmp_path / "a"] * 2 and names(tmp_path) == ["a", "a.lock"]


def test_a_process_is_gone_only_if_this_machine_knows_it():
    here, *_ = mine = owner_name(os.getpid()).rsplit("-", 2)
    assert not is_gone("-".join(mine))
    # another process had the number
    assert is_gone(f"{here}-{os.getpid()}-1") and is_gone(f"{here}-{2**40}-1")
    assert not is_gone(f"elsewhere-{os.getpid()}-1")


def test_a_file_that_its_writer_replaces_while_it_is_opened_is_read(tmp_path, monkeypatch):
    """As the status of an attempt, which its supervisor writes again."""
    path = tmp_path / "a.json"
    usual = os.open
    replaced = []
    path.write_bytes(b"old")

    def slow(name, *given, **named):
        opened = usual(name, *given, **named)
        if name == path and not replaced:
            replaced.append(1)
            (tmp_path / "new").write_bytes(b"new")
            (tmp_path / "new").replace(path)
        return opened

    monkeypatch.setattr(os, "open", slow)
    assert LocalFolder(tmp_path).read("a.json") == b"new" and replaced
