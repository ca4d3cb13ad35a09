"""The run folder: the only thing a run writes to and the only thing a report reads.

    config.yaml  environment.json  metrics.jsonl  checkpoints/step_00001000/  tensorboard/  log/  export/  report/

A folder belongs to one run. Its identity (what is learnt, from which data, in which batches) may not change; where and
how fast it runs, and how long, may.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import conf
import train
from train.config import Plan, TrainConfig, check, launched_rank, to_dict
from train.storage import canonical_json, local_path, make_folder, write_atomic

logger = logging.getLogger("train")
PACKAGES = (
    "torch",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "safetensors",
    "hydra-core",
)


class RunFolder:
    def __init__(self, location: str) -> None:
        self.path = local_path(location)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.export = self.path / "export"
        self.log = self.path / "log"

    def claim(self, identity: dict[str, Any]) -> None:
        """Refuse a folder that is another run's, or is no run folder at all, before anything is written to it."""
        if self.environment.is_file() and (self.metrics.is_file() or self.checkpoints.is_dir()):
            check_same_run(json.loads(self.environment.read_bytes()).get("identity", {}), identity, place=self.path)
        elif not self.environment.is_file():
            check(
                not self.config.exists() and not self.checkpoints.exists(),
                f"run_dir={self.path} holds files that are not a run's; choose another folder",
            )
        make_folder(self.path)
        self.log.mkdir(exist_ok=True)
        self.exit_path.unlink(missing_ok=True)  # of an earlier life

    def describe(self, cfg: TrainConfig, identity: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write config.yaml and environment.json. Rank 0 calls it."""
        # The environment first: it is what tells the folder from somebody else's.
        write_atomic(self.environment, canonical_json({"identity": identity, **environment(), **facts}))
        write_atomic(self.config, OmegaConf.to_yaml(to_dict(cfg)).encode())

    @property
    def exit_path(self) -> Path:
        return self.log / f"exit_rank_{launched_rank():04d}.json"

    def exit_file(self, reason: str, step: int | None) -> None:
        """Leave word of how this rank ended; launchers judge by it."""
        if self.log.is_dir():
            content = {"reason": reason, "step": step, "time_unix_s": round(time.time(), 1)}
            write_atomic(self.exit_path, canonical_json(content))


def identity_of(cfg: TrainConfig, plan: Plan, data_id: str) -> dict[str, Any]:
    """What must stay the same for a run to go on: one flat table of settings."""
    plain = to_dict(cfg)
    sections = {f"{name}.{key}": value for name in ("task", "model", "optim") for key, value in plain[name].items()}
    return {
        "data": data_id,
        "seed": cfg.seed,
        "global_batch_size": plan.global_batch_size,
        **sections,
    }


def check_same_run(found: dict[str, Any], identity: dict[str, Any], *, place: Path) -> None:
    """Raise InputError, naming a difference, if what was found in `place` is of another run."""
    wanted = json.loads(canonical_json(identity))
    for key in {**found, **wanted}:
        check(
            found.get(key) == wanted.get(key),
            f"{place} is of a run with {key}={found.get(key)}, this one has {wanted.get(key)}; choose another run_dir",
        )


def environment() -> dict[str, Any]:
    """Where this process runs: versions, commit, the folders the code came from. No environment variables: secrets."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "baretrain": train.__version__,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "code": [str(Path(train.__file__).parent), str(Path(conf.__file__ or "").parent)],
        "neuron_cc_flags": os.environ.get("NEURON_CC_FLAGS"),
        "host": platform.node(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """The git commit of the code, with a plus sign if it was changed; None outside a checkout."""
    if shutil.which("git") is None:
        return None
    folder = Path(train.__file__).parent
    found = subprocess.run(
        ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def set_up_logging(folder: Path) -> None:
    """Every rank to its own file; rank 0's messages and anybody's warnings also to the terminal."""
    root = logging.getLogger("train")
    root.setLevel(logging.INFO)
    root.propagate = False
    file = logging.FileHandler(folder / f"rank_{launched_rank():04d}.txt")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    terminal = TerminalHandler(sys.stderr)
    terminal.setLevel(logging.INFO if launched_rank() == 0 else logging.ERROR)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    root.handlers = [file, terminal]


class TerminalHandler(logging.StreamHandler):
    """Prints above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)
