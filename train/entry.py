"""The entry point of `baretrain train`, from the command line to the exit code and the end of torchrun."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from train.config import InputError, TrainConfig, plural
from train.machine import rank_setup
from train.machine.console import RESULT, note, say, use_console
from train.machine.launched import launched
from train.machine.runtime import search_rarely
from train.machine.torchrun import end_torchrun, first_to
from train.run import compose as cli
from train.run.early import check_early
from train.run.stopping import StoppedEarly, StopRequest
from train.run_folder.outcome import ENDS, may_continue, read_outcome, what_is_over
from train.run_folder.run_folder import RunFolder
from train.storage.folders import is_s3

logger = logging.getLogger("train")

USED = (
    "run_dir",
    "data.path",
    "seed",
    "max_steps",
    "max_epochs",
    "max_examples",
    "max_run_s",
    "global_batch_size",
    "micro_batch_size",
    "seq_len",
    "optim.lr",
    "log_every",
    "eval_every",
    "checkpoint.every",
    "checkpoint.keep",
    "model.pretrained",
    "backend.device",
    "backend.precision",
    "data.num_workers",
    "export",
    "s3.endpoint",
)


def main(arguments: Sequence[str]) -> int:
    """Run the command `baretrain train`, and return the exit code."""
    parser = cli.settings_parser(
        "train",
        TrainConfig,
        "Train a model, with or without torchrun. The same command resumes a run where it stopped.",
        examples=(
            "experiment=demo data.path=data/mine run_dir=runs/mine max_steps=5000",
            "torchrun --standalone --nproc-per-node=8 -m train experiment=albert_pretrain data.path=s3://bucket/mine",
            "experiment=tweets_trainium data.path=tweets.csv model.pretrained=runs/mine run_dir=runs/tweets",
        ),
        keys=USED,
    )
    code = cli.run(TrainConfig, attempt, parser, arguments=arguments)
    if code == cli.REJECTED:  # every restart would be rejected too
        end_torchrun()
    return code


def attempt(cfg: TrainConfig) -> int:
    """Train until the run ends or fails, and return the exit code. Does not catch InputError."""
    use_console("stdout")
    launch = launched()
    if launch.restart_count > 0:
        over = what_is_over(read_outcome(RunFolder(cfg.run_dir, cfg.s3).storage))
        if over:
            return not_again(over)
    if launch.rank == 0:
        check_early(cfg, launch.world_size)
        ranks = plural(launch.world_size, "rank")
        # Importing torch takes several seconds.
        note(f"starting {cfg.run_dir}: {ranks}", *how_it_learns(cfg))
    rank_setup.prepare(launch, forks=cfg.data.num_workers > 0)
    search_rarely()  # garbage is collected rarely until `loop.run` has imported the task
    # Without this variable, transformers imports accelerate, if installed, which imports torch_xla. That wastes two
    # seconds, and is too early: the backend has not yet set the variables that torch_xla reads.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    with StopRequest() as stop:
        return code_of_run(cfg, stop)


def not_again(over: Mapping[str, Any]) -> int:
    """End torchrun, which starts the ranks again although the run is over. Returns the exit code of its `outcome`."""
    with first_to("over") as is_first:  # one rank per machine prints this and ends torchrun
        if is_first:
            outcome = f"outcome {over['outcome']} ({over['reason']})"
            say(f"not started again: {outcome}", file=sys.stderr)
    end_torchrun()
    return {"done": cli.DONE, "stopped": cli.STOPPED}.get(over["outcome"], cli.FAILED)


def code_of_run(cfg: TrainConfig, stop: StopRequest) -> int:
    """Train, report how that ended, and return the exit code."""
    # These modules import torch, which takes seconds, so they are imported only after the settings are checked. If a
    # signal arrives during the import, `loop.run` obeys it.
    from train import loop
    from train.parallel.ranks import AGREED
    from train.run.attempt import kind_of

    launch = launched()
    try:
        reason, step = loop.run(cfg, stop)
    except InputError:
        raise
    except StoppedEarly as signal:
        if launch.rank == 0:  # the log may not be open yet
            why = f"stopped on {signal} before there was anything to save"
            say(f"{why}; the same command starts it again", file=sys.stderr)
        return cli.STOPPED
    except SystemExit as error:  # a second signal arrived: exit without waiting for a save
        leave_at_once(int(error.code or cli.FAILED))
    except BaseException as error:
        # all ranks raise the same error, so none waits for another
        is_agreed = isinstance(error, AGREED)
        logger.error("failed: %s", error, exc_info=not is_agreed)
        if not may_continue(kind_of(error), ""):
            end_torchrun()
        if launch.world_size > 1 and not is_agreed:
            # waiting for the other ranks could hang; torchrun ends them
            leave_at_once(cli.FAILED)
        return cli.FAILED
    return code_of_end(cfg, reason, step)


def code_of_end(cfg: TrainConfig, reason: str, step: int) -> int:
    """Log how a run ended, and return the exit code."""
    if reason in ENDS:
        flags = cfg.s3.flags() if is_s3(cfg.run_dir) else []
        command = shlex.join([cfg.run_dir, *flags])
        logger.log(RESULT, "%s at step %d: baretrain report %s", reason, step, command)
        return cli.DONE
    text = "stopped on %s at step %d with a checkpoint; the same command resumes the run"
    logger.log(RESULT, text, reason, step)
    if launched().is_under_torchrun:
        text = "torchrun reports exit code %d as a failure, but the run only stopped as requested"
        text += "; after a signal, torchrun ends with a traceback"
        logger.info(text, cli.STOPPED)
    return cli.STOPPED


def how_it_learns(cfg: TrainConfig) -> list[str]:
    """Return what a run from other weights does with them, since nobody may have typed it."""
    if cfg.model.pretrained is None:
        return []
    lengths = {"epoch": cfg.max_epochs, "step": cfg.max_steps, "sequence": cfg.max_examples}
    given = [
        f"{value:g} {unit if value == 1 else unit + 's'}"
        for unit, value in lengths.items()
        if value
    ]
    length = " or ".join(given)
    batch = cfg.global_batch_size or f"{cfg.micro_batch_size} per rank"
    optim = cfg.optim
    warmup = f"{optim.warmup_fraction:.0%} of the steps"
    if optim.warmup_steps is not None:
        warmup = plural(optim.warmup_steps, "step")
    says = f"batches of {batch}, learning rate {optim.lr:g} after a warm-up of {warmup}"
    decay = f"weight decay {optim.weight_decay:g}"
    return [f"from the weights of {cfg.model.pretrained}: {length}, {says}, {decay}"]


def leave_at_once(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
