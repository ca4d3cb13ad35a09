"""What data costs at the size of the mission: sequences and bytes are counted, nothing is timed. No shard is there."""

import logging
import tracemalloc
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from services.process import set_aws
from simulated_data import DIGITS, Simulated, StandInS3

from train.config import ShardsConfig, TrainConfig
from train.data.shards.cache import WINDOWS_HELD, cut_shards
from train.data.shards.order import MAX_LANES, ShardSampler, eval_shards
from train.data.shards.prefetch import wanted_shards
from train.data.shards.prepared import PreparedData

MISSION = [250_000] * 1200  # sequences of its shards
RANKS, BATCH = 32, 4096  # ranks per machine; sequences per global batch
HELD_OUT = 0.01  # validation shards per training shard, the default of baretrain prepare
LATE = 0.95  # share of the second epoch


def sampler_of(
    shard_rows: list[int], number: int, machines: int, *, epochs: float = 0
) -> ShardSampler:
    """Return the sampler of a machine's first rank, after `epochs` epochs."""
    here = range(number * RANKS, (number + 1) * RANKS)
    place: dict[str, Any] = {
        "rank": here[0],
        "world_size": machines * RANKS,
        "machine_ranks": here,
    }
    sampler = ShardSampler(shard_rows, seed=0, global_batch_size=BATCH, **place)
    sampler.consumed_rows = int(epochs * sampler.steps) * BATCH
    return sampler


def planned(data: Simulated, machines: int) -> dict[str, float]:
    """Return how many shards all machines fetch, also for evaluations: in total, and as a multiple of the data.

    The result also has the maximum per machine: in total, and before the first step of a new and of a resumed run.
    """
    sampler = sampler_of([data.shard_rows] * data.shards, 0, machines)
    fresh, later, late = sampler.epoch_order(0), sampler.epoch_order(1), int(LATE * sampler.steps)
    held_out = [data.shard_rows] * max(1, round(data.shards * HELD_OUT))
    sample, parts, first, resumed = np.arange(sum(held_out)), [], [], []
    for number in range(machines):
        ranks = range(number * RANKS, (number + 1) * RANKS)
        here = sampler.lanes_of(ranks)
        evaluated = eval_shards(held_out, sample, ranks, machines * RANKS, TrainConfig.samples)
        parts.append(len(sampler.lanes.shards_of(here)) + len(evaluated))
        first.append(len(np.unique(fresh.shards_from(0, here)[0])))
        resumed.append(len(np.unique(later.shards_from(late, here)[0])))
    most = {"most": max(parts), "first": max(first), "resumed": max(resumed)}
    return {"fetched": sum(parts), "times": sum(parts) / (data.shards + len(held_out)), **most}


@pytest.mark.parametrize("shards", [1200, 20_000])
@pytest.mark.parametrize("machines", [1, 16, 64])
def test_a_machine_fetches_its_part_and_begins_with_a_shard_of_each_lane(shards, machines):
    """Before a first step late in the second epoch, with the window of each, 4 shards; of more data with no more."""
    plan = planned(Simulated(shards), machines)
    assert plan["times"] <= 1.1
    # the first machine has those of the report's samples too
    assert plan["most"] <= 1.1 * shards / machines + 8
    assert plan["first"] <= MAX_LANES // machines
    assert plan["resumed"] <= 4 * MAX_LANES // machines


