"""Stalls of training caused by saving: our saver, torch.save and torch.distributed.checkpoint's async_save.

    python -m benchmarks.checkpoint [--model albert_xxlarge|bert_large|tiny] [--rounds 2] [--saves 2] [--folder DIR]

All save the same weights and AdamW moments to a real disk, while a loop of matrix products runs, on one thread as under
torchrun. A stall is the time for which a call blocks the loop. In every round, each side is a separate process, forked
from the one that created the state; in every other round, the sides come in reverse order.

"torch.save" blocks until its file is synced. "async_save" is used as documented, in a gloo group of one rank; with
"buffers kept", all saves share a stager, which is the fastest mode. Every checkpoint has a new folder, and the previous
one is removed. Files are dropped from the page cache before they are loaded. Our loading also compares checksums.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import harness
from benchmarks.harness import Job, machine, ratios, spread, table, turns
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
LIMIT_S = 3600  # maximum seconds for all saves of a side
DRAFT = Manifest(0, 1, {}, {}, {}, 1, "ddp", None)


# ---- the state -----------------------------------------------------------------------------------------------------


def build_state(name: str) -> Engine:
    model = build_masked_lm(MODELS[name], vocab_size=VOCAB_SIZE, pad_id=0, seq_len=SEQ_LEN)
    optimizer = build_optimizer(OptimConfig(), model.parameters())
    for moments in optimizer.state.values():
        moments["exp_avg"].fill_(1e-3)  # memory is allocated when it is first written
        moments["exp_avg_sq"].fill_(1e-6)
    return Engine(DDP(BackendConfig(device="cpu")), model, optimizer)


def content_of(state: Engine) -> dict[str, Any]:
    """Return the state that every side saves."""
    return {"model": state.model.state_dict(), "optimizer": state.state()["optimizer"]}


def mark_of(state: Engine) -> torch.Tensor:
    """Return a small weight. It is set before each save, so its value shows which save a checkpoint is from."""
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
        """Start what can be done before the first save, while the first steps run."""
        return done()

    def path_of(self, number: int) -> Path:
        return self.folder / str(number)

    def save(self, number: int) -> Future[Any]:
        """Save; the call blocks training, and its future is done when the checkpoint is complete."""
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
        cfg = CheckpointConfig(keep=0)  # the benchmark removes checkpoints itself
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

    def close(self) -> None:
        self.saver.close(waits=True)
        self.check()


class AsyncSave(TorchSave):
    label = "async_save, thread"
    kind = AsyncCheckpointerType.THREAD
    staging: StagingOptions | None = None  # None: the default, a new stager for each save

    def prepare(self) -> Future[Any]:
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # async_save's own process needs it for its group
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


class Save(NamedTuple):
    stall_s: float
    durable_s: float  # from the call until the checkpoint is complete


def beside_steps(call: Callable[[], Future[Any]]) -> Save:
    """Measure how long `call` blocks, and when its future is done, while a loop of matrix products runs."""
    matrix, began_s = torch.eye(256), time.monotonic()
    future = call()
    stall_s = time.monotonic() - began_s
    while not future.done():
        for _ in range(8):
            matrix @ matrix
    future.result()
    return Save(stall_s, time.monotonic() - began_s)


def measure_saves(side: TorchSave, saves: int) -> list[Save]:
    """Measure saves of checkpoints numbered from 0; the last one is kept."""

    def save(number: int) -> Future[Any]:
        future = side.save(number)
        mark_of(side.state).fill_(-1)  # training continues; this value must not be in the checkpoint
        return future

    beside_steps(side.prepare)
    result = []
    for number in range(saves):
        mark_of(side.state).fill_(number)
        result.append(beside_steps(partial(save, number)))
        if number:
            shutil.rmtree(side.path_of(number - 1))
    side.close()
    return result


# ---- loading -------------------------------------------------------------------------------------------------------


def load_s(side: TorchSave, number: int) -> float:
    """Return the seconds that loading takes if the files are not in the page cache.

    Raises RuntimeError if the loaded state differs from the saved one.
    """
    for path in side.path_of(number).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mark_of(side.state).fill_(-1)
    began_s = time.monotonic()
    side.load(number)
    taken_s = time.monotonic() - began_s
    if not bool((mark_of(side.state) == number).all()):
        raise RuntimeError(f"{side.label} loaded a state that differs from the saved one")
    return taken_s


# ---- the table -----------------------------------------------------------------------------------------------------


def save_table(rounds: dict[str, list[list[Save]]], loads_s: dict[str, list[float]]) -> str:
    """Return the table. "later" is the median of a round's saves after the first."""
    later = {
        name: [statistics.median(save.stall_s for save in saves[1:] or saves) for saves in result]
        for name, result in rounds.items()
    }
    rows = []
    for name, result in rounds.items():
        of_base = ratios(later[name], later["torch.save"]) if "torch.save" in later else ()
        durable_s = (statistics.median(save.durable_s for save in saves[1:] or saves) for saves in result)
        firsts, loads = (saves[0].stall_s for saves in result), loads_s[name]
        rows.append((SIDES[name].label, *map(spread, (firsts, later[name], of_base, durable_s, loads))))
    head = ("", "first stall, s", "later stalls, s", "share of torch.save's", "durable, s", "load, s")
    return table(head, rows)


def heading(name: str, state: Engine) -> str:
    num_bytes = sum(weight.nbytes for weight in state.model.parameters())  # tied weights count once
    num_bytes += num_bytes_of(state.state()["optimizer"])
    return f"{name}: {num_bytes / 1e9:.2f} GB with moments; {machine('torch')}, load before {os.getloadavg()[0]:.1f}."


def run(options: argparse.Namespace, state: Engine, folder: Path) -> str:
    rounds: dict[str, list[list[Save]]] = defaultdict(list)
    loads_s: dict[str, list[float]] = defaultdict(list)
    for number, name in turns(options.rounds, options.sides):
        side = SIDES[name](state, folder / name)
        shutil.rmtree(side.folder, ignore_errors=True)
        saves = Job(measure_saves, side, options.saves, log=folder / "log").result(LIMIT_S)
        if "error" in saves:
            raise RuntimeError(f"{name}: {saves['error']}\n{saves['log']}")
        rounds[name].append(saves)
        print(f"round {number} {name}: {saves}", file=sys.stderr)
        if name not in LOADED:
            shutil.rmtree(side.folder)
    for name in [name for name in LOADED if name in options.sides] * options.rounds:
        loads_s[name].append(load_s(SIDES[name](state, folder / name), options.saves - 1))
    return save_table(rounds, loads_s)


def main() -> None:
    parser = harness.parser(__doc__, rounds=2, saves=2)  # the first save of each side and round is shown separately
    parser.add_argument("--model", choices=MODELS, default="albert_xxlarge")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="ratios need torch.save")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder for temporary files, on the disk to test")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as under torchrun; besides, a forked process has no thread pool
    with tempfile.TemporaryDirectory(dir=options.folder, prefix=".checkpoints-") as name:
        state = build_state(options.model)
        print(f"{heading(options.model, state)}\n\n{run(options, state, Path(name))}")


if __name__ == "__main__":
    main()
