"""The cost of a run's data at the mission's size and beyond: bytes, requests, memory and processor time.

    python -m benchmarks.scale [--parts plan rank disk machines cold] [--shards 1200 20000] [--machines 1 16 64]

The shards are simulated (simulated.py). Some parts plan, others run:

- plan: shards of 64 MiB, 38 G tokens in 1,200, on machines of 32 ranks, global batches of 4,096: the shards that
  each machine fetches, in all and before its first step, fresh and late in the second epoch. Nothing is fetched.
- rank: memory and work of one rank until its first micro batch, and for a million sequences more; as a process.
- disk: sparse files, opened and read from by one process.
- machines: processes that fetch all of their part of a smaller set from the server, with the run's prefetcher, and
  compare every sequence with its number. The last machine's cache is smaller than its part.
- cold: one machine of 16 fetches shards of 64 MiB from the server until its first batch is there.

Memory is the growth of the resident set after imports.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result, machine, shown, table
from benchmarks.simulated import DIGITS, Simulated, StandInS3
from train.config import S3Config, ShardsConfig, TrainConfig
from train.data.shards.cache import WINDOWS_HELD, cut_shards
from train.data.shards.format import read_manifest
from train.data.shards.order import ShardSampler, eval_shards
from train.data.shards.prefetch import Prefetcher, wanted_shards

if TYPE_CHECKING:
    from train.data.shards.prepared import PreparedData

PARTS = ("plan", "rank", "disk", "machines", "cold")
RANKS, BATCH = 32, 4096  # ranks of a machine, sequences
HELD_OUT = 0.01  # validation shards for each shard of training data, as a preparation makes them by default
LATE = 0.95  # of the second epoch
DRAWN = 1_000_000  # sequences
COLD_MACHINES = 16
MICRO_BATCH = BATCH // RANKS // COLD_MACHINES
EPOCHS = 2  # that real machines read


# ---- planned -------------------------------------------------------------------------------------------------------


def sampler_of(
    shard_rows: list[int], number: int, machines: int, *, ranks: int = RANKS, epochs: float = 0
) -> ShardSampler:
    """Return the order of the first rank of a machine, after this number of epochs."""
    here = range(number * ranks, (number + 1) * ranks)
    place: dict[str, Any] = {"rank": here[0], "world_size": machines * ranks, "machine_ranks": here}
    sampler = ShardSampler(shard_rows, seed=0, global_batch_size=BATCH, **place)
    sampler.consumed_rows = int(epochs * sampler.steps) * BATCH
    return sampler


def planned(data: Simulated, machines: int) -> Result:
    """Return the shards that all machines fetch, with evaluations, also as a multiple of the data; and two maxima.

    These are the most that one machine fetches, and the most before a first step.
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
    head = ("shards", "GB", "machines", "all fetch, times the data", "GETs of shards", "a machine at most, GB")
    return table((*head, "before the first step, GB", f"the same at {LATE:.0%} of epoch 2"), rows)


def size_cells(data: Simulated) -> tuple[str, str]:
    return f"{data.shards:,}", shown(data.shards * data.shard_bytes / 1e9)


# ---- in separate processes ------------------------------------------------------------------------------------------


def memory_mb() -> tuple[float, float]:
    """Return the resident set of this process now, and at its peak."""
    gc.collect()
    kib = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return int(kib["VmRSS"]) * 1024 / 1e6, int(kib["VmHWM"]) * 1024 / 1e6


