"""The request for machines, as RunInstances takes it. Pure functions: equal arguments give an equal request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.ec2.config import Ec2Config
from launch.ec2.network import specifications
from launch.ec2.resolved import Resolved, Site
from launch.job import Job
from launch.record import Record
from train.storage.folders import sha256_bytes, sha256_json

RUN_TAG, DIR_TAG, INTENT_TAG = "baretrain:run", "baretrain:run-dir", "baretrain:intent"
MOST_TAG_CHARS = 256


def run_id(record: Record) -> str:
    """What marks everything that a run has on EC2; it follows from the run's location alone."""
    return sha256_bytes(record.location.encode())[:16]


def name_of(record: Record) -> str:
    """The name of the run's groups."""
    return f"baretrain-{run_id(record)}"


def tags(record: Record, number: int) -> dict[str, str]:
    """The tags of what the intent of this number makes."""
    return {
        "Name": name_of(record),
        RUN_TAG: run_id(record),
        DIR_TAG: record.run_dir[-MOST_TAG_CHARS:],
        INTENT_TAG: str(number),
    }


def tag_specifications(values: Mapping[str, str], *kinds: str) -> list[dict[str, Any]]:
    """Tags that are set by the very call that makes a thing: without them no clean would know it."""
    listed = [{"Key": key, "Value": value} for key, value in values.items()]
    return [{"ResourceType": kind, "Tags": listed} for kind in kinds]


def token(resolved: Resolved, number: int, subnet: str) -> str:
    """ClientToken: EC2 answers a request that is repeated with the same one with the same machines. 64 characters."""
    return sha256_json([resolved.id, number, subnet])


def body(
    job: Job,
    cluster: Ec2Config,
    resolved: Resolved,
    site: Site,
    *,
    number: int,
    record: Record,
    user_data: bytes,
    group: str | None,
    placement: str | None,
) -> dict[str, Any]:
    """The request for all machines in one subnet, all or none. `group` and `placement`: None before they exist."""
    image = resolved.images[site.region]
    disk = {"VolumeSize": cluster.disk_gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    kinds = ["instance", "volume", "network-interface"]
    kinds += ["spot-instances-request"] if cluster.market == "spot" else []
    return {
        "ImageId": image.id,
        "InstanceType": job.instance,
        "MinCount": job.nodes,
        "MaxCount": job.nodes,
        "ClientToken": token(resolved, number, site.subnet),
        "NetworkInterfaces": specifications(
            resolved.interfaces, subnet=site.subnet, group=group, public_address=cluster.public_address
        ),
        "BlockDeviceMappings": [{"DeviceName": image.root_device, "Ebs": disk}],
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
        "InstanceInitiatedShutdownBehavior": "terminate",  # a machine that shuts down costs nothing more
        "TagSpecifications": tag_specifications(tags(record, number), *kinds),
        "UserData": user_data.decode("ascii"),
        **({"IamInstanceProfile": {"Name": cluster.instance_profile}} if cluster.instance_profile else {}),
        **({} if placement is None else {"Placement": {"GroupName": placement}}),
        **market(cluster),
    }


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
