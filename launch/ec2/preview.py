"""What the plan says of EC2: the request itself, what it may cost, how to undo it. With check=true EC2 is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launch.config import LaunchConfig
from launch.ec2.account import EFA, EFA_ONLY, INTERFACE, OWN_IMAGE, Resolved, Site, layout, resolve
from launch.ec2.config import Ec2Config
from launch.ec2.request import MOST_BYTES, name_of, placement_name, run_instances
from launch.job import Job
from launch.record import Record
from launch.values import shown_duration
from train.config.backend import CUDA
from train.storage.folders import sha256_bytes


def planned(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> tuple[Resolved, dict[str, Any]]:
    """What the settings come to, and the request in the first subnet. Without check=true nothing is asked; with it
    InputError for the first subnet in which EC2 would not do it.
    """
    if not cfg.check:
        resolved = assumed(job, cluster, record, cfg)
        return resolved, request_in(resolved.sites[0], job, cluster, record, resolved)
    from launch.ec2.api import Api

    api = Api(record.s3.profile, record.s3.region)
    resolved = resolve(job, cluster, record, api)
    requests = [request_in(site, job, cluster, record, resolved) for site in resolved.sites]
    for site, request in zip(resolved.sites, requests, strict=True):
        api.dry_run(site.region, "run_instances", **request)
    return resolved, requests[0]


def request_in(site: Site, job: Job, cluster: Ec2Config, record: Record, resolved: Resolved) -> dict[str, Any]:
    """The first request in a subnet, before the groups of the run are there. A later one has another token."""
    name, is_made = placement_name(record, cluster, site, job.nodes)
    return run_instances(
        job,
        cluster,
        record,
        resolved,
        site,
        number=1,
        max_run_s=cluster.max_run_s,
        group=cluster.security_group,
        placement=None if is_made else name,
    )


def assumed(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> Resolved:
    """What the settings come to, as far as it is known without asking."""
    region = (cluster.regions or [record.s3.region or "<AWS_DEFAULT_REGION>"])[0]
    types = [INTERFACE, *([EFA, EFA_ONLY] if cfg.instance.efa_interfaces else [])]
    cards = [
        {"NetworkCardIndex": card, "MaximumNetworkInterfaces": 2, "InterfaceTypes": types}
        for card in range(cfg.instance.network_cards or 1)
    ]
    network = {"NetworkCards": cards, "EfaInfo": {"MaximumEfaInterfaces": cfg.instance.efa_interfaces or 0}}
    given = cluster.image or OWN_IMAGE.format(cfg.instance.device or CUDA)
    image = given if given.startswith("ami-") else f"<resolve:ssm:{given}>"
    subnets = cluster.subnets or ["<of the default VPC>"]
    sites = [Site(region, subnet, "<zone>", "<VPC>", image, "<root device>") for subnet in subnets]
    info = {"InstanceType": job.instance, "NetworkInfo": network}
    return Resolved("plan", job.id, "", sites, layout(info, cluster, job.nodes))


def lines(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> Iterator[str]:
    """The lines of the plan."""
    resolved, request = planned(job, cluster, record, cfg)
    data = request["UserData"].encode()
    request["UserData"] = f"{len(data):,} bytes of {MOST_BYTES:,}, sha256 {sha256_bytes(data)}"
    yield f"RunInstances in {resolved.sites[0].region}, in a subnet at a time:"
    yield from json.dumps(request, indent=1).splitlines()
    yield f"subnets, in order: {', '.join(f'{site.subnet} ({site.zone})' for site in resolved.sites)}"
    if cluster.security_group is None:
        yield f"security group {name_of(record)} is made: all traffic among the machines, none from outside"
    name, is_made = placement_name(record, cluster, resolved.sites[0], job.nodes)
    if is_made:
        yield f"placement group {name} is made"
    yield ceiling(cluster, cfg)
    yield f"undo: python -m launch cancel {record.run_dir} --yes; python -m launch clean {record.run_dir} --yes"
    yield (
        "EC2 would do it (DryRun in each subnet; it does not know whether there is capacity)"
        if cfg.check
        else "EC2 was not asked: what stands in <> or is of conf/instance is its to say; check=true asks"
    )


def ceiling(cluster: Ec2Config, cfg: LaunchConfig) -> str:
    """The most that the machines can cost: whatever happens, they end after max_run_s and half an hour."""
    name = "usd_per_hour_spot" if cluster.market == "spot" else "usd_per_hour"
    price, limit = getattr(cfg.instance, name), f"{shown_duration(cluster.max_run_s)} (cluster.max_run_s)"
    if price is None:
        return f"cost: {cfg.nodes} machines for {limit} at the most; the price is not known (instance.{name})"
    usd = cfg.nodes * price * cluster.max_run_s / 3600
    return f"cost: at most ${usd:,.0f}: {cfg.nodes} x ${price:.2f} an hour x {limit}; disks besides"
