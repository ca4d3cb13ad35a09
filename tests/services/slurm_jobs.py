"""Jobs of a test's Slurm cluster, submitted, waited for and looked at with Slurm's commands, not with tested code."""

from __future__ import annotations

import re
from pathlib import Path

from running import eventually
from services.slurm_cluster import SlurmCluster

STATE_S = 300.0  # a node that is lost counts as down after half a minute


def write_script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/bash\n{body}\n")
    return path


def submit(cluster: SlurmCluster, folder: Path, body: str, *options: str, arguments: tuple[str, ...] = ()) -> int:
    """Submit a script; what it prints goes to job-ID.out in the folder, one attempt after the other."""
    script = write_script(folder / "job.sh", body)
    files = (f"--output={folder}/job-%j.out", "--open-mode=append")
    return int(cluster.run("sbatch", "--parsable", *files, *options, str(script), *arguments))


def output(folder: Path, job_id: int) -> str:
    """What a job has printed by now."""
    path = folder / f"job-{job_id}.out"
    return path.read_text(errors="replace") if path.exists() else ""


def field(cluster: SlurmCluster, job_id: int, name: str) -> str:
    """One value of `scontrol show job`, which must know the job: "Restarts", "NodeList"."""
    (value, *_) = re.findall(rf"\b{name}=(\S*)", cluster.run("scontrol", "show", "job", str(job_id)))
    return str(value)


def wait_for_state(cluster: SlurmCluster, job_id: int, *states: str, restarts: int = 0) -> None:
    """Until a job is in one of the states, and was started again at least so often."""

    def is_there() -> bool:
        shown = (field(cluster, job_id, "JobState"), int(field(cluster, job_id, "Restarts")))
        return shown[0] in states and shown[1] >= restarts

    try:
        eventually(is_there, STATE_S)
    except AssertionError as error:
        shown = cluster.run("scontrol", "show", "job", str(job_id))
        raise AssertionError(f"the job is not {' or '.join(states)}:\n{shown}{cluster.logs()}") from error
