"""What a launch on EC2 makes, and what is left of it, from nothing to nothing: against moto's server."""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import nullcontext, suppress

import pytest
from botocore.exceptions import ClientError
from ec2_launching import KillAt, Killed, Trial, done, trial
from services.fake_ec2 import fake_ec2

from launch.ec2.api import Api
from launch.ec2.calls import LISTS_S, SIGNED_S, Superseded, read_calls, unlisted
from launch.ec2.launcher import allow_itself
from launch.ec2.request import RUN_TAG, run_id
from train.config import Failure, InputError, Unreachable
from train.run.command import DONE, FAILED, STOPPED


@pytest.fixture
def ec2(monkeypatch):
    with fake_ec2(monkeypatch) as fake:
        yield fake


@pytest.fixture
def begin(ec2, monkeypatch, tmp_path):
    """A launch that has been submitted."""

    def make(*own: str, **changes) -> Trial:
        run = trial(ec2, monkeypatch, tmp_path / "mine", *own, **changes)
        run.submit()
        return run

    return make


def test_without_capacity_in_the_first_subnets_it_takes_the_next(ec2, begin):
    run = begin()
    *full, last = (site.subnet for site in run.launcher().resolved.sites)
    ec2.without = dict.fromkeys(full, "InsufficientInstanceCapacity")
    assert run.launcher().run() == DONE and len(ec2.requests) == len(full) + 1
    request, [together] = ec2.requests[-1], ec2.members.values()
    assert (
        request["MinCount"] == request["MaxCount"] == 2
        and len(request["NetworkInterfaces"][0]["Groups"]) == 1
    )
    assert set(together) == {each.id for each in run.made()} and {
        each.subnet_id for each in run.made()
    } == {last}
    assert ec2.anything() == []


@pytest.mark.parametrize(
    ("code", "least", "most", "words"),
    [
        (
            "InsufficientInstanceCapacity",
            9,
            15,
            "no capacity for .* launch resume",
        ),  # of 2 subnets; the pauses grow
        (
            "VcpuLimitExceeded",
            2,
            2,
            "no subnet can provide .* Service Quotas",
        ),  # each is asked once
        ("UnauthorizedOperation", 1, 1, "launch iam"),
        ("ExpiredToken", 1, 1, "aws sso login"),
        ("InternalError", 2, 99, "cluster.max_wait_s"),
        (
            "InvalidParameterValue",
            1,
            1,
            r"create it \(cluster.instance_profile.*EC2 accepts a new profile only after",
        ),
    ],
)
def test_an_error_ends_the_launch_and_stands_in_the_record(ec2, begin, code, least, most, words):
    run = begin("cluster.max_wait_s=600")
    ec2.without = dict.fromkeys(ec2.subnets().values(), code)
    with pytest.raises((InputError, Failure), match=words):
        run.launcher().run()
    assert least <= len(ec2.requests) <= most and ec2.passed_s < 3000
    assert run.ended is not None
    assert code in run.ended.reason and re.search(words, run.ended.reason)
    # else nobody knows what was made: it is asked again with the same token
    is_answered = code != "InternalError"
    assert len({each["ClientToken"] for each in ec2.requests}) == (
        len(ec2.requests) if is_answered else 1
    )
    assert ec2.anything() == [] or not is_answered


@pytest.mark.parametrize(("market", "cost"), [("on-demand", "$36.00"), ("spot", "$12.00")])
def test_a_launch_that_waits_says_what_it_has_cost_at_the_price_of_its_market(
    begin, capsys, market, cost
):
    def train(run: Trial) -> None:
        """For half an hour, in which one of two machines starts; then the end."""
        if run.running() and not run.record.folder.names("ec2/machines/"):
            run.ec2.passed_s += 1780
            number = run.requests[0].number
            run.record.folder.write(f"ec2/machines/{number:04d}/0000.json", b"{}")
        else:
            done(run)

    run = begin(f"cluster.market={market}")
    run.happens = train
    assert run.launcher().run() == DONE
    assert f"1 of 2 machines have started about {cost} so far" in capsys.readouterr().out


