"""Measurements taken on every rank during a run. Rank 0 writes them to metrics.jsonl.

Values on the device are copied to the host only every `log_every` steps, so that measuring does not stall the device.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, Any

from train.config import Plan, TrainConfig
from train.config.train import TENSORBOARD
from train.machine.memory import own_peak_bytes
from train.machine.processes import age_s
from train.observe.journal import Journal, RunConsole
from train.observe.monitor import Monitor, hardware_fields
from train.observe.profile import Profiler
from train.observe.trackers import Tracker, open_trackers
from train.parallel.backend import peak_device_bytes
from train.run_folder.run_folder import RunFolder, side_channel

if TYPE_CHECKING:
    from torch import Tensor

    from train.checkpoints.manifest import Progress
    from train.checkpoints.saver import Saved
    from train.data.batches.loader import Batch
    from train.parallel.backends import Backend
    from train.parallel.engines import Engine

logger = logging.getLogger("train")
COMPILED_STEPS = 2  # after this many steps with a sequence length, all graphs for it are compiled


@dataclass
class Window:
    """Sums since the last train line. Checkpoints contain them, so that a resumed run writes the same lines."""

    steps: int = 0
    count: float = 0.0  # labels of this rank; after `_add_up`, of all ranks
    tokens: float = 0.0  # tokens of this rank, without padding; after `_add_up`, of all ranks
    slots: float = 0.0  # tokens of all ranks, padding included
    flops: float = 0.0  # the model's FLOPs on all ranks; 0 if unknown
    wait_s: float = 0.0  # seconds in which this rank waited for data
    # seconds in which this rank worked or waited for data, but not for other ranks
    work_s: float = 0.0
    # seconds in steps, including waits for data, but not evaluations, saves or compiling
    busy_s: float = 0.0
    compile_s: float = 0.0  # seconds of compiling in steps


def lengths_of(micro_batches: Iterable[Batch]) -> list[int]:
    """Return the length in tokens, padding included, of each micro batch."""
    return [batch["inputs"]["input_ids"].shape[-1] for batch in micro_batches]


@dataclass
class Recorder:
    """A context manager that measures on all ranks and writes metrics lines on rank 0."""

    cfg: TrainConfig
    plan: Plan
    folder: RunFolder
    backend: Backend
    engine: Engine
    # by sequence length (tokens, padding included)
    flops_per_example: Callable[[int], float | None]
    progress: Progress
    monitor: Monitor
    # receives each line; see `train.loop.run`
    on_line: Callable[[Recorder, str, dict[str, Any]], None] | None = None
    window: Window = field(default_factory=Window)
    own_tokens: float = 0.0  # tokens of this rank in this attempt
    all_tokens: float = 0.0  # tokens of all ranks in this attempt, up to the last line
    total_flops: float = 0.0  # the model's FLOPs on all ranks in this attempt
    train_s: float = 0.0
    steps_done: int = 0  # optimizer steps in this attempt
    # steps_done by sequence length; a step may have several
    steps_of: Counter[int] = field(default_factory=Counter)
    last_lengths: Sequence[int] = (0,)  # those of the last step's micro batches
    is_first_evaluation: bool = True
    skipped: int = 0  # steps that this process skipped because their gradient was not finite
    skips_in_a_row: int = 0  # consecutive skipped steps, up to the last line

    def __post_init__(self) -> None:
        self.world = self.backend.world
        # so that a row counts once if several ranks train on it
        self.share = self.engine.data_size / self.world.size
        # seconds before the attempt began
        self.before_s = max(0.0, age_s(os.getpid()) - self.folder.attempt_s())

    @property
    def is_first(self) -> bool:
        """True while a sequence length of the last step may still trigger compilation."""
        return self.is_new(self.last_lengths)

    def is_new(self, lengths: Iterable[int]) -> bool:
        return any(self.steps_of[length] < COMPILED_STEPS for length in lengths)

    def __enter__(self) -> Recorder:
        step = self.progress.step
        is_first_rank = self.world.rank == 0
        cfg = self.cfg
        self.journal: Journal | None = None
        if is_first_rank:
            trackers: Sequence[Tracker] = ()
            if self.on_line is None:  # a measurement is not tracked
                trackers = open_trackers(cfg, self.folder)
            self.journal = Journal(
                self.folder,
                first_step=step + 1,
                tensorboard=TENSORBOARD in cfg.telemetry.trackers,
                to=trackers,
            )
        self.profiler: Profiler | None = None
        if is_first_rank and cfg.profile:
            self.profiler = Profiler(cfg, self.folder, self.backend)
        self.console = RunConsole(
            step=step, total_steps=self.plan.total_steps, is_first_rank=is_first_rank
        )
        if self.on_line is not None:
            self.on_line(self, "start", {})
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.fault(f"{type(error).__name__}: {error}")
        self.console.bar.close()
        if self.journal is not None:
            self.journal.close(error)
        if self.profiler is not None:  # closed last: this may fail after a device fault
            self.profiler.close()

    def begin_step(self) -> None:
        if self.profiler is not None:
            self.profiler.begin_step()
        self.began_s = time.perf_counter()
        self.compiled_s = self.backend.graphs().compile_s

    def data_ready(self) -> None:
        wait_s = time.perf_counter() - self.began_s
        self.window.wait_s += wait_s
        self.window.work_s += wait_s

    def waited(self, wait_s: float) -> None:
        """Count a wait for batches that were not drawn during the step before, such as those of the first step."""
        self.window.wait_s += wait_s
        self.window.work_s += wait_s
        self._busy(wait_s)

    def _busy(self, busy_s: float) -> None:
        self.window.busy_s += busy_s
        self.train_s += busy_s
        self.progress.productive_s += busy_s

    def end_step(
        self,
        reads: bool,
        *,
        lr: float,
        micro_batches: Sequence[Batch],
        grad_norm: Tensor,
    ) -> None:
        """Record a step of this rank's `micro_batches`.

        Every `log_every` steps, or if `reads` is set, read values from the device, sum them over the ranks and write a
        train line. After writing it, raise FloatingPointError on all ranks if the loss or the gradient norm is not
        finite, unless the step was skipped for that reason.
        """
        step = self.progress.step
        self._count(micro_batches)
        must = reads or self.backend.skips.known_streak() >= self.cfg.nonfinite.max_skips
        is_due = must or step % self.cfg.log_every == 0 or step == self.plan.total_steps
        if is_due:
            fields = self._add_up()
            norm = float(self.backend.to_host([grad_norm])[0])
            fields |= {"lr": lr, "grad_norm": norm}
            new_skips = self._new_skips()
        self.console.bar.update()
        compile_s = self.backend.graphs().compile_s - self.compiled_s
        self.window.compile_s += compile_s
        self._busy(max(time.perf_counter() - self.began_s - compile_s, 1e-9))
        if self.profiler is not None:
            self.profiler.end_step()
        if is_due:
            self._write_train(fields)
            self.window = Window()
            self._judge(fields["loss"], norm, new_skips)

    def _new_skips(self) -> int:
        """Return how many steps were skipped since the last line."""
        before = self.skipped
        self.skipped, self.skips_in_a_row = self.backend.skips.counts()
        return self.skipped - before

    def _judge(self, loss: float, norm: float, new_skips: int) -> None:
        """Report skipped steps. Raises FloatingPointError if the loss or the norm is not finite for another reason."""
        self.progress.skipped += new_skips
        if new_skips:
            self.alarm(f"skipped steps: {new_skips}; the gradient was not finite (norm {norm})")
            return
        if self.skips_in_a_row:
            return
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"the loss is {loss} and the gradient norm {norm} at step {self.progress.step}: start again in a new "
                "run_dir, with a lower optim.lr or in fp32"
            )

    def _count(self, micro_batches: Sequence[Batch]) -> None:
        window = self.window
        lengths = lengths_of(micro_batches)
        examples = self.plan.global_batch_size / len(lengths)
        tokens = self.share * sum(batch["tokens"] for batch in micro_batches)
        flops_of_lengths = [self.flops_per_example(length) or 0.0 for length in lengths]
        flops = examples * sum(flops_of_lengths)
        window.steps += 1
        window.count += self.share * sum(batch["count"] for batch in micro_batches)
        window.tokens += tokens
        window.slots += examples * sum(lengths)
        window.flops += flops
        self.own_tokens += tokens
        self.total_flops += flops
        self.steps_done += 1
        self.steps_of.update(set(lengths))
        self.last_lengths = lengths

    def _add_up(self) -> dict[str, float]:
        """Sum the window over the ranks, and return the fields of the line that are made from these sums."""
        window = self.window
        world = self.world
        # Seconds in passes (forward, backward), and from a step's first pass to its last; 0 without a pipeline.
        passes_s = self.backend.work.take_s()
        span_s = self.backend.span.take_s()
        works_s = [0.0] * world.size
        works_s[world.rank] = window.work_s + passes_s
        own = {
            "loss": self.engine.take_loss(),
            "wait_s": window.wait_s / world.size,
            "passes_s": passes_s,
            "span_s": span_s,
            "count": window.count,
            "tokens": window.tokens,
            "all_tokens": self.own_tokens,
        }
        summed = world.sum([*own.values(), *works_s, *self.monitor.read()])
        sums = dict(zip(own, summed, strict=False))
        more = summed[len(own) :]
        window.count = sums["count"]
        # The shares of a pipeline's ranks may add up to slightly less than a whole number.
        window.tokens = round(sums["tokens"])
        self.all_tokens = sums["all_tokens"]
        fields = {
            "loss": sums["loss"] / (window.count or 1.0),
            "data_wait_s": sums["wait_s"],
            **slowest(more[: world.size]),
            **hardware_fields(more[world.size :]),
        }
        if sums["span_s"]:
            fields["bubble_share"] = max(0.0, 1 - sums["passes_s"] / sums["span_s"])
        return fields

    def _write_train(self, fields: dict[str, float]) -> None:
        window = self.window
        line = {
            "step": self.progress.step,
            **fields,
            "tokens_per_s": window.tokens / window.busy_s,
            "step_s": window.busy_s / window.steps,
            "steps": window.steps,
            "train_s": self.train_s,
            "tokens": round(self.all_tokens),
            "examples": self.progress.examples,
            "epoch": self.progress.examples
            / self.plan.global_batch_size
            / self.plan.steps_per_epoch,
        }
        if (goodput := self.goodput()) is not None:
            line["goodput"] = goodput
        if (mfu := self.mfu(window.flops / window.busy_s)) is not None:
            line["mfu"] = mfu
        if self.backend.scaler.is_enabled():
            line["loss_scale"] = self.backend.scaler.get_scale()
        if window.compile_s:
            line |= {"compile_s": window.compile_s, "graphs": self.backend.graphs().compiled}
        self.write("train", line, lambda: self.console.train(line))

    def mfu(self, flops_per_s: float) -> float | None:
        """Return the model's FLOP/s divided by the devices' peak FLOP/s; None if either is unknown."""
        peak = self.cfg.instance.peak_flops_per_s(self.backend.precision)
        if not peak or not flops_per_s:
            return None
        return flops_per_s / (peak * self.world.size)

    def evaluation(self, step: int, metrics: dict[str, float], eval_s: float) -> None:
        self.is_first_evaluation = False
        line = {
            "step": step,
            "examples": self.progress.examples,
            **metrics,
            "eval_s": eval_s,
        }
        self.write("eval", line, lambda: self.console.evaluation(step, metrics, eval_s))

    def saved(self, saved: Saved) -> None:
        if saved.failure is not None:
            self.alarm(f"checkpoint of step {saved.step}: {saved.failure}")
        if saved.num_bytes:
            line = {
                "step": saved.step,
                "bytes": saved.num_bytes,
                "save_s": saved.save_s,
                "stall_s": saved.stall_s,
            }
            self.write("checkpoint", line)

    def fault(self, reason: str, **values: float | None) -> None:
        self.write("fault", {"step": self.progress.step, "reason": reason, **values})

    def alarm(self, text: str) -> None:
        # `fault` comes first, because it also writes and logs the lines of earlier steps.
        self.fault(text)
        logger.warning(f"step {self.progress.step}: {text}")

    def go_back(self, progress: Progress) -> None:
        """Continue from the earlier step in `progress`."""
        self.progress = progress
        self.window = Window()
        self.skips_in_a_row = 0
        self.console.bar.n = progress.step

    def goodput(self) -> float | None:
        """Return the share of the time since the run began that was spent in steps that count; None if unknown."""
        run_s = self.folder.run_s()
        if run_s is None:
            return None
        productive_s = self.progress.productive_s
        return productive_s / max(run_s, productive_s, 1e-9)

    def owes_summary(self) -> bool:
        """Return whether a summary is due: this attempt measured something, or the previous one was killed.

        All ranks must call this. A finished run that is started again writes no second summary.
        """
        if self.steps_done or not self.is_first_evaluation:
            return True
        owes = self.journal is not None and self.journal.owes_summary
        return self.world.sum([owes])[0] > 0

    def summary(self, reason: str, facts: dict[str, Any]) -> None:
        """Write the last line of this attempt. Unknown values are null."""
        tokens = round(self.world.sum([self.own_tokens])[0])
        graphs = self.backend.graphs()
        tokens_per_s: float | None = None
        mfu: float | None = None
        if self.train_s:
            tokens_per_s = tokens / self.train_s
            mfu = self.mfu(self.total_flops / self.train_s)
        self.write(
            "summary",
            {
                "step": self.progress.step,
                "steps_total": self.plan.total_steps,
                "reason": reason,
                "train_s": self.train_s,
                "compile_s": graphs.compile_s,
                "graphs": graphs.compiled,
                "tokens": tokens,
                "tokens_per_s": tokens_per_s,
                "mfu": mfu,
                "goodput": self.goodput(),
                "productive_s": self.progress.productive_s,
                "skipped_steps": self.progress.skipped,
                "rollbacks": self.progress.rollbacks,
                "world_size": self.world.size,
                "backend": self.backend.name,
                "device": self.backend.device_name,
                "precision": self.backend.precision,
                "peak_device_bytes": peak_device_bytes(),
                "peak_host_bytes": own_peak_bytes(),
                **facts,
            },
        )

    def cost_usd(self) -> float | None:
        """Return the cost of all attempts so far, without the pauses between them; None if unknown or not on rank 0."""
        price = self.cfg.instance.usd_per_hour
        if price is None or self.journal is None:
            return None
        attempt_s = self.before_s + self.folder.attempt_s()
        attempt_usd = price * self.world.num_machines * attempt_s / 3600
        with side_channel("cost_usd is unknown now"):
            return self.journal.cost_before_usd + attempt_usd
        return None

    def write(
        self, kind: str, values: dict[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Write a line on rank 0, and call `then` on every rank. Rank 0 may do both later: see Journal.write."""
        if self.journal is not None and self.on_line is None:
            cost_usd = self.cost_usd()
            if cost_usd is not None:
                values = {**values, "cost_usd": cost_usd}
            self.journal.write(kind, values, then)
            return
        if self.on_line is not None:
            self.on_line(self, kind, values)
        then()


def slowest(works_s: Sequence[float]) -> dict[str, float]:
    """Return the rank that works longest, and its time over the median; {} if there is one rank.

    `works_s` has each rank's seconds of work, without waits for other ranks.
    """
    middle_s = median_low(works_s)
    if len(works_s) == 1 or middle_s <= 0:
        return {}
    most_s = max(works_s)
    return {"slowest_rank": works_s.index(most_s), "slowest_ratio": most_s / middle_s}
