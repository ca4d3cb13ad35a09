"""`baretrain ami` against moto's EC2, SSM and IAM, with a stand-in for Packer. Nothing here ran on AWS."""

import json
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.backends import get_backend
from moto.ec2.models.amis import Ami
from moto.ssm.models import Parameter
from package_indexes import write_indexes
from planning import script
from running import ROOT
from services.fake_ec2 import ACCOUNT, REGION, fake_ec2

from ami.__main__ import main
from ami.images import Image, faults, wanted_tags
from ami.packer import find_packer
from ami.plan import BUILD, disk_gib
from launch.ec2 import sweep
from launch.ec2.account import OWN_IMAGE
from train.config import InputError
from train.machine.versions import read_versions

OTHER = "us-west-2"
BASE_NAME, BASE_TEXT = (
    "Deep Learning AMI Neuron (Ubuntu 24.04) 20260812",
    "PyTorch 2.9, Neuron SDK 2.31.0",
)
NEURON_DLAMI = read_versions().bases["neuron-dlami"].version
ONE = {"MinCount": 1, "MaxCount": 1}


def disks(image):
    disk = {
        "VolumeSize": 100,
        "Encrypted": image.is_encrypted,
        "SnapshotId": image.ebs_snapshot.id,
    }
    return [{"DeviceName": "/dev/sda1", "Ebs": disk}]


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """A folder in PATH with Packer's stand-in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script(
        folder / "packer", f'exec "{sys.executable}" "{ROOT}/tests/services/fake_packer.py" "$@"'
    )
    script(folder / "session-manager-plugin", "")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_PACKER_LOG", str(tmp_path / "packer.log"))
    return folder


@pytest.fixture
def aws(programs, monkeypatch, tmp_path):
    """An account with a base image."""
    write_indexes(monkeypatch, tmp_path)
    with fake_ec2(monkeypatch) as fake:
        # What moto does not keep of an image.
        changes = {
            "imds_support": "v2.0",
            "is_encrypted": True,
            "block_device_mappings": property(disks),
        }
        for name, value in changes.items():
            monkeypatch.setattr(Ami, name, value, raising=False)
        monkeypatch.setattr(sweep, "FIRST_S", 0.0)
        account = SimpleNamespace(ec2=fake.client(), ssm=fake.client("ssm"), folder=tmp_path)
        account.machines = lambda: [each.id for each in fake.machines()]
        account.base = add_image(BASE_NAME, description=BASE_TEXT)
        publish(NEURON_DLAMI, account.base)
        yield account


def backend(region=REGION):
    return get_backend("ec2")[ACCOUNT][region]


def add_image(name, *, region=REGION, tags=None, age_days=0, **changes):
    client = boto3.client("ec2", region)
    (subnet, *_) = client.describe_subnets()["Subnets"]
    (made,) = client.run_instances(ImageId="ami-12c6146b", SubnetId=subnet["SubnetId"], **ONE)[
        "Instances"
    ]
    image_id = client.create_image(InstanceId=made["InstanceId"], Name=name)["ImageId"]
    client.terminate_instances(InstanceIds=[made["InstanceId"]])
    image = backend(region).amis[image_id]
    image.creation_date = datetime.now(UTC) - timedelta(days=age_days)
    for key, value in changes.items():
        setattr(image, key, value)
    if tags:
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        client.create_tags(Resources=[image_id, image.ebs_snapshot.id], Tags=listed)
    return image_id


def add_own(kind="neuron", *, name="1", changed=None, **options):
    tags = {**wanted_tags(kind, read_versions()), **(changed or {})}
    return add_image(f"baretrain-{kind}-{name}", tags=tags, **options)


def publish(name, image_id):
    """A public parameter, which moto takes from nobody."""
    about = {"parameter_type": "String", "data_type": "text", "version": 1}
    about |= {"description": None, "allowed_pattern": None, "keyid": None}
    made = Parameter(
        account_id=ACCOUNT, name=name, value=image_id, last_modified_date=datetime.now(), **about
    )
    get_backend("ssm")[ACCOUNT][REGION]._parameters[name] = [made]


@pytest.fixture
def says(capfd):
    """Acts on a command line that ends with this exit code; returns what it printed: of what is rejected a line."""

    def act(words: str, code: int = 0) -> str:
        ended = main(words.split())
        out, err = capfd.readouterr()
        assert ended == code and "Traceback" not in err and (code != 2 or err.count("\n") == 1), (
            out + err
        )
        return out + err

    return act


@pytest.mark.parametrize(("base_gib", "wanted"), [(100, 150), (200, 200)])
def test_the_root_volume_is_no_smaller_than_that_of_the_base(base_gib, wanted):
    base = SimpleNamespace(
        seen={"RootDeviceName": "a"}, disks=[{"DeviceName": "a", "Ebs": {"VolumeSize": base_gib}}]
    )
    assert disk_gib(base) == wanted and disk_gib(None) == 150


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_the_plan_shows_what_would_be_built_and_starts_nothing(aws, says):
    aged = {"baretrain:torch": "2.8.0", "baretrain:minutes": "42", "baretrain:base": "ami-1"}
    old = add_own(changed=aged, age_days=30)
    out = says(f"neuron regions=[{REGION},{OTHER}]")
    assert f"{aws.base} ({BASE_NAME}), from {NEURON_DLAMI}" in out
    assert re.search(r"baretrain-neuron-\d{8}-\d{6}-\w+, 150 GiB, encrypted, until 20\d\d-", out)
    assert f"us-east-1, copies in {OTHER}" in out
    assert "the last build took 42 minutes; at most 120 minutes, $2.69 at $1.34 an hour" in out
    for name, version in {
        **read_versions().python_packages(),
        **read_versions().system_packages(),
    }.items():
        assert f" {name} {version}\n" in out
    assert (
        f"since {old} of" in out
        and "torch 2.8.0 -> 2.9.1" in out
        and f"base ami-1 -> {aws.base}" in out
    )
    assert "nothing was started; build=true builds the image" in out
    publish(read_versions().bases["cuda-dlami"].version, aws.base)
    out = says("cuda")
    assert "g5.xlarge" in out and "nvidia-driver 580" in out and "neuronx-cc" not in out
    assert "nothing was built before" in out
    assert aws.machines() == [] and (aws.folder / "packer.log").read_text() == "version\nversion\n"


@pytest.mark.parametrize(
    ("words", "settings", "base"),
    [
        ("cannot run torch-neuronx 2.9", "", {"name": "Deep Learning AMI Neuron (al2023)"}),
        (
            "has Neuron SDK 2.33, but ami/versions.yaml requires 2.31",
            "",
            {"description": "Neuron SDK 2.33.0"},
        ),
        ("has no SSM parameter /aws/service/canonical/", "base=ubuntu", {}),
        ("base=debian must be dlami, ubuntu or the id of an image", "base=debian", {}),
        (
            "eu-central-1 has no trn1.2xlarge: build in another region",
            "regions=[eu-central-1]",
            {},
        ),
        ("names a region twice", f"regions=[{REGION},{REGION}]", {}),
        ("wheel=x.tar must be a file *.whl", "wheel=x.tar", {}),
        ("s3:/b/x.whl is neither a URL", "wheel=s3:/b/x.whl", {}),
        ("instance=g5.xlarge has no device on which the image neuron", "instance=g5.xlarge", {}),
        ("needs native PyTorch: start it from Neuron's DLAMI", "instance=trn2.48xlarge", {}),
        ("compile_cache=/tmp/x must be s3://bucket/prefix", "compile_cache=/tmp/x", {}),
        ("name one image, neuron or cuda", "cuda", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_built_is_one_line_and_starts_nothing(aws, says, words, settings, base):
    for key, value in base.items():
        setattr(backend().amis[aws.base], key, value)
    assert words in says(f"neuron {settings} build=true", 2)
    assert aws.machines() == []


def test_a_plan_needs_no_credentials_and_a_build_does(aws, says, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert "no region is named: set one, such as us-east-1" in says("neuron", 2)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    # which a build needs, and a plan does not
    monkeypatch.setenv("FAKE_PACKER_VERSION", "Packer v1.6.6")
    for words in (
        "neuron",
        f"neuron regions=[{REGION}] base=ami-0123456789abcdef0",
        "cuda base=ubuntu",
    ):
        out = says(words)
        for text in (
            "a build would be rejected: /",
            "there are no AWS credentials",
            "not resolved (",
            "torch 2.",
        ):
            assert text in out
    assert "no AWS credentials on this machine; attach a role" in says(
        f"neuron regions=[{REGION}] build=true", 2
    )


@pytest.mark.parametrize(
    ("version", "missing", "words"),
    [
        ("Packer v1.6.6", "", "/packer is too old for plugins"),
        ("cracklib", "", "or not HashiCorp's Packer"),
        ("", "session-manager-plugin", "session-manager-plugin is not installed"),
        ("", "packer", "packer is not installed"),
    ],
)
def test_a_packer_that_cannot_build_is_rejected(programs, monkeypatch, version, missing, words):
    if version:
        monkeypatch.setenv("FAKE_PACKER_VERSION", version)
    else:
        (programs / missing).unlink()
        monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(InputError, match=words):
        find_packer()


# ---- build -----------------------------------------------------------------------------------------------------------


def test_a_build_makes_an_image_and_its_copies_and_leaves_nothing_else(aws, says):
    out = says(f"neuron regions=[{REGION},{OTHER}] compile_cache=s3://bucket/cache build=true")
    made = dict(re.findall(r"made (ami-\w+) in (\S+)", out))
    assert sorted(made.values()) == [REGION, OTHER]
    (here,) = (image for image, region in made.items() if region == REGION)
    assert f"baretrain ami promote {here} --region {REGION} --region {OTHER} --yes" in out
    for image, region in made.items():
        (answer,) = boto3.client("ec2", region).describe_images(ImageIds=[image])["Images"]
        tags = {tag["Key"]: tag["Value"] for tag in answer["Tags"]}
        assert tags.items() >= wanted_tags("neuron", read_versions()).items()
        assert (
            tags["baretrain:base"] == aws.base
            and tags["baretrain:minutes"] == "0"
            and tags["baretrain:commit"]
        )
    nothing_left(aws, says)

    seen = json.loads((aws.folder / "seen.json").read_text())
    values, uploaded = seen["values"], seen["uploaded"]
    declared = re.findall(
        r'^variable "(\w+)"', (ROOT / "ami/variables.pkr.hcl").read_text(), re.MULTILINE
    )
    assert set(values) == set(declared)  # every variable has a value, and none is unknown
    assert values["cache_arns"] == ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/cache*"]
    names = ["functions.sh", "image.env", "neuron.txt", "requirements.txt"]
    assert sorted(name for name in uploaded if not name.endswith(".whl")) == names
    assert "NEURON_SDK='2.31.1'\n" in uploaded["image.env"] and len(uploaded) == 5
    pinned = [
        line.partition("==")[0]
        for line in uploaded["requirements.txt"].splitlines()
        if "==" in line
    ]
    assert len(pinned) == len(set(pinned)) and {"torch", "numpy", "transformers", "jinja2"} <= set(
        pinned
    )


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("fail", 1, "failed (exit code 1), see above; no image was made"),
        ("interrupt", 75, "interrupted"),
    ],
)
def test_what_a_build_leaves_that_fails_or_is_interrupted_is_removed(
    aws, says, monkeypatch, how, code, said
):
    monkeypatch.setenv("FAKE_PACKER", how)
    out = says("neuron build=true", code)
    assert said in out.splitlines()[-1]
    for kind in ("instance", "security-group", "key-pair", "role"):
        assert f"to be removed: {kind} " in out
    # Packer first
    assert how == "fail" or (aws.folder / "packer.log").read_text().endswith(
        "build\ninterrupted\n"
    )
    nothing_left(aws, says)


def nothing_left(aws, says):
    assert aws.machines() == []
    assert all(
        group["GroupName"] == "default"
        for group in aws.ec2.describe_security_groups()["SecurityGroups"]
    )
    assert aws.ec2.describe_key_pairs()["KeyPairs"] == []
    iam = boto3.client("iam", REGION)
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    assert iam.list_roles()["Roles"] == [] and [
        each["InstanceProfileName"] for each in profiles
    ] == ["machine"]
    assert says("clean") == f"no build left anything in {REGION}\n"


def test_clean_finds_what_a_killed_builder_left(aws, says):
    tagged = [{"ResourceType": "instance", "Tags": [{"Key": BUILD, "Value": "x"}]}]
    aws.ec2.run_instances(ImageId=aws.base, TagSpecifications=tagged, **ONE)
    (left,) = aws.machines()
    out = says("clean", 1)
    assert (
        f"instance {left} (running, {REGION})" in out
        and "--yes removes it" in out
        and aws.machines() == [left]
    )
    says("clean --yes")
    nothing_left(aws, says)


# ---- on an image -----------------------------------------------------------------------------------------------------


def test_a_compile_cache_comes_back_from_s3(aws, says, tmp_path):
    s3 = boto3.client("s3", REGION)
    s3.create_bucket(Bucket="graphs")
    s3.put_object(Bucket="graphs", Key="cache/a/b/model.neff", Body=b"compiled")
    says(f"restore s3://graphs/cache {tmp_path}/cache")
    assert (tmp_path / "cache/a/b/model.neff").read_bytes() == b"compiled"
    assert "s3://graphs/other has no files" in says(
        f"restore s3://graphs/other {tmp_path}/cache", 2
    )


# ---- images ----------------------------------------------------------------------------------------------------------


def value(aws, kind="neuron"):
    return aws.ssm.get_parameter(Name=OWN_IMAGE.format(kind))["Parameter"]["Value"]


def test_list_verify_promote_and_back(aws, says):
    old, new = (
        add_own(name="0", age_days=9, changed={"baretrain:torch": "2.8.0"}),
        add_own(age_days=1),
    )
    says(f"verify {new}")
    assert (
        says(f"verify {old}", 1) == f"{old} differs from ami/versions.yaml: torch 2.8.0 -> 2.9.1\n"
    )
    out = says(f"promote {new}")
    assert f"none -> {new}" in out and "nothing was changed" in out
    with pytest.raises(ClientError):
        value(aws)
    says(f"promote {new} --yes")
    assert value(aws) == new
    lines = says("list").splitlines()
    assert [line.split()[0] for line in lines] == ["image", new, old]
    assert "promoted" in lines[1] and "2.31.1 2.9.1" in lines[1]
    out = says(f"promote {old} --yes")  # back to the one before
    assert value(aws) == old and f"{new} -> {old}" in out and "torch 2.8.0 -> 2.9.1" in out


WHOLE = {
    "ImageId": "ami-0123456789abcdef0",
    "State": "available",
    "ImdsSupport": "v2.0",
    "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"Encrypted": True}}],
    "Tags": [{"Key": "baretrain:image", "Value": "neuron"}],
    "DeprecationTime": "2999-01-01T00:00:00.000Z",
}
PLAIN_DISK = {"DeviceName": "/dev/sdb", "Ebs": {}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"State": "pending"}, "is pending: wait if it is still being built"),
        ({"ImdsSupport": None}, "allows IMDSv1"),
        ({"BlockDeviceMappings": []}, "a snapshot that is not encrypted"),
        (
            {"BlockDeviceMappings": [*WHOLE["BlockDeviceMappings"], PLAIN_DISK]},
            "a snapshot that is not encrypted",
        ),
        ({"Public": True}, "is public"),
        ({"DeprecationTime": "2020-01-01T00:00:00.000Z"}, "has been deprecated since 2020-01-01"),
        ({"Tags": []}, "has no tag baretrain:image"),
    ],
)
def test_what_is_wrong_with_an_image_is_said(changes, words):
    assert list(faults(Image(REGION, WHOLE))) == []
    (fault,) = faults(Image(REGION, {**WHOLE, **changes}))
    assert words in fault


def test_what_nobody_should_start_is_not_promoted_and_in_no_region_if_not_in_all(aws, says):
    half, open_one, new = (
        add_image("baretrain-neuron-half"),
        add_own(name="open", is_encrypted=False),
        add_own(),
    )
    both = f"promote {new} --region {REGION} --region {OTHER} --yes"
    assert "incomplete" in says("list")
    assert "has no tag baretrain:image" in says(f"promote {half} --yes", 2)
    assert "not encrypted" in says(f"promote {open_one} --yes", 2) and "not encrypted" in says(
        f"verify {open_one}", 1
    )
    assert "is not an image id" in says("promote x;rm --yes", 2)
    assert f"{OTHER} has no copy of baretrain-neuron-1" in says(both, 2)
    with pytest.raises(ClientError):
        value(aws)
    copy = add_own(region=OTHER)
    says(both)
    there = boto3.client("ssm", OTHER).get_parameter(Name=OWN_IMAGE.format("neuron"))
    assert value(aws) == new and there["Parameter"]["Value"] == copy


def test_prune_keeps_the_newest_the_promoted_and_the_used(aws, says):
    names = ("new", "old", "promoted", "used")
    images = {name: add_own(age_days=age, name=name) for age, name in enumerate(names)}
    images["cuda"] = add_own("cuda", age_days=50)
    half = {age: add_image(f"baretrain-neuron-half{age}", age_days=age) for age in (0, 1)}
    aws.ssm.put_parameter(Name=OWN_IMAGE.format("neuron"), Value=images["promoted"], Type="String")
    (used,) = aws.ec2.run_instances(ImageId=images["used"], **ONE)["Instances"]
    snapshots = {name: backend().amis[image].ebs_snapshot.id for name, image in images.items()}
    (volume,) = (each["VolumeId"] for each in aws.ec2.describe_volumes()["Volumes"][:1])
    tagged = [
        {"ResourceType": "snapshot", "Tags": [{"Key": "baretrain:image", "Value": "neuron"}]}
    ]
    orphan = aws.ec2.create_snapshot(VolumeId=volume, TagSpecifications=tagged)["SnapshotId"]

    out = says("prune --keep 1")
    assert (
        images["old"] in out and "nothing was removed" in out and images["old"] in backend().amis
    )
    assert (
        f"kept {images['used']}" in says("prune --keep 1 --yes")
        and used["InstanceId"] in aws.machines()
    )
    left = {image.id for image in backend().amis.values() if image.name.startswith("baretrain-")}
    assert left == {images[name] for name in ("new", "promoted", "used", "cuda")} | {half[0]}
    own = {
        each["SnapshotId"] for each in aws.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
    }
    assert (
        not {snapshots["old"], orphan} & own and {snapshots["new"], snapshots["promoted"]} <= own
    )
    assert says("prune --keep 1 --yes").endswith("nothing to remove\n")
    assert "--keep 0 must be 1 or more" in says("prune --keep 0", 2)
