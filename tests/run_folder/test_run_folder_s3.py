"""A run whose folder is in S3: the same as on disk, on one machine after another, and through S3's outages."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading

import pytest
from forks import start_forked
from rejections import rejects
from running import eventually, lines, train_config, train_overrides
from services.fault_proxy import Fault, line_of

from train import entry, loop
from train.checkpoints.saver import SavesFail
from train.checkpoints.store import LocalStore
from train.checkpoints.store_s3 import S3Store
from train.observe.lines import read_back, read_lines
from train.run import checkpoint_manager, stopping
from train.run.checkpoint_manager import CheckpointManager
from train.run.stopping import StopRequest
from train.run_folder import appended as parts
from train.run_folder.outcome import Outcome
from train.run_folder.ownership import Ownership
from train.run_folder.run_folder import RunFolder
from train.storage import atomic_io
from train.storage.folders import open_folder
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
    """The lines of one kind in the run's metrics.jsonl."""
    return [
        line
        for line in map(json.loads, bucket.get("run/metrics.jsonl").splitlines())
        if line["kind"] == kind
    ]


def losses(lines):
    """The last loss of each step."""
    return {line["step"]: line["loss"] for line in lines}


def store_of(bucket, tmp_path):
    return S3Store(open_folder(bucket.location("run"), bucket.config()), tmp_path / "staging")


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_machine_that_vanishes_while_it_saves_is_followed_by_another(
    bucket, prepared, finished, on_machine, tmp_path, is_silent
):
    """The machine is killed before the manifest of step 6. The other one resumes from step 3, and at the end all is in
    S3 that an undisturbed run has on disk.
    """
    bucket.proxy.set(Fault("delay", match="^PUT .*step_00000006/manifest.json"))
    # The watchdog vanishes with the machine.
    options = [*bucket.overrides(), "watchdog.step_s=0", "lease.ttl_s=1"]
    arguments = train_overrides(bucket.location("run"), prepared, *options)
    process = start_forked(["train", *arguments], os.environ)
    eventually(
        lambda: (
            any(seen.fault for seen in bucket.proxy.requests("manifest")) or not process.is_alive()
        )
    )
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    bucket.proxy.set()
    killed = bucket.keys("run/checkpoints/step_00000006/")
    assert len(killed) == 4
    # read while it was written
    bucket.put("run/metrics.jsonl", bucket.get("run/metrics.jsonl") + b'{"kind": "tra')
    if is_silent:  # nobody knows whether it has ended, or is suspended
        lease = json.loads(bucket.get("run/lease/00000001.json"))
        bucket.put(
            "run/lease/00000001.json",
            json.dumps({**lease, "host": "other", "boot_id": "other"}).encode(),
        )
    on_machine("second")
    assert train(bucket, prepared, "lease.ttl_s=1") == ("done", 6)
    assert not set(killed) & set(bucket.keys("run/"))
    for kind in ("train", "eval"):
        assert losses(lines_of(bucket, kind)) == losses(lines(finished, kind))
    assert (
        "the last attempt ended (killed, without an exit record)"
        in lines_of(bucket, "fault")[0]["reason"]
    )
    store, local = store_of(bucket, tmp_path), LocalStore(finished / "checkpoints")
    assert store.steps() == local.steps() == [3, 6]
    assert store.manifest(6).fence == 2
    for step in store.steps():
        for name in ("model.pt", "optimizer.pt"):
            assert store.manifest(step).files[name] == local.manifest(step).files[name]
        store.release(store.fetch(step))
    exported = [
        path.relative_to(finished).as_posix()
        for path in (finished / "export").rglob("*")
        if path.is_file()
    ]
    exported.remove("export/README.md")  # it says how long the run took
    assert bucket.get("run/export/README.md").startswith(b"---\nlibrary_name: transformers")
    for name in exported:
        assert bucket.get(f"run/{name}") == (finished / name).read_bytes()
    outcome = json.loads(bucket.get("run/outcome.json"))
    assert (outcome["outcome"], outcome["step"], outcome["checkpoint"]) == ("done", 6, 6)
    assert json.loads(bucket.get("run/log/exit_rank_0000.json"))["reason"] == "done"
    assert b"step 6/6" in bucket.get("run/log/rank_0000.txt")
    assert json.loads(bucket.get("run/lease/00000002.json"))["released"]
    files = {"config.yaml", "environment.json", "metrics.jsonl", "outcome.json", "samples.json"}
    assert {key.split("/")[1] for key in bucket.keys("run/")} == files | {
        "checkpoints",
        "export",
        "lease",
        "log",
        "model",
    }


