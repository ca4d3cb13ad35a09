"""What a step costs the hosts: numbers that every rank waits for, and votes that travel while the device works.

    python -m benchmarks.ranks [--ranks 2 8 32 64] [--steps 20] [--step-ms 82]

Each rank is a process of this machine, joined by gloo; the device's work is a sleep of `--step-ms` (that of ALBERT-
base on trn1). "waiting" adds five numbers over the ranks before every step, as loops do that count labels and look
for signals on the hosts; "voting" is what `train.votes` does: post before the step, read after it. Both take turns in
one run. Given are the milliseconds of a step that are neither the sleep nor the ranks' different wake-ups: the time
inside these calls, as median over steps of the mean over ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from train.attempt.preempt import StopRequest
from train.cli.console import without_stdout
from train.ranks import World
from train.votes import Votes

WARM_UP = 3  # steps


def rank_main(rank: int, ranks: int, steps: int, step_s: float, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torch.set_num_threads(1)
    with without_stdout():  # gloo prints how many ranks each has connected
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    world = World()
    votes = Votes(world, StopRequest())
    spent_ms: dict[str, list[float]] = {"waiting": [], "voting": []}
    for _ in range(WARM_UP + steps):
        world.barrier()
        began_s = time.perf_counter()
        world.sum([1.0, 2.0, 0.0, 0.0, 0.0])
        spent_ms["waiting"].append(1000 * (time.perf_counter() - began_s))
        time.sleep(step_s)
        world.barrier()
        began_s = time.perf_counter()
        votes.cast(None)
        cast_s = time.perf_counter() - began_s
        time.sleep(step_s)
        began_s = time.perf_counter()
        votes.count()
        spent_ms["voting"].append(1000 * (cast_s + time.perf_counter() - began_s))
    shares = world.gather(spent_ms)
    if rank == 0:
        result = {
            name: statistics.median(
                statistics.mean(column) for column in zip(*(share[name][WARM_UP:] for share in shares), strict=True)
            )
            for name in spent_ms
        }
        (folder / "result.json").write_text(json.dumps(result))
    world.barrier()
    dist.destroy_process_group()


def measure(ranks: int, steps: int, step_s: float) -> dict[str, float]:
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            forks.Process(target=rank_main, args=(rank, ranks, steps, step_s, Path(folder))) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"a rank of {ranks} failed")
        result: dict[str, float] = json.loads((Path(folder) / "result.json").read_text())
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=82.0)
    options = parser.parse_args()
    print(f"{'ranks':>6} {'waiting ms':>12} {'voting ms':>12}")
    for ranks in options.ranks:
        result = measure(ranks, options.steps, options.step_ms / 1000)
        print(f"{ranks:6} {result['waiting']:12.2f} {result['voting']:12.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
