"""Settings for building an image."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from train.config import InstanceConfig, Section, check, setting
from train.storage.folders import local_path

# the smallest machine on which each image can be tested
IMAGES = {
    "neuron": "trn1.2xlarge",
    "cuda": "g5.xlarge",
}
IMAGE_ID = r"ami-[0-9a-f]{8,17}"
DISK_GIB = 150  # minimum size of the root volume, unless the base image's is larger. EC2 bills only the part of a
# snapshot that contains data, and a launch may set a larger size.
# EC2 marks the image as deprecated after this time; the date can be changed in EC2
DEPRECATE_DAYS = 365
MAX_MINUTES = 120  # the builder shuts down after this time, so that a build that hangs does not cost money forever


@dataclass(kw_only=True)
class AmiConfig(Section):
    """The settings of one build; `baretrain ami neuron --cfg job` prints them."""

    # The image to build: neuron for Trainium, cuda for GPUs.
    image: str = setting("neuron", among=tuple(IMAGES))
    # The base image: dlami is the Deep Learning AMI for Neuron or GPUs, ubuntu is plain Ubuntu, ami-... is any other
    # image.
    base: str = "dlami"
    # Build the image; false shows the plan and starts nothing.
    build: bool = False
    # The regions: the image is built in the first and copied to the others; [] uses the AWS profile's region.
    regions: list[str] = field(default_factory=list)
    # the builder
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    # The id of a subnet with internet access; None uses one in the default VPC.
    subnet: str | None = None
    # The s3://bucket/prefix of a compile cache to copy into the image.
    compile_cache: str | None = None
    # The file of baretrain's wheel; None builds one from this checkout.
    wheel: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_known = (
            self.base in ("dlami", "ubuntu") or re.fullmatch(IMAGE_ID, self.base) is not None
        )
        check(is_known, f"base={self.base} must be dlami, ubuntu or the id of an image")
        check(
            len(set(self.regions)) == len(self.regions),
            f"regions={self.regions} names a region twice",
        )
        check(
            self.compile_cache is None
            or re.fullmatch(r"s3://[a-z0-9.-]+/[\w./-]+", self.compile_cache) is not None,
            f"compile_cache={self.compile_cache} must be s3://bucket/prefix, of letters, digits and ._-/",
        )
        if self.wheel is not None:
            file = local_path(self.wheel)
            is_wheel = file.suffix == ".whl" and file.is_file()
            check(is_wheel, f"wheel={self.wheel} must be a file *.whl; without it, one is built")
        name = self.instance.name
        has_device = (
            name.startswith("trn1") if self.image == "neuron" else self.instance.device == "cuda"
        )
        check(
            has_device,
            f"instance={name} has no device on which the image {self.image} could be tested; use "
            f"instance={IMAGES[self.image]}",
        )
