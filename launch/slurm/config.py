"""Settings of a Slurm site."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from launch.config import ClusterConfig
from train.config import InputError, check, setting

# Options of sbatch that users cannot set, because the launcher sets them or they would change output that it reads. The
# value is the setting to use instead, if there is one.
RESERVED = {
    "partition": "cluster.partition",
    "time": "cluster.time_limit",
    "exclusive": "cluster.exclusive",
    "signal": "cluster.stop_before_s",
    "nodes": "nodes",
    "array": "parts",
    **dict.fromkeys(
        ("job-name", "ntasks-per-node", "requeue", "no-requeue", "open-mode", "output", "error"),
        "",
    ),
    **dict.fromkeys(
        ("dependency", "kill-on-invalid-dep", "parsable", "test-only", "wait", "wrap", "clusters"),
        "",
    ),
}


@dataclass(kw_only=True)
class SlurmConfig(ClusterConfig):
    """A Slurm site. A YAML file in conf/cluster/ sets a site's values that differ from these defaults.

    Most values become arguments of sbatch, which checks them for the plan (--test-only). A shell reads only `prologue`.
    """

    signals_ranks: ClassVar[bool] = True

    kind: str = "slurm"
    gate: bool = True
    # The partition; None uses the site's default.
    partition: str | None = None
    # The additional options of sbatch (man sbatch), for example ["--gres=gpu:8","--qos=high"]; they may include
    # --account, --constraint, --reservation, --exclude and --chdir.
    sbatch_args: list[str] = field(default_factory=list)
    # Reserve whole nodes.
    exclusive: bool = True
    # The time limit, such as 30 (minutes), 12:00:00 or 2-00:00:00; None uses the partition's.
    time_limit: str | None = None
    # The time before time_limit, in seconds, at which the run is asked to stop with a checkpoint.
    stop_before_s: int = setting(300, above=0, most=65535)
    # The words that start the program in a container, such as ["--container-image=NAME"] for pyxis, or
    # ["apptainer","exec","--bind=/fsx","train.sif"].
    container: list[str] = field(default_factory=list)
    # The lines of bash that run first; exports reach every rank.
    prologue: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.sbatch_args:
            check_argument(each)


def check_argument(argument: str) -> None:
    """Raise InputError if a text is not a single option of sbatch, or if only the launcher may set the option."""
    match = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", argument, re.ASCII)
    if match is None:
        shape = "an option is one line, --name=value or --name, such as --qos=high"
        raise InputError(f"cluster.sbatch_args has {argument!r}: {shape}")
    for name, key in RESERVED.items():
        taken = f"--{name} is set only by launch{f'; set {key}' if key else ''}"
        # sbatch also accepts abbreviated names.
        check(not name.startswith(match[1]), f"cluster.sbatch_args has {argument!r}: {taken}")
