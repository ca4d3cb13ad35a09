"""The promotion of an image: launches then start from it."""

from __future__ import annotations

import argparse
from typing import Any

from ami.config import IMAGES, KIND_TAG
from launch.ec2.account import OWN_IMAGE
from launch.ec2.api import Api
from train.config import check
from train.machine.console import say
from train.run.command import DONE, Parser


def add_flags(parser: Parser) -> None:
    image = "id such as ami-0123456789abcdef0"
    region = "AWS region (the profile's)"
    parser.add_argument("image", metavar="IMAGE", help=image)
    parser.add_argument("--region", help=region)
    parser.add_argument("--yes", action="store_true", help="do it; without --yes, only show it")


def promote(options: argparse.Namespace) -> int:
    """Make launches in a region use an image."""
    api = Api(options.region)
    (region,) = api.regions([])
    kind = kind_of(api.image(region, options.image))
    parameter = OWN_IMAGE.format(kind)
    before = api.parameter(region, parameter) or "none"
    say(f"{parameter} in {region}: {before} -> {options.image}")
    if not options.yes:
        say("nothing was changed: --yes promotes it")
        return DONE
    api.ask(
        region,
        "put_parameter",
        service="ssm",
        Name=parameter,
        Value=options.image,
        Type="String",
        DataType="aws:ec2:image",
        Overwrite=True,
    )
    say("done")
    return DONE


def kind_of(image: dict[str, Any]) -> str:
    """Return neuron or cuda. Raises InputError if the image is incomplete, or another project's."""
    tags = {tag["Key"]: tag["Value"] for tag in image.get("Tags", ())}
    kind = tags.get(KIND_TAG, "")
    check(
        kind in IMAGES and image["State"] == "available",
        f"{image['ImageId']} is {image['State']} and has the tag {KIND_TAG}={kind}: baretrain ami has not built it, or "
        "has not finished",
    )
    return kind
