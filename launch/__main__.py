"""The command `baretrain launch key=value ... -- RUN_SETTINGS`: it plans a run on N machines and can start it.

The subcommands (status, logs, stop, resume, cancel; those for EC2) are in launch/commands.py.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from launch import code, commands, submit
from launch.config import LaunchConfig
from launch.estimate import Estimate, estimate, figures
from launch.plan import make_job, run_overrides
from launch.record import Job, Record
from launch.schedulers import SETTINGS, scheduler
from launch.values import line, paragraph
from train.config import InputError, ShardsConfig, TrainConfig, plural
from train.data.shards.manifest import DataManifest, read_manifest
from train.machine.console import say
from train.run import compose as cli
from train.run.command import add_import_flag, guarded
from train.storage.folders import open_folder

WIDTH = 110  # of a printed note, in columns
# The settings that --help describes.
USED = [
    "nodes",
    "processes_per_node",
    "submit",
    "cluster.gate",
]


EXAMPLES = (
    "cluster=local -- experiment=demo data.path=data/mine run_dir=runs/mine",
    "cluster=slurm instance=trn1.32xlarge nodes=16 submit=true -- experiment=albert_pretrain run_dir=runs/a",
    (
        "cluster=ec2 instance=g6.xlarge nodes=4 -- "
        "experiment=albert_pretrain data.path=s3://bucket/albert run_dir=s3://bucket/runs/a s3.region=us-east-1"
    ),
    "status runs/mine",
)


def main(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    if arguments and arguments[0] in commands.TABLE:
        return commands.main(arguments)
    if arguments and re.fullmatch(r"[A-Za-z][\w-]*", arguments[0]):
        known = ", ".join(commands.TABLE)
        return rejected(
            f"there is no subcommand {arguments[0]}; available: {known}. To plan a run, give key=value"
        )
    cli.add_schema(
        LaunchConfig, "launch", [("cluster", name, kind) for name, kind in SETTINGS.items()]
    )
    purpose = "Plan a run on N machines; submit=true starts it. Settings of the run follow --. Other commands: "
    purpose += f"{' | '.join(commands.TABLE)}, each with --help."
    parser = cli.settings_parser("launch", LaunchConfig, purpose, examples=EXAMPLES, keys=USED)
    add_import_flag(parser)  # --import names Python files that the run imports
    own = arguments
    of_run: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        own = arguments[:split]
        of_run = arguments[split + 1 :]
    elif all("=" in each for each in arguments):  # neither --help nor --cfg
        example = "baretrain launch cluster=local -- experiment=demo run_dir=runs/a"
        return rejected(f"settings of the run are missing: write them after --, as in {example}")
    settings = [each for each in own if "=" in each and not each.startswith("-")]
    return cli.run(LaunchConfig, lambda cfg: launch(cfg, settings, of_run), parser, arguments=own)


def rejected(message: str) -> int:
    """Report a command line that cannot be parsed, and return the exit code."""

    def act() -> int:
        raise InputError(message)

    return guarded(act)


def launch(cfg: LaunchConfig, settings: Sequence[str], of_run: Sequence[str]) -> int:
    """Print the plan of a run and, with submit=true, start it; return the exit code."""
    overrides = run_overrides(of_run, settings)
    run = cli.load_config(TrainConfig, overrides)
    bundle, packed = code.pack()
    job = make_job(cfg, run, overrides, packed, folder=str(Path.cwd()))
    record = Record(job.run_dir, run.s3, job.sha256)
    starts = scheduler(job.scheduler)
    command = starts.request(job, record)
    expected = expect(cfg, run)
    say(*plan_lines(job, command, len(bundle)), "")
    say(*estimate_lines(cfg, run, expected))
    say(*paragraph("scheduler", starts.preview(job, record, cfg, expected.hours)))
    if not cfg.submit:
        say("nothing was started; submit=true starts the job")
        return cli.DONE
    handle = submit.submit(record, job, run, bundle)
    if record.is_remote:
        say(
            f"job sha256 {job.sha256}: needed to resume from another computer (launch resume --job-sha256)"
        )
    say(f"submitted; baretrain launch status {record.run_dir} shows its state")
    return starts.attend(job, record, handle, detach=False)


# ---- the plan --------------------------------------------------------------------------------------------------------


def expect(cfg: LaunchConfig, run: TrainConfig) -> Estimate:
    """Return the estimate. It uses the number and length of the data's sequences if this computer can read the data.

    Raises InputError if the planned machines cannot run this.
    """
    seq_len = run.seq_len
    rows = None
    vocab_size = None
    manifest = manifest_of(run)
    if manifest is not None:
        seq_len = manifest.seq_len
        rows = manifest.rows("train")
        vocab_size = manifest.tokenizer.vocab_size
    return estimate(
        run,
        nodes=cfg.nodes,
        processes_per_node=cfg.ranks_per_node,
        seq_len=seq_len,
        rows=rows,
        vocab_size=vocab_size,
    )


def manifest_of(run: TrainConfig) -> DataManifest | None:
    """Return the manifest of the run's shards; None if it has none, or if this computer cannot read them."""
    if not isinstance(run.data, ShardsConfig):
        return None
    try:
        manifest = read_manifest(open_folder(run.data.path, run.s3))
    except InputError:
        said = f"note: {run.data.path} cannot be read from here: its size is unknown"
        say(said, file=sys.stderr)
        return None
    manifest.check_length(run.seq_len, run.data.path)
    return manifest


