"""A run folder is a run's by its own marks, or new; and a job that has lost it to another one writes no more to it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rejections import rejects
from running import contents, train_config

from train import loop
from train.parallel.ranks import World, no_wait
from train.run.checkpoint_manager import CheckpointManager
from train.run.stopping import StopRequest
from train.run_folder import exported
from train.run_folder.outcome import Outcome
from train.run_folder.ownership import LeaseLost, lease_name, own_lease
from train.run_folder.run_folder import RunFolder
from train.storage.folders import LocalFolder, canonical_json

DISK_AND_S3 = pytest.mark.parametrize("kind", ["disk", "s3"])
RUN = {"data": "d", "seed": 0, "global_batch_size": 8}  # an identity
LIVE_S = 600.0
EVERY_STEP = ["checkpoint.every=1", "eval_every=1", "export=false", "max_steps=50"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path, pauses):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def kind():
    return "disk"


@pytest.fixture
def folder(request, kind, tmp_path):
    if kind == "disk":
        return RunFolder(str(tmp_path / "run"))
    bucket = request.getfixturevalue("bucket")
    return RunFolder(bucket.location("run"), bucket.config())


def content(folder):
    return {
        name: folder.storage.read(name)
        for name in folder.storage.names()
        if not name.startswith("lease/")
    }


def put(folder, name, content=b""):
    """A file of another program, which may have any name."""
    if folder.is_remote:
        folder.storage.write(name, content)
    else:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_bytes(content)


def check(folder):
    folder.check_is_ours(RUN, force=False)


@pytest.mark.parametrize("name", ["outcome.json", "checkpoints/step_00000001/manifest.json"])
def test_a_folder_with_files_of_another_program_is_rejected(folder, name):
    put(folder, name, b"mine")
    rejects(
        r"^run_dir=.* has files of another program \(.*\); choose another folder$", check, folder
    )
    assert content(folder) == {name: b"mine"}


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'{"identity": "me"}', b'{"identity": {"seed": 1}}', b"\xff"]
)
def test_an_environment_that_is_damaged_or_another_programs_makes_no_run_folder(folder, content):
    with folder.ownership:
        folder.storage.write("environment.json", content)
        rejects(
            "environment.json is damaged; remove only that file, and the same command resumes",
            check,
            folder,
        )
    (folder.path / "lease/00000001.json").unlink()  # without which it may be another program's
    rejects(r"has files of another program \(environment.json\)", check, folder)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("log", Path.touch),
        ("export", Path.touch),
        ("metrics.jsonl", Path.mkdir),
        ("metrics.jsonl", os.mkfifo),
    ],
)
def test_a_name_of_a_run_that_is_of_another_kind_is_rejected(folder, name, make):
    folder.path.mkdir()
    make(folder.path / name)
    rejects(f"{name} must be a f(ile|older)", check, folder)
    if make is os.mkfifo:
        rejects("it is a pipe", folder.storage.read, name)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_run_writes_to_no_pipe(tmp_path, make):
    (tmp_path / "run/log").mkdir(parents=True)
    make(tmp_path / "run/log/rank_0000.txt")
    rejects("rank_0000.txt must be a file", check, RunFolder(str(tmp_path / "run")))


@pytest.mark.parametrize("name", ["metrics.jsonl", "log/rank_0000.txt"])
def test_a_run_whose_files_belong_to_another_user_is_rejected_before_anything_changes(
    folder, name, monkeypatch
):
    put(folder, "environment.json"), put(folder, name)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder.path / name)
    rejects(
        f"{Path(name).name}: this user may not write it; choose a folder of your own",
        check,
        folder,
    )


@DISK_AND_S3
def test_a_run_folder_is_known_by_its_environment_and_one_that_was_just_begun_by_its_lease(folder):
    check(folder)
    # of ranks that came before rank 0
    for name in ("log/rank_0001.txt",):
        put(folder, name)
    for name in ("slurm-1.out", "notes.txt", ".DS_Store"):
        put(folder, name)
    check(folder)
    with folder.ownership:
        folder.storage.write("outcome.json", b"{}")  # all that a run leaves that fails at once
        check(folder)
    for name in folder.storage.names():
        if not name.startswith("."):
            folder.storage.remove(name)
    # a copy, or older than leases
    folder.storage.write("environment.json", canonical_json({"identity": RUN}))
    folder.storage.write("metrics.jsonl", b"")
    folder.storage.write("notes.txt", b"mine")
    check(folder)
    rejects(
        "belongs to another run .seed: 0 -> 1",
        folder.check_is_ours,
        {**RUN, "seed": 1},
        force=False,
    )


@pytest.mark.parametrize("name", ["metrics.jsonl", "log/rank_0000.txt"])
def test_a_run_writes_through_no_link_to_a_file(tmp_path, name):
    victim = tmp_path / "victim"
    link = tmp_path / "run" / name
    victim.write_text("mine")
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    (tmp_path / "run/environment.json").write_text(json.dumps({"identity": RUN}))
    rejects(
        f"{link.name} is a link: a run would write through it",
        check,
        RunFolder(str(tmp_path / "run")),
    )
    link.unlink()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path)  # on another disk
    check(RunFolder(str(tmp_path / "run")))


def take_over(storage, number=2):
    """As a job on another machine does it after it has seen no heartbeat, and then finishes the run."""
    owner = replace(own_lease(LIVE_S), host="node-2", boot_id="another boot", started="now")
    lease = replace(owner, heartbeats=3, step=60, released=True)
    storage.write(lease_name(number), canonical_json(asdict(lease)))
    if isinstance(storage, LocalFolder) and storage.size("metrics.jsonl") is not None:
        with (storage.path / "metrics.jsonl").open(
            "a"
        ) as file:  # as the recorder does: it stays the same file
            file.write('{"kind": "train", "step": 60, "time_unix_s": 1}\n' * 9)
    else:
        storage.write("metrics.jsonl", b"")
    for name in ("outcome.json", "export/config.json", "STOP"):
        storage.write(name, b'{"kind": "train", "step": 60, "time_unix_s": 1}\n')


def changes_by(job):
    """Return functions that change files of a run."""
    return (
        lambda: job.folder.write("evaluation.json", b""),
        lambda: job.folder.upload("evaluation.json", Path(__file__)),
        lambda: job.folder.create("predictions/1", b""),
        lambda: job.folder.remove("STOP"),
        lambda: job.describe(None, {}, {}, {}),
        lambda: exported.renewed(job, 50).__enter__(),
        lambda: exported.mirror(job) or job.ownership.check(),
        lambda: job.mirror() or job.ownership.check(),
        lambda: job.cut_half_written_line() or job.ownership.check(),
    )


@DISK_AND_S3
def test_a_job_that_has_lost_the_folder_changes_no_file_of_it(folder):
    folder.log.mkdir(parents=True)
    with folder.ownership:
        folder.open()
        folder.metrics.write_text("1\n")
        folder.mirror()
        # of a rank that does not hold it
        other = RunFolder(folder.location, getattr(folder.storage, "s3", None))
        other.ownership.follow(folder.ownership.owner)
        other.ownership.check()
        kept = folder.folder.write  # looked up while the folder was ours
        take_over(folder.storage)
        if folder.is_remote:
            folder.metrics.write_text("1\n2\n")
        with folder.metrics.open("a") as file:
            file.write("half a line of the new owner")
        folder.log_file.write_text("the new owner's")
        before = content(folder)
        here = contents(folder.path)
        end = Outcome("failed", "saves_fail", "late", 50, 50, goes_on=True, launch=[])
        says = r"is lost: it now belongs to .* on node-2, since now \(lease 2\)"
        for each in (folder, other):
            for late in (lambda: kept("evaluation.json", b""), *changes_by(each)):
                rejects(says, late, error=LeaseLost)
            each.outcome(end)
            each.outcome(end, is_of_all=True)
            assert each.ownership.lost and each.ownership.may_append() == folder.is_remote
    assert content(folder) == before
    assert contents(folder.path).keys() <= here.keys()


def test_a_job_that_lost_the_folder_while_it_started_leaves_a_save_of_the_new_owner_alone(folder):
    with folder.ownership:
        take_over(folder.storage)
        attempt: Any = SimpleNamespace(
            cfg=None, folder=folder, watch=SimpleNamespace(heartbeat=no_wait)
        )
        backend: Any = SimpleNamespace(world=World())
        checkpoints = CheckpointManager(attempt, backend, None)
        under_way = checkpoints.store.begin(60, 0)
        rejects("is lost", checkpoints.resume, error=LeaseLost)
        assert under_way.is_dir()


def test_a_run_that_was_taken_over_ends_and_leaves_the_new_owners_files_alone(
    folder, prepared, monkeypatch
):
    """At step 3 of 50, with a checkpoint, an evaluation and a line of the metrics at every step."""
    is_due = CheckpointManager.is_due
    before = {}

    def lose_it(self):
        if self.recorder.progress.step == 3 and not before:
            self.saver.wait()
            take_over(folder.storage)
            before.update(content(folder))
        return is_due(self)

    monkeypatch.setattr(CheckpointManager, "is_due", lose_it)
    with pytest.raises(LeaseLost, match="is lost: it now belongs to process .* on node-2"):
        loop.run(train_config(folder.location, prepared, *EVERY_STEP), StopRequest())
    assert content(folder) == before
