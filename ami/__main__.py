"""The command `baretrain ami neuron | cuda key=value ...`: it plans a machine image, and builds it with build=true.

`promote` lets launches use an image; `manifest` runs on an image while it is built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ami import manifest, promote
from ami.build import plan_and_build
from ami.config import IMAGES, AmiConfig
from train.config import InputError
from train.run import compose as cli
from train.run.command import Parser, command_parser, guarded

USED = ("base", "build", "regions", "subnet")
EXAMPLES = ("neuron", "neuron base=ubuntu regions=[us-east-1,us-west-2] build=true")
IMAGE = "ami-0123456789abcdef0"


@dataclass(frozen=True)
class Command:
    purpose: str
    examples: tuple[str, ...]
    add_flags: Callable[[Parser], None]
    act: Callable[[argparse.Namespace], int]


COMMANDS = {
    "promote": Command(
        "Make launch use an image; to go back, promote an older one.",
        (IMAGE, f"{IMAGE} --region us-east-1 --yes"),
        promote.add_flags,
        promote.promote,
    ),
    "manifest": Command(
        "On an image: write the installed versions.",
        ("manifest.json",),
        manifest.manifest_flags,
        manifest.write_manifest,
    ),
}


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    if words:
        first = words[0]
    else:
        first = "nothing"
    if first in COMMANDS:
        return act(first, words[1:])
    if first in IMAGES:
        given = [f"image={first}", f"instance={IMAGES[first]}"]
        return cli.run(
            AmiConfig, plan_and_build, settings_parser(), arguments=words[1:], given=given
        )
    if first in ("-h", "--help", "--version"):
        return cli.run(AmiConfig, plan_and_build, settings_parser(), arguments=words)
    return guarded(lambda: reject(first))


def settings_parser() -> Parser:
    cli.add_schema(AmiConfig, "ami", [])
    purpose = (
        "Plan a machine image, neuron or cuda; build=true builds it (needs Packer). Then: promote."
    )
    return cli.settings_parser("ami", AmiConfig, purpose, examples=EXAMPLES, keys=USED)


def act(name: str, arguments: Sequence[str]) -> int:
    """Run one of COMMANDS; return the exit code."""
    command = COMMANDS[name]
    parser = command_parser(f"ami {name}", command.purpose, examples=command.examples)
    command.add_flags(parser)
    return guarded(lambda: command.act(parser.parse_args(arguments)))


def reject(first: str) -> int:
    raise InputError(f"{first}: name an image, {' or '.join(IMAGES)}, or a command, promote")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
