"""The cache of a node under a run from S3: bounded, shared, mended; kills and full disks."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from forks import start_forked
from running import ROOT, lines, run, train_config
from services.fault_proxy import Fault
from streaming import alive, assert_same, descendants, losses, num_shards, overrides, train_from, upload

from train import loop
from train.config import InputError, S3Config, ShardsConfig, Unreachable
from train.data import cache, fetcher
from train.data.order import ShardSampler
from train.data.prepared import TOKENIZER, PreparedData
from train.data.shards import read_manifest
from train.preempt import StopRequest

pytestmark = pytest.mark.usefixtures("short_pauses")


def cached(run_dir):
    return sorted(Path(f"{run_dir}-cache").rglob("*.safetensors"))


def test_a_second_run_reads_the_cache_and_mends_what_is_damaged_in_it(bucket, shards, from_disk, tmp_path):
    location = upload(bucket, shards)
    cache = f"data.cache_dir={tmp_path}/cache"
    train_from(bucket, tmp_path / "first", location, cache)
    damaged = next((tmp_path / "cache").rglob("train-00002.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    bucket.proxy.set()
    train_from(bucket, tmp_path / "second", location, cache)
    assert_same(tmp_path / "second", from_disk)
    assert [request.path[-20:] for request in bucket.proxy.requests("^GET .*safetensors")] == [f"/{damaged.name}"[-20:]]


def test_a_cache_smaller_than_the_data_is_bounded_and_changes_nothing(bucket, shards, tmp_path):
    """Windows of one shard: the order of a run from disk with the same windows."""
    manifest = read_manifest(shards)
    sizes = [shard.bytes for split in manifest.splits.values() for shard in split]
    validation = sum(shard.bytes for shard in manifest.splits["validation"])
    limit = validation + cache.WINDOWS_HELD * max(sizes)
    assert limit < sum(sizes)
    loop.run(
        train_config(tmp_path / "disk", shards, "max_steps=30", "eval_every=10", "data.window_shards=1"), StopRequest()
    )
    mine = tmp_path / "run-cache" / manifest.id[:16]
    mine.mkdir(parents=True)
    (mine / "thesis.safetensors").write_text("not of this data set")
    largest = []
    stop = threading.Event()

    def watch():
        while not stop.wait(0.02):
            largest.append(sum(path.stat().st_size for path in mine.glob("[!.]*-0*.safetensors") if path.exists()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        train_from(bucket, tmp_path / "run", upload(bucket, shards), f"data.cache_gb={limit / 1e9}")
    finally:
        stop.set()
        thread.join()
    assert_same(tmp_path / "run", tmp_path / "disk")
    assert max(largest) <= limit
    assert (mine / "thesis.safetensors").exists()
    assert len(cached(tmp_path / "run")) < num_shards(shards)


def test_a_cache_without_room_for_one_window_is_refused(bucket, shards, tmp_path):
    with pytest.raises(
        InputError, match=r"the cache may take .* GB, windows of 1 shards need .* GB; raise data.cache_gb"
    ):
        train_from(bucket, tmp_path / "run", upload(bucket, shards), "data.cache_gb=0.000001")
    with pytest.raises(InputError, match=r"free, the shards would take|the cache may take"):
        train_from(bucket, tmp_path / "more", bucket.location("data"), "data.cache_gb=0.00002", "data.window_shards=5")


def test_a_cache_that_cannot_be_written_is_refused(bucket, shards, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write to .*file"):
        train_from(bucket, tmp_path / "run", upload(bucket, shards), f"data.cache_dir={tmp_path}/file/cache")


FULL_DISK = """
import errno, glob, os, subprocess, sys, threading, time
from train.data import download

disk, is_real = sys.argv.pop(1), sys.argv.pop(1) == "real"

def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def fill():  # somebody else, as soon as the run has looked how much is free
    while not glob.glob(f"{disk}/*/runs/*/wanted.json"):
        time.sleep(0.005)
    with open(f"{disk}/other", "ab", 0) as file:
        while True:
            try:
                file.write(b"x" * 4096)
            except OSError:
                time.sleep(0.005)

if is_real:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", disk], check=True)
    threading.Thread(target=fill, daemon=True).start()
else:
    download.Part.write = refuse
