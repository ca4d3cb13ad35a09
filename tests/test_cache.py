"""What a node's cache needs, and for whom it makes room."""

import dataclasses
import errno
import json
import os
from types import SimpleNamespace

import pytest

from train.config import InputError, ShardsConfig, TrainConfig, Unreachable
from train.data.shards import cache
from train.data.shards.cache import Room, cache_dir, limit_bytes
from train.data.shards.format import Shard
from train.data.shards.order import ShardSampler, ShuffleBlock
from train.data.shards.prefetch import Need

MB = 10**6


def manifest_of(num_shards, *, rows=100, size=64 * MB, validation=10 * MB):
    train = [Shard(f"train-{number:05d}.safetensors", rows, size, "0") for number in range(num_shards)]
    held_out = [Shard("validation-00000.safetensors", 10, validation, "0")]
    return SimpleNamespace(splits={"train": train, "validation": held_out}, shards=[*train, *held_out], id="1" * 64)


def test_the_window_is_all_that_fits_and_grows():
    room = Room.of(manifest_of(20))
    assert room.shuffle_block(10**12) == ShuffleBlock(20, grow=True)
    assert room.shuffle_block(room.total) == ShuffleBlock(20, grow=True)
    # Six windows of 3 shards, and the validation data.
    assert room.shuffle_block(room.total - 1) == ShuffleBlock(
        3, grow=True
    )  # 6 windows of 3 shards and the validation data
    assert room.shuffle_block(10 * MB + 6 * 64 * MB) == ShuffleBlock(1, grow=True)
    with pytest.raises(InputError, match=r"may take 0.393 GB, windows of 1 shards need 0.394 GB; raise data.cache_gb"):
        room.shuffle_block(10 * MB + 6 * 64 * MB - MB)


def test_a_batch_larger_than_a_window_is_refused_where_not_all_fits():
    room = Room.of(manifest_of(20))
    room.check(ShuffleBlock(2), 10**12, global_batch_size=500)
    room.check(ShuffleBlock(2), 800 * MB, global_batch_size=200)
    with pytest.raises(InputError, match="a batch of 201 sequences is more than a window of 2 shards holds"):
        room.check(ShuffleBlock(2), 800 * MB, global_batch_size=201)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("batch", [7, 100])
def test_whatever_a_step_reads_is_wanted_and_room_is_kept(window, batch):
    """Over two epochs: the shards of each batch are among those wanted while it is read."""
    manifest = manifest_of(19)
    limit = 10 * MB + cache.WINDOWS_HELD * window * 64 * MB
    sampler = ShardSampler(
        [100] * 19, seed=3, windows=ShuffleBlock(window, grow=True), global_batch_size=batch, rank=0, world_size=1
    )
    need = Need(manifest, sampler, limit)
    assert not need.fits
    per_epoch = sampler.total_size // batch
    held = set()
    for step in range(2 * per_epoch):
        sampler.consumed_rows = step * batch
        wanted = need.wanted()
        epoch, first = divmod(sampler.consumed_rows, sampler.total_size)
        rows = sampler.epoch_order(epoch).rows(first, first + batch)
        assert {f"train-{row // 100:05d}.safetensors" for row in rows} <= {shard.file for shard in wanted}
        assert manifest.splits["validation"][0] in wanted
        assert sum(shard.bytes for shard in wanted) <= limit - window * 64 * MB  # readers may still map a window
        held |= {shard.file for shard in wanted}
    assert held == {shard.file for shard in manifest.shards}


def test_all_is_wanted_where_all_fits_the_first_windows_first():
    manifest = manifest_of(9)
    sampler = ShardSampler(
        [100] * 9, seed=0, windows=ShuffleBlock(9, grow=True), global_batch_size=10, rank=0, world_size=1
    )
    wanted = Need(manifest, sampler, 10**12).wanted()
    order = sampler.epoch_order(0)
    assert len(wanted) == 10 and wanted[2] == manifest.splits["validation"][0]
    assert [shard.file for shard in wanted[:2]] == [
        manifest.splits["train"][number].file for number in order.windows[0]
    ]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setattr(cache.machine, "instance_stores", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir(ShardsConfig(path="")) == tmp_path / "baretrain"
    monkeypatch.setattr(cache.machine, "instance_stores", lambda: [tmp_path / "nvme"])
    assert cache_dir(ShardsConfig(path="")) == tmp_path / "nvme" / "baretrain"
    assert cache_dir(ShardsConfig(path="", cache_dir=str(tmp_path / "mine"))) == tmp_path / "mine"


def test_what_the_disk_has_not_is_not_promised(monkeypatch, tmp_path):
    manifest = manifest_of(3)
    monkeypatch.setattr(cache.os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=MB))
    assert limit_bytes(ShardsConfig(path=""), tmp_path, manifest) == 90 * MB
    assert limit_bytes(ShardsConfig(path="", cache_gb=0.05), tmp_path, manifest) == 50 * MB
    with pytest.raises(InputError, match="has 0.1 GB free, the shards would take 0.202 GB; free some"):
        limit_bytes(ShardsConfig(path="", cache_gb=0.3), tmp_path, manifest)
    (tmp_path / "train-00000.safetensors").write_text("")  # what is there already needs no more room
    assert limit_bytes(ShardsConfig(path="", cache_gb=0.15), tmp_path, manifest) == 150 * MB