def cost_of_rank(folder: str, epochs: float) -> Result:
    """Measure a rank's memory for manifest and order, and their processor time."""
    (before, _), began_s = memory_mb(), time.process_time()
    manifest = read_manifest(Path(folder))
    read_s = time.process_time() - began_s
    sampler = sampler_of([shard.rows for shard in manifest.splits["train"]], 3, COLD_MACHINES, epochs=epochs)
    batches = sampler.micro_batches(MICRO_BATCH)
    next(batches)
    first_s = time.process_time() - began_s
    held, peak = memory_mb()
    began_s = time.process_time()
    for _ in range(DRAWN // MICRO_BATCH):
        next(batches)
    drawn_s = time.process_time() - began_s
    began_s = time.process_time()
    wanted_shards(manifest, sampler, 2**62)
    wanted_s = time.process_time() - began_s
    memory = {"held_mb": held - before, "peak_mb": peak - before}
    return {**memory, "read_s": read_s, "first_s": first_s, "drawn_s": drawn_s, "wanted_s": wanted_s}


def cost_of_disk(folder: str) -> Result:
    """Open data on disk, and read batches from all of its shards."""
    import torch  # noqa: F401 (what reading needs, not what it costs)

    (before, _), began_s = memory_mb(), time.process_time()
    data = opened(ShardsConfig(path=folder), S3Config())
    opened_s = time.process_time() - began_s
    reader, shard_rows = data.split("train"), [shard.rows for shard in data.manifest.splits["train"]]
    sampler = sampler_of(shard_rows, 0, 1, ranks=1)
    batches = sampler.micro_batches(1024)
    reader.rows(next(batches) % sampler.rows)
    first_s = time.process_time() - began_s
    for rows in np.array_split(np.arange(len(shard_rows)) * shard_rows[0], max(1, len(shard_rows) // 1024)):
        reader.rows(rows)
    memory, maps = memory_mb()[0] - before, Path("/proc/self/maps").read_text().count(".safetensors")
    all_s = time.process_time() - began_s
    return {"opened_s": opened_s, "first_s": first_s, "all_s": all_s, "held_mb": memory, "maps": maps}


def opened(cfg: ShardsConfig, s3: S3Config) -> PreparedData:
    from train.data.shards.prepared import PreparedData

    return PreparedData(cfg, s3)


class Machine:
    """One of several machines, as a process with one rank and a cache for S3; `small`: windows of one shard a lane."""

    def __init__(
        self,
        location: str,
        s3: S3Config,
        cache: str,
        number: int,
        machines: int,
        *,
        batch: int,
        lanes: int,
        small: bool,
    ) -> None:
        cfg = ShardsConfig(path=location, cache_dir=cache, deadline_s=120.0)
        self.data = opened(cfg, s3)
        shard_rows = [shard.rows for shard in self.data.manifest.splits["train"]]
        place: dict[str, Any] = {"seed": 0, "global_batch_size": batch, "rank": number, "world_size": machines}
        self.order = ShardSampler(shard_rows, lanes=lanes, window_shards=1 if small else None, **place)
        if small:
            cfg.cache_gb = 1e-9 + self.least_cache_bytes() / 1e9
        self.share = batch // machines

    def least_cache_bytes(self) -> int:
        cache = self.data.cache
        assert cache is not None
        shards = len(self.order.lanes_here) * (WINDOWS_HELD + cut_shards(self.order))
        return cache.eval_bytes(self.order) + shards * cache.largest_bytes

    def prefetcher(self) -> Prefetcher:
        prefetcher = self.data.prefetcher(self.order, is_first_on_machine=True)
        assert prefetcher is not None  # the data is in S3
        return prefetcher

    def read(self, steps: int) -> tuple[np.ndarray, int]:
        """Return [rows]: the sequences of this machine in these steps, each compared with its number; and cached bytes.

        The latter are the most that were in the cache after a step.
        """
        drawn, most_bytes, reader = [], 0, self.data.split("train")
        with self.prefetcher() as prefetcher:
            batches = self.order.micro_batches(self.share)
            for step in range(steps):
                rows = next(batches) % self.order.rows
                tokens = reader.rows(rows).tokens.astype(np.int64)
                assert (tokens[:, 0] * DIGITS + tokens[:, 1] == rows).all()
                drawn.append(rows)
                prefetcher.consumed((step + 1) * self.order.global_batch_size)
                most_bytes = max(most_bytes, self.cached_bytes())
        return np.concatenate(drawn), most_bytes

    def cached_bytes(self) -> int:
        names = {path.name for path in self.data.folder.iterdir()}
        return sum(shard.bytes for shard in self.data.manifest.shards if shard.file in names)

    def first_step(self, epochs: float) -> Result:
        """Fetch until this machine's first step can be drawn; return the fetched bytes, seconds, and processor time.

        The latter includes the fetching process.
        """
        self.order.consumed_rows = int(epochs * self.order.steps) * self.order.global_batch_size
        began_s, reader = time.perf_counter(), self.data.split("train")
        with self.prefetcher():
            reader.rows(next(self.order.micro_batches(self.share)) % self.order.rows)
            wall_s, there = time.perf_counter() - began_s, self.cached_bytes()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return {"gb": there / 1e9, "wall_s": wall_s, "cpu_s": sum(each.ru_utime + each.ru_stime for each in used)}


def child(kind: str, given: dict[str, Any]) -> Result:
    """Return the measurements of a new process."""
    if kind == "rank":
        return cost_of_rank(**given)
    if kind == "disk":
        return cost_of_disk(**given)
    task = {key: given.pop(key) for key in ("steps", "rows", "epochs") if key in given}
    one = Machine(s3=S3Config(**given.pop("s3")), **given)
    if kind == "cold":
        return one.first_step(task["epochs"])
    rows, most_bytes = one.read(task["steps"])
    np.save(task["rows"], rows)
    part_bytes = len(one.order.lanes.shards_of(one.order.lanes_here)) * one.data.manifest.shards[0].bytes
    return {"most_bytes": most_bytes, "part_bytes": part_bytes}


def start(kind: str, **given: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.scale", "--child", kind, json.dumps(given)]
    user = {"AWS_ACCESS_KEY_ID": f"machine-{given.get('number')}", "AWS_SECRET_ACCESS_KEY": "none"}
    environment = {**os.environ, **user, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=harness.ROOT, env=environment)


def result_of(process: subprocess.Popen[str]) -> Result:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a process of the benchmark ended with {process.returncode}")
    result: Result = json.loads(output.splitlines()[-1])
    return result


def rank_table(sizes: list[Simulated], folder: Path) -> str:
    rows = []
    for data in sizes:
        home = folder / f"manifest-{data.shards}"
        data.write(home)
        size = (*size_cells(data), shown(data.rows / 1e6), shown((home / "manifest.json").stat().st_size / 1e6))
        for where, epochs in (("fresh", 0.0), (f"{LATE:.0%} of epoch 2", 1 + LATE)):
            got = result_of(start("rank", folder=str(home), epochs=epochs))
            held = map(shown, (got["held_mb"], got["held_mb"] * RANKS / 1e3, got["peak_mb"]))
            times = (f"{got[key]:.2f}" for key in ("read_s", "first_s", "drawn_s", "wanted_s"))
            rows.append((*size, where, *held, *times))
    head = ["shards", "GB", "M sequences", "manifest, MB", "start", "a rank holds, MB", f"{RANKS} of them, GB"]
    head += ["peak of a rank, MB", "CPU s: manifest", "until the first micro batch", "1 M sequences", "what to fetch"]
    return table(head, rows)


def disk_table(data: Simulated, folder: Path) -> str:
    began_s, home = time.perf_counter(), folder / "sparse"
    data.write_sparse(home)
    print(f"{data.shards:,} sparse files made in {time.perf_counter() - began_s:.0f} s", file=sys.stderr)
    got = result_of(start("disk", folder=str(home)))
    head = ("shards on disk", "GB", "opened, CPU s", "first batch of 1,024, CPU s", "a row of every shard, CPU s")
    cells = (f"{got[key]:.1f}" for key in ("opened_s", "first_s", "all_s"))
    return table(
        (*head, "memory, MB", "maps"), [(*size_cells(data), *cells, shown(got["held_mb"]), f"{got['maps']:,}")]
    )


def run_machines(data: Simulated, home: Path, machines: int) -> list[Result]:
    """Measure the bytes that machines fetch in some epochs, and those in their caches; the last cache is small."""
    data.write(home / "data")
    batch = 16 * machines
    steps = EPOCHS * (data.rows // batch)
    with StandInS3(data, home / "data") as s3:
        given = {"location": s3.location, "s3": vars(s3.config), "machines": machines, "batch": batch, "lanes": 8}
        own = [
            {"number": each, "cache": f"{home}/{each}", "rows": f"{home}/{each}.npy", "small": each == machines - 1}
            for each in range(machines)
        ]
        started = [start("machine", steps=steps, **given, **each) for each in own]
        results = [result_of(process) for process in started]
    drawn = np.concatenate([np.load(str(each["rows"]), allow_pickle=False) for each in own])
    assert len(drawn) == steps * batch and np.bincount(drawn).max() <= EPOCHS
    for each, result in enumerate(results):
        user = f"machine-{each}"
        share = s3.sent_bytes[user, True] / (data.shards * data.shard_bytes)
        result |= {"gets": s3.gets[user, True], "others": s3.gets[user, False], "share": share}
    return results


def machines_table(data: Simulated, folder: Path, counts: list[int]) -> str:
    rows = []
    for machines in counts:
        for each, got in enumerate(run_machines(data, folder / f"machines-{machines}", machines)):
            share = (f"{got['share']:.3f}", f"{got['share'] * machines:.3f}")
            most = f"{got['most_bytes'] / got['part_bytes']:.2f}"
            rows.append((f"{each + 1} of {machines}", f"{got['gets']:,}", str(got["others"]), *share, most))
    head = ("machine", f"GETs of shards in {EPOCHS} epochs", "other GETs", "of the training data", "of its N-th")
    return table((*head, "most in the cache, of its part"), rows)


def cold_table(data: Simulated, folder: Path) -> str:
    rows = []
    home = folder / "cold"
    manifest = data.write(home / "data")
    total = sum(shard.bytes for shard in manifest.shards) / 1e9
    for where, epochs in (("fresh", 0.0), (f"{LATE:.0%} of epoch 2", 1 + LATE)):
        with StandInS3(data, home / "data") as s3, tempfile.TemporaryDirectory(dir=folder) as cache:
            place = {
                "number": 3,
                "machines": COLD_MACHINES,
                "batch": BATCH,
                "lanes": min(64, data.shards),
                "small": False,
            }
            got = result_of(
                start("cold", location=s3.location, s3=vars(s3.config), cache=cache, epochs=epochs, **place)
            )
        figures = (total, got["gb"], s3.gets["machine-3", True], got["wall_s"], got["cpu_s"])
        rows.append((where, *map(shown, figures)))
    head = ("start", "data, GB", "in the cache at the first step, GB", "GETs until then", "s", "CPU s of the machine")
    return table(head, rows)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], json.loads(sys.argv[3]))))
        return
    parser = harness.parser(__doc__, files=100_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shards", nargs="+", type=int, default=[1200, 20_000], metavar="N")
    parser.add_argument("--machines", nargs="+", type=int, default=[1, 16, 64], metavar="N")
    parser.add_argument("--tiny", action="store_true", help="all parts with little data, to see that they run")
    options = parser.parse_args()
    shard_rows, files = (2000, 1000) if options.tiny else (250_000, options.files)
    sizes = [Simulated(number, shard_rows) for number in options.shards]
    numbered = Simulated(192, 200 if options.tiny else 8000, 64, is_numbered=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "plan": lambda: plan_table(sizes, options.machines),
            "rank": lambda: rank_table([*sizes, Simulated(files, shard_rows)], folder),
            "disk": lambda: disk_table(Simulated(files, shard_rows), folder),
            "machines": lambda: machines_table(numbered, folder, [2] if options.tiny else [2, 4]),
            "cold": lambda: cold_table(sizes[0], folder),
        }
        tables = [parts[part]() for part in PARTS if part in options.parts]
    print("\n\n".join((f"{machine('torch', 'numpy', 's3torchconnector')}.", *tables)))


if __name__ == "__main__":
    main()
