"""`python -m ami list | verify | promote | prune | clean`, and `manifest` and `restore`, which run on an image."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ami import manifest, remains
from ami.aws import Account, aws_errors
from ami.config import IMAGES, check_region
from ami.images import (
    KIND,
    UNDER_WAY_S,
    Image,
    differences,
    faults,
    find_image,
    own_images,
    parameter,
    promoted,
)
from train.cli.command import DONE, FAILED, Parser, command_parser, guarded, printable
from train.config import InputError, S3Config, check
from train.host.versions import read_versions
from train.storage.folders import canonical_json, local_path, open_folder

KEPT = 3  # images of a kind that prune leaves
YES = "do it; without, only say what would be done"


@dataclass(frozen=True)
class Verb:
    purpose: str
    examples: tuple[str, ...]
    add_flags: Callable[[Parser], None]
    act: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str]) -> int:
    """Act on a command line that begins with one of VERBS; the exit code."""
    name, verb = arguments[0], TABLE[arguments[0]]
    parser = command_parser(f"ami {name}", verb.purpose, examples=verb.examples)
    verb.add_flags(parser)
    return guarded(lambda: verb.act(parser.parse_args(arguments[1:])))


def aws_flags(parser: Parser) -> None:
    parser.add_argument("--region", action="append", default=[], help="also several times; default: the profile's")
    parser.add_argument("--profile", help="of ~/.aws: the credentials to use")


def account_of(options: argparse.Namespace) -> tuple[Account, list[str]]:
    account = Account(options.profile)
    for region in options.region:
        check_region("--region", region)
    return account, options.region or [account.region()]


def no_flags(parser: Parser) -> None:
    aws_flags(parser)


def yes_flags(parser: Parser) -> None:
    aws_flags(parser)
    parser.add_argument("--yes", action="store_true", help=YES)


def image_flags(parser: Parser) -> None:
    parser.add_argument("image", metavar="IMAGE", help="id, as ami-0123456789abcdef0, in the first region")
    aws_flags(parser)


def promote_flags(parser: Parser) -> None:
    image_flags(parser)
    parser.add_argument("--yes", action="store_true", help=YES)


def prune_flags(parser: Parser) -> None:
    yes_flags(parser)
    parser.add_argument("--keep", type=int, default=KEPT, metavar="N", help=f"of each kind, the newest ({KEPT})")


# ---- list and verify -------------------------------------------------------------------------------------------------


def list_images(options: argparse.Namespace) -> int:
    account, regions = account_of(options)
    now = datetime.now(timezone.utc)
    rows = [("image", "region", "kind", "made", "GiB", "state", "versions")]
    for region in regions:
        chosen = {promoted(account.ssm(region), region, kind) for kind in IMAGES}
        for image in own_images(account.ec2(region), region):
            wrong = list(faults(image, now))
            state = "promoted" if image.id in chosen else "half built" if not image.kind else image.state
            versions = [value for tag in ("neuron-sdk", "torch") if (value := image.tags.get(f"baretrain:{tag}"))]
            mark = " !" if wrong and image.kind else ""
            about = (image.kind or "-", f"{image.created:%Y-%m-%d %H:%M}", str(image.size_gib), f"{state}{mark}")
            rows.append((image.id, region, *about, printable(" ".join(versions)) or "-"))
    if len(rows) == 1:
        print(f"no image of this account's own in {', '.join(regions)}: python -m ami neuron shows how one is built")
        return DONE
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return DONE


def verify(options: argparse.Namespace) -> int:
    """Exit code 1 if the image has a fault, or other versions than ami/versions.yaml."""
    account, regions = account_of(options)
    image = find_image(account.ec2(regions[0]), regions[0], options.image)
    wrong = list(faults(image, datetime.now(timezone.utc)))
    other = differences(image, read_versions())
    for fault in wrong:
        print(f"{image.id} {fault}")
    for each in other:
        print(printable(f"{image.id} has another version than ami/versions.yaml: {each}"))
    if wrong or other:
        return FAILED
    print(f"{image.id}: {image.kind}, encrypted, IMDSv2 only, private, the versions of ami/versions.yaml")
    return DONE


# ---- promote ---------------------------------------------------------------------------------------------------------


def promote(options: argparse.Namespace) -> int:
    """Let launch take an image, and its copies of the same name in the other regions."""
    account, regions = account_of(options)
    first = find_image(account.ec2(regions[0]), regions[0], options.image)
    chosen = [first, *(copy_of(account, first, region) for region in regions[1:])]
    now = datetime.now(timezone.utc)
    for image in chosen:
        for fault in faults(image, now):
            raise InputError(f"{image.id} in {image.region} {fault}")
    for each in differences(first, read_versions()):
        print(printable(f"note: another version than ami/versions.yaml: {each}"))
    for image in chosen:
        ssm, name = account.ssm(image.region), parameter(image.kind)
        before = promoted(ssm, image.region, image.kind)
        print(f"{name} in {image.region}: {before or 'none'} -> {image.id}")
        if options.yes and before != image.id:
            with aws_errors(f"SSM parameter {name} in {image.region}"):
                ssm.put_parameter(Name=name, Value=image.id, Type="String", DataType="aws:ec2:image", Overwrite=True)
    print("done" if options.yes else "nothing was changed: --yes does it")
    return DONE


def copy_of(account: Account, first: Image, region: str) -> Image:
    for image in own_images(account.ec2(region), region, first.kind):
        if image.name == first.name:
            return image
    raise InputError(f"{region} has no copy of {first.name}: build it with regions=[{first.region},{region}]")


# ---- prune and clean -------------------------------------------------------------------------------------------------


def prune(options: argparse.Namespace) -> int:
    """Remove old images with their snapshots; never one that is promoted, in use, or perhaps still built."""
    check(options.keep >= 1, f"--keep {options.keep} must be 1 or more")
    account, regions = account_of(options)
    now = datetime.now(timezone.utc)
    count = 0
    for region in regions:
        ec2, ssm = account.ec2(region), account.ssm(region)
        images = own_images(ec2, region)
        old = [image for image in images if not image.kind and now - image.created > timedelta(seconds=UNDER_WAY_S)]
        for kind in IMAGES:
            chosen = promoted(ssm, region, kind)
            of_kind = [image for image in images if image.kind == kind]
            old += [image for image in of_kind[options.keep :] if image.id != chosen]
        in_use = images_in_use(ec2, region, [image.id for image in old])
        for image in old:
            if image.id in in_use:
                print(f"kept {image.id} ({region}): machines run from it")
                continue
            print(
                f"{image.id} ({region}) of {image.created:%Y-%m-%d}, with {', '.join(image.snapshots) or 'no snapshot'}"
            )
            count += 1
            if options.yes:
                remove_image(ec2, image)
        kept = {snapshot for image in images for snapshot in image.snapshots}
        for snapshot in orphans(ec2, region, kept):
            print(f"{snapshot} ({region}), a snapshot without its image")
            count += 1
            if options.yes:
                delete_snapshot(ec2, region, snapshot)
    if not count:
        print("nothing to remove")
    elif not options.yes:
        print("nothing was removed: --yes does it")
    return DONE


def images_in_use(ec2: Any, region: str, ids: Sequence[str]) -> set[str]:
    if not ids:
        return set()
    with aws_errors(f"machines in {region}"):
        pages = ec2.get_paginator("describe_instances").paginate(Filters=[{"Name": "image-id", "Values": list(ids)}])
        machines = [each for page in pages for group in page["Reservations"] for each in group["Instances"]]
    return {each["ImageId"] for each in machines if each["State"]["Name"] != "terminated"}


def remove_image(ec2: Any, image: Image) -> None:
    with aws_errors(f"image {image.id} in {image.region}"):
        ec2.deregister_image(ImageId=image.id)
    for snapshot in image.snapshots:
        delete_snapshot(ec2, image.region, snapshot)


def delete_snapshot(ec2: Any, region: str, snapshot: str) -> None:
    with aws_errors(f"snapshot {snapshot} in {region}"):
        ec2.delete_snapshot(SnapshotId=snapshot)


def orphans(ec2: Any, region: str, kept: set[str]) -> list[str]:
    """Snapshots with the tag of our images that belong to none."""
    wanted = [{"Name": "tag-key", "Values": [KIND]}]
    with aws_errors(f"snapshots in {region}"):
        pages = ec2.get_paginator("describe_snapshots").paginate(OwnerIds=["self"], Filters=wanted)
        return [each["SnapshotId"] for page in pages for each in page["Snapshots"] if each["SnapshotId"] not in kept]


def clean(options: argparse.Namespace) -> int:
    """Remove what builds left, those that are under way too. Exit code 1 if anything is there and stays."""
    account, regions = account_of(options)
    left = [thing for region in regions for thing in remains.find(account, region, None)]
    for thing in left:
        print(thing)
    if not left:
        print(f"no build left anything in {', '.join(regions)}")
        return DONE
    if not options.yes:
        print("nothing was removed: --yes does it, and ends builds that are under way")
        return FAILED
    for region in regions:
        remains.remove(account, region, None)
    print("removed")
    return DONE


# ---- on an image -----------------------------------------------------------------------------------------------------


def manifest_flags(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="to write")


def write_manifest(options: argparse.Namespace) -> int:
    local_path(options.file).write_bytes(canonical_json(manifest.checked()))
    return DONE


def restore_flags(parser: Parser) -> None:
    parser.add_argument("source", metavar="URL", help="s3://bucket/prefix")
    parser.add_argument("folder", metavar="FOLDER", help="to write to")


def restore(options: argparse.Namespace) -> int:
    source, target = open_folder(options.source, S3Config()), open_folder(options.folder, S3Config())
    names = source.names()
    check(bool(names), f"{options.source} holds no file: train.precompile fills a compile cache")
    for name in names:
        if target.size(name) != source.size(name):
            target.write(name, source.read(name))
    print(f"{len(names)} files of {options.source} are in {Path(options.folder)}")
    return DONE


TABLE = {
    "list": Verb(
        "List the images of this account.", ("", "--region us-east-1 --region us-west-2"), no_flags, list_images
    ),
    "verify": Verb(
        "Say what is wrong with an image: state, encryption, IMDSv2, who may start it, versions.",
        ("ami-0123456789abcdef0",),
        image_flags,
        verify,
    ),
    "promote": Verb(
        "Make an image the one that launch takes; an older one too, to go back.",
        ("ami-0123456789abcdef0", "ami-0123456789abcdef0 --region us-east-1 --region us-west-2 --yes"),
        promote_flags,
        promote,
    ),
    "prune": Verb("Remove old images and their snapshots.", ("--keep 2", "--keep 2 --yes"), prune_flags, prune),
    "clean": Verb("Find what interrupted builds left, and remove it.", ("", "--yes"), yes_flags, clean),
    "manifest": Verb("On an image: write what is installed.", ("manifest.json",), manifest_flags, write_manifest),
    "restore": Verb(
        "On an image: copy a compile cache from S3.", ("s3://bucket/cache /tmp/cache",), restore_flags, restore
    ),
}
VERBS = tuple(TABLE)
