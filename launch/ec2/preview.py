"""What the plan says of EC2: all that a launch would make, cost and leave. With check=true EC2 is asked about it."""

from __future__ import annotations

from collections.abc import Iterator

from launch.config import LaunchConfig
from launch.ec2 import network
from launch.ec2.boot import user_data
from launch.ec2.config import Ec2Config
from launch.ec2.images import default_parameter
from launch.ec2.request import has_placement_group, name_of, tags
from launch.ec2.resolved import Resolved
from launch.job import Job
from launch.record import Record
from launch.values import shown_duration
from train.config.backend import CUDA
from train.storage.folders import sha256_bytes


def lines(job: Job, cluster: Ec2Config, record: Record, cfg: LaunchConfig) -> Iterator[str]:
    """The lines of the plan. Nothing is asked without check=true."""
    resolved = check_account(job, cluster, record) if cfg.check else None
    machines = job.nodes + job.spares
    data = user_data(job, record)
    accelerators = cfg.instance.device or CUDA
    if resolved is None:
        yield f"image: {cluster.image or f'SSM parameter {default_parameter(accelerators)}'}"
        yield f"regions, in order: {', '.join(cluster.regions) or record.s3.region or 'of AWS_DEFAULT_REGION'}"
        yield f"subnets, in order: {', '.join(cluster.subnets) or 'those of the default VPC'}"
        cards, efa = cfg.instance.network_cards, cfg.instance.efa_interfaces
        if cards and efa and machines > 1:
            yield f"network: {efa} EFA interfaces on {cards} cards; EC2 says how (check=true shows it)"
    else:
        yield from (f"image in {region}: {image.id} ({image.name})" for region, image in resolved.images.items())
        yield f"subnets, in order: {', '.join(f'{site.subnet} ({site.zone})' for site in resolved.sites)}"
        yield from (f"network: {each}" for each in network.shown(resolved.interfaces))
    yield f"market: {cluster.market}{f', {cluster.capacity_reservation}' if cluster.capacity_reservation else ''}"
    yield f"disk: {cluster.disk_gib} GiB gp3, encrypted; metadata: IMDSv2 only; no SSH, no key"
    group = cluster.security_group or f"{name_of(record)}, made: all traffic among the machines, none from outside"
    yield f"security group: {group}"
    if has_placement_group(cluster, machines):
        yield f"placement group: {name_of(record)}-SUBNET, made"
    yield f"role of the machines: {cluster.instance_profile}"
    yield f"tags: {', '.join(f'{key}={value}' for key, value in tags(record, 1).items())}"
    yield f"user data: {len(data):,} bytes of {16 * 1024:,}, sha256 {sha256_bytes(data)[:16]}"
    yield from ceiling(cluster, cfg, machines)
    yield f"undo: python -m launch cancel {record.run_dir} --yes; python -m launch clean {record.run_dir} --yes"
    yield (
        "EC2 would do it (DryRun in each subnet; it does not know whether there is capacity)"
        if resolved
        else ("EC2 was not asked; check=true does it")
    )


def ceiling(cluster: Ec2Config, cfg: LaunchConfig, machines: int) -> Iterator[str]:
    """The most that the machines can cost: whatever happens, they end after max_run_s and half an hour."""
    is_spot = cluster.market == "spot"
    price = cfg.instance.usd_per_hour_spot if is_spot else cfg.instance.usd_per_hour
    limit = f"{shown_duration(cluster.max_run_s)} (cluster.max_run_s)"
    if price is None:
        what = "instance.usd_per_hour_spot" if is_spot else "instance.usd_per_hour"
        yield f"cost: {machines} machines for {limit} at the most; the price is not known ({what})"
        return
    hours = cluster.max_run_s / 3600
    yield f"cost: at most ${machines * price * hours:,.0f}: {machines} x ${price:.2f} an hour x {limit}; disks besides"


def check_account(job: Job, cluster: Ec2Config, record: Record) -> Resolved:
    """Resolve the settings and send each request as a dry run. InputError with the cure for the first refusal."""
    from launch.ec2.api import Api
    from launch.ec2.gang import Gang
    from launch.ec2.intents import RUN, Intents
    from launch.ec2.quota import check_quotas
    from launch.ec2.resolve import resolve

    api = Api(record.s3.profile, record.s3.region)
    resolved = resolve(job, cluster, record, api)
    if cluster.capacity_reservation is None:
        check_quotas(api, resolved.regions, job.instance, job.nodes + job.spares, cluster.market)
    gang = Gang(record, job, cluster, resolved, api, user_data(job, record), Intents(record))
    for site in resolved.sites:
        request = gang.body(
            site, gang.size, gang.intents.next, cluster.security_group, None
        )  # groups of the run are not there yet
        api.dry_run(site.region, RUN, **request)
    return resolved
