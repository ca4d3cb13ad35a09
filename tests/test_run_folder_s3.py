"""A run whose folder is in S3: the same as on disk, on one machine after another, and through S3's outages."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from types import SimpleNamespace

import botocore.endpoint
import pytest
from forks import start_forked
from running import eventually, lines, run, train_config, train_overrides
from services.fault_proxy import Fault, line_of

from train import attempt, lease, loop
from train.checkpoints.saver import SavesFail
from train.checkpoints.store import LocalStore
from train.checkpoints.store_s3 import S3Store
from train.config import InputError
from train.lease import Lease
from train.outcome import Outcome
from train.preempt import StopRequest
from train.recovery import Recovery
from train.run_folder import RunFolder
from train.s3 import S3Folder
from train.storage import open_folder

DEADLINE_S = 60.0
EVERY_STEP = ["checkpoint.every=1", "export=false", "eval_every=null"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Nobody waits for those that boto3 makes between its tries."""
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda _: None))


@pytest.fixture
def on_machine(tmp_path, monkeypatch):
    """What runs from now on is on the machine of this name, as far as its disk goes."""
    return lambda name: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


@pytest.fixture(autouse=True)
def first_machine(on_machine):
    on_machine("first")


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory, prepared):
    run_dir = tmp_path_factory.mktemp("runs") / "disk"
    loop.run(train_config(run_dir, prepared), StopRequest())
    return run_dir


def train(bucket, data, *overrides):
    return loop.run(train_config(bucket.location("run"), data, *bucket.overrides(), *overrides), StopRequest())


def told(bucket, kind):
    """The lines of one kind in the run's metrics.jsonl."""
    found = map(json.loads, bucket.get("run/metrics.jsonl").splitlines())
    return [line for line in found if line["kind"] == kind]


def losses(lines):
    """The last loss of each step."""
    return {line["step"]: line["loss"] for line in lines}


def store_of(bucket, tmp_path):
    return S3Store(open_folder(bucket.location("run"), bucket.config()), tmp_path / "staging")


def everything_but_leases(bucket):
    found = bucket.keys()
    return {key: bucket.get(key) for key in found if "/lease/" not in key}


# ---- as on disk -----------------------------------------------------------------------------------------------------


def test_a_run_in_s3_is_the_same_as_on_disk_and_all_of_it_is_there(bucket, prepared, on_disk, tmp_path):
    assert train(bucket, prepared) == ("done", 6)
    for kind in ("train", "eval"):
        assert losses(told(bucket, kind)) == losses(lines(on_disk, kind))
    assert len(told(bucket, "summary")) == 1
    store, local = store_of(bucket, tmp_path), LocalStore(on_disk / "checkpoints")
    assert store.steps() == local.steps() == [3, 6]
    for step in store.steps():
        found, wanted = store.manifest(step), local.manifest(step)
        assert found.files["model.pt"] == wanted.files["model.pt"]
        assert found.files["optimizer.pt"] == wanted.files["optimizer.pt"]
        assert (found.identity, found.progress["examples"]) == (wanted.identity, wanted.progress["examples"])
        store.let_go(store.fetch(step))
    exported = [path.relative_to(on_disk).as_posix() for path in (on_disk / "export").rglob("*") if path.is_file()]
    exported.remove("export/README.md")  # it tells how long the run took
    assert bucket.get("run/export/README.md").startswith(b"---\nlibrary_name: transformers")
    for name in exported:
        assert bucket.get(f"run/{name}") == (on_disk / name).read_bytes()
    outcome = json.loads(bucket.get("run/outcome.json"))
    assert (outcome["outcome"], outcome["step"], outcome["checkpoint"]) == ("done", 6, 6)
    assert json.loads(bucket.get("run/log/exit_rank_0000.json"))["reason"] == "done"
    assert b"step 6/6" in bucket.get("run/log/rank_0000.txt")
    assert json.loads(bucket.get("run/lease/00000001.json"))["released"]
    top = {key.split("/")[1] for key in bucket.keys("run/")}
    files = {"config.yaml", "environment.json", "metrics.jsonl", "outcome.json"}
    assert top == files | {"checkpoints", "export", "lease", "log"}


