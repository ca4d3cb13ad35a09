"""A launch on EC2 from the command line: resolved, checked, started, asked about, cancelled, and cleaned."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import boto3
import pytest
from ami.images import wanted_tags
from ec2_launching import OWN, RUN, Killed, set_time, trial
from services.fake_ec2 import UBUNTU, FakeEc2, fake_ec2

from launch.__main__ import main
from launch.ec2.account import OWN_IMAGE, check_image, resolve
from launch.ec2.api import Api
from launch.ec2.calls import read_calls
from launch.ec2.launcher import allow_itself
from launch.ec2.request import RUN_TAG
from launch.record import END, Record, Submission
from launch.supervise import Decision, conclude
from train.config import InputError, S3Config
from train.machine.processes import read_process
from train.machine.versions import read_versions

RESERVATION = "cr-0123456789abcdef0"


@pytest.fixture
def ec2(monkeypatch, tmp_path, prepared):
    with fake_ec2(monkeypatch) as fake:
        fake.manifest = (prepared / "manifest.json").read_bytes()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield fake


@pytest.fixture
def resolved(ec2, monkeypatch, tmp_path):
    """What settings come to, in private subnets of each zone unless others are named."""

    def make(*own: str):
        subnets = [f"cluster.subnets=[{','.join(ec2.private_subnets())}]"]
        given = {
            each.partition("=")[0]: each
            for each in ("instance=trn1.32xlarge", "nodes=4", *subnets, *own)
        }
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
    ("changed", "line"),
    [
        ({}, ""),
        (
            {"image": "cuda"},
            "was built for cuda, but the machines need one for neuron",
        ),
        (
            {"neuron-sdk": "2.20.0"},
            "has Neuron SDK 2.20.0, but this version of baretrain needs",
        ),
    ],
)
def test_an_image_is_one_for_these_machines(ec2, changed, line):
    """By the tags that baretrain ami writes."""
    tags = wanted_tags("neuron", read_versions())
    tags |= {
        f"baretrain:{name}": value
        for name, value in changed.items()
        if f"baretrain:{name}" in tags
    }
    ec2.client().create_tags(
        Resources=[UBUNTU], Tags=[{"Key": key, "Value": tags[key]} for key in tags]
    )
    with pytest.raises(InputError, match=line) if line else nullcontext():
        assert check_image(Api(), "us-east-1", UBUNTU, "neuron") == "/dev/sda1"


def test_a_reservation_decides_the_zone(ec2, resolved):
    zone = resolved().sites[-1].zone
    ec2.reservations = [
        {"CapacityReservationId": RESERVATION, "State": "active", "AvailabilityZone": zone}
    ]
    own = f"cluster.capacity_reservation={RESERVATION}"
    assert {site.zone for site in resolved(own).sites} == {zone}
    ec2.reservations[0]["State"] = "expired"
    with pytest.raises(InputError, match="is expired in us-east-1.*must be active"):
        resolved(own)


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (
            ["cluster.image=ami-0123456789abcdef0"],
            "InvalidAMIID.NotFound: .* image ids differ by region",
        ),
        (["cluster.image=null"], "baretrain ami neuron.*baretrain ami promote"),
        (["cluster.public_address=true"], "one network interface, but trn1.32xlarge has 9"),
        (["cluster.subnets=[subnet-0123456789abcdef0]"], "us-east-1 has none of cluster.subnets"),
        (
            ["cluster.regions=[eu-north-1]", "cluster.subnets=[]"],
            "eu-north-1 offers .* in no zone",
        ),
        (
            [f"cluster.capacity_reservation={RESERVATION}"],
            f"{RESERVATION} is in none of the regions",
        ),
        (["cluster.subnets=[]"], "cannot reach S3 from .* default VPC.*: name private subnets"),
    ],
)
def test_what_would_fail_later_is_rejected_with_the_cure(resolved, own, line):
    with pytest.raises(InputError, match=line):
        resolved(*own)


def test_a_given_security_group_must_allow_itself(ec2, resolved):
    client, vpc = ec2.client(), resolved().sites[0].vpc
    group = client.create_security_group(GroupName="given", Description="given", VpcId=vpc)[
        "GroupId"
    ]
    own = f"cluster.security_group={group}"
    with pytest.raises(InputError) as rejection:
        resolved(own)
    cures = [
        f"aws ec2 authorize-security-group-{way} --group-id {group}"
        for way in ("ingress", "egress")
    ]
    assert all(cure in str(rejection.value) for cure in cures)
    allow_itself(Api(), "us-east-1", group)
    assert resolved(own).sites


# ---- the command line ------------------------------------------------------------------------------------------------


@dataclass
class Cli:
    """What a user types; the time of a launch passes at once."""

    ec2: FakeEc2
    capsys: Any
    acts: list[Callable[[], None]] = field(default_factory=list)  # in each pause of a launch

    def __post_init__(self) -> None:
        client, s3 = (
            boto3.client("s3"),
            S3Config(endpoint=self.ec2.endpoint, region="us-east-1", path_style=True),
        )
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="albert/manifest.json", Body=self.ec2.manifest)
        self.record = Record("s3://bucket/runs/mine", s3)

    def sleep(self, seconds: float) -> None:
        self.ec2.passed_s += seconds
        for act in self.acts:
            act()

    def launch(self, *own: str) -> int:
        s3 = [f"s3.endpoint={self.ec2.endpoint}", "s3.path_style=true"]
        given = {each.partition("=")[0]: each for each in (*OWN, *own)}  # the last one counts
        return main(
            [*given.values(), "--", *RUN, *s3, "global_batch_size=64", "micro_batch_size=4"]
        )

    def do(self, command: str, *flags: str) -> int:
        """A command on the run."""
        return main([command, self.record.run_dir, *flags, *self.record.s3.flags()])

    def status(self) -> dict[str, Any]:
        self.capsys.readouterr()
        assert self.do("status", "--json") == 0
        return json.loads(self.capsys.readouterr().out.strip().splitlines()[-1])

    def end(self) -> None:
        if self.ec2.machines():
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


def test_a_plan_asks_ec2_nothing_and_shows_the_request(cli, capsys, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:9")  # nobody answers there
    assert cli.launch("cluster.market=spot") == 0
    shown = capsys.readouterr().out
    for text in (
        "EC2 was not asked",
        f'"ImageId": "{UBUNTU}"',
        '"MinCount": 2',
        '"MarketType": "spot"',
        '"Key": "baretrain:run"',
        "undo: baretrain launch cancel s3://bucket/runs/mine --yes",
        "the price is unknown (instance.usd_per_hour_spot)",
        "nothing was started; submit=true starts the job",
    ):
        assert text in shown, shown


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (
            ["instance=trn1.32xlarge"],
            "the default VPC's subnets.*cluster.subnets",
        ),  # as its submission
    ],
)
def test_a_plan_rejects_what_no_submission_would_do(cli, capsys, own, line):
    assert cli.launch(*own) == 2
    assert re.search(line, capsys.readouterr().err)


def test_check_sends_dry_runs_and_turns_errors_into_advice(ec2, cli, capsys):
    own = [
        "check=true",
        "instance=trn1.32xlarge",
        f"cluster.subnets=[{','.join(ec2.private_subnets())}]",
    ]
    assert cli.launch(*own) == 0
    shown = capsys.readouterr().out
    assert "on network card 1 to 7: " in shown and "EC2 would accept the request" in shown
    assert len(ec2.requests) == 3 and all(each["DryRun"] for each in ec2.requests)
    assert ec2.anything() == [] and not ec2.groups
    ec2.dry_run_error = "UnauthorizedOperation"
    assert cli.launch(*own) == 2
    assert "baretrain launch iam prints one that does" in capsys.readouterr().err


def test_a_launch_in_the_foreground_from_submission_to_the_end(ec2, cli, capsys):
    """Of machines whose type conf/instance does not have."""
    seen = []

    def end() -> None:
        if ec2.machines() and not seen:
            seen.append(cli.status())
            cli.end()

    cli.acts.append(end)
    assert cli.launch("submit=true", "instance=g4dn.xlarge", "processes_per_node=1") == 0
    assert ec2.requests[0]["InstanceType"] == "g4dn.xlarge"
    assert seen[0]["answer"]["is_active"] and "machines in us-east-1" in seen[0]["answer"]["text"]
    assert seen[0]["answer"]["text"].count(": 2") == 1
    assert "nothing of the run is left on EC2" in capsys.readouterr().out and ec2.anything() == []
    assert cli.status()["state"] == "done" and cli.do("clean", "--yes") == cli.do("clean") == 0


@pytest.mark.parametrize("command", ["cancel", "clean"])
def test_once_the_launch_was_killed_its_machines_are_ended_at_once(ec2, cli, capsys, command):
    cli.acts.append(cli.kill)
    assert cli.launch("submit=true") == 130 and "and then shut down" in capsys.readouterr().out
    assert len(ec2.machines()) == 2 and cli.status()["answer"]["is_active"]
    assert cli.launch("submit=true") == 2 and "has a job" in capsys.readouterr().err
    assert cli.do("clean") == 1 and len(ec2.machines()) == 2
    began_s = ec2.passed_s
    assert cli.do(command, "--yes") == 0
    assert ec2.machines() == [] and ec2.passed_s - began_s < 100
    assert cli.do("clean", "--yes") == 0  # cancel leaves the groups
    assert ec2.anything() == [] and cli.status()["state"] == "cancelled"


def test_a_launch_that_was_killed_before_it_asked_ec2_is_cancelled(ec2, cli, monkeypatch):
    def killed(*_) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("launch.ec2.scheduler.resolve", killed)
        with pytest.raises(Killed):
            cli.launch("submit=true")
    assert cli.status()["state"] == "waiting" and cli.do("cancel", "--yes") == 0
    assert cli.status()["state"] == "cancelled" and ec2.requests == []
    cli.acts.append(cli.end)
    assert cli.launch("submit=true") == 0


def test_cancel_fails_while_ec2_may_have_machines_that_it_does_not_list(ec2, cli, capsys):
    ec2.hides_s = 280.0
    cli.acts.append(cli.kill)
    assert cli.launch("submit=true") == 130
    capsys.readouterr()
    assert cli.do("cancel", "--yes") == 1 and len(ec2.machines()) == 2
    said = capsys.readouterr()
    assert "EC2 may still have instance i-" in said.err and "was cancelled" not in said.out
    assert cli.do("clean", "--yes") == 0 and ec2.anything() == []


def test_a_launch_that_waits_for_capacity_is_seen_and_can_be_cancelled(ec2, cli):
    ec2.without, seen = dict.fromkeys(ec2.subnets().values(), "InsufficientInstanceCapacity"), []

    def cancel() -> None:
        if len(ec2.requests) > 1 and not seen:
            seen.append(cli.status())
            assert cli.do("cancel", "--yes") == 0

    cli.acts.append(cancel)
    assert cli.launch("submit=true") == 1
    assert (
        seen[0]["state"] == "waiting"
        and "InsufficientInstanceCapacity" in seen[0]["answer"]["text"]
    )
    asked = [each["NetworkInterfaces"][0]["SubnetId"] for each in ec2.requests]
    # nothing more after the first round
    assert len(set(asked)) == len(asked) > 1 and ec2.anything() == []


def test_clean_during_a_submission_keeps_the_launch_from_making_anything(ec2, cli, monkeypatch):
    def meanwhile(*given):
        assert cli.do("clean", "--yes") == 0
        return resolve(*given)

    monkeypatch.setattr("launch.ec2.scheduler.resolve", meanwhile)
    cli.acts.append(cli.end)
    assert cli.launch("submit=true") == 1
    assert ec2.requests == [] and ec2.anything() == [] and cli.status()["state"] == "cancelled"
    assert cli.do("clean", "--yes") == 0


def test_machines_that_no_record_knows_are_not_doubled(ec2, cli, capsys):
    cli.acts.append(cli.kill)
    assert cli.launch("submit=true") == 130
    for name in cli.record.folder.names():
        cli.record.folder.remove(name)
    assert cli.launch("submit=true") == 2
    assert "EC2 has, or may have, machines of this run already" in capsys.readouterr().err
    assert cli.do("clean", "--yes") == 0 and ec2.anything() == []


def may(policy: dict[str, Any], action: str, resource: str, **keys: str) -> bool:
    """Return what IAM decides by a policy: denied by any statement, else allowed by one whose conditions hold."""

    def fits(each: dict[str, Any]) -> bool:
        at = [fnmatchcase(resource, pattern) for pattern in each["Resource"]]
        does = [fnmatchcase(action, pattern) for pattern in each["Action"]]
        return (
            any(at)
            and any(does)
            and all(holds(*condition) for condition in each.get("Condition", {}).items())
        )

    def holds(operator: str, wanted: dict[str, Any]) -> bool:
        values = {key: [each] if isinstance(each, str) else each for key, each in wanted.items()}
        lacking = operator.endswith("IfExists")
        return all(
            any(fnmatchcase(keys[key], each) for each in values[key]) if key in keys else lacking
            for key in wanted
        )

    effects = {each["Effect"] for each in policy["Statement"] if fits(each)}
    return effects == {"Allow"}


def test_a_role_is_for_one_run_and_an_operator_ends_only_what_is_of_their_folder(capsys):
    words = [
        "iam",
        "s3://bucket/alice/mine",
        "--data",
        "s3://data/albert",
        "--role",
        "m",
        "--account",
        "1" * 12,
    ]
    assert main(words) == 0
    policies = json.loads(capsys.readouterr().out)
    operator, machine, _ = policies.values()
    assert not [
        each
        for each in machine["Statement"]
        if any(a.startswith(("ec2:", "iam:")) for a in each["Action"])
    ]
    assert [each["Sid"] for each in machine["Statement"] if each["Resource"] == ["*"]] == [
        "Session"
    ]
    record, objects = "alice/mine.launch", "arn:aws:s3:::bucket/{}".format
    for name in (
        "alice/mine/metrics.jsonl",
        f"{record}/attempts/0001.json",
        f"{record}/logs/a.txt",
    ):
        assert may(machine, "s3:PutObject", objects(name)) and may(
            operator, "s3:PutObject", objects(name)
        )
    records = ("submissions/0001.json", "requests/0001.json", "ec2/calls/0001.json")
    for name in ("job.json", "code-0.tar.gz", "config.yaml", "plan.json", *records):
        assert may(machine, "s3:GetObject", objects(f"{record}/{name}"))
        assert not may(machine, "s3:PutObject", objects(f"{record}/{name}"))
        assert not may(machine, "s3:DeleteObject", objects(f"{record}/{name}"))
        assert may(operator, "s3:PutObject", objects(f"{record}/{name}"))
    for name in (
        "alice/other/a",
        "alice/mine2/a",
        "alice/other.launch/attempts/0001.json",
        "alice/mine2.launch/job.json",
    ):
        assert not may(machine, "s3:GetObject", objects(name)) and not may(
            machine, "s3:PutObject", objects(name)
        )
    assert may(machine, "s3:GetObject", "arn:aws:s3:::data/albert/manifest.json")
    assert not may(operator, "s3:PutObject", objects("bob/run.launch/job.json"))
    ec2 = "arn:aws:ec2:us-east-1:" + "1" * 12
    for owner, allowed in (("alice", True), ("bob", False), ("alice-of-others", False)):
        tag = {"baretrain:run-dir": f"s3://bucket/{owner}/run", RUN_TAG: "0" * 16}
        asked, has, session = (
            {f"{of}Tag/{key}": value for key, value in tag.items()}
            for of in ("aws:Request", "ec2:Resource", "ssm:resource")
        )
        assert may(operator, "ec2:TerminateInstances", f"{ec2}:instance/i-1", **has) is allowed
        assert may(operator, "ssm:StartSession", f"{ec2}:instance/i-1", **session) is allowed
        assert may(operator, "ec2:RunInstances", f"{ec2}:security-group/sg-1", **has) is allowed
        tokens = {"ec2:MetadataHttpTokens": "required"}
        assert (
            may(operator, "ec2:RunInstances", f"{ec2}:instance/i-1", **asked, **tokens) is allowed
        )
    # a given group, which is of no run
    assert may(operator, "ec2:RunInstances", f"{ec2}:security-group/sg-1")
    assert not may(operator, "ec2:TerminateInstances", f"{ec2}:instance/i-1")
    roles = f"arn:aws:iam::{'1' * 12}:role/"
    passed = {"iam:PassedToService": "ec2.amazonaws.com"}
    assert may(operator, "iam:PassRole", f"{roles}m-mine", **passed)
    assert not may(operator, "iam:PassRole", f"{roles}admin", **passed)
    assert main(["iam", "s3://bucket/*/mine"]) == 2


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


def test_a_job_that_was_changed_is_not_resumed(killed, capsys):
    content = killed.record.folder.read("job.json")
    changed = (
        content.replace(b'"seed', b'"seed')
        if b"evil" in content
        else content.replace(UBUNTU.encode(), b"ami-0e")
    )
    killed.record.folder.write("job.json", changed)
    assert killed.do("resume") == 2
    assert (
        "job.json was changed: its sha256 is" in capsys.readouterr().err
        and killed.ec2.requests == []
    )
    killed.record.folder.write("job.json", content)
    assert killed.do("resume") == 0 and len(killed.ec2.requests) == 1


def test_a_resume_is_checked_like_a_launch(killed, capsys, monkeypatch, tmp_path):
    """Machines that cannot reach the bucket would cost money until they end themselves."""
    secret = f"aws_secret_access_key = {os.environ['AWS_SECRET_ACCESS_KEY']}\n"
    (tmp_path / "keys").write_text(
        f"[work]\naws_access_key_id = {os.environ['AWS_ACCESS_KEY_ID']}\n{secret}"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    assert killed.do("resume", "--profile=work") == 2
    assert (
        "s3.profile=work: machines have a role" in capsys.readouterr().err
        and killed.ec2.requests == []
    )


def test_a_job_of_another_computer_needs_its_checksum(killed, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert killed.do("resume") == 2
    assert (
        "this computer has not launched" in capsys.readouterr().err and killed.ec2.requests == []
    )
    digest = killed.record.job().sha256
    assert killed.do("resume", f"--job-sha256={'0' * 64}") == 2 and killed.ec2.requests == []
    assert killed.do("resume", f"--job-sha256={digest}") == 0 and len(killed.ec2.requests) == 1


def test_what_machines_write_decides_neither_image_nor_what_is_ended(killed, capsys):
    """With a broader role, they may add submissions and calls."""
    submission = killed.record.last_submission()
    forged = json.loads(json.dumps(asdict(submission)))
    for site in forged["handle"]["resolved"]["sites"]:
        site["image"] = "ami-f4cf1d8d"
    killed.record.keep_answer(Submission(**forged))
    assert killed.do("resume") == 0
    assert [each["ImageId"] for each in killed.ec2.requests] == [UBUNTU]
    other = killed.ec2.client().run_instances(ImageId=UBUNTU, MinCount=1, MaxCount=1)["Instances"][
        0
    ]["InstanceId"]
    [call, *_] = [each for each in read_calls(killed.record) if each.operation == "run_instances"]
    replace(call, number=99, made=[other], answered_unix_s=killed.ec2.now()).write(killed.record)
    assert killed.do("clean", "--yes") == 0 and [each.id for each in killed.ec2.machines()] == [
        other
    ]
    with subprocess.Popen(["sleep", "60"]) as victim:
        process = {
            "host": platform.node(),
            "pid": victim.pid,
            "started": read_process(victim.pid).started,
        }
        killed.record.keep_answer(Submission(9, "local", 1, 0.0, process))
        assert (
            killed.do("cancel", "--yes") == 1 and "names cluster=local" in capsys.readouterr().err
        )
        assert victim.poll() is None
        victim.kill()


def test_machines_cannot_hide_from_a_cancel(ec2, cli):
    cli.acts.append(cli.kill)
    assert cli.launch("submit=true") == 130 and len(ec2.machines()) == 2
    conclude(cli.record, Decision(END, "done", ""))
    assert cli.status()["answer"]["text"].endswith(": 2")
    assert cli.do("cancel", "--yes") == 0 and ec2.machines() == []
