"""The manager of a run's checkpoints: it resumes from the newest one, saves, rolls back, and restores the best one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints import open_store
from train.checkpoints.loader import Loaded, fitting, load, read_weights
from train.checkpoints.manifest import Damaged, Manifest, NoneValid, Progress, chosen_at
from train.checkpoints.retention import best
from train.checkpoints.saver import MAX_WAIT_S, AsyncSaver, Saved, SavesFail
from train.config import NotPermitted, TrainConfig, flat, plural
from train.machine.console import RESULT
from train.machine.environment import versions
from train.observe.metrics import Recorder, Window
from train.parallel.optim import check_continues
from train.run import goodput
from train.run_folder.ownership import LeaseLost
from train.run_folder.run_folder import side_channel
from train.storage.schema import record

if TYPE_CHECKING:
    from train.parallel.backends import Backend
    from train.parallel.engines import Engine
    from train.run.attempt import Attempt

logger = logging.getLogger("train")
PATIENCE_S = 300.0  # seconds for which the last save is retried while S3 does not answer
MAX_ROLLBACKS = 2  # instead of a third rollback, the run fails: other data has not helped twice


@dataclass(frozen=True)
class Sums:
    """A rank's own sums since the last train line, in a checkpoint."""

    loss_sum: float
    wait_s: float
    work_s: float


