"""What the watcher does with a run's machines on EC2, from nothing to nothing: against moto's server."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress

import pytest
from ec2_watching import KillAt, Killed, World, world
from services.fake_ec2 import FakeEc2, fake_ec2
from test_launch_golden import check_golden

from launch.ec2 import clean, watchers
from launch.ec2.api import Api, BadCredentials
from launch.ec2.crew import read_crew, read_hello
from launch.ec2.groups import allow_itself
from launch.ec2.request import RUN_TAG, run_id
from launch.ec2.watch import Watch
from launch.record import Record
from train.config import Failure, InputError, S3Config, Unreachable
from train.storage.folders import LocalFolder


@pytest.fixture
def ec2(monkeypatch):
    with fake_ec2(monkeypatch) as fake:
        yield fake


def zones(ec2: FakeEc2) -> list[str]:
    return sorted({each.placement.availability_zone for each in ec2.machines()})


def test_four_machines_from_nothing_to_nothing(ec2, tmp_path):
    api, bodies = Api(), []
    api.session.events.register("provide-client-params.ec2.RunInstances", lambda params, **_: bodies.append(params))
    run = world(ec2, tmp_path / "mine", api=api)
    watch = run.watch()
    run.until(watch, lambda: bool(run.crew))
    assert len(run.crew) == len(ec2.machines()) == 4 and len(zones(ec2)) == 1
    assert run.crew == [each.id for each in ec2.machines()]
    [body] = bodies
    text = json.dumps(body, indent=1, sort_keys=True)
    group = body["NetworkInterfaces"][0]["Groups"][0]
    for value, name in {
        body["ClientToken"]: "TOKEN",
        body["NetworkInterfaces"][0]["SubnetId"]: "SUBNET",
        group: "GROUP",
        run_id(run.record): "RUN",
        run.record.run_dir: "RUN_DIR",
    }.items():
        text = text.replace(value, name)
    check_golden("ec2_run_instances.json", text + "\n")
    arrived = ec2.requests[-1]["NetworkInterfaces"]
    assert [each["InterfaceType"] for each in arrived] == ["interface", *["efa-only"] * 8]
    seen = ec2.client().describe_security_groups(GroupIds=[group])["SecurityGroups"][0]
    for key in ("IpPermissions", "IpPermissionsEgress"):
        assert [group] in [[pair["GroupId"] for pair in rule["UserIdGroupPairs"]] for rule in seen[key]]
    assert not any(rule["IpRanges"] for rule in seen["IpPermissions"])
    run.record.note("ended", outcome="done", reason="the last step")
    assert watch.run() == 0
    assert ec2.anything() == [] and run.noted("cleaned")


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_without_capacity_in_the_first_subnets_it_takes_the_next(ec2, tmp_path, refused):
    run = world(ec2, tmp_path / "mine", "cluster.max_wait_s=600")
    subnets = [site.subnet for site in run.watch().gang.resolved.sites]
    ec2.without = dict.fromkeys(subnets[:refused], "InsufficientInstanceCapacity")
    watch = run.watch()
    if refused < len(subnets):
        run.until(watch, lambda: bool(run.crew))
        assert {each.subnet_id for each in ec2.machines()} == {subnets[refused]} and len(run.crew) == 4
        return
    assert watch.run() == 0
    [ended] = run.noted("ended")
    assert "no capacity for 10 min" in ended["reason"] and subnets[0] in ended["reason"]
    assert ec2.anything() == []


def in_training(ec2, folder, *own: str) -> tuple[World, Watch]:
    """A run whose machines are there and have been named the crew."""
    run = world(ec2, folder, *own)
    watch = run.watch()
    run.until(watch, lambda: bool(run.crew))
    return run, watch


def end(run: World, watch: Watch) -> None:
    run.record.note("ended", outcome="done", reason="the last step")
    assert watch.run() == 0
    assert run.ec2.anything() == []


def test_a_silent_machine_is_replaced_in_the_same_subnet_and_survivors_lead(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=3", "instance=trn1.2xlarge")
    first, silent, third = run.crew
    [subnet] = {each.subnet_id for each in run.machines()}
    run.silent.add(silent)
    run.until(watch, lambda: len(run.noted("crew")) == 2)
    assert run.crew[:2] == [first, third] and len(run.crew) == 3
    assert [each.id for each in run.made() if each.state == "terminated"] == [silent]
    assert {each.subnet_id for each in run.machines()} == {subnet}
    [lost] = run.noted("machine_lost")
    assert lost["instance"] == silent and "no sign for" in lost["reason"]
    assert ec2.requests[-1]["MinCount"] == ec2.requests[-1]["MaxCount"] == 1
    end(run, watch)


def test_where_a_subnet_has_no_machine_left_the_whole_gang_moves(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=3", "instance=trn1.2xlarge")
    before, lost = list(run.crew), run.crew[0]
    [subnet] = {each.subnet_id for each in run.machines()}
    ec2.without = {subnet: "InsufficientInstanceCapacity"}
    ec2.client().terminate_instances(InstanceIds=[lost])
    run.until(watch, lambda: len(run.noted("crew")) == 2 and len(run.machines()) == 3)
    assert not set(run.crew) & set(before) and sorted(run.crew) == sorted(each.id for each in run.machines())
    [elsewhere] = {each.subnet_id for each in run.machines()}
    assert elsewhere != subnet
    end(run, watch)


def test_machines_that_do_not_come_up_are_replaced_but_not_for_ever(ec2, tmp_path):
    run = world(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge", "cluster.boot_s=300")
    run.deaf = True
    assert run.watch().run() == 0
    [ended] = run.noted("ended")
    assert "4 machines in a row did not come up" in ended["reason"]
    assert {each["reason"] for each in run.noted("machine_lost")} == {"it said nothing in 5 min"}
    assert len(run.made()) == 4 and ec2.anything() == []


def test_a_machine_says_why_it_could_not_start(ec2, tmp_path):
    run = world(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    watch = run.watch()

    def fail(run: World) -> None:
        first = run.made()[0].id
        run.record.folder.write(f"ec2/failed/{first}.json", b'{"reason": "the code does not match its checksum"}')

    run.happens = fail
    run.until(watch, lambda: bool(run.noted("machine_lost")))
    assert run.noted("machine_lost")[0]["reason"] == "the code does not match its checksum"


def host_of(run: World, ident: str) -> str:
    hello = read_hello(run.record, ident)
    assert hello is not None
    return hello.host


def test_a_spare_takes_the_ranks_of_a_machine_that_fails_the_gate(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "spares=1", "instance=trn1.2xlarge")
    passed, unfit, spare = run.crew
    hosts = [host_of(run, passed), host_of(run, spare)]
    run.record.note("gate", passed=hosts, failed={host_of(run, unfit): "neuron-ls: 15 of 16 devices"})
    run.until(watch, lambda: len(run.machines()) == 2)
    for _ in range(3):
        watch.step()
        run.sleep(10.0)
    assert len(run.noted("crew")) == 1 and len(run.made()) == 3  # what trains is not disturbed
    ec2.client().terminate_instances(InstanceIds=[passed])
    run.until(watch, lambda: len(run.noted("crew")) == 2)
    assert run.crew[0] == spare and len(run.crew) == 2


def test_a_machine_that_fails_the_gate_is_replaced_unless_all_fail(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    passed, unfit = run.crew
    run.record.note("gate", passed=[host_of(run, passed)], failed={host_of(run, unfit): "no EFA"})
    run.until(watch, lambda: len(run.noted("crew")) == 2)
    assert run.crew[0] == passed and unfit not in run.crew
    run.record.note("gate", passed=[], failed={host_of(run, each): "collectives fail" for each in run.crew})
    for _ in range(5):
        watch.step()
        run.sleep(10.0)
    assert len(run.noted("machine_lost")) == 1 and len(run.noted("crew")) == 2  # the one that leads ends the run


def test_the_time_of_a_run_is_limited(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge", "cluster.max_run_s=3600")
    run.passed_s += 3600
    watch.step()
    assert [each["reason"] for each in run.noted("stop_asked")] == ["cluster.max_run_s is over"]
    run.passed_s += 1000
    assert watch.run() == 0
    assert "max_run_s=3600 is over" in run.noted("ended")[0]["reason"] and ec2.anything() == []


def test_a_run_that_is_resumed_gets_new_machines_and_the_next_crew(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    end(run, watch)
    run.begin()
    again = run.watch()
    run.until(again, lambda: read_crew(run.record).generation == 2)
    assert sorted(run.crew) == sorted(each.id for each in run.machines()) and len(run.made()) == 4
    end(run, again)
    assert len(run.noted("cleaned")) == 2


def test_a_run_may_be_resumed_while_ec2_still_shows_its_old_machines(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    for number in (2, 3, 4):
        end(run, watch)
        run.begin()
        watch = run.watch()
        run.until(watch, lambda number=number: read_crew(run.record).generation == number)
    assert len(run.made()) == 8 and not run.noted("machine_lost")
    end(run, watch)


def test_no_machine_is_made_for_a_run_that_is_to_stop(ec2, tmp_path):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    run.record.note("stop_asked")
    ec2.client().terminate_instances(InstanceIds=[run.crew[1]])
    assert watch.run() == 0
    assert [each["outcome"] for each in run.noted("ended")] == ["stopped"] and len(run.made()) == 2


def test_a_record_that_does_not_answer_ends_neither_the_watcher_nor_machines(ec2, tmp_path, monkeypatch):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    assert watch.signs
    answers = iter([Unreachable("S3 is away"), True])

    def step() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def away(*_) -> None:
        raise Unreachable("S3 is away")

    log = run.record.local_folder() / "logs" / "watch.txt"
    log.parent.mkdir(exist_ok=True)
    log.write_text("asked again\n")
    with monkeypatch.context() as patch:
        patch.setattr(Record, "is_remote", True)
        patch.setattr(LocalFolder, "write", away)
        watch.say("asked again")
    with monkeypatch.context() as patch:
        patch.setattr(watch, "step", step)
        assert watch.run() == 0
    assert watch.signs == {}  # beats of before the silence say nothing
    end(run, watch)


def test_a_second_watcher_is_refused_and_an_older_one_gives_way(ec2, tmp_path, monkeypatch):
    run, watch = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    elsewhere = dataclasses.replace(watch.mine, host="another", pid=1)
    watchers.beat(run.record, elsewhere)
    with pytest.raises(InputError, match="is watched already, by process 1 on another"):
        run.watch()
    run.passed_s += watchers.SILENT_S + 1
    newer = run.watch()
    with pytest.raises(Failure, match="another watcher of"):
        watch.step()
    assert not newer.step()


def test_a_refusal_ends_the_run_and_bad_credentials_do_not(ec2, tmp_path):
    run = world(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    watch = run.watch()
    ec2.without = {site.subnet: "ExpiredToken" for site in watch.gang.resolved.sites}
    with pytest.raises(BadCredentials, match="expired"):
        watch.run()
    assert not run.noted("ended")
    ec2.without = {site.subnet: "UnauthorizedOperation" for site in watch.gang.resolved.sites}
    assert run.watch().run() == 0
    assert "python -m launch iam prints one" in run.noted("ended")[0]["reason"]
    assert ec2.anything() == []


def test_without_quota_a_region_is_left_at_once(ec2, tmp_path):
    run = world(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge", "cluster.max_wait_s=60")
    watch = run.watch()
    ec2.without = {site.subnet: "VcpuLimitExceeded" for site in watch.gang.resolved.sites}
    assert watch.run() == 0
    assert "python -m launch quota" in run.noted("ended")[0]["reason"]
    asked = [each["NetworkInterfaces"][0]["SubnetId"] for each in ec2.requests]
    assert len(set(asked)) == 1


def test_clean_removes_what_machines_leave_and_nothing_else(ec2, tmp_path):
    run, _ = in_training(ec2, tmp_path / "mine", "nodes=2", "instance=trn1.2xlarge")
    client, own = ec2.client(), [{"Key": RUN_TAG, "Value": run_id(run.record)}]
    [subnet] = {each.subnet_id for each in run.machines()}
    zone = run.machines()[0].placement.availability_zone
    other = client.create_volume(Size=1, AvailabilityZone=zone)["VolumeId"]
    for kind, tags in (("volume", own), ("network-interface", own)):
        specification = [{"ResourceType": kind, "Tags": tags}]
        if kind == "volume":
            client.create_volume(Size=1, AvailabilityZone=zone, TagSpecifications=specification)
        else:
            client.create_network_interface(SubnetId=subnet, TagSpecifications=specification)
    kinds = {each.kind for each in clean.left_over(run.api, ["us-east-1"], run_id(run.record))}
    assert kinds == {"instance", "volume", "network-interface", "placement-group", "security-group"}
    assert clean.remove(run.api, ["us-east-1"], run_id(run.record), run) == []
    assert ec2.anything() == [other]


def lose_one_and_end(run: World) -> None:
    """What happens in a run from outside: when all train, a machine is taken away; when all train again, it ends."""
    if run.noted("ended") or len(run.machines()) != 2 or not run.crew:
        return
    if len(run.made()) == 2:
        run.ec2.client().terminate_instances(InstanceIds=[run.crew[1]])
    elif len(run.noted("crew")) >= 2:
        run.record.note("ended", outcome="done", reason="the last step")


def test_clean_waits_for_machines_that_ec2_does_not_show_yet(ec2, tmp_path):
    kill = KillAt()
    vpc = ec2.client().describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.client().create_security_group(GroupName="given", Description="given", VpcId=vpc)["GroupId"]
    allow_itself(kill.api, "us-east-1", group)
    own = ["nodes=2", "instance=trn1.2xlarge", f"cluster.security_group={group}", "cluster.placement_group=false"]
    run = world(ec2, tmp_path / "mine", *own, api=kill.api)
    ec2.hides = 1
    kill.arm(None)
    kill.ends_after = "RunInstances"
    with pytest.raises(Killed):
        run.watch().run()
    kill.arm(None)
    assert len(run.made()) == 2  # and no answer of EC2 has shown them
    assert clean.remove(run.api, ["us-east-1"], run_id(run.record), run) == []
    assert ec2.anything() == [group]


@pytest.mark.parametrize(("then", "hides"), [("clean", 1), ("again", 3)])
def test_killed_between_any_two_calls(ec2, tmp_path, then, hides):
    """The watcher is killed at every moment of a run's whole course, the loss of a machine included, if it would leave
    another state than at the moment before. Then `clean` leaves nothing; or a new watcher goes on to the same end, with
    the same number of machines in all.
    """
    kill = KillAt()
    plain = world(ec2, tmp_path / "plain", "nodes=2", "instance=trn1.2xlarge", api=kill.api)

    def course(moment: int | None) -> World:
        record = Record(str(tmp_path / f"moment_{moment}"), S3Config())
        run = dataclasses.replace(plain, record=record, known=set(), seen=set(), happens=lose_one_and_end)
        ec2.forget()  # the machines of earlier courses
        kill.arm(None)
        run.begin()
        ec2.hides, ec2.hidden = hides, {}
        kill.arm(moment, run.left_behind if moment is None else lambda: None)
        with suppress(Killed):
            run.watch().run()
        return run

    run = course(None)
    passed, moments = kill.passed, kill.moments()
    assert ec2.anything() == [] and len(run.made()) == 3 and len(run.noted("crew")) == 2
    assert len(moments) > 20 and "after-call RunInstances" in [passed[moment] for moment in moments]
    for moment in moments:
        run = course(moment)
        assert kill.passed == passed[: moment + 1]
        kill.arm(None)
        if then == "clean":
            assert clean.remove(run.api, ["us-east-1"], run_id(run.record), run) == []
        elif not run.noted("cleaned"):
            assert run.watch().run() == 0
            assert len(run.made()) == 3, passed[moment]
        assert ec2.anything() == [], passed[moment]
