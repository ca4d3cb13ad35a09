"""The commands `baretrain ami list | verify | promote | prune | clean`, and `manifest | restore` for use on images."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ami.build import find_left, remove_left
from ami.config import IMAGES
from ami.images import (
    TAG,
    Image,
    differences,
    faults,
    find_by_name,
    own_images,
    read_image,
    read_parameter,
)
from ami.manifest import check_installed, installed
from launch.ec2.account import KIND_TAG, OWN_IMAGE
from launch.ec2.api import Api
from launch.values import columns
from train.config import InputError, S3Config, check
from train.machine.console import say
from train.machine.versions import read_versions
from train.run.command import DONE, FAILED, command_parser, guarded, printable
from train.storage.folders import canonical_json, local_path, open_folder

KEPT = 3  # number of images of each kind that prune keeps
# an image without tags that is younger than this may still be under construction
MAY_BE_BUILT = timedelta(hours=6)


@dataclass(frozen=True)
class Command:
    act: Callable[[argparse.Namespace], int]
    purpose: str
    examples: tuple[str, ...]
    flags: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    """Run a command line that begins with one of COMMANDS; return the exit code."""
    name, command = arguments[0], COMMANDS[arguments[0]]
    parser = command_parser(f"ami {name}", command.purpose, examples=command.examples)
    for flag in command.flags:
        parser.add_argument(flag, **FLAGS[flag])
    return guarded(lambda: command.act(parser.parse_args(arguments[1:])))


def list_images(options: argparse.Namespace) -> int:
    api = Api(options.profile)
    regions = api.regions(options.region)
    rows = [("image", "region", "kind", "made", "GiB", "state", "versions")]
    for region in regions:
        promoted = {read_parameter(api, region, OWN_IMAGE.format(kind)) for kind in IMAGES}
        for image in own_images(api, region):
            state = "promoted" if image.id in promoted else image.state
            if not image.kind:
                state = "incomplete"
            elif any(faults(image)):
                state += " !"
            versions = [image.tags.get(f"{TAG}{name}", "") for name in ("neuron-sdk", "torch")]
            size_gib = sum(int(disk["Ebs"].get("VolumeSize", 0)) for disk in image.disks)
            about = (image.kind or "-", image.created[:16].replace("T", " "), str(size_gib), state)
            rows.append((image.id, region, *about, printable(" ".join(versions)) or "-"))
    if len(rows) == 1:
        say(
            f"this account has no image in {', '.join(regions)}: baretrain ami neuron shows the plan of one"
        )
        return DONE
    say(*columns(rows, str.ljust))
    return DONE


def verify(options: argparse.Namespace) -> int:
    """Print an image's faults, and its differences from ami/versions.yaml; return exit code 1 if there are any."""
    api = Api(options.profile)
    regions = api.regions(options.region)
    image = read_image(api, regions[0], options.image)
    wrong = [*faults(image)]
    wrong += [
        f"differs from ami/versions.yaml: {each}" for each in differences(image, read_versions())
    ]
    for each in wrong:
        say(f"{image.id} {each}")
    if wrong:
        return FAILED
    say(
        f"{image.id}: {image.kind}, encrypted, IMDSv2 only, private, with the versions in ami/versions.yaml"
    )
    return DONE


def promote(options: argparse.Namespace) -> int:
    """Make launch use an image and, in other regions, its copies, which have the same name."""
    api = Api(options.profile)
    regions = api.regions(options.region)
    images = [read_image(api, regions[0], options.image)]
    for region in regions[1:]:
        copy = find_by_name(api, region, images[0].kind, images[0].name)
        if copy is None:
            built = f"build it with regions=[{regions[0]},{region}]"
            raise InputError(f"{region} has no copy of {images[0].name}: {built}")
        images.append(copy)
    for image in images:
        for fault in faults(image):
            raise InputError(f"{image.id} in {image.region} {fault}")
    for each in differences(images[0], read_versions()):
        say(f"note: differs from ami/versions.yaml: {each}")
    for image in images:
        name = OWN_IMAGE.format(image.kind)
        before = read_parameter(api, image.region, name)
        say(f"{name} in {image.region}: {before or 'none'} -> {image.id}")
        if options.yes and before != image.id:
            value: dict[str, Any] = {
                "Name": name,
                "Value": image.id,
                "Type": "String",
                "DataType": "aws:ec2:image",
            }
            api.ask(image.region, "put_parameter", service="ssm", Overwrite=True, **value)
    say("done" if options.yes else "nothing was changed: --yes promotes it")
    return DONE


def prune(options: argparse.Namespace) -> int:
    """Remove old images and their snapshots, except those that are promoted, in use, or perhaps still being built."""
    check(options.keep >= 1, f"--keep {options.keep} must be 1 or more")
    api = Api(options.profile)
    regions = api.regions(options.region)
    count = 0
    for region in regions:
        images, snapshots = own_images(api, region), list[str]()
        for image in old_images(api, region, images, options.keep):
            shown = ", ".join(image.snapshots) or "no snapshot"
            say(f"{image.id} ({region}) of {image.created[:10]}, with {shown}")
            count += 1
            snapshots += image.snapshots
            if options.yes:
                api.ask(region, "deregister_image", ImageId=image.id)
        kept = {snapshot for image in images for snapshot in image.snapshots}
        for each in api.pages(
            region,
            "describe_snapshots",
            "Snapshots",
            OwnerIds=["self"],
            by={"tag-key": [KIND_TAG]},
        ):
            if each["SnapshotId"] not in kept:
                say(f"{each['SnapshotId']} ({region}), a snapshot without its image")
                count += 1
                snapshots.append(each["SnapshotId"])
        for snapshot in snapshots if options.yes else ():
            api.ask(region, "delete_snapshot", SnapshotId=snapshot)
    if not count:
        say("nothing to remove")
    elif not options.yes:
        say("nothing was removed: --yes removes it")
    return DONE


