"""The cost of a save to the training: ours, torch.save and torch.distributed.checkpoint's async_save.

    python -m benchmarks.checkpoint [--model albert_xxlarge|bert_large|tiny] [--rounds 2] [--saves 2] [--folder DIR]

The same weights and AdamW moments, on a real disk, while a loop of matrix products runs concurrently, on one thread as
under torchrun. Every side of every round is a separate process, forked from the one that made the state; rounds
interleave the sides, back and forth. benchmarks/notes.md explains the columns.

"torch.save" blocks until its file is synced. "async_save" is used as documented, in a gloo group of one rank; "buffers
kept" hands it a stager that lives from save to save, its fastest mode. Every checkpoint has a new folder,
and the previous one is removed. Files are dropped from the page cache before they are loaded; ours includes the
checksums.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import harness
from benchmarks.harness import machine, ratios, spread, table, turns
from train.checkpoints import loader
from train.checkpoints.manifest import Manifest, Progress, step_name
from train.checkpoints.saver import AsyncSaver
from train.checkpoints.staging import num_bytes_of
from train.checkpoints.store import LocalStore
from train.config import BackendConfig, CheckpointConfig, ModelConfig, OptimConfig
from train.models.encoder import build_masked_lm
from train.parallel.ddp import DDP
from train.parallel.engines import Engine
from train.parallel.optimizers import build_optimizer

MODELS = {
    "albert_xxlarge": ModelConfig(embedding_size=128, hidden_size=4096, intermediate_size=16384, num_heads=64),
    "bert_large": ModelConfig(
        architecture="bert", hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16
    ),
    "tiny": ModelConfig(embedding_size=16, hidden_size=32, intermediate_size=64, num_heads=2, num_layers=2),
}
VOCAB_SIZE, SEQ_LEN = 30000, 512
COMPARED = ("stall_s", "durable_s", "lost_s")
MEASURES = (*COMPARED, "cpu_s", "share", "slowest")
DRAFT = Manifest(0, 1, {}, {}, {}, 1, "ddp", None)


# ---- the state -----------------------------------------------------------------------------------------------------


def build_state(name: str) -> Engine:
    model = build_masked_lm(MODELS[name], vocab_size=VOCAB_SIZE, pad_id=0, seq_len=SEQ_LEN)
    optimizer = build_optimizer(OptimConfig(), model.parameters())
    for moments in optimizer.state.values():
        moments["exp_avg"].fill_(1e-3)  # memory that nobody wrote to is not yet allocated
        moments["exp_avg_sq"].fill_(1e-6)
    return Engine(DDP(BackendConfig(device="cpu")), model, optimizer)


def content_of(state: Engine) -> dict[str, Any]:
    """Return the state that every side saves."""
    return {"model": state.model.state_dict(), "optimizer": state.state()["optimizer"]}


def mark_of(state: Engine) -> torch.Tensor:
    """Return a small weight, whose value identifies the moment of a checkpoint."""
    return min(state.model.parameters(), key=torch.numel).detach()


# ---- the sides -----------------------------------------------------------------------------------------------------


def done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


class TorchSave:
    label = "torch.save, synced"

    def __init__(self, state: Engine, folder: Path) -> None:
        self.state, self.folder = state, folder

    def prepare(self) -> Future[Any]:
        """Do whatever is possible before the first save, concurrent with the first steps."""
        return done()

    def path_of(self, number: int) -> Path:
        return self.folder / str(number)

    def save(self, number: int) -> Future[Any]:
        """Save, blocking the training; the future is done when the checkpoint is complete."""
        self.path_of(number).mkdir(parents=True)
        with (self.path_of(number) / "state.pt").open("wb") as file:
            torch.save(content_of(self.state), file)
            file.flush()
            os.fsync(file.fileno())
        return done()

    def load(self, number: int) -> None:
        saved = torch.load(self.path_of(number) / "state.pt", map_location="cpu", weights_only=True)
        self.state.load(saved["model"], saved["optimizer"])

    def close(self) -> None: ...


class Ours(TorchSave):
    label = "**ours**"

    def __init__(self, state: Engine, folder: Path) -> None:
        super().__init__(state, folder)
        self.store = LocalStore(folder)

    def prepare(self) -> Future[Any]:
        cfg = CheckpointConfig(keep=0)  # the benchmark removes them
        folder: Any = SimpleNamespace(ownership=SimpleNamespace(check=done), mirror=done)
        self.saver = AsyncSaver(cfg, self.store, self.state, self.state.backend, DRAFT, folder)
        self.saver.warm()
        return self.saver.warming

    def path_of(self, number: int) -> Path:
        return self.folder / step_name(number)

    def save(self, number: int) -> Future[Any]:
        self.check()
        self.saver.save(Progress(step=number), {}, metric=None)
        assert self.saver.pending is not None
        return self.saver.pending

    def check(self) -> None:
        for saved in self.saver.take():
            if saved.failure:
                raise RuntimeError(saved.failure)

    def load(self, number: int) -> None:
        loader.load(self.store, self.state, self.state.backend, identity={}, settings={}, force=False)

    def verify(self, number: int) -> None:
        self.store.fetch(number)

    def close(self) -> None:
        self.saver.close(waits=True)
        self.check()


class AsyncSave(TorchSave):
    label = "async_save, thread"
    kind = AsyncCheckpointerType.THREAD
    staging: StagingOptions | None = None  # None: the default, a new stager for each save

    def prepare(self) -> Future[Any]:
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # of the group that its saving process makes
        self.folder.mkdir(parents=True, exist_ok=True)
        dist.init_process_group("gloo", init_method=f"file://{self.folder.resolve()}/group", rank=0, world_size=1)
        self.stager = DefaultStager(self.staging) if self.staging else None
        return done()

    def save(self, number: int) -> Future[Any]:
        path, kind = self.path_of(number), self.kind
        return dcp.async_save(  # type: ignore[return-value]
            content_of(self.state), checkpoint_id=path, async_checkpointer_type=kind, async_stager=self.stager
        )

    def load(self, number: int) -> None:
        content = content_of(self.state)
        dcp.load(content, checkpoint_id=self.path_of(number), no_dist=True)  # into the existing tensors

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()
        dist.destroy_process_group()


class AsyncSaveKept(AsyncSave):
    label = "async_save, thread, buffers kept"
    staging = StagingOptions(False, False, False, False)


class AsyncSaveProcess(AsyncSave):
    label = "async_save, process, shared buffers kept"
    kind = AsyncCheckpointerType.PROCESS
    staging = StagingOptions(False, True, False, False)


SIDES: dict[str, type[TorchSave]] = {"torch.save": TorchSave, "ours": Ours, "async": AsyncSave}
SIDES |= {"async_kept": AsyncSaveKept, "async_process": AsyncSaveProcess}
LOADED = ("torch.save", "ours", "async")


# ---- saving, in a separate process ---------------------------------------------------------------------------------


@dataclass
class Save:
    stall_s: float
    beside_s: float  # from then on, until the checkpoint is complete
    steps_s: list[float]  # of the loop in that time
    alone_s: float = 0.0  # the mean step before and after it
    cpu_s: float = 0.0  # of all threads and processes but the loop's, with the stall

    @property
    def durable_s(self) -> float:
        return self.stall_s + self.beside_s

    @property
    def lost_s(self) -> float:
        return self.durable_s - len(self.steps_s) * self.alone_s

    @property
    def share(self) -> float:
        """Share of the steps that the loop does alone, taken during the save."""
        return len(self.steps_s) * self.alone_s / self.beside_s if self.steps_s else 0.0

    @property
    def slowest(self) -> float:
        return max(self.steps_s, default=0.0) / self.alone_s


@dataclass
class Round:
    """The results of one side in a process."""

    prepare: Save
    saves: list[Save]

    def later(self, measure: str) -> float:
        """Return the median of a measure over all saves but the first."""
        return statistics.median(getattr(save, measure) for save in self.saves[1:] or self.saves)


class Loop:
    """Steps of some milliseconds, each of several kernels, like those of a training."""

    def __init__(self) -> None:
        self.matrix = torch.eye(256)

    def until(self, is_over: Callable[[], bool]) -> list[float]:
        """Take steps until something is over; return the seconds of each."""
        times = [time.monotonic()]
        while not is_over():
            for _ in range(8):
                self.matrix @ self.matrix
            times.append(time.monotonic())
        return [after - before for before, after in itertools.pairwise(times)]

    def alone_s(self, seconds: float) -> float:
        end_s = time.monotonic() + seconds
        return statistics.mean(self.until(lambda: time.monotonic() > end_s))

    def beside(self, call: Callable[[], Future[Any]]) -> Save:
        """Measure how long `call` blocks, and the steps taken until its future is done."""
        cpu_s, began_s = process_cpu_s(), time.monotonic()
        future = call()
        called_s, loop_cpu_s = time.monotonic(), time.thread_time()
        steps_s = self.until(future.done)
        ended_s, loop_cpu_s = time.monotonic(), time.thread_time() - loop_cpu_s
        future.result()
        spent_s = process_cpu_s() - cpu_s - loop_cpu_s
        return Save(called_s - began_s, ended_s - called_s, steps_s, cpu_s=spent_s)


def process_cpu_s() -> float:
    """Return the CPU seconds of this process and its children."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(one.user + one.system for one in times)


