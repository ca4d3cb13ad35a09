"""The images of a region: their content, their faults, and the promoted one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ami.config import IMAGE_ID, IMAGES
from launch.ec2.account import KIND_TAG
from launch.ec2.api import Api
from train.config import check
from train.machine.versions import Versions
from train.storage.aws_errors import Rejected

PREFIX = "baretrain-"  # beginning of image names, before neuron or cuda, the time and the commit
TAG = "baretrain:"  # prefix of the tags
MINUTES = f"{TAG}minutes"  # tag with the duration of the build


class Image:
    """An image as DescribeImages shows it."""

    def __init__(self, region: str, seen: Mapping[str, Any]) -> None:
        self.region, self.seen = region, seen
        self.id, self.name = str(seen["ImageId"]), str(seen.get("Name", ""))
        self.state = str(seen.get("State", "in an unknown state"))
        self.created = str(seen.get("CreationDate", ""))  # such as 2026-11-20T08:22:00.000Z
        self.tags: dict[str, str] = {tag["Key"]: tag["Value"] for tag in seen.get("Tags", ())}
        kind = self.tags.get(KIND_TAG, "")
        self.kind = kind if kind in IMAGES else ""  # empty if the build was not completed
        # EBS volumes
        self.disks = [each for each in seen.get("BlockDeviceMappings", ()) if "Ebs" in each]
        self.snapshots: list[str] = [
            each["Ebs"]["SnapshotId"] for each in self.disks if "SnapshotId" in each["Ebs"]
        ]


def own_images(api: Api, region: str, kind: str = "") -> list[Image]:
    """Return the project's images of one kind, or of all kinds, newest first, including incomplete ones."""
    by = {"name": [f"{PREFIX}{kind}{'-' if kind else ''}*"]}
    seen = api.pages(
        region, "describe_images", "Images", by=by, Owners=["self"], IncludeDeprecated=True
    )
    return sorted(
        (Image(region, each) for each in seen), key=lambda image: image.created, reverse=True
    )


def find_by_name(api: Api, region: str, kind: str, name: str) -> Image | None:
    """Return the project's image with this name in a region; copies have the same name."""
    return next((image for image in own_images(api, region, kind) if image.name == name), None)


def read_image(api: Api, region: str, image_id: str) -> Image:
    """Return one image. Raises InputError if it does not exist."""
    check(
        re.fullmatch(IMAGE_ID, image_id) is not None,
        f"{image_id} is not an image id such as ami-0123456789abcdef0",
    )
    return Image(region, api.image(region, image_id))


def faults(image: Image) -> Iterator[str]:
    """Yield the reasons why no machine should start from an image, each with its cure."""
    again = f"build it again: baretrain ami {image.kind or 'neuron'} build=true"
    deprecated = str(image.seen.get("DeprecationTime") or "")
    if image.state != "available":
        yield f"is {image.state}: wait if it is still being built, or {again}"
    if not image.kind:
        yield f"has no tag {KIND_TAG}: its build was not completed, or it is another project's; {again}"
    if image.seen.get("ImdsSupport") != "v2.0":
        yield f"allows IMDSv1; {again}"
    if not image.disks or not all(disk["Ebs"].get("Encrypted") is True for disk in image.disks):
        yield f"has a snapshot that is not encrypted; {again}"
    if image.seen.get("Public"):
        yield "is public: aws ec2 modify-image-attribute --image-id ... --launch-permission Remove=[{Group=all}]"
    if deprecated and deprecated < f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}":
        yield f"has been deprecated since {deprecated[:10]}; {again}"


def wanted_tags(kind: str, versions: Versions) -> dict[str, str]:
    """Return the tags that describe the content of an image."""
    names = {name: versions[name] for name in ("baretrain", "torch", "efa-installer")}
    if kind == "neuron":
        names |= {
            "neuron-sdk": versions["neuron-sdk"],
            **versions.python_packages(),
            **versions.system_packages(),
        }
    else:
        names |= {name: versions[name] for name in ("cuda", "nvidia-driver")}
    return {KIND_TAG: kind, **{f"{TAG}{name}": version for name, version in sorted(names.items())}}


def differences(image: Image, versions: Versions) -> list[str]:
    """Return the differences between an image and ami/versions.yaml, such as "torch 2.8.0 -> 2.9.1"."""
    wanted = wanted_tags(image.kind, versions) if image.kind else {}
    return [
        f"{tag.removeprefix(TAG)} {image.tags.get(tag, 'unknown')} -> {version}"
        for tag, version in wanted.items()
        if image.tags.get(tag) != version
    ]


def read_parameter(api: Api, region: str, name: str) -> str | None:
    """Return the value of an SSM parameter; None if the region does not have it."""
    try:
        return str(
            api.ask(region, "get_parameter", service="ssm", Name=name)["Parameter"]["Value"]
        )
    except Rejected as error:
        if error.code != "ParameterNotFound":
            raise
        return None