def old_images(api: Api, region: str, images: Sequence[Image], keep: int) -> list[Image]:
    """Return a region's images to remove: incomplete ones, and all but the newest `keep` of each kind."""
    before = f"{datetime.now(UTC) - MAY_BE_BUILT:%Y-%m-%dT%H:%M:%S}"
    old = [image for image in images if not image.kind and image.created < before]
    for kind in IMAGES:
        promoted = read_parameter(api, region, OWN_IMAGE.format(kind))
        of_kind = [image for image in images if image.kind == kind]
        old += [image for image in of_kind[keep:] if image.id != promoted]
    if not old:
        return []
    reservations = api.pages(
        region, "describe_instances", "Reservations", by={"image-id": [each.id for each in old]}
    )
    machines = [each for reservation in reservations for each in reservation["Instances"]]
    in_use = {each["ImageId"] for each in machines if each["State"]["Name"] != "terminated"}
    for image_id in sorted(in_use):
        say(f"kept {image_id} ({region}): machines run from it")
    return [image for image in old if image.id not in in_use]


def clean(options: argparse.Namespace) -> int:
    """Remove resources that builds left behind, and end running builds. Returns exit code 1 if some remain."""
    api = Api(options.profile)
    regions = api.regions(options.region)
    left = [each for region in regions for each in find_left(api, region, None)]
    if not left:
        say(f"no build left anything in {', '.join(regions)}")
        return DONE
    if not options.yes:
        say(*left)
        say("nothing was removed: --yes removes it, and ends builds that are under way")
        return FAILED
    for region in regions:
        remove_left(api, region, None)
    say("removed")
    return DONE


# ---- on an image -----------------------------------------------------------------------------------------------------


def write_manifest(options: argparse.Namespace) -> int:
    """Write the installed versions. Raises InputError if they differ from ami/versions.yaml."""
    manifest = installed()
    check_installed(manifest, read_versions())
    local_path(options.file).write_bytes(canonical_json(manifest))
    return DONE


def restore(options: argparse.Namespace) -> int:
    source, target = (
        open_folder(options.source, S3Config()),
        open_folder(options.folder, S3Config()),
    )
    names = source.names()
    check(
        bool(names), f"{options.source} has no files: fill the compile cache with train.precompile"
    )
    for name in names:
        if target.size(name) != source.size(name):
            target.write(name, source.read(name))
    say(f"{len(names)} files of {options.source} are in {options.folder}")
    return DONE


FLAGS: dict[str, dict[str, Any]] = {
    "image": {"metavar": "IMAGE", "help": "id such as ami-0123456789abcdef0, in the first region"},
    "file": {"metavar": "FILE", "help": "file to write"},
    "source": {"metavar": "URL", "help": "s3://bucket/prefix"},
    "folder": {"metavar": "FOLDER", "help": "folder to write to"},
    "--region": {
        "action": "append",
        "default": [],
        "help": "AWS region; repeatable (the profile's region)",
    },
    "--profile": {"help": "profile in ~/.aws with the credentials"},
    "--yes": {"action": "store_true", "help": "do it; without --yes, only say what would be done"},
    "--keep": {
        "type": int,
        "default": KEPT,
        "metavar": "N",
        "help": f"newest images to keep of each kind ({KEPT})",
    },
}
AWS = ("--region", "--profile")
TWO_REGIONS = "--region us-east-1 --region us-west-2"
IMAGE = "ami-0123456789abcdef0"
COMMANDS = {
    "list": Command(list_images, "List the images of this account.", ("", TWO_REGIONS), AWS),
    "verify": Command(
        verify,
        "Check an image: its state, encryption, IMDSv2, who may start it, and its versions.",
        (IMAGE,),
        ("image", *AWS),
    ),
    "promote": Command(
        promote,
        "Make launch use an image; to go back, promote an older one.",
        (IMAGE, f"{IMAGE} {TWO_REGIONS} --yes"),
        ("image", *AWS, "--yes"),
    ),
    "prune": Command(
        prune,
        "Remove old images and their snapshots.",
        ("--keep 2", "--keep 2 --yes"),
        (*AWS, "--yes", "--keep"),
    ),
    "clean": Command(
        clean, "Find what interrupted builds left, and remove it.", ("", "--yes"), (*AWS, "--yes")
    ),
    "manifest": Command(
        write_manifest, "On an image: write the installed versions.", ("manifest.json",), ("file",)
    ),
    "restore": Command(
        restore,
        "On an image: copy a compile cache from S3.",
        ("s3://bucket/cache /tmp/cache",),
        ("source", "folder"),
    ),
}
