"""A search for the largest micro batch that fits and for the fastest one. Each is measured in new processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.config import Failure, InputError, check, make_plan
from train.run import compose as cli
from train.system.atomic_io import write_atomic
from train.system.folders import local_path
from train.system.imported import flags
from train.system.launched import launched
from train.system.memory import available_bytes, count_oom_kills, find_oom_counter
from train.system.outcome import OUT_OF_MEMORY
from train.system.schema import read_object
from train.system.torchrun import REJECTION
from train.tasks import build_task
from train.tools.bench.config import BenchConfig
from train.tools.bench.speeds import GIB

GROWTH = 1.02  # smallest speed-up that counts; a smaller one may be noise
MOST_SLOWER = 2  # The sweep ends when this many larger micro batches in a row are not faster.
FIRST = 8  # micro batch size to try first if micro_batch_size is not set
HOST_SHARE = 0.9  # share of the available memory that the ranks of a try may allocate on CPUs
MANY_ROWS = 2**62  # enough training rows for any plan; each try checks the real number
REPLACED = ("sweep", "nproc", "output", "max_memory_gib", "micro_batch_size")  # settings that a try replaces


@dataclass(frozen=True)
class Try:
    """The result for one micro batch size. `bench` has the figures of `train.bench`; None if the batch does not fit."""

    micro_batch_size: int
    accumulation: int
    verdict: str
    bench: dict[str, Any] | None = None

    @property
    def tokens_per_s(self) -> float:
        return 0.0 if self.bench is None else float(self.bench["tokens_per_s"]["median"])

    @property
    def peak_bytes(self) -> int | None:
        return None if self.bench is None else self.bench["peak_device_bytes"] or self.bench["peak_process_bytes"]


def run(cfg: BenchConfig, settings: Sequence[str]) -> int:
    """Try micro batch sizes, print each result immediately, and print the fastest at the end."""
    check(not launched().is_distributed, "a sweep starts its ranks itself: run it without torchrun, with nproc=N")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM must also end the running try.
    share, sizes, first = sizes_of(cfg)
    build_task(cfg)  # Raises errors that the first try would report only after a minute.
    limit_gib = cfg.max_memory_gib or HOST_SHARE * available_bytes() / GIB / cfg.nproc
    tries: list[Try] = []
    print(f"{'micro batch':>11}  {'accumulation':>12}  {'tokens/s':>10}  {'GiB/rank':>10}  verdict", flush=True)
    with tempfile.TemporaryDirectory(prefix="baretrain-sweep-", ignore_cleanup_errors=True) as work:

        def attempt(size: int) -> Try:
            command = command_of(cfg, settings, size, limit_gib=limit_gib, output=f"{work}/{size}.json")
            tried = try_size(command, size, share // size, Path(work))
            tries.append(tried)
            peak = "" if tried.peak_bytes is None else f"{tried.peak_bytes / GIB:.2f}"
            speed = "" if tried.bench is None else f"{tried.tokens_per_s:,.0f}"
            print(f"{size:11}  {tried.accumulation:12}  {speed:>10}  {peak:>10}  {tried.verdict}", flush=True)
            return tried

        ended = search(sizes, first, attempt)
    fitting = [each for each in tries if each.bench is not None]
    best = max(fitting, key=lambda each: each.tokens_per_s, default=None)
    largest = max((each.micro_batch_size for each in fitting), default=None)
    is_limit = len(fitting) < len(tries) or largest == sizes[-1]  # If False, larger sizes may fit.
    if cfg.output is not None:
        result = {
            "kind": "sweep",
            "global_batch_size": cfg.global_batch_size,
            "nproc": cfg.nproc,
            "max_memory_gib": limit_gib,
            "ended": ended,
            "largest_micro_batch_size": largest if is_limit else None,
            "best_micro_batch_size": best.micro_batch_size if best else None,
            "best_accumulation": best.accumulation if best else None,
            "settings": list(settings),
            "tries": [asdict(each) for each in tries],
        }
        write_atomic(local_path(cfg.output), json.dumps(result, indent=2).encode() + b"\n")
    if best is None:
        raise Failure(f"no micro batch fits, not even {tries[-1].micro_batch_size}: {tries[-1].verdict}")
    size = f"micro_batch_size={best.micro_batch_size} with an accumulation of {best.accumulation}"
    print(f"{ended}; the fastest is {size}")
    return cli.DONE


def sizes_of(cfg: BenchConfig) -> tuple[int, list[int], int]:
    """Return a replica's sequences per step, the usable micro batch sizes in ascending order, and the first to try."""
    check(cfg.global_batch_size is not None, "a sweep needs a fixed global batch: set global_batch_size")
    replicas = cfg.parallel.replicas(cfg.nproc)
    share, rest = divmod(cfg.global_batch_size or 0, replicas)
    whole = f"global_batch_size={cfg.global_batch_size} over nproc={cfg.nproc} ranks"
    check(rest == 0, f"{whole} leaves a remainder; choose a multiple of {replicas}")
    usable = [size for size in range(1, share + 1) if share % size == 0 and is_usable(cfg, size)]
    check(usable != [], f"the backend and the instance accept no micro batch up to {share} that divides {whole}")
    wanted = cfg.micro_batch_size or FIRST
    return share, usable, max((size for size in usable if size <= wanted), default=usable[0])


