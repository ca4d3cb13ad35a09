"""What data costs at the size of the mission: sequences and bytes are counted, nothing is timed. No shard is there."""

import tracemalloc
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from simulated_data import Simulated

from train.data.shards.order import ShardSampler
from train.data.shards.prefetch import wanted_shards

MISSION = [250_000] * 1200  # sequences of its shards
RANKS, BATCH = 32, 4096  # ranks per machine; sequences per global batch
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
