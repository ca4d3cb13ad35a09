"""`python -m train key=value ...`, alone or under torchrun: one training run."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys

from train import cli
from train.config import InputError, TrainConfig, launched_rank, launched_world_size
from train.outcome import Over, check_restart, is_restart
from train.preempt import StopRequest
from train.run_folder import RunFolder
from train.storage import is_s3
from train.watchdog import die_with_launcher

logger = logging.getLogger("train")


def main() -> int:
    return cli.run(TrainConfig, train_once)


def train_once(cfg: TrainConfig) -> int:
    """Run to an end of whatever kind. Gives the exit code (see cli)."""
    try:
        if is_restart():
            check_restart(RunFolder(cfg.run_dir, cfg.s3).last_outcome())
    except Over as over:
        if launched_rank() == 0:
            print(over, file=sys.stderr)
        if os.environ.get("LOCAL_RANK") == "0":
            os.kill(os.getppid(), signal.SIGTERM)  # torchrun would start it again and again
        return {"done": cli.DONE, "stopped": cli.STOPPED}.get(over.outcome, cli.FAILED)

    from train import loop  # torch takes seconds to import: what is refused is refused before
    from train.life import ENDS

    with StopRequest() as stop:
        die_with_launcher()
        try:
            reason, step = loop.run(cfg, stop)
        except InputError:
            raise
        except SystemExit as error:  # on a second signal: not even what is being saved is waited for
            logging.shutdown()
            os._exit(int(error.code or cli.FAILED))
        except loop.TOGETHER as error:  # all ranks have left in order
            logger.error("failed: %s", error)
            return cli.FAILED
        except BaseException as error:
            logger.exception("failed: %s", error)
            if launched_world_size() > 1:
                # Waiting for the other ranks, or for gloo's threads, could hang; torchrun ends the others.
                logging.shutdown()
                os._exit(cli.FAILED)
            return cli.FAILED
    if reason in ENDS:
        flags = cfg.s3.flags() if is_s3(cfg.run_dir) else []
        logger.info("%s at step %d: python -m train.report %s", reason, step, shlex.join([cfg.run_dir, *flags]))
        return cli.DONE
    logger.info("stopped on %s at step %d with a checkpoint; the same command goes on", reason, step)
    return cli.STOPPED


if __name__ == "__main__":
    sys.exit(main())