def estimate_lines(cfg: LaunchConfig, run: TrainConfig, expected: Estimate) -> list[str]:
    """Return the figures of the estimate, and its assumptions as a list."""
    lines = [line(name, text) for name, text in figures(expected).items()]
    lines.append("")
    notes = [*expected.notes, *too_short(cfg, run, expected.hours)]
    for note in notes:
        lines += textwrap.wrap(f"- {note}", WIDTH, subsequent_indent="  ")
    return [*lines, ""]


def too_short(cfg: LaunchConfig, run: TrainConfig, hours: float | None) -> list[str]:
    """Return a note for each limit that ends the run before the expected end."""
    if hours is None:
        return []
    limits_s = {"cluster.max_run_s": cfg.cluster.ends_after_s, "max_run_s": run.max_run_s}
    notes = []
    for key, limit_s in limits_s.items():
        if limit_s is not None and limit_s < hours * 3600:
            notes.append(
                f"the run will NOT finish: it takes about {hours:,.3g} hours, and {key}={limit_s:g} ends it after "
                f"{limit_s / 3600:,.3g}; raise {key}, or resume the run afterwards"
            )
    return notes


def plan_lines(job: Job, request: Sequence[str], bundle_bytes: int) -> list[str]:
    """Return what the job is made of, one line for each part."""
    ranks = plural(job.processes_per_node, "rank")
    total = job.nodes * job.processes_per_node
    machines = f"{job.nodes} x {job.instance}, {ranks} each, {total} in all"
    chosen = [job.scheduler]
    for key, value in job.cluster.items():
        if isinstance(value, bool):
            value = str(value).lower()
        if value not in (None, [], ""):
            chosen.append(f"{key}={value}")
    variables = [f"{name}={value}" for name, value in sorted(job.environment.items())]
    kilobytes = f"{bundle_bytes / 1e3:.0f} kB"
    return [
        line("run", job.run_dir),
        line("settings", f"sha256 {job.config_sha256[:16]}: {shlex.join(job.overrides)}"),
        line("machines", machines),
        line("cluster", ", ".join(chosen)),
        line("code", f"{job.code.file}, {kilobytes}, git {job.code.revision or 'none'}"),
        *paragraph("variables", "\n".join(variables)),
        line("command", shlex.join(request)),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
