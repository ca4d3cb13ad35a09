"""`python -m ami` against moto's EC2, SSM and IAM, with a stand-in for Packer. Nothing here ran on AWS."""

import json
import os
import re
import sys
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import boto3
import pytest
from botocore.exceptions import ClientError
from moto.backends import get_backend
from moto.ec2.models.amis import Ami
from moto.ssm.models import Parameter
from running import ROOT
from services.fake_ec2 import ACCOUNT, REGION, fake_ec2

from ami.__main__ import main
from ami.config import AmiConfig
from ami.images import Image, faults, wanted_tags
from ami.packer import find_packer
from ami.plan import BUILD
from launch.ec2 import sweep
from launch.ec2.account import OWN_IMAGE
from train.config import InputError, InstanceConfig
from train.host.versions import read_versions

OTHER = "us-west-2"
BASE_NAME, BASE_TEXT = "Deep Learning AMI Neuron (Ubuntu 24.04) 20260812", "PyTorch 2.9, Neuron SDK 2.31.0"
NEURON_DLAMI = read_versions().bases["neuron-dlami"].version


def disks(image):
    disk = {"VolumeSize": 100, "Encrypted": image.is_encrypted, "SnapshotId": image.ebs_snapshot.id}
    return [{"DeviceName": "/dev/sda1", "Ebs": disk}]


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """A folder in PATH with Packer's stand-in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/services/fake_packer.py" "$@"\n'
    for name, text in (("packer", script), ("session-manager-plugin", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_PACKER_LOG", str(tmp_path / "packer.log"))
    return folder


@pytest.fixture
def aws(programs, monkeypatch, tmp_path):
    """An account with a base image."""
    with fake_ec2(monkeypatch) as fake:
        # What moto does not keep of an image.
        changes = {"imds_support": "v2.0", "is_encrypted": True, "block_device_mappings": property(disks)}
        for name, value in changes.items():
            monkeypatch.setattr(Ami, name, value, raising=False)
        monkeypatch.setattr(sweep, "FIRST_S", 0.0)
        account = SimpleNamespace(ec2=fake.client(), ssm=fake.client("ssm"), folder=tmp_path)
        account.machines = lambda: [each.id for each in fake.machines()]
        account.base = add_image(account, BASE_NAME, description=BASE_TEXT)
        publish(NEURON_DLAMI, account.base)
        yield account


def backend(region=REGION):
    return get_backend("ec2")[ACCOUNT][region]


ONE = {"MinCount": 1, "MaxCount": 1}


def add_image(aws, name, *, region=REGION, tags=None, age_days=0, **changes):
    client = boto3.client("ec2", region)
    (subnet, *_) = client.describe_subnets()["Subnets"]
    (made,) = client.run_instances(ImageId="ami-12c6146b", SubnetId=subnet["SubnetId"], **ONE)["Instances"]
    image_id = client.create_image(InstanceId=made["InstanceId"], Name=name)["ImageId"]
    client.terminate_instances(InstanceIds=[made["InstanceId"]])
    image = backend(region).amis[image_id]
    image.creation_date = datetime.now(timezone.utc) - timedelta(days=age_days)
    for key, value in changes.items():
        setattr(image, key, value)
    if tags:
        listed = [{"Key": key, "Value": value} for key, value in tags.items()]
        client.create_tags(Resources=[image_id, image.ebs_snapshot.id], Tags=listed)
    return image_id


def add_own(aws, kind="neuron", *, name=None, changed=None, **options):
    tags = {**wanted_tags(kind, read_versions()), **(changed or {})}
    return add_image(aws, name or f"baretrain-{kind}-{options}", tags=tags, **options)


def publish(name, image_id):
    """A public parameter, which moto takes from nobody."""
    about = {"parameter_type": "String", "data_type": "text", "version": 1}
    about |= {"description": None, "allowed_pattern": None, "keyid": None}
    made = Parameter(account_id=ACCOUNT, name=name, value=image_id, last_modified_date=datetime.now(), **about)
    get_backend("ssm")[ACCOUNT][REGION]._parameters[name] = [made]


def run(capfd, *words):
    code = main(list(words))
    out, err = capfd.readouterr()
    assert "Traceback" not in err, err
    return code, out, err


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_the_plan_shows_what_would_be_built_and_starts_nothing(aws, capfd):
    aged = {"baretrain:torch": "2.8.0", "baretrain:minutes": "42", "baretrain:base": "ami-1"}
    old = add_own(aws, changed=aged, age_days=30)
    code, out, err = run(capfd, "neuron", f"regions=[{REGION},{OTHER}]")
    assert code == 0, err
    assert f"{aws.base} ({BASE_NAME}), from {NEURON_DLAMI}" in out
    assert re.search(r"baretrain-neuron-\d{8}-\d{6}-\w+, 150 GiB, encrypted, until 20\d\d-", out)
    assert f"us-east-1, copies in {OTHER}" in out
    assert "the last build took 42 minutes; at most 120 minutes, $2.69 at $1.34 an hour" in out
    for name, version in {**read_versions().python_packages(), **read_versions().system_packages()}.items():
        assert f" {name} {version}\n" in out
    assert f"since {old} of" in out and "torch 2.8.0 -> 2.9.1" in out and f"base ami-1 -> {aws.base}" in out
    assert "nothing was started; build=true does it" in out
    assert aws.machines() == [] and (aws.folder / "packer.log").read_text() == "version\n"


def test_an_image_for_gpus_has_its_own_base_builder_and_versions(aws, capfd):
    publish(read_versions().bases["cuda-dlami"].version, aws.base)
    code, out, _ = run(capfd, "cuda")
    assert code == 0 and "g5.xlarge" in out and "nvidia-driver 580" in out and "neuronx-cc" not in out
    assert "nothing was built before" in out


CASES = {  # words of the error, settings, and changes of the base image
    "cannot run torch-neuronx 2.9": ([], {"name": "Deep Learning AMI Neuron (al2023)"}),
    "has Neuron SDK 2.33, ami/versions.yaml wants 2.31": ([], {"description": "Neuron SDK 2.33.0"}),
    "disk_gib=99 is smaller than the 100 GiB of ami-": (["disk_gib=99"], {}),
    "has no SSM parameter /aws/service/canonical/": (["base=ubuntu"], {}),
    "InvalidAMIID.NotFound": (["base=ami-0123456789abcdef0"], {}),
    "Provided region_name 'us_east' doesn't match a supported format": (["regions=[us_east]"], {}),
    "eu-central-1 has no trn1.2xlarge: build in a region that has": (["regions=[eu-central-1]"], {}),
    "wheel=x.tar must be a file *.whl": (["wheel=x.tar"], {}),
    "profile=nobody is not in ~/.aws": (["profile=nobody"], {}),
    "name one image, neuron or cuda": (["cuda"], {}),
}


@pytest.mark.parametrize("words", CASES)
def test_what_cannot_be_built_is_one_line_and_starts_nothing(aws, capfd, words):
    settings, changes = CASES[words]
    for key, value in changes.items():
        setattr(backend().amis[aws.base], key, value)
    if "eu-central-1" in words:
        other = add_image(aws, BASE_NAME, region="eu-central-1", description=BASE_TEXT)
        settings = [*settings, f"base={other}"]
    code, _, err = run(capfd, "neuron", *settings, "build=true")
    assert code == 2 and words in err and err.count("\n") == 1
    assert aws.machines() == []


SETTINGS = {  # words of the error, and settings
    "base=debian must be dlami, ubuntu or the id of an image": {"base": "debian"},
    "names one twice": {"regions": [REGION, REGION]},
    "instance=g5.xlarge has no device of the image neuron": {"instance": InstanceConfig(name="g5.xlarge")},
    "needs native PyTorch: start it from Neuron's DLAMI": {"instance": InstanceConfig(name="trn2.48xlarge")},
    "compile_cache=/tmp/x must be s3://bucket/prefix": {"compile_cache": "/tmp/x"},
    "kms_key is a key of one region": {"regions": [REGION, OTHER], "kms_key": "alias/mine"},
}


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_that_cannot_be_built_are_rejected(words):
    with pytest.raises(InputError, match=re.escape(words)):
        AmiConfig(**{"instance": InstanceConfig(name="trn1.2xlarge"), **SETTINGS[words]})


def test_a_plan_needs_no_credentials_and_a_build_does(aws, capfd, monkeypatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    code, _, err = run(capfd, "neuron")
    assert code == 2 and "no region is named: give one, as us-east-1" in err
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("FAKE_PACKER_VERSION", "Packer v1.6.6")  # which a build needs, and a plan does not
    for words in (["neuron"], ["neuron", f"regions=[{REGION}]", "base=ami-0123456789abcdef0"], ["cuda", "base=ubuntu"]):
        code, out, err = run(capfd, *words)
        assert "a build would be rejected: /" in out
        assert code == 0 and err == "" and "there are no AWS credentials" in out and "not resolved (" in out
        assert f" torch {read_versions()['torch']}\n" in out and "nothing was started" in out
    code, _, err = run(capfd, "neuron", f"regions=[{REGION}]", "build=true")
    assert code == 2 and "no AWS credentials on this machine; attach a role" in err and err.count("\n") == 1


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


def test_a_build_makes_an_image_and_its_copies_and_leaves_nothing_else(aws, capfd):
    settings = (f"regions=[{REGION},{OTHER}]", "compile_cache=s3://bucket/cache", "build=true")
    code, out, err = run(capfd, "neuron", *settings)
    assert code == 0, err
    made = dict(re.findall(r"made (ami-\w+) in (\S+)", out))
    assert sorted(made.values()) == [REGION, OTHER]
    (here,) = (image for image, region in made.items() if region == REGION)
    assert f"python -m ami promote {here} --region {REGION} --region {OTHER} --yes" in out
    for image, region in made.items():
        (answer,) = boto3.client("ec2", region).describe_images(ImageIds=[image])["Images"]
        tags = {tag["Key"]: tag["Value"] for tag in answer["Tags"]}
        assert tags.items() >= wanted_tags("neuron", read_versions()).items()
        assert tags["baretrain:base"] == aws.base and tags["baretrain:minutes"] == "0" and tags["baretrain:commit"]
    nothing_left(aws, capfd)

    seen = json.loads((aws.folder / "seen.json").read_text())
    values, uploaded = seen["values"], seen["uploaded"]
    declared = re.findall(r'^variable "(\w+)"', (ROOT / "ami/variables.pkr.hcl").read_text(), re.MULTILINE)
    assert set(values) == set(declared)  # every variable has a value, and none is unknown
    assert values["cache_arns"] == ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/cache*"]
    names = ["constraints.txt", "functions.sh", "image.env"]
    assert sorted(name for name in uploaded if not name.endswith(".whl")) == names
    assert "NEURON_SDK='2.31.1'\n" in uploaded["image.env"] and len(uploaded) == 4
    assert uploaded["constraints.txt"].startswith((ROOT / "constraints-trn1.txt").read_text())
    pinned = [line.partition("==")[0] for line in uploaded["constraints.txt"].splitlines() if "==" in line]
    assert len(pinned) == len(set(pinned)) and {"torch", "neuronx-cc", "transformers"} <= set(pinned)
    assert "numpy" not in pinned  # left to what neuronx-cc asks for


def test_what_a_failed_build_leaves_is_removed(aws, capfd, monkeypatch):
    monkeypatch.setenv("FAKE_PACKER", "fail")
    code, out, err = run(capfd, "neuron", "build=true")
    assert code == 1 and err.splitlines()[-1].endswith("failed (exit code 1), see above; no image was made")
    for kind in ("instance", "security-group", "key-pair", "role"):
        assert f"to be removed: {kind} " in out
    nothing_left(aws, capfd)


def nothing_left(aws, capfd):
    assert aws.machines() == []
    assert all(group["GroupName"] == "default" for group in aws.ec2.describe_security_groups()["SecurityGroups"])
    assert aws.ec2.describe_key_pairs()["KeyPairs"] == []
    iam = boto3.client("iam", REGION)
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    assert iam.list_roles()["Roles"] == [] and [each["InstanceProfileName"] for each in profiles] == ["machine"]
    assert run(capfd, "clean")[:2] == (0, f"no build left anything in {REGION}\n")


def test_ctrl_c_ends_packer_first_and_leaves_nothing(aws, capfd, monkeypatch):
    monkeypatch.setenv("FAKE_PACKER", "interrupt")
    code, out, err = run(capfd, "neuron", "build=true")
    assert code == 75 and err.startswith("interrupted") and err.count("\n") == 1
    assert (aws.folder / "packer.log").read_text().endswith("build\ninterrupted\n")
    assert "to be removed: instance" in out
    nothing_left(aws, capfd)


def test_clean_finds_what_a_killed_builder_left(aws, capfd):
    tagged = [{"ResourceType": "instance", "Tags": [{"Key": BUILD, "Value": "x"}]}]
    aws.ec2.run_instances(ImageId=aws.base, TagSpecifications=tagged, **ONE)
    (left,) = aws.machines()
    code, out, _ = run(capfd, "clean")
    assert code == 1 and f"instance {left} (running, {REGION})" in out and "--yes does it" in out
    assert aws.machines() == [left]
    assert run(capfd, "clean", "--yes")[0] == 0
    nothing_left(aws, capfd)


# ---- on an image -----------------------------------------------------------------------------------------------------


def test_a_compile_cache_comes_back_from_s3(aws, capfd, tmp_path):
    s3 = boto3.client("s3", REGION)
    s3.create_bucket(Bucket="graphs")
    for name in ("a/model.neff", "a/b/model.neff"):
        s3.put_object(Bucket="graphs", Key=f"cache/{name}", Body=name.encode())
    code, _, err = run(capfd, "restore", "s3://graphs/cache", str(tmp_path / "cache"))
    assert code == 0, err
    assert (tmp_path / "cache/a/b/model.neff").read_bytes() == b"a/b/model.neff"
    code, _, err = run(capfd, "restore", "s3://graphs/other", str(tmp_path / "cache"))
    assert code == 2 and "s3://graphs/other holds no file" in err


# ---- images ----------------------------------------------------------------------------------------------------------


def value(aws, kind="neuron"):
    return aws.ssm.get_parameter(Name=OWN_IMAGE.format(kind))["Parameter"]["Value"]


def test_list_verify_promote_and_back(aws, capfd):
    old, new = add_own(aws, age_days=9, changed={"baretrain:torch": "2.8.0"}), add_own(aws, age_days=1)
    assert run(capfd, "verify", new)[0] == 0
    code, out, _ = run(capfd, "verify", old)
    assert code == 1 and out == f"{old} has another version than ami/versions.yaml: torch 2.8.0 -> 2.9.1\n"

    code, out, _ = run(capfd, "promote", new)
    assert code == 0 and f"none -> {new}" in out and "nothing was changed" in out
    with pytest.raises(ClientError):
        value(aws)
    assert run(capfd, "promote", new, "--yes")[0] == 0 and value(aws) == new
    code, out, _ = run(capfd, "list")
    assert [line.split()[0] for line in out.splitlines()] == ["image", new, old]
    assert "promoted" in out.splitlines()[1] and "2.31.1 2.9.1" in out
    code, out, _ = run(capfd, "promote", old, "--yes")  # back to the one before
    assert code == 0 and value(aws) == old and f"{new} -> {old}" in out and "torch 2.8.0 -> 2.9.1" in out


def test_copies_are_promoted_in_their_regions(aws, capfd):
    new = add_own(aws, name="baretrain-neuron-1")
    both = ("--region", REGION, "--region", OTHER, "--yes")
    code, _, err = run(capfd, "promote", new, *both)
    assert code == 2 and f"{OTHER} has no copy of baretrain-neuron-1" in err
    with pytest.raises(ClientError):  # in no region, if not in all
        value(aws)
    copy = add_own(aws, name="baretrain-neuron-1", region=OTHER)
    assert run(capfd, "promote", new, *both)[0] == 0 and value(aws) == new
    name = OWN_IMAGE.format("neuron")
    assert boto3.client("ssm", OTHER).get_parameter(Name=name)["Parameter"]["Value"] == copy


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
        ({"State": "pending"}, "is pending: wait if its build is under way"),
        ({"ImdsSupport": None}, "lets machines answer IMDSv1"),
        ({"BlockDeviceMappings": []}, "a snapshot that is not encrypted"),
        ({"BlockDeviceMappings": [*WHOLE["BlockDeviceMappings"], PLAIN_DISK]}, "a snapshot that is not encrypted"),
        ({"Public": True}, "is public"),
        ({"DeprecationTime": "2020-01-01T00:00:00.000Z"}, "is deprecated since 2020-01-01"),
        ({"Tags": []}, "has no tag baretrain:image"),
    ],
)
def test_what_is_wrong_with_an_image_is_said(changes, words):
    assert list(faults(Image(REGION, WHOLE))) == []
    (fault,) = faults(Image(REGION, {**WHOLE, **changes}))
    assert words in fault


def test_what_nobody_should_start_is_not_promoted(aws, capfd):
    half, open_one = add_image(aws, "baretrain-neuron-half"), add_own(aws, is_encrypted=False)
    assert "half built" in run(capfd, "list")[1]
    for image, words in ((half, "has no tag baretrain:image"), (aws.base, "has no tag"), (open_one, "not encrypted")):
        code, _, err = run(capfd, "promote", image, "--yes")
        assert code == 2 and words in err and err.count("\n") == 1
    code, out, _ = run(capfd, "verify", open_one)
    assert code == 1 and "not encrypted" in out
    for image, words in (("ami-0123456789abcdef0", "InvalidAMIID.NotFound"), ("x; rm", "is no id of an image")):
        code, _, err = run(capfd, "verify", image)
        assert code == 2 and words in err
    with pytest.raises(ClientError):
        value(aws)


def test_prune_keeps_the_newest_the_promoted_and_the_used(aws, capfd):
    names = ("new", "old", "promoted", "used")
    images = {name: add_own(aws, age_days=age, name=f"baretrain-neuron-{name}") for age, name in enumerate(names)}
    images["cuda"] = add_own(aws, "cuda", age_days=50)
    half = {age: add_image(aws, f"baretrain-neuron-half{age}", age_days=age) for age in (0, 1)}
    aws.ssm.put_parameter(Name=OWN_IMAGE.format("neuron"), Value=images["promoted"], Type="String")
    (used,) = aws.ec2.run_instances(ImageId=images["used"], **ONE)["Instances"]
    snapshots = {name: backend().amis[image].ebs_snapshot.id for name, image in images.items()}
    (volume,) = (each["VolumeId"] for each in aws.ec2.describe_volumes()["Volumes"][:1])
    tagged = [{"ResourceType": "snapshot", "Tags": [{"Key": "baretrain:image", "Value": "neuron"}]}]
    orphan = aws.ec2.create_snapshot(VolumeId=volume, TagSpecifications=tagged)["SnapshotId"]

    code, out, _ = run(capfd, "prune", "--keep", "1")
    assert code == 0 and images["old"] in out and "nothing was removed" in out
    assert images["old"] in backend().amis
    code, out, _ = run(capfd, "prune", "--keep", "1", "--yes")
    assert code == 0 and f"kept {images['used']}" in out and used["InstanceId"] in aws.machines()
    left = {image.id for image in backend().amis.values() if image.name.startswith("baretrain-")}
    assert left == {images[name] for name in ("new", "promoted", "used", "cuda")} | {half[0]}
    own = {each["SnapshotId"] for each in aws.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]}
    assert not {snapshots["old"], orphan} & own and {snapshots["new"], snapshots["promoted"]} <= own
    assert run(capfd, "prune", "--keep", "1", "--yes")[1].endswith("nothing to remove\n")
    code, _, err = run(capfd, "prune", "--keep", "0")
    assert code == 2 and "--keep 0 must be 1 or more" in err
