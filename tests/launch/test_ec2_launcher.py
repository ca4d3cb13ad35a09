"""What a launch on EC2 makes, and what is left of it, from nothing to nothing: against moto's server."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress

import pytest
from botocore.exceptions import ClientError
from ec2_launching import KillAt, Killed, Trial, done, set_up, trial
from services.fake_ec2 import UBUNTU, fake_ec2

from launch.ec2.launcher import Superseded
from train.config import Failure, InputError, Unreachable
from train.run.command import DONE, FAILED, STOPPED


@pytest.fixture
def ec2(monkeypatch):
    with fake_ec2(monkeypatch) as fake:
        set_up()
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
    *full, last = run.launcher().resolved.sites
    ec2.without = {site.subnet: "InsufficientInstanceCapacity" for site in full}
    assert run.launcher().run() == DONE and len(ec2.requests) == len(full) + 1
    assert {each.subnet_id for each in run.made()} == {last.subnet} and len(run.made()) == 2
    assert ec2.anything() == []


@pytest.mark.parametrize(
    ("code", "least", "most", "words"),
    [
        # Of 2 subnets; the pauses grow.
        ("InsufficientInstanceCapacity", 9, 15, "no capacity for .* launch resume"),
        ("VcpuLimitExceeded", 2, 2, "no subnet can provide .* higher quota"),
        ("UnauthorizedOperation", 1, 1, "launch setup makes"),
        ("ExpiredToken", 1, 1, "aws sso login"),
        ("InternalError", 2, 99, "waited 0:05"),
    ],
)
def test_an_error_ends_the_launch_and_stands_in_the_record(
    ec2, begin, monkeypatch, code, least, most, words
):
    monkeypatch.setattr("launch.ec2.launcher.MAX_WAIT_S", 600.0)
    run = begin()
    ec2.without = dict.fromkeys(ec2.subnets().values(), code)
    with pytest.raises((InputError, Failure), match=words):
        run.launcher().run()
    assert least <= len(ec2.requests) <= most and ec2.passed_s < 3000
    ended = run.ended
    assert code in ended.reason and re.search(words, ended.reason)
    tokens = {each["ClientToken"] for each in ec2.requests}
    # Without an answer nobody knows what was made: it is asked again with the same token.
    assert len(tokens) == (1 if code == "InternalError" else len(ec2.requests))
    assert ec2.anything() == []


def test_a_call_whose_answer_is_lost_is_sent_again_and_makes_nothing_twice(ec2, begin):
    run = begin()
    lost = []
    run.happens = lambda _: done(run) if len(ec2.requests) > 1 else None

    def lose(**_) -> None:
        if not lost:
            lost.append(True)
            raise ClientError({"Error": {"Code": "InternalError"}}, "RunInstances")

    run.api.client("us-east-1").meta.events.register("after-call.ec2.RunInstances", lose)
    assert run.launcher().run() == DONE
    assert len(ec2.requests) == 2 and len(run.made()) == 2 and ec2.anything() == []


# ---- interruptions ---------------------------------------------------------------------------------------------------


def once(run: Trial) -> None:
    if run.running() and len(run.made()) == 2:
        run.interrupt()
    elif len(run.made()) > 2:
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
        ([], once, DONE, "the last step", 4),
        ([], cannot_start, FAILED, "the code does not match its checksum", 4),
        ([], always, FAILED, "in a row saved nothing new", 4),
        (["cluster.max_run_s=3600"], late, STOPPED, "cluster.max_run_s", 2),
    ],
)
def test_after_an_interruption_all_machines_are_asked_for_again(
    ec2, begin, own, happens, code, reason, machines
):
    run = begin(*own)
    run.happens = happens
    assert run.launcher().run() == code
    assert reason in run.ended.reason
    assert len(run.made()) == machines and ec2.anything() == []


def test_a_launch_that_another_one_has_followed_makes_and_ends_nothing(ec2, begin):
    run = begin()
    older = run.launcher()
    run.submit()
    with pytest.raises(Superseded):
        older.run()
    assert ec2.requests == [] and run.launcher().run() == DONE


def test_what_does_not_answer_while_machines_train_ends_the_launch_and_not_the_run(
    ec2, begin, monkeypatch, capsys
):
    monkeypatch.setattr("launch.ec2.launcher.MAX_WAIT_S", 60.0)
    run = begin()
    launcher = run.launcher()

    def away(*_) -> None:
        raise Unreachable("S3 is away")

    monkeypatch.setattr(launcher, "look", away)
    run.happens = lambda _: None
    with pytest.raises(Unreachable, match="waited 0:00"):
        launcher.run()
    assert len(run.running()) == 2 and run.ended is None
    assert "launch clean" in capsys.readouterr().out


# ---- nothing is left -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hides_s", [0.0, 280.0])
def test_killed_at_any_moment_a_launch_leaves_no_machine_that_clean_does_not_find(
    ec2, monkeypatch, tmp_path, hides_s
):
    """Killed before and after every call of EC2 that makes something and every file of the record, also where EC2 lists
    machines only after minutes. Whatever it made, `anything` shows at once.
    """
    for name in ("FIRST_S", "MOST_S"):  # few looks
        monkeypatch.setattr(f"launch.ec2.instances.{name}", 300.0)
    kill = KillAt(monkeypatch)
    ec2.hides_s = hides_s
    first = trial(ec2, monkeypatch, tmp_path / "first", api=kill.api)
    first.submit()
    resolved = first.launcher().resolved
    other = ec2.client().run_instances(ImageId=UBUNTU, MinCount=1, MaxCount=1)["Instances"][0]
    others = set(ec2.anything())

    def course(moment: int | None) -> tuple[Trial, list[str]]:
        run = trial(ec2, monkeypatch, tmp_path / f"moment_{moment}", api=kill.api)
        run.submit(dataclasses.replace(resolved, id=f"moment_{moment}"))
        kill.arm(moment)
        with suppress(Killed):
            run.launcher().run()
        passed = kill.passed
        kill.arm(None)
        return run, passed

    _, passed = course(None)
    assert passed.count("after-call RunInstances") == 1 and {*ec2.anything()} == others
    moments = [0, *(index for index, name in enumerate(passed) if name.startswith("after"))]
    assert len(moments) == 7
    for moment in moments:
        run, so_far = course(moment)
        assert so_far == passed[: moment + 1]
        assert run.clean() == [] and {*ec2.anything()} == others, passed[moment]
    assert other["InstanceId"] in others  # without the run's tag


def test_until_it_is_certain_clean_says_what_may_exist(ec2, begin, monkeypatch, capsys):
    run = begin()
    launcher = run.launcher()
    with monkeypatch.context() as patch:
        patch.setattr(launcher.api, "ask", lambda *_, **__: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            launcher.run()
    began_s = ec2.passed_s
    assert run.clean() == [] and 1200 <= ec2.passed_s - began_s < 1400
    assert "EC2 may list a machine until" in capsys.readouterr().out
    assert run.clean() == [] and ec2.passed_s - began_s < 1400
