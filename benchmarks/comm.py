"""Ways to train over a slow link, against plain DDP: throughput, bytes, and the loss after the same sequences.

    python -m benchmarks.comm [--rate 1gbit] [--rounds 12] [--ranks 1] [--batch 1] [--seq-len 32] [--layers 12]

Two network namespaces of this machine are joined by a link of that rate in each direction (root, iproute2), and each
has --ranks processes of one thread. All contestants live in the same processes and take turns: a round is 8 steps of
each, with the same weights at the start and the same batches, and ratios are of one round. The model is ALBERT-base
with its 30,000 tokens (11.2 million parameters, 45 MB of gradients), in fp32; its text is Python's documentation.

    plain           DDP as it is by default
    bf16            backend.grad_compression=bf16
    alone           nothing is sent: the time of computing, for the share of the link

The batch is small so that plain DDP spends a share of its time in the link as fast devices do, and that share is
printed. Bytes are those that the first machine's network card has sent. The loss is that of sequences which no
contestant was trained on.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0:0] = [str(ROOT), str(ROOT / "tests")]  # the ranks run this file; the machines are those of the tests

import torch
from services.machines import PACKAGES, fault, missing_programs, three_machines

from benchmarks import harness
from benchmarks.harness import ratios, spread, table
from benchmarks.pretraining import draw, train_step
from train.config import BackendConfig, OptimConfig, ParallelConfig, PrepareConfig, TrainConfig
from train.data.batches.loader import Batch
from train.models.encoder import build_masked_lm
from train.parallel.ddp import DDP
from train.parallel.engines import Engine, build_engine
from train.run import compose as cli
from train.system import rank_setup
from train.system.launched import launched
from train.tasks import build_task
from train.tasks.spec import Task
from train.tools import prepare

VOCAB_SIZE, TEXT_VOCAB_SIZE = 30_000, 10_000  # of the model, and the most that this text can fill
STEPS = 8  # of a round and contestant
SKIPPED = 1  # first rounds, which are not timed
WARM_UP, LR = 16, 2e-4  # steps, peak
HELD_OUT = 32  # batches of each rank
CONTESTANTS = PLAIN, BF16, ALONE = "plain", "bf16", "alone"


def sent_bytes() -> int:
    """Return the bytes that this machine's network card has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


