"""What is started: one JSON file, made by the plan, that the scheduler's script and every node read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from train.config import check
from train.storage.folders import canonical_json
from train.storage.schema import FileName, Sha256, read_object, record

FORMAT = 1
MODULES = {"train": "train", "prepare": "train.prepare"}


@dataclass(frozen=True)
class Code:
    """The code that the job runs: a bundle in the run's record."""

    file: FileName
    sha256: Sha256
    revision: str  # git's commit, with a plus sign if files were changed; empty outside a checkout


@dataclass(frozen=True)
class Job:
    id: FileName  # of this job: it names logs, and what is unpacked on a node
    kind: str  # train | prepare
    run_dir: str  # the run folder; of a preparation the folder that it writes
    overrides: list[str]  # settings of train or train.prepare
    config_sha256: Sha256  # of the settings that they lead to
    python: str  # interpreter on the nodes
    folder: str  # in which it was submitted: paths in the settings may be relative to it
    code: Code
    scheduler: str
    cluster: dict[str, Any]  # its settings
    instance: str
    nodes: int
    spares: int
    processes_per_node: int
    environment: dict[str, str] = field(default_factory=dict)
    s3: dict[str, Any] = field(default_factory=dict)
    parts: int = 1  # of a preparation
    parts_at_once: int | None = None  # None: all that fit
    format: int = FORMAT

    def to_json(self) -> bytes:
        return canonical_json(asdict(self))

    @classmethod
    def from_json(cls, content: bytes) -> Job:
        """Read a job. BadContent for a file that is none, InputError for one of another version."""
        values = read_object(content)
        check(
            values.get("format") == FORMAT,
            f"the job has format {values.get('format')!r}, this version reads {FORMAT}; use the version that wrote it",
        )
        job = record(cls, values)
        check(job.kind in MODULES, f"kind {job.kind!r} of the job is not known")
        return job

    @property
    def module(self) -> str:
        return MODULES[self.kind]
