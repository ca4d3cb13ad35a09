"""A run whose folder is in S3: the same as on disk, on one machine after another, and through S3's outages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest
from forks import start_forked
from running import contents, eventually, lines, train_config, train_overrides
from services.fault_proxy import Fault

from train import entry, loop
from train.checkpoints.store import LocalStore
from train.checkpoints.store_s3 import S3Store
from train.observe.lines import read_back, read_lines
from train.run import stopping
from train.run.stopping import StopRequest
from train.run_folder.run_folder import RunFolder
from train.storage import atomic_io
from train.storage.s3 import S3Folder

pytestmark = pytest.mark.usefixtures("pauses")


@pytest.fixture
def on_machine(tmp_path, monkeypatch):
    """What runs from now on is on the machine of this name, as far as its disk goes."""
    return lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


@pytest.fixture(autouse=True)
def first_machine(on_machine):
    on_machine("first")


def train(bucket, data, *overrides):
    return loop.run(
        train_config(bucket.location("run"), data, *bucket.overrides(), *overrides), StopRequest()
    )


def lines_of(bucket, kind):
    """The lines of one kind in the run's files of metrics."""
    found = read_lines(bucket.folder())
    return [line for line in found if line["kind"] == kind]


def losses(lines):
    """The last loss of each step."""
    return {line["step"]: line["loss"] for line in lines}


def store_of(bucket, tmp_path):
    return S3Store(bucket.folder(), tmp_path / "staging")


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_machine_that_vanishes_while_it_saves_is_followed_by_another(
    bucket, prepared, finished, on_machine, tmp_path, is_silent
):
    """The machine is killed before the manifest of step 6. The other one resumes from step 3."""
    bucket.proxy.set(Fault("delay", match="^PUT .*step_00000006/manifest.json"))
    # The watchdog vanishes with the machine.
    options = [*bucket.overrides(), "watchdog.step_s=0", "lease.ttl_s=1"]
    arguments = train_overrides(bucket.location("run"), prepared, *options)
    process = start_forked(["train", *arguments], os.environ)

    def saves():
        return any(seen.fault for seen in bucket.proxy.requests("manifest"))

    eventually(lambda: saves() or not process.is_alive())
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    bucket.proxy.set()
    killed = bucket.keys("run/checkpoints/step_00000006/")
    assert len(killed) == 3
    name = "run/metrics/00000001.jsonl"
    bucket.put(name, bucket.get(name) + b'{"kind": "tra')  # uploaded while it was written
    if is_silent:  # nobody knows whether it has ended, or is suspended
        lease = json.loads(bucket.get("run/lease/00000001.json"))
        lease |= {"host": "other", "boot_id": "other"}
        bucket.put("run/lease/00000001.json", json.dumps(lease).encode())
    on_machine("second")
    assert train(bucket, prepared, "lease.ttl_s=1") == ("done", 6)
    assert not set(killed) & set(bucket.keys("run/"))
    fault = lines_of(bucket, "fault")[0]["reason"]
    assert "the last attempt ended (killed, without an outcome)" in fault
    assert_run_is_whole(bucket, finished, tmp_path)


def assert_run_is_whole(bucket, finished, tmp_path):
    """All is in S3 that an undisturbed run has on disk, and the second job saved it."""
    for kind in ("train", "eval"):
        assert losses(lines_of(bucket, kind)) == losses(lines(finished, kind))
    store = store_of(bucket, tmp_path)
    local = LocalStore(finished / "checkpoints")
    assert store.steps() == local.steps() == [3, 6]
    assert store.manifest(6).fence == 2
    for step in store.steps():
        for name in ("model.pt", "optimizer.pt"):
            assert store.manifest(step).files[name] == local.manifest(step).files[name]
        store.release(store.fetch(step))
    exported = contents(finished / "export")
    del exported[finished / "export/README.md"]  # it says how long the run took
    assert bucket.get("run/export/README.md").startswith(b"---\nlibrary_name: transformers")
    for path, content in exported.items():
        assert bucket.get(f"run/{path.relative_to(finished)}") == content
    outcome = json.loads(bucket.get("run/outcome.json"))
    assert (outcome["outcome"], outcome["step"], outcome["checkpoint"]) == ("done", 6, 6)
    assert b"step 6/6" in bucket.get("run/log/rank_0000.txt")
    assert json.loads(bucket.get("run/lease/00000002.json"))["released"]
    files = ["config.yaml", "environment.json", "outcome.json", "samples.json"]
    folders = ["checkpoints", "export", "lease", "log", "metrics", "model"]
    assert {key.split("/")[1] for key in bucket.keys("run/")} == {*files, *folders}


def test_the_metrics_go_before_the_manifest(bucket, prepared, monkeypatch):
    """A machine that is killed after a commit takes no line with it that the checkpoint has seen."""
    create = S3Folder.create
    reached = {}

    def look_and_create(self, name, content):
        if name.endswith("manifest.json"):
            client = bucket.client.get_object(Bucket=bucket.name, Key="run/metrics/00000001.jsonl")
            steps = [
                line.get("step") for line in map(json.loads, client["Body"].read().splitlines())
            ]
            reached[json.loads(content)["step"]] = max(steps)
        return create(self, name, content)

    monkeypatch.setattr(S3Folder, "create", look_and_create)
    train(
        bucket,
        prepared,
        "checkpoint.every=1",
        "export=false",
        "eval_every=null",
        "max_steps=8",
        "checkpoint.keep=3",
    )
    assert list(reached) == [1, 2, 3, 4, 5, 6, 7, 8] and all(
        last >= step for step, last in reached.items()
    )


