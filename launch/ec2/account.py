"""Functions that resolve a launch's settings in an AWS account: subnets, images, interfaces. They make no resources."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import botocore

from launch import launched
from launch.ec2.api import Api
from launch.ec2.config import Ec2Config
from launch.record import Job, Record
from train.config import check
from train.config.backend import CUDA, NEURON
from train.machine.versions import read_versions
from train.storage.schema import record

# types of network interfaces; efa-only has no IP address
INTERFACE, EFA, EFA_ONLY = (
    "interface",
    "efa",
    "efa-only",
)
# tags of images: the kind (neuron or cuda), and the SDK
KIND_TAG, SDK_TAG = (
    "baretrain:image",
    "baretrain:neuron-sdk",
)
# SSM parameters with the ids of this account's promoted images
OWN_IMAGE = "/baretrain/ami/{}/latest"
AMI = re.compile(r"ami-[0-9a-f]{8,17}")


@dataclass(frozen=True)
class Interface:
    card: int
    device: int  # device index on the card
    type: str  # interface | efa | efa-only


@dataclass(frozen=True)
class Site:
    """A subnet for all machines of the run, and the image from which they start."""

    region: str
    subnet: str
    zone: str
    vpc: str
    image: str
    root_device: str


@dataclass(frozen=True)
class Resolved:
    """The resolved settings of a job, recorded in the event of its submission."""

    id: str  # random id of this submission, which makes its client tokens unique
    job_id: str
    image_setting: str  # cluster.image, which determines the images
    sites: list[Site]  # in the order in which they are tried
    interfaces: list[Interface]  # network interfaces of each machine

    @property
    def regions(self) -> list[str]:
        return list(dict.fromkeys(site.region for site in self.sites))


def last_resolved(run: Record) -> Resolved | None:
    """Return the resolved settings of the run's last submission from this computer; None if there was none."""
    # They are not read from the events, since the run's machines could change the image there.
    handle = launched.last_handle(run)
    return record(Resolved, handle["resolved"]) if "resolved" in handle else None


def resolve(job: Job, cluster: Ec2Config, run: Record, api: Api) -> Resolved:
    """Resolve the settings by asking AWS. Raises InputError, with the cure, if a launch would fail or waste money."""
    # Mistakes that RunInstances reports clearly are not checked here.
    before, setting = last_resolved(run), cluster.image or ""
    pinned = dict[str, str]()  # a resumed job keeps its images
    if before is not None and (before.job_id, before.image_setting) == (job.id, setting):
        pinned = {site.region: site.image for site in before.sites}
    sites, interfaces = list[Site](), list[Interface]()
    for region in api.regions(cluster.regions):
        info = api.instance_type(region, job.instance)
        # EC2 reports no NeuronInfo for trn2u
        is_neuron = "NeuronInfo" in info or job.instance.startswith("trn")
        accelerators = NEURON if is_neuron else CUDA
        image = pinned.get(region) or image_id(
            api, region, cluster.image or OWN_IMAGE.format(accelerators)
        )
        root_device = check_image(api, region, image, accelerators)
        interfaces = layout(info, cluster, job.nodes)
        for each in subnets(api, region, cluster, job.instance, cards=len(interfaces)):
            subnet, zone, vpc = (
                str(each[key]) for key in ("SubnetId", "AvailabilityZone", "VpcId")
            )
            sites.append(Site(region, subnet, zone, vpc, image, root_device))
    if cluster.capacity_reservation is not None:
        sites = beside_reservation(api, cluster.capacity_reservation, sites)
    if cluster.security_group is not None and job.nodes > 1:
        described = api.ask(
            sites[0].region, "describe_security_groups", GroupIds=[cluster.security_group]
        )
        check_rules(described["SecurityGroups"][0])
    return Resolved(secrets.token_hex(16), job.id, setting, sites, interfaces)


# ---- network ---------------------------------------------------------------------------------------------------------


def layout(info: Mapping[str, Any], cluster: Ec2Config, machines: int) -> list[Interface]:
    """Return each machine's network interfaces, according to EC2's description `info` of its type.

    For several cards, the EC2 user guide recommends `efa-only` (efa-acc-inst-types.html): an ENA interface at device 0
    of card 0, and efa-only interfaces at device 1 of card 0 and at device 0 of every other card. Cards without efa-only
    get `efa`, as in Neuron's older guide for trn1 (setup-trn1-multi-node-execution): interfaces with an address, at
    device 0 of card 0 and device 1 of the others, so that IP packets leave through card 0. With only one card, a single
    `efa` interface is enough.
    """
    network, made = info["NetworkInfo"], [Interface(0, 0, INTERFACE)]
    cards = sorted(network.get("NetworkCards", ()), key=lambda card: int(card["NetworkCardIndex"]))
    most = int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)) if machines > 1 else 0
    able = [each for each in cards if EFA in each.get("InterfaceTypes", ())][:most]
    for card in able:
        index, fits = int(card["NetworkCardIndex"]), int(card["MaximumNetworkInterfaces"])
        is_apart = len(cards) > 1 and EFA_ONLY in card["InterfaceTypes"]
        if index == 0 and not (is_apart and fits > 1):
            made = [Interface(0, 0, EFA)]
        elif is_apart:
            made.append(Interface(index, 1 if index == 0 else 0, EFA_ONLY))
        else:
            made.append(Interface(index, min(1, fits - 1), EFA))
    # Older versions of botocore silently drop the cards' interface types from EC2's answer.
    check(
        bool(able) or machines == 1 or not network.get("EfaSupported"),
        f"EC2 says that {info['InstanceType']} supports EFA, but botocore {botocore.__version__} shows no network card "
        "with EFA: install boto3>=1.43.90",
    )
    check(
        not (cluster.public_address and len(made) > 1),
        f"cluster.public_address=true is for machines with one network interface, but {info['InstanceType']} has "
        f"{len(made)}: leave it out, and reach them through SSM (aws ssm start-session --target i-...)",
    )
    return made


