"""The plan of an image: its base, its content, and its possible cost."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ami.config import DEPRECATE_DAYS, DISK_GIB, IMAGES, MAX_MINUTES, AmiConfig
from ami.images import (
    MINUTES,
    PREFIX,
    TAG,
    Image,
    differences,
    own_images,
    read_image,
    read_parameter,
    wanted_tags,
)
from ami.packer import find_packer
from launch.ec2.api import Api
from train.config import InputError, check
from train.machine.environment import commit
from train.machine.versions import read_versions
from train.run.command import printable
from train.storage.aws_errors import settings_explained

BUILD = "baretrain:build"  # tag of all resources that exist only during a build
NOT_ASKED = (
    "not known: there are no AWS credentials, which a build needs, so AWS was not asked about the base image, earlier "
    "images, and whether the region has the builder's type"
)


@dataclass(frozen=True)
class ImagePlan:
    cfg: AmiConfig
    parameter: str  # SSM parameter with the base image; empty if the user names the image
    base: Image | None  # the image to build from; None if AWS was not asked
    last: Image | None  # the newest complete image of this kind
    variables: dict[str, Any]  # variables of ami/variables.pkr.hcl, except files


def make_plan(api: Api, cfg: AmiConfig, now: datetime) -> ImagePlan:
    """Plan an image, asking AWS for its base and for earlier builds. Raises InputError if it could not be built."""
    # Without credentials, AWS is asked only for a build, which then fails with the reason.
    regions, base, last = cfg.regions, None, None
    source = "ubuntu" if cfg.base == "ubuntu" else f"{cfg.image}-dlami"
    parameter = "" if cfg.base.startswith("ami-") else read_versions().bases[source].version
    with settings_explained():
        has_credentials = api.session.get_credentials() is not None
    if cfg.build or has_credentials:
        regions = api.regions(regions)
        base = base_image(api, regions[0], cfg, parameter)
        before = [
            each
            for each in own_images(api, regions[0], cfg.image)
            if each.kind and each.state == "available"
        ]
        last = before[0] if before else None
    revision = commit() or "none"
    name = f"{PREFIX}{cfg.image}-{now:%Y%m%d-%H%M%S}-{revision.rstrip('+')[:8]}"
    base_id = base.id if base else ""
    about = {"Name": name, f"{TAG}commit": revision, f"{TAG}base": base_id}
    bucket, _, prefix = (cfg.compile_cache or "").removeprefix("s3://").partition("/")
    variables = {
        "image": cfg.image,
        "region": regions[0] if regions else "",
        "copy_regions": regions[1:],
        "base_image": base_id,
        "root_device": base.seen["RootDeviceName"] if base else "",
        "name": name,
        "instance_type": cfg.instance.name,
        "subnet": cfg.subnet or "",
        "disk_gib": disk_gib(base),
        "cache_arns": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/{prefix}*"]
        if bucket
        else [],
        "deprecate_at": f"{now + timedelta(days=DEPRECATE_DAYS):%Y-%m-%dT%H:%M:00Z}",
        "tags": {**wanted_tags(cfg.image, read_versions()), **about},
        "build_tags": {
            "Name": f"{name} (builder)",
            BUILD: f"{now:%Y%m%d%H%M%S}-{secrets.token_hex(4)}",
        },
        "max_minutes": MAX_MINUTES,
    }
    return ImagePlan(cfg, parameter, base, last, variables)


def base_image(api: Api, region: str, cfg: AmiConfig, parameter: str) -> Image:
    """Return the base image. Raises InputError if the scripts cannot use it, or the region lacks the builder's type."""
    query = ("describe_instance_type_offerings", "InstanceTypeOfferings")
    check(
        bool(
            api.pages(
                region, *query, by={"instance-type": [cfg.instance.name]}, LocationType="region"
            )
        ),
        f"{region} has no {cfg.instance.name}: build in another region and copy the image (regions=[us-east-1,"
        f"{region}]), or choose a builder other than instance={IMAGES[cfg.image]}",
    )
    image_id = read_parameter(api, region, parameter) if parameter else cfg.base
    if image_id is None:
        raise InputError(
            f"{region} has no SSM parameter {parameter}: AWS may have withdrawn the image; give base=ubuntu, or "
            "base=ami-... of an older one"
        )
    base = read_image(api, region, image_id)
    about = f"{base.name} {base.seen.get('Description', '')}"
    check(
        re.search(r"amzn|al20\d\d|amazon.?linux", about, re.IGNORECASE) is None,
        f"base image {base.id} ({base.name}) is Amazon Linux, which cannot run torch-neuronx 2.9 (its wheel needs "
        "glibc 2.35): use an Ubuntu 24.04 image",
    )
    sdk, wanted = (
        re.search(r"Neuron SDK (\d+\.\d+)", about),
        read_versions()["neuron-sdk"].rpartition(".")[0],
    )
    check(
        cfg.image != "neuron" or sdk is None or sdk[1] == wanted,
        f"base image {base.id} ({base.name}) has Neuron SDK {sdk and sdk[1]}, but ami/versions.yaml requires {wanted} "
        "(neuron-sdk): give base=ubuntu, or base=ami-... with that SDK",
    )
    return base


