"""What a run says of itself: metrics.jsonl, TensorBoard, one line and a progress bar on the console.

Numbers that live on the device are read back only every `log_every` steps, so that measuring does not stop the device.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from train.board import Board
from train.config import Plan, TrainConfig
from train.lines import LineFile, finite
from train.monitor import Monitor, Sample
from train.run_folder import RunFolder
from train.stragglers import Stragglers

if TYPE_CHECKING:
    from torch import Tensor

    from train.backend import Backend
    from train.checkpoints.progress import Progress
    from train.checkpoints.saver import Saved
    from train.parallel import Engine

logger = logging.getLogger("train")
COMPILED_STEPS = 2  # in which all graphs of a step occur


@dataclass
class Window:
    """What has gathered since the last line. It is saved with a checkpoint: a resumed run writes the same lines."""

    steps: int = 0
    count: float = 0.0  # labels of all ranks
    tokens: float = 0.0  # of all ranks, without padding
    slots: float = 0.0  # with it
    flops: float = 0.0  # of the model's arithmetic, all ranks; 0: unknown
    wait_s: float = 0.0  # this rank's, for data
    work_s: float = 0.0  # this rank's, waiting for data or in forward passes: without waiting for other ranks
    busy_s: float = 0.0  # in steps, data included; evaluation, saving and compiling left out
    compile_s: float = 0.0  # in steps


@dataclass
class Recorder:
    """Writes on rank 0, measures on all; used as a context."""

    cfg: TrainConfig
    plan: Plan
    folder: RunFolder
    backend: Backend
    flops_per_example: Callable[[int], float | None]  # of so many tokens, padding included
    progress: Progress
    monitor: Monitor
    window: Window = field(default_factory=Window)
    total: Window = field(default_factory=Window)  # of this life: tokens, slots and flops
    train_s: float = 0.0
    steps_done: int = 0  # of this life
    steps_of: Counter[int] = field(default_factory=Counter)  # the same, by the length of their batches
    last_length: int = 0
    last_loss: float = math.nan
    is_first_evaluation: bool = True
    skipped: int = 0  # steps of this process, because of a gradient that was not finite
    skips_in_a_row: int = 0  # as of the last line

    def __post_init__(self) -> None:
        self.stragglers = Stragglers(self.cfg.straggler, self.backend.share(platform.node()))
        self.start_step = self.progress.step

    @property
    def is_first(self) -> bool:
        """Whether something is still to be compiled for batches as the last ones."""
        return self.is_new(self.last_length)

    def is_new(self, seq_len: int) -> bool:
        return self.steps_of[seq_len] < COMPILED_STEPS

    def __enter__(self) -> Recorder:
        self.file: LineFile | None = None
        self.board: Board | None = None
        if self.backend.rank == 0:
            self.folder.mend_last_line()
            self.file = LineFile(self.folder.metrics)
            if self.cfg.tensorboard:
                self.board = Board(self.folder.tensorboard, first_step=self.start_step + 1)
        self.bar = tqdm(
            total=self.plan.total_steps,
            initial=self.start_step,
            unit="step",
            dynamic_ncols=True,
            disable=None if self.backend.rank == 0 else True,  # None: off unless a terminal watches
        )
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for text in self.monitor.alarms():  # of this machine alone: the other ranks may be gone
            self.alarm(text)
        if error is not None:
            self.fault(f"{type(error).__name__}: {error}")
        self.bar.close()
        if self.file is not None:
            self.file.close(cuts_off=self.folder.may_append())
        if self.board is not None:
            self.board.close()

    def begin_step(self) -> None:
        self.began_s, self.compiled_s = time.perf_counter(), self.backend.graphs().compile_s

    def data_ready(self) -> None:
        wait_s = time.perf_counter() - self.began_s
        self.window.wait_s += wait_s
        self.window.work_s += wait_s

    def end_step(
        self, reads: bool, *, lr: float, count: float, tokens: float, seq_len: int, engine: Engine, grad_norm: Tensor
    ) -> None:
        """Take note of a step; every `log_every` of them, and when `reads`, read the device and write a line.

        `count` labels and `tokens` of all ranks were in it, padded to `seq_len` tokens an example.

        Raises:
            FloatingPointError: loss or gradient are no longer numbers although the last step was not skipped; on all
                ranks alike.
        """
        window, step = self.window, self.progress.step
        window.steps += 1
        self.steps_done += 1
        window.count += count
        self.steps_of[seq_len] += 1
        self.last_length = seq_len
        examples = self.plan.global_batch_size
        for each in (window, self.total):
            each.tokens += tokens
            each.slots += examples * seq_len
            each.flops += examples * (self.flops_per_example(seq_len) or 0.0)
        must = reads or self.backend.known_skips() >= self.cfg.nonfinite.max_skips
        if is_due := must or step % self.cfg.log_every == 0 or step == self.plan.total_steps:
            local = [engine.take_loss(), window.wait_s / self.backend.world_size]  # waits for the device
            window.work_s += self.backend.take_work_s()
            norm = float(self.backend.read([grad_norm])[0])
            skipped, self.skips_in_a_row = (0, 0) if self.cfg.collect_graphs else self.backend.skipped()
            works = [window.work_s if rank == self.backend.rank else 0.0 for rank in range(self.backend.world_size)]
            found = self.backend.sum([*local, *works, *self.monitor.read().values()])
            (loss_sum_all, wait_s), found = found[:2], found[2:]
            works, readings = found[: len(works)], found[len(works) :]
        self.bar.update()
        compile_s = self.backend.graphs().compile_s - self.compiled_s
        window.compile_s += compile_s
        busy_s = max(time.perf_counter() - self.began_s - compile_s, 1e-9)
        window.busy_s += busy_s
        self.train_s += busy_s
        self.progress.productive_s += busy_s
        if is_due:
            self.last_loss = loss_sum_all / (window.count or 1.0)
            stragglers = self.stragglers.see(works)
            self._write_train(step, lr, norm, wait_s, Sample.from_values(readings))
            self.window = Window()
            for text in stragglers:
                self.alarm(text)
            self._judge_skips(skipped, norm)

    def _judge_skips(self, skipped: int, norm: float) -> None:
        """`skipped`: of this process so far."""
        new, self.skipped = skipped - self.skipped, skipped
        self.progress.skipped += new
        if new:
            self.alarm(f"{new} steps were skipped: their gradient was not finite (norm {norm})")
        is_number = math.isfinite(self.last_loss) and math.isfinite(norm)
        if not is_number and not new and not self.skips_in_a_row and not self.cfg.collect_graphs:
            raise FloatingPointError(
                f"the loss is {self.last_loss}, the gradient's norm {norm} at step {self.progress.step}: a new run_dir "
                "with a lower optim.lr, or fp32, may help"
            )

    def _write_train(self, step: int, lr: float, grad_norm: float, wait_s: float, sample: Sample) -> None:
        window = self.window
        line = {
            "step": step,
            "loss": self.last_loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_s": window.tokens / window.busy_s,
            "data_wait_s": wait_s,
            "step_s": window.busy_s / window.steps,
            "examples": self.progress.examples,
            "epoch": self.progress.examples / self.plan.global_batch_size / self.plan.steps_per_epoch,
            "goodput": self.goodput(),
            **self.stragglers.fields,
        }
        mfu = self.mfu(window.flops / window.busy_s)
        if mfu is not None:
            line["mfu"] = mfu
        if window.tokens < window.slots:
            line["padding_share"] = 1 - window.tokens / window.slots
        if window.compile_s:
            line |= {"compile_s": window.compile_s, "graphs": self.backend.graphs().compiled}
        line |= sample.fields(peak_flops_per_s=self.cfg.instance.peak_flops_per_s(self.backend.precision))
        self.write("train", line)
        if sample.num_alarms:  # of all machines: the ranks see one number, so all of them gather
            for found in self.backend.gather({"alarms": self.monitor.alarms()}):
                for text in found["alarms"]:
                    self.alarm(text)
        shown = {"loss": f"{self.last_loss:.3f}", "tokens/s": f"{line['tokens_per_s']:,.0f}"}
        self.bar.set_postfix(shown | ({} if mfu is None else {"mfu": f"{mfu:.1%}"}), refresh=False)
        width = len(str(self.plan.total_steps))
        utilisation = "" if mfu is None else f"  mfu {mfu:5.1%}"
        logger.info(
            f"step {step:{width}}/{self.plan.total_steps}  loss {self.last_loss:7.4f}  lr {lr:.2e}  "
            f"grad {grad_norm:6.3f}  {line['tokens_per_s']:9,.0f} tokens/s{utilisation}  "
            f"data wait {wait_s / window.busy_s:4.0%}"
            + (f"  compiled {window.compile_s:.1f} s" if window.compile_s else "")
        )

    def mfu(self, flops_per_s: float) -> float | None:
        """Share of the devices' peak that the model's own arithmetic uses; None where either is unknown."""
        peak = self.cfg.instance.peak_flops_per_s(self.backend.precision)
        return flops_per_s / (peak * self.backend.world_size) if peak and flops_per_s else None

    def evaluation(self, step: int, metrics: dict[str, float], eval_s: float) -> None:
        self.is_first_evaluation = False
        self.write("eval", {"step": step, "examples": self.progress.examples, **metrics, "eval_s": eval_s})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        logger.info(f"step {step:{len(str(self.plan.total_steps))}} evaluation  {shown}  ({eval_s:.1f} s)")

    def saved(self, saved: Saved) -> None:
        if saved.failure is not None:
            self.alarm(f"checkpoint of step {saved.step}: {saved.failure}")
        if saved.num_bytes:
            times = {"save_s": saved.save_s, "stall_s": saved.stall_s}
            self.write("checkpoint", {"step": saved.step, "bytes": saved.num_bytes, **times})

    def fault(self, reason: str, **values: float | None) -> None:
        self.write("fault", {"step": self.progress.step, "reason": reason, **values})

    def alarm(self, text: str) -> None:
        logger.warning(f"step {self.progress.step}: {text}")
        self.fault(text)

    def go_back(self, progress: Progress) -> None:
        """The run goes on from an earlier step."""
        self.progress, self.window, self.skips_in_a_row = progress, Window(), 0
        self.bar.n = progress.step

    def goodput(self) -> float:
        """Seconds in steps that were not lost, of all since the run was begun, lives and pauses included."""
        return self.progress.productive_s / max(self.folder.clock.run_s(), self.progress.productive_s, 1e-9)

    def summary(self, reason: str, facts: dict[str, Any]) -> None:
        """The last line of this life of the run. Unknown figures are null."""
        tokens, graphs = int(self.total.tokens), self.backend.graphs()
        self.write(
            "summary",
            {
                "step": self.progress.step,
                "steps_total": self.plan.total_steps,
                "reason": reason,
                "train_s": self.train_s,
                "compile_s": graphs.compile_s,
                "graphs": graphs.compiled,
                "executions": graphs.executed,
                "tokens": tokens,
                "tokens_per_s": tokens / self.train_s if self.train_s else None,
                "mfu": self.mfu(self.total.flops / self.train_s) if self.train_s else None,
                "cost_usd": self.cost_usd(),
                "goodput": self.goodput(),
                "productive_s": self.progress.productive_s,
                "skipped_steps": self.progress.skipped,
                "rollbacks": self.progress.rollbacks,
                "world_size": self.backend.world_size,
                "backend": self.backend.name,
                "device": self.backend.device_name,
                "precision": self.backend.precision,
                **facts,
            },
        )

    def cost_usd(self) -> float | None:
        """Training and compiling time at the instance's price; None where the price is unknown."""
        price = self.cfg.instance.usd_per_hour
        machines = math.ceil(self.backend.world_size / self.backend.local_world_size)
        return None if price is None else price * machines * (self.train_s + self.backend.graphs().compile_s) / 3600

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and its numbers to TensorBoard. Rank 0, as long as the folder is its job's."""
        if self.file is not None and self.folder.may_append():
            line = {"kind": kind, "time_unix_s": round(time.time(), 3), **values}
            self.file.write(json.dumps({key: value if finite(value) else None for key, value in line.items()}))
            if self.board is not None and kind in ("train", "eval"):
                self.board.add(kind, values)
