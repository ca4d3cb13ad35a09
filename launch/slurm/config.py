"""Settings of a Slurm site."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from launch.config import ClusterConfig
from train.config import check, setting


@dataclass(kw_only=True)
class SlurmConfig(ClusterConfig):
    """A Slurm site. One YAML a site in conf/cluster/ holds what differs from this. What sbatch says of an option with
    `--test-only` is not examined here: values are its arguments, and but for `prologue` pass through
    no shell.
    """

    signals_ranks: ClassVar[bool] = True

    kind: str = "slurm"
    gate: bool = True
    drain: bool = False  # drain nodes that fail the preflight (needs Slurm's operator rights)
    partition: str | None = None  # None: the site's default
    account: str | None = None  # that is charged; None: the user's default
    qos: str | None = None  # quality of service; None: the site's default
    constraint: str | None = None  # features of nodes, in sbatch's notation
    reservation: str | None = None  # name of one of the site's
    gres: str | None = None  # generic resources of a node, as gpu:8; Trainium needs none
    exclude: str | None = None  # nodes to leave out, as n[3-5]
    exclusive: bool = True  # whole nodes
    time_limit: str | None = None  # as 30 (minutes), 12:00:00 or 2-00:00:00; None: the partition's
    stop_before_s: int = setting(300, above=0, most=65535)  # how long before the time limit the run is asked to stop
    # with a checkpoint
    container: str | None = None  # None, or an image: a path (.sqsh, .sif) or a registry's name
    container_runtime: str = setting("pyxis", among=("pyxis", "apptainer"))  # pyxis: srun --container-image
    container_mounts: list[str] = field(default_factory=list)  # folders that the container sees under the same names
    prologue: list[str] = field(default_factory=list)  # lines of bash that a job runs first; exports reach every rank
    chdir: str | None = None  # folder on the nodes in which the job starts; None: the one of the first submission

    def __post_init__(self) -> None:
        super().__post_init__()
        limit_s = time_limit_s(self.time_limit or "")
        check(
            limit_s is None or limit_s > self.stop_before_s,
            f"cluster.stop_before_s={self.stop_before_s} is not below cluster.time_limit={self.time_limit}: the run "
            "would be stopped as soon as it begins",
        )
        check(
            self.container is None or re.match(r"[\w./]", self.container) is not None,
            f"cluster.container={self.container!r} is no image: a path or a registry's name",
        )
        is_whole = self.chdir is None or self.chdir.startswith("/")
        check(is_whole, f"cluster.chdir={self.chdir} must be the whole path of a folder, from /")
        for folder in self.container_mounts:
            ok = folder.startswith("/") and not re.search(r"[:,]", folder)  # which part a list of mounts
            check(ok, f"cluster.container_mounts holds {folder!r}: folders have whole paths, without colons and commas")


def time_limit_s(text: str) -> int | None:
    """Seconds of a time in sbatch's notation (man sbatch, --time); None if it is none."""
    match = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if match is None:
        return None
    days, first, second, third = (int(group or 0) for group in match.groups())
    if match[1] is not None or match[4] is not None:  # days-hours[:minutes[:seconds]], hours:minutes:seconds
        hours, minutes, seconds = first, second, third
    else:  # minutes[:seconds]
        hours, minutes, seconds = 0, first, second
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None
