"""Building an image with Packer, and removing resources that a build leaves behind."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from ami import packer
from ami.config import MAX_MINUTES
from ami.files import HERE, write_files
from ami.images import MINUTES, TAG, faults, find_by_name
from ami.plan import BUILD, ImagePlan
from launch.ec2.api import Api
from launch.ec2.sweep import GONE, Resource, delete, find, sweep
from train.config import Failure
from train.machine.versions import read_versions
from train.storage.aws_errors import Rejected
from train.storage.folders import scratch_folder

# kinds of EC2 resources that Packer makes
KINDS = (
    "instance",
    "volume",
    "security-group",
    "key-pair",
)
ROLE = "packer-"  # prefix of the roles that Packer makes


def build(api: Api, plan: ImagePlan) -> dict[str, str]:
    """Build the image; return its ids by region. The build's temporary resources are removed afterwards."""
    program, values, started = packer.find_packer(), plan.variables, time.monotonic()
    with scratch_folder() as folder:
        file = folder / "values.pkrvars.json"
        files = write_files(
            folder, plan.cfg, values["base_image"], read_versions(), values["tags"][f"{TAG}commit"]
        )
        file.write_text(json.dumps({**values, "files": str(files)}))
        packer.run([program, "init", "."], HERE)
        try:
            command = [program, "build", "-color=false", f"-var-file={file}", "."]
            packer.run(command, HERE, limit_s=MAX_MINUTES * 60)
        finally:
            remove_left(api, values["region"], values["build_tags"][BUILD])
    minutes, made = (time.monotonic() - started) / 60, dict[str, str]()
    for region in (values["region"], *values["copy_regions"]):
        image = find_by_name(api, region, plan.cfg.image, values["name"])
        if image is None:
            raise Failure(
                f"Packer succeeded, but there is no {values['name']} in {region}; see baretrain ami list"
            )
        for fault in faults(image):
            raise Failure(f"the image {image.id} in {region} {fault}")
        api.ask(
            region,
            "create_tags",
            Resources=[image.id],
            Tags=[{"Key": MINUTES, "Value": f"{minutes:.0f}"}],
        )
        made[region] = image.id
    return made


def find_left(api: Api, region: str, build_id: str | None) -> list[Resource]:
    """Return the resources with the tag of one build or, if `build_id` is None, of any build."""
    by = {"tag-key": [BUILD]} if build_id is None else {f"tag:{BUILD}": [build_id]}
    left = [each for each in find(api, region, by, KINDS) if each.state not in GONE]
    for role in api.pages(region, "list_roles", "Roles", service="iam"):
        name = role["RoleName"]
        if name.startswith(ROLE):
            tags = api.pages(region, "list_role_tags", "Tags", service="iam", RoleName=name)
            if any(tag["Key"] == BUILD and build_id in (None, tag["Value"]) for tag in tags):
                left.append(Resource(region, "role", name, "there"))
    return left


def remove_left(api: Api, region: str, build_id: str | None) -> None:
    """Remove a build's resources until two searches in a row find none. Raises Failure if some remain."""
    # One search is not enough, since EC2 may not list new resources immediately.

    def remove(left: list[Resource]) -> None:
        delete(api, [each for each in left if each.kind != "role"])
        for each in left:
            if each.kind == "role":
                remove_role(api, region, each.id)

    look = partial(find_left, api, region, build_id)
    if left := sweep(look, remove, looks=2):
        listed = ", ".join(map(str, left))
        raise Failure(
            f"a build left {listed}: remove these by hand, and check with baretrain ami clean"
        )


def remove_role(api: Api, region: str, name: str) -> None:
    def ask(operation: str, **parameters: Any) -> Any:
        return api.ask(region, operation, service="iam", **parameters)

    try:
        for profile in ask("list_instance_profiles_for_role", RoleName=name)["InstanceProfiles"]:
            its_name = profile["InstanceProfileName"]
            ask("remove_role_from_instance_profile", InstanceProfileName=its_name, RoleName=name)
            ask("delete_instance_profile", InstanceProfileName=its_name)
        for policy in ask("list_role_policies", RoleName=name)["PolicyNames"]:
            ask("delete_role_policy", RoleName=name, PolicyName=policy)
        ask("delete_role", RoleName=name)
    except Rejected as error:  # IAM may not yet see earlier removals; the next search repeats this
        if error.code not in ("NoSuchEntity", "DeleteConflict"):
            raise
