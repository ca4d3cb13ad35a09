"""The command `baretrain launch key=value ... -- RUN_SETTINGS`: it plans a run on N machines and can start it.

The subcommands (list, status, logs, stop, resume, cancel; clean, iam and quota for EC2) are in launch/commands.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch import code, commands, submit
from launch.config import INSTANCE_TYPE, LaunchConfig
from launch.estimate import HEADER, Estimate, cells, estimate, notes_of_data
from launch.plan import make_job, run_overrides
from launch.record import Job, Record
from launch.schedulers import SETTINGS, scheduler
from launch.speed import read_calibration
from launch.values import columns, line, paragraph
from train.config import InputError, PrepareConfig, ShardsConfig, TrainConfig, check, plural
from train.data.shards.format import read_manifest
from train.machine.console import say
from train.machine.machine import instance_names
from train.run import compose as cli
from train.run.command import add_import_flag, guarded
from train.storage.folders import is_s3, open_folder

WIDTH = 110  # of a printed note, in columns
USED: tuple[str, ...] = (
    "nodes",
    "spares",
    "processes_per_node",
    "submit",
    "check",
    "calibrate",
    "prepare",
    "parts",
)
USED += ("cluster.gate", "cluster.attempts")
OF_RUN = {
    "experiment",
    *(each.name for kind in (TrainConfig, PrepareConfig) for each in dataclasses.fields(kind)),
}
OF_RUN -= {each.name for each in dataclasses.fields(LaunchConfig)}
EXAMPLES = (
    "cluster=local -- experiment=demo data.path=data/mine run_dir=runs/mine",
    "cluster=slurm instance=trn1.32xlarge nodes=16 submit=true -- experiment=albert_pretrain run_dir=runs/a",
    (
        "cluster=ec2 cluster.instance_profile=baretrain-machine-a instance=g6.xlarge nodes=4 -- "
        "experiment=albert_pretrain data.path=s3://bucket/albert run_dir=s3://bucket/runs/a s3.region=us-east-1"
    ),
    "status runs/mine",
)


def main(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.main(arguments)
    if arguments and re.fullmatch(r"[A-Za-z][\w-]*", arguments[0]):
        known = ", ".join(commands.COMMANDS)
        return rejected(
            f"there is no subcommand {arguments[0]}; available: {known}. To plan a run, give key=value"
        )
    cli.add_schema(
        LaunchConfig, "launch", [("cluster", name, kind) for name, kind in SETTINGS.items()]
    )
    purpose = "Plan a run on N machines; submit=true starts it. Settings of the run follow --. Other commands: "
    purpose += f"{' | '.join(commands.COMMANDS)}, each with --help."
    parser = cli.settings_parser("launch", LaunchConfig, purpose, examples=EXAMPLES, keys=USED)
    add_import_flag(parser)  # --import names Python files that the run imports
    split = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_run = with_unknown_type(arguments[:split]), arguments[split + 1 :]
    settings = [each for each in own if "=" in each and not each.startswith("-")]
    for each in settings:
        if re.split("[.=]", each.lstrip("+~"))[0] in OF_RUN:
            example = f"baretrain launch cluster=local -- {each}"
            return rejected(f"{each} is a setting of the run: write it after --, as in {example}")
    return cli.run(LaunchConfig, lambda cfg: launch(cfg, settings, of_run), parser, arguments=own)


def rejected(message: str) -> int:
    """Report a command line that cannot be parsed, and return the exit code."""

    def act() -> int:
        raise InputError(message)

    return guarded(act)


def with_unknown_type(own: list[str]) -> list[str]:
    """Replace instance=TYPE with instance.name=TYPE if conf/instance lacks the type and EC2 may know it."""
    names = [each.removeprefix("instance=") for each in own if each.startswith("instance=")]
    if (
        not names
        or names[-1] in instance_names()
        or re.fullmatch(INSTANCE_TYPE, names[-1]) is None
    ):
        return own
    others = [each for each in own if not each.startswith("instance=")]
    settings = [each for each in others if "=" in each and not each.startswith("-")]
    with suppress(InputError):  # the error is reported later, when all settings are read
        if cli.load_config(LaunchConfig, settings).cluster.finds_types:
            return [*others, "instance=local", f"instance.name={names[-1]}"]
    return own


def is_unknown(cfg: LaunchConfig) -> bool:
    """Return whether to ask EC2 about the machine type. Raises InputError if that is needed but not allowed."""
    instance = cfg.instance
    if (
        instance.name in instance_names()
        or instance.devices is not None
        or not cfg.cluster.finds_types
    ):
        return False
    check(
        cfg.check or cfg.submit or cfg.processes_per_node is not None,
        f"no file in conf/instance says how many devices {instance.name} has: set check=true to ask EC2, or set the "
        "number, such as instance.devices=8",
    )
    return cfg.check or cfg.submit


def launch(cfg: LaunchConfig, settings: Sequence[str], of_run: Sequence[str]) -> int:
    check(
        bool(of_run),
        "settings of the run are missing: write them after --, as in -- experiment=demo run_dir=runs/a",
    )
    overrides = run_overrides(of_run, settings) if not cfg.prepare else list(of_run)
    schema: type[Any] = PrepareConfig if cfg.prepare else TrainConfig
    cli.check_typed(schema, of_run)
    run: Any = cli.load_config(schema, overrides)
    if is_unknown(cfg):
        more = scheduler(cfg.cluster.kind).found_type(cfg, run.s3)
        return launch(
            cli.load_config(LaunchConfig, [*settings, *more]), [*settings, *more], of_run
        )
    bundle, packed = code.pack()
    job = make_job(cfg, run, overrides, packed, folder=str(Path.cwd()))
    record = Record(job.run_dir, run.s3, job.sha256)
    starts = scheduler(job.scheduler)
    command = starts.request(job, record)
    expected = None if cfg.prepare else expect(cfg, run)
    hours = None if expected is None else expected.at(cfg.nodes).hours
    plan = {
        "request": command,
        "estimate": None if expected is None else dataclasses.asdict(expected),
    }
    say(*plan_lines(job, command, len(bundle)), "")
    if expected is not None:
        said = [*expected.assumptions, *too_short(cfg, run, hours)]
        notes = [textwrap.wrap(f"- {each}", WIDTH, subsequent_indent="  ") for each in said]
        say(*columns([HEADER, *map(cells, expected.rows)]), "", *itertools.chain(*notes), "")
    say(*paragraph("scheduler", starts.preview(job, record, cfg, hours)))
    if not cfg.submit:
        say("nothing was started; submit=true starts the job")
        return cli.DONE
    handle = submit.submit(record, job, run, plan=plan, bundle=bundle)
    if record.is_remote:
        say(
            f"job sha256 {job.sha256}: needed to resume from another computer (launch resume --job-sha256)"
        )
    say(f"submitted; baretrain launch status {record.run_dir} shows its state")
    return starts.attend(job, record, handle, detach=False)


def too_short(cfg: LaunchConfig, run: Any, hours: float | None) -> list[str]:
    """Return a note for each limit that ends the run before the expected end."""
    limits_s = {
        "cluster.max_run_s": cfg.cluster.ends_after_s,
        "max_run_s": getattr(run, "max_run_s", None),
    }
    notes = []
    for key, limit_s in limits_s.items():
        if limit_s is not None and hours is not None and limit_s < hours * 3600:
            note = f"the run will NOT finish: it takes about {hours:,.3g} hours, and {key}={limit_s:g} ends it after "
            note += f"{limit_s / 3600:,.3g}; raise {key}, or resume the run afterwards"
            notes.append(note)
    return notes


def expect(cfg: LaunchConfig, run: TrainConfig) -> Estimate:
    """Return the estimate. It uses the number and length of the data's sequences if this computer can read the data.

    Raises InputError if the planned machines cannot run this.
    """
    manifest = None
    if isinstance(run.data, ShardsConfig):
        try:
            manifest = read_manifest(open_folder(run.data.path, run.s3))
        except InputError:
            say(
                f"note: {run.data.path} cannot be read from here: its size is unknown",
                file=sys.stderr,
            )
    if manifest is not None:
        manifest.check_length(run.seq_len, run.data.path)
    expected = estimate(
        run,
        nodes=cfg.nodes,
        processes_per_node=cfg.ranks_per_node,
        seq_len=run.seq_len if manifest is None else manifest.seq_len,
        rows=None if manifest is None else manifest.rows("train"),
        calibration=None if cfg.calibrate is None else read_calibration(cfg.calibrate, run.s3),
        vocab_size=None if manifest is None else manifest.tokenizer.vocab_size,
    )
    at = expected.at(cfg.nodes)
    if manifest is None or not is_s3(run.data.path):
        return expected
    return dataclasses.replace(
        expected, assumptions=(*expected.assumptions, *notes_of_data(run, at, manifest))
    )


def plan_lines(job: Job, request: Sequence[str], bundle_bytes: int) -> list[str]:
    ranks, spares = (
        job.nodes * job.processes_per_node,
        f" and {job.spares} more as spares" if job.spares else "",
    )
    machines = f"{job.nodes} x {job.instance}{spares}, {plural(job.processes_per_node, 'rank')} each, {ranks} in all"
    if job.kind == "prepare":
        machines = f"{plural(job.parts, 'part')} of the corpus, each on one {job.instance}"
    chosen = {key: value for key, value in job.cluster.items() if value not in (None, [], "")}
    shown = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in chosen.items()
    }
    return [
        line("run", f"{job.run_dir} ({job.module})"),
        line("settings", f"sha256 {job.config_sha256[:16]}: {shlex.join(job.overrides)}"),
        line("machines", machines),
        line("cluster", ", ".join(f"{key}={value}" for key, value in shown.items())),
        line(
            "code",
            f"{job.code.file}, {bundle_bytes / 1e3:.0f} kB, git {job.code.revision or 'none'}",
        ),
        *paragraph(
            "variables",
            "\n".join(f"{name}={value}" for name, value in sorted(job.environment.items())),
        ),
        line("command", shlex.join(request)),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
