"""Settings of the build of an image."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from train.config import InstanceConfig, Section, check, setting
from train.system.folders import local_path
from train.system.machine import is_native
from train.system.versions import read_versions

IMAGES = {"neuron": "trn1.2xlarge", "cuda": "g5.xlarge"}  # each image's smallest machine with the device that is tested
IMAGE_ID = r"ami-[0-9a-f]{8,17}"
DISK_GIB = 150  # of the root volume, or as large as that of the base: EC2 bills the part of a snapshot that holds data,
# and a launch may give a machine a larger one
DEPRECATE_DAYS = 365  # after which EC2 no longer offers the image; EC2 itself can change the date of one
MAX_MINUTES = 120  # after which the builder ends itself: one that hangs must not cost money for ever


@dataclass(kw_only=True)
class AmiConfig(Section):
    """One build: `python -m ami neuron --cfg job` prints it."""

    image: str = setting("neuron", among=tuple(IMAGES))  # The image that is built, for Trainium or for GPUs.
    base: str = "dlami"  # The base of the image: dlami is Neuron's or the GPU Deep Learning AMI, ubuntu a plain system,
    # ami-... an image of your own.
    build: bool = False  # Build the image; false shows the plan and starts nothing.
    regions: list[str] = field(default_factory=list)  # The regions; the first builds, others get copies; [] is
    # AWS_PROFILE's.
    instance: InstanceConfig = field(default_factory=InstanceConfig)  # the builder
    subnet: str | None = None  # The id of a subnet with a way to the internet; None takes one of the default VPC.
    compile_cache: str | None = None  # The s3://bucket/prefix of compiled graphs that are put into the image.
    wheel: str | None = None  # The file of baretrain's wheel; None builds one from this checkout.

    def __post_init__(self) -> None:
        super().__post_init__()
        is_known = self.base in ("dlami", "ubuntu") or re.fullmatch(IMAGE_ID, self.base) is not None
        check(is_known, f"base={self.base} must be dlami, ubuntu or the id of an image")
        check(len(set(self.regions)) == len(self.regions), f"regions={self.regions} names one twice")
        check(
            self.compile_cache is None or re.fullmatch(r"s3://[a-z0-9.-]+/[\w./-]+", self.compile_cache) is not None,
            f"compile_cache={self.compile_cache} must be s3://bucket/prefix, of letters, digits and ._-/",
        )
        if self.wheel is not None:
            file = local_path(self.wheel)
            is_wheel = file.suffix == ".whl" and file.is_file()
            check(is_wheel, f"wheel={self.wheel} must be a file *.whl; leave it out to build one")
        name = self.instance.name
        check(
            self.image != "neuron" or not is_native(name),
            f"the image neuron holds PyTorch/XLA for trn1, and {name} needs native PyTorch: start it from Neuron's "
            f"DLAMI for torch-neuronx, or from Ubuntu {read_versions().native.ubuntu} with "
            f"{read_versions().native.install}",
        )
        has_device = name.startswith("trn1") if self.image == "neuron" else self.instance.device == "cuda"
        check(
            has_device,
            f"instance={name} has no device of the image {self.image}, and the smoke test could not try one; take "
            f"instance={IMAGES[self.image]}",
        )
