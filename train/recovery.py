"""What a run does about faults: it goes on from the newest checkpoint, saves, goes back, and counts what was lost."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from train import goodput
from train.checkpoints.loader import Loaded, load, read
from train.checkpoints.manifest import Damaged, Manifest, NoneValid
from train.checkpoints.progress import Progress
from train.checkpoints.retention import best
from train.checkpoints.saver import Facts, Saved, Saver, SavesFail
from train.checkpoints.store import open_store
from train.checkpoints.unsent import STAGING
from train.config import InputError, TrainConfig, Unreachable, flat
from train.environment import environment
from train.metrics import Recorder, Window
from train.together import meanwhile, together

if TYPE_CHECKING:
    from train.backend import Backend
    from train.loop import Life
    from train.parallel import Engine

logger = logging.getLogger("train")


class Recovery:
    """All ranks call each method at the same steps; used as a context while the loop runs."""

    def __init__(
        self, life: Life, backend: Backend, model: nn.Module, engine: Engine, optimizer: torch.optim.Optimizer
    ) -> None:
        self.life, self.backend, self.model, self.engine, self.optimizer = life, backend, model, engine, optimizer
        self.built = optimizer  # the backend may split it over the ranks, and own another one
        self.cfg, self.settings = life.cfg, flat(life.cfg)
        self.store = open_store(life.folder.storage, life.folder.path / STAGING)
        lease = life.lease
        self.unmirrored: Exception | None = None  # why the metrics could not go up before the last commit
        self.saver = Saver(
            self.cfg.checkpoint,
            self.store,
            backend,
            Facts(lease.number if lease else 0, life.identity, self.settings, environment()["versions"]),
            may_commit=self._before_commit,
            after_commit=self._after_commit,
        )
        self.told_of_watchdog = False
        self.last_rollback: int | None = None  # the step that the run went back to

    # ---- at the start --------------------------------------------------------------------------------------------

    def load(self) -> Progress:
        """Put back the newest valid checkpoint, if there is one."""
        meanwhile(self.backend, self._tidy, self.life.watch.beat)
        self.loaded = self._load()
        is_new = self.backend.rank == 0 and not self.loaded.ranks
        together(self.backend, self._check_nothing_vanished if is_new else lambda: None)
        self.saver.newest = self.life.checkpoint = self.loaded.progress.step if self.loaded.ranks else None
        return self.loaded.progress

    def _tidy(self) -> None:
        lease = self.life.lease
        if lease is not None:
            self.store.send_kept(lease.number)
            self.store.collect_garbage(ended_below=lease.ended_below)

    def _check_nothing_vanished(self) -> None:
        step = goodput.newest_saved(self.life.folder.metrics)
        if step is not None:
            raise NoneValid(
                f"metrics.jsonl says that step {step} was saved, and there is no checkpoint in {self.store.location}: "
                "is a disk not mounted? Bring it back, or choose another run_dir to start over"
            )

    def _load(self) -> Loaded:
        return load(
            self.store,
            self.model,
            self.optimizer,
            self.backend,
            identity=self.life.identity,
            settings=self.settings,
            force=self.cfg.resume.force,
            beat=self.life.watch.beat,
        )

    def begin(self, recorder: Recorder) -> None:
        """Take up the metrics where they were, and say what a fault has cost."""
        self.recorder = recorder
        self._put_back_window(self.loaded)
        for fault in self.loaded.faults:
            recorder.fault(fault)
        skew = self.life.folder.clock.go_on(max(recorder.progress.attempts_s, recorder.progress.productive_s))
        if self.backend.rank == 0:
            if skew is not None:
                recorder.alarm(skew)
            lease = self.life.lease
            beaten = lease.previous if lease is not None else None
            self.lost = goodput.lost(
                self.life.folder.metrics, self.life.folder.previous, beaten, recorder.progress.step
            )
            if not self.cfg.collect_graphs and self.optimizer is self.built:
                self.saver.warm(self.model, self.optimizer)
        else:
            self.lost = None

    def _put_back_window(self, loaded: Loaded) -> None:
        """Each rank its own sums; on another number of ranks rank 0 takes all of them."""
        rank, ranks = self.backend.rank, loaded.ranks
        if len(ranks) != self.backend.world_size:
            together = {key: sum(own[key] for own in ranks) for key in ("loss_sum", "wait_s", "work_s")}
            ranks = [together, *(dict.fromkeys(together, 0.0) for _ in range(self.backend.world_size - 1))]
        own = ranks[rank]
        if not math.isfinite(sum(float(each["loss_sum"]) for each in ranks)):  # saved beside steps that were skipped
            self.engine.loss_sum.zero_()
            self.recorder.window = Window()
            return
        self.engine.loss_sum.copy_(torch.tensor([float(own["loss_sum"])]))
        saved: dict[str, Any] = loaded.progress.window
        window = Window(**saved)
        self.recorder.window = dataclasses.replace(window, wait_s=float(own["wait_s"]), work_s=float(own["work_s"]))

    def _before_commit(self) -> None:
        """The metrics go first: what a committed checkpoint has seen is in the run folder with it."""
        self.life.folder.check_owner()
        self.unmirrored = None
        try:
            self.life.folder.mirror()
        except (InputError, Unreachable, OSError) as error:  # the checkpoint matters more
            self.unmirrored = error

    def _after_commit(self) -> None:
        self.life.folder.check_owner()  # older checkpoints are removed next
        if self.unmirrored is not None:
            raise self.unmirrored

    # ---- in the loop ---------------------------------------------------------------------------------------------

    def look(self) -> Exception | None:
        """Tell of saves that have ended, and of what a fault cost, once the first step is done. Gives why the run has
        to end.
        """
        if self.life.lease is not None:
            self.life.lease.step = self.recorder.progress.step
        if self.lost is not None and self.recorder.steps_done:
            since_s = time.time() - self.lost.last_sign_unix_s
            recover_s = max(since_s, self.life.folder.clock.attempt_s())  # clocks may differ
            text = f"{self.lost.reason}; {self.lost.steps} steps lost, {recover_s:.0f} s to the first step"
            logger.warning(text)
            self.recorder.fault(text, steps_lost=self.lost.steps, recover_s=recover_s)
            self.lost = None
        if self.life.watch.is_dead and not self.told_of_watchdog:
            self.told_of_watchdog = True
            self.recorder.alarm("the watchdog process of this machine is gone: a rank that is stuck stays so")
        self._tell_of_saves()
        return self.saver.failure or self.life.failure

    def _tell_of_saves(self) -> list[Saved]:
        saves = self.saver.take()
        for saved in saves:
            self.recorder.saved(saved)
        self.life.checkpoint = self.saver.newest
        if self.life.notices is not None:
            self.life.notices.save_s = self.saver.save_s
        return saves

    def is_due(self, num_asked: float) -> bool:
        """Whether to save after this step, which is not the last. `num_asked`: ranks that were asked to save soon. The
        first step after a rollback is saved too: that it was done, and past which data, must not be forgotten.
        """
        progress, cfg = self.recorder.progress, self.cfg.checkpoint
        is_best = cfg.best and progress.best_step == progress.step
        is_after_rollback = self.last_rollback is not None and progress.step == self.last_rollback + 1
        return progress.step % cfg.every == 0 or num_asked > 0 or is_best or is_after_rollback

    def save(self, metric: float | None, *, is_last: bool) -> None:
        """`metric`: of this step's evaluation, if there was one. The last save waits for the one before, and so does
        that of the best evaluation, if it is what will be exported.
        """
        if self.cfg.collect_graphs:
            return
        progress, window = self.recorder.progress, self.recorder.window
        asked = self.life.stop.saves_soon
        if asked is not None:
            logger.info("step %d: saving, as asked by %s", progress.step, asked)
            self.life.stop.saved()
        progress.attempts_s = self.life.folder.clock.attempts_s()
        progress.window = {**dataclasses.asdict(window), "wait_s": 0.0, "work_s": 0.0}
        own = {
            "loss_sum": float(self.backend.read([self.engine.loss_sum])[0]),
            "wait_s": window.wait_s,
            "work_s": window.work_s,
        }
        beat, must = self.life.watch.beat, is_last or (self.cfg.best.export and progress.best_step == progress.step)
        left_s = last_save_patience_s(self.cfg, self.life.began_s) if is_last else 0.0
        state = (progress, self.model, self.optimizer, own)
        self.saver.save(*state, metric=metric, must=must, patience_s=left_s, beat=beat)

    def roll_back(self) -> Progress:
        """Weights, optimizer and step as the newest checkpoint has them; the data goes on where it is, so that what
        brought the run here is not seen again. A second time from the same checkpoint, the one before is taken.

        Raises:
            FloatingPointError: there is no checkpoint to go back to, or this happened too often.
        """
        now, limit, skips = self.recorder.progress, self.cfg.nonfinite.max_rollbacks, self.recorder.skips_in_a_row
        text = f"{skips} steps in a row had no finite gradient, up to step {now.step}"
        if skips > self.cfg.nonfinite.max_skips:
            text += f" (nonfinite.max_skips={self.cfg.nonfinite.max_skips}, and this device counts by itself: it is "
            text += f"asked every log_every={self.cfg.log_every} steps)"
        self.life.watch.phase("roll back", is_start=True)
        self.saver.wait(self.life.watch.beat)
        self.look()
        if now.rollbacks >= limit:
            raise FloatingPointError(
                f"{text}, after {now.rollbacks} rollbacks (nonfinite.max_rollbacks); lower optim.lr?"
            )
        if self.optimizer is not self.built:
            raise FloatingPointError(f"{text}; with backend.zero1 only a new start goes back to the last checkpoint")
        together(self.backend, self._put_aside_what_failed if self.backend.rank == 0 else lambda: None)
        loaded = self._load()
        if not loaded.ranks:
            raise FloatingPointError(f"{text}, and there is no checkpoint to go back to; lower optim.lr?")
        progress = loaded.progress
        self.last_rollback = progress.step
        progress.examples, progress.rollbacks, progress.skipped = now.examples, now.rollbacks + 1, now.skipped
        self.backend.reset_skips()
        self.backend.settle()
        self.recorder.go_back(progress)
        self._put_back_window(loaded)
        self.recorder.alarm(
            f"{text}: back to step {progress.step}, and on with other data (rollback {progress.rollbacks} of {limit})"
        )
        return progress

    def _put_aside_what_failed(self) -> None:
        """What the last rollback went back to, if the run has come no further and older ones are left."""
        self.life.folder.check_owner()
        last, steps = self.last_rollback, self.store.steps()
        since = [step for step in steps if last is not None and step in (last, last + 1)]
        if since and since[-1] == steps[-1] and len(since) < len(steps):
            for step in since:
                self.store.put_aside(step, "rolled-back")

    # ---- at the end ----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Until the last save is committed. Raises SavesFail on all ranks if it failed."""
        self.saver.wait(self.life.watch.beat)
        saves = self._tell_of_saves()
        failure = None
        if saves and saves[-1].failure is not None and not saves[-1].num_bytes:  # of earlier ones there was an alarm
            failure = f"saving step {saves[-1].step}: {saves[-1].failure}; {self.saver.newest_text}"
        failure = self.backend.share(failure)[0]
        if failure is not None:
            raise SavesFail(failure)

    def facts(self) -> dict[str, Any]:
        """For the summary, on rank 0: what saving cost, what faults cost, and how often to save."""
        stalls_s = self.saver.stalls_s
        if self.backend.rank != 0 or not stalls_s:
            return {}
        return goodput.facts(
            self.life.folder.metrics,
            wall_s=self.life.folder.clock.run_s(),
            stall_s=sum(stalls_s) / len(stalls_s),
            save_s=self.saver.save_s,
            step_s=self.recorder.train_s / max(1, self.recorder.steps_done),
            max_loss_s=self.cfg.checkpoint.max_loss_s,
        )

    def put_best(self) -> None:
        """Give the model of rank 0 the weights of the best evaluation, now that there is nothing more to train. If they
        were not saved, or are damaged, those of the best that was.
        """
        progress, whole = self.recorder.progress, self._manifests()
        while (found := best(whole)) is not None:
            if found != progress.best_step:
                text = "the best evaluation was at step %s, which is not to be had: exporting step %d"
                logger.warning(text, progress.best_step, found)
            if found == progress.step:
                return
            try:
                path = self.store.fetch(found)
            except Damaged as error:
                logger.warning("step %d is damaged: %s", found, error)
                del whole[found]
                continue
            logger.info("exporting step %d, the best by %s", found, self.cfg.best.metric)
            self.model.load_state_dict(read(path / "model.pt", self.backend))
            self.store.let_go(path)
            return

    def _manifests(self) -> dict[int, Manifest]:
        """Of the checkpoints that have one."""
        found = {}
        for step in self.store.steps():
            with suppress(Damaged):  # nothing to choose from
                found[step] = self.store.look(step)
        return found

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What is being saved is worth waiting for, unless the run is to leave at once."""
        self.saver.close(waits=kind is not SystemExit)


def last_save_patience_s(cfg: TrainConfig, began_s: float) -> float:
    """How long the last save is tried again: no longer than this start of the run may take."""
    left_s = math.inf if cfg.max_run_s is None else began_s + cfg.max_run_s - time.monotonic()
    return max(0.0, min(cfg.checkpoint.patience_s, left_s))
