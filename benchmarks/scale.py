"""The cost of a run's data at large scale: bytes, requests, memory and processor time.

    python -m benchmarks.scale [--parts plan rank disk cold] [--shards 1200 20000] [--machines 1 16 64]

The shards are simulated (simulated.py) and have 64 MiB each; 1,200 of them contain 38e9 tokens. The parts are:

- plan: the number of shards that each machine fetches, in total and before its first step, in a new run and late in the
  second epoch. Each machine has 32 ranks, and a global batch has 4,096 sequences. Nothing is actually fetched.
- rank: memory and processor time of one rank up to its first micro batch, and for a million more sequences.
- disk: one process opens sparse files and reads from each of them.
- cold: one of 16 machines fetches shards from the simulated server until it has its first batch.

Memory is the growth of the resident set after imports.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result, machine, shown, table
from benchmarks.simulated import Simulated, StandInS3
from train.config import S3Config, ShardsConfig, TrainConfig
from train.data.shards.format import read_manifest
from train.data.shards.order import ShardSampler, eval_shards

PARTS = ("plan", "rank", "disk", "cold")
RANKS, BATCH = 32, 4096  # ranks per machine; sequences per global batch
HELD_OUT = 0.01  # validation shards per training shard, the default of train.prepare
LATE = 0.95  # share of the second epoch
DRAWN = 1_000_000  # sequences
COLD_MACHINES = 16
MICRO_BATCH = BATCH // RANKS // COLD_MACHINES
STARTS = {"fresh": 0.0, f"{LATE:.0%} of epoch 2": 1 + LATE}  # epochs done before the start


# ---- planned -------------------------------------------------------------------------------------------------------


def sampler_of(shard_rows: list[int], number: int, machines: int, *, epochs: float = 0) -> ShardSampler:
    """Return the sampler of a machine's first rank, after `epochs` epochs."""
    here = range(number * RANKS, (number + 1) * RANKS)
    place: dict[str, Any] = {"rank": here[0], "world_size": machines * RANKS, "machine_ranks": here}
    sampler = ShardSampler(shard_rows, seed=0, global_batch_size=BATCH, **place)
    sampler.consumed_rows = int(epochs * sampler.steps) * BATCH
    return sampler


def planned(data: Simulated, machines: int) -> Result:
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


def plan_table(sizes: list[Simulated], machines: list[int]) -> str:
    rows = []
    for data in sizes:
        gb = data.shard_bytes / 1e9
        for number in machines:
            plan = planned(data, number)
            cells = (plan["most"] * gb, plan["first"] * gb, plan["resumed"] * gb)
            fetched = (f"{plan['times']:.3f}", f"{plan['fetched']:,}")
            rows.append((*size_cells(data), str(number), *fetched, *map(shown, cells)))
    head = ("shards", "GB", "machines", "fetched, times the data", "GETs of shards", "maximum of a machine, GB")
    return table((*head, "before the first step, GB", f"the same at {LATE:.0%} of epoch 2"), rows)


def size_cells(data: Simulated) -> tuple[str, str]:
    return f"{data.shards:,}", shown(data.shards * data.shard_bytes / 1e9)


# ---- in separate processes ------------------------------------------------------------------------------------------


def memory_mb() -> float:
    """Return the resident set of this process."""
    gc.collect()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024 / 1e6


