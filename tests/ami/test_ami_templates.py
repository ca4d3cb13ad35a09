"""Packer's templates: what matters in every file, and what the Packer at hand says of them. No build ran on AWS."""

import json
import re
import shutil
import subprocess

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


def test_the_builder_is_closed_and_encrypted_and_ends_itself():
    text = re.sub(" +", " ", (AMI / "machine.pkr.hcl").read_text())
    for line in (
        'ssh_interface = "session_manager"',
        "associate_public_ip_address = false",
        'temporary_security_group_source_cidrs = ["127.0.0.1/32"] #',
        'http_tokens = "required"',
        "encrypt_boot = true",
        r'user_data = "#!/bin/sh\nshutdown -P +${var.max_minutes}\n"',
        'shutdown_behavior = "terminate"',
    ):
        assert line in text, line


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
    text = (AMI / "variables.pkr.hcl").read_text()
    declared = re.findall(r'^variable "(\w+)" +{ type = ([\w()]+) }', text, re.MULTILINE)
    values = {name: OF_TYPE[kind] for name, kind in declared}
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