def test_a_call_whose_answer_is_lost_is_sent_again_and_makes_nothing_twice(ec2, begin):
    run, lost = begin(), []

    def lose(**_) -> None:
        if not lost:
            lost.append(True)
            raise ClientError({"Error": {"Code": "InternalError"}}, "RunInstances")

    run.api.session.events.register("after-call.ec2.RunInstances", lose)
    assert run.launcher().run() == DONE
    assert len(ec2.requests) == 2 and len(run.made()) == 2 and ec2.anything() == []


# ---- interruptions ---------------------------------------------------------------------------------------------------


def once(run: Trial) -> None:
    if run.running() and len(run.requests) == 1:
        run.interrupt()
    elif len(run.requests) > 1:
        done(run)


def always(run: Trial) -> None:
    if run.running():
        run.interrupt()


def late(run: Trial) -> None:
    run.ec2.passed_s += 3600 if run.running() else 0
    once(run)


def cannot_start(run: Trial) -> None:
    if run.running():
        reason = b'{"reason": "the code does not match its checksum"}'
        run.record.folder.write(f"ec2/failed/{run.running()[-1].id}.json", reason)
        run.interrupt()


@pytest.mark.parametrize(
    ("own", "happens", "code", "reason", "machines"),
    [
        (["cluster.again=true"], once, DONE, "the last step", 4),
        ([], once, FAILED, "launch resume", 2),
        ([], cannot_start, FAILED, "the code does not match its checksum", 2),
        (
            ["cluster.again=true"],
            always,
            FAILED,
            "in a row saved nothing new",
            4,
        ),  # nothing was saved
        (["cluster.again=true", "cluster.max_run_s=3600"], late, STOPPED, "cluster.max_run_s", 2),
    ],
)
def test_after_an_interruption_all_machines_are_asked_for_again_if_that_is_wanted(
    ec2, begin, own, happens, code, reason, machines
):
    run = begin(*own)
    run.happens = happens
    assert run.launcher().run() == code
    assert run.ended is not None and reason in run.ended.reason
    assert len(run.made()) == machines
    assert ec2.anything() == []


def test_a_launch_that_another_one_has_followed_makes_and_removes_nothing(ec2, begin):
    run = begin()
    older = run.launcher()
    run.submit()
    with pytest.raises(Superseded):
        older.run()
    assert ec2.requests == [] and run.launcher().run() == DONE


def test_what_does_not_answer_while_machines_train_ends_the_launch_and_not_the_run(
    ec2, begin, monkeypatch, capsys
):
    run = begin("cluster.max_wait_s=60")
    launcher = run.launcher()

    def away(*_) -> None:
        raise Unreachable("S3 is away")

    monkeypatch.setattr(launcher, "look", away)
    run.happens = lambda _: None
    with pytest.raises(Unreachable, match="cluster.max_wait_s"):
        launcher.run()
    assert (
        len(run.running()) == 2 and run.ended is None and "launch clean" in capsys.readouterr().out
    )


# ---- nothing is left -------------------------------------------------------------------------------------------------


def test_clean_removes_what_machines_leave_and_nothing_else(ec2, begin):
    run = begin()
    launcher = run.launcher()
    launcher.acquire()
    client, own = ec2.client(), [{"Key": RUN_TAG, "Value": run_id(run.record)}]
    machine = run.running()[0]
    zone = machine.placement.availability_zone
    other = client.create_volume(Size=1, AvailabilityZone=zone)["VolumeId"]
    tagged = [{"ResourceType": "volume", "Tags": own}]
    client.create_volume(Size=1, AvailabilityZone=zone, TagSpecifications=tagged)
    tagged = [{"ResourceType": "network-interface", "Tags": own}]
    client.create_network_interface(SubnetId=machine.subnet_id, TagSpecifications=tagged)
    assert run.clean() == [] and ec2.anything() == [other]


