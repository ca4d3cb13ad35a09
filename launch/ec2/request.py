"""Pure functions that make the parameters of RunInstances for a run's machines."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.ec2.account import Resolved, Site
from launch.ec2.config import Ec2Config
from launch.record import Job, Record
from train.config import check
from train.storage.folders import sha256_bytes, sha256_json

RUN_TAG = "baretrain:run"
DIR_TAG = "baretrain:run-dir"
SCRIPT = Path(__file__).with_name("boot.sh")
DEAD_S = 1800  # a machine shuts down if its node program has not reached S3 for this time
SPARE_S = 1800  # time after max_run_s to save and to upload logs
MOST_BYTES = 16 * 1024  # maximum size of user data (EC2 user guide)


def run_id(record: Record) -> str:
    """Return the id that marks all machines of a run. It depends only on the run's location."""
    return sha256_bytes(record.location.encode())[:16]


def tags(record: Record, market: str) -> list[dict[str, Any]]:
    """Return the tags of all that a request creates."""
    kinds = ["instance", "volume", "network-interface"]
    if market == "spot":
        kinds.append("spot-instances-request")
    values = {
        "Name": f"baretrain-{run_id(record)}",
        RUN_TAG: run_id(record),
        DIR_TAG: record.run_dir,
    }
    listed = [{"Key": key, "Value": value} for key, value in values.items()]
    return [{"ResourceType": kind, "Tags": listed} for kind in kinds]


def run_instances(
    job: Job,
    cluster: Ec2Config,
    record: Record,
    resolved: Resolved,
    site: Site,
    *,
    request: int,
    ask: int,
    max_run_s: int,
) -> dict[str, Any]:
    """Return the parameters for machines in one subnet; EC2 starts all of them or none.

    `request` is the number that these machines share, `ask` counts the times that EC2 was asked for them.
    """
    made = {
        "ImageId": site.image,
        "InstanceType": job.instance,
        "MinCount": job.nodes,
        "MaxCount": job.nodes,
        # If a request with this token is repeated, EC2 answers with the same machines. The token has 64 characters.
        "ClientToken": sha256_json([resolved.id, request, ask, site.subnet]),
        "IamInstanceProfile": {"Name": site.profile},
        "NetworkInterfaces": interfaces(resolved, site),
        "BlockDeviceMappings": [{"DeviceName": site.root_device, "Ebs": disk(cluster)}],
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpEndpoint": "enabled",
            "HttpPutResponseHopLimit": 1,
        },
        "InstanceInitiatedShutdownBehavior": "terminate",  # a machine that shuts down stops costing money
        "TagSpecifications": tags(record, cluster.market),
        "UserData": user_data(job, record, request=request, max_run_s=max_run_s).decode("ascii"),
        **market(cluster),
    }
    if site.placement_group:
        made["Placement"] = {"GroupName": site.placement_group}
    return made


def disk(cluster: Ec2Config) -> dict[str, Any]:
    return {
        "VolumeSize": cluster.disk_gib,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }


def interfaces(resolved: Resolved, site: Site) -> list[Mapping[str, Any]]:
    # The subnet decides whether a machine with one interface gets a public address.
    return [
        {
            "NetworkCardIndex": each.card,
            "DeviceIndex": each.device,
            "InterfaceType": each.type,
            "SubnetId": site.subnet,
            "Groups": [site.security_group],
            "DeleteOnTermination": True,
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
    is_plain = re.fullmatch(r"[\w./+-]+", job.python, re.ASCII) is not None
    # boot.sh runs it as a command.
    check(is_plain, f"python={job.python!r} must be a path of letters, digits and _./+-")
    flags = record.s3.flags()
    words = [
        "launch.ec2.machine",
        record.run_dir,
        f"--request={request}",
        f"--max-run-s={max_run_s}",
        *flags,
        f"--job-sha256={record.job_sha256}",  # no machine of the run can change user data
    ]
    given = {
        "run": record.run_dir,
        "s3": flags,
        "bundle": job.code.file,
        "sha256": job.code.sha256,
        "arguments": words,
    }
    coded = base64.b64encode(json.dumps(given, sort_keys=True).encode()).decode()
    line = f"main {max_run_s + SPARE_S} {dead_s} {job.python} {coded}\n"
    return SCRIPT.read_bytes() + line.encode()