from train import __main__
code = __main__.main()
print(code, flush=True)
os._exit(0)
"""


def test_a_disk_that_fills_up_during_the_run_is_named(bucket, shards, tmp_path):
    """A real one, where this user may mount; elsewhere only the shards' writes say so."""
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = overrides(bucket, tmp_path / "run", upload(bucket, shards), "max_steps=30", "data.deadline_s=5")
    settings += ["data.num_workers=0", "data.downloads=1", f"data.cache_dir={disk}"]
    bucket.proxy.set(Fault("delay", r"^GET .*safetensors", seconds=0.2))
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    trial = subprocess.run([*alone, "mount", "-t", "tmpfs", "none", disk], capture_output=True)
    may_mount = trial.returncode == 0
    alone = alone if may_mount else []
    found = subprocess.run(
        [*alone, sys.executable, "-c", FULL_DISK, disk, "real" if may_mount else "", *map(str, settings)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert found.stdout == "1\n", found.stdout + found.stderr
    assert re.search(
        rf"safetensors: cannot be written to {disk}/.*: No space left on device \(1 tries\)", found.stderr
    ), found.stderr
    words = rf"(No space left on device|{disk}/\w+ has 0 GB free).*; given up after 5 s"
    assert re.search(rf"failed: .*{words}", found.stderr), found.stderr


def windowed(shards):
    """Setting of a cache that holds windows of one shard."""
    manifest = read_manifest(shards)
    validation = sum(shard.bytes for shard in manifest.splits["validation"])
    limit = validation + cache.WINDOWS_HELD * max(shard.bytes for shard in manifest.shards)
    return f"data.cache_gb={limit / 1e9}"


def started(settings, run_dir, step):
    """A run in a process of its own that has saved a step."""
    process = start_forked(["train", *settings], os.environ)
    while process.is_alive() and not (run_dir / f"checkpoints/step_{step:08d}").exists():
        time.sleep(0.02)
    assert process.is_alive()
    return process


def test_two_runs_share_a_cache_unless_one_has_to_delete(bucket, shards, from_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(fetcher, "TAKE_OVER_S", 1.0)
    location, here = upload(bucket, shards), f"data.cache_dir={tmp_path}/cache"
    long = ["max_steps=5000", "max_epochs=999", "checkpoint.every=5", "eval_every=null", here]
    other = started(overrides(bucket, tmp_path / "other", location, *long), tmp_path / "other", 5)
    try:
        bucket.proxy.set()
        train_from(bucket, tmp_path / "run", location, here)
        assert_same(tmp_path / "run", from_disk)
        assert not bucket.proxy.requests("^GET .*safetensors")
        with pytest.raises(InputError, match=r"another run uses .*, and not all of the data fits"):
            train_from(bucket, tmp_path / "small", location, here, windowed(shards))
    finally:
        other.kill()
        other.join()
    other = started(overrides(bucket, tmp_path / "third", location, *long, windowed(shards)), tmp_path / "third", 5)
    try:
        with pytest.raises(InputError, match=r"another run has .* for itself; give one of them its own data.cache_dir"):
            train_from(bucket, tmp_path / "fourth", location, here)
    finally:
        other.kill()
        other.join()


def opened(bucket, location, tmp_path):
    """A data set in the cache of all these tests, and the supply of a run that reads all of it."""
    cfg = ShardsConfig(path=location, cache_dir=f"{tmp_path}/cache")
    data = PreparedData(cfg, bucket.config())
    rows = [shard.rows for shard in data.manifest.splits["train"]]
    sampler = ShardSampler(rows, seed=0, global_batch_size=8, rank=0, world_size=1, windows=data.windows())
    return data, data.supply(sampler, is_first_on_machine=True)


def all_tokens(data, split="train"):
    reader = data.split(split)
    return reader.rows(np.arange(len(reader))).tokens


def damage(paths):
    for path in paths:
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)


def test_a_run_compares_what_lies_in_a_cache_that_another_holds(bucket, shards, tmp_path):
    """It replaces what is damaged, fetches nothing else, and a file is never missing for the other run."""
    location = upload(bucket, shards)
    here = PreparedData(ShardsConfig(path=str(shards)), S3Config())
    first, supply = opened(bucket, location, tmp_path)
    with supply:
        right = all_tokens(first)
        np.testing.assert_array_equal(right, all_tokens(here))
        files = [first.folder / shard.file for shard in first.manifest.splits["train"]]
        damaged, before = files[1::2], {path: path.stat().st_ino for path in files}
        damage(damaged)
        bucket.proxy.set(Fault("delay", "safetensors", seconds=0.2))
        second, supply = opened(bucket, location, tmp_path)
        with supply:
            assert all(map(first.cache.is_ready, first.manifest.splits["train"]))
            np.testing.assert_array_equal(all_tokens(second), right)
        asked = [request.path.rpartition("/")[2] for request in bucket.proxy.requests("^GET .*safetensors")]
        assert sorted(asked) == [path.name for path in damaged]
        assert [path for path in files if path.stat().st_ino != before[path]] == damaged
        assert all(map(first.cache.is_ready, first.manifest.splits["train"]))


def test_shards_read_without_a_run_are_compared_too(bucket, shards, tmp_path):
    """Those that `python -m train.shards head` finds in the cache."""
    location = upload(bucket, shards)
    cfg = ShardsConfig(path=location, cache_dir=f"{tmp_path}/cache")
    read = [PreparedData(cfg, bucket.config()) for _ in range(2)]
    right = read[0].on_demand("validation").rows(np.arange(4)).tokens
    damage([read[0].folder / read[0].manifest.splits["validation"][0].file])
    np.testing.assert_array_equal(read[1].on_demand("validation").rows(np.arange(4)).tokens, right)


def test_a_tokenizer_damaged_in_the_cache_is_replaced(bucket, shards, tmp_path):
    location = upload(bucket, shards)
    cfg = ShardsConfig(path=location, cache_dir=f"{tmp_path}/cache")
    for name in TOKENIZER:
        (PreparedData(cfg, bucket.config()).folder / name).write_text("{}")
        folder = PreparedData(cfg, bucket.config()).folder
        assert (folder / name).read_bytes() == (shards / name).read_bytes()


def test_the_same_command_may_follow_a_kill_at_once(bucket, shards, tmp_path):
    """Although it has the cache for itself, and loader processes of the dead one take a while to notice."""
    settings = overrides(bucket, tmp_path / "run", upload(bucket, shards), windowed(shards), "eval_every=null")
    settings += ["max_steps=60", "checkpoint.every=5", "data.num_workers=2"]
    killed = started(settings, tmp_path / "run", 5)
    killed.kill()
    killed.join()
    found = run(settings)
    assert found.returncode == 0, found.stderr
    assert sorted({line["step"] for line in lines(tmp_path / "run", "train")}) == list(range(1, 61))


def test_what_a_killed_run_left_counts_as_room(bucket, shards, tmp_path, monkeypatch):
    """By an earlier version, killed as it had set aside what lay there, on a disk with little more than the data."""
    location, here = upload(bucket, shards), f"data.cache_dir={tmp_path}/cache"
    train_from(bucket, tmp_path / "first", location, here)
    manifest = read_manifest(shards)
    folder = tmp_path / "cache" / manifest.id[:16]
    for shard in manifest.shards:
        (folder / shard.file).rename(folder / f".{shard.file}.kept")  # as earlier versions did
    (folder / f".{manifest.shards[0].file}.part-999999999-dead").write_bytes(b"x" * 1000)
    total = sum(shard.bytes for shard in manifest.shards)
    monkeypatch.setattr(cache, "free_bytes", lambda _: total // 2)
    bucket.proxy.set()
    train_from(bucket, tmp_path / "second", location, here)
    assert not bucket.proxy.requests("^GET .*safetensors")
    assert not list(folder.glob(".*.part-*"))


def test_the_end_of_a_run_waits_for_no_shard(bucket, shards, tmp_path):
    """A loader process looks ahead, and waits for a shard that hangs, when the last step is done."""
    location = upload(bucket, shards)
    manifest = read_manifest(shards)
    hung = [shard.file for shard in manifest.splits["train"]]
    loop.run(train_config(tmp_path / "disk", shards, "max_steps=1", "eval_every=null"), StopRequest())
    bucket.proxy.set(Fault("stall", "train-", skip=1))  # one comes, and serves the first step
    more = ["max_steps=1", "eval_every=null", "data.num_workers=2", "data.deadline_s=200", "data.verify=false"]
    more += ["data.window_shards=1", "export=false", "data.attempt_s=100", "data.downloads=1"]
    assert len(hung) > 2
    process = start_forked(["train", *overrides(bucket, tmp_path / "run", location, *more)], os.environ)
    process.join(60)
    assert process.exitcode == 0
    assert losses(tmp_path / "run")


def test_the_loss_of_the_fetching_process_is_named(bucket, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(fetcher.Fetcher, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(cache, "STARTS_WITHIN_S", 1.0)
    with pytest.raises(Unreachable, match="the process that fetches shards on this node is gone"):
        train_from(bucket, tmp_path / "run", upload(bucket, shards))


def test_its_loss_during_the_run_is_named_at_once(bucket, shards, tmp_path, monkeypatch):
    served = fetcher.Fetcher.now_wanted

    def then_die(self, before):
        wanted = served(self, before)
        os.kill(os.getpid(), signal.SIGKILL)
        return wanted

    monkeypatch.setattr(fetcher.Fetcher, "now_wanted", then_die)
    began_s = time.monotonic()
    with pytest.raises(Unreachable, match="the process that fetches shards on this node is gone"):
        train_from(bucket, tmp_path / "run", upload(bucket, shards))
    assert time.monotonic() - began_s < cache.STARTS_WITHIN_S


def test_a_killed_run_leaves_no_process_and_goes_on_with_another_number_of_ranks(bucket, shards, from_disk, tmp_path):
    settings = overrides(bucket, tmp_path / "run", upload(bucket, shards), "max_steps=30", "eval_every=10")
    settings += ["checkpoint.every=5", "data.num_workers=1"]
    process = started(settings, tmp_path / "run", 10)
    children = descendants(process.pid)
    process.kill()
    process.join()
    assert len(children) >= 2  # fetcher and loader
    deadline_s = time.monotonic() + 15
    while any(alive(pid) for pid in children) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in children)
    found = run(settings, ranks=2)
    assert found.returncode == 0, found.stderr
    by_step = {line["step"]: line["loss"] for line in lines(tmp_path / "run", "train")}
    assert list(by_step.values()) == pytest.approx(losses(from_disk), rel=2e-5)
