"""The command `baretrain precompile key=value ...`, which compiles the graphs of a run before it starts.

It accepts the settings of `baretrain train`, and must run on each machine of the run. On Trainium,
neuron_parallel_compile runs a few steps with NEURON_EXTRACT_GRAPHS_ONLY=1. These steps collect the graphs without
executing them, so all results are 0. The tool then compiles the graphs in parallel.

Not tested on hardware. Facts about the tool come from Neuron's documentation ("PyTorch NeuronX neuron_parallel_compile
CLI", SDK 2.29), its source in torch-neuronx 2.6 and, for the files in the cache, optimum-neuron's cache guide:

- It reads the list of graphs from the run's output, so this output must not be redirected.
- It writes its results to the current folder, so it is started in a temporary folder. `env --chdir` then starts the
  run in the user's folder.
- Its exit status is the number of failed graphs, or 1 if the run failed. Only its results tell these cases apart.
- With --retry_failed_compilation in NEURON_CC_FLAGS, running the same command again compiles failed graphs again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from train.config import Plan, RecordsConfig, TrainConfig, check, make_plan, plural
from train.data.records.table_facts import MOST_GRAPHS
from train.machine import host, neuron
from train.machine.console import say
from train.machine.launched import Launched, check_launch
from train.machine.versions import read_versions
from train.run import compose as cli
from train.run.command import command_parser, guarded
from train.storage.caches import place_graphs
from train.storage.imported import flags

TOOL = "neuron_parallel_compile"
CLEAR_LOCKS = f"if no other process compiles into the cache, run {TOOL} --command clear-locks"
RETRIES = "1"  # Neuron advises one retry for a trn1.2xlarge, whose 32 GiB may not hold all parallel compilers.
# These steps build every graph: step 1 has fresh state, step 2 logs, step 3 does not, step 4 logs and evaluates.
STEPS, LOG_EVERY = 4, 2
EXAMPLE = "experiment=albert_pretrain backend=xla instance=trn1.32xlarge"


@dataclass(frozen=True)
class ShortRun:
    """The command of a short run, the environment variables added to it, and where its files go."""

    command: list[str]  # command without Neuron's tool in front of it
    added: dict[str, str]
    cache: str
    plan: Plan
    work: Path  # local folder for the tool's results and the short run's run folder


def main(arguments: list[str]) -> int:
    stuck = f"interrupted; graphs that were being compiled are still locked: {CLEAR_LOCKS}"
    return guarded(lambda: run(parse(arguments)), interrupted=(stuck, cli.FAILED))


def run(options: argparse.Namespace) -> int:
    # A dry run does not create it.
    work = Path(tempfile.gettempdir()) / f"precompile-{os.getpid()}-{time.time_ns()}"
    short_run = build_short_run(options, os.environ, work=work)
    describe(short_run)
    if options.dry_run:
        return cli.DONE
    environ = {**os.environ, **short_run.added}
    check(
        shutil.which(TOOL, path=environ.get("PATH")) is not None,
        f"{TOOL} is not installed; on a machine with Trainium: {read_versions().sdk.install} (docs/trainium.md)",
    )
    place_graphs(environ, is_native=False)  # The tool uses the cache before any rank checks it.
    return precompile(short_run, environ)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "precompile",
        "Compile every graph of a run on Trainium 1 before it starts.\n"
        "Start it on each machine of the run, with the settings of the run. Under Slurm:\n"
        "srun --ntasks-per-node=1 baretrain precompile ...",
        examples=(
            f"{EXAMPLE} --dry-run",
            f"{EXAMPLE} --nnodes 2 --node-rank 0 --master-addr host0",
            "experiment=tweets_trainium data.path=tweets.csv run_dir=runs/tweets instance=trn1.2xlarge",
        ),
        exits={
            cli.DONE: "all graphs compiled",
            cli.FAILED: "a graph failed",
            cli.REJECTED: "arguments rejected",
        },
        imports=True,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, see baretrain train --help"
    )
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="N", help="ranks on this machine [instance.devices]"
    )
    parser.add_argument(
        "--nnodes", type=int, metavar="N", help="machines of the run [SLURM_NNODES, else 1]"
    )
    parser.add_argument(
        "--node-rank", type=int, metavar="R", help="index of this machine, from 0 [SLURM_NODEID]"
    )
    parser.add_argument(
        "--master-addr", metavar="HOST", help="host name of machine 0 [the first in Slurm's list]"
    )
    parser.add_argument(
        "--master-port", type=int, default=29500, metavar="PORT", help="port of machine 0 [29500]"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and its variables, and stop"
    )
    return parser.parse_intermixed_args(arguments)


# ---- the short run -------------------------------------------------------------------------------------------------


def build_short_run(
    options: argparse.Namespace, environ: Mapping[str, str], *, work: Path
) -> ShortRun:
    """Return the short run. Raises InputError if it cannot work with these settings, machines or cache."""
    check(
        "LOCAL_RANK" not in environ, "precompile starts the ranks itself; run it without torchrun"
    )
    cli.check_typed(TrainConfig, options.overrides)
    cfg = cli.load_config(TrainConfig, options.overrides)
    native = cfg.backend.name == "neuron" or (
        cfg.backend.name == "auto" and neuron.is_native(cfg.instance.name)
    )
    check(
        not native,
        "native PyTorch (trn2, trn3) compiles operators while it runs, so there are no graphs to compile before a run; "
        f"{neuron.NATIVE_CACHE} names the folder of the compiled operators",
    )
    check(
        cfg.backend.compile in ("none", "auto"),
        f"backend.compile={cfg.backend.compile}: a run compiles these graphs itself when it starts; start the run",
    )
    num_nodes, machines = find_machines(options, environ)
    ranks = (
        options.nproc_per_node if options.nproc_per_node is not None else cfg.instance.devices or 0
    )
    check(
        ranks > 0,
        f"ranks of this machine: {ranks}; set --nproc-per-node, or for example instance=trn1.32xlarge",
    )
    world = ranks * num_nodes
    check_launch(
        cfg.instance, Launched(world_size=world, local_world_size=ranks, is_distributed=True)
    )
    lengths = 1
    # The data is not opened here: assume the maximum number of lengths.
    if isinstance(cfg.data, RecordsConfig):
        lengths = MOST_GRAPHS if cfg.data.lengths == "auto" else len(cfg.data.lengths) + 1
    overrides = [*options.overrides, *short_run(work / "run", lengths=lengths)]
    cli.load_config(TrainConfig, overrides)
    # The data is not opened here: assume more rows than any plan needs.
    plan = make_plan(cfg, world_size=world, rows=2**62, seq_len=cfg.seq_len)
    added = environment(environ)
    cache, fault = neuron.cache_location(environ), neuron.cache_fault(environ)
    check(fault is None, fault or "")
    # Neuron's default folder may belong to another user.
    added["NEURON_COMPILE_CACHE_URL"] = cache
    # torchrun must run in the user's current folder, not in the tool's.
    torchrun = ["env", f"--chdir={Path.cwd()}", sys.executable, "-m", *machines]
    return ShortRun(
        command=[
            *torchrun,
            f"--nproc-per-node={ranks}",
            "-m",
            "train.tools.collect_graphs",
            *flags(),
            *overrides,
        ],
        added=added,
        cache=cache,
        plan=plan,
        work=work,
    )


def short_run(run_dir: Path, *, lengths: int = 1) -> list[str]:
    """Return overrides for a short run that builds every graph and saves nothing.

    Model, task, optimizer and batches are unchanged, since the graphs depend on them. Batches may have `lengths`
    different lengths, all of which occur in the first steps.
    """
    return [
        *(f'run_dir="{run_dir}"', f"log_every={LOG_EVERY}"),
        *("tensorboard=false", "telemetry.trackers=[]"),
        *(
            f"max_steps={STEPS * lengths}",
            "max_examples=null",
            "max_epochs=null",
            "data.verify=false",
        ),
        "optim.warmup_steps=null",  # A fixed number could exceed max_steps.
        *(
            "eval_every=null",
            "early_stop.patience=null",
        ),  # The evaluation at the end is kept for its graph.
        *("export=false", "best.export=false", "hub.push_to=null"),
    ]


def find_machines(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Return the number of machines (from options or Slurm, else 1), and this machine's torchrun module and flags."""
    count = options.nnodes if options.nnodes is not None else int(environ.get("SLURM_NNODES") or 1)
    check(count > 0, f"--nnodes={count} must be above 0")
    if count == 1:
        check(not options.node_rank, f"--node-rank={options.node_rank} needs --nnodes")
        return 1, ["train.machine.local_torchrun"]
    rank = (
        options.node_rank
        if options.node_rank is not None
        else int(environ.get("SLURM_NODEID") or -1)
    )
    check(0 <= rank < count, f"{count} machines: give --node-rank on each, from 0 to {count - 1}")
    task = environ.get("SLURM_LOCALID", "0")
    check(
        task == "0",
        f"this is Slurm task {task} of its machine; start only one: srun --ntasks-per-node=1",
    )
    master = options.master_addr or host.first_slurm_host(environ)
    check(master is not None, f"{count} machines: give --master-addr, the host name of machine 0")
    flags = [
        "torch.distributed.run",
        f"--nnodes={count}",
        f"--node-rank={rank}",
        f"--master-addr={master}",
    ]
    return count, [*flags, f"--master-port={options.master_port}"]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the tool needs and the user has not set. Compiler flags are appended to the user's.

    The backend sets the other variables of neuron.neuron_environment, in the short run as in the real one.
    """
    flags = neuron.neuron_environment(environ, nodes=1, stochastic_rounding=False)[
        "NEURON_CC_FLAGS"
    ]
    wanted = {
        "NEURON_PARALLEL_COMPILE_MAX_RETRIES": RETRIES,
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
    }
    added = {name: value for name, value in wanted.items() if not environ.get(name)}
    path, here = environ.get("PATH", ""), str(Path(sys.executable).parent)
    # The virtual environment is not active, so add the folder of its tools.
    if here not in path.split(os.pathsep):
        added["PATH"] = os.pathsep.join([path, here]) if path else here
    return {"NEURON_CC_FLAGS": flags, **added}


def describe(short_run: ShortRun) -> None:
    """Print the command, its variables, and the sizes on which the graphs depend."""
    for name, value in short_run.added.items():
        say(f"{name}={shlex.quote(value)}")
    say(shlex.join([TOOL, *short_run.command]))
    plan = short_run.plan
    sizes = f"world size {plan.world_size}, micro batch {plan.micro_batch_size}, accumulation {plan.accumulation}"
    say(f"{sizes}; compile cache {short_run.cache}")


# ---- running it ----------------------------------------------------------------------------------------------------


def precompile(short_run: ShortRun, environ: dict[str, str]) -> int:
    # The tool silently skips locked graphs.
    if locked := neuron.cached_graphs(short_run.cache, "*.lock"):
        say(f"{short_run.cache} holds {len(locked)} locks: {CLEAR_LOCKS}")
    say("compiling takes minutes per graph; ignore the losses and figures below")
    began_s = time.monotonic()
    short_run.work.mkdir()
    status = subprocess.run(
        [TOOL, *short_run.command], cwd=short_run.work, env=environ, check=False
    ).returncode
    results = read_results(short_run.work)
    if results is None and status != 0:
        return fail(f"the short run failed (exit status {status}), see above", short_run)
    graphs = results or {}
    took = f"in {time.monotonic() - began_s:.0f} s"
    if failed := find_failed(graphs):
        names = "\n  ".join(failed)
        count = f"{len(failed)} of {len(graphs)} graphs failed to compile {took}; the same command tries again"
        return fail(f"{count}:\n  {names}", short_run)
    if graphs:
        say(f"{plural(len(graphs), 'graph')} compiled {took}")
    elif neuron.cached_graphs(short_run.cache) == set():
        return fail(
            "the short run succeeded, but no graph was collected; does this backend use Trainium?",
            short_run,
        )
    else:
        say(
            f"no new graph ({took}): the cache has all graphs, unless another machine is compiling them now"
        )
    return finish(advice(short_run), short_run)


def finish(message: str, short_run: ShortRun) -> int:
    say(message)
    shutil.rmtree(short_run.work, ignore_errors=True)
    return cli.DONE


def fail(message: str, short_run: ShortRun) -> int:
    say(
        f"error: {message}",
        f"files of the tool and of the short run are in {short_run.work}",
        file=sys.stderr,
    )
    return cli.FAILED


def read_results(folder: Path) -> dict[str, bool] | None:
    """Return whether each graph was compiled, by the path of its HLO file; None if there are no readable results."""
    compiled: dict[str, bool] | None = None
    for path in sorted(folder.glob(f"{TOOL}_results_*.json")):  # sorted by the time in their names
        try:
            report = json.loads(path.read_bytes())["compilation_report"]
            compiled = (compiled or {}) | {
                str(graph): entry["status"] is True for graph, entry in report.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            say(
                f"{path.name} does not have the format of {TOOL} in torch-neuronx 2.6 ({error!r}); it is ignored"
            )
    return compiled


def find_failed(graphs: Mapping[str, bool]) -> list[str]:
    """Return the graphs that are compiled according to neither the results nor the cache."""
    # torch-neuronx 2.9 may report that a successful compilation failed (aws-neuron-sdk issue 1299).
    return [
        graph
        for graph, ok in graphs.items()
        if not ok and not Path(graph).with_name("model.done").is_file()
    ]


def advice(short_run: ShortRun) -> str:
    """Return a text that says where the graphs are, and what would make the run compile them again."""
    flags = shlex.quote(short_run.added["NEURON_CC_FLAGS"])
    return (
        f"cache: {short_run.cache}\n"
        f"Start the run with the same NEURON_CC_FLAGS={flags}, NEURON_COMPILE_CACHE_URL, settings, world size and "
        "compiler. If one of these changes, graphs are compiled again."
    )
