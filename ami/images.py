"""Images in a region: what they hold, what is wrong with them, which one is promoted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ami.config import IMAGE_ID, IMAGES
from launch.ec2.api import Api
from train.config import check
from train.host.versions import Versions
from train.storage.aws_errors import Rejected

PREFIX = "baretrain-"  # of the names of images; then neuron or cuda, the moment and the commit
TAG = "baretrain:"  # begins the names of tags
KIND = f"{TAG}image"
MINUTES = f"{TAG}minutes"  # that the build took


@dataclass(frozen=True)
class Image:
    """An image as DescribeImages shows it."""

    region: str
    seen: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.seen["ImageId"])

    @property
    def name(self) -> str:
        return str(self.seen.get("Name", ""))

    @property
    def tags(self) -> dict[str, str]:
        return {tag["Key"]: tag["Value"] for tag in self.seen.get("Tags", ())}

    @property
    def kind(self) -> str:
        """neuron or cuda; empty for one whose build did not come to its end."""
        kind = self.tags.get(KIND, "")
        return kind if kind in IMAGES else ""

    @property
    def state(self) -> str:
        return str(self.seen.get("State", "in no state"))

    @property
    def created(self) -> str:
        """When, as 2026-11-20T08:22:00.000Z."""
        return str(self.seen.get("CreationDate", ""))

    @property
    def disks(self) -> list[Mapping[str, Any]]:
        """The mappings of its EBS volumes."""
        return [each for each in self.seen.get("BlockDeviceMappings", ()) if "Ebs" in each]

    @property
    def snapshots(self) -> list[str]:
        return [disk["Ebs"]["SnapshotId"] for disk in self.disks if disk["Ebs"].get("SnapshotId")]


def own_images(api: Api, region: str, kind: str = "") -> list[Image]:
    """The project's images, of one kind or of all, newest first, half-built ones too."""
    filters = [{"Name": "name", "Values": [f"{PREFIX}{kind}{'-' if kind else ''}*"]}]
    seen = api.pages(region, "describe_images", "Images", Owners=["self"], Filters=filters, IncludeDeprecated=True)
    return sorted((Image(region, each) for each in seen), key=lambda image: image.created, reverse=True)


def find_by_name(api: Api, region: str, kind: str, name: str) -> Image | None:
    """One of the project's images in a region, where copies have the same name."""
    return next((image for image in own_images(api, region, kind) if image.name == name), None)


def read_image(api: Api, region: str, image_id: str) -> Image:
    """One image. InputError if there is none."""
    check(re.fullmatch(IMAGE_ID, image_id) is not None, f"{image_id} is no id of an image, as ami-0123456789abcdef0")
    try:
        seen = api.ask(region, "describe_images", ImageIds=[image_id], IncludeDeprecated=True)["Images"]
    except Rejected as error:
        if not error.code.startswith("InvalidAMIID"):
            raise
        seen = []
    check(bool(seen), f"there is no image {image_id} in {region}: python -m ami list shows those there are")
    return Image(region, seen[0])


def faults(image: Image) -> Iterator[str]:
    """Why no machine should start from an image, each with its cure."""
    again = f"build it again: python -m ami {image.kind or 'neuron'} build=true"
    deprecated = str(image.seen.get("DeprecationTime") or "")
    if image.state != "available":
        yield f"is {image.state}: wait if its build is under way, or {again}"
    if not image.kind:
        yield f"has no tag {KIND}: it is half built, or not of this project; {again}"
    if image.seen.get("ImdsSupport") != "v2.0":
        yield f"lets machines answer IMDSv1; {again}"
    if not image.disks or not all(disk["Ebs"].get("Encrypted") is True for disk in image.disks):
        yield f"has a snapshot that is not encrypted; {again}"
    if image.seen.get("Public"):
        yield "is public: aws ec2 modify-image-attribute --image-id ... --launch-permission Remove=[{Group=all}]"
    if deprecated and deprecated < f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S}":
        yield f"is deprecated since {deprecated[:10]}; {again}"


def wanted_tags(kind: str, versions: Versions) -> dict[str, str]:
    """The tags that say what an image is made of."""
    names = {name: versions[name] for name in ("baretrain", "torch", "efa-installer")}
    if kind == "neuron":
        names |= {"neuron-sdk": versions["neuron-sdk"], **versions.python_packages(), **versions.system_packages()}
    else:
        names |= {name: versions[name] for name in ("cuda", "nvidia-driver")}
    return {KIND: kind, **{f"{TAG}{name}": version for name, version in sorted(names.items())}}


def differences(image: Image, versions: Versions) -> list[str]:
    """Where an image differs from ami/versions.yaml: "torch 2.8.0 -> 2.9.1"."""
    wanted = wanted_tags(image.kind, versions) if image.kind else {}
    return [
        f"{tag.removeprefix(TAG)} {image.tags.get(tag, 'unknown')} -> {version}"
        for tag, version in wanted.items()
        if image.tags.get(tag) != version
    ]


# ---- SSM -------------------------------------------------------------------------------------------------------------


def parameter(kind: str) -> str:
    """The SSM parameter with the id of the image that launch takes."""
    return f"/baretrain/ami/{kind}/latest"


def read_parameter(api: Api, region: str, name: str) -> str | None:
    """The value of an SSM parameter; None if the region has none of this name."""
    try:
        return str(api.ask(region, "get_parameter", service="ssm", Name=name)["Parameter"]["Value"])
    except Rejected as error:
        if error.code != "ParameterNotFound":
            raise
        return None
