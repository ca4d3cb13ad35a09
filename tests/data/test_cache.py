"""What a machine's cache needs, for whom it makes space, and how readers wait for it."""

import os
from types import SimpleNamespace

import pytest
from rejections import rejects

from train.config import ShardsConfig, Unreachable
from train.data.shards import cache
from train.data.shards.cache import ShardCache, cache_dir
from train.data.shards.manifest import Shard
from train.data.shards.order import ShardSampler
from train.data.shards.prefetch import wanted_shards

MB = 10**6


def manifest_of(num_shards, *, rows=100, size=64 * MB, validation=10 * MB):
    train = [
        Shard(f"train-{number:05d}.safetensors", rows, size, "0") for number in range(num_shards)
    ]
    held_out = [Shard("validation-00000.safetensors", 10, validation, "0")]
    return SimpleNamespace(
        splits={"train": train, "validation": held_out}, shards=[*train, *held_out], id="1" * 64
    )


@pytest.fixture
def of_size(monkeypatch, tmp_path):
    """Makes a cache of `num_shards` shards that may take so many bytes, on a disk with `free` bytes."""

    def make(num_shards, limit_bytes=None, free=10**13):
        monkeypatch.setattr(
            cache.os,
            "statvfs",
            lambda _: SimpleNamespace(f_bavail=free, f_bfree=free, f_blocks=10**13, f_frsize=1),
        )
        cache_gb = None if limit_bytes is None else limit_bytes / 1e9
        cfg = ShardsConfig(path="", cache_dir=str(tmp_path), cache_gb=cache_gb)
        return ShardCache(cfg, manifest_of(num_shards))

    return make


def order_of(num_shards, *, batch=10, lanes=1, window=None, **place):
    place = {"rank": 0, "world_size": 1, **place}
    return ShardSampler(
        [100] * num_shards,
        seed=3,
        global_batch_size=batch,
        lanes=lanes,
        window_shards=window,
        **place,
    )


def test_the_window_is_the_usual_one_or_what_fits(of_size):
    total = 20 * 64 * MB + 10 * MB
    one_lane, two = order_of(20), order_of(20, lanes=2, window=5)
    assert (
        of_size(20, 10**12).window_shards(one_lane)
        == of_size(20, total).window_shards(one_lane)
        == 256
    )
    # 6 windows of 3 shards, and validation
    assert of_size(20, total - 1).window_shards(one_lane) == 3
    assert of_size(20, 10 * MB + 6 * 64 * MB).window_shards(one_lane) == 1
    assert of_size(20, 9 * MB + 6 * 64 * MB).window_shards(one_lane) == 0
    # 2 times 6 windows, and 2 shards that are cut
    assert of_size(20, total - 1).window_shards(two) == 1
    half = order_of(20, lanes=2, window=5, world_size=2)  # this machine reads one of the two lanes
    assert of_size(20, total - 1).window_shards(half) == 5
    small = of_size(20, 10 * MB + 6 * 64 * MB - MB)
    rejects(
        "may use 0.393 GB, too little for windows of 1 shards per lane in 1 lanes; raise",
        small.check_windows,
        order_of(20, window=1),
    )
    rejects(r"may use 0.393 GB, but the data is 1.29 GB", small.check_space, small.manifest.shards)
    some = of_size(20, 800 * MB)
    some.check_windows(order_of(20, window=2, batch=200))
    rejects(
        "a batch has 201 sequences, more than windows of 2",
        some.check_windows,
        order_of(20, window=2, batch=201),
    )


@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (1, 2), (1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("batch", [6, 90])
@pytest.mark.parametrize("machines", [1, 2])
def test_whatever_a_step_reads_is_wanted_and_space_is_kept(lanes, window, batch, machines):
    """Over two epochs: the shards of each batch are among those wanted while it is read."""
    sampler = order_of(19, batch=batch, lanes=lanes, window=window, world_size=machines)
    # readers may still map a window of each lane
    held = len(sampler.lanes_here) * (
        (cache.WINDOWS_HELD - 1) * window + cache.cut_shards(sampler)
    )
    limit, manifest = 10 * MB + held * 64 * MB, manifest_of(19)
    seen = set()
    for step in range(2 * sampler.steps):
        sampler.consumed_rows = step * batch
        wanted = wanted_shards(manifest, sampler, limit)
        epoch, first = sampler.position
        rows = sampler.epoch_order(epoch).rows(first, first + 1, sampler.indices).ravel()
        assert {f"train-{row // 100:05d}.safetensors" for row in rows} <= {
            shard.file for shard in wanted
        }
        assert manifest.splits["validation"][0] in wanted
        assert sum(shard.bytes for shard in wanted) <= limit
        seen |= {shard.file for shard in wanted}
    mine = {manifest.shards[number].file for number in sampler.lanes.shards_of(sampler.lanes_here)}
    assert seen == {*mine, "validation-00000.safetensors"}


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setattr(cache.host, "instance_stores", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir(ShardsConfig(path="")) == tmp_path / "baretrain"
    monkeypatch.setattr(cache.host, "instance_stores", lambda: [tmp_path / "nvme"])
    assert cache_dir(ShardsConfig(path="")) == tmp_path / "nvme" / f"baretrain-{os.getuid()}"
    assert cache_dir(ShardsConfig(path="", cache_dir=str(tmp_path / "mine"))) == tmp_path / "mine"


def test_what_the_disk_has_not_is_not_promised(of_size):
    assert of_size(3, free=100 * MB).limit_bytes() == 90 * MB
    assert of_size(3, 50 * MB, free=100 * MB).limit_bytes() == 50 * MB
    full = of_size(3, 300 * MB, free=100 * MB)
    rejects("has 0.1 GB free, but the shards would take 0.202 GB; free some", full.limit_bytes)
    there = of_size(3, 150 * MB, free=100 * MB)
    # what is there already needs no more space
    (there.folder / "train-00000.safetensors").write_text("")
    assert there.limit_bytes() == 150 * MB


SHARD = manifest_of(1).shards[0]


def test_readers_wait_until_a_shard_is_there_or_its_fetcher_says_that_it_does_not_come(
    of_size, monkeypatch
):
    """Another shard's fault is none of theirs."""
    cache_of_run = of_size(3)
    with cache_of_run.hold(alone=False):
        cache_of_run.tell(os.getpid(), {"train-00009.safetensors": "gone"})
        later = iter([lambda: None, (cache_of_run.folder / SHARD.file).touch])
        monkeypatch.setattr(cache.time, "sleep", lambda _: next(later)())
        cache_of_run.wait([SHARD])
        (cache_of_run.folder / SHARD.file).unlink()
        cache_of_run.tell(os.getpid(), {SHARD.file: "slow down; given up"})
        rejects("^slow down; given up$", cache_of_run.wait, [SHARD], error=Unreachable)
        cache_of_run.tell(2**22 + 1, {})
        gone = "process that fetches shards on this node is gone"
        rejects(gone, cache_of_run.wait, [SHARD], error=Unreachable)
        cache_of_run.state.unlink()  # at the end of the run
        rejects(gone, cache_of_run.wait, [SHARD], error=Unreachable)


def test_ranks_launched_together_share_a_part_of_the_cache(monkeypatch):
    def name(**launched):
        for variable, value in launched.items():
            monkeypatch.setenv(variable, value)
        return cache.launch_name()

    one = name(RANK="0", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert name() == one != name(MASTER_PORT="29501")
    assert name(WORLD_SIZE="1") != name()
