"""The command `baretrain precompile torchrun ...`, which compiles a run's graphs before it starts.

It starts the given command, shortened, under AWS's neuron_parallel_compile. That program collects the graphs without
executing them, so all results are 0, and then compiles them in parallel. Start it on each machine of the run. Not run
on hardware: see "PyTorch NeuronX neuron_parallel_compile CLI" in Neuron's documentation.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.config import check
from train.machine import neuron
from train.machine.console import say
from train.machine.versions import read_versions
from train.parallel.xla_environment import COLLECTS
from train.run.command import DONE, FAILED, REJECTED, command_parser, guarded
from train.storage.caches import place_graphs

TOOL = "neuron_parallel_compile"
# A run builds different graphs in its first step, in steps that log, in steps that do not, and in its evaluation, for
# each of up to three batch lengths. A length that these steps do not need is compiled in the run.
SHORT = (
    "max_steps=16",
    "max_examples=null",
    "max_epochs=null",
    "optim.warmup_steps=null",  # a fixed number could exceed max_steps
    "log_every=2",
    "eval_every=null",  # the evaluation at the end remains
    "early_stop.patience=null",
    "export=false",
    "hub.push_to=null",
    "telemetry.trackers=[]",
)


def main(arguments: Sequence[str]) -> int:
    return guarded(lambda: precompile(parse(arguments)))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser(
        "precompile",
        "Compile every graph of a run on Trainium 1 before it starts.\n"
        "Put it before the command of the run, on each machine of the run.",
        examples=(
            "baretrain precompile torchrun --standalone --nproc-per-node=32 -m train experiment=albert_pretrain",
            "baretrain precompile torchrun --standalone --nproc-per-node=2 -m train experiment=tweets_trainium",
            "--dry-run torchrun --standalone --nproc-per-node=32 -m train experiment=albert_pretrain",
        ),
        exits={
            DONE: "all graphs compiled",
            FAILED: "a graph failed",
            REJECTED: "arguments rejected",
        },
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and its variables, and stop"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command of the run"
    )
    return parser.parse_args(arguments)


def precompile(options: argparse.Namespace) -> int:
    check(
        options.command[:1] == ["torchrun"],
        "give the command of the run: baretrain precompile torchrun --nproc-per-node=32 -m train ...",
    )
    fault = neuron.cache_fault(os.environ)
    check(fault is None, fault or "")
    added = environment(os.environ)
    run_dir = Path(tempfile.gettempdir()) / f"precompile-{os.getpid()}"
    command = [TOOL, *options.command, f'run_dir="{run_dir}"', *SHORT]
    for name, value in added.items():
        say(f"{name}={shlex.quote(value)}")
    say(shlex.join(command))
    if options.dry_run:
        return DONE
    check(
        shutil.which(TOOL) is not None,
        f"{TOOL} is not installed; on a machine with Trainium: {read_versions().sdk.install} (docs/trainium.md)",
    )
    environ = {**os.environ, **added, **place_graphs(os.environ)}
    say("compiling takes minutes per graph; ignore the losses and figures below")
    code = subprocess.run(command, env=environ, check=False).returncode
    shutil.rmtree(run_dir, ignore_errors=True)
    if code != 0:
        say(f"error: {TOOL} ended with exit code {code}, see above", file=sys.stderr)
        return FAILED
    say(
        "Start the run with the same settings, world size, compiler and variables: "
        "if one of these changes, graphs are compiled again."
    )
    return DONE


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the tool needs. Compiler flags are appended to the user's."""
    wanted = neuron.neuron_environment(environ, nodes=1, stochastic_rounding=False)
    return {
        "NEURON_CC_FLAGS": wanted["NEURON_CC_FLAGS"],
        # Neuron's default folder may belong to another user.
        "NEURON_COMPILE_CACHE_URL": neuron.cache_location(environ),
        # Neuron advises one retry for a trn1.2xlarge, whose 32 GiB may not hold all parallel compilers.
        "NEURON_PARALLEL_COMPILE_MAX_RETRIES": environ.get(
            "NEURON_PARALLEL_COMPILE_MAX_RETRIES", "1"
        ),
        COLLECTS: "1",
    }
