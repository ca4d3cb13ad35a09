"""`baretrain ami` against moto's EC2 and SSM, with a stand-in for Packer. Nothing here ran on AWS."""

import json
import os
import re

import boto3
import pytest
from moto.backends import get_backend
from package_indexes import write_indexes
from planning import script
from running import ROOT
from services.fake_ec2 import ACCOUNT, REGION, fake_ec2

from ami.__main__ import main
from ami.config import KIND_TAG
from launch.ec2.account import OWN_IMAGE
from train.machine.versions import read_versions

OTHER = "us-west-2"
BASE = "ami-12c6146b"
PARAMETER = OWN_IMAGE.format("neuron")
# It keeps what a build gets, and does what FAKE_PACKER says.
PACKER = """echo "$1" >> {folder}/packer.log
[ "$1" = build ] || exit 0
file=$(printf '%s\\n' "$@" | sed -n 's/^-var-file=//p')
cp "$file" {folder}/values.json
cp -r "$(sed -n 's/.*"files": "\\([^"]*\\)".*/\\1/p' "$file")" {folder}/uploaded
if [ "$FAKE_PACKER" = interrupt ]; then
    trap 'sleep 0.5; echo cleaned >> {folder}/packer.log; exit 1' INT
    kill -INT $PPID $$
fi
exit ${{FAKE_PACKER:-0}}
"""


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """An account, and Packer's stand-in in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script(folder / "packer", PACKER.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    write_indexes(monkeypatch, tmp_path)
    with fake_ec2(monkeypatch) as fake:
        yield fake


@pytest.fixture
def says(capfd):
    """Acts on a command line that ends with this exit code; returns what it printed: of what is rejected a line."""

    def act(words: str, code: int = 0) -> str:
        ended = main(words.split())
        out, err = capfd.readouterr()
        assert ended == code and "Traceback" not in err, out + err
        assert code != 2 or err.count("\n") == 1, err
        return out + err

    return act


# ---- plan and build --------------------------------------------------------------------------------------------------


def test_a_plan_needs_neither_credentials_nor_packer(says, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    out = says(f"neuron regions=[{REGION},{OTHER}]")
    for text in (
        "baretrain-neuron-20",
        read_versions().bases["neuron-dlami"].version,
        f"{REGION}, then copied to {OTHER}",
        "at most 120 minutes, $2.69 at $1.34 an hour",
        "neuron-sdk 2.31.1",
        "nothing was started; build=true builds the image",
    ):
        assert text in out
    assert "g5.xlarge" in says("cuda base=ubuntu")
    assert "packer is not installed" in says("neuron build=true", 2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("neuron base=debian", "base=debian must be dlami, ubuntu or the id of an image"),
        ("neuron base=ubuntu build=true", "has no SSM parameter /aws/service/canonical/"),
        ("amd", "amd: name an image, neuron or cuda"),
        ("", "nothing: name an image"),
    ],
)
def test_what_cannot_be_built_is_one_line(aws, says, tmp_path, words, line):
    assert line in says(words, 2)
    assert not (tmp_path / "packer.log").exists()


def test_packer_gets_every_variable_and_the_files(aws, says, tmp_path):
    says(f"neuron base={BASE} regions=[{REGION},{OTHER}] build=true")
    assert (tmp_path / "packer.log").read_text() == "init\nbuild\n"
    values = json.loads((tmp_path / "values.json").read_text())
    text = (ROOT / "ami/variables.pkr.hcl").read_text()
    assert set(values) == set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
    assert (values["region"], values["copy_regions"]) == (REGION, [OTHER])
    assert values["base_image"] == BASE and values["tags"][KIND_TAG] == "neuron"
    uploaded = {path.name: path for path in (tmp_path / "uploaded").iterdir()}
    assert "NEURON_SDK='2.31.1'\n" in uploaded["image.env"].read_text()
    lines = uploaded["requirements.txt"].read_text().splitlines()
    pinned = [line.partition("==")[0] for line in lines if "==" in line]
    assert len(pinned) == len(set(pinned)) and {"torch", "numpy", "transformers"} <= {*pinned}


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [("1", 1, "packer build failed (exit code 1)"), ("interrupt", 75, "interrupted")],
)
def test_a_build_that_fails_or_is_interrupted_lets_packer_clean_up(
    aws, says, monkeypatch, tmp_path, how, code, line
):
    monkeypatch.setenv("FAKE_PACKER", how)
    assert line in says(f"neuron base={BASE} build=true", code).splitlines()[-1]
    assert how == "1" or (tmp_path / "packer.log").read_text().endswith("cleaned\n")


def test_the_builder_is_closed_and_encrypted_and_ends_itself():
    text = re.sub(" +", " ", (ROOT / "ami/machine.pkr.hcl").read_text())
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


# ---- promote ---------------------------------------------------------------------------------------------------------


def add_image(name, *, kind="neuron"):
    client = boto3.client("ec2", REGION)
    made = client.run_instances(ImageId=BASE, MinCount=1, MaxCount=1)["Instances"][0]
    image = client.create_image(InstanceId=made["InstanceId"], Name=name)["ImageId"]
    if kind:
        client.create_tags(Resources=[image], Tags=[{"Key": KIND_TAG, "Value": kind}])
    return image


def promoted():
    found = boto3.client("ssm", REGION).get_parameters(Names=[PARAMETER])["Parameters"]
    return [each["Value"] for each in found]


def test_promote_shows_the_change_makes_it_and_goes_back(aws, says):
    old = add_image("old")
    new = add_image("new")
    out = says(f"promote {new}")
    assert f"{PARAMETER} in {REGION}: none -> {new}" in out and "nothing was changed" in out
    assert promoted() == []
    says(f"promote {new} --yes")
    assert promoted() == [new]
    assert f"{new} -> {old}" in says(f"promote {old} --yes")
    assert promoted() == [old]


def test_only_a_finished_image_of_ours_is_promoted(aws, says):
    half = add_image("half", kind="")
    pending = add_image("pending")
    get_backend("ec2")[ACCOUNT][REGION].amis[pending].state = "pending"
    assert "has not built it" in says(f"promote {half} --yes", 2)
    assert "is pending" in says(f"promote {pending} --yes", 2)
    assert "x;rm" in says("promote x;rm --yes", 2)
    assert promoted() == []