# ---- this machine's copy --------------------------------------------------------------------------------------------


def opened(bucket, number=1):
    folder = RunFolder(bucket.location("run"), bucket.config())
    folder.ownership.number = number
    folder.open()
    return folder


def write_lines(folder, steps):
    with folder.metrics.open("a") as file:
        for step in steps:
            line = {"kind": "train", "attempt": 1, "time_unix_s": 1.0, "step": step}
            file.write(json.dumps(line) + "\n")


def steps_in(folder):
    forward, back = ([line["step"] for line in read(folder)] for read in (read_lines, read_back))
    assert forward == back[::-1]
    return forward


def test_each_attempt_has_a_file_of_its_own_and_lines_of_a_killed_one_are_sent_later(
    bucket, on_machine
):
    """On one machine, then on another, and on the first one again."""
    in_s3 = bucket.folder()
    first = opened(bucket)
    write_lines(first, [1, 2])
    first.mirror()
    write_lines(first, [3])  # killed here
    second = opened(bucket, 2)
    second.mirror()
    assert steps_in(second.local) == steps_in(in_s3) == [1, 2, 3]
    on_machine("second")
    third = opened(bucket, 3)
    write_lines(third, [4, 5])
    third.mirror()
    on_machine("first")
    assert steps_in(opened(bucket, 4).local) == steps_in(in_s3) == [1, 2, 3, 4, 5]
    assert bucket.keys("run/metrics") == [f"run/metrics/0000000{each}.jsonl" for each in (1, 3)]
    assert [line["step"] for line in read_back(in_s3, limit_bytes=150)] == [5, 4]


def test_a_run_goes_on_where_it_was_copied_to(bucket, tmp_path):
    """From a disk to S3 and back. Its lease numbers begin anew, which replaces no lines."""
    bucket.put("run/metrics.jsonl", b"")
    in_s3 = opened(bucket)
    write_lines(in_s3, [1])
    in_s3.mirror()
    again = opened(bucket, number=1)
    write_lines(again, [2])
    again.mirror()
    shutil.copytree(again.path, tmp_path / "copy")
    on_disk = RunFolder(str(tmp_path / "copy"))
    on_disk.open()
    write_lines(on_disk, [3])
    assert steps_in(on_disk.local) == [1, 2, 3]


def test_a_run_removed_from_s3_leaves_nothing_to_a_new_one_of_its_name(bucket):
    folder = opened(bucket)
    write_lines(folder, [1])
    folder.mirror()
    bucket.client.delete_object(Bucket=bucket.name, Key="run/metrics/00000001.jsonl")
    assert steps_in(opened(bucket).local) == []


MAY_NOT_DELETE = Fault("status", match="^DELETE", code=403, error="AccessDenied")


def test_a_role_that_may_not_delete_trains_on_and_is_told_once(
    bucket, prepared, capsys, monkeypatch
):
    """Each start finds leases, records and marks of those before it, and the last one a STOP file."""
    bucket.proxy.set(MAY_NOT_DELETE)
    often = ["checkpoint.every=1", "checkpoint.keep=2"]
    for steps in (3, 4, 5):
        monkeypatch.setattr(atomic_io, "said", set())  # as in a process that has not begun
        assert train(bucket, prepared, *often, f"max_steps={steps}") == ("done", steps)
        assert capsys.readouterr().err.count("s3:DeleteObject") == 1
    assert lines_of(bucket, "fault") == []
    assert [key for key in bucket.keys("run/checkpoints/") if key.endswith("manifest.json")] == [
        f"run/checkpoints/step_{step:08d}/manifest.json" for step in (1, 2, 3, 4, 5)
    ]
    bucket.put("run/STOP", b"")
    monkeypatch.setattr(stopping, "POLL_S", 0.05)
    _, step = train(bucket, prepared, "max_steps=100000")
    assert 5 < step < 100000 and opened(bucket).previous["outcome"] == "stopped"


# ---- before the start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault("status"), 1, r"failed: s3://.*: S3 answers 503 SlowDown, 6 times"),
        (
            Fault("status", code=403, error="AccessDenied"),
            2,
            r"error: s3://.*: no permission to list it",
        ),
        (
            Fault("status", match="PUT", code=403, error="AccessDenied"),
            2,
            r"error: s3://.*: no permission to write it",
        ),
    ],
    ids=["outage", "no permission", "read only"],
)
def test_an_s3_that_cannot_be_used_is_reported_in_one_line(
    bucket, prepared, monkeypatch, capsys, fault, code, words
):
    bucket.proxy.set(fault)
    arguments = train_overrides(bucket.location("run"), prepared, *bucket.overrides())
    monkeypatch.setattr(entry.logger, "handlers", [])
    monkeypatch.setattr(entry.logger, "propagate", False)  # as in a process that has not begun
    assert entry.main(arguments) == code
    err = capsys.readouterr().err
    assert re.fullmatch(f"(starting [^\n]*\n)?{words}[^\n]*\n", err), err
    assert bucket.keys() == []
