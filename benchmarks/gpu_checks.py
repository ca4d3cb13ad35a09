"""Checks of training on one GPU that a machine without one cannot make, as runs of `baretrain train` on random tokens.

    benchmarks/gpu.sh core | rest        or  python -m benchmarks.gpu_checks core|rest [--device cpu] [--only NAME ...]

core: recorded steps against plain ones, a single rank under torchrun, the memory of recordings. rest: deterministic
runs, traces, fp16, a restart after a kill, ranks that share the GPU, the memory of BERT-large with and without FSDP,
NVIDIA's sanitizer. A check prints its figures and "ok" or "BAD"; the exit code is 1 if one is BAD. On a CPU the same
runs check this script, with a small model instead of BERT-large: nothing is recorded there, and no memory counted.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, lines
from benchmarks.pretraining import Shape, synthetic_data

SHAPE = Shape("", vocab_size=2002, seq_len=64, batch=32)  # rows of 2,002 logits are not aligned
STEPS = 40
RECORDED = "replays equal plain steps"  # from the log of a run whose steps are CUDA graphs
PLAIN = "backend.cuda_graphs=false"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MOST_S = 120  # seconds that a run may take
GIB = 2**30
BERT = ["model.architecture=bert", "model.hidden_size=256", "model.intermediate_size=1024"]
BERT += ["model.num_layers=4", "model.num_heads=4"]
MODERN = ["model.architecture=modernbert", *BERT[1:]]
LARGE = ["model.architecture=bert", "model.hidden_size=1024", "model.intermediate_size=4096"]
LARGE += ["model.num_layers=24", "model.num_heads=16"]
# with BERT's vocabulary, and few tokens, so that weights, gradients and moments take most of the memory
LARGE_SHAPE = Shape("", vocab_size=30522, seq_len=128, batch=8)
LARGE_STEPS = 8
# The share of the peak memory of two plain ranks that two ranks of FSDP may take. They halve weights, gradients and
# moments, but not activations and gathered layers.
FSDP_SHARE = 0.75
ROUNDED_GAP = 0.01  # of losses in bf16, whose sums have other orders
# Settings whose recorded steps are compared with plain ones, by name.
COMPARED = {
    "bf16, dropout": [*BERT, "backend.precision=bf16"],
    "fp32, dropout": [*BERT, "backend.precision=fp32"],
    "bf16, 4 micro batches": [*BERT, "backend.precision=bf16", "micro_batch_size=8"],
    "bf16, LAMB": [*BERT, "backend.precision=bf16", "optim=lamb"],
    "bf16, compiled layers": [*BERT, "backend.precision=bf16", "backend.compile=layers"],
    "bf16, ModernBERT": [*MODERN, "backend.precision=bf16"],
}
# A recorded run may differ from a plain one by this multiple of what two plain runs differ by, or by this share.
NOISE, LEAST_GAP = 3, 1e-4


@dataclass(frozen=True)
class Outcome:
    """A run that has ended."""

    code: int
    folder: Path
    log: str

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in lines(self.folder, "train")]

    @property
    def peak_gib(self) -> float:
        return (lines(self.folder, "summary")[-1].get("peak_device_bytes") or 0) / GIB

    @property
    def is_recorded(self) -> bool:
        return RECORDED in self.log


class Bench:
    """A folder with random tokens, in which runs are started."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.is_gpu = device == "cuda"
        synthetic_data(folder, SHAPE)

    def words(self, name: str, settings: Sequence[str]) -> list[str]:
        """Return the settings of a run. Later ones win."""
        common = ["model=any", "model.max_positions=512", "backend=ddp", "export=false"]
        common += [f"backend.device={self.device}", f"global_batch_size={SHAPE.batch}"]
        common += [f"max_steps={STEPS}", "log_every=1", "eval_every=20", "checkpoint.every=20"]
        common += [f"data.path={self.folder / 'data'}", f"run_dir={self.folder / name}"]
        given = {word.partition("=")[0] for word in settings}
        return [*(word for word in common if word.partition("=")[0] not in given), *settings]

    def begin(
        self, name: str, settings: Sequence[str], *, ranks: int = 0, prefix: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a run, under torchrun if `ranks` is given, with its output in NAME.log."""
        program = ["-m", "train"]
        if ranks:
            program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            if ranks > 1 and self.is_gpu:
                program.append(str(ROOT / "tests/sharing_gpus.py"))
            program.append(str(ROOT / "train/__main__.py"))
        command = [*prefix, sys.executable, *program, *self.words(name, settings)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def end(self, name: str, process: subprocess.Popen[bytes]) -> Outcome:
        try:
            code = process.wait(MOST_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log = (self.folder / f"{name}.log").read_text(errors="replace")
        if code:
            print(f"--- {name} ended with {code}\n{log[-4000:]}", flush=True)
        return Outcome(code, self.folder / name, log)

    def run(
        self, name: str, settings: Sequence[str], *, ranks: int = 0, prefix: Sequence[str] = ()
    ) -> Outcome:
        return self.end(name, self.begin(name, settings, ranks=ranks, prefix=prefix))


def gap(first: Outcome, second: Outcome) -> float:
    """Return the largest relative difference of two runs' losses; infinity if one has failed."""
    if first.code or second.code or len(first.losses) != len(second.losses):
        return math.inf
    pairs = zip(first.losses, second.losses, strict=True)
    return max(abs(one / other - 1) for one, other in pairs)


def say(is_ok: bool, text: str) -> bool:
    print("ok " if is_ok else "BAD", text, flush=True)
    return is_ok


# ---- core ------------------------------------------------------------------------------------------------------------


def recorded(bench: Bench) -> bool:
    """Compare recorded steps with plain ones, which run twice: their difference is the noise."""
    good = []
    for number, (name, settings) in enumerate(COMPARED.items()):
        ways = {"plain": [PLAIN], "again": [PLAIN], "recorded": []}
        names = [f"{number}_{way}" for way in ways]
        with ThreadPoolExecutor() as pool:
            each = [[*settings, *more] for more in ways.values()]
            plain, again, own = pool.map(bench.run, names, each)
        noise, apart = gap(plain, again), gap(plain, own)
        is_equal = apart <= max(NOISE * noise, LEAST_GAP)
        text = f"{name}: losses differ by {apart:.1e}, those of two plain runs by {noise:.1e}"
        if own.is_recorded != bench.is_gpu:
            text += "; the log does not say that steps were recorded"
        good.append(say(is_equal and own.is_recorded == bench.is_gpu, text))
    return all(good)


def torchrun(bench: Bench) -> bool:
    """Run one rank under torchrun, as launched jobs do, also with the allocator's settings of launched jobs."""
    first = bench.run("torchrun", COMPARED["bf16, dropout"], ranks=1)
    with_segments = [f"{name}=expandable_segments:True" for name in ALLOCATOR]
    second = bench.run(
        "segments", COMPARED["bf16, dropout"], ranks=1, prefix=["env", *with_segments]
    )
    good = []
    for name, run in (("one rank under torchrun", first), ("expandable segments", second)):
        is_ok = run.code == 0 and run.is_recorded == bench.is_gpu
        good.append(say(is_ok, f"{name}: exit code {run.code}, recorded: {run.is_recorded}"))
    return all(good)


def memory(bench: Bench) -> bool:
    """Compare the peak memory of a recorded and of a plain run, and print the time of the step that records."""
    plain = bench.run("memory_plain", [*BERT, PLAIN])
    own = bench.run("memory_recorded", BERT)
    if plain.code or own.code:
        return say(False, f"memory: exit codes {plain.code} plain, {own.code}")
    # The first two steps compile kernels. A later one checks and records the shape.
    later = lines(own.folder, "train")[2:]
    later_ms = [1e3 * line["step_s"] for line in later]
    usual_ms = statistics.median(later_ms)
    text = f"peak {own.peak_gib:.2f} GiB, {plain.peak_gib:.2f} plain"
    text += f"; slowest step after the second {max(later_ms):.1f} ms, median {usual_ms:.1f}"
    return say(own.peak_gib <= 2 * plain.peak_gib, text)


# ---- rest ------------------------------------------------------------------------------------------------------------


def deterministic(bench: Bench) -> bool:
    good = []
    for way in ("none", "layers"):
        settings = [*BERT, f"backend.compile={way}", "backend.deterministic=true"]
        fresh = ["env", "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"]
        runs = [bench.run(f"exact_{way}_{turn}", settings, prefix=fresh) for turn in (1, 2)]
        good.append(
            say(gap(*runs) == 0, f"deterministic, compile={way}: two runs differ by {gap(*runs)}")
        )
    return all(good)


def profile(bench: Bench) -> bool:
    run = bench.run("profile", [*BERT, "profile=true"])
    table = run.folder / "profile/table.txt"
    is_ok = run.code == 0 and table.exists()
    if is_ok:
        print(table.read_text(), flush=True)
    return say(is_ok, f"profile=true: exit code {run.code}")


def fp16(bench: Bench) -> bool:
    precision = "fp16" if bench.is_gpu else "bf16"
    run = bench.run("fp16", [*BERT, f"backend.precision={precision}"])
    return say(run.code == 0 and run.losses[-1] < run.losses[0], f"{precision}: code {run.code}")


def resume(bench: Bench) -> bool:
    """Kill a run after its first checkpoint, and compare its continuation with an uninterrupted run."""
    whole = bench.run("whole", BERT)
    process = bench.begin("cut", BERT)
    give_up_s = time.monotonic() + MOST_S
    saved = bench.folder / "cut/checkpoints/step_00000020/manifest.json"
    while not saved.exists() and process.poll() is None and time.monotonic() < give_up_s:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    cut = bench.run("cut", BERT)
    last = {line["step"]: line["loss"] for line in lines(cut.folder, "train")}
    apart = max(abs(last[number] / loss - 1) for number, loss in enumerate(whole.losses, start=1))
    is_ok = "resuming from the checkpoint" in cut.log and apart <= LEAST_GAP
    return say(is_ok, f"after a kill: losses differ by {apart:.1e}")


def sanitizer(bench: Bench) -> bool:
    if not shutil.which("compute-sanitizer"):
        return say(True, "compute-sanitizer is not installed: not run")
    prefix = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    run = bench.run("sanitizer", [*BERT, "max_steps=8"], prefix=prefix)
    return say(run.code == 0, f"compute-sanitizer: exit code {run.code}")


def ranks(bench: Bench) -> bool:
    """Run two ranks that share the GPU, and compare their losses and memory with those of one rank."""
    ways = {
        "data": [],
        "plain data": [PLAIN],
        "compiled": ["backend.compile=layers"],
        "fsdp": ["parallel=fsdp"],
        "pipeline": ["parallel=pipeline", "parallel.stages=2"],
    }
    still = ["model.hidden_dropout=0", "model.attention_dropout=0", "backend.precision=fp32"]
    one = bench.run("one", [*BERT, *still])
    good = []
    for name, settings in ways.items():
        two = bench.run(f"two_{name.replace(' ', '_')}", [*BERT, *still, *settings], ranks=2)
        records = bench.is_gpu and name in ("data", "compiled")
        text = f"two ranks, {name}: losses differ by {gap(one, two):.1e}"
        if two.code == 0:
            text += f", peak {two.peak_gib:.2f} GiB per rank, recorded: {two.is_recorded}"
        good.append(say(gap(one, two) < LEAST_GAP and two.is_recorded == records, text))
    return all(good)


def fsdp_memory(bench: Bench) -> bool:
    """Compare the peak memory of BERT-large on two ranks that share the GPU, with FSDP and without."""
    folder = bench.folder / "large"
    synthetic_data(folder, LARGE_SHAPE)
    name, model = "a small BERT", BERT
    if bench.is_gpu:
        name, model = "BERT-large", LARGE
    settings = [
        *model,
        f"data.path={folder / 'data'}",
        f"global_batch_size={LARGE_SHAPE.batch}",
        f"max_steps={LARGE_STEPS}",
        "eval_every=null",
        "eval_examples=8",
        "backend.precision=bf16",
        "model.hidden_dropout=0",
        "model.attention_dropout=0",
    ]
    whole = bench.run("large_data", [*settings, PLAIN], ranks=2)
    split = bench.run("large_fsdp", [*settings, "parallel=fsdp"], ranks=2)
    if whole.code or split.code:
        return say(False, f"{name}: exit codes {whole.code}, {split.code} with FSDP")
    text = f"{name}, two ranks: {split.peak_gib:.2f} GiB reserved per rank with FSDP"
    text += f", {whole.peak_gib:.2f} without; losses differ by {gap(whole, split):.1e}"
    is_counted = whole.peak_gib > 0 or not bench.is_gpu
    is_less = split.peak_gib <= FSDP_SHARE * whole.peak_gib
    return say(is_counted and is_less and gap(whole, split) < ROUNDED_GAP, text)


Check = Callable[[Bench], bool]
PARTS: dict[str, tuple[Check, ...]] = {
    "core": (torchrun, memory, recorded),
    "rest": (deterministic, profile, fp16, resume, ranks, fsdp_memory, sanitizer),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    chosen = [
        check
        for check in PARTS[options.part]
        if not options.only or check.__name__ in options.only
    ]
    # On a time limit, `Bench.end` kills the run and its ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    good = []
    with tempfile.TemporaryDirectory(prefix="gpu-checks-") as name:
        bench = Bench(Path(name), options.device)
        for check in chosen:
            good.append(check(bench))
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
