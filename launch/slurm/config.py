"""Settings of a Slurm site."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from launch.config import ClusterConfig
from train.config import InputError, check

# Options of sbatch that users cannot set, because the launcher sets them or they would change output that it reads.
RESERVED = (
    *("job-name", "nodes", "ntasks-per-node", "array", "dependency", "kill-on-invalid-dep"),
    *("requeue", "no-requeue", "open-mode", "output", "error"),
    *("parsable", "test-only", "wait", "wrap", "clusters"),
)


@dataclass(kw_only=True)
class SlurmConfig(ClusterConfig):
    """A Slurm site. A YAML file in conf/cluster/ sets a site's values that differ from these defaults.

    No shell reads a value. sbatch checks its arguments for the plan (--test-only).
    """

    kind: ClassVar[str] = "slurm"
    signals_ranks: ClassVar[bool] = True

    gate: bool = True
    # The options of sbatch (man sbatch), for example ["--partition=gpu","--time=1-00:00:00","--gres=gpu:8"]; they
    # replace --exclusive, --mem=0 and --signal=B:USR1@300, which stops the run 300 seconds before the time limit.
    sbatch_args: list[str] = field(default_factory=list)
    # The words that start the program in a container, such as ["--container-image=NAME"] for pyxis, or
    # ["apptainer","exec","--bind=/fsx","train.sif"].
    container: list[str] = field(default_factory=list)

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
    for name in RESERVED:
        # sbatch also accepts abbreviated names.
        check(
            not name.startswith(match[1]),
            f"cluster.sbatch_args has {argument!r}: --{name} is set only by launch",
        )
