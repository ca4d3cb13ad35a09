"""Pure functions that make the parameters of RunInstances for a run's machines."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.ec2.account import Resolved, Site
from launch.ec2.config import Ec2Config
from launch.record import Job, Record
from train.config import check
from train.storage.folders import sha256_bytes, sha256_json

RUN_TAG, DIR_TAG = "baretrain:run", "baretrain:run-dir"
SCRIPT = Path(__file__).with_name("boot.sh")
DEAD_S = 1800  # a machine shuts down if its node program has not reached S3 for this time
SPARE_S = 1800  # time after max_run_s to save and to upload logs
MOST_BYTES = 16 * 1024  # maximum size of user data (EC2 user guide)


def run_id(record: Record) -> str:
    """Return the id that marks all resources of a run on EC2. It depends only on the run's location."""
    return sha256_bytes(record.location.encode())[:16]


def name_of(record: Record) -> str:
    """Return the name that all resources of the run have on EC2."""
    return f"baretrain-{run_id(record)}"


def placement_name(
    record: Record, cluster: Ec2Config, site: Site, machines: int
) -> tuple[str | None, bool]:
    """Return the name of a request's placement group (None without one), and whether the launch makes the group.

    A cluster placement group is in one zone, so each subnet has a group. No group is made for reserved machines: a
    capacity block accepts none, and a reservation accepts only the group with which it was made.
    """
    if cluster.placement_group not in ("true", "false"):
        return cluster.placement_group, False
    is_made = (
        cluster.placement_group == "true" and cluster.capacity_reservation is None and machines > 1
    )
    return (f"{name_of(record)}-{site.subnet}", True) if is_made else (None, False)


def tags(record: Record, *kinds: str) -> list[dict[str, Any]]:
    """Return the tags for new resources. The call that makes a resource also tags it, so that `clean` finds it."""
    values = {"Name": name_of(record), RUN_TAG: run_id(record), DIR_TAG: record.run_dir}
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
    """Return the request for machines in one subnet; EC2 starts all of them or none. `group` is a security group."""
    disk = {
        "VolumeSize": cluster.disk_gib,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    kinds = ["instance", "volume", "network-interface"]
    kinds += ["spot-instances-request"] if cluster.market == "spot" else []
    return {
        "ImageId": site.image,
        "InstanceType": job.instance,
        "MinCount": job.nodes,
        "MaxCount": job.nodes,
        # If a request with this token is repeated, EC2 answers with the same machines. The token has 64 characters.
        "ClientToken": sha256_json([resolved.id, number, site.subnet]),
        "NetworkInterfaces": interfaces(resolved, cluster, site, group),
        "BlockDeviceMappings": [{"DeviceName": site.root_device, "Ebs": disk}],
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": 1,
        },
        "InstanceInitiatedShutdownBehavior": "terminate",  # a machine that shuts down stops costing money
        "TagSpecifications": tags(record, *kinds),
        "UserData": user_data(job, record, request=number, max_run_s=max_run_s).decode("ascii"),
        **(
            {"IamInstanceProfile": {"Name": cluster.instance_profile}}
            if cluster.instance_profile
            else {}
        ),
        **({} if placement is None else {"Placement": {"GroupName": placement}}),
        **market(cluster),
    }


def interfaces(
    resolved: Resolved, cluster: Ec2Config, site: Site, group: str | None
) -> list[Mapping[str, Any]]:
    common: dict[str, Any] = {"SubnetId": site.subnet, "DeleteOnTermination": True}
    if group is not None:
        common["Groups"] = [group]
    # EC2 rejects this key for several interfaces; the subnet's default then applies
    if len(resolved.interfaces) == 1:
        common["AssociatePublicIpAddress"] = cluster.public_address
    return [
        {
            "NetworkCardIndex": each.card,
            "DeviceIndex": each.device,
            "InterfaceType": each.type,
            **common,
        }
        for each in resolved.interfaces
    ]


def market(cluster: Ec2Config) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if cluster.market == "spot":  # no MaxPrice: a low one only causes more interruptions
        spot = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        made["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
    if cluster.market == "capacity-block":
        made["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if cluster.capacity_reservation is not None:
        target = {"CapacityReservationId": cluster.capacity_reservation}
        made["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    return made


# ---- user data -------------------------------------------------------------------------------------------------------


def user_data(
    job: Job, record: Record, *, request: int, max_run_s: int, dead_s: int = DEAD_S
) -> bytes:
    """Return a request's user data, before encoding. It is the same for all machines, and contains no secret."""
    # boot.sh runs it as a command
    is_plain = re.fullmatch(r"[\w./+-]+", job.python, re.ASCII) is not None
    check(is_plain, f"cluster.python={job.python!r} must be a path of letters, digits and _./+-")
    flags = replace(record.s3, profile=None).flags()  # a machine has a role instead
    words = [
        "launch.ec2.machine",
        record.run_dir,
        f"--request={request}",
        f"--max-run-s={max_run_s}",
        *flags,
    ]
    words += [f"--job-sha256={record.job_sha256}"]  # no machine of the run can change user data
    code = {"bundle": job.code.file, "sha256": job.code.sha256}
    given = json.dumps(
        {"run": record.run_dir, "s3": flags, **code, "arguments": words}, sort_keys=True
    )
    line = f"main {max_run_s + SPARE_S} {dead_s} {job.python} {base64.b64encode(given.encode()).decode()}\n"
    return SCRIPT.read_bytes() + line.encode()
