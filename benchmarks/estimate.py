"""The error of launch's estimate: one short run tells the speed, and others are predicted from it.

    python -m benchmarks.estimate --data data/demo [--rounds 3] [--steps 40] [--cases NAME ...]

--data is what `make demo` prepares. Each case runs right after the demo on one rank, from whose run folder the
estimate predicts it in sequences per second. Every rank has one thread. The all-reduce of two ranks is not in the
estimate: the memory of this machine has no figure in the catalogue. The speed of a run is that of its fastest 5 steps.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import lines, run, spread, torchrun
from launch.estimate import estimate
from launch.speed import Calibration, read_calibration
from train.config import S3Config, TrainConfig
from train.run import compose as cli

LARGER = ["model.hidden_size=256", "model.intermediate_size=1024"]
CASES = {  # name -> ranks and settings in addition to the demo's
    "4 micro batches of 8": (1, ["micro_batch_size=8"]),
    "twice the batch": (1, ["global_batch_size=64"]),
    "6 layers instead of 2": (1, ["model.num_layers=6"]),
    "hidden size 256 instead of 128": (1, LARGER),
    "2 ranks": (2, []),
    "2 ranks, hidden size 256": (2, LARGER),
}


def settings(data: Path, run_dir: Path, steps: int, more: list[str]) -> list[str]:
    plain = [f"data.path={data}", f"run_dir={run_dir}", f"max_steps={steps}", "log_every=5", "eval_examples=32"]
    device = ["backend=ddp", "backend.device=cpu", "backend.precision=fp32", "tensorboard=false"]
    return ["experiment=demo", "model=albert_tiny", *plain, *device, *more]


def measure(ranks: int, overrides: list[str], run_dir: Path) -> Calibration:
    """Run it, and read its speed as `calibrate=RUN` does, but only of its fastest steps."""
    words = ["train", *overrides] if ranks == 1 else torchrun(ranks, "train", *overrides)
    run(sys.executable, "-m", *words, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    known = read_calibration(str(run_dir), S3Config())
    fastest = max(line["tokens_per_s"] for line in lines(run_dir, "train")) / known.seq_len
    factor = fastest / known.sequences_per_s
    return replace(known, sequences_per_s=fastest, flops_per_s=known.flops_per_s * factor)


def predict(ranks: int, overrides: list[str], calibration: Calibration, vocab_size: int) -> float:
    """Return the sequences per second of all ranks."""
    cfg = cli.load_config(TrainConfig, overrides)
    given = {"rows": None, "counts": (), "calibration": calibration, "vocab_size": vocab_size}
    result = estimate(cfg, nodes=1, processes_per_node=ranks, seq_len=calibration.seq_len, **given)  # type: ignore[arg-type]
    speed = result.rows[0].sequences_per_s
    assert speed is not None
    return speed


def main() -> None:
    parser = harness.parser(__doc__, rounds=3, steps=40)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    data = options.data.resolve()
    vocab_size = json.loads((data / "manifest.json").read_text())["config"]["tokenizer"]["vocab_size"]
    to_measured: dict[str, list[float]] = {name: [] for name in options.cases}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in itertools.product(range(options.rounds), options.cases):
            ranks, more = CASES[name]
            base, run_dir = (Path(tempfile.mkdtemp(dir=folder)) / "run" for _ in range(2))
            known = measure(1, settings(data, base, options.steps, []), base)
            overrides = settings(data, run_dir, options.steps, more)
            expected = predict(ranks, overrides, known, vocab_size)
            seen = measure(ranks, overrides, run_dir).sequences_per_s
            to_measured[name].append(expected / seen)
            text = f"round {number}, {name}: estimated {expected:.0f}, measured {seen:.0f} sequences/s"
            print(text, file=sys.stderr, flush=True)
    print("estimated / measured speed, least / median / greatest of the rounds")
    for name, values in to_measured.items():
        print(f"{name:32} {spread(values)}")


if __name__ == "__main__":
    main()