def test_times_that_cannot_be_kept_are_refused():
    with pytest.raises(InputError, match=r"data.deadline_s=700 must be below backend.timeout_s=600"):
        TrainConfig(run_dir="", max_steps=1, micro_batch_size=1, data=ShardsConfig(path="s3://b", deadline_s=700))
    with pytest.raises(InputError, match=r"data.attempt_s=60 is longer than data.deadline_s=30"):
        ShardsConfig(path="", deadline_s=30)


# ---- readers -------------------------------------------------------------------------------------------------------


class Clock:
    """A stand-in for the time module: sleeping takes no time."""

    def __init__(self):
        self.now_s, self.later = 1000.0, {}

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for at_s in [at_s for at_s in self.later if at_s <= self.now_s]:
            self.later.pop(at_s)()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cache, "time", clock)
    return clock


@pytest.fixture
def served(tmp_path):
    """A cache with a deadline of 50 s, whose fetching process is alive and brings nothing."""
    served = cache.Cache(tmp_path, 50.0)
    served.begin()
    with (served.run / "fetcher.lock").open("a+") as file:
        cache.flock(file, alone=False)
        yield served


SHARD = Shard("train-00000.safetensors", 1, 1, "0")


def waited_s(served, clock, match, began_s=1000.0, kind=Unreachable):
    with pytest.raises(kind, match=match):
        served.wait(SHARD, began_s)
    return clock.now_s - 1000


def test_a_batch_has_one_deadline(served, clock):
    """The time that it waited for other shards counts."""
    served.wanted.write_text(json.dumps([SHARD.file]))
    assert (
        waited_s(served, clock, r"does not come; there is no error: .*GB free; given up after 50 s", began_s=960.0) < 12
    )
    assert waited_s(served, clock, r"given up after 50 s", began_s=1010.0) < 12  # later ones do not wait again


def test_time_until_a_shard_is_wanted_does_not_count(served, clock):
    clock.later[1100.0] = lambda: served.wanted.write_text(json.dumps([SHARD.file]))
    assert 150 <= waited_s(served, clock, "given up after 50 s") < 152


def test_the_last_fault_of_the_fetching_process_is_the_reason(served, clock):
    served.wanted.write_text(json.dumps([SHARD.file]))
    served.faults(SHARD).write_text(json.dumps({"reason": "slow down", "is_final": False}))
    clock.later[1020.0] = lambda: served.faults(SHARD).write_text(json.dumps({"reason": "gone", "is_final": True}))
    assert 20 <= waited_s(served, clock, "^gone$", kind=InputError) < 22


def test_a_shard_without_a_fault_of_its_own_has_that_of_another(served, clock):
    served.wanted.write_text(json.dumps([SHARD.file]))
    (served.run / "faults/train-00009.safetensors.json").write_text('{"reason": "no room", "is_final": false}')
    waited_s(served, clock, "train-00000.safetensors does not come; another one: no room; given up after 50")


def test_a_shard_is_not_ready_before_this_run_has_compared_it(tmp_path):
    """Another run's comparison does not count, and a new run leaves what others say."""
    first, second = cache.Cache(tmp_path, 50.0), cache.Cache(tmp_path, 50.0)
    first.begin()
    first.set_compared(SHARD)
    first.faults(SHARD).write_text("{}")
    assert not first.is_ready(SHARD) and not first.ready()
    (tmp_path / SHARD.file).touch()
    second.begin()
    assert first.is_ready(SHARD) and first.ready() == {SHARD.file} and first.faults(SHARD).exists()
    assert not second.is_ready(SHARD) and not second.ready() and not second.faults(SHARD).exists()


def test_ranks_launched_together_share_a_part_of_the_cache(monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    name = cache.launch_name()
    assert cache.launch_name() == name
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert cache.launch_name() != name
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cache.launch_name() != cache.launch_name()


def test_a_loader_whose_rank_is_gone_ends(served, clock):
    """A rank whose shell is gone does not."""
    served.wanted.write_text(json.dumps([SHARD.file]))
    in_loader = dataclasses.replace(served, rank=2**30)
    assert waited_s(in_loader, clock, "the rank of this loader process is gone") < 2
    in_loader = dataclasses.replace(served, rank=os.getppid())
    assert waited_s(in_loader, clock, "given up") > 50


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    with pytest.raises(InputError, match=r"lock cannot be locked: No locks available; set data.cache_dir to a local"):
        cache.lock(cache.Cache(tmp_path, 1.0), alone=True)
