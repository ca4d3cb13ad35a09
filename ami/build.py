"""The plan of an image, and its build with Packer."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ami.config import KIND_TAG, MAX_MINUTES, AmiConfig
from ami.files import HERE, write_files
from launch.ec2.api import Api
from train.config import Failure, InputError
from train.machine.console import say
from train.machine.environment import commit
from train.machine.versions import read_versions
from train.run.command import DONE
from train.storage.folders import scratch_folder

DEPRECATE_DAYS = 365  # EC2 marks the image as deprecated after this time
PACKER = "Packer 1.10 or newer is needed: https://developer.hashicorp.com/packer/install"


def plan_and_build(cfg: AmiConfig) -> int:
    """Print what would be built, without asking AWS. With build=true, build it."""
    values = variables(cfg, datetime.now(UTC))
    say(*plan_lines(cfg, values))
    if not cfg.build:
        say("nothing was started; build=true builds the image")
        return DONE
    packer = shutil.which("packer")
    if packer is None:
        raise InputError(f"packer is not installed. {PACKER}")
    api = Api()
    regions = api.regions(cfg.regions)
    base = base_image(api, regions[0], cfg)
    values |= {"region": regions[0], "copy_regions": regions[1:], "base_image": base}
    with scratch_folder() as folder:
        files = write_files(folder, cfg, base, read_versions(), commit() or "none")
        file = folder / "values.pkrvars.json"
        file.write_text(json.dumps({**values, "files": str(files)}))
        run([packer, "init", "."], HERE)
        run([packer, "build", "-color=false", f"-var-file={file}", "."], HERE)
    say(
        "Packer has printed the ids of the images; baretrain ami promote ID --yes lets launch use one"
    )
    return DONE


def variables(cfg: AmiConfig, now: datetime) -> dict[str, Any]:
    """Return the variables of ami/variables.pkr.hcl, except those that only AWS or the files decide."""
    versions = read_versions()
    revision = commit() or "none"
    tags = {
        KIND_TAG: cfg.image,
        "baretrain:version": versions["baretrain"],
        "baretrain:commit": revision,
        "baretrain:torch": versions["torch"],
    }
    if cfg.image == "neuron":
        tags["baretrain:neuron-sdk"] = versions.sdk.name
    return {
        "image": cfg.image,
        "name": f"baretrain-{cfg.image}-{now:%Y%m%d-%H%M%S}-{revision.rstrip('+')[:8]}",
        "instance_type": cfg.instance.name,
        "subnet": cfg.subnet or "",
        "deprecate_at": f"{now + timedelta(days=DEPRECATE_DAYS):%Y-%m-%dT%H:%M:00Z}",
        "tags": tags,
        "max_minutes": MAX_MINUTES,
    }


def plan_lines(cfg: AmiConfig, values: dict[str, Any]) -> list[str]:
    regions = ", then copied to ".join(cfg.regions) or "the AWS profile's region"
    limit = f"at most {MAX_MINUTES} minutes"
    price = cfg.instance.usd_per_hour
    if price is not None:
        limit += f", ${price * MAX_MINUTES / 60:.2f} at ${price:.2f} an hour"
    tags = ", ".join(
        f"{name.removeprefix('baretrain:')} {value}" for name, value in values["tags"].items()
    )
    return [
        f"image      {values['name']}, encrypted, deprecated from {values['deprecate_at'][:10]}",
        f"base       {base_parameter(cfg) or cfg.base}",
        f"region     {regions}",
        f"builder    {cfg.instance.name}, reached through SSM, without public address or inbound port",
        f"cost       {limit}; plus its snapshots, in every region, for as long as they are kept",
        f"tags       {tags}",
    ]


def base_parameter(cfg: AmiConfig) -> str:
    """Return the SSM parameter that holds the id of the base image; "" if the settings name an image."""
    if cfg.base.startswith("ami-"):
        return ""
    if cfg.base == "ubuntu":
        name = "ubuntu"
    else:
        name = f"{cfg.image}-dlami"
    return read_versions().bases[name].version


def base_image(api: Api, region: str, cfg: AmiConfig) -> str:
    parameter = base_parameter(cfg)
    if not parameter:
        return cfg.base
    image = api.parameter(region, parameter)
    if image is None:
        raise InputError(
            f"{region} has no SSM parameter {parameter}: AWS may have withdrawn the image; give base=ubuntu, or "
            "base=ami-... of an older one"
        )
    return image


def run(command: list[str], folder: Path) -> None:
    """Run Packer. After Ctrl-C, which Packer receives too, wait until Packer has removed its resources."""
    process = subprocess.Popen(command, cwd=folder)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if code:
        raise Failure(f"packer {command[1]} failed (exit code {code}), see above. {PACKER}")
