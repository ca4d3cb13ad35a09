"""`make demo-slurm`: a Slurm cluster of two nodes on this machine, and one run on it from the plan to the report.

Arguments: the run folder, then settings of the run. Needs root and Debian's packages of Slurm; nothing of it stays.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from services.slurm_cluster import PACKAGES, fault, missing_programs, slurm_cluster

OUTCOME = "outcome.json"


def main(run_dir: str, *settings: str) -> int:
    if missing := missing_programs():
        print(
            f"{', '.join(missing)} missing: apt-get install {' '.join(PACKAGES)}", file=sys.stderr
        )
        return 2
    if said := fault():
        print(f"no nodes can be made here (are you root?): {said}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        with slurm_cluster(Path(folder)) as cluster:
            os.environ.update(cluster.environment)
            step(
                "-m",
                "launch",
                "cluster=slurm",
                "nodes=2",
                "submit=true",
                "--",
                *settings,
                f"run_dir={run_dir}",
            )
            step("-m", "launch", "logs", run_dir, "--follow")
            step("-m", "launch", "status", run_dir)
    step("-m", "train", "report", run_dir)
    return 0 if '"outcome": "done"' in (Path(run_dir) / OUTCOME).read_text() else 1


def step(*arguments: str) -> None:
    print(f"$ python {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
