"""One attempt at a run, from the command line to the exit code (see `train.cli`), and what torchrun does after it."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from collections.abc import Sequence

from train.attempt.preempt import StoppedEarly, StopRequest
from train.attempt.refusal import inform_others
from train.cli import compose as cli
from train.cli.console import use_console
from train.config import InputError, TrainConfig
from train.host import cluster
from train.host.garbage import search_rarely
from train.host.launched import Launched, launched
from train.host.launcher import end_launcher, leave_it_to_the_first
from train.run_folder.folder import RunFolder
from train.run_folder.outcome import Over, check_restart, is_restart, may_go_on
from train.storage.folders import is_s3

logger = logging.getLogger("train")
QUIET_S = 1.0  # if importing torch and opening the data take longer, a line says that the run has begun

USED: tuple[str, ...] = ("run_dir", "data.path", "seed", "max_steps", "max_epochs", "max_examples", "max_run_s")
USED += ("global_batch_size", "micro_batch_size", "seq_len", "optim.lr", "log_every", "eval_every", "checkpoint.every")
USED += ("checkpoint.keep", "model.pretrained", "model.init_from", "backend.device", "backend.precision")
USED += ("data.num_workers", "export", "s3.endpoint")


def attempt(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says. Returns the exit code."""
    parser = cli.settings_parser(
        "train",
        TrainConfig,
        "Train a model: one run, alone or as one rank of torchrun. The same command resumes it where it stopped.",
        examples=(
            "experiment=demo data.path=data/mine run_dir=runs/mine max_steps=5000",
            "torchrun --nproc-per-node=8 -m train experiment=albert_pretrain data.path=s3://bucket/mine",
            "experiment=tweets_trainium data.path=tweets.csv model.init_from=runs/mine run_dir=runs/tweets",
        ),
        keys=USED,
    )
    has_begun = False  # an error before that would come again at every restart

    def begin(cfg: TrainConfig) -> int:
        nonlocal has_begun
        has_begun = True
        return train_once(cfg)

    code = cli.run(TrainConfig, begin, parser, arguments=arguments, after_refusal=inform_others)
    if code == cli.REFUSED or (code == cli.FAILED and not has_begun):
        end_launcher()
    return code


def train_once(cfg: TrainConfig) -> int:
    """Run until the attempt ends, in whatever way. Returns the exit code."""
    use_console("stdout")
    launch = launched()
    try:
        if is_restart():
            check_restart(RunFolder(cfg.run_dir, cfg.s3).last_outcome())
    except Over as over:
        if launch.rank == 0:
            print(over, file=sys.stderr)
        end_launcher_for_good(launch)
        return {"done": cli.DONE, "stopped": cli.STOPPED}.get(over.outcome, cli.FAILED)
    starting = f"starting {cfg.run_dir}: {launch.world_size} rank{'s' if launch.world_size > 1 else ''}"
    announcement = threading.Timer(QUIET_S, print, [starting], {"file": sys.stderr})
    announcement.daemon = True
    if launch.rank == 0:
        announcement.start()
    try:
        return train(cfg, launch)
    finally:
        announcement.cancel()


def train(cfg: TrainConfig, launch: Launched) -> int:
    cluster.prepare(launch, forks=cfg.data.num_workers > 0)
    search_rarely()  # until `loop.run` has imported the task
    # transformers imports accelerate where it finds it, and accelerate torch_xla, unless this variable says otherwise:
    # two seconds for nothing, and before the backend has set what torch_xla reads.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    from train import loop  # late: torch takes seconds to import, and refusals come before
    from train.attempt.attempt import ENDS, kind_of
    from train.ranks import AGREED

    with StopRequest() as stop:
        try:
            reason, step = loop.run(cfg, stop)
        except InputError:
            raise
        except StoppedEarly as signal:
            if launch.rank == 0:  # the log may not be open yet
                why = f"stopped on {signal} before there was anything to save"
                print(f"{why}; the same command starts it again", file=sys.stderr)
            return cli.STOPPED
        except SystemExit as error:  # a second signal, after which not even a save is waited for
            logging.shutdown()
            os._exit(int(error.code or cli.FAILED))
        except AGREED as error:  # all ranks have left in order
            logger.error("failed: %s", error)
            if not may_go_on(kind_of(error), ""):
                end_launcher_for_good(launch)
            return cli.FAILED
        except BaseException as error:
            logger.exception("failed: %s", error)
            if not may_go_on(kind_of(error), ""):
                end_launcher_for_good(launch)
            if launch.world_size > 1:
                # Waiting for the other ranks, or for gloo's threads, could hang; torchrun ends the others.
                logging.shutdown()
                os._exit(cli.FAILED)
            return cli.FAILED
    if reason in ENDS:
        flags = cfg.s3.flags() if is_s3(cfg.run_dir) else []
        logger.info("%s at step %d: python -m train.report %s", reason, step, shlex.join([cfg.run_dir, *flags]))
        return cli.DONE
    logger.info("stopped on %s at step %d with a checkpoint; the same command resumes the run", reason, step)
    if launch.is_under_torchrun:
        logger.info("torchrun reports exit code %d as a failure; the run stopped as asked", cli.STOPPED)
    return cli.STOPPED


def end_launcher_for_good(launch: Launched) -> None:
    """Have the machine's first rank end torchrun; another rank does so only if that one does not."""
    leave_it_to_the_first(launch.local_rank)
    end_launcher()
