"""The command `baretrain ami neuron | cuda key=value ...`: it plans a machine image, and builds it with build=true.

The subcommands list, verify, promote, prune and clean are in ami/commands.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from ami import commands
from ami.build import build
from ami.config import IMAGES, AmiConfig
from ami.plan import make_plan, plan_lines
from launch.ec2.api import Api
from train.config import InputError
from train.machine.console import say
from train.run import compose as cli
from train.run.command import guarded

USED = ("base", "build", "regions", "subnet", "compile_cache", "wheel")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.main(arguments)
    cli.add_schema(AmiConfig, "ami", [])
    others = list(commands.COMMANDS)[:5]  # the remaining commands are for use on an image
    parser = cli.settings_parser(
        "ami",
        AmiConfig,
        "Plan a machine image, neuron or cuda; build=true builds it (needs Packer). Other commands: "
        f"{' | '.join(others)}.",
        examples=(
            "neuron",
            "neuron base=ubuntu regions=[us-east-1,us-west-2] build=true",
            "promote ami-... --yes",
        ),
        keys=USED,
    )
    names = [each for each in arguments if each in IMAGES]
    rest = [each for each in arguments if each not in IMAGES]
    given = [f"image={names[0]}", f"instance={IMAGES[names[0]]}"] if len(names) == 1 else []
    is_help = any(each in ("-h", "--help", "--version") for each in rest)

    def reject() -> int:
        words = " ".join(arguments) or "nothing"
        raise InputError(
            f"{words}: name one image, {' or '.join(IMAGES)}, or one of {', '.join(others)}"
        )

    if not given and not is_help:
        return guarded(reject)
    return cli.run(AmiConfig, plan_and_build, parser, arguments=rest, given=given)


def plan_and_build(cfg: AmiConfig) -> int:
    """Show the plan of a build and, with build=true, run it."""
    api = Api()
    plan = make_plan(api, cfg, datetime.now(UTC))
    say(*plan_lines(plan))
    if not cfg.build:
        say("nothing was started; build=true builds the image")
        return cli.DONE
    images = build(api, plan)
    for region, image in images.items():
        say(f"made {image} in {region}")
    regions = " ".join(f"--region {region}" for region in images)
    say(
        f"to let launch use it: baretrain ami promote {images[plan.variables['region']]} {regions} --yes"
    )
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
