"""Packer's templates: what matters in every file, and what the Packer at hand says of them. No build ran on AWS."""

import json
import re
import shutil
import subprocess

import hcl2
import pytest
from running import ROOT

AMI = ROOT / "ami"
MODERN = ("# >=1.7 begin", "# >=1.7 end")  # around lines that Packer 1.6 does not know
OF_TYPE = {
    "string": "",
    "number": 150,
    "list(string)": ["arn:aws:s3:::bucket"],
    "map(string)": {"a": "b"},
}


def plain(value):
    """Parsed HCL without the quotes that hcl2 keeps around texts."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.strip('"') if isinstance(value, str) else value


def parsed(name):
    return plain(hcl2.loads((AMI / f"{name}.pkr.hcl").read_text()))


def test_the_builder_is_closed_and_encrypted_and_so_is_the_image():
    (source,) = parsed("machine")["source"]
    machine = source["amazon-ebs"]["machine"]
    (metadata,) = machine["metadata_options"]
    assert metadata["http_tokens"] == "required" and metadata["http_put_response_hop_limit"] == 1
    wanted = {
        "imds_support": "v2.0",
        "ssh_interface": "session_manager",
        "ssh_clear_authorized_keys": True,
        "associate_public_ip_address": False,
        "temporary_security_group_source_cidrs": ["127.0.0.1/32"],
        "encrypt_boot": True,
        "shutdown_behavior": "terminate",
        "source_ami": "${var.base_image}",
        "deprecate_at": "${var.deprecate_at}",
        "snapshot_tags": "${var.tags}",
    }
    assert (
        machine.items() >= wanted.items()
        and "shutdown -P +${var.max_minutes}" in machine["user_data"]
    )
    (disk,) = machine["launch_block_device_mappings"]
    assert disk["encrypted"] is True and disk["delete_on_termination"] is True
    (policy,) = machine["temporary_iam_instance_profile_policy_document"]
    (statement,) = policy["Statement"]
    assert all(action.startswith(("ssm:Update", "ssmmessages:")) for action in statement["Action"])
    assert not machine.keys() & {"iam_instance_profile", "security_group_id", "access_key"}


# ---- Packer ----------------------------------------------------------------------------------------------------------


def test_packer_validates_all_but_the_lines_that_1_6_does_not_know(tmp_path):
    packer = shutil.which("packer")
    if packer is None:
        pytest.skip("no Packer to test with: apt-get install packer")
    said = subprocess.run([packer, "version"], capture_output=True, text=True, check=True).stdout
    if "v1.6" not in said:
        pytest.skip(f"{packer} needs its plugins for this; Debian's 1.6 has them built in")
    folder, dropped = tmp_path / "ami", []
    shutil.copytree(AMI / "provision", folder / "provision")
    for name in ("image", "machine", "variables"):
        lines = (AMI / f"{name}.pkr.hcl").read_text().splitlines(keepends=True)
        marks = [index for index, line in enumerate(lines) if line.strip() in MODERN]
        for begin, end in reversed(list(zip(marks[::2], marks[1::2], strict=True))):
            dropped += lines[begin + 1 : end]
            del lines[begin : end + 1]
        (folder / f"{name}.pkr.hcl").write_text("".join(lines))
    declared = {
        name: each[name]["type"].strip("${}")
        for each in parsed("variables")["variable"]
        for name in each
    }
    values = {name: OF_TYPE[kind] for name, kind in declared.items()}
    values |= {
        "region": "us-east-1",
        "copy_regions": ["us-west-2"],
        "instance_type": "trn1.2xlarge",
        "files": "/tmp",
    }
    values |= {
        "base_image": "ami-0123456789abcdef0",
        "name": "image-1",
    }
    (folder / "values.pkrvars.json").write_text(json.dumps(values))
    names = {match[1] for line in dropped if (match := re.match(r"  (\w+) *[={]", line))}
    assert names == {"metadata_options", "imds_support", "deprecate_at"}
    for image, code in (("neuron", 0), ("cuda", 0), ("none", 1)):  # of which there is no script
        command = [packer, "validate", "-var-file=values.pkrvars.json", f"-var=image={image}", "."]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
