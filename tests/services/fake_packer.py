"""A stand-in for Packer, which cannot be had everywhere: it makes in EC2 (moto) what Packer would, by its variables.

It leaves the builder, its group, key and role behind, whatever becomes of it. FAKE_PACKER: "fail" makes no image,
"interrupt" makes none either, sends its parent SIGINT, as Ctrl-C does, and ends when it gets that itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

VERSION = os.environ.get("FAKE_PACKER_VERSION", "Packer v1.11.2")


def client(service: str, region: str) -> Any:
    import boto3  # it takes long, and other commands do not need it

    return boto3.client(service, region)


def main(command: str, *arguments: str) -> int:
    note(command)
    if command == "version":
        print(VERSION)
        return 0
    return build(arguments) if command == "build" else 0


def note(line: str) -> None:
    with Path(os.environ["FAKE_PACKER_LOG"]).open("a") as log:
        log.write(f"{line}\n")


def build(arguments: tuple[str, ...]) -> int:
    (file,) = (each.partition("=")[2] for each in arguments if each.startswith("-var-file="))
    values = json.loads(Path(file).read_text())
    uploaded = {
        path.name: path.read_text(errors="replace") for path in Path(values["files"]).iterdir()
    }
    seen = {"values": values, "uploaded": uploaded}
    Path(os.environ["FAKE_PACKER_LOG"]).with_name("seen.json").write_text(json.dumps(seen))
    instance = machine(values)
    mode = os.environ.get("FAKE_PACKER", "")
    if mode == "fail":
        print(
            "Build 'neuron.amazon-ebs.machine' errored: Script exited with non-zero exit status: 1",
            flush=True,
        )
        return 1
    if mode == "interrupt":
        signal.signal(signal.SIGINT, lambda *_: (note("interrupted"), sys.exit(1)))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(300)
    here = client("ec2", values["region"])
    specification = [{"ResourceType": "image", "Tags": tags(values["tags"])}]
    image = here.create_image(
        InstanceId=instance, Name=values["name"], TagSpecifications=specification
    )
    for region in values["copy_regions"]:
        ec2, source = (
            client("ec2", region),
            {"SourceImageId": image["ImageId"], "SourceRegion": values["region"]},
        )
        copy = ec2.copy_image(Name=values["name"], **source)["ImageId"]
        ec2.create_tags(Resources=[copy], Tags=tags(values["tags"]))
    return 0


def machine(values: dict[str, Any]) -> str:
    ec2, iam, marked = (
        client("ec2", values["region"]),
        client("iam", values["region"]),
        tags(values["build_tags"]),
    )

    def marks(*kinds: str) -> list[dict[str, Any]]:
        return [{"ResourceType": kind, "Tags": marked} for kind in kinds]

    iam.create_role(RoleName="packer-1", AssumeRolePolicyDocument="{}", Tags=marked)
    allowed = {"Effect": "Allow", "Action": "ssm:UpdateInstanceInformation", "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_role_policy(RoleName="packer-1", PolicyName="p", PolicyDocument=policy)
    iam.create_instance_profile(InstanceProfileName="packer-1")
    iam.add_role_to_instance_profile(InstanceProfileName="packer-1", RoleName="packer-1")
    given = {
        "GroupName": "packer_1",
        "Description": "-",
        "TagSpecifications": marks("security-group"),
    }
    groups = [
        ec2.create_security_group(VpcId=ec2.describe_vpcs()["Vpcs"][0]["VpcId"], **given)[
            "GroupId"
        ]
    ]
    ec2.create_key_pair(KeyName="packer_1", TagSpecifications=marks("key-pair"))
    one = {
        "ImageId": values["base_image"],
        "MinCount": 1,
        "MaxCount": 1,
        "SecurityGroupIds": groups,
    }
    return str(
        ec2.run_instances(**one, TagSpecifications=marks("instance", "volume"))["Instances"][0][
            "InstanceId"
        ]
    )


def tags(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in values.items()]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
