"""`baretrain COMMAND ...`, from any folder: `baretrain train` is `python -m train`.

`baretrain report` is `python -m train.report`, and `baretrain launch` is `python -m launch`; they also work in a folder
that has a `train.py`.
"""

from __future__ import annotations

import os
import runpy
import sys

import train

COMMANDS = {
    "train": "one training run; ranks: torchrun --standalone --no-python --nproc-per-node=N baretrain train ...",
    "prepare": "a corpus becomes shards to pretrain on",
    "records": "what labelled examples are: classes, lengths, bad rows",
    "shards": "look into prepared shards, and verify them",
    "convert": "packed sequences of others to shards",
    "report": "one page on one run or more",
    "compare": "run variants of an experiment and compare them",
    "bench": "how fast a run would be here",
    "precompile": "compile the graphs of a run before it starts",
    "doctor": "is this machine fit to train?",
    "checkpoints": "list, verify, prune, export the checkpoints of a run",
    "evaluate": "metrics of a run or another model on labelled rows, on any number of ranks",
    "predict": "ask the model of a run",
    "hub": "push a run to the Hugging Face hub",
    "launch": "plan and start runs on Slurm, EC2 or this machine",
    "ami": "build machine images",
    "settings": "every setting of every command, with its default and meaning",
}
PACKAGES = ("train", "launch", "ami")


def main() -> int:
    """Run the command that the first argument names; its --help says more."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        print(f"baretrain {train.__version__}")
        return 0
    if name in ("--help", "-h"):
        print("usage: baretrain COMMAND ...\n")
        print(*(f"  {command:<12} {purpose}" for command, purpose in COMMANDS.items()), sep="\n")
        print("\nbaretrain COMMAND --help says more. python -m train.COMMAND is the same.")
        return 0
    if name not in COMMANDS:
        print(f"error: there is no command {name}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    train.begin()
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # for Python processes that are started: no module of this folder
    module = name if name in PACKAGES else f"train.{name}"
    sys.argv[:2] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
