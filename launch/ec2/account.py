"""Functions that resolve a launch's settings in an AWS account: subnets, images, interfaces. They make no resources."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch import launched
from launch.ec2 import setup
from launch.ec2.api import Api
from launch.ec2.config import Ec2Config
from launch.record import Job, Record
from train.config import check
from train.config.backend import CUDA, NEURON
from train.storage.schema import record

# Types of network interfaces; efa-only has no IP address.
INTERFACE, EFA, EFA_ONLY = "interface", "efa", "efa-only"
# SSM parameters with the ids of this account's promoted images.
OWN_IMAGE = "/baretrain/ami/{}/latest"
AMI = re.compile(r"ami-[0-9a-f]{8,17}")


@dataclass(frozen=True)
class Interface:
    card: int
    device: int  # device index on the card
    type: str  # interface | efa | efa-only


@dataclass(frozen=True)
class Site:
    """A subnet for all machines of the run, and what they have there."""

    region: str
    subnet: str
    zone: str
    image: str
    root_device: str
    security_group: str
    profile: str  # name of the instance profile
    placement_group: str  # "" for none


@dataclass(frozen=True)
class Resolved:
    """The resolved settings of a job, recorded in its submission."""

    id: str  # random id of this submission, which makes its client tokens unique
    job_sha256: str
    sites: list[Site]  # in the order in which they are tried
    interfaces: list[Interface]  # network interfaces of each machine


def last_resolved(run: Record) -> Resolved | None:
    """Return the resolved settings of the run's last submission from this computer; None if there was none."""
    # They are not read from the record, where the run's machines could change the image.
    handle = launched.last_handle(run)
    if "resolved" not in handle:
        return None
    return record(Resolved, handle["resolved"])


def resolve(job: Job, cluster: Ec2Config, run: Record, api: Api) -> Resolved:
    """Resolve the settings by asking AWS. Raises InputError, with the cure, if a launch would fail or waste money."""
    # Mistakes that RunInstances reports clearly are not checked here.
    pinned = dict[str, str]()
    before = last_resolved(run)
    if before is not None and before.job_sha256 == run.job_sha256:
        # a resumed job keeps its images
        pinned = {site.region: site.image for site in before.sites}
    sites = list[Site]()
    interfaces = list[Interface]()
    for region in api.regions(cluster.regions):
        info = api.instance_type(region, job.instance)
        interfaces = layout(info, job.nodes)
        image, root_device = image_of(api, region, job, cluster, info, pinned.get(region))
        stack = setup.outputs(api, region)
        # A capacity block accepts no placement group, and a reservation only the one with which it was made.
        is_grouped = job.nodes > 1 and cluster.capacity_reservation is None
        for subnet in subnets(api, region, cluster, job.instance, interfaces):
            zone = subnet["AvailabilityZone"]
            site = Site(
                region=region,
                subnet=subnet["SubnetId"],
                zone=zone,
                image=image,
                root_device=root_device,
                security_group=stack["Group"],
                profile=stack["Profile"],
                placement_group=setup.placement_group(zone) if is_grouped else "",
            )
            sites.append(site)
    return Resolved(secrets.token_hex(16), run.job_sha256, sites, interfaces)


# ---- network ---------------------------------------------------------------------------------------------------------


def layout(info: Mapping[str, Any], machines: int) -> list[Interface]:
    """Return each machine's network interfaces, according to EC2's description `info` of its type.

    For several cards, the EC2 user guide recommends `efa-only` (efa-acc-inst-types.html): an ENA interface at device 0
    of card 0, and efa-only interfaces at device 1 of card 0 and at device 0 of every other card. Cards without efa-only
    get `efa`, as in Neuron's older guide for trn1 (setup-trn1-multi-node-execution): interfaces with an address, at
    device 0 of card 0 and device 1 of the others, so that IP packets leave through card 0. With only one card, a single
    `efa` interface is enough.
    """
    network = info["NetworkInfo"]
    made = [Interface(0, 0, INTERFACE)]
    cards = sorted(network.get("NetworkCards", ()), key=lambda card: int(card["NetworkCardIndex"]))
    most = 0
    if machines > 1:
        most = int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0))
    able = [each for each in cards if EFA in each.get("InterfaceTypes", ())][:most]
    for card in able:
        index = int(card["NetworkCardIndex"])
        fits = int(card["MaximumNetworkInterfaces"])
        is_apart = len(cards) > 1 and EFA_ONLY in card["InterfaceTypes"]
        if index == 0 and not (is_apart and fits > 1):
            made = [Interface(0, 0, EFA)]
        elif index == 0:
            made.append(Interface(0, 1, EFA_ONLY))
        elif is_apart:
            made.append(Interface(index, 0, EFA_ONLY))
        else:
            made.append(Interface(index, min(1, fits - 1), EFA))
    return made


def subnets(
    api: Api, region: str, cluster: Ec2Config, instance: str, interfaces: list[Interface]
) -> list[Any]:
    """Return the region's subnets in zones that offer the instance type, in the order of the settings."""
    by = {"default-for-az": ["true"]}
    if cluster.subnets:
        by = {"subnet-id": cluster.subnets}
    there = api.pages(region, "describe_subnets", "Subnets", by=by)
    if cluster.subnets:
        there.sort(key=lambda each: cluster.subnets.index(each["SubnetId"]))
    else:
        there.sort(key=lambda each: each["AvailabilityZone"])
    offers = api.pages(
        region,
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        by={"instance-type": [instance]},
        LocationType="availability-zone",
    )
    zones = {str(each["Location"]) for each in offers}
    offered = [each for each in there if each["AvailabilityZone"] in zones]
    check(
        bool(offered),
        f"{region} offers {instance} in {', '.join(sorted(zones)) or 'no zone'}, where "
        f"cluster.subnets={cluster.subnets or 'those of the default VPC'} has no subnet: name others",
    )
    public = [each["SubnetId"] for each in offered if each.get("DefaultForAz")]
    check(
        len(interfaces) == 1 or not public,
        f"a machine with {len(interfaces)} network interfaces gets no public address, without which it cannot reach S3 "
        f"from subnets of a default VPC ({', '.join(public)}): name private subnets with a NAT gateway, or with "
        "endpoints for S3 and SSM (cluster.subnets)",
    )
    return offered


# ---- image -----------------------------------------------------------------------------------------------------------


def image_of(
    api: Api,
    region: str,
    job: Job,
    cluster: Ec2Config,
    info: Mapping[str, Any],
    pinned: str | None,
) -> tuple[str, str]:
    """Return the id of the image in a region, and its root device."""
    # EC2 reports no NeuronInfo for trn2u.
    is_neuron = "NeuronInfo" in info or job.instance.startswith("trn")
    accelerators = NEURON if is_neuron else CUDA
    image = pinned or cluster.image or OWN_IMAGE.format(accelerators)
    if AMI.fullmatch(image) is None:
        answer = api.ask(region, "get_parameter", service="ssm", Name=image)
        image = str(answer["Parameter"]["Value"])
    return image, str(api.image(region, image).get("RootDeviceName", ""))
