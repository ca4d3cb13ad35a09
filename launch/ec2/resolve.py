"""From settings to subnets, images and network interfaces of an account. It asks AWS, and makes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import botocore

from launch.ec2.api import Api
from launch.ec2.config import Ec2Config
from launch.ec2.groups import check_rules, find_placement_groups, read_security_group
from launch.ec2.images import image_id, read_image
from launch.ec2.network import INTERFACE, Interface, interfaces
from launch.ec2.resolved import Image, Resolved, Site, read_resolved
from launch.job import Job
from launch.record import Record
from train.config import InputError, check
from train.config.backend import CUDA, NEURON
from train.storage.aws_errors import Rejected
from train.storage.schema import FileName


def regions_of(cluster: Ec2Config, api: Api) -> list[str]:
    """The regions in which machines may be, in order."""
    regions = cluster.regions or ([api.default_region] if api.default_region else [])
    check(bool(regions), "no region is named: set cluster.regions=[us-east-1], s3.region or AWS_DEFAULT_REGION")
    return regions


def resolve(job: Job, cluster: Ec2Config, record: Record, api: Api) -> Resolved:
    """What the settings come to. InputError with the cure for whatever would fail later."""
    regions, before = regions_of(cluster, api), read_resolved(record)
    is_id = cluster.image is not None and cluster.image.startswith("ami-")
    check(
        not (is_id and len(regions) > 1),
        f"cluster.image={cluster.image} is of one region, there are {len(regions)}: name an SSM parameter instead",
    )
    known = before.images if before is not None and is_pinned(before, job, cluster) else {}
    machines = job.nodes
    sites, images, chosen = list[Site](), dict[str, Image](), list[Interface]()
    for region in regions:
        info = type_info(api, region, job.instance)
        check(info is not None, f"{region} has no {job.instance}: choose other regions (cluster.regions) or machines")
        assert info is not None
        accelerators = NEURON if "NeuronInfo" in info else CUDA
        ident = known[region].id if region in known else image_id(api, region, cluster, accelerators)
        images[region] = read_image(api, region, ident, cluster=cluster, accelerators=accelerators, type_info=info)
        chosen = layout(info, cluster, machines)
        addresses = sum(each.has_address for each in chosen)
        sites += subnets(api, region, cluster, job.instance, machines, addresses=addresses, cards=len(chosen))
    check_reservation(api, cluster, sites)
    check_placement_group(api, cluster, sites)
    check_security_group(api, cluster, sites, machines)
    if cluster.market == "spot" and not cluster.subnets:
        sites = by_price(api, job.instance, sites)
    return Resolved(
        id=FileName(secrets.token_hex(16)),
        job_id=job.id,
        image_setting=cluster.image or "",
        sites=sites,
        images=images,
        interfaces=chosen,
    )


def is_pinned(before: Resolved, job: Job, cluster: Ec2Config) -> bool:
    """Whether this job was started before: it keeps its images, although a parameter may now name others."""
    return before.job_id == job.id and before.image_setting == (cluster.image or "")


def type_info(api: Api, region: str, instance: str) -> Mapping[str, Any] | None:
    """What EC2 says of a type; None if the region has none."""
    try:
        answer = api.ask(region, "describe_instance_types", InstanceTypes=[instance])
    except Rejected as error:
        if error.code != "InvalidInstanceType":
            raise
        return None
    return next(iter(answer["InstanceTypes"]), None)


def layout(info: Mapping[str, Any], cluster: Ec2Config, machines: int) -> list[Interface]:
    """The interfaces of each machine. InputError for EFA that would be left out, and for several addresses."""
    network, uses_efa = info["NetworkInfo"], machines > 1
    chosen = interfaces(network, uses_efa=uses_efa, secondary=cluster.secondary_interfaces)
    # An older botocore drops the interface types of the cards from EC2's answer without a word.
    check(
        not (uses_efa and network.get("EfaSupported")) or any(each.type != INTERFACE for each in chosen),
        f"EC2 says that {info['InstanceType']} supports EFA, but botocore {botocore.__version__} names no network card "
        "with it: install boto3>=1.43.90",
    )
    check(
        not (cluster.public_address and len(chosen) > 1),
        f"cluster.public_address=true is for machines with one network interface, {info['InstanceType']} has "
        f"{len(chosen)}: leave it out, and reach them through SSM (aws ssm start-session --target i-...)",
    )
    return chosen


def subnets(
    api: Api, region: str, cluster: Ec2Config, instance: str, machines: int, *, addresses: int, cards: int
) -> list[Site]:
    """The subnets of a region in which the machines can be: in a zone that has the type, with enough addresses."""
    filters = {"subnet-id": cluster.subnets} if cluster.subnets else {"default-for-az": ["true"]}
    listed = [{"Name": name, "Values": values} for name, values in filters.items()]
    seen = api.pages(region, "describe_subnets", "Subnets", Filters=listed)
    order = {ident: index for index, ident in enumerate(cluster.subnets)}
    seen.sort(key=lambda each: (order.get(each["SubnetId"], 0), each["AvailabilityZone"]))
    offers = api.pages(
        region,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [instance]}],
    )
    zones = {str(each["Location"]) for each in offers}
    offered = [each for each in seen if each["AvailabilityZone"] in zones]
    named = f"cluster.subnets={cluster.subnets}" if cluster.subnets else "the subnets of a default VPC"
    check(bool(seen), f"{region} has none of {named}: name subnets of every region (cluster.subnets)")
    if not offered:
        raise InputError(
            f"{instance} is in {', '.join(sorted(zones)) or 'no zone'} of {region}, your subnets are in "
            f"{', '.join(sorted({each['AvailabilityZone'] for each in seen}))}: name others (cluster.subnets)"
        )
    public = [str(each["SubnetId"]) for each in offered if each.get("DefaultForAz")] if cards > 1 else []
    check(
        not public,
        f"a machine of {cards} network interfaces gets no public address, and without one it reaches nothing from "
        f"{', '.join(public)}, which are of a default VPC: name private subnets with a NAT gateway, or endpoints for "
        "S3 and SSM (cluster.subnets)",
    )
    wanted = machines * addresses
    roomy = [each for each in offered if int(each["AvailableIpAddressCount"]) >= wanted]
    if not roomy:
        most = max(int(each["AvailableIpAddressCount"]) for each in offered)
        raise InputError(
            f"{machines} machines need {wanted} addresses in one subnet, the largest of {region} has {most} free: name "
            f"another (cluster.subnets){', or set cluster.secondary_interfaces=efa-only' if addresses > 1 else ''}"
        )
    return [
        Site(region, FileName(each["SubnetId"]), str(each["AvailabilityZone"]), FileName(each["VpcId"]))
        for each in roomy
    ]


def check_reservation(api: Api, cluster: Ec2Config, sites: list[Site]) -> None:
    """Keep the subnets in the zone of the reservation; InputError if there is none, or if it is not active."""
    if cluster.capacity_reservation is None:
        return
    ident = cluster.capacity_reservation
    seen: dict[str, Any] = {}
    for region in dict.fromkeys(site.region for site in sites):
        filters = [{"Name": "capacity-reservation-id", "Values": [ident]}]
        for each in api.pages(region, "describe_capacity_reservations", "CapacityReservations", Filters=filters):
            seen = each
    check(
        bool(seen), f"there is no cluster.capacity_reservation={ident} in {', '.join({site.region for site in sites})}"
    )
    state, zone = str(seen.get("State")), str(seen.get("AvailabilityZone"))
    check(
        state == "active", f"the reservation {ident} is {state}, not active (a block begins at {seen.get('StartDate')})"
    )
    sites[:] = [site for site in sites if site.zone == zone]
    check(
        bool(sites), f"the reservation {ident} is in {zone}, where none of the subnets is: name one (cluster.subnets)"
    )


def check_placement_group(api: Api, cluster: Ec2Config, sites: Sequence[Site]) -> None:
    """InputError for a placement group that was named and is not there."""
    if cluster.placement_group in ("true", "false"):
        return
    filters = [{"Name": "group-name", "Values": [cluster.placement_group]}]
    for region in dict.fromkeys(site.region for site in sites):
        there = find_placement_groups(api, region, filters)
        check(bool(there), f"{region} has no placement group {cluster.placement_group}: create it, or leave it out")


def check_security_group(api: Api, cluster: Ec2Config, sites: Sequence[Site], machines: int) -> None:
    """InputError for a given security group of another VPC, or one in which machines do not reach one another."""
    given = cluster.security_group
    if given is None:
        return
    seen = read_security_group(api, sites[0].region, given)
    others = [site.subnet for site in sites if site.vpc != seen["VpcId"]]
    check(
        not others,
        f"cluster.security_group={given} is in {seen['VpcId']}, {', '.join(others)} are not: name the subnets there "
        "(cluster.subnets), or leave the group out",
    )
    if machines > 1:
        check_rules(seen)


def by_price(api: Api, instance: str, sites: Sequence[Site]) -> list[Site]:
    """The subnets in the order of today's spot price; those without one last."""
    prices: dict[str, float] = {}
    for region in dict.fromkeys(site.region for site in sites):
        answer = api.ask(
            region,
            "describe_spot_price_history",
            InstanceTypes=[instance],
            ProductDescriptions=["Linux/UNIX"],
            MaxResults=100,  # the newest first
        )
        for each in answer["SpotPriceHistory"]:
            prices.setdefault(str(each["AvailabilityZone"]), float(each["SpotPrice"]))
    return sorted(sites, key=lambda site: prices.get(site.zone, float("inf")))
