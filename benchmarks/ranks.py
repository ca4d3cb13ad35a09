"""The cost of a step on the hosts: numbers that every rank waits for, and votes that travel while the device works.

    python -m benchmarks.ranks [--ranks 2 8 32 64] [--steps 20] [--step-ms 82]

Each rank is a process of this machine, joined by gloo; the device's work is a sleep of `--step-ms` (that of ALBERT-
base on trn1). "waiting" adds five numbers over the ranks before every step; "voting" does as `Votes`: post before
the step, read after it. Figures are milliseconds inside these calls: median over steps of the mean over ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks import harness
from train.parallel.ranks import World
from train.run.stopping import StopRequest, Votes
from train.system.console import without_stdout

WARM_UP = 3  # steps


def rank_main(rank: int, ranks: int, steps: int, step_s: float, folder: str) -> None:
    """Run one rank; the first one prints the figures."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torch.set_num_threads(1)
    with without_stdout():  # gloo prints how many ranks each has connected
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    world = World()
    votes = Votes(world, StopRequest())

    def waiting() -> float:
        spent_ms = timed_ms(lambda: world.sum([1.0, 2.0, 0.0, 0.0, 0.0]))
        time.sleep(step_s)
        return spent_ms

    def voting() -> float:
        spent_ms = timed_ms(lambda: votes.cast(None))
        time.sleep(step_s)
        return spent_ms + timed_ms(votes.count)

    spent_ms: list[tuple[float, float]] = []
    for _ in range(WARM_UP + steps):
        world.barrier()
        waited_ms = waiting()
        world.barrier()
        spent_ms.append((waited_ms, voting()))
    of_ranks = world.gather(spent_ms[WARM_UP:])
    if rank == 0:
        means = [
            [statistics.mean(values) for values in zip(*step, strict=True)] for step in zip(*of_ranks, strict=True)
        ]
        waited, voted = (statistics.median(values) for values in zip(*means, strict=True))
        print(f"{ranks:6} {waited:12.2f} {voted:12.2f}", flush=True)
    world.barrier()
    dist.destroy_process_group()


def timed_ms(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began_s)


def main() -> None:
    parser = harness.parser(__doc__, steps=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--step-ms", type=float, default=82.0)
    options = parser.parse_args()
    forks = multiprocessing.get_context("fork")
    print(f"{'ranks':>6} {'waiting ms':>12} {'voting ms':>12}", flush=True)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            own = (ranks, options.steps, options.step_ms / 1000, folder)
            processes = [forks.Process(target=rank_main, args=(rank, *own)) for rank in range(ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a rank of {ranks} failed")


if __name__ == "__main__":
    main()
