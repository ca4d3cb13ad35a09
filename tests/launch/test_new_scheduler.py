"""What a new scheduler costs: a module, a line in the table and a YAML, added to a copy of the tree."""

import json
import os
import shutil
import subprocess
import sys

from running import ROOT

MODULE = '''
"""A queue that is one JSON file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from launch import spec
from launch.config import ClusterConfig

QUEUE = Path("queue.json")


@dataclass(kw_only=True)
class ToyConfig(ClusterConfig):
    kind: ClassVar[str] = "toy"
    color: str = "red"


class Scheduler(spec.Scheduler):
    def request(self, job, record):
        return ["toy-submit", job.cluster["color"], record.run_dir]

    def preview(self, job, record, cfg, hours):
        return "the queue is empty"

    def submit(self, job, record):
        QUEUE.write_text(json.dumps([f"toy{number}" for number in range(job.nodes)]))
        return {"queue": str(QUEUE.absolute())}

    def state(self, record, handle):
        nodes = json.loads(Path(handle["queue"]).read_text())
        return spec.State(bool(nodes), "QUEUED" if nodes else "gone", nodes)

    def cancel(self, record, handle):
        Path(handle["queue"]).write_text("[]")
'''


def test_a_scheduler_from_outside_plans_submits_and_says_how_a_run_stands(tmp_path):
    tree = tmp_path / "tree"
    work = tmp_path / "work"
    for name in ("train", "conf", "launch", "ami"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "launch/toy.py").write_text(MODULE)
    (tree / "conf/cluster/toy.yaml").write_text("defaults: [toy_schema]\n")
    path = tree / "launch/schedulers.py"
    text = path.read_text()
    line = '    "local": (LocalConfig, "launch.local"),\n'
    assert text.count(line) == text.count("from launch.slurm.config import SlurmConfig\n") == 1
    text = text.replace(line, f'{line}    "toy": (ToyConfig, "launch.toy"),\n')
    path.write_text(
        text.replace("from launch.slurm", "from launch.toy import ToyConfig\nfrom launch.slurm")
    )
    work.mkdir()

    def launch(*arguments):
        words = [sys.executable, "-m", "launch", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(
            words, cwd=work, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = ["--", "experiment=demo", "data.path=data", "run_dir=mine"]
    said = launch(
        "cluster=toy", "cluster.color=blue", "nodes=2", "processes_per_node=1", "submit=true", *run
    )
    assert "toy-submit blue" in said and "the queue is empty" in said
    seen = json.loads(launch("status", "mine", "--json"))
    assert (seen["state"], seen["answer"]["nodes"]) == ("starting", ["toy0", "toy1"])
    launch("cancel", "mine", "--yes")
    assert json.loads(launch("status", "mine", "--json"))["state"] == "cancelled"