def test_a_machine_that_vanishes_while_it_saves_is_followed_by_another(bucket, prepared, on_disk, on_machine, tmp_path):
    """Killed before the manifest of step 6: the other one goes on from step 3, and the story is whole."""
    bucket.proxy.set(Fault("delay", match="^PUT .*step_00000006/manifest.json"))
    options = [*bucket.overrides(), "watchdog.enabled=false"]  # which vanishes with the machine
    arguments = train_overrides(bucket.location("run"), prepared, *options)
    process = start_forked(["train", *arguments], os.environ)
    eventually(lambda: any(seen.fault for seen in bucket.proxy.requests("manifest")) or not process.is_alive())
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    bucket.proxy.set()
    assert losses(told(bucket, "train")).keys() >= {1, 2, 3}
    killed = bucket.keys("run/checkpoints/step_00000006/")
    assert len(killed) == 4
    bucket.put("run/metrics.jsonl", bucket.get("run/metrics.jsonl") + b'{"kind": "tra')  # read while it was written
    on_machine("second")
    assert train(bucket, prepared) == ("done", 6)
    for kind in ("train", "eval"):
        assert losses(told(bucket, kind)) == losses(lines(on_disk, kind))
    assert "the last life ended (killed without a word)" in told(bucket, "fault")[0]["reason"]
    assert store_of(bucket, tmp_path).manifest(6).fence == 2
    assert set(killed) <= set(bucket.keys("run/"))  # all are there: only a manifest may be lost