def is_usable(cfg: BenchConfig, size: int) -> bool:
    """Return whether a run would accept this micro batch size."""
    try:
        plan = make_plan(replace(cfg, micro_batch_size=size), world_size=cfg.nproc, rows=MANY_ROWS, seq_len=cfg.seq_len)
    except InputError:
        return False
    return plan.micro_batch_size == size


# ---- the order of the tries ----------------------------------------------------------------------------------------


def search(sizes: Sequence[int], first: int, attempt: Callable[[int], Try]) -> str:
    """Try sizes in the order that docs/bench.md describes. Returns the reason why the search ended."""
    tried = attempt(first)
    failed: int | None = None
    while tried.bench is None:
        failed = tried.micro_batch_size
        smaller = [size for size in sizes if size <= failed // 2] or [size for size in sizes[:1] if size < failed]
        if not smaller:
            return "no micro batch fits"
        tried = attempt(smaller[-1])
    best, low, slower = tried.tokens_per_s, tried.micro_batch_size, 0
    if failed is None:
        for size in [size for size in sizes if size <= first // 2][-1:]:
            best = max(best, attempt(size).tokens_per_s)
    while failed is None:
        larger = [size for size in sizes if size >= 2 * low] or [size for size in sizes[-1:] if size > low]
        if not larger:
            return f"{low} is the largest micro batch that global_batch_size allows"
        tried = attempt(larger[0])
        if tried.bench is None:
            failed = tried.micro_batch_size
            break
        low = tried.micro_batch_size
        slower = 0 if tried.tokens_per_s > GROWTH * best else slower + 1
        best = max(best, tried.tokens_per_s)
        if slower == MOST_SLOWER:
            return f"throughput no longer grows; {low} still fits"
    while between := [size for size in sizes if low < size < failed]:
        middle = between[len(between) // 2]
        if attempt(middle).bench is None:
            failed = middle
        else:
            low = middle
    return f"{low} is the largest micro batch that fits"


# ---- one try -------------------------------------------------------------------------------------------------------


def command_of(cfg: BenchConfig, settings: Sequence[str], size: int, *, limit_gib: float, output: str) -> list[str]:
    """Return the command that measures one micro batch size and writes the JSON file `output`."""
    given = [each for each in settings if each.partition("=")[0] not in REPLACED]
    launcher = ["-m", "train.system.local_torchrun", f"--nproc-per-node={cfg.nproc}"]
    own = [f"micro_batch_size={size}", f"max_memory_gib={limit_gib}", f'output="{output}"']
    return [sys.executable, *(launcher if cfg.nproc > 1 else []), "-m", "train.bench", *flags(), *given, *own]


def try_size(command: Sequence[str], size: int, accumulation: int, work: Path) -> Try:
    """Measure one micro batch size in new processes.

    Raises InputError if the run rejects its settings, and Failure if it fails for a reason other than memory.
    """
    counter = find_oom_counter()
    before = count_oom_kills(counter)
    environ = {**os.environ, "TMPDIR": str(work)}  # Removing `work` also removes the files of a killed process.
    done = subprocess.run(command, env=environ, capture_output=True, text=True, errors="replace", check=False)
    output = work / f"{size}.json"  # The file is missing if the process was killed.
    result = read_object(output.read_bytes()) if output.exists() else {}
    kills = count_oom_kills(counter) - before
    outcome = outcome_of(done.returncode, result, kills)
    if outcome is not None:
        return Try(size, accumulation, outcome, result if outcome == "fits" else None)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    why = (errors or lines or ["it printed nothing"])[-1].removeprefix("error: ")
    # torchrun exits with 1 whatever the rank's exit code was.
    if done.returncode == cli.REJECTED or any(work.rglob(REJECTION)):
        raise InputError(why)
    raise Failure(f"the try of micro_batch_size={size} failed with exit status {done.returncode}: {why}")


def outcome_of(status: int, result: dict[str, Any], kills: int) -> str | None:
    """Return the verdict: the try fits, or which memory ran out. Returns None if the try failed for another reason.

    `kills` is the number of processes that the kernel is known to have killed for lack of memory.
    """
    if status == cli.DONE and result.get("kind") == "bench":
        return "fits"
    if result.get("kind") in OUT_OF_MEMORY:
        return f"does not fit: {str(result['kind']).replace('_', ' ')}"
    if status == -signal.SIGKILL or (status != cli.DONE and kills > 0):
        return "does not fit: the kernel killed it for lack of host memory"
    return None
