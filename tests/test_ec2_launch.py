"""A launch on EC2 from the command line: resolved, checked, started, asked about, cancelled, and cleaned."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress

import boto3
import pytest
from ec2_watching import OWN, RUN, world
from services.fake_ec2 import AMAZON_LINUX, ARM, UBUNTU, FakeEc2, fake_ec2

from ami.images import wanted_tags
from launch.__main__ import main
from launch.ec2.api import Api
from launch.ec2.groups import allow_itself
from launch.ec2.images import default_parameter
from launch.ec2.intents import Intents
from launch.ec2.resolve import resolve
from launch.ec2.watchers import read_watcher
from launch.record import Record
from train.config import InputError, S3Config
from train.host.versions import read_versions

RESERVATION = "cr-0123456789abcdef0"


@pytest.fixture
def ec2(monkeypatch, tmp_path, prepared):
    with fake_ec2(monkeypatch) as fake:
        fake.manifest = (prepared / "manifest.json").read_bytes()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield fake


def resolved(ec2: FakeEc2, tmp_path, *own: str):
    run = world(ec2, tmp_path / "mine", *own)
    return resolve(run.job, run.cluster, run.record, Api())


def put(name: str, value: str) -> None:
    boto3.client("ssm").put_parameter(Name=name, Value=value, Type="String")


# ---- what settings come to -------------------------------------------------------------------------------------------


def test_subnets_are_those_whose_zone_has_the_type(ec2, tmp_path):
    sites = resolved(ec2, tmp_path).sites
    offers = ec2.client().describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["trn1.32xlarge"]}]
    )
    zones = sorted(each["Location"] for each in offers["InstanceTypeOfferings"])
    assert [site.zone for site in sites] == zones and len(zones) < len(ec2.subnets())
    named = [ec2.subnets()[zone] for zone in reversed(zones)]
    again = resolved(ec2, tmp_path, f"cluster.subnets=[{','.join(named)}]")
    assert [site.subnet for site in again.sites] == named


def test_spot_goes_where_it_is_cheapest(ec2, tmp_path, monkeypatch):
    zones = [site.zone for site in resolved(ec2, tmp_path).sites]
    prices = [{"AvailabilityZone": zone, "SpotPrice": str(len(zones) - index)} for index, zone in enumerate(zones)]
    ec2.spot_prices = prices
    assert [site.zone for site in resolved(ec2, tmp_path, "cluster.market=spot").sites] == zones[::-1]


def test_the_image_is_the_projects_own_and_stays_when_the_job_goes_on(ec2, tmp_path):
    put(default_parameter("neuron"), UBUNTU)
    run = world(ec2, tmp_path / "mine", "cluster.image=null")
    before = resolve(run.job, run.cluster, run.record, run.api)
    assert before.images["us-east-1"].id == UBUNTU and before.images["us-east-1"].root_device == "/dev/sda1"
    boto3.client("ssm").put_parameter(Name=default_parameter("neuron"), Value="ami-f4cf1d8d", Overwrite=True)
    assert resolve(run.job, run.cluster, run.record, run.api).images == before.images


@pytest.mark.parametrize(
    ("tag", "value", "line"),
    [
        ("image", "cuda", "was built for cuda, trn1.32xlarge is neuron"),
        ("neuron-sdk", "2.20.0", "has Neuron SDK 2.20.0, this version of baretrain works with"),
    ],
)
def test_an_image_of_another_kind_is_refused(ec2, tmp_path, tag, value, line):
    names = wanted_tags("neuron", read_versions())  # as python -m ami writes them
    assert f"baretrain:{tag}" in names
    ec2.client().create_tags(Resources=[UBUNTU], Tags=[{"Key": key, "Value": names[key]} for key in names])
    resolved(ec2, tmp_path)
    ec2.client().create_tags(Resources=[UBUNTU], Tags=[{"Key": f"baretrain:{tag}", "Value": value}])
    with pytest.raises(InputError, match=line):
        resolved(ec2, tmp_path)


def test_a_reservation_decides_the_zone(ec2, tmp_path):
    zone = resolved(ec2, tmp_path).sites[-1].zone
    ec2.reservations = [{"CapacityReservationId": RESERVATION, "State": "active", "AvailabilityZone": zone}]
    own = f"cluster.capacity_reservation={RESERVATION}"
    assert {site.zone for site in resolved(ec2, tmp_path, own).sites} == {zone}
    ec2.reservations[0]["State"] = "expired"
    with pytest.raises(InputError, match="is expired, not active"):
        resolved(ec2, tmp_path, own)


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (["cluster.image=ami-0123456789abcdef0"], "InvalidAMIID.NotFound: .* images are of one region"),
        ([f"cluster.image={AMAZON_LINUX}"], "Amazon Linux, whose glibc is too old"),
        ([f"cluster.image={ARM}"], "is for arm64, trn1.32xlarge is x86_64"),
        (["cluster.image=null"], "python -m ami neuron builds and promotes one"),
        ([f"cluster.image={UBUNTU}", "cluster.disk_gib=1"], "cluster.disk_gib=1 is too small"),
        (["cluster.regions=[us-east-1,us-west-2]"], "is of one region, there are 2"),
        (["cluster.public_address=true"], "one network interface, trn1.32xlarge has 9"),
        (["cluster.subnets=[subnet-0123456789abcdef0]"], "us-east-1 has none of cluster.subnets"),
        (["cluster.regions=[eu-north-1]"], "eu-north-1 has no trn1.32xlarge|is in no zone of eu-north-1"),
        ([f"cluster.capacity_reservation={RESERVATION}"], f"there is no cluster.capacity_reservation={RESERVATION}"),
        (["nodes=4096"], "machines need 4096 addresses in one subnet"),
        (["nodes=600", "cluster.secondary_interfaces=efa"], "secondary_interfaces=efa-only"),
    ],
)
def test_what_would_fail_later_is_refused_with_the_cure(ec2, tmp_path, own, line):
    with pytest.raises(InputError, match=line):
        resolved(ec2, tmp_path, *own)


def test_a_given_security_group_must_allow_itself(ec2, tmp_path):
    client, vpc = ec2.client(), resolved(ec2, tmp_path).sites[0].vpc
    group = client.create_security_group(GroupName="given", Description="given", VpcId=vpc)["GroupId"]
    own = f"cluster.security_group={group}"
    with pytest.raises(InputError) as refusal:
        resolved(ec2, tmp_path, own)
    cures = [f"aws ec2 authorize-security-group-{way} --group-id {group}" for way in ("ingress", "egress")]
    assert all(cure in str(refusal.value) for cure in cures)
    allow_itself(Api(), "us-east-1", group)
    assert resolved(ec2, tmp_path, own).sites
    other = client.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    elsewhere = client.create_security_group(GroupName="given", Description="given", VpcId=other)["GroupId"]
    with pytest.raises(InputError, match=f"is in {other}"):
        resolved(ec2, tmp_path, f"cluster.security_group={elsewhere}")


# ---- the command line ------------------------------------------------------------------------------------------------


def settings(ec2: FakeEc2, *own: str) -> list[str]:
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="albert/manifest.json", Body=ec2.manifest)
    s3 = [f"s3.endpoint={ec2.endpoint}", "s3.path_style=true"]
    first = [each for each in OWN if not each.startswith(("instance=", "nodes="))]
    return [*first, "instance=trn1.2xlarge", "nodes=2", *own, "--", *RUN, *s3]


def flags(ec2: FakeEc2) -> list[str]:
    return ["--endpoint", ec2.endpoint, "--region", "us-east-1", "--path-style"]


def test_a_plan_asks_ec2_nothing_and_shows_everything(ec2, capsys, monkeypatch):
    arguments = settings(ec2, "cluster.market=spot")
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:9")  # nobody answers there
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for text in (
        "EC2 was not asked; check=true does it",
        f"image: {UBUNTU}",
        "market: spot",
        "tags: Name=baretrain-",
        "user data: ",
        "undo: python -m launch cancel s3://bucket/runs/mine --yes",
        "the price is not known (instance.usd_per_hour_spot)",
        "nothing was started; submit=true does it",
    ):
        assert text in shown, shown


def test_check_sends_dry_runs_and_turns_errors_into_advice(ec2, capsys):
    arguments = settings(ec2, "instance=trn1.32xlarge", "check=true")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "network: card 1 to 7: device 0, efa-only" in shown and "EC2 would do it" in shown
    assert len(ec2.requests) == 3 and all(each["DryRun"] for each in ec2.requests)
    assert ec2.anything() == [] and not ec2.groups
    ec2.refuses_dry_run = "UnauthorizedOperation"
    assert main(arguments) == 2
    assert "python -m launch iam prints one that is enough" in capsys.readouterr().err


def wait_until(fact, limit_s: float = 300.0) -> None:
    until_s = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < until_s
        time.sleep(0.2)


def watches(record: Record) -> bool:
    seen = read_watcher(record)
    return seen is not None and seen.is_there(now_unix_s=time.time())


def kill_watcher(record: Record) -> None:
    seen = read_watcher(record)
    if seen is not None and watches(record):
        with suppress(ProcessLookupError):
            os.kill(seen.pid, signal.SIGKILL)
        wait_until(lambda: not watches(record))


def test_started_watched_killed_watched_again_cancelled_and_cleaned(ec2, capsys):
    """The watcher is a process of its own, which a signal kills in the middle."""
    arguments = settings(ec2, "submit=true")
    assert main(arguments) == 0
    record = Record("s3://bucket/runs/mine", S3Config(endpoint=ec2.endpoint, region="us-east-1", path_style=True))
    wait_until(lambda: len(ec2.machines()) == 2)
    try:
        run = [record.run_dir, *flags(ec2)]
        wait_until(lambda: bool([event for event in record.events() if event.kind == "machines"]))
        assert main(["status", *run, "--json"]) == 0
        seen = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert seen["answer"]["is_active"] and "2 machines in us-east-1" in seen["answer"]["text"]
        assert main(arguments) == 2 and "has a job" in capsys.readouterr().err
        assert main(["clean", *run, "--yes"]) == 2 and "is watched by process" in capsys.readouterr().err

        kill_watcher(record)
        assert main(["status", *run]) == 0
        assert "its watcher is gone: python -m launch watch" in capsys.readouterr().out
        assert main(["clean", *run]) == 1
        assert "there is: instance i-" in capsys.readouterr().out and len(ec2.machines()) == 2

        assert main(["watch", *run]) == 0
        wait_until(lambda: watches(record))
        assert main(["cancel", *run, "--yes"]) == 0
        wait_until(lambda: ec2.anything() == [])
        wait_until(lambda: not watches(record))
        assert main(["clean", *run, "--yes"]) == 0 and "looked twice" in capsys.readouterr().out
        assert main(["status", *run, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "cancelled"
        assert sum(intent.operation == "run_instances" for intent in Intents(record).all) == 1
    finally:
        kill_watcher(record)


def test_without_a_watcher_cancel_removes_everything_itself(ec2, capsys):
    arguments = settings(ec2, "submit=true")
    assert main(arguments) == 0
    record = Record("s3://bucket/runs/mine", S3Config(endpoint=ec2.endpoint, region="us-east-1", path_style=True))
    wait_until(lambda: len(ec2.machines()) == 2)
    kill_watcher(record)
    assert main(["cancel", record.run_dir, "--yes", *flags(ec2)]) == 0
    assert ec2.anything() == []


def test_machines_that_no_record_knows_are_not_doubled(ec2, capsys):
    arguments = settings(ec2, "submit=true")
    assert main(arguments) == 0
    record = Record("s3://bucket/runs/mine", S3Config(endpoint=ec2.endpoint, region="us-east-1", path_style=True))
    wait_until(lambda: len(ec2.machines()) == 2)
    kill_watcher(record)
    for name in record.folder.names():
        record.folder.remove(name)
    assert main(arguments) == 2
    assert "EC2 has machines of this run already" in capsys.readouterr().err
    assert main(["clean", record.run_dir, "--yes", *flags(ec2)]) == 0 and ec2.anything() == []


@pytest.mark.parametrize(("vcpus", "code"), [(0.0, 1), (512.0, 0)])
def test_quota_says_what_is_lacking(ec2, capsys, vcpus, code):
    ec2.quotas = [
        {"QuotaName": "Running On-Demand Trn instances", "QuotaCode": "L-2C3B7624", "Value": vcpus},
        {
            "QuotaName": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
            "QuotaCode": "L-1",
            "Value": 9.0,
        },
        {"QuotaName": "All Trn Spot Instance Requests", "QuotaCode": "L-2", "Value": 9999.0},
    ]
    assert main(["quota", "trn1.32xlarge", "--nodes", "4", "--regions", "us-east-1"]) == code
    shown = capsys.readouterr().out
    assert "512 are needed" in shown and "L-2C3B7624" in shown
    assert ("request-service-quota-increase" in shown) == (code == 1)
    if code:  # a launch sees it before it makes anything
        assert main(settings(ec2, "submit=true")) == 2
        assert "request-service-quota-increase" in capsys.readouterr().err and ec2.anything() == []


def test_iam_prints_policies(capsys):
    assert main(["iam", "s3://bucket/runs", "--data", "s3://bucket/albert", "--account", "123456789012"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"operator", "machine", "machine_trust"}
