"""The image that ours is built from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ami.aws import Account, aws_errors
from ami.config import IMAGES, AmiConfig
from ami.images import ARCHITECTURE, describe
from train.config import InputError, check
from train.host.versions import Versions
from train.storage.aws_errors import Rejected


@dataclass(frozen=True)
class Base:
    id: str  # empty: AWS was not asked
    name: str
    parameter: str  # of SSM, which named it; empty: the user did
    root_device: str
    disk_gib: int


def unresolved(cfg: AmiConfig, versions: Versions) -> Base:
    """The base image as far as it is known without asking AWS."""
    if cfg.base.startswith("ami-"):
        return Base("", cfg.base, "", "", 0)
    return Base("", "", versions.bases["ubuntu" if cfg.base == "ubuntu" else f"{cfg.image}-dlami"].version, "", 0)


def resolve(account: Account, region: str, cfg: AmiConfig, versions: Versions) -> Base:
    """The base image of a build. InputError for one that ours cannot be built from."""
    parameter = unresolved(cfg, versions).parameter
    image_id = read_parameter(account.ssm(region), region, parameter) if parameter else cfg.base
    answer = describe(account.ec2(region), region, image_id)
    check_base(answer, cfg, versions)
    root = answer["RootDeviceName"]
    disks = {each.get("DeviceName"): each.get("Ebs", {}) for each in answer.get("BlockDeviceMappings", ())}
    base = Base(image_id, answer.get("Name", ""), parameter, root, int(disks.get(root, {}).get("VolumeSize", 0)))
    check(
        cfg.disk_gib >= base.disk_gib,
        f"disk_gib={cfg.disk_gib} is smaller than the {base.disk_gib} GiB of {image_id}; give disk_gib={base.disk_gib}",
    )
    return base


def read_parameter(ssm: Any, region: str, name: str) -> str:
    try:
        with aws_errors(f"SSM parameter {name} in {region}"):
            return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])
    except Rejected as error:
        if error.code == "ParameterNotFound":
            raise InputError(
                f"{region} has no SSM parameter {name}: AWS may have withdrawn the image; give base=ubuntu, or "
                "base=ami-... of an older one"
            ) from error
        raise


def check_base(answer: Mapping[str, Any], cfg: AmiConfig, versions: Versions) -> None:
    """InputError unless the scripts of ami/provision can work on the image that DescribeImages describes."""
    image_id, name, text = answer["ImageId"], answer.get("Name", ""), answer.get("Description", "")
    check(answer.get("State") == "available", f"base image {image_id} is {answer.get('State')}; take another")
    kind = answer.get("Architecture")
    check(kind == ARCHITECTURE, f"base image {image_id} is for {kind}, the builder is {ARCHITECTURE}: take that of it")
    check(answer.get("RootDeviceType") == "ebs", f"base image {image_id} has no EBS root volume; take one that has")
    about = f"{name} {text}"
    check(
        re.search(r"amzn|al20\d\d|amazon.?linux", about, re.IGNORECASE) is None,
        f"base image {image_id} ({name}) is Amazon Linux, which cannot run torch-neuronx 2.9 (its wheel needs glibc "
        "2.35): take one of Ubuntu 24.04",
    )
    sdk = re.search(r"Neuron SDK (\d+\.\d+)", about)
    wanted = versions["neuron-sdk"].rpartition(".")[0]
    check(
        cfg.image != "neuron" or sdk is None or sdk[1] == wanted,
        f"base image {image_id} ({name}) has Neuron SDK {sdk and sdk[1]}, ami/versions.yaml wants {wanted} "
        "(neuron-sdk): give base=ubuntu, or base=ami-... of that SDK",
    )


def check_builder(ec2: Any, region: str, cfg: AmiConfig) -> None:
    """InputError if the region does not offer the builder's type."""
    wanted = [{"Name": "instance-type", "Values": [cfg.instance.name]}]
    with aws_errors(f"instance types of {region}"):
        offers = ec2.describe_instance_type_offerings(LocationType="region", Filters=wanted)["InstanceTypeOfferings"]
    check(
        bool(offers),
        f"{region} has no {cfg.instance.name}: build in a region that has, as regions=[us-east-1,{region}], which "
        f"copies the image to {region}, or take another builder than instance={IMAGES[cfg.image]}",
    )