def test_it_goes_on_with_another_number_of_ranks(bucket, prepared, on_machine):
    train(bucket, prepared, "max_steps=4", "checkpoint.every=2")
    on_machine("second")
    arguments = train_overrides(bucket.location("run"), prepared, *bucket.overrides(), "max_steps=8")
    done = run(arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "going on from the checkpoint of step 4" in done.stderr
    assert [line["step"] for line in told(bucket, "train")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["world_size"] for line in told(bucket, "summary")] == [1, 2]
    for rank in range(2):
        assert json.loads(bucket.get(f"run/log/exit_rank_{rank:04d}.json"))["reason"] == "done"


def test_during_training_only_small_prefixes_are_listed_and_requests_are_few(bucket, prepared):
    train(bucket, prepared, *EVERY_STEP, "max_steps=8", "checkpoint.keep=3")
    seen = [line_of(request) for request in bucket.proxy.requests()]
    listed = {re.search(r"[?&]prefix=([^&]*)", line)[1] for line in seen if "list-type" in line}
    assert listed == {"run%2F", "run%2Flease%2F", "run%2Flog%2Fexit_rank_", "run%2Fcheckpoints%2Fstep_"}
    assert sum("delimiter" in line for line in seen) == sum("prefix=run%2F&" in line for line in seen) == 2
    commits = [place for place, line in enumerate(seen) if re.match("PUT .*/manifest.json", line)]
    assert len(commits) == 8
    of_one = [line for line in seen[commits[5] : commits[6]] if "/STOP" not in line]  # that is asked for by the clock
    assert len(of_one) <= 38, "\n".join(of_one)


# ---- this machine's copy --------------------------------------------------------------------------------------------


def opened(bucket):
    folder = RunFolder(bucket.location("run"), bucket.config())
    folder.log.mkdir(parents=True, exist_ok=True)
    folder.open()
    return folder


def test_the_copy_that_goes_on_from_what_is_in_s3_is_taken(bucket, on_machine):
    first = opened(bucket)
    first.metrics.write_text("1\n2\n")
    first.mirror()
    first.metrics.write_text("1\n2\n3\n")  # killed here
    assert opened(bucket).metrics.read_text() == "1\n2\n3\n"
    bucket.put("run/metrics.jsonl", b"1\n2\n{half")
    assert opened(bucket).metrics.read_text() == "1\n2\n3\n"
    on_machine("second")
    second = opened(bucket)
    second.mend_last_line()
    assert second.metrics.read_text() == "1\n2\n"
    with second.metrics.open("a") as file:
        file.write("b\n")
    second.mirror()
    on_machine("first")
    assert opened(bucket).metrics.read_text() == "1\n2\nb\n"


def test_a_run_removed_from_s3_leaves_nothing_to_a_new_one_of_its_name(bucket, prepared):
    train(bucket, prepared, "max_steps=2", "export=false")
    for key in bucket.keys("run/"):
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
    train(bucket, prepared, "max_steps=3", "seed=7", "export=false")
    assert [line["step"] for line in told(bucket, "train")] == [1, 2, 3]
    assert bucket.get("run/log/rank_0000.txt").count(b"a step (8 x 1 a rank)") == 1


def test_words_of_an_earlier_life_are_gone_while_the_next_one_runs(bucket):
    folder = opened(bucket)
    folder.exit_file("failed: x", None)
    folder.outcome(Outcome("failed", "x", "x", None, None, goes_on=True, launch=[]))
    assert {"run/outcome.json", "run/log/exit_rank_0000.json"} <= set(bucket.keys())
    assert opened(bucket).previous["kind"] == "x"
    assert not {"run/outcome.json", "run/log/exit_rank_0000.json"} & set(bucket.keys())


def test_two_that_mirror_at_once_leave_the_newest(bucket, monkeypatch):
    """The thread that saves, slow on its way, and the end of the run."""
    folder, replace = opened(bucket), S3Folder.replace
    folder.metrics.write_text("1\n")
    read, go_on = threading.Event(), threading.Event()

    def replace_slowly(self, name, content, version):
        if content == b"1\n":
            read.set()
            assert go_on.wait(DEADLINE_S)
        return replace(self, name, content, version)

    monkeypatch.setattr(S3Folder, "replace", replace_slowly)
    threads = [threading.Thread(target=folder.mirror) for _ in range(2)]
    threads[0].start()
    assert read.wait(DEADLINE_S)
    folder.metrics.write_text("1\n2\n")
    threads[1].start()
    threads[1].join(0.5)  # time enough to go ahead, if it does not wait
    go_on.set()
    for thread in threads:
        thread.join()
    assert bucket.get("run/metrics.jsonl") == b"1\n2\n"


def test_only_what_has_changed_goes_up(bucket):
    folder = opened(bucket)
    folder.metrics.write_text("1\n")
    folder.config.write_text("a: 1\n")
    folder.mirror()
    folder.metrics.write_text("1\n2\n")
    bucket.proxy.set()
    folder.mirror()
    assert [line_of(seen) for seen in bucket.proxy.requests()] == [f"PUT /{bucket.name}/run/metrics.jsonl"]
    assert bucket.get("run/metrics.jsonl") == b"1\n2\n"


# ---- faults ---------------------------------------------------------------------------------------------------------


def at_step(monkeypatch, step, action):
    """Act in the loop after this step, in the place where it asks whether to save."""
    is_due = Recovery.is_due

    def act_and_ask(self, num_asked):
        if self.recorder.progress.step == step:
            action(self)
        return is_due(self, num_asked)

    monkeypatch.setattr(Recovery, "is_due", act_and_ask)


def test_saves_without_permission_are_alarms_and_then_the_end(bucket, prepared):
    bucket.proxy.set(Fault("status", match="^PUT .*/checkpoints/.*optimizer", code=403, error="AccessDenied"))
    with pytest.raises(SavesFail, match="3 saves in a row failed; there is no checkpoint"):
        train(bucket, prepared, *EVERY_STEP, "checkpoint.max_failures=3", "max_steps=50")
    alarms = [line["reason"] for line in told(bucket, "fault")]
    assert sum("no permission to write it" in alarm and "\n" not in alarm for alarm in alarms) >= 3
    assert losses(told(bucket, "train")).keys() >= {1, 2, 3}
    outcome = json.loads(bucket.get("run/outcome.json"))
    assert (outcome["outcome"], outcome["kind"], outcome["checkpoint"]) == ("failed", "saves_fail", None)


def test_an_outage_fails_saves_and_ends_with_them(bucket, prepared, on_disk, tmp_path, monkeypatch):
    def end(recovery):
        recovery.saver.wait()
        bucket.proxy.set()

    at_step(monkeypatch, 1, lambda _: bucket.proxy.set(Fault("status")))
    at_step(monkeypatch, 5, end)
    train(bucket, prepared, "checkpoint.every=2", "checkpoint.max_failures=9")
    assert store_of(bucket, tmp_path).steps() == [6]
    alarms = [line["reason"] for line in told(bucket, "fault")]
    assert [re.sub(": .*", "", alarm) for alarm in alarms] == ["checkpoint of step 2", "checkpoint of step 4"]
    assert all("S3 answers 503 SlowDown" in alarm for alarm in alarms)
    assert losses(told(bucket, "train")) == losses(lines(on_disk, "train"))


def test_training_does_not_wait_for_an_s3_that_hangs(bucket, prepared, on_disk, tmp_path, monkeypatch):
    at_step(monkeypatch, 1, lambda _: bucket.proxy.set(Fault("delay")))
    at_step(monkeypatch, 5, lambda _: bucket.proxy.set())
    more = ["checkpoint.max_failures=9", "checkpoint.max_wait_s=0", "eval_every=null", "export=false"]
    train(
        bucket, prepared, "checkpoint.every=2", "s3.timeout_s=18", *more
    )  # 3 s for an attempt: longer than four steps
    assert store_of(bucket, tmp_path).steps() == [2, 6]
    (alarm,) = told(bucket, "fault")
    assert "checkpoint of step 4: left out: the one before" in alarm["reason"]
    assert losses(told(bucket, "train")) == losses(lines(on_disk, "train"))


def test_a_last_save_that_s3_does_not_take_is_uploaded_next_time(bucket, prepared, on_disk, tmp_path, monkeypatch):
    """No step is done twice."""

    def leave(recovery):
        recovery.saver.wait()
        bucket.proxy.set(Fault("status", match="PUT .*/checkpoints/"))

    at_step(monkeypatch, 5, leave)
    words = r"saving step 6: Unreachable: .*; the newest checkpoint is of step 3 .*; step 6 is whole in .*: the next"
    with pytest.raises(SavesFail, match=words):
        train(bucket, prepared, "checkpoint.patience_s=0")
    outcome = json.loads(bucket.get("run/outcome.json"))
    assert outcome["goes_on"] and "step 6 is whole in" in outcome["reason"]
    bucket.proxy.set()
    assert train(bucket, prepared, "checkpoint.patience_s=0") == ("done", 6)
    assert store_of(bucket, tmp_path).steps() == [3, 6]
    assert [line["step"] for line in told(bucket, "train")] == [1, 2, 3, 4, 5, 6]
    assert losses(told(bucket, "train")) == losses(lines(on_disk, "train"))


def test_the_metrics_that_a_checkpoint_has_seen_are_in_s3_before_it_is_committed(bucket, prepared, monkeypatch):
    """Whatever kills the run then, they are not lost with its machine."""
    create, seen = S3Folder.create, {}

    def look_and_create(self, name, content):
        if name.endswith("manifest.json"):
            step = json.loads(content)["step"]
            seen[step] = [max((line["step"] for line in told(bucket, kind)), default=0) for kind in ("train", "eval")]
        return create(self, name, content)

    monkeypatch.setattr(S3Folder, "create", look_and_create)
    train(bucket, prepared, "checkpoint.every=2", "eval_every=2", "export=false")
    assert list(seen) == [2, 4, 6]
    for step, reached in seen.items():
        assert min(reached) >= step


def test_a_checkpoint_counts_although_the_metrics_could_not_follow(bucket, prepared):
    bucket.proxy.set(Fault("status", match="^PUT .*/metrics.jsonl", times=1, code=403, error="AccessDenied"))
    train(bucket, prepared)
    assert [line["step"] for line in told(bucket, "checkpoint")] == [3, 6]
    (alarm,) = told(bucket, "fault")
    assert "checkpoint of step 3: it is there, but s3://" in alarm["reason"] and "no permission" in alarm["reason"]


def test_an_s3_that_is_out_at_the_end_does_not_hide_what_happened(bucket, prepared, monkeypatch, caplog):
    def fail(_):
        bucket.proxy.set(Fault("status"))
        raise ZeroDivisionError("the real trouble")

    at_step(monkeypatch, 1, fail)
    with pytest.raises(ZeroDivisionError, match="the real trouble"):
        train(bucket, prepared)
    bucket.proxy.set()
    folder = RunFolder(bucket.location("run"), bucket.config())
    assert (folder.log / "rank_0000.txt").read_text().count("no word of the end in s3://") == 2
    assert "the real trouble" in folder.exit_path.read_text()


# ---- before the start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (Fault("status"), 1, r"failed: s3://.*: S3 answers 503 SlowDown, 7 times"),
        (Fault("status", code=403, error="AccessDenied"), 2, r"error: s3://.*: no permission to list it"),
        (Fault("status", code=404, error="NoSuchBucket"), 2, r"error: s3://.*: there is no bucket bucket-\d+; check"),
        (Fault("status", match="PUT", code=403, error="AccessDenied"), 2, r"error: s3://.*: no permission to write it"),
    ],
    ids=["outage", "no permission", "no bucket", "read only"],
)
def test_an_s3_that_cannot_be_used_is_said_in_one_line(bucket, prepared, monkeypatch, capsys, fault, code, words):
    bucket.proxy.set(fault)
    arguments = train_overrides(bucket.location("run"), prepared, *bucket.overrides())
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    monkeypatch.setattr(attempt.logger, "handlers", [])
    monkeypatch.setattr(attempt.logger, "propagate", False)  # as in a process that has not begun
    assert attempt.attempt() == code
    told = capsys.readouterr().err
    assert re.fullmatch(f"(starting [^\n]*\n)?(waiting for S3: [^\n]*\n)?{words}[^\n]*\n", told), told
    assert bucket.keys() == []


