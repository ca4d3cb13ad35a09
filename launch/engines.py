"""Other engines: those that bring machines, or run jobs, by themselves. Each reads a YAML, which is written here.

`submit=true` writes the file and says which commands come next; it starts nothing. There is no record either: nothing
here would learn what became of the job, and the engine's own commands say it.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import yaml

from launch.config import ClusterConfig, LaunchConfig
from launch.plan import safe_name
from launch.record import Job, Record
from launch.values import line
from train.config import InputError, check, setting
from train.storage.folders import LocalFolder, is_s3, local_path

INSTANCE = r"[a-z][a-z0-9-]*\.[a-z0-9-]+"
REGION = r"(?!cn-|us-gov-)[a-z]{2}(-[a-z]+)+-[0-9]"  # other partitions have other names of policies
NAME = r"[A-Za-z](-?[A-Za-z0-9]){0,38}"  # a name that is valid for every engine


@dataclass(kw_only=True)
class EngineConfig(ClusterConfig):
    """Settings that every engine has. What the engine says of them itself, in the check that is its first command, is
    not examined here.
    """

    UNUSED: ClassVar[tuple[str, ...]] = ("attempts", "idle_attempts", "rendezvous")  # by the engine

    name: str | None = None  # of the cluster, and of the file; None: after the run folder
    folder: str = "."  # local folder in which the file is written
    region: str = "us-east-1"  # of AWS, in which the machines are
    image: str | None = None  # ami-...; None: the engine's own
    disk_gib: int = setting(200, above=0)  # root volume of a machine

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in fields(self):
            ok = each.name not in self.UNUSED or getattr(self, each.name) == each.default
            check(ok, f"cluster.{each.name} is for baretrain's own schedulers; leave it out with cluster={self.kind}")
        given = f"cluster.name={self.name!r} is not letters, digits and single hyphens, at most 39 or so, as my-fleet"
        check(self.name is None or re.fullmatch(NAME, self.name) is not None, given)
        given = f"cluster.region={self.region!r} is not a region of the partition aws, as us-east-1"
        check(re.fullmatch(REGION, self.region) is not None, given)
        check(not is_s3(self.folder), f"cluster.folder={self.folder} must be a folder of this machine")


class ExternalEngine(ABC):
    """What becomes of a job on another engine. InputError for a job that it would not run."""

    settings: ClassVar[type[EngineConfig]]
    cluster: EngineConfig

    def __init__(self, cfg: LaunchConfig, bundle: bytes) -> None:
        self.cfg, self.bundle = cfg, bundle
        kind, instance = cfg.cluster.kind, cfg.instance.name
        if not isinstance(cfg.cluster, self.settings):
            raise InputError(f"cluster.kind={kind} does not fit the settings chosen; choose cluster={kind}")
        self.cluster, self.folder = cfg.cluster, LocalFolder(local_path(cfg.cluster.folder))
        self.uses_efa = cfg.nodes > 1 and bool(cfg.instance.efa_interfaces)
        check(not cfg.prepare, f"prepare=true is not for cluster={kind}; prepare with cluster=local or cluster=slurm")
        ok = re.fullmatch(INSTANCE, instance) is not None
        check(ok, f"cluster={kind} needs the type of its machines: instance=trn1.32xlarge, not {instance!r}")

    @abstractmethod
    def content(self, job: Job) -> dict[str, Any]:
        """What the engine reads."""

    @abstractmethod
    def steps(self, job: Job) -> list[tuple[str, list[str]]]:
        """The commands that come after the file is written, each with what it does. The first one changes nothing."""

    def files(self, job: Job) -> dict[str, bytes]:
        return {self.file_name(job): text_of(self.content(job)).encode()}

    def name(self, job: Job) -> str:
        if self.cluster.name is not None:
            return self.cluster.name
        name = re.sub("[^A-Za-z0-9]+", "-", safe_name(job.run_dir)).strip("-")
        return (name if name[:1].isalpha() else f"run-{name}".rstrip("-"))[:39].rstrip("-")

    def file_name(self, job: Job) -> str:
        return f"{self.name(job)}.{self.cluster.kind}.yaml"

    def path(self, name: str) -> str:
        return str(self.folder.path.absolute() / name)

    def request(self, job: Job, record: Record) -> list[str]:
        return self.steps(job)[0][1]

    def preview(self, job: Job, record: Record, cfg: LaunchConfig) -> str:
        text = "".join(f"\n  {each}" for each in text_of(self.content(job)).splitlines())
        return f"none here; submit=true writes {self.path(self.file_name(job))} and starts nothing:{text}"

    def details(self, job: Job, record: Record, cfg: LaunchConfig) -> dict[str, Any]:
        return {}

    def write(self, job: Job) -> list[str]:
        """Write the files, and say what comes next. InputError for a file that is there and differs."""
        files = self.files(job)
        for name, content in files.items():
            same = self.folder.create(name, content) or self.folder.read(name) == content
            check(same, f"{self.path(name)} is there and differs; remove it, or choose another cluster.folder")
        written = [line("written", self.path(name)) for name in files]
        return [*written, "nothing was started; next:", *(line(what, shlex.join(how)) for what, how in self.steps(job))]


class Dumper(yaml.SafeDumper):
    """Texts of several lines as such and every value written out, for whoever reads the file."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    odd = {"\x85", "\u2028", "\u2029"} & set(text)  # line ends of YAML, which arrive whole only as escapes
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if odd else "|" if "\n" in text else None)


Dumper.add_representer(str, represent_text)


def text_of(content: dict[str, Any]) -> str:
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10**6))