def test_the_metrics_go_before_the_manifest_and_requests_are_few(bucket, prepared, monkeypatch):
    """A machine that is killed after a commit takes no line with it that the checkpoint has seen."""
    create, reached = S3Folder.create, {}

    def look_and_create(self, name, content):
        if name.endswith("manifest.json"):
            client = bucket.client.get_object(Bucket=bucket.name, Key="run/metrics.jsonl")
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
    seen = [line_of(request) for request in bucket.proxy.requests()]
    listed = {re.search(r"[?&]prefix=([^&]*)", line)[1] for line in seen if "list-type" in line}
    assert listed == {"run%2F", "run%2Flease%2F", "run%2Flog%2F", "run%2Fcheckpoints%2F"}
    assert (
        sum("delimiter" in line for line in seen)
        == sum("prefix=run%2F&" in line for line in seen)
        == 1
    )
    commits = [
        number for number, line in enumerate(seen) if re.match("PUT .*/manifest.json", line)
    ]
    assert len(commits) == 8
    # that is asked for by the clock
    one_save = [line for line in seen[commits[5] : commits[6]] if "/STOP" not in line]
    assert len(one_save) <= 38, "\n".join(one_save)


def test_a_run_whose_last_save_s3_did_not_take_goes_on_from_it_once_it_is_uploaded(
    bucket, prepared, monkeypatch
):
    """By hand, as docs/faults.md says. No step is done twice, and the next start knows how the last one ended."""

    def leave(checkpoints):
        if checkpoints.recorder.progress.step == 5:
            checkpoints.saver.wait()
            bucket.proxy.set(Fault("status"))
        return checkpoints.recorder.progress.step == 3

    with (
        monkeypatch.context() as away,
        pytest.raises(SavesFail, match="saving step 6: .*; step 6 is complete in "),
    ):
        away.setattr(CheckpointManager, "is_due", leave)
        away.setattr(checkpoint_manager, "PATIENCE_S", 0)
        train(bucket, prepared)
    bucket.proxy.set()
    local = RunFolder(bucket.location("run"), bucket.config()).path
    (kept,) = (local / "staging/saving").iterdir()
    assert bucket.keys("run/outcome.json") == []
    outcome = json.loads((local / "outcome.json").read_bytes())
    assert outcome["goes_on"] and f"step 6 is complete in {kept}" in outcome["reason"]

    # this process holds it for ever
    bucket.client.delete_object(Bucket=bucket.name, Key="run/lease/00000001.json")
    step = f"run/checkpoints/{kept.name.partition('.')[0]}"
    upload(bucket, kept, f"{step}/{json.loads((kept / 'manifest.json').read_bytes())['folder']}")
    bucket.put(f"{step}/manifest.json", (kept / "manifest.json").read_bytes())
    assert train(bucket, prepared, "max_steps=8") == ("done", 8)
    assert [line["step"] for line in lines_of(bucket, "train")] == [1, 2, 3, 4, 5, 6, 7, 8]
    faults = " ".join(line["reason"] for line in lines_of(bucket, "fault"))
    assert (
        "the last attempt ended (failed: SavesFail: saving step 6" in faults
        and "clock" not in faults
    )
    assert not kept.exists() and not (local / "outcome.json").exists()