class Contestant:
    def __init__(self, backend: DDP, cfg: TrainConfig, name: str, task: Task):
        self.backend, self.world = copy.copy(backend), backend.world  # one process group for all
        self.backend.compresses = name == BF16
        if name == ALONE:
            self.backend.world = backend.world.beside(None)
        torch.manual_seed(0)
        model = build_masked_lm(cfg.model, vocab_size=VOCAB_SIZE, pad_id=0, seq_len=task.seq_len)
        self.task, optim = task, OptimConfig(lr=LR)
        self.engine: Engine = build_engine(ParallelConfig(), optim, self.backend, model, task.loss, accumulation=1)
        self.engine.ready()
        self.step_s: list[float] = []
        self.step_bytes: list[float] = []
        self.num_steps = 0

    def round(self, batches: list[Batch]) -> None:
        self.world.barrier()
        began_s, began_bytes = time.perf_counter(), sent_bytes()
        for batch in batches:
            self.num_steps += 1
            train_step(self.engine, batch, LR * min(1.0, self.num_steps / WARM_UP))
        self.world.barrier()
        self.step_s.append((time.perf_counter() - began_s) / len(batches))
        self.step_bytes.append((sent_bytes() - began_bytes) / len(batches))

    def loss(self, batches: list[Batch]) -> float:
        """Return the mean over the labels of all ranks' batches."""
        with torch.no_grad():
            loss_sum = sum(float(self.task.loss(self.engine.model, batch["inputs"])) for batch in batches)
        total, count = self.world.sum([loss_sum, sum(batch["count"] for batch in batches)])
        return total / count


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank_setup.prepare(launched(), forks=False)  # gloo's network card
    overrides = [f"data.path={options.folder / 'data'}", f"run_dir={options.folder / 'run'}", "model=albert_base"]
    overrides += [f"model.num_layers={options.layers}", f"micro_batch_size={options.batch}", "max_steps=1"]
    cfg = cli.load_config(TrainConfig, [*overrides, f"seq_len={options.seq_len}"])
    backend = DDP(BackendConfig(device="cpu", precision="fp32"))
    world, task = backend.world, build_task(cfg)
    number = HELD_OUT + options.rounds * STEPS
    batches = draw(task, options.batch, number, rank=world.rank, world_size=world.size)
    taking_part = {name: Contestant(backend, cfg, name, task) for name in CONTESTANTS}
    for number, name in harness.turns(options.rounds, list(taking_part)):
        start = HELD_OUT + number * STEPS
        taking_part[name].round(batches[start : start + STEPS])
    losses = {name: each.loss(batches[:HELD_OUT]) for name, each in taking_part.items() if name != ALONE}
    if world.rank == 0:
        rows = {
            name: {"step_s": each.step_s, "step_bytes": each.step_bytes, "loss": losses.get(name)}
            for name, each in taking_part.items()
        }
        (options.folder / "result.json").write_text(json.dumps(rows))
    taking_part.clear()
    del batches
    backend.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all contestants, from ranks on two machines."""
    overrides = [f"output={options.folder / 'data'}", "corpus=pydocs", f"seq_len={options.seq_len}"]
    prepare.run(cli.load_config(PrepareConfig, [*overrides, f"tokenizer.vocab_size={TEXT_VOCAB_SIZE}"]))
    arguments = [f"--folder={options.folder}"]
    arguments += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in PASSED_ON]
    with ExitStack() as stack:
        machines = stack.enter_context(three_machines(options.folder))
        for number in (0, 1):
            stack.enter_context(machines.slow(number, options.rate))
        log = options.folder / "log"
        env = {"OMP_NUM_THREADS": "1"}
        agents = machines.torchrun(Path(__file__), arguments, env=env, log=log, ranks=options.ranks)
        for agent in agents:
            agent.join()
        if any(agent.exitcode for agent in agents):
            raise SystemExit(f"a machine failed: {log.with_suffix('.0').read_text()[-3000:]}")
    result: dict[str, Any] = json.loads((options.folder / "result.json").read_text())
    return result


PASSED_ON = ("rounds", "ranks", "batch", "seq_len", "layers")


def report(rows: dict[str, Any], options: argparse.Namespace) -> None:
    timed = {name: row["step_s"][SKIPPED:] for name, row in rows.items()}
    share = 1 - statistics.median(ratios(timed[ALONE], timed[PLAIN]))
    sequences = options.rounds * STEPS * options.batch * options.ranks * 2
    print(
        f"{options.rate}, 2 machines x {options.ranks}, batch {options.batch} x {options.seq_len} a rank, "
        f"{options.layers} layers; {share:.0%} of plain DDP's step is communication; losses after {sequences} sequences"
    )
    cells = [
        (
            name,
            f"{1000 * statistics.median(timed[name]):.0f}",
            f"{statistics.median(row['step_bytes'][SKIPPED:]) / 1e6:.1f}",
            spread(ratios(timed[PLAIN], timed[name])),
            "" if row["loss"] is None else f"{row['loss']:.3f}",
        )
        for name, row in rows.items()
    ]
    print(table(("", "ms a step", "MB sent a step", "times plain", "loss"), cells))


def main() -> None:
    # With fewer layers a step computes less; they share their weights.
    parser = harness.parser(__doc__, rounds=12, ranks=1, batch=1, seq_len=32, layers=12)
    parser.add_argument("--rate", default="1gbit", help="of the link in each direction, as tc writes it")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for the ranks
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options)
        return
    if options.rounds <= SKIPPED:
        parser.error(f"--rounds must be above {SKIPPED}, which are not timed")
    if missing := missing_programs():
        parser.error(f"{', '.join(missing)} missing: apt-get install {' '.join(PACKAGES)}")
    if os.geteuid() != 0 or (why := fault()):
        parser.error("the two machines are network namespaces, which need root" if os.geteuid() else why)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        report(measure(options), options)


if __name__ == "__main__":
    main()
