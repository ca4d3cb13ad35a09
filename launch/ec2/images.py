"""Which image the machines start from, and whether it fits them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launch.ec2.api import Api
from launch.ec2.config import Ec2Config
from launch.ec2.resolved import Image
from train.config import InputError, check
from train.config.backend import NEURON
from train.host.versions import read_versions
from train.storage.aws_errors import Rejected
from train.storage.schema import FileName

KIND_TAG, SDK_TAG = "baretrain:image", "baretrain:neuron-sdk"  # as ami/images.py gives them
OWN = "/baretrain/ami/{}/latest"  # SSM parameters that hold the account's own images
AMI = re.compile(r"ami-[0-9a-f]{8,17}")
AMAZON_LINUX = re.compile(r"amazon.?linux|amzn|al20\d\d", re.IGNORECASE)


def default_parameter(accelerators: str) -> str:
    return OWN.format(accelerators)


def image_id(api: Api, region: str, cluster: Ec2Config, accelerators: str) -> str:
    """The id of the image in a region: given, or out of the SSM parameter. InputError if there is none."""
    given = cluster.image or default_parameter(accelerators)
    if AMI.fullmatch(given):
        return given
    try:
        answer = api.ask(region, "get_parameter", service="ssm", Name=given)
    except Rejected as error:
        if error.code != "ParameterNotFound":
            raise
        cure = f"python -m ami {accelerators} builds and promotes one" if cluster.image is None else "cluster.image"
        raise InputError(
            f"there is no image in {region}: SSM has no parameter {given}: {cure}. AWS's own Deep Learning images lack "
            "baretrain"
        ) from error
    value = str(answer["Parameter"]["Value"])
    check(AMI.fullmatch(value) is not None, f"the SSM parameter {given} in {region} holds {value!r}, no image's id")
    return value


def read_image(
    api: Api, region: str, ident: str, *, cluster: Ec2Config, accelerators: str, type_info: Mapping[str, Any]
) -> Image:
    """An image, if it fits. InputError for one that is half built, too large or of another architecture."""
    described = api.ask(region, "describe_images", ImageIds=[ident])["Images"]
    check(bool(described), f"{region} has no image {ident}, or it is another account's: images are of one region")
    seen = described[0]
    name = str(seen.get("Name", ""))
    what = f"image {ident} ({name})" if name else f"image {ident}"
    state = str(seen.get("State", ""))
    check(state == "available", f"{what} in {region} is {state}, not available: wait for its build, or choose another")
    wanted = type_info.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"])
    architecture = str(seen.get("Architecture", ""))
    check(
        architecture in wanted,
        f"{what} is for {architecture}, {type_info.get('InstanceType')} is {' or '.join(wanted)}",
    )
    check(
        accelerators != NEURON or not AMAZON_LINUX.search(f"{name} {seen.get('Description', '')}"),
        f"{what} is Amazon Linux, whose glibc is too old for torch-neuronx 2.9: choose one of Ubuntu 24.04",
    )
    tags = {tag["Key"]: tag["Value"] for tag in seen.get("Tags", ())}  # of images that python -m ami has built
    kind, sdk = tags.get(KIND_TAG, accelerators), tags.get(SDK_TAG, read_versions()["neuron-sdk"])
    check(kind == accelerators, f"{what} was built for {kind}, {type_info.get('InstanceType')} is {accelerators}")
    check(
        accelerators != NEURON or sdk == read_versions()["neuron-sdk"],
        f"{what} has Neuron SDK {sdk}, this version of baretrain works with {read_versions()['neuron-sdk']}: python -m "
        "ami neuron builds such an image",
    )
    device = str(seen.get("RootDeviceName", ""))
    check(device.startswith("/dev/"), f"{what} names no root device: it is no image of EC2 that starts from a volume")
    disks = [each for each in seen.get("BlockDeviceMappings", ()) if each.get("DeviceName") == device]
    size_gib = max((int(each.get("Ebs", {}).get("VolumeSize", 0)) for each in disks), default=0)
    check(
        size_gib <= cluster.disk_gib,
        f"cluster.disk_gib={cluster.disk_gib} is too small for {what}, which needs {size_gib}",
    )
    return Image(FileName(ident), device, name)
