"""What a machine's cache needs, for whom it makes space, and how readers wait for it."""

import errno
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rejections import rejects

from train.config import InputError, ShardsConfig, TrainConfig, Unreachable
from train.data.shards import cache
from train.data.shards.cache import ShardCache, cache_dir
from train.data.shards.format import Shard
from train.data.shards.order import ShardSampler
from train.data.shards.prefetch import wanted_shards
from train.machine.processes import owner_name

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
        cfg = ShardsConfig(
            path="", cache_dir=str(tmp_path), cache_gb=cache_gb, deadline_s=50.0, attempt_s=50.0
        )
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
    says = "may use 0.393 GB, but windows of 1 shards per lane need 0.394 GB in 1 lanes; raise"
    rejects(says, small.check_fits, order_of(20, window=1))
    rejects(r"may use 0.393 GB, but the data is 1.29 GB", small.check_fits, small.manifest.shards)
    some = of_size(20, 800 * MB)
    some.check_fits(order_of(20, window=2, batch=200))
    rejects(
        "a batch has 201 sequences, more than a window of 2",
        some.check_fits,
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
        rows = sampler.epoch_order(epoch).rows(first, first + 1, sampler.slots).ravel()
        assert {f"train-{row // 100:05d}.safetensors" for row in rows} <= {
            shard.file for shard in wanted
        }
        assert manifest.splits["validation"][0] in wanted
        assert sum(shard.bytes for shard in wanted) <= limit
        seen |= {shard.file for shard in wanted}
    mine = {manifest.shards[number].file for number in sampler.lanes.shards_of(sampler.lanes_here)}
    assert seen == {*mine, "validation-00000.safetensors"}


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setattr(cache.machine, "instance_stores", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir(ShardsConfig(path="")) == tmp_path / "baretrain"
    monkeypatch.setattr(cache.machine, "instance_stores", lambda: [tmp_path / "nvme"])
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


def test_times_that_cannot_be_kept_are_rejected():
    given = {"run_dir": "", "max_steps": 1, "micro_batch_size": 1}
    late = ShardsConfig(path="s3://b", deadline_s=700)
    rejects(
        "data.deadline_s=700 must be below backend.timeout_s=600", TrainConfig, data=late, **given
    )


SHARD = manifest_of(1).shards[0]


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
def served(of_size, clock):
    """A cache with a deadline of 50 s, whose prefetcher lives and brings nothing."""
    served = of_size(3)
    with served.hold(alone=False):
        served.write_status(is_filling=True)
        yield served


def waited_s(served, clock, match, kind=Unreachable):
    rejects(match, served.wait, [SHARD], error=kind)
    return clock.now_s - 1000


OTHER = replace(SHARD, file="train-00009.safetensors")


def test_a_shard_that_does_not_come_is_given_up(served, clock):
    assert (
        50
        <= waited_s(served, clock, "no byte arrived, and there was no error; given up after 50 s")
        < 51
    )
    assert waited_s(served, clock, r"given up after 50 s") < 51  # later ones do not wait again


def test_only_silence_counts(served, clock):
    """Bytes of any shard, and a prefetcher that has nothing to fetch, are no silence; the fault of another is named."""
    times = [1000.0 + 40 * number for number in range(1, 10)]
    clock.later = dict.fromkeys(times, served.heard)
    clock.later[1400.0] = lambda: served.write_status(is_filling=False)
    clock.later[1500.0] = lambda: served.write_status(is_filling=True)
    clock.later[1510.0] = lambda: served.set_fault(OTHER, "no space", is_final=False)
    assert (
        550
        <= waited_s(
            served, clock, "00000.safetensors does not arrive; no space; given up after 50 s"
        )
        < 552
    )


def test_the_last_fault_of_the_prefetcher_is_the_reason(served, clock):
    served.set_fault(SHARD, "slow down", is_final=False)
    clock.later[1020.0] = lambda: served.set_fault(SHARD, "gone", is_final=True)
    assert 20 <= waited_s(served, clock, "^gone$", kind=InputError) < 22


def test_a_prefetcher_that_is_gone_is_named(served, clock):
    status = json.loads(served.status.read_text())
    served.status.write_text(json.dumps(status | {"owner": owner_name(2**22 + 1)}))
    assert waited_s(served, clock, "process that fetches shards on this node is gone") < 1
    served.status.unlink()  # at the end of the run, with the rest of its part
    assert waited_s(served, clock, "process that fetches shards on this node is gone") < 1


def test_a_prefetcher_that_has_not_begun_is_waited_for(served, clock):
    served.status.unlink()
    assert (
        50
        <= waited_s(
            served, clock, "does not arrive; the process that fetches has not started; given up"
        )
        < 52
    )


def test_what_is_told_and_looked_up_does_not_grow_with_the_shards(of_size, clock, monkeypatch):
    """Status of 3,000 wanted shards, and the looks of a reader that waits for 1,000 of them for 10 s."""
    many, looked = of_size(3000), []
    with many.hold(alone=False):
        many.write_status(is_filling=True)
        assert many.status.stat().st_size < 200
        is_ready = many.is_ready
        many.is_ready = lambda shard: looked.append(shard) or is_ready(shard)
        clock.later[1010.0] = lambda: [
            (many.folder / shard.file).touch() for shard in many.manifest.shards
        ]
        for shard in many.manifest.shards:
            (many.compared / shard.file).touch()
        many.wait(many.manifest.shards[:1000])
    assert len(looked) < 1000 + 10 / cache.POLL_S + 5


def test_a_shard_is_not_ready_before_this_run_has_compared_it(of_size):
    """Another run's comparison does not count, and a new run leaves what others say."""
    first, second = of_size(1), of_size(1)
    with first.hold(alone=False):
        (first.compared / SHARD.file).touch()
        assert not first.is_ready(SHARD)
        (first.folder / SHARD.file).touch()
        with second.hold(alone=False):
            assert first.is_ready(SHARD) and not second.is_ready(SHARD)


def test_ranks_launched_together_share_a_part_of_the_cache(monkeypatch):
    def name(**launched):
        for variable, value in launched.items():
            monkeypatch.setenv(variable, value)
        return cache.launch_name()

    one = name(RANK="0", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert name() == one != name(MASTER_PORT="29501")
    assert name(WORLD_SIZE="1") != name()


def test_a_file_system_without_locks_is_named(of_size, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    rejects(
        r"lock cannot be locked: No locks available; set data.cache_dir to a local",
        of_size(1).hold,
        alone=True,
    )
