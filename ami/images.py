"""Images of this project in one region: what they hold, what is wrong with them, which one is promoted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ami.aws import aws_errors
from ami.config import IMAGE_ID, IMAGES
from train.config import InputError, check
from train.host.versions import Versions
from train.storage.aws_errors import Rejected

PREFIX = "baretrain-"  # of the names of images; then neuron or cuda, the moment and the commit
TAG = "baretrain:"  # begins the names of tags
KIND = f"{TAG}image"
MINUTES = f"{TAG}minutes"  # that the build took
ARCHITECTURE = "x86_64"
UNDER_WAY_S = 6 * 3600  # an image without tags that is younger may still be built


@dataclass(frozen=True)
class Image:
    id: str
    region: str
    name: str
    state: str
    architecture: str
    created: datetime
    deprecated: datetime | None
    has_imdsv1: bool
    is_public: bool
    is_encrypted: bool  # all its snapshots
    size_gib: int
    snapshots: tuple[str, ...]
    tags: Mapping[str, str]

    @property
    def kind(self) -> str:
        """neuron or cuda; empty for one whose build did not come to its end."""
        kind = self.tags.get(KIND, "")
        return kind if kind in IMAGES else ""

    @property
    def minutes(self) -> float | None:
        text = self.tags.get(MINUTES, "")
        return float(text) if re.fullmatch(r"\d{1,4}(\.\d+)?", text) else None


def image_of(answer: Mapping[str, Any], region: str) -> Image:
    """What DescribeImages says of one image."""
    disks = [each["Ebs"] for each in answer.get("BlockDeviceMappings", ()) if "Ebs" in each]
    return Image(
        id=answer["ImageId"],
        region=region,
        name=answer.get("Name", ""),
        state=answer.get("State", ""),
        architecture=answer.get("Architecture", ""),
        created=moment(answer.get("CreationDate")) or datetime.fromtimestamp(0, timezone.utc),
        deprecated=moment(answer.get("DeprecationTime")),
        has_imdsv1=answer.get("ImdsSupport") != "v2.0",
        is_public=bool(answer.get("Public")),
        is_encrypted=bool(disks) and all(disk.get("Encrypted") is True for disk in disks),
        size_gib=sum(int(disk.get("VolumeSize", 0)) for disk in disks),
        snapshots=tuple(disk["SnapshotId"] for disk in disks if disk.get("SnapshotId")),
        tags={tag["Key"]: tag["Value"] for tag in answer.get("Tags", ())},
    )


def moment(text: str | None) -> datetime | None:
    """A time of EC2, as 2026-11-20T08:22:00.000Z; None if it is none."""
    try:
        parsed = datetime.fromisoformat((text or "").replace("Z", "+00:00"))
    except ValueError:
        return None
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=timezone.utc)


def own_images(ec2: Any, region: str, kind: str = "") -> list[Image]:
    """The project's images, of one kind or of all, newest first, half-built ones too."""
    wanted = [{"Name": "name", "Values": [f"{PREFIX}{kind}{'-' if kind else ''}*"]}]
    with aws_errors(f"images in {region}"):
        pages = ec2.get_paginator("describe_images").paginate(Owners=["self"], Filters=wanted, IncludeDeprecated=True)
        images = [image_of(each, region) for page in pages for each in page["Images"]]
    return sorted(images, key=lambda image: image.created, reverse=True)


def describe(ec2: Any, region: str, image_id: str) -> Mapping[str, Any]:
    """The answer of DescribeImages for one image. InputError if there is none."""
    check(re.fullmatch(IMAGE_ID, image_id) is not None, f"{image_id} is no id of an image, as ami-0123456789abcdef0")
    try:
        with aws_errors(f"image {image_id} in {region}"):
            answers = ec2.describe_images(ImageIds=[image_id], IncludeDeprecated=True)["Images"]
    except Rejected as error:
        if error.code.startswith("InvalidAMIID"):
            answers = []
        else:
            raise
    if not answers:
        raise InputError(f"there is no image {image_id} in {region}: python -m ami list shows those there are")
    answer: Mapping[str, Any] = answers[0]
    return answer


def find_image(ec2: Any, region: str, image_id: str) -> Image:
    return image_of(describe(ec2, region, image_id), region)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


def faults(image: Image, now: datetime) -> Iterator[str]:
    """Why no machine should start from an image, each with its cure."""
    again = f"build it again: python -m ami {image.kind or 'neuron'} build=true"
    if image.state != "available":
        yield f"is {image.state or 'in no state'}: wait if its build is under way, or {again}"
    if not image.kind:
        yield f"has no tag {KIND}: it is half built, or not of this project; {again}"
    if image.architecture != ARCHITECTURE:
        yield f"is for {image.architecture or 'no known architecture'}, the machines are {ARCHITECTURE}; {again}"
    if image.has_imdsv1:
        yield f"lets machines answer IMDSv1; {again}"
    if not image.is_encrypted:
        yield f"has a snapshot that is not encrypted; {again}"
    if image.is_public:
        yield "is public: aws ec2 modify-image-attribute --image-id ... --launch-permission Remove=[{Group=all}]"
    if image.deprecated is not None and image.deprecated <= now:
        yield f"is deprecated since {image.deprecated:%Y-%m-%d}; {again}"


def wanted_tags(kind: str, versions: Versions) -> dict[str, str]:
    """The tags that say what an image is made of."""
    names = {"baretrain": versions["baretrain"], "torch": versions["torch"], "efa-installer": versions["efa-installer"]}
    if kind == "neuron":
        names |= {"neuron-sdk": versions["neuron-sdk"], **versions.python_packages(), **versions.system_packages()}
    else:
        names |= {name: versions[name] for name in ("cuda", "nvidia-driver")}
    return {KIND: kind, **{f"{TAG}{name}": version for name, version in sorted(names.items())}}


def differences(image: Image, versions: Versions) -> list[str]:
    """Where an image differs from ami/versions.yaml: "torch 2.8.0 -> 2.9.1"."""
    lines = []
    for tag, wanted in wanted_tags(image.kind, versions).items() if image.kind else ():
        has = image.tags.get(tag)
        if has != wanted:
            lines.append(f"{tag.removeprefix(TAG)} {has or 'unknown'} -> {wanted}")
    return lines


# ---- promoted --------------------------------------------------------------------------------------------------------


def parameter(kind: str) -> str:
    """The SSM parameter with the id of the image that launch takes."""
    return f"/baretrain/ami/{kind}/latest"


def promoted(ssm: Any, region: str, kind: str) -> str | None:
    """Id of the promoted image; None if there is none in this region."""
    try:
        with aws_errors(f"SSM parameter {parameter(kind)} in {region}"):
            answer = ssm.get_parameter(Name=parameter(kind))
    except Rejected as error:
        if error.code == "ParameterNotFound":
            return None
        raise
    return str(answer["Parameter"]["Value"])
