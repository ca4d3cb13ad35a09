"""The command `baretrain hub RUN --to user/name [--public]`, which pushes a run to the Hub."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from train.config import S3Config
from train.machine.console import say
from train.observe.push import check_name, gathered, run_here, send
from train.run.command import (
    DONE,
    EXITS,
    FAILED,
    REJECTED,
    add_s3_flags,
    command_parser,
    run_flags,
)
from train.run_folder.run_folder import RunFolder


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(
        "hub",
        "Push the exported model of a run to the Hugging Face Hub, with its tokenizer and card.",
        examples=(
            "runs/tweets --to jane/tweets-bert",
            "runs/tweets --to jane/tweets-bert --public",
            "s3://bucket/runs/tweets --to jane/tweets-bert --public",
        ),
        exits={
            **EXITS,
            FAILED: "the Hub or S3 did not answer",
            REJECTED: "arguments or push rejected",
        },
        imports=True,
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="run_dir of a run that has ended: a folder or s3://bucket/prefix",
    )
    parser.add_argument(
        "--to",
        metavar="USER/NAME",
        required=True,
        help="repository on the Hub, created if missing",
    )
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument(
        "--private", action="store_true", help="only its owners can see it (the default)"
    )
    seen.add_argument("--public", action="store_true", help="everybody can see it")
    add_s3_flags(parser)
    return run_flags(parser, arguments, act)


def act(options: argparse.Namespace, s3: S3Config) -> int:
    check_name("--to ", options.to)
    folder = RunFolder(options.run, s3)
    with run_here(folder, options.cache_dir) as run:
        say(send(gathered(run), options.to, private=not options.public))
    return DONE
