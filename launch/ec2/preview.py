"""What the plan says of EC2: the request itself, what it may cost, how to undo it. With check=true EC2 is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launch.config import LaunchConfig
from launch.ec2 import network
from launch.ec2.boot import MOST_BYTES, user_data
from launch.ec2.config import Ec2Config
from launch.ec2.images import default_parameter
from launch.ec2.intents import RUN
from launch.ec2.request import body, name_of
from launch.ec2.resolved import Image, Resolved, Site
from launch.job import Job
from launch.record import Record
from launch.values import shown_duration
from train.config.backend import CUDA
from train.storage.folders import sha256_bytes
from train.storage.schema import FileName

FIRST = 1  # number of the first intent; another one has other tags, another token and user data of its own


def planned(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> tuple[Resolved, dict[str, Any]]:
    """What the settings come to, and the request in the first subnet. Nothing is asked without check=true."""
    resolved = check_account(job, cluster, record) if cfg.check else assumed(job, cluster, record, cfg)
    data = user_data(job, record, request=FIRST, max_run_s=cluster.max_run_s)
    request = request_for(job, cluster, record, resolved, resolved.sites[0], data)
    if not cfg.check:
        request["ImageId"] = next(iter(resolved.images.values())).name
    return resolved, request


def lines(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> Iterator[str]:
    """The lines of the plan."""
    resolved, request = planned(job, cluster, record, cfg)
    data = request["UserData"].encode()
    request["UserData"] = f"{len(data):,} bytes of {MOST_BYTES:,}, sha256 {sha256_bytes(data)}"
    yield f"RunInstances in {resolved.sites[0].region}, in a subnet at a time:"
    yield from json.dumps(request, indent=1).splitlines()
    yield f"subnets, in order: {', '.join(f'{site.subnet} ({site.zone})' for site in resolved.sites)}"
    yield from (f"network: {each}" for each in network.shown(resolved.interfaces))
    if cluster.security_group is None:
        yield f"security group {name_of(record)} is made: all traffic among the machines, none from outside"
    if (made := f"{name_of(record)}-SUBNET") == cluster.group_name(made, job.nodes):
        yield f"placement group {made} is made"
    yield from ceiling(cluster, cfg)
    yield f"undo: python -m launch cancel {record.run_dir} --yes; python -m launch clean {record.run_dir} --yes"
    yield (
        "EC2 would do it (DryRun in each subnet; it does not know whether there is capacity)"
        if cfg.check
        else "EC2 was not asked: what stands in <> or is of conf/instance is its to say; check=true asks"
    )


def assumed(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> Resolved:
    """What the settings come to, as far as it is known without asking."""
    regions = cluster.regions or [record.s3.region or "<AWS_DEFAULT_REGION>"]
    subnets = cluster.subnets or ["<of the default VPC>"]
    cards = range(cfg.instance.network_cards or 1)
    kinds = [network.INTERFACE, *([network.EFA, network.EFA_ONLY] if cfg.instance.efa_interfaces else [])]
    known = {
        "NetworkCards": [
            {"NetworkCardIndex": card, "MaximumNetworkInterfaces": 2, "InterfaceTypes": kinds} for card in cards
        ],
        "EfaInfo": {"MaximumEfaInterfaces": cfg.instance.efa_interfaces or 0},
    }
    parameter = default_parameter(cfg.instance.device or CUDA)
    image = cluster.image or parameter
    name = image if image.startswith("ami-") else f"<resolve:ssm:{image}>"
    return Resolved(
        id=FileName("plan"),
        job_id=job.id,
        image_setting="",
        sites=[Site(regions[0], FileName(each), "<zone>", FileName("vpc")) for each in subnets],
        images={regions[0]: Image(FileName("image"), "<root device>", name)},
        interfaces=network.interfaces(known, uses_efa=job.nodes > 1, secondary=cluster.secondary_interfaces),
    )


def request_for(
    job: Job, cluster: Ec2Config, record: Record, resolved: Resolved, site: Site, data: bytes
) -> dict[str, Any]:
    """The request in a subnet, before the groups of the run are there."""
    made = f"{name_of(record)}-{site.subnet}"
    name = cluster.group_name(made, job.nodes)
    return body(
        job,
        cluster,
        resolved,
        site,
        number=FIRST,
        record=record,
        user_data=data,
        group=cluster.security_group,
        placement=None if name == made else name,
    )


def ceiling(cluster: Ec2Config, cfg: LaunchConfig) -> Iterator[str]:
    """The most that the machines can cost: whatever happens, they end after max_run_s and half an hour."""
    is_spot, machines = cluster.market == "spot", cfg.nodes
    price = cfg.instance.usd_per_hour_spot if is_spot else cfg.instance.usd_per_hour
    limit = f"{shown_duration(cluster.max_run_s)} (cluster.max_run_s)"
    if price is None:
        what = "instance.usd_per_hour_spot" if is_spot else "instance.usd_per_hour"
        yield f"cost: {machines} machines for {limit} at the most; the price is not known ({what})"
        return
    hours = cluster.max_run_s / 3600
    yield f"cost: at most ${machines * price * hours:,.0f}: {machines} x ${price:.2f} an hour x {limit}; disks besides"


def check_account(job: Job, cluster: Ec2Config, record: Record) -> Resolved:
    """Resolve the settings and send each request as a dry run. InputError with the cure for the first that fails."""
    from launch.ec2.api import Api
    from launch.ec2.quota import check_quotas
    from launch.ec2.resolve import resolve

    api = Api(record.s3.profile, record.s3.region)
    resolved = resolve(job, cluster, record, api)
    if cluster.capacity_reservation is None:
        check_quotas(api, resolved.regions, job.instance, job.nodes, cluster.market)
    data = user_data(job, record, request=FIRST, max_run_s=cluster.max_run_s)
    for site in resolved.sites:
        api.dry_run(site.region, RUN, **request_for(job, cluster, record, resolved, site, data))
    return resolved