def test_a_second_job_is_refused_and_changes_nothing(bucket, prepared, on_machine, monkeypatch):
    train(bucket, prepared, "max_steps=2", "export=false")
    other, real = Lease(open_folder(bucket.location("run"), bucket.config()), 1.0), lease.identity
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lease, "identity", lambda: {**real(), "host": "node-2"})
        other.take()
    try:
        on_machine("second")
        before = everything_but_leases(bucket)
        with pytest.raises(InputError, match=r"run_dir=s3://.*/run is in use by process \d+ on node-2, since"):
            train(bucket, prepared, "max_steps=4", "lease.ttl_s=1")
        assert everything_but_leases(bucket) == before
    finally:
        other.release()


def test_a_folder_of_another_run_or_of_none_is_refused_and_left_alone(bucket, prepared):
    train(bucket, prepared, "max_steps=2", "export=false")
    before = everything_but_leases(bucket)
    with pytest.raises(InputError, match=r"s3://.*/run is of another run \(seed: 0 -> 7\)"):
        train(bucket, prepared, "seed=7")
    assert everything_but_leases(bucket) == before
    for key in bucket.keys("run/"):
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
    bucket.put("run/checkpoints/mine", b"x")
    with pytest.raises(InputError, match="holds files that are not a run's"):
        train(bucket, prepared)
    assert bucket.keys() == ["run/checkpoints/mine"]
