"""A run under random faults compared with an undisturbed run: their final weights, and the cost of the faults.

    python -m benchmarks.chaos [--steps 3000] [--every-s 20] [--ranks 2] [--seed 0]

Both train a small ALBERT on the demo's data, with a few ranks under torchrun. Every 10 to 30 s, at random, the next of
five faults happens: SIGKILL of a rank; SIGKILL of torchrun (the ranks save and exit, and the same command starts again,
as a launcher would start it); SIGSTOP of a rank (the watchdog ends all ranks); SIGKILL of rank 0 while it writes a
checkpoint; SIGTERM, as after a spot notice.

The exit code is 1 unless all weights and losses are bitwise equal.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from benchmarks import harness
from benchmarks.harness import lines, run, torchrun

FAULTS = ("rank", "torchrun", "stuck", "save", "notice")
POLL_S = 0.005
SETTINGS = """
    experiment=demo model=albert_tiny global_batch_size=16 eval_every=null checkpoint.every=20 log_every=1 export=false
    telemetry.trackers=[] backend.precision=fp32 backend.device=cpu watchdog.step_s=8
"""


def start(overrides: list[str], ranks: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", *torchrun(ranks, "train", *overrides, max_restarts=1000)]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def ranks_of(launcher: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    result = {}
    for child in psutil.Process(launcher.pid).children():
        try:
            result[int(child.environ()["RANK"])] = child
        except (KeyError, psutil.Error):  # it is not a rank, or it is exiting
            continue
    return result


class Chaos:
    def __init__(self, overrides: list[str], ranks: int, run_dir: Path, seed: int) -> None:
        self.overrides = overrides
        self.ranks = ranks
        self.run_dir = run_dir
        self.rng = random.Random(seed)
        self.log = run_dir.with_suffix(".log")
        self.launcher = start(overrides, ranks, self.log)
        self.done: list[str] = []
        self.since_unix_s = 0.0  # time of the last fault

    def is_training(self) -> bool:
        """Return whether this attempt has begun to train: a fault during its start would only restart it."""
        trained = lines(self.run_dir, "train")
        return bool(trained) and trained[-1]["time_unix_s"] > self.since_unix_s

    def is_done(self) -> bool:
        """Return whether the run is done; if it ended early and can resume, start it again."""
        if self.launcher.poll() is None:
            return False
        path = self.run_dir / "outcome.json"
        outcome = (
            json.loads(path.read_text()) if path.is_file() else {"outcome": "", "goes_on": True}
        )
        # a fault after the last step may still make the launcher exit with 1
        if outcome["outcome"] == "done":
            return True
        if not outcome["goes_on"]:
            sys.exit(f"the run cannot resume: {outcome['reason']}; see {self.log}")
        self.launcher = start(self.overrides, self.ranks, self.log)
        return False

    def run(self, every_s: float) -> None:
        """Cause faults until the run is done."""
        strikes_at_s = 0.0
        while not self.is_done():
            if time.monotonic() > strikes_at_s:
                fault = FAULTS[len(self.done) % len(FAULTS)]
                if strikes_at_s and self.is_training() and self.strike(fault):
                    self.done.append(fault)
                    self.since_unix_s = time.time()
                    print(
                        f"  {fault} at step {lines(self.run_dir, 'train')[-1]['step']}", flush=True
                    )
                strikes_at_s = time.monotonic() + self.rng.uniform(0.5, 1.5) * every_s
            time.sleep(0.1)

    def strike(self, fault: str) -> bool:
        """Cause a fault; return False if a process that it needs does not exist."""
        ranks = ranks_of(self.launcher)
        if len(ranks) < self.ranks:
            return False
        try:
            if fault == "torchrun":
                self.launcher.kill()
                self.launcher.wait()
                psutil.wait_procs(list(ranks.values()), timeout=60)
            elif fault == "notice":
                self.launcher.send_signal(signal.SIGTERM)
                self.launcher.wait()
            elif fault == "save":
                return self.strike_while_saving(ranks[0])
            else:
                victim = ranks[self.rng.randrange(self.ranks)]
                victim.send_signal(signal.SIGKILL if fault == "rank" else signal.SIGSTOP)
        except psutil.NoSuchProcess:
            return False
        return True

    def strike_while_saving(self, victim: psutil.Process) -> bool:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and victim.is_running():
            if any(self.run_dir.glob("checkpoints/.step_*.tmp-*")):
                victim.kill()
                return True
            time.sleep(POLL_S)
        return False


def final(run_dir: Path, steps: int) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """Return the final weights, and the last loss recorded for each step."""
    path = run_dir / f"checkpoints/step_{steps:08d}/model.pt"
    weights = torch.load(path, weights_only=True)
    losses = {}
    for line in lines(run_dir, "train"):
        losses[line["step"]] = line["loss"]
    return weights, losses


def prepare(data: Path) -> None:
    settings = "corpus=pydocs seq_len=64 tokenizer.vocab_size=2000 validation_fraction=0.05"
    run(sys.executable, "-m", "train", "prepare", f"output={data}", *settings.split())


def report(done: list[str], wild: Path, calm: Path) -> None:
    """Print the cost of the faults."""
    kinds = ", ".join(f"{fault} {done.count(fault)}" for fault in FAULTS)
    print(f"faults survived: {len(done)} ({kinds})")
    faults = [line for line in lines(wild, "fault") if "recover_s" in line]
    lost = sum(line["steps_lost"] for line in faults)
    print(f"steps lost: {lost}, {lost / max(1, len(done)):.1f} per fault")
    recover_s = sum(line["recover_s"] for line in faults) / max(1, len(faults))
    print(f"from the last sign of life to the next step: {recover_s:.1f} s on average")
    goodput = lines(wild, "summary")[-1]["goodput"]
    undisturbed = lines(calm, "summary")[-1]["goodput"]
    print(f"goodput: {goodput:.3f} (undisturbed {undisturbed:.3f})")


def main() -> int:
    parser = harness.parser(__doc__, steps=3000, ranks=2, seed=0)
    parser.add_argument("--every-s", type=float, default=20.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    prepare(folder / "data")
    calm = folder / "calm"
    wild = folder / "wild"
    own = [f"data.path={folder / 'data'}", f"max_steps={options.steps}", *SETTINGS.split()]

    began_s = time.monotonic()
    log = calm.with_suffix(".log")
    if start([f"run_dir={calm}", *own], options.ranks, log).wait() != 0:
        sys.exit(f"the undisturbed run failed, see {log}")
    calm_s = time.monotonic() - began_s
    print(f"undisturbed: {options.steps} steps in {calm_s:.0f} s")

    began_s = time.monotonic()
    chaos = Chaos([f"run_dir={wild}", *own], options.ranks, wild, options.seed)
    chaos.run(options.every_s)
    wild_s = time.monotonic() - began_s
    print(f"with faults every {options.every_s:g} s on average: {wild_s:.0f} s")
    report(chaos.done, wild, calm)

    weights, losses = final(calm, options.steps)
    wild_weights, wild_losses = final(wild, options.steps)
    same_weights = all(torch.equal(weights[name], wild_weights[name]) for name in weights)
    same_losses = losses == wild_losses
    print(f"final weights equal: {same_weights}; losses of all steps equal: {same_losses}")
    if same_weights and same_losses:
        shutil.rmtree(folder)
        return 0
    print(f"kept: {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
