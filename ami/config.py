"""Settings for building an image."""

from __future__ import annotations

from dataclasses import dataclass, field

from train.config import InstanceConfig, Section, check, setting

KIND_TAG = "baretrain:image"  # tag of images: neuron or cuda
# The smallest machine on which each image can be tested.
IMAGES = {"neuron": "trn1.2xlarge", "cuda": "g5.xlarge"}
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

    def __post_init__(self) -> None:
        super().__post_init__()
        is_known = self.base in ("dlami", "ubuntu") or self.base.startswith("ami-")
        check(is_known, f"base={self.base} must be dlami, ubuntu or the id of an image")
