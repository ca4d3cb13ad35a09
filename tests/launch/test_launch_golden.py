"""What a launch on Slurm writes and starts, to be read as a whole in tests/golden/launch/.

After a change that is meant, `GOLDEN=write python -m pytest tests/launch/test_launch_golden.py` writes the files again;
look at the difference before you commit it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from planning import node, plan, two_nodes, with_module
from running import ROOT

from launch.record import Job, Record
from launch.slurm.batch import Batch
from launch.slurm.scheduler import Scheduler
from train.config import S3Config
from train.storage.schema import FileName, Sha256

GOLDEN = Path(__file__).parent.parent / "golden/launch"
OWN = ["cluster=slurm", "instance=trn1.32xlarge", "nodes=2"]
OWN += ['cluster.sbatch_args=["--partition=trn1","--constraint=efa&nvme","--chdir=/fsx"]']
RUN = [
    "experiment=albert_pretrain",
    "data.path=s3://bucket/albert",
    "run_dir=s3://bucket/runs/mine",
]
RUN += ["s3.region=us-east-1"]


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file() and path.read_text() == text, (
        f"{path.relative_to(ROOT)} differs; if that is meant, write it again: GOLDEN=write python -m pytest "
        "tests/launch/test_launch_golden.py"
    )


def lines(words: list[str], **replaced: object) -> str:
    """A command, one argument a line. Paths of this machine are replaced by names."""
    text = "".join(f"{word}\n" for word in words)
    for name, path in sorted(replaced.items(), key=lambda pair: -len(str(pair[1]))):
        text = text.replace(str(path), name.upper())
    return text


def job_of(*own: str, **changes: object) -> Job:
    """The job of OWN and RUN, without the checksum of all settings, which every new one changes."""
    _, job = plan([*OWN, *own], RUN)
    return dataclasses.replace(
        job, id=FileName("mine-00000000"), config_sha256=Sha256("0" * 64), **changes
    )


def test_the_request_to_slurm():
    job = job_of()
    record = Record(job.run_dir, S3Config(**job.s3))
    check_golden("sbatch.txt", lines(Scheduler().request(job, record), launch=ROOT / "launch"))


@pytest.mark.parametrize(
    "container",
    [
        [],
        ["--container-image=nvcr.io#nvidia/pytorch:26.10-py3"],
        ["apptainer", "exec", "/fsx/train.sif"],
    ],
)
def test_an_attempt(monkeypatch, tmp_path, container: list[str]):
    arguments = two_nodes(monkeypatch, tmp_path / "bin")
    job = job_of(run_dir=str(tmp_path / "mine'; $(touch leaked) `x`"))
    job = dataclasses.replace(job, cluster={**job.cluster, "container": container})
    assert Batch(Record(job.run_dir, S3Config(**job.s3)), job, 1234).attempt(1) == 0
    words = arguments.read_text().split("\0")[:-1]
    at = words.index(job.python)
    first = at - len(container)
    assert words[first:at] == container
    check_golden("srun.txt", lines(words[:first] + words[at:], runs=tmp_path))


def test_the_torchrun_of_a_node(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = job_of(run_dir=str(tmp_path / "mine"))
    job, record = with_module(job, "train", b"")
    assert "--node-rank=0" in node(monkeypatch, record, "n1").torchrun("train", job.overrides)
    words = node(monkeypatch, record, "n2").torchrun("train", job.overrides)
    (start,) = (word for word in words if word.endswith("start.py"))
    check_golden("torchrun.txt", lines(words, runs=tmp_path, code=Path(start).parent))


@pytest.mark.services
def test_shell_scripts_are_clean(request):
    if shutil.which("shellcheck") is None:
        reason = "no shellcheck to test with: apt-get install shellcheck"
        pytest.fail(reason) if request.config.getoption("--require-services") else pytest.skip(
            reason
        )
    scripts = [path for folder in ("launch", "ami") for path in (ROOT / folder).rglob("*.sh")]
    done = subprocess.run(
        ["shellcheck", "-x", *scripts], capture_output=True, text=True, check=False
    )
    assert len(scripts) > 2 and done.returncode == 0, done.stdout
