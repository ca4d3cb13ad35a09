"""The command line of `baretrain bench key=value ...`, which works with or without torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence

from train.config import Failure, check
from train.machine import rank_setup
from train.machine.launched import launched
from train.machine.runtime import search_rarely
from train.machine.torchrun import end_torchrun
from train.run import compose as cli
from train.storage.folders import local_path
from train.tools.bench.config import BenchConfig

USED: tuple[str, ...] = (
    "steps",
    "warmup",
    "output",
    "data.path",
    "global_batch_size",
    "micro_batch_size",
)
USED += ("backend.device", "backend.precision")


def main(arguments: Sequence[str]) -> int:
    given = list(arguments)
    settings = [each for each in given if "=" in each and not each.startswith("-")]
    cli.add_schema(BenchConfig, "bench", [])
    parser = cli.settings_parser(
        "bench",
        BenchConfig,
        "Measure how fast a run would train on this machine. It trains for a few steps and saves nothing.",
        examples=(
            "experiment=demo output=bench.json",
            "torchrun --standalone --nproc-per-node=8 -m train bench experiment=albert_pretrain instance=p5.48xlarge",
            "experiment=albert_pretrain global_batch_size=512 micro_batch_size=64 instance=p5.4xlarge",
        ),
        keys=USED,
    )
    code = cli.run(BenchConfig, lambda cfg: act(cfg, settings), parser, arguments=given)
    if code != cli.DONE:
        end_torchrun()
    return code


def act(cfg: BenchConfig, settings: Sequence[str]) -> int:
    # Check the path now, so that a long measurement is not lost at its end.
    if cfg.output is not None:
        file = local_path(cfg.output)
        check(not file.is_dir(), f"output={cfg.output} is a folder; it must be the name of a file")
        folder = file.parent
        check(
            os.access(folder, os.W_OK), f"output={cfg.output}: {folder} is not a writable folder"
        )
    try:
        rank_setup.prepare(launched(), forks=cfg.data.num_workers > 0)
        search_rarely()  # Garbage is collected rarely until `loop.run` has imported the task.
        from train.tools.bench import measure  # torch takes seconds to import

        return measure.run(cfg, settings)
    except KeyboardInterrupt as error:
        raise Failure("interrupted") from error
