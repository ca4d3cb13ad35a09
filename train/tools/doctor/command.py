"""The command line of `baretrain doctor`, which shows on one screen whether this machine can train.

`--collectives`, under torchrun, measures how fast ranks exchange data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from train.config import check
from train.machine import rank_setup
from train.machine.console import paint, say
from train.machine.host import instance_names
from train.machine.launched import check_launch, launched
from train.run.command import DONE, FAILED, REJECTED, command_parser, guarded
from train.run.rejection import inform_others
from train.tools.doctor import checks
from train.tools.doctor.probe import Finding, is_red, screen


def main(arguments: Sequence[str]) -> int:
    # Without --collectives this process is not a rank, even if a job's environment variables suggest that it is.
    after_rejection = inform_others if "--collectives" in arguments else lambda _: None
    return guarded(lambda: examine(read_arguments(arguments)), after_rejection=after_rejection)


def examine(options: argparse.Namespace) -> int:
    if options.collectives:
        return examine_collectives(options)
    check(options.mib is None, "--mib needs --collectives")
    probe = checks.here(
        instance=options.instance,
        num_ranks=options.ranks_per_machine,
        num_machines=options.machines or 1,
    )
    return show(checks.examine(probe), as_json=options.json)


def examine_collectives(options: argparse.Namespace) -> int:
    others = (options.instance, options.ranks_per_machine, options.machines)
    check(
        not any(others),
        "--collectives reads settings, such as instance=p5.48xlarge; leave out --instance, --ranks-per-machine and "
        "--machines",
    )
    from train.run.compose import load_backend  # Only --collectives needs Hydra and torch.

    cfg, instance = load_backend(options.settings)
    launch = launched()
    check_launch(instance, launch)
    check(
        launch.world_size > 1,
        f"--collectives measures between ranks, but there is only {launch.world_size}; start several: torchrun "
        f"--standalone --nproc-per-node={instance.devices or 2} -m train doctor --collectives",
    )
    # as in a run whose loader forks, before torch is imported
    rank_setup.prepare(launch, forks=True)
    from train.tools.doctor import collectives

    measured = collectives.measure(cfg, instance, mib=options.mib)
    findings = collectives.compare(measured, instance)
    if launch.rank > 0:  # All ranks have the same findings; rank 0 prints them.
        return FAILED if is_red(findings) else DONE
    return show(findings, as_json=options.json, measured=dataclasses.asdict(measured))


def show(findings: Mapping[str, Finding], *, as_json: bool, **more: Any) -> int:
    if as_json:
        listed = [
            {"name": name, **dataclasses.asdict(finding)} for name, finding in findings.items()
        ]
        say(
            *json.dumps(
                {"ok": not is_red(findings), "findings": listed, **more}, indent=1
            ).splitlines()
        )
    else:
        paint(
            *screen(
                findings,
                width=columns(),
                colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
            )
        )
    return FAILED if is_red(findings) else DONE


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser(
        "doctor",
        "Show on one screen whether this machine can train, with a cure for each fault.",
        examples=(
            "",
            "--instance trn1.32xlarge --json",
            "torchrun --standalone --nproc-per-node=8 -m train doctor --collectives backend=ddp instance=p5.48xlarge",
        ),
        exits={
            DONE: "there is nothing to fix",
            FAILED: "there is something to fix",
            REJECTED: "arguments rejected",
        },
    )
    parser.add_argument(
        "--instance",
        choices=instance_names(),
        help="instance type (default: as the firmware says)",
    )
    parser.add_argument(
        "--ranks-per-machine",
        type=positive,
        metavar="N",
        help="ranks to be started on this machine",
    )
    parser.add_argument(
        "--machines", type=positive, metavar="N", help="number of machines of the run (default: 1)"
    )
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="under torchrun, with settings of the run (key=value): measure how fast the ranks exchange data",
    )
    parser.add_argument(
        "--mib",
        type=positive,
        metavar="N",
        help="MiB to exchange (default: 64; accelerators: 512)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text"
    )
    if "--collectives" in arguments:
        parser.add_argument(
            "settings", nargs="*", metavar="key=value", help="settings, see baretrain train --help"
        )
        return parser.parse_intermixed_args(arguments)
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of 1 or more")
    return int(text)


def columns() -> int:
    return min(max(shutil.get_terminal_size().columns, 60), 120)
