"""The request for machines, as RunInstances takes it. Pure functions: equal arguments give an equal request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.ec2.account import Resolved, Site
from launch.ec2.boot import user_data
from launch.ec2.config import Ec2Config
from launch.job import Job
from launch.record import Record
from train.storage.folders import sha256_bytes, sha256_json

RUN_TAG, DIR_TAG = "baretrain:run", "baretrain:run-dir"
MOST_TAG_CHARS = 256


def run_id(record: Record) -> str:
    """What marks everything that a run has on EC2; it follows from the run's location alone."""
    return sha256_bytes(record.location.encode())[:16]


def name_of(record: Record) -> str:
    """The name of the run's groups."""
    return f"baretrain-{run_id(record)}"


def placement_name(record: Record, cluster: Ec2Config, site: Site, machines: int) -> tuple[str | None, bool]:
    """The placement group of a request, None for a request without one; and whether the launch makes it.

    A cluster is in one zone, hence a group for each subnet. Machines of a reservation are where they are: a block takes
    no group, a reservation none but its own.
    """
    if cluster.placement_group not in ("true", "false"):
        return cluster.placement_group, False
    is_made = cluster.placement_group == "true" and cluster.capacity_reservation is None and machines > 1
    return (f"{name_of(record)}-{site.subnet}", True) if is_made else (None, False)


def tags(record: Record, *kinds: str) -> list[dict[str, Any]]:
    """Tags that are set by the very call that makes a thing: without them no clean would know it."""
    values = {"Name": name_of(record), RUN_TAG: run_id(record), DIR_TAG: record.run_dir[-MOST_TAG_CHARS:]}
    listed = [{"Key": key, "Value": value} for key, value in values.items()]
    return [{"ResourceType": kind, "Tags": listed} for kind in kinds]


def run_instances(
    job: Job,
    cluster: Ec2Config,
    record: Record,
    resolved: Resolved,
    site: Site,
    *,
    number: int,
    max_run_s: int,
    group: str | None,
    placement: str | None,
) -> dict[str, Any]:
    """The request for all machines in one subnet, all or none. `group`: its security group, None before it exists."""
    disk = {"VolumeSize": cluster.disk_gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    kinds = ["instance", "volume", "network-interface"]
    kinds += ["spot-instances-request"] if cluster.market == "spot" else []
    return {
        "ImageId": site.image,
        "InstanceType": job.instance,
        "MinCount": job.nodes,
        "MaxCount": job.nodes,
        # EC2 answers a request that is repeated with the same token with the same machines. 64 characters.
        "ClientToken": sha256_json([resolved.id, number, site.subnet]),
        "NetworkInterfaces": interfaces(resolved, cluster, site, group),
        "BlockDeviceMappings": [{"DeviceName": site.root_device, "Ebs": disk}],
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
        "InstanceInitiatedShutdownBehavior": "terminate",  # a machine that shuts down costs nothing more
        "TagSpecifications": tags(record, *kinds),
        "UserData": user_data(job, record, request=number, max_run_s=max_run_s).decode("ascii"),
        **({"IamInstanceProfile": {"Name": cluster.instance_profile}} if cluster.instance_profile else {}),
        **({} if placement is None else {"Placement": {"GroupName": placement}}),
        **market(cluster),
    }


def interfaces(resolved: Resolved, cluster: Ec2Config, site: Site, group: str | None) -> list[Mapping[str, Any]]:
    """The network interfaces of a machine."""
    common: dict[str, Any] = {"SubnetId": site.subnet, "DeleteOnTermination": True}
    if group is not None:
        common["Groups"] = [group]
    if len(resolved.interfaces) == 1:  # EC2 rejects it for several; for one it would follow the subnet's default
        common["AssociatePublicIpAddress"] = cluster.public_address
    return [
        {"NetworkCardIndex": each.card, "DeviceIndex": each.device, "InterfaceType": each.type, **common}
        for each in resolved.interfaces
    ]


def market(cluster: Ec2Config) -> dict[str, Any]:
    """How the machines are paid for."""
    made: dict[str, Any] = {}
    if cluster.market == "spot":  # no MaxPrice: a low one only brings more interruptions
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        made["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    if cluster.market == "capacity-block":
        made["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if cluster.capacity_reservation is not None:
        target = {"CapacityReservationId": cluster.capacity_reservation}
        made["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    return made