def measure_saves(side: TorchSave, saves: int, alone_s: float) -> Round:
    """Measure saves of checkpoints numbered from 0; the last one is kept."""
    loop = Loop()
    loop.until(lambda: True)

    def save(number: int) -> Future[Any]:
        future = side.save(number)
        mark_of(side.state).fill_(-1)  # the training continues: this must not reach the checkpoint
        return future

    alone = [loop.alone_s(alone_s)]
    result = [loop.beside(side.prepare)]
    for number in range(saves):
        alone.append(loop.alone_s(alone_s))
        mark_of(side.state).fill_(number)
        result.append(loop.beside(partial(save, number)))
        if number:
            shutil.rmtree(side.path_of(number - 1))
    alone.append(loop.alone_s(alone_s))
    side.close()
    for one, around in zip(result, itertools.pairwise(alone), strict=True):
        one.alone_s = statistics.mean(around)
    return Round(result[0], result[1:])


def in_a_fork(work: Callable[[], Any]) -> Any:
    """Return the result of `work` in a process that shares all memory so far."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(work()))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError as error:
        raise RuntimeError("a side failed, see above") from error
    finally:
        child.join()


# ---- loading -------------------------------------------------------------------------------------------------------


def load_s(side: TorchSave, number: int, how: Callable[[int], None]) -> float:
    """Return the seconds of a load of files that are not in the page cache."""
    for path in side.path_of(number).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began_s = time.monotonic()
    how(number)
    return time.monotonic() - began_s


def measure_loads(sides: list[TorchSave], rounds: int, number: int) -> dict[str, list[float]]:
    """Return the seconds of each round. Raises RuntimeError unless the state is that of the save."""
    result: dict[str, list[float]] = defaultdict(list)
    for side in sides * rounds:
        mark_of(side.state).fill_(-1)
        result[side.label].append(load_s(side, number, side.load))
        if not bool((mark_of(side.state) == number).all()):
            raise RuntimeError(f"{side.label} loaded a state that differs from the saved one")
        if isinstance(side, Ours):
            result["of which its checksums"].append(load_s(side, number, side.verify))
    return result


# ---- tables --------------------------------------------------------------------------------------------------------


def save_table(rounds: dict[str, list[Round]]) -> str:
    head = ["", "stall, first save, s", "stall, later, s", "of torch.save's", "durable, s", "of torch.save's"]
    head += ["training lost, of torch.save's", "CPU, s", "steps beside", "slowest step"]
    rows = []
    for name, result in rounds.items():
        later = {measure: [one.later(measure) for one in result] for measure in MEASURES}
        of_base = {
            measure: spread(ratios(values, [one.later(measure) for one in rounds["torch.save"]]))
            for measure, values in later.items()
            if "torch.save" in rounds and measure in COMPARED
        }
        cells = (
            SIDES[name].label,
            spread(one.saves[0].stall_s for one in result),
            spread(later["stall_s"]),
            of_base.get("stall_s", ""),
            spread(later["durable_s"]),
            of_base.get("durable_s", ""),
            of_base.get("lost_s", ""),
            spread(later["cpu_s"]),
            spread(later["share"]),
            spread(later["slowest"], 2),
        )
        rows.append(cells)
    return table(head, rows)


def load_table(loads_s: dict[str, list[float]]) -> str:
    base = loads_s.get(TorchSave.label)
    rows = [
        (label, spread(seconds), spread(ratios(seconds, base)) if base else "") for label, seconds in loads_s.items()
    ]
    return table(("", "load, s", "of torch.load's"), rows)


def heading(name: str, state: Engine) -> str:
    parameters = sum(weight.numel() for weight in state.model.parameters())
    num_bytes = sum(weight.nbytes for weight in state.model.parameters())  # tied ones count once
    num_bytes += num_bytes_of(state.state()["optimizer"])
    about = f"{name}: {parameters / 1e6:.0f} million parameters with moments, {num_bytes / 1e9:.2f} GB"
    return f"{about}; {machine('torch')}, load before {os.getloadavg()[0]:.1f}."


def run(
    options: argparse.Namespace, state: Engine, folder: Path
) -> tuple[dict[str, list[Round]], dict[str, list[float]]]:
    """Return the rounds of each side, and seconds of loads."""
    rounds: dict[str, list[Round]] = {name: [] for name in options.sides}
    for number, name in turns(options.rounds, options.sides):
        side = SIDES[name](state, folder / name)
        shutil.rmtree(side.folder, ignore_errors=True)
        result: Round = in_a_fork(partial(measure_saves, side, options.saves, options.alone_s))
        rounds[name].append(result)
        for save in result.saves:
            figures = f"stall {save.stall_s:.3g} durable {save.durable_s:.3g} lost {save.lost_s:.3g}"
            print(f"round {number} {name}: {figures}", file=sys.stderr)
        if name not in LOADED:
            shutil.rmtree(side.folder)
    sides = [SIDES[name](state, folder / name) for name in LOADED if name in options.sides]
    return rounds, measure_loads(sides, options.rounds, options.saves - 1)


def main() -> None:
    parser = harness.parser(__doc__, rounds=2, saves=2)  # the first save of each side and round is shown separately
    parser.add_argument("--model", choices=MODELS, default="albert_xxlarge")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="ratios need torch.save")
    parser.add_argument("--alone-s", type=float, default=1.5, help="seconds of the loop alone, before each save")
    parser.add_argument("--folder", type=Path, default=Path(), help="a temporary one is made in it, on its disk")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as under torchrun; and a fork would miss the threads of a pool
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".checkpoints-") as name:
        state = build_state(options.model)
        about = heading(options.model, state)
        rounds, loads_s = run(options, state, Path(name))
    notes = []
    if "ours" in rounds:
        prepared = [result.prepare for result in rounds["ours"]]
        notes.append(
            f"Ours makes its memory beside the first steps: {spread(one.durable_s for one in prepared)} s, in which "
            f"the loop takes {spread(one.share for one in prepared)} of its steps."
        )
    print("\n\n".join((about, *notes, save_table(rounds), load_table(loads_s))))


if __name__ == "__main__":
    main()
