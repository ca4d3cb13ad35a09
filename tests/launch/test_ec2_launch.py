"""A launch on EC2 from the command line: resolved, checked, started, asked about, cancelled, and cleaned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import boto3
import pytest
from ec2_launching import RUN, set_time, set_up, trial, with_own
from services.fake_ec2 import UBUNTU, FakeEc2, fake_ec2

from launch.__main__ import main
from launch.ec2.account import OWN_IMAGE, resolve
from launch.ec2.api import Api
from launch.record import END, Record
from launch.supervise import Decision, conclude
from train.config import InputError, S3Config


@pytest.fixture
def ec2(monkeypatch, tmp_path, prepared):
    with fake_ec2(monkeypatch) as fake:
        set_up()
        fake.manifest = (prepared / "manifest.json").read_bytes()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield fake


@pytest.fixture
def resolved(ec2, monkeypatch, tmp_path):
    """What settings come to, in private subnets of each zone unless others are named."""

    def make(*own: str):
        subnets = f"cluster.subnets=[{','.join(ec2.private_subnets())}]"
        words = ("instance=trn1.32xlarge", "nodes=4", subnets, *own)
        given = {each.partition("=")[0]: each for each in words}
        run = trial(ec2, monkeypatch, tmp_path / "mine", *given.values())
        return resolve(run.job, run.cluster, run.record, Api())

    return make


# ---- what settings come to -------------------------------------------------------------------------------------------


def test_subnets_are_those_whose_zone_has_the_type(ec2, resolved):
    sites = resolved().sites
    offers = ec2.client().describe_instance_type_offerings(
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": ["trn1.32xlarge"]}],
    )
    zones = sorted(each["Location"] for each in offers["InstanceTypeOfferings"])
    assert [site.zone for site in sites] == zones and len(zones) < len(ec2.subnets())
    named = [site.subnet for site in reversed(sites)]
    again = resolved(f"cluster.subnets=[{','.join(named)}]")
    assert [site.subnet for site in again.sites] == named
    assert {site.placement_group for site in resolved("nodes=1").sites} == {""}
    reserved = resolved("cluster.capacity_reservation=cr-1").sites
    assert {site.placement_group for site in reserved} == {""}


def test_the_image_is_the_projects_own_and_stays_when_the_job_resumes(ec2, monkeypatch, tmp_path):
    parameter = {"Name": OWN_IMAGE.format("neuron"), "Type": "String", "Overwrite": True}
    boto3.client("ssm").put_parameter(**parameter, Value=UBUNTU)
    run = trial(ec2, monkeypatch, tmp_path / "mine", "cluster.image=null")
    run.submit()
    before = run.launcher().resolved
    assert {(site.image, site.root_device) for site in before.sites} == {(UBUNTU, "/dev/sda1")}
    boto3.client("ssm").put_parameter(**parameter, Value="ami-f4cf1d8d")
    assert resolve(run.job, run.cluster, run.record, run.api).sites == before.sites


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ("cluster.image=ami-0123456789abcdef0", "InvalidAMIID.NotFound: .* ids differ by region"),
        ("cluster.image=null", "baretrain ami neuron.*baretrain ami promote"),
        ("cluster.subnets=[subnet-0123456789abcdef0]", "has no subnet: name others"),
        ("cluster.subnets=[]", "cannot reach S3 from .* default VPC.*: name private subnets"),
    ],
)
def test_what_would_fail_later_is_rejected_with_the_cure(resolved, own, line):
    with pytest.raises(InputError, match=line):
        resolved(own)


# ---- the command line ------------------------------------------------------------------------------------------------


@dataclass
class Cli:
    """What a user types; the time of a launch passes at once."""

    ec2: FakeEc2
    capsys: Any
    acts: list[Callable[[], None]] = field(default_factory=list)  # in each pause of a launch

    def __post_init__(self) -> None:
        s3 = S3Config(endpoint=self.ec2.endpoint, region="us-east-1")
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="albert/manifest.json", Body=self.ec2.manifest)
        self.record = Record("s3://bucket/runs/mine", s3)

    def sleep(self, seconds: float) -> None:
        self.ec2.passed_s += seconds
        for act in self.acts:
            act()

    def launch(self, *own: str) -> int:
        s3 = [f"s3.endpoint={self.ec2.endpoint}"]
        batch = ["global_batch_size=64", "micro_batch_size=4"]
        return main([*with_own(*own), "--", *RUN, *s3, *batch])

    def do(self, command: str, *flags: str) -> int:
        """A command on the run."""
        return main([command, self.record.run_dir, *flags, *self.record.s3.flags()])

    def status(self) -> dict[str, Any]:
        self.capsys.readouterr()
        assert self.do("status", "--json") == 0
        return json.loads(self.capsys.readouterr().out.strip().splitlines()[-1])

    def end(self) -> None:
        if self.ec2.machines() and self.record.history().ended is None:
            conclude(self.record, Decision(END, "done", "the last step"))

    def kill(self) -> None:
        """Interrupt the launch while it waits, as soon as EC2 has machines."""
        if self.ec2.machines():
            self.acts.clear()
            raise KeyboardInterrupt


@pytest.fixture
def cli(ec2, capsys, monkeypatch):
    made = Cli(ec2, capsys)
    set_time(monkeypatch, ec2.now, made.sleep)
    return made


def test_a_plan_asks_ec2_nothing(cli, capsys, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:9")  # nobody answers there
    assert cli.launch("cluster.market=spot") == 0
    shown = capsys.readouterr().out
    for text in (
        f"image {UBUNTU}; subnets those of the default VPC; spot",
        "EC2 was not asked",
        "undo: baretrain launch clean s3://bucket/runs/mine --yes",
        "nothing was started; submit=true starts the job",
    ):
        assert text in shown, shown


def test_a_launch_in_the_foreground_from_submission_to_the_end(ec2, cli, capsys):
    seen = []

    def end() -> None:
        if ec2.machines() and not seen:
            seen.append(cli.status()["answer"])
            cli.end()

    cli.acts.append(end)
    assert cli.launch("submit=true") == 0
    assert seen[0]["is_active"] and re.search(r"machines in us-east-1\w: 2$", seen[0]["text"])
    assert "no machine of the run is left on EC2" in capsys.readouterr().out
    assert ec2.anything() == [] and cli.status()["state"] == "done"
    assert cli.do("clean", "--yes") == cli.do("clean") == 0


def test_without_the_stack_one_line_names_setup(ec2, cli, capsys):
    ec2.client("cloudformation").delete_stack(StackName="baretrain")
    assert cli.launch("submit=true") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "run baretrain launch setup s3://BUCKET" in error
    assert ec2.requests == []


@pytest.mark.parametrize("command", ["cancel", "clean"])
def test_once_the_launch_was_killed_its_machines_are_ended_at_once(ec2, cli, capsys, command):
    cli.acts.append(cli.kill)
    assert cli.launch("submit=true") == 130 and "and then shut down" in capsys.readouterr().out
    conclude(cli.record, Decision(END, "done", ""))  # by a machine: it hides nothing
    assert len(ec2.machines()) == 2 and cli.status()["answer"]["is_active"]
    assert cli.launch("submit=true") == 2 and "has a job" in capsys.readouterr().err
    assert cli.do("clean") == 1 and len(ec2.machines()) == 2
    began_s = ec2.passed_s
    assert cli.do(command, "--yes") == 0
    assert ec2.machines() == [] and ec2.passed_s - began_s < 100
    assert cli.do("clean", "--yes") == 0
    assert ec2.anything() == [] and cli.status()["state"] in ("cancelled", "done")


def test_a_launch_that_waits_for_capacity_is_seen_and_can_be_cancelled(ec2, cli):
    ec2.without = dict.fromkeys(ec2.subnets().values(), "InsufficientInstanceCapacity")
    seen = []

    def cancel() -> None:
        if len(ec2.requests) > 1 and not seen:
            seen.append(cli.status())
            assert cli.do("cancel", "--yes") == 0

    cli.acts.append(cancel)
    assert cli.launch("submit=true") == 1
    assert seen[0]["state"] == "waiting" and "asks EC2 for machines" in seen[0]["answer"]["text"]
    asked = [each["NetworkInterfaces"][0]["SubnetId"] for each in ec2.requests]
    assert len(set(asked)) == len(asked) > 1  # nothing more after the first round
    assert ec2.anything() == [] and ec2.passed_s < 100


def test_clean_during_a_submission_keeps_the_launch_from_making_anything(ec2, cli, monkeypatch):
    def meanwhile(*given):
        assert cli.do("clean", "--yes") == 0
        return resolve(*given)

    monkeypatch.setattr("launch.ec2.scheduler.resolve", meanwhile)
    cli.acts.append(cli.end)
    assert cli.launch("submit=true") == 1
    assert ec2.requests == [] and cli.status()["state"] == "cancelled"


def test_machines_that_no_record_knows_are_not_doubled(ec2, cli, capsys):
    cli.acts.append(cli.kill)
    assert cli.launch("submit=true") == 130
    for name in cli.record.folder.names():
        cli.record.folder.remove(name)
    assert cli.launch("submit=true") == 2
    assert "EC2 has machines of this run already" in capsys.readouterr().err
    assert cli.do("clean", "--yes") == 0 and ec2.anything() == []


# ---- a record that others have written -------------------------------------------------------------------------------


@pytest.fixture
def killed(cli, capsys):
    """The launch of a run that was killed, and whose machines have ended."""
    cli.acts.append(cli.kill)
    assert cli.launch("submit=true") == 130
    assert cli.do("clean", "--yes") == 0
    cli.ec2.requests.clear()
    cli.acts.append(cli.end)
    capsys.readouterr()
    return cli


def test_a_forged_submission_decides_neither_image_nor_what_is_ended(killed):
    submission = killed.record.last_submission()
    handle = json.loads(json.dumps(submission.handle).replace(UBUNTU, "ami-f4cf1d8d"))
    one = {"ImageId": UBUNTU, "MinCount": 1, "MaxCount": 1}
    other = killed.ec2.client().run_instances(**one)["Instances"][0]["InstanceId"]
    handle["asked"]["machines"] = [other]
    killed.record.keep_answer(replace(submission, handle=handle))
    killed.ec2.requests.clear()
    assert killed.do("resume") == 0
    assert [each["ImageId"] for each in killed.ec2.requests] == [UBUNTU]
    assert killed.do("clean", "--yes") == 0
    assert [each.id for each in killed.ec2.machines()] == [other]


def test_a_job_is_resumed_only_as_this_computer_launched_it(killed, capsys, monkeypatch, tmp_path):
    content = killed.record.folder.read("job.json")
    killed.record.folder.write("job.json", content.replace(UBUNTU.encode(), b"ami-0e"))
    assert killed.do("resume") == 2
    assert "job.json was changed: its sha256 is" in capsys.readouterr().err
    killed.record.folder.write("job.json", content)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        assert killed.do("resume") == 2
        assert "this computer has not launched" in capsys.readouterr().err
    assert killed.ec2.requests == []
    assert killed.do("resume") == 0 and len(killed.ec2.requests) == 1
