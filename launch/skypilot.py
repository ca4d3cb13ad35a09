"""SkyPilot: the YAML of a task that brings up machines, unpacks the job's code on each and runs its torchrun.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

from launch.code import START
from launch.config import LaunchConfig
from launch.engines import EngineConfig, ExternalEngine
from launch.record import Job
from train.config import check
from train.storage.folders import is_s3

CODE = "~/baretrain"  # on the machines
PORT = 20_707
RESTARTS = 3  # of failed ranks: nothing else starts them again there
# The families that have EFA in SkyPilot 0.14.1 (sky/clouds/aws.py, _EFA_INSTANCE_TYPE_PREFIXES). Trainium is not there.
EFA = ("g4dn", "g5", "g6", "gr6", "g6e", "g7e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300")


@dataclass(kw_only=True)
class SkyPilotConfig(EngineConfig):
    UNUSED: ClassVar[tuple[str, ...]] = (*EngineConfig.UNUSED, "gate")

    kind: str = "skypilot"
    use_spot: bool = False  # as a managed job, which continues elsewhere after the loss of a machine
    python: str = "/opt/baretrain/venv/bin/python"  # interpreter of the machines, with baretrain's packages
    setup: str | None = None  # your shell command that makes it; None: the image has it


class SkyPilot(ExternalEngine):
    settings = SkyPilotConfig
    cluster: SkyPilotConfig

    def __init__(self, cfg: LaunchConfig, bundle: bytes) -> None:
        super().__init__(cfg, bundle)
        instance = cfg.instance.name
        check(cfg.spares == 0, f"spares={cfg.spares}: cluster=skypilot has none")
        check(
            bool(self.cluster.image or self.cluster.setup),
            "SkyPilot's own image has no baretrain: give cluster.image, or the command that installs it as "
            "cluster.setup, with cluster.python",
        )
        check(
            not self.uses_efa or instance.split(".")[0] in EFA,
            f"nodes={cfg.nodes}: SkyPilot has no EFA for {instance}; take nodes=1, or cluster=parallelcluster",
        )

    def content(self, job: Job) -> dict[str, Any]:
        check(
            is_s3(job.run_dir), f"run_dir={job.run_dir} is on this machine; SkyPilot's need run_dir=s3://bucket/prefix"
        )
        cluster, instance = self.cluster, self.cfg.instance
        file, code = job.code.file, code_of(job)
        unpack = [f"mkdir -p {code}", f"tar -xzf {CODE}/{file} -C {code}"]
        return {
            "name": self.name(job),
            "resources": {
                "infra": f"aws/{cluster.region}",
                "instance_type": instance.name,
                "use_spot": cluster.use_spot,
                "disk_size": cluster.disk_gib,
                **({"image_id": cluster.image} if cluster.image is not None else {}),
                **({"network_tier": "best"} if self.uses_efa else {}),  # EFA
            },
            "num_nodes": job.nodes,
            "envs": dict(sorted(job.environment.items())),
            "file_mounts": {f"{CODE}/{file}": self.path(file)},
            "setup": "\n".join(["set -e", *([cluster.setup] if cluster.setup else []), *unpack, ""]),
            "run": self.torchrun(job),
        }

    def torchrun(self, job: Job) -> str:
        """The command of every machine, one word a line. SkyPilot's variables are all that its shell reads in it."""
        first = '"$(echo "$SKYPILOT_NODE_IPS" | head -n1)"'
        several = ['--node-rank="$SKYPILOT_NODE_RANK"', f"--master-addr={first}", f"--master-port={PORT}"]
        alone = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        words = [
            f"{shlex.quote(self.cluster.python)} -m torch.distributed.run",
            f"--nnodes={job.nodes}",
            f"--nproc-per-node={job.processes_per_node}",
            *(several if job.nodes > 1 else alone),
            f"--max-restarts={RESTARTS}",
            f"{code_of(job)}/{START}",
            job.module,
            *(shlex.quote(each) for each in job.overrides),
        ]
        return " \\\n  ".join(words) + "\n"

    def files(self, job: Job) -> dict[str, bytes]:
        return {**super().files(job), job.code.file: self.bundle}

    def steps(self, job: Job) -> list[tuple[str, list[str]]]:
        name, path = self.name(job), self.path(self.file_name(job))
        # With a public address a machine gets one EFA interface of all it could have.
        private = ["--config=aws.use_internal_ips=true"] if self.uses_efa else []
        start, logs, end = ["launch", f"--cluster={name}", "--down"], ["logs", name], ["down", name]
        if self.cluster.use_spot:
            start, logs, end = (["jobs", each, f"--name={name}"] for each in ("launch", "logs", "cancel"))
        return [
            ("check", ["sky", "launch", "--dryrun", *private, path]),
            ("start", ["sky", *start, *private, path]),
            ("logs", ["sky", *logs]),
            ("end", ["sky", *end]),
        ]


def code_of(job: Job) -> str:
    """The folder of the unpacked code on a machine."""
    return f"{CODE}/{job.code.file.partition('.')[0]}"
