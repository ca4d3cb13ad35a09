"""The program `baretrain COMMAND ...`: `baretrain train` runs `baretrain train`.

`baretrain report` runs `baretrain report`, and `baretrain launch` runs `baretrain launch`. The program works in
any folder, even in one that contains a file `train.py`.
"""

from __future__ import annotations

import os
import runpy
import sys

import train
from train.machine.console import say

COMMANDS = {
    "train": "train a model; on N ranks: torchrun --standalone --no-python --nproc-per-node=N baretrain train ...",
    "prepare": "turn a corpus into shards for pretraining",
    "records": "describe labelled examples: classes, lengths, bad rows",
    "shards": "show or verify prepared shards",
    "report": "write a page about one or more runs",
    "compare": "run variants of an experiment and compare them",
    "bench": "measure how fast a run would train on this machine",
    "precompile": "compile the graphs of a run before it starts",
    "doctor": "check whether this machine can train",
    "checkpoints": "list, verify, prune or export the checkpoints of a run",
    "evaluate": "compute the metrics of a trained model, on any number of ranks",
    "predict": "print a model's predictions for new rows",
    "hub": "push a run to the Hugging Face Hub",
    "launch": "plan and start runs on Slurm, EC2 or this machine",
    "ami": "build machine images",
    "settings": "print every setting of every command, with its default and meaning",
}
PACKAGES = ("train", "launch", "ami")


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        say(f"baretrain {train.__version__}")
        return 0
    if name in ("--help", "-h"):
        say("usage: baretrain COMMAND ...", "")
        say(*(f"  {command:<12} {purpose}" for command, purpose in COMMANDS.items()))
        say("", "baretrain COMMAND --help explains a command.")
        return 0
    if name not in COMMANDS:
        say(
            f"error: there is no command {name}; choose one of: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    train.begin()
    # Child processes must not import modules from the current folder.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    module = name if name in PACKAGES else f"train.{name}"
    sys.argv[:2] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
