"""The plan of an image, and its build."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ami import packer, remains
from ami.aws import Account, aws_errors
from ami.base import Base, check_builder, resolve, unresolved
from ami.config import AmiConfig
from ami.files import HERE, write_files
from ami.images import MINUTES, PREFIX, TAG, Image, differences, faults, find_image, own_images, wanted_tags
from train.cli.command import printable
from train.config import Failure, InputError
from train.host.environment import commit
from train.host.versions import Versions, read_versions
from train.storage.folders import scratch_folder

INDENT = 11  # columns
NOT_ASKED = (
    "not known: there are no AWS credentials, so AWS was not asked for the base image, the builder's type in the "
    "region, and earlier images; a build needs them"
)


@dataclass(frozen=True)
class Plan:
    cfg: AmiConfig
    regions: list[str]  # the first one builds
    base: Base
    versions: Versions
    name: str
    build: str  # id, in the tag of all that exists only during the build
    commit: str
    last: Image | None  # the newest image of this kind that is whole
    deprecate_at: str

    def tags(self) -> dict[str, str]:
        about = {"Name": self.name, f"{TAG}commit": self.commit, f"{TAG}base": self.base.id}
        return {**wanted_tags(self.cfg.image, self.versions), **about}

    def variables(self, files: Path, manifest: Path) -> dict[str, Any]:
        """What ami/variables.pkr.hcl declares."""
        cfg = self.cfg
        bucket, _, prefix = (cfg.compile_cache or "").removeprefix("s3://").partition("/")
        return {
            "region": self.regions[0],
            "copy_regions": self.regions[1:],
            "base_image": self.base.id,
            "root_device": self.base.root_device,
            "name": self.name,
            "instance_type": cfg.instance.name,
            "subnet": cfg.subnet or "",
            "disk_gib": cfg.disk_gib,
            "kms_key": cfg.kms_key or "",
            "cache_arns": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/{prefix}*"] if bucket else [],
            "deprecate_at": self.deprecate_at,
            "tags": self.tags(),
            "build_tags": {"Name": f"{self.name} (builder)", remains.BUILD: self.build},
            "files": str(files),
            "manifest": str(manifest),
            "max_minutes": cfg.max_minutes,
        }


def make_plan(account: Account, cfg: AmiConfig, now: datetime) -> Plan:
    """Ask AWS for the base image and for what was built before. InputError for what could not be built.

    Without credentials AWS is not asked, unless a build needs it.
    """
    versions, revision = read_versions(), commit() or "none"
    base, regions, before = unresolved(cfg, versions), cfg.regions, list[Image]()
    if cfg.build or account.has_credentials():
        regions = regions or [account.region()]
        ec2 = account.ec2(regions[0])
        base = resolve(account, regions[0], cfg, versions)
        check_builder(ec2, regions[0], cfg)
        images = own_images(ec2, regions[0], cfg.image)
        before = [image for image in images if image.kind and image.state == "available"]
    name = f"{PREFIX}{cfg.image}-{now:%Y%m%d-%H%M%S}-{revision.rstrip('+')[:8]}"
    deprecate_at = f"{now + timedelta(days=cfg.deprecate_days):%Y-%m-%dT%H:%M:00Z}"
    build = f"{now:%Y%m%d%H%M%S}-{secrets.token_hex(4)}"
    return Plan(cfg, regions, base, versions, name, build, revision, before[0] if before else None, deprecate_at)


# ---- shown -----------------------------------------------------------------------------------------------------------


def plan_lines(plan: Plan) -> list[str]:
    cfg, base, last = plan.cfg, plan.base, plan.last
    pins = {tag.removeprefix(TAG): version for tag, version in wanted_tags(cfg.image, plan.versions).items()}
    del pins["image"]
    changed = ["nothing was built before"] if last is None else [f"since {last.id} of {last.created:%Y-%m-%d}:"]
    if last is not None:
        changed += differences(last, plan.versions) or ["the same versions"]
        if last.tags.get(f"{TAG}base") != base.id:
            changed.append(f"base image {last.tags.get(f'{TAG}base', 'unknown')} -> {base.id}")
        changed.append(f"commit {last.tags.get(f'{TAG}commit', 'unknown')} -> {plan.commit}")
    if not base.id:
        changed = [NOT_ASKED]
    source = f", from {base.parameter}" if base.parameter else ""
    copies = f", copies in {', '.join(plan.regions[1:])}" if plan.regions[1:] else ""
    return [
        line("image", f"{plan.name}, {cfg.disk_gib} GiB, encrypted, until {plan.deprecate_at[:10]}"),
        line("base", printable(f"{base.id or 'not resolved'} ({base.name or 'name not known'}){source}")),
        line("region", f"{plan.regions[0]}{copies}" if plan.regions else "none named: regions=[us-east-1]"),
        line("builder", f"{cfg.instance.name}, reached through SSM, without public address or inbound port"),
        line("cost", cost(plan)),
        *(line("versions" if not n else "", f"{name} {version}") for n, (name, version) in enumerate(pins.items())),
        *(line("changes" if not n else "", printable(each)) for n, each in enumerate(changed)),
        line("packer", packer_state()),
    ]


def cost(plan: Plan) -> str:
    """Minutes and dollars: those of the last build, and at most."""
    cfg = plan.cfg
    took = f"the last build took {plan.last.minutes:.0f} minutes" if plan.last and plan.last.minutes else ""
    price = cfg.instance.usd_per_hour
    limit = f"at most {cfg.max_minutes} minutes"
    if price is not None:
        limit += f", ${price * cfg.max_minutes / 60:.2f} at ${price:.2f} an hour ({cfg.instance.price_date})"
    return "; ".join(filter(None, [took, limit, "and its snapshots, in every region, as long as they are kept"]))


def packer_state() -> str:
    try:
        return f"{packer.find_packer()}"
    except InputError as error:
        return f"a build would be refused: {error}"


def line(head: str, text: str) -> str:
    return f"{head:{INDENT}}{text}"


# ---- done ------------------------------------------------------------------------------------------------------------


def build(account: Account, plan: Plan) -> dict[str, str]:
    """Build the image; returns its ids by region. What existed only for the build is gone afterwards."""
    program, region = packer.find_packer(), plan.regions[0]
    started = time.monotonic()
    with scratch_folder() as folder:
        manifest = folder / "manifest.json"
        files = write_files(folder, plan.cfg, plan.base, plan.versions, plan.commit)
        values = folder / "values.pkrvars.json"
        values.write_text(json.dumps(plan.variables(files, manifest)))
        packer.run([program, "init", "."], HERE)
        try:
            packer.run(command(program, plan.cfg.image, values), HERE, limit_s=plan.cfg.max_minutes * 60)
        finally:
            for thing in remains.remove(account, region, plan.build):
                print(f"removed {thing}, which Packer had left", flush=True)
        made = packer.made_images(manifest)
    check_made(account, made, minutes=(time.monotonic() - started) / 60)
    return made


def command(program: str, image: str, values: Path) -> Sequence[str]:
    return [program, "build", "-color=false", f"-only={image}.*", f"-var-file={values}", "."]


def check_made(account: Account, made: dict[str, str], *, minutes: float) -> None:
    """Failure if an image that was made should not be started."""
    now = datetime.now(timezone.utc)
    for region, image_id in made.items():
        ec2 = account.ec2(region)
        with aws_errors(f"tags of {image_id} in {region}"):
            ec2.create_tags(Resources=[image_id], Tags=[{"Key": MINUTES, "Value": f"{minutes:.0f}"}])
        wrong = list(faults(find_image(ec2, region, image_id), now))
        if wrong:
            raise Failure(f"the image {image_id} in {region} {wrong[0]}")