def subnets(api: Api, region: str, cluster: Ec2Config, instance: str, *, cards: int) -> list[Any]:
    """Return the region's subnets in zones that offer the instance type, in the order of the settings."""
    by = {"subnet-id": cluster.subnets} if cluster.subnets else {"default-for-az": ["true"]}
    there = api.pages(region, "describe_subnets", "Subnets", by=by)
    order = {ident: index for index, ident in enumerate(cluster.subnets)}
    there.sort(key=lambda each: (order.get(each["SubnetId"], 0), each["AvailabilityZone"]))
    query = ("describe_instance_type_offerings", "InstanceTypeOfferings")
    offers = api.pages(
        region, *query, by={"instance-type": [instance]}, LocationType="availability-zone"
    )
    zones = {str(each["Location"]) for each in offers}
    offered = [each for each in there if each["AvailabilityZone"] in zones]
    named = (
        f"cluster.subnets={cluster.subnets}" if cluster.subnets else "the subnets of a default VPC"
    )
    check(
        bool(there),
        f"{region} has none of {named}: name subnets in every region (cluster.subnets)",
    )
    check(
        bool(offered),
        f"{region} offers {instance} in {', '.join(sorted(zones)) or 'no zone'}, but your subnets are in "
        f"{', '.join(sorted({each['AvailabilityZone'] for each in there}))}: name others (cluster.subnets)",
    )
    check_addresses(cards, [str(each["SubnetId"]) for each in offered if each.get("DefaultForAz")])
    return offered


def check_addresses(interfaces: int, public: Sequence[str]) -> None:
    """Raise InputError if machines with several interfaces would be in `public` subnets without a public address."""
    check(
        interfaces == 1 or not public,
        f"a machine with {interfaces} network interfaces gets no public address, without which it cannot reach S3 from "
        f"subnets of a default VPC ({', '.join(public)}): name private subnets with a NAT gateway, or with endpoints "
        "for S3 and SSM (cluster.subnets)",
    )


def beside_reservation(api: Api, ident: str, sites: list[Site]) -> list[Site]:
    """Return the sites in the zone of an active capacity reservation. Raises InputError if there is none."""
    query, by = (
        ("describe_capacity_reservations", "CapacityReservations"),
        {"capacity-reservation-id": [ident]},
    )
    states = {
        (region, str(each["AvailabilityZone"])): str(each["State"])
        for region in {site.region for site in sites}
        for each in api.pages(region, *query, by=by)
    }
    beside = [site for site in sites if states.get((site.region, site.zone)) == "active"]
    found = (
        ", ".join(f"{state} in {zone}" for (_, zone), state in states.items())
        or "in none of the regions"
    )
    check(
        bool(beside),
        f"cluster.capacity_reservation={ident} is {found}: it must be active (a block begins at its start date), and "
        f"one of the subnets must be in its zone; they are in {', '.join(sorted({site.zone for site in sites}))}",
    )
    return beside


def check_rules(seen: Mapping[str, Any]) -> None:
    """Raise InputError if a security group's machines cannot reach one another over EFA: collectives would hang."""
    group, cures = seen["GroupId"], []
    for way, key in {"ingress": "IpPermissions", "egress": "IpPermissionsEgress"}.items():
        rules = [rule for rule in seen.get(key, ()) if rule.get("IpProtocol") == "-1"]
        if group not in [
            pair.get("GroupId") for rule in rules for pair in rule.get("UserIdGroupPairs", ())
        ]:
            command = f"aws ec2 authorize-security-group-{way} --group-id {group} --ip-permissions"
            cures.append(f"{command} 'IpProtocol=-1,UserIdGroupPairs=[{{GroupId={group}}}]'")
    check(
        not cures,
        f"security group {group} does not allow all traffic with itself, which EFA needs even if 0.0.0.0/0 is allowed: "
        f"{' && '.join(cures)}",
    )


# ---- image -----------------------------------------------------------------------------------------------------------


def image_id(api: Api, region: str, given: str) -> str:
    if AMI.fullmatch(given):
        return given
    value = str(api.ask(region, "get_parameter", service="ssm", Name=given)["Parameter"]["Value"])
    check(
        AMI.fullmatch(value) is not None,
        f"the SSM parameter {given} in {region} is {value!r}, not an image's id",
    )
    return value


def check_image(api: Api, region: str, image: str, accelerators: str) -> str:
    """Return an image's root device. Raises InputError if baretrain ami built it for other machines or another SDK."""
    described, versions = api.image(region, image), read_versions()
    tags = {tag["Key"]: tag["Value"] for tag in described.get("Tags", ())}
    wanted = versions["neuron-sdk"]
    kind, sdk = tags.get(KIND_TAG, accelerators), tags.get(SDK_TAG, wanted)
    check(
        kind == accelerators,
        f"image {image} was built for {kind}, but the machines need one for {accelerators}",
    )
    check(
        accelerators != NEURON or sdk == wanted,
        f"image {image} has Neuron SDK {sdk}, but this version of baretrain needs {wanted}: baretrain ami neuron "
        "builds one",
    )
    return str(described.get("RootDeviceName", ""))
