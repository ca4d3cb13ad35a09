"""AWS ParallelCluster: the YAML of a Slurm cluster that has the machines of a job, on which cluster=slurm works.

https://docs.aws.amazon.com/parallelcluster/latest/ug/cluster-configuration-file-v3.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from launch.config import LaunchConfig
from launch.engines import EngineConfig, ExternalEngine
from launch.record import Job
from train.config import check, setting
from train.host.machine import is_native
from train.storage.folders import is_s3

QUEUE = "train"
MARKETS = {"on-demand": "ONDEMAND", "spot": "SPOT", "capacity-block": "CAPACITY_BLOCK"}
SESSIONS = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"


@dataclass(kw_only=True)
class ParallelClusterConfig(EngineConfig):
    kind: str = "parallelcluster"
    gate: bool = True  # of the Slurm jobs
    subnet: str | None = None  # id of a private subnet with a NAT gateway, in the zone of the machines; needed
    head_subnet: str | None = None  # None: the same
    head_instance: str = "c6i.xlarge"  # it runs all the time
    os: str = setting("ubuntu2404", among=("ubuntu2204", "ubuntu2404", "alinux2023"))  # alinux2023: not for Trainium
    key: str | None = None  # name of an EC2 key pair; None: no SSH, sessions by Systems Manager only
    setup_script: str | None = None  # s3://... (of one of the buckets) or https://..., run as root on every machine
    buckets: list[str] = field(default_factory=list)  # that jobs may read and write, besides the run folder's
    market: str = setting("on-demand", among=tuple(MARKETS))  # how the machines are bought
    capacity_reservation: str | None = None  # id of a reservation or a capacity block
    idle_minutes: int = setting(10, above=0)  # after which a machine without a job ends

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.market != "on-demand":
            is_block, is_given = self.market == "capacity-block", self.capacity_reservation is not None
            need = "needs the block's id: cluster.capacity_reservation=cr-..." if is_block else "has no reservation"
            check(is_block == is_given, f"cluster.market={self.market} {need}")
        is_url = self.setup_script is None or re.match(r"(s3|https)://[\w-]", self.setup_script) is not None
        check(is_url, f"cluster.setup_script={self.setup_script} must be s3://bucket/name or https://...")


class ParallelCluster(ExternalEngine):
    settings = ParallelClusterConfig
    cluster: ParallelClusterConfig

    def __init__(self, cfg: LaunchConfig, bundle: bytes) -> None:
        super().__init__(cfg, bundle)
        cluster = self.cluster
        check(cluster.subnet is not None, "cluster.subnet is missing: the id of a private subnet with a way out (NAT)")
        if cfg.instance.device == "neuron":
            # PyTorch/XLA of Neuron's SDK needs glibc 2.35: Amazon Linux 2023 has 2.34.
            too_old = f"cluster.os={cluster.os} is too old for torch-neuronx; choose ubuntu2404"
            check(is_native(cfg.instance.name) or cluster.os != "alinux2023", too_old)
            check(
                bool(cluster.image or cluster.setup_script),
                "ParallelCluster's own image has no Neuron driver: give cluster.image (pcluster build-image makes one "
                "from a Neuron image) or cluster.setup_script",
            )

    def content(self, job: Job) -> dict[str, Any]:
        cluster, instance, count = self.cluster, self.cfg.instance, self.cfg.nodes + self.cfg.spares
        is_block = cluster.market == "capacity-block"  # its machines are close to one another, and always there
        buckets = [*([job.run_dir.split("/")[2]] if is_s3(job.run_dir) else []), *cluster.buckets]
        access = [{"BucketName": name, "EnableWriteAccess": True} for name in dict.fromkeys(buckets)]
        storage = {"RootVolume": {"Size": cluster.disk_gib, "VolumeType": "gp3", "Encrypted": True}}
        head = {
            "InstanceType": cluster.head_instance,
            "Networking": {"SubnetId": cluster.head_subnet or cluster.subnet},
            "Ssh": {"KeyName": cluster.key} if cluster.key else None,
            "LocalStorage": storage,
            "Iam": {"AdditionalIamPolicies": [{"Policy": SESSIONS}], "S3Access": access or None},
        }
        near = {"Enabled": True} if self.uses_efa and not is_block else None
        machines = {
            "Name": re.sub("[^a-z0-9]+", "-", instance.name)[:25].strip("-"),
            "InstanceType": instance.name,
            "MinCount": count if is_block else 0,
            "MaxCount": count,
            "Efa": {"Enabled": True} if self.uses_efa else None,
        }
        reservation, script = cluster.capacity_reservation, cluster.setup_script
        queue = {
            "Name": QUEUE,
            "CapacityType": MARKETS[cluster.market],
            "CapacityReservationTarget": {"CapacityReservationId": reservation} if reservation else None,
            "Networking": {"SubnetIds": [cluster.subnet], "AssignPublicIp": False, "PlacementGroup": near},
            "ComputeSettings": {"LocalStorage": storage},
            "CustomActions": {"OnNodeConfigured": {"Script": script}} if script else None,
            "Iam": {"S3Access": access} if access else None,
            "ComputeResources": [machines],
        }
        idle = {"ScaledownIdletime": cluster.idle_minutes}
        whole: dict[str, Any] = given(
            {
                "Region": cluster.region,
                "Image": {"Os": cluster.os, "CustomAmi": cluster.image},
                "Imds": {"ImdsSupport": "v2.0"},
                "HeadNode": head,
                "Scheduling": {"Scheduler": "slurm", "SlurmSettings": idle, "SlurmQueues": [queue]},
            }
        )
        return whole

    def steps(self, job: Job) -> list[tuple[str, list[str]]]:
        at = [f"--cluster-name={self.name(job)}", f"--region={self.cluster.region}"]
        create = ["pcluster", "create-cluster", *at, f"--cluster-configuration={self.path(self.file_name(job))}"]
        return [
            ("check", [*create, "--dryrun=true"]),
            ("create", create),
            ("on its head", ["python", "-m", "launch", "cluster=slurm", *self.slurm(job)]),
            ("delete", ["pcluster", "delete-cluster", *at]),
        ]

    def slurm(self, job: Job) -> list[str]:
        """What follows `python -m launch cluster=slurm` for the same run on the cluster."""
        cfg, more = self.cfg, [each for each in job.overrides if each.startswith("instance.")]
        words = [f"cluster.partition={QUEUE}", f"instance={cfg.instance.name}", *more, f"nodes={cfg.nodes}"]
        words += [f"spares={cfg.spares}"] if cfg.spares else []
        words += [f"processes_per_node={cfg.processes_per_node}"] if cfg.processes_per_node is not None else []
        words += ["cluster.gate=false"] if not cfg.cluster.gate else []
        return [*words, "submit=true", "--", *job.overrides]


def given(value: Any) -> Any:
    """Return the value without the keys whose value is None."""
    if isinstance(value, dict):
        return {key: given(item) for key, item in value.items() if item is not None}
    return [given(item) for item in value] if isinstance(value, list) else value