def disk_gib(base: Image | None) -> int:
    """Return the size of the root volume in GiB. EC2 requires at least the size of the base image's."""
    root = (
        [each for each in base.disks if each["DeviceName"] == base.seen["RootDeviceName"]]
        if base
        else []
    )
    return max(DISK_GIB, sum(int(each["Ebs"].get("VolumeSize", 0)) for each in root))


def plan_lines(plan: ImagePlan) -> list[str]:
    cfg, base, values = plan.cfg, plan.base, plan.variables
    source = f", from {plan.parameter}" if plan.parameter else ""
    copies = f", copies in {', '.join(values['copy_regions'])}" if values["copy_regions"] else ""
    pins = [
        (tag.removeprefix(TAG), version)
        for tag, version in wanted_tags(cfg.image, read_versions()).items()
    ]
    try:
        packer = find_packer()
    except InputError as error:
        packer = f"a build would be rejected: {error}"
    rows = {
        "image": [
            f"{values['name']}, {values['disk_gib']} GiB, encrypted, until {values['deprecate_at'][:10]}"
        ],
        "base": [
            f"{base.id if base else 'not resolved'} ({base.name if base else cfg.base}){source}"
        ],
        "region": [
            f"{values['region']}{copies}"
            if values["region"]
            else "none named: regions=[us-east-1]"
        ],
        "builder": [
            f"{cfg.instance.name}, reached through SSM, without public address or inbound port"
        ],
        "cost": [cost(plan)],
        "versions": [f"{name} {version}" for name, version in pins if name != "image"],
        "changes": changes(plan),
        "packer": [packer],
    }
    lines = []
    for head, texts in rows.items():
        lines += [
            f"{'' if number else head:11}{printable(text)}" for number, text in enumerate(texts)
        ]
    return lines


def changes(plan: ImagePlan) -> list[str]:
    if plan.base is None or plan.last is None:
        return [NOT_ASKED if plan.base is None else "nothing was built before"]
    before, now = plan.last.tags, plan.variables["tags"]
    lines = differences(plan.last, read_versions()) or ["the same versions"]
    for name in ("base", "commit"):
        if before.get(f"{TAG}{name}") != now[f"{TAG}{name}"]:
            lines.append(
                f"{name} {before.get(f'{TAG}{name}', 'unknown')} -> {now[f'{TAG}{name}']}"
            )
    return [f"since {plan.last.id} of {plan.last.created[:10]}:", *lines]


def cost(plan: ImagePlan) -> str:
    """Return a text with the duration of the last build, and the maximum duration and cost of this one."""
    cfg, price = plan.cfg, plan.cfg.instance.usd_per_hour
    minutes = plan.last.tags.get(MINUTES, "") if plan.last else ""
    took = f"the last build took {minutes} minutes; " if minutes.isdecimal() else ""
    limit = f"at most {MAX_MINUTES} minutes"
    if price is not None:
        limit += f", ${price * MAX_MINUTES / 60:.2f} at ${price:.2f} an hour ({cfg.instance.price_date})"
    return f"{took}{limit}; plus its snapshots, in every region, for as long as they are kept"