def upload(bucket, folder, prefix):
    """`aws s3 cp --recursive`, without manifests and what waits to be sent."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != "manifest.json" and not name.startswith("staging/"):
            bucket.put(f"{prefix}/{name}", path.read_bytes())


# ---- this machine's copy --------------------------------------------------------------------------------------------


def opened(bucket, last_owner=None):
    folder = RunFolder(bucket.location("run"), bucket.config())
    folder.log.mkdir(parents=True, exist_ok=True)
    folder.ownership.previous = last_owner
    folder.open()
    return folder


def test_the_copy_that_continues_what_is_in_s3_is_taken(bucket, on_machine):
    first = opened(bucket)
    first.metrics.write_text("1\n2\n")
    first.mirror()
    first.metrics.write_text("1\n2\n3\n")  # killed here
    assert opened(bucket).metrics.read_text() == "1\n2\n3\n"
    bucket.put("run/metrics.jsonl", b"1\n2\n{half")
    assert opened(bucket).metrics.read_text() == "1\n2\n3\n"
    on_machine("second")
    second = opened(bucket)
    second.cut_half_written_line()
    assert second.metrics.read_text() == "1\n2\n"
    with second.metrics.open("a") as file:
        file.write("b\n")
    second.mirror()
    on_machine("first")
    assert opened(bucket).metrics.read_text() == "1\n2\nb\n"


def line_at(step):
    return {"kind": "train", "attempt": 1, "time_unix_s": 1.0, "step": step}


def write_lines(folder, steps):
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps(line_at(step)) + "\n" for step in steps)


def steps_in(folder):
    forward, back = ([line["step"] for line in read(folder)] for read in (read_lines, read_back))
    assert forward == back[::-1]
    return forward


def test_lines_go_to_s3_in_parts_and_each_is_read_once_whoever_wrote_it(
    bucket, on_machine, monkeypatch
):
    """What is uploaded grows with the lines, not with their square. A job is killed between a part and the file that
    counts it; another machine goes on; the first one, whose copy is older, follows.
    """
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    uploaded, replace, write = [], S3Folder.replace, S3Folder.write

    def count(self, name, content, version):
        uploaded.append(len(content))
        return replace(self, name, content, version)

    monkeypatch.setattr(S3Folder, "replace", count)
    monkeypatch.setattr(
        S3Folder, "write", lambda *args: uploaded.append(len(args[2])) or write(*args)
    )
    first, reader = opened(bucket), open_folder(bucket.location("run"), bucket.config())
    first.ownership.number = 1
    for step in range(0, 200, 2):
        write_lines(first, [step, step + 1])
        first.mirror()
    assert steps_in(reader) == steps_in(first.local) == list(range(200))
    assert max(uploaded) < 1000 + 250 and sum(uploaded) < 100 * 1200
    names = [f"run/metrics/00000001-{number:06d}.jsonl" for number in range(1, 13)]
    assert bucket.keys("run/metrics/") == names
    assert [line["step"] for line in read_back(reader, limit_bytes=300)] == [199, 198, 197, 196]

    write_lines(first, range(200, 220))
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(first, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        first.mirror()
    assert len(bucket.keys("run/metrics/")) > len(names) and steps_in(reader) == list(range(200))
    on_machine("second")
    second = opened(bucket)
    second.ownership.number = 2
    write_lines(second, range(200, 260))
    second.mirror()
    assert steps_in(reader) == steps_in(second.local) == list(range(260))
    assert "run/metrics/00000002-000001.jsonl" in bucket.keys("run/metrics/")
    on_machine("first")
    assert steps_in(opened(bucket).local) == list(range(260))

    upload(bucket, second.path, "copied by hand")  # from disk
    copied = RunFolder(bucket.location("copied by hand"), bucket.config())
    copied.log.mkdir(parents=True)
    copied.open()
    write_lines(copied, [260])
    copied.mirror()
    assert steps_in(copied.storage) == list(range(261))
    assert max(len(bucket.get(key)) for key in bucket.keys("copied by hand/metrics")) < 1200
    bucket.client.delete_object(Bucket=bucket.name, Key=names[3])
    rejects(r"/metrics/00000001-000004\.jsonl is missing", list, read_lines(reader))
    assert next(read_back(reader))["step"] == 259


@pytest.mark.parametrize(
    "head", ['{"kind": "parts", "parts": {"../../x": 1}, "bytes": 5}', '{"kind": "parts", "pa']
)
def test_a_damaged_count_of_parts_is_rejected_by_name(bucket, head):
    bucket.put("run/metrics.jsonl", f"{head}\n".encode())
    rejects(r"run/metrics\.jsonl line 1 is damaged", opened, bucket)


def test_a_run_removed_from_s3_leaves_nothing_to_a_new_one_of_its_name(bucket):
    folder = opened(bucket)
    folder.metrics.write_text("1\n")
    folder.mirror()
    bucket.client.delete_object(Bucket=bucket.name, Key="run/metrics.jsonl")
    assert not opened(bucket).metrics.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_records_of_an_attempt_are_gone_while_the_next_one_runs(bucket, monkeypatch, rank):
    """Every rank leaves an exit record, and rank 0 removes all of them."""
    folder = opened(bucket)
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "here",
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))
    folder.exit_file("failed: x", None)
    folder.outcome(Outcome("failed", "x", "x", None, None, goes_on=True, launch=[]))
    records = {"run/outcome.json", f"run/log/exit_rank_000{rank}.json"}
    assert records <= set(bucket.keys())
    monkeypatch.setenv("RANK", "0")
    assert opened(bucket).previous["kind"] == "x"
    assert not records & set(bucket.keys())


def test_an_outcome_that_s3_did_not_take_counts_until_another_machine_has_had_the_run(
    bucket, monkeypatch
):
    def start(host):
        monkeypatch.setattr("platform.node", lambda: host)
        with Ownership(open_folder(bucket.location("run"), bucket.config())) as ownership:
            return opened(bucket, ownership.previous)

    for other, kind in (("a", "x"), ("b", None)):
        folder = start("a")
        bucket.proxy.set(Fault("status"))
        folder.outcome(Outcome("failed", "x", "x", None, None, goes_on=True))
        bucket.proxy.set()
        assert start(other).previous.get("kind") == kind
    assert start("a").previous == {}  # the attempt on b was killed


MAY_NOT_DELETE = Fault("status", match="^DELETE", code=403, error="AccessDenied")


def test_an_outcome_that_may_not_be_deleted_does_not_pass_for_that_of_the_next_attempt(bucket):
    ends = [Outcome("failed", kind, "x", None, None, goes_on=True) for kind in ("first", "second")]
    opened(bucket).outcome(ends[0])
    bucket.proxy.set(MAY_NOT_DELETE)
    folder = opened(bucket)
    assert folder.previous["kind"] == "first" and folder.last_outcome() == {}
    for end in reversed(ends):
        folder.outcome(end)
    assert folder.last_outcome()["kind"] == "second"  # the first one of an attempt stays


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


def test_records_that_s3_does_not_take_hide_no_error(bucket, log):
    folder = opened(bucket)
    bucket.proxy.set(Fault("status"))
    folder.exit_file("failed: the real trouble", None)
    folder.outcome(Outcome("failed", "x", "x", None, None, goes_on=True, launch=[]))
    failures = {
        line
        for line in log.messages
        if "the end of this attempt cannot be recorded in s3://" in line
    }
    assert len(failures) == 2
    assert "the real trouble" in folder.exit_path.read_text()


def test_a_mirror_that_comes_while_one_is_under_way_waits_for_it(bucket, monkeypatch):
    """The thread that saves, slow on its way, and the end of the run: the newest content stays."""
    folder, replace = opened(bucket), S3Folder.replace
    folder.metrics.write_text("1\n")
    second = threading.Thread(target=folder.mirror)

    def replace_slowly(self, name, content, version):
        if content == b"1\n":
            folder.metrics.write_text("1\n2\n")
            second.start()
            assert not folder.mirroring.acquire(blocking=False)  # for which the second one waits
        return replace(self, name, content, version)

    monkeypatch.setattr(S3Folder, "replace", replace_slowly)
    folder.mirror()
    second.join()
    assert bucket.get("run/metrics.jsonl") == b"1\n2\n"


# ---- before the start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault("status"), 1, r"failed: s3://.*: S3 answers 503 SlowDown, 7 times"),
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
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    monkeypatch.setattr(entry.logger, "handlers", [])
    monkeypatch.setattr(entry.logger, "propagate", False)  # as in a process that has not begun
    assert entry.run_command_line(sys.argv[1:]) == code
    err = capsys.readouterr().err
    assert re.fullmatch(f"(starting [^\n]*\n)?(waiting for S3: [^\n]*\n)?{words}[^\n]*\n", err), (
        err
    )
    assert bucket.keys() == []