def cost_of_rank(folder: str, epochs: float) -> Result:
    """Measure the memory and processor time that a rank needs for the manifest and the order of its data."""
    before, began_s = memory_mb(), time.process_time()
    manifest = read_manifest(Path(folder))
    sampler = sampler_of([shard.rows for shard in manifest.splits["train"]], 3, COLD_MACHINES, epochs=epochs)
    batches = sampler.micro_batches(MICRO_BATCH)
    next(batches)
    first_s, held_mb, began_s = time.process_time() - began_s, memory_mb() - before, time.process_time()
    for _ in range(DRAWN // MICRO_BATCH):
        next(batches)
    return {"held_mb": held_mb, "first_s": first_s, "drawn_s": time.process_time() - began_s}


def cost_of_disk(folder: str) -> Result:
    """Measure opening data on disk and reading a sequence from each shard."""
    import torch  # noqa: F401 (imported first, so that its cost is not measured)

    from train.data.shards.prepared import PreparedData

    before, began_s = memory_mb(), time.process_time()
    data = PreparedData(ShardsConfig(path=folder), S3Config())
    opened_s = time.process_time() - began_s
    reader, shard_rows = data.split("train"), [shard.rows for shard in data.manifest.splits["train"]]
    for rows in np.array_split(np.arange(len(shard_rows)) * shard_rows[0], max(1, len(shard_rows) // 1024)):
        reader.rows(rows)
    return {"opened_s": opened_s, "all_s": time.process_time() - began_s, "held_mb": memory_mb() - before}


def cost_of_cold(folder: str, location: str, s3: Result, epochs: float) -> Result:
    """Fetch until a machine can draw the batch of its first step, with an empty cache in `folder`.

    Return gigabytes fetched, seconds, and seconds of processor time, including those of the fetching process.
    """
    from train.data.shards.prepared import PreparedData

    data = PreparedData(ShardsConfig(path=location, cache_dir=folder, deadline_s=120.0), S3Config(**s3))
    shard_rows = [shard.rows for shard in data.manifest.splits["train"]]
    order = ShardSampler(shard_rows, seed=0, global_batch_size=BATCH, rank=3, world_size=COLD_MACHINES)
    order.consumed_rows = int(epochs * order.steps) * BATCH
    prefetcher = data.prefetcher(order, is_first_on_machine=True)
    assert prefetcher is not None  # the data is in S3
    began_s, reader = time.perf_counter(), data.split("train")
    with prefetcher:
        reader.rows(next(order.micro_batches(BATCH // COLD_MACHINES)) % order.rows)
        wall_s = time.perf_counter() - began_s
        names = {path.name for path in data.folder.iterdir()}
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    gb = sum(shard.bytes for shard in data.manifest.shards if shard.file in names) / 1e9
    return {"gb": gb, "wall_s": wall_s, "cpu_s": sum(each.ru_utime + each.ru_stime for each in used)}


CHILDREN = {"rank": cost_of_rank, "disk": cost_of_disk, "cold": cost_of_cold}


def child(kind: str, **given: Any) -> Result:
    """Measure in a new process, and return the result."""
    user = {"AWS_ACCESS_KEY_ID": "machine", "AWS_SECRET_ACCESS_KEY": "none"}
    environment = {**user, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1"}
    return harness.answer("benchmarks.scale", "--child", kind, json.dumps(given), **environment)


def rank_table(sizes: list[Simulated], folder: Path) -> str:
    rows = []
    for data in sizes:
        home = folder / f"manifest-{data.shards}"
        data.write(home)
        for where, epochs in STARTS.items():
            got = child("rank", folder=str(home), epochs=epochs)
            size = (*size_cells(data), shown(data.rows / 1e6))
            rows.append((*size, where, shown(got["held_mb"]), f"{got['first_s']:.2f}", f"{got['drawn_s']:.2f}"))
    head = ["shards", "GB", "M sequences", "start", "memory of a rank, MB", "CPU s to the first micro batch"]
    head.append("CPU s for a million sequences")
    return table(head, rows)


def disk_table(data: Simulated, folder: Path) -> str:
    data.write_sparse(folder / "sparse")
    got = child("disk", folder=str(folder / "sparse"))
    cells = (f"{got['opened_s']:.1f}", f"{got['all_s']:.1f}", shown(got["held_mb"]))
    head = ("shards on disk", "GB", "opening, CPU s", "and reading every shard, CPU s", "memory, MB")
    return table(head, [(*size_cells(data), *cells)])


def cold_table(data: Simulated, folder: Path) -> str:
    rows, home = [], folder / "cold"
    data.write(home)
    for where, epochs in STARTS.items():
        with StandInS3(data, home) as s3, tempfile.TemporaryDirectory(dir=folder) as cache:
            got = child("cold", folder=cache, location=s3.location, s3=vars(s3.config), epochs=epochs)
        figures = (got["gb"], s3.gets["machine", True], got["wall_s"], got["cpu_s"])
        rows.append((where, size_cells(data)[1], *map(shown, figures)))
    head = ("start", "data, GB", "in the cache at the first step, GB", "GETs until then", "s", "CPU s of the machine")
    return table(head, rows)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](**json.loads(sys.argv[3]))))
        return
    parser = harness.parser(__doc__, files=100_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shards", nargs="+", type=int, default=[1200, 20_000], metavar="N")
    parser.add_argument("--machines", nargs="+", type=int, default=[1, 16, 64], metavar="N")
    parser.add_argument("--tiny", action="store_true", help="all parts with little data, as a test")
    options = parser.parse_args()
    shard_rows, files = (2000, 1000) if options.tiny else (250_000, options.files)
    sizes = [Simulated(number, shard_rows) for number in options.shards]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "plan": lambda: plan_table(sizes, options.machines),
            "rank": lambda: rank_table(sizes, folder),
            "disk": lambda: disk_table(Simulated(files, shard_rows), folder),
            "cold": lambda: cold_table(sizes[0], folder),
        }
        tables = [parts[part]() for part in PARTS if part in options.parts]
    print("\n\n".join((f"{machine('torch', 'numpy', 's3torchconnector')}.", *tables)))


if __name__ == "__main__":
    main()
