"""`python -m train key=value ...`, alone or under torchrun: one training run."""

from __future__ import annotations

import logging
import os
import sys

from train import cli
from train.config import InputError, TrainConfig, Unreachable, launched_world_size
from train.preempt import StopRequest
from train.run_folder import RunFolder

logger = logging.getLogger("train")


def main() -> int:
    return cli.run(TrainConfig, train_once)


def train_once(cfg: TrainConfig) -> int:
    """Run and leave word of how it ended. Gives the exit code (see cli)."""
    from train import loop  # torch takes seconds to import: a wrong setting is refused before

    folder = RunFolder(cfg.run_dir)
    with StopRequest() as stop:
        try:
            reason, step = loop.run(cfg, stop)
        except InputError:
            raise
        except Unreachable as error:  # all ranks have left in order
            folder.exit_file(f"failed: {error}", None)
            logger.error("failed: %s; the same command goes on", error)
            return cli.FAILED
        except SystemExit:
            folder.exit_file(f"left at once on a second {stop.reason}", None)
            raise
        except BaseException as error:
            logger.exception("failed: %s", error)
            folder.exit_file(f"failed: {type(error).__name__}: {error}", None)
            if launched_world_size() > 1:
                # Waiting for the other ranks, or for gloo's threads, could hang; torchrun ends the others.
                logging.shutdown()
                os._exit(cli.FAILED)
            return cli.FAILED
    folder.exit_file(reason, step)
    if reason in ("done", "early_stop"):
        logger.info("%s at step %d: python -m train.report %s", reason, step, cfg.run_dir)
        return cli.DONE
    logger.info("stopped on %s at step %d with a checkpoint; the same command goes on", reason, step)
    return cli.STOPPED


if __name__ == "__main__":
    sys.exit(main())