def test_the_order_of_300_m_sequences_takes_no_table():
    """At no position: the tenth of an epoch that is drawn last costs what the first does."""
    peaks = []
    for epochs in (0, 1 + LATE):
        tracemalloc.start()
        batches = sampler_of(MISSION, 3, 16, epochs=epochs).micro_batches(64)
        drawn = np.concatenate(list(islice(batches, 200)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(np.unique(drawn)) == len(drawn) and drawn.max() < 2 * sum(MISSION)
    assert max(peaks) < 16e6 and peaks[1] < 1.2 * peaks[0]
    consumed = sampler_of(MISSION, 3, 16)
    consumed.consumed_rows = 250 * BATCH
    late = list(islice(consumed.micro_batches(8), 4))
    assert np.array_equal(
        late, list(islice(sampler_of(MISSION, 3, 16).micro_batches(8), 254))[250:]
    )


def test_100_000_shards_start(tmp_path):
    some = Simulated(10, shard_rows=50, seq_len=8).write(tmp_path / "data")
    shards = [
        replace(some.shards[0], file=f"train-{number:05d}.safetensors")
        for number in range(100_000)
    ]
    manifest = replace(some, splits={**some.splits, "train": shards})
    sampler = sampler_of([50] * len(shards), 3, 16)
    wanted = wanted_shards(manifest, sampler, 2**62)
    assert 1.05 * 100_000 / 16 > len(wanted) > 100_000 / 16
    now = {shards[number].file for number in sampler.upcoming_shards()[0]}
    assert {shard.file for shard in wanted[: len(now)]} == now


def read(s3, cache, number, steps, is_small):
    """Read as one of two machines with a rank; return the sequences, each compared with its number, and the most bytes
    that its cache held after a step. A small cache holds windows of one shard a lane.
    """
    cfg = ShardsConfig(path=s3.location, cache_dir=str(cache))
    data, place = (
        PreparedData(cfg, s3.config),
        {"global_batch_size": 32, "rank": number, "world_size": 2},
    )
    shard_rows = [shard.rows for shard in data.manifest.splits["train"]]
    order = ShardSampler(
        shard_rows, seed=0, lanes=4, window_shards=1 if is_small else None, **place
    )
    if is_small:
        shards = len(order.lanes_here) * (WINDOWS_HELD + cut_shards(order))
        cfg.cache_gb = (
            1e-9 + (data.cache.eval_bytes(order) + shards * data.cache.largest_bytes) / 1e9
        )
    drawn, most_bytes, reader = [], 0, data.split("train")
    with data.prefetcher(order, is_first_on_machine=True) as prefetcher:
        for step, rows in zip(range(steps), order.micro_batches(16), strict=False):
            tokens = reader.rows(rows % order.rows).tokens.astype(np.int64)
            assert (tokens[:, 0] * DIGITS + tokens[:, 1] == rows % order.rows).all()
            drawn.append(rows % order.rows)
            prefetcher.consumed((step + 1) * 32)
            names = {path.name for path in data.folder.iterdir()}
            most_bytes = max(
                most_bytes,
                sum(shard.bytes for shard in data.manifest.shards if shard.file in names),
            )
    return np.concatenate(drawn), most_bytes


def test_machines_fetch_their_parts_over_s3_and_one_deletes_what_it_has_read(
    tmp_path, monkeypatch, caplog
):
    """Two machines read two epochs, every sequence of which is compared with its number; the cache of the second is
    smaller than its part, and fetches a shard once an epoch.
    """
    data, number_of_shards = Simulated(96, shard_rows=100, seq_len=8, is_numbered=True), 48
    data.write(tmp_path / "data")
    log = logging.FileHandler(tmp_path / "log")  # the fetching processes write to it, too
    logger = logging.getLogger("train")
    monkeypatch.setattr(logger, "handlers", [log])
    caplog.set_level(logging.INFO, "train")
    drawn = []
    with StandInS3(data, tmp_path / "data") as s3:
        for number in (0, 1):
            set_aws(monkeypatch, f"machine-{number}", "none")
            rows, most_bytes = read(
                s3, tmp_path / f"cache-{number}", number, 2 * data.rows // 32, number == 1
            )
            drawn.append(rows)
            assert most_bytes <= (number_of_shards + 1 if number == 0 else 17) * data.shard_bytes
    assert (np.bincount(np.concatenate(drawn)) == 2).all()
    assert s3.gets["machine-0", True] == number_of_shards + 1 and s3.gets["machine-0", False] == 3
    epochs = 2 * number_of_shards + 1
    assert epochs <= s3.gets["machine-1", True] <= epochs + 17  # it looks into the third
    said = (tmp_path / "log").read_text()
    assert (
        said.count("reads 49 of 97 (104kB of 205kB), 2 of them (4.23kB) before the first step\n")
        == 2
    )
    assert s3.sent_bytes["machine-0", True] == (number_of_shards + 1) * data.shard_bytes