@pytest.mark.parametrize("hides_s", [0.0, 280.0])
def test_killed_at_any_moment_a_launch_leaves_nothing_that_clean_does_not_find(
    ec2, monkeypatch, tmp_path, hides_s
):
    """Killed before and after every call of EC2 that makes something and every file of the record, also where EC2 lists
    machines only after minutes. Whatever it made, `anything` shows at once.
    """
    for name in ("FIRST_S", "MOST_S"):  # few looks
        monkeypatch.setattr(f"launch.ec2.sweep.{name}", 300.0)
    kill, ec2.hides_s = KillAt(monkeypatch), hides_s
    first = trial(ec2, monkeypatch, tmp_path / "first", api=kill.api)
    first.submit()
    resolved = first.launcher().resolved

    def course(moment: int | None) -> tuple[Trial, list[str]]:
        run = trial(ec2, monkeypatch, tmp_path / f"moment_{moment}", api=kill.api)
        run.submit(dataclasses.replace(resolved, id=f"moment_{moment}"))
        ec2.forget()
        kill.arm(moment)
        with suppress(Killed):
            run.launcher().run()
        passed = kill.passed
        kill.arm(None)
        return run, passed

    _, passed = course(None)
    assert ec2.anything() == [] and passed.count("after-call RunInstances") == 1
    monkeypatch.setattr("launch.ec2.calls.is_gone", lambda _: True)
    moments = [0, *(index for index, name in enumerate(passed) if name.startswith("after"))]
    assert len(moments) > 15
    for moment in moments:
        run, so_far = course(moment)
        assert so_far == passed[: moment + 1]
        assert run.clean() == [] and ec2.anything() == [], passed[moment]


@pytest.mark.parametrize("slept", ["before the check", "after the check"])
def test_a_launch_that_slept_makes_nothing_after_clean_has_said_so(ec2, begin, slept):
    """A laptop sleeps before RunInstances is signed, or after it; meanwhile `clean` runs on another computer."""
    run, waited_s = begin(), []

    def sleep(event_name: str, **_) -> None:
        if not waited_s and event_name.endswith("RunInstances"):
            began_s = ec2.passed_s
            assert run.clean() == []
            waited_s.append(ec2.passed_s - began_s)
            if waited_s[0] >= SIGNED_S:  # EC2 rejects what was signed before
                ec2.without = dict.fromkeys(ec2.subnets().values(), "RequestExpired")

    event = "before-call" if slept == "before the check" else "before-send"
    launcher = run.launcher()
    launcher.security_group(launcher.resolved.sites[0])
    run.api.client("us-east-1", tries=1).meta.events.register_last(f"{event}.ec2", sleep)
    with pytest.raises(InputError) if slept == "after the check" else nullcontext():
        launcher.run()
    assert ec2.anything() == [] and run.made() == [] and waited_s[0] >= SIGNED_S + LISTS_S
    assert len(ec2.requests) == (slept == "after the check")


def test_until_it_is_certain_clean_says_what_may_exist(ec2, begin, monkeypatch, capsys):
    run = begin()
    launcher = run.launcher()
    monkeypatch.setattr(launcher.api, "create", lambda *_, **__: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        launcher.run()
    assert [call.answered_unix_s for call in read_calls(run.record)] == [None]
    assert [each.until_unix_s for each in unlisted(run.record, set())] == [math.inf]
    run.submit()  # another launch: the first one sends nothing more
    [left] = unlisted(run.record, set())
    assert left.until_unix_s < math.inf
    monkeypatch.setattr("launch.ec2.sweep.LIMIT_S", 0.0)
    began_s = ec2.passed_s
    assert run.clean() == [] and ec2.passed_s - began_s >= SIGNED_S + LISTS_S
    assert "may exist until" in capsys.readouterr().out
    # it is proven by now
    assert run.clean() == [] and ec2.passed_s - began_s < 2 * (SIGNED_S + LISTS_S)


def test_a_given_group_is_used_and_stays(ec2, begin):
    vpc = ec2.client().describe_vpcs()["Vpcs"][0]["VpcId"]
    group = ec2.client().create_security_group(GroupName="given", Description="given", VpcId=vpc)[
        "GroupId"
    ]
    allow_itself(Api(), "us-east-1", group)
    ec2.groups["us-east-1", "close"] = {"GroupName": "close", "State": "available", "Tags": []}
    run = begin(f"cluster.security_group={group}", "cluster.placement_group=close")
    assert run.launcher().run() == DONE
    assert ec2.requests[0]["Placement"] == {"GroupName": "close"} and set(ec2.anything()) == {
        group,
        "close",
    }