class CheckpointManager:
    """The checkpoints of an attempt. All ranks must call `resume`, then, inside `saving`, the same methods."""

    def __init__(self, attempt: Attempt, backend: Backend, engine: Engine) -> None:
        self.attempt = attempt
        self.backend = backend
        self.engine = engine
        self.cfg = attempt.cfg
        self.world = backend.world
        self.on_wait = attempt.watch.heartbeat
        self.store = open_store(attempt.folder.storage, attempt.folder.staging)
        self.last_rollback: int | None = None  # the step that the last rollback restored
        # the cost of the last attempt's fault, until it is reported
        self.lost: goodput.Lost | None = None

    # ---- before the loop -----------------------------------------------------------------------------------------

    def resume(self) -> Progress:
        """Restore weights, optimizer and random states from the newest valid checkpoint, if any. Return the progress.

        Files that killed attempts left behind are removed first. Raises NoneValid on all ranks if there is no
        checkpoint although metrics.jsonl says that one was saved.
        """

        def tidy() -> None:
            self.attempt.folder.ownership.check()
            with suppress(NotPermitted):
                self.store.collect_garbage(ended_below=self.attempt.folder.ownership.ended_below)

        self.world.run_on_rank0(tidy, self.on_wait)
        self.loaded = self._load()
        if not self.loaded.ranks:
            newest = self.world.run_on_rank0(
                lambda: goodput.newest_saved(self.attempt.folder.local)
            )
            if newest is not None:
                raise NoneValid(
                    f"metrics.jsonl says that step {newest} was saved, but there is no checkpoint in "
                    f"{self.store.location}: is a disk not mounted? Mount it, or choose another run_dir to start over"
                )
        progress = self.loaded.progress
        force = self.cfg.resume.force
        check_continues(
            progress.step, progress.lr, cfg=self.cfg.optim, plan=self.attempt.plan, force=force
        )
        return progress

    def _load(self) -> Loaded:
        return load(
            self.store,
            self.engine,
            self.backend,
            self.attempt.identity,
            flat(self.cfg),
            force=self.cfg.resume.force,
            on_wait=self.on_wait,
            check_owner=self.attempt.folder.ownership.check,
        )

    @contextmanager
    def saving(self, recorder: Recorder) -> Iterator[None]:
        """Continue the metrics from the checkpoint. During the block, run the thread that saves checkpoints."""
        # The end of the block waits for a pending save, unless a second signal ends the run (SystemExit).
        self.recorder = recorder
        attempt = self.attempt
        ownership = self.attempt.folder.ownership
        world_size = self.world.size
        name = self.backend.name
        fence = ownership.number
        draft = Manifest(
            0, fence, attempt.identity, flat(self.cfg), {}, world_size, name, None, versions()
        )
        self.saver = AsyncSaver(
            self.cfg.checkpoint, self.store, self.engine, self.backend, draft, attempt.folder
        )
        # the other ranks wait in a collective while rank 0 waits for a save
        if self.cfg.backend.timeout_s is not None:
            self.saver.max_wait_s = min(MAX_WAIT_S, self.cfg.backend.timeout_s / 2)
        if self.loaded.ranks:
            self.saver.newest = attempt.checkpoint = self.loaded.progress.step
        self._restore_window(self.loaded)
        for fault in self.loaded.faults:
            recorder.fault(fault)
        if self.world.rank == 0:
            assert recorder.journal is not None
            self.lost = goodput.lost(
                attempt.folder.local,
                attempt.folder.previous,
                ownership.previous,
                attempt=recorder.journal.attempt,
                step=recorder.progress.step,
            )
        waits = True
        try:
            yield
        except SystemExit:
            waits = False
            raise
        finally:
            self.saver.close(waits=waits)

    def _restore_window(self, loaded: Loaded) -> None:
        """Restore each rank's sums for the next train line. If the number of ranks changed, rank 0 gets the totals."""
        # Counts of labels and tokens are saved as sums over the ranks, so rank 0 always gets them.
        with fitting(self.store.location):
            window = record(Window, loaded.progress.window, "progress.window")
            ranks = [record(Sums, own, "ranks") for own in loaded.ranks]
        if not math.isfinite(sum(each.loss_sum for each in ranks)):  # a step was skipped
            self.engine.loss_sum.zero_()
            self.recorder.window = Window()
            return
        rank = self.world.rank
        if len(ranks) == self.world.size:
            own = ranks[rank]
        elif rank == 0:
            own = Sums(
                loss_sum=sum(each.loss_sum for each in ranks),
                wait_s=sum(each.wait_s for each in ranks),
                work_s=sum(each.work_s for each in ranks),
            )
        else:
            own = Sums(0.0, 0.0, 0.0)
        self.engine.loss_sum.copy_(torch.tensor([own.loss_sum]))
        if rank > 0:
            window = replace(window, count=0.0, tokens=0.0)
        self.recorder.window = replace(window, wait_s=own.wait_s, work_s=own.work_s)

    # ---- in the loop ---------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        """The reason why the run must end: saves fail, or another job took the run folder. None if it may continue."""
        return self.saver.failure or self.attempt.folder.ownership.failure

    def report(self) -> None:
        """Report finished saves and, after the first step, the cost of the fault that ended the last attempt."""
        self.attempt.folder.ownership.step = self.recorder.progress.step
        if self.lost is not None and self.recorder.steps_done:
            self._report_lost(self.lost)
            self.lost = None
        self._report_saves()

    def _report_lost(self, lost: goodput.Lost) -> None:
        recover_s = self.attempt.folder.attempt_s()
        # the clocks were right; they may differ a little
        if self.attempt.folder.run_s() is not None:
            recover_s = max(recover_s, time.time() - lost.last_sign_unix_s)
        steps = plural(lost.steps, "step")
        text = f"{lost.reason}; {steps} lost, {recover_s:.0f} s until the first step"
        logger.warning(text)
        self.recorder.fault(text, steps_lost=lost.steps, recover_s=recover_s)

    def _report_saves(self) -> list[Saved]:
        saves = self.saver.take()
        for saved in saves:
            self.recorder.saved(saved)
        self.attempt.checkpoint = self.saver.newest
        self.attempt.stop.save_s = self.saver.save_s
        return saves

    def is_due(self) -> bool:
        """Return whether to save after this step. The last step is always saved, whatever this returns."""
        # Saving the first step after a rollback preserves the count of rollbacks and the position in the data.
        progress = self.recorder.progress
        cfg = self.cfg.checkpoint
        is_best = cfg.best and progress.best_step == progress.step
        is_after_rollback = (
            self.last_rollback is not None and progress.step == self.last_rollback + 1
        )
        return progress.step % cfg.every == 0 or is_best or is_after_rollback

    def save(self, metric: float | None, *, is_last: bool) -> None:
        """Start saving this step. `metric` is the score of its evaluation, None if there was none.

        If the previous save is still running, this one may be skipped. The last step, and the best step if it will be
        exported, are never skipped: their saves wait for the previous one.
        """
        progress = self.recorder.progress
        window = self.recorder.window
        self.attempt.watch.phase("save", step=progress.step)
        count, tokens = self.world.sum([window.count, window.tokens])
        progress.window = {
            **asdict(window),
            "count": count,
            "tokens": tokens,
            "wait_s": 0.0,
            "work_s": 0.0,
        }
        loss_sum = float(self.backend.to_host([self.engine.loss_sum])[0])
        own = asdict(Sums(loss_sum, window.wait_s, window.work_s))
        must = is_last or (self.cfg.checkpoint.best and progress.best_step == progress.step)
        if is_last:
            patience_s = last_save_patience_s(self.cfg, self.attempt.began_s)
        else:
            patience_s = 0.0
        if self.recorder.journal is not None:
            self.recorder.journal.write_waiting()  # a run that resumes from here does not write these lines again
        if self.attempt.saves:
            self.saver.save(
                progress,
                own,
                metric=metric,
                must=must,
                patience_s=patience_s,
                on_wait=self.on_wait,
            )

    def roll_back(self) -> None:
        """Restore weights, optimizer and step of the newest checkpoint. The data continues at its current position.

        Raises FloatingPointError if there is no checkpoint, or after MAX_ROLLBACKS rollbacks.
        """
        now = self.recorder.progress
        skips = self.recorder.skips_in_a_row
        text = f"{skips} steps in a row had no finite gradient, up to step {now.step}"
        self.attempt.watch.phase("roll back", is_start=True)
        self.saver.wait(self.on_wait)
        self.report()
        if now.rollbacks >= MAX_ROLLBACKS:
            raise FloatingPointError(
                f"{text}, after {now.rollbacks} rollbacks; try a lower optim.lr"
            )
        loaded = self._load()
        if not loaded.ranks:
            raise FloatingPointError(
                f"{text}, and there is no checkpoint to go back to; try a lower optim.lr"
            )
        progress = loaded.progress
        self.last_rollback = progress.step
        progress.examples = now.examples
        progress.rollbacks = now.rollbacks + 1
        progress.skipped = now.skipped
        self.backend.skips.reset_streak()
        self.backend.mark_step()
        self.recorder.go_back(progress)
        self._restore_window(loaded)
        self.recorder.alarm(
            f"{text}: back to step {progress.step}, with other data (rollback {progress.rollbacks} of {MAX_ROLLBACKS})"
        )

    # ---- at the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the last save is committed.

        Raises SavesFail on all ranks if this save failed, or LeaseLost if another job has taken the run folder.
        """
        self.saver.wait(self.on_wait)
        lost = self.attempt.folder.ownership.failure
        if self.world.sum([lost is not None])[0]:
            self.world.raise_failure(lost)
        failure = None
        # failures of earlier saves were reported as alarms
        for saved in self._report_saves()[-1:]:
            if saved.failure is not None and not saved.num_bytes:
                failure = f"saving step {saved.step}: {saved.failure}; {self.saver.newest_text}"
        failure = self.world.broadcast(failure)
        if failure is not None:
            raise SavesFail(failure)

    def remove_leftovers(self) -> None:
        """Remove files of unfinished saves by earlier owners of the folder, even if one of them may still be alive."""
        # The run is done, so no later attempt would remove these files, and no earlier owner can save a later step.
        if self.world.rank != 0:
            return
        # NotPermitted was reported when the attempt began, and `record_end` raises LeaseLost on all ranks
        with (
            suppress(NotPermitted, LeaseLost),
            side_channel("files of unfinished saves are not removed"),
        ):
            self.attempt.folder.ownership.check()
            self.store.remove_uncommitted(range(self.attempt.folder.ownership.number))

    def restore_exported(self) -> tuple[int, dict[str, Any]]:
        """Load the weights to be exported into rank 0's model. Return their step, and the settings chosen for them."""
        progress = self.recorder.progress
        by = self.cfg.best.metric
        manifests: dict[int, Manifest] = {}
        if self.cfg.checkpoint.best:
            manifests = self.store.look_at_all()[0]
            step = self._restore_best(dict(manifests))
            why = f"the best by {by}"
        else:
            step = progress.step
            why = f"the last; checkpoint.best=true exports the best by best.metric={by}"
        logger.log(RESULT, "the export has the weights of step %d, %s", step, why)
        return step, progress.chosen.get(str(step)) or chosen_at(step, manifests)

    def _restore_best(self, manifests: dict[int, Manifest]) -> int:
        """Load the weights of the best evaluation into rank 0's model after training, and return their step.

        If their checkpoint is missing or damaged, the best of the other checkpoints is loaded.
        """
        progress = self.recorder.progress
        while (step := best(manifests)) is not None:
            if step != progress.best_step:
                text = "the best evaluation was at step %s, whose checkpoint cannot be loaded: exporting step %d"
                logger.warning(text, progress.best_step, step)
            if step == progress.step:
                return step
            try:
                path = self.store.fetch(step, manifests[step].files_of("model"))
            except Damaged as error:
                logger.warning("step %d is damaged: %s", step, error)
                del manifests[step]
                continue
            with fitting(path):
                weights = read_weights(path, manifests[step])
                # load_state_dict might run hooks
                for name, value in self.engine.model.state_dict().items():
                    value.copy_(weights[name])
            self.store.release(path)
            return step
        return progress.step


def last_save_patience_s(cfg: TrainConfig, began_s: float) -> float:
    """Return for how many seconds the last save is retried: PATIENCE_S, or less if max_run_s ends earlier."""
    if cfg.max_run_s is None:
        left_s = math.inf
    else:
        left_s = began_s + cfg.max_run_s - time.monotonic()
    return max(0.0, min(PATIENCE_S, left_s))
