"""The program `baretrain COMMAND ...` or `python -m train COMMAND ...`; `python -m train key=value ...` trains.

`baretrain` works in any folder, even in one that contains a file `train.py`. Both work under torchrun.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module

import train
from train.machine.console import say, use_console
from train.machine.torchrun import die_with_torchrun

# The module whose `main` each command calls, and what the command does. Modules are imported late: torch takes seconds.
COMMANDS = {
    "train": (
        "train.entry",
        "train a model; on N ranks: torchrun --nproc-per-node=N -m train ...",
    ),
    "finetune": (
        "train.tools.finetune",
        "fine-tune a published model on a file of labelled rows, with one command",
    ),
    "prepare": ("train.tools.prepare", "turn a corpus into shards for pretraining"),
    "records": ("train.tools.records", "describe labelled examples: classes, lengths, bad rows"),
    "shards": ("train.tools.shards", "show or verify prepared shards"),
    "report": ("train.tools.report", "write a page about one or more runs"),
    "compare": ("train.tools.compare", "run variants of an experiment and compare them"),
    "bench": ("train.tools.bench.command", "measure how fast a run would train on this machine"),
    "precompile": ("train.tools.precompile", "compile the graphs of a run before it starts"),
    "doctor": ("train.tools.doctor", "check whether this machine can train"),
    "checkpoints": (
        "train.tools.checkpoints",
        "list, verify or export the checkpoints of a run",
    ),
    "evaluate": (
        "train.tools.evaluate",
        "compute the metrics of a trained model, on any number of ranks",
    ),
    "predict": ("train.tools.predict", "print a model's predictions for new rows"),
    "hub": ("train.tools.hub", "push a run to the Hugging Face Hub"),
    "launch": ("launch.__main__", "plan and start runs on Slurm, EC2 or this machine"),
    "ami": ("ami.__main__", "build machine images"),
    "settings": (
        "train.tools.settings",
        "print every setting of every command, with its default and meaning",
    ),
}

COMPLETION = "--completion"
QUIET = "--quiet"
OF_FILES = {"corpus=text", "corpus=jsonl", "corpus=csv", "corpus=parquet", "corpus=pydocs"}
ON_RANKS = ("train", "finetune", "bench", "evaluate")  # torchrun may start these


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. Words that name no command are settings of a training run."""
    words = sys.argv[1:]
    if arguments is not None:
        words = arguments
    if words[:1] == [QUIET] and len(words) > 1:  # before the command instead of behind it
        words = [*words[1:], QUIET]
    first = next(iter(words), "--help")
    if first in COMMANDS:
        return run(first, words[1:])
    if first == "--version":
        say(f"baretrain {train.__version__}")
        return 0
    if first == COMPLETION:
        return run(first, words[1:])
    if first in ("--help", "-h"):
        show_commands()
        return 0
    if re.fullmatch("[a-z][a-z-]*", first):
        say(
            f"error: there is no command {first}; choose one of: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    return run("train", words)


def run(command: str, arguments: list[str]) -> int:
    if command in ON_RANKS:
        die_with_torchrun()  # before the imports: the rank must end even during them
    module = "train.tools.completion"
    if command != COMPLETION:
        module, _ = COMMANDS[command]
    code: int = import_module(module).main(arguments)
    return code


def show_commands() -> None:
    use_console("stdout")  # whoever reads it may close the pipe early
    lines = [f"  {command:<12} {purpose}" for command, (_, purpose) in COMMANDS.items()]
    say(
        "usage: baretrain COMMAND ...",
        "",
        *lines,
        "",
        "baretrain COMMAND --help explains a command.",
        f"baretrain {COMPLETION} bash (or zsh) prints a script that completes commands and settings.",
    )


def baretrain() -> int:
    """Run the program as the script `baretrain`, which any folder may start."""
    train.begin()
    # child processes import nothing from the current folder
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    return in_own_process()


def in_own_process() -> int:
    """Run the program in a process that does nothing else."""
    if sys.argv[1:2] == ["prepare"] and not OF_FILES.isdisjoint(sys.argv):
        leave_out_torch()
    return main()


def leave_out_torch() -> None:
    """Keep transformers from importing torch, which takes a second and which no tokenizer needs."""
    # `datasets`, which reads other corpora, imports torch if it finds this entry
    sys.modules["torch"] = None  # type: ignore[assignment]
    # transformers would say that there are no models
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


if __name__ == "__main__":
    sys.exit(in_own_process())
