"""The promotion of an image: launches then start from it."""

from __future__ import annotations

import argparse
from typing import Any

from ami.config import IMAGES
from launch.ec2.account import KIND_TAG, OWN_IMAGE
from launch.ec2.api import Api
from train.config import InputError, check
from train.machine.console import say
from train.run.command import DONE, Parser


def add_flags(parser: Parser) -> None:
    image = "id such as ami-0123456789abcdef0, in the first region"
    region = "AWS region; repeatable (the profile's region)"
    parser.add_argument("image", metavar="IMAGE", help=image)
    parser.add_argument("--region", action="append", default=[], help=region)
    parser.add_argument("--yes", action="store_true", help="do it; without --yes, only show it")


def promote(options: argparse.Namespace) -> int:
    """Make launch use an image and, in other regions, its copies, which have the same name."""
    api = Api()
    first, *others = api.regions(options.region)
    image = api.image(first, options.image)
    kind = kind_of(image)
    images = {first: options.image}
    for region in others:
        images[region] = copy_of(api, region, image)
    # Nothing is changed before all regions are known to have the image.
    for region, ident in images.items():
        point(api, region, OWN_IMAGE.format(kind), ident, is_wanted=options.yes)
    say("done" if options.yes else "nothing was changed: --yes promotes it")
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


def copy_of(api: Api, region: str, image: dict[str, Any]) -> str:
    """Return the id of an image's copy in another region."""
    name = image["Name"]
    found = api.pages(region, "describe_images", "Images", by={"name": [name]}, Owners=["self"])
    if not found:
        raise InputError(f"{region} has no copy of {name}: build with regions=[...,{region}]")
    kind_of(found[0])
    return str(found[0]["ImageId"])


def point(api: Api, region: str, parameter: str, image: str, *, is_wanted: bool) -> None:
    """Set the SSM parameter from which launches read the image, and say what it was before."""
    answer = api.ask(region, "get_parameters", service="ssm", Names=[parameter])["Parameters"]
    if answer:
        before = answer[0]["Value"]
    else:
        before = "none"
    say(f"{parameter} in {region}: {before} -> {image}")
    if is_wanted:
        api.ask(
            region,
            "put_parameter",
            service="ssm",
            Name=parameter,
            Value=image,
            Type="String",
            DataType="aws:ec2:image",
            Overwrite=True,
        )
