"""What is asked of EC2, before anything is: network interfaces, requests, user data."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
import os
import re
from importlib import resources

import botocore.session
import pytest
from botocore.validate import ParamValidator
from ec2_launching import RUN, USER_DATA, with_own
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import plan
from running import ROOT

from launch.ec2.account import EFA, EFA_ONLY, INTERFACE, Interface, Resolved, Site, layout
from launch.ec2.config import Ec2Config
from launch.ec2.request import MOST_BYTES, SCRIPT, run_instances, user_data
from launch.record import Job, Record
from launch.schedulers import cluster_of
from train.config import InputError, S3Config

TYPES = json.loads(
    gzip.decompress(
        (resources.files("moto") / "ec2/resources/instance_types.json.gz").read_bytes()
    )
)
SITE = Site(
    region="us-east-1",
    subnet="subnet-0123456789abcdef0",
    zone="us-east-1b",
    image="ami-0123456789abcdef0",
    root_device="/dev/sda1",
    security_group="sg-1",
    profile="machine",
    placement_group="p",
)
GOLDEN = ROOT / "tests/golden/launch/ec2_request.json"
FIRST = [Interface(0, 0, INTERFACE)]
APART = [*FIRST, Interface(0, 1, EFA_ONLY)]


def others(last: int, device: int = 0, kind: str = EFA_ONLY) -> list[Interface]:
    return [Interface(card, device, kind) for card in range(1, last + 1)]


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        ("trn1.2xlarge", FIRST),
        ("trn1.32xlarge", [*APART, *others(7)]),
        ("trn2.48xlarge", [*APART, *others(15)]),
        ("p5.48xlarge", [*APART, *others(31)]),
        ("g6e.48xlarge", [*APART, *others(3)]),
        ("g6e.12xlarge", [Interface(0, 0, EFA)]),
        (
            "hpc6id.32xlarge",
            [Interface(0, 0, EFA), Interface(1, 0, EFA_ONLY)],
        ),  # a card takes one interface
        ("p6-b300.48xlarge", [*FIRST, *others(16)]),
    ],
)
def test_interfaces_follow_the_cards_of_the_type(instance, expected):
    network = TYPES[instance]["NetworkInfo"]
    shuffled = {
        **TYPES[instance],
        "NetworkInfo": {**network, "NetworkCards": network["NetworkCards"][::-1]},
    }
    for info in (TYPES[instance], shuffled):
        assert layout(info, machines=2) == expected
        assert layout(info, machines=1) == FIRST


@functools.cache
def job_of(*own: str) -> Job:
    return plan(with_own(*own), RUN)[1]


def request(*own: str, instance: str = "trn1.32xlarge"):
    job = job_of(f"instance={instance}", "nodes=4", *own)
    cluster = cluster_of(job, Ec2Config)
    record = Record(job.run_dir, S3Config(**job.s3))
    interfaces = layout(TYPES[instance], job.nodes)
    resolved = Resolved("id", job.sha256, [SITE], interfaces)
    numbers = {"request": 7, "ask": 1, "max_run_s": 3600}
    made = run_instances(job, cluster, record, resolved, SITE, **numbers)
    return {**made, "UserData": USER_DATA.decode()}  # which has tests of its own


def errors_of(made: dict) -> str:
    """What botocore's model of RunInstances has against a request."""
    shape = (
        botocore.session.get_session()
        .get_service_model("ec2")
        .operation_model("RunInstances")
        .input_shape
    )
    return str(ParamValidator().validate(made, shape).generate_report())


def test_the_request_is_what_it_was():
    made = request()
    assert errors_of(made) == ""
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    # an interface or a tag is one line
    text = re.sub("{[^{}]*}", lambda found: re.sub(r"\s+", " ", found[0]), text)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text, "if that is meant, run this test with GOLDEN=write"


@pytest.mark.parametrize(
    ("instance", "market", "reservation"),
    [
        ("g6e.48xlarge", "spot", None),
        ("p4d.24xlarge", None, "cr-1"),
        ("p5.48xlarge", "capacity-block", "cr-1"),
    ],
)
def test_every_market_is_a_request_that_botocore_accepts(instance, market, reservation):
    own = {"cluster.market": market, "cluster.capacity_reservation": reservation}
    made = request(*(f"{key}={value}" for key, value in own.items() if value), instance=instance)
    assert errors_of(made) == "" and made["InstanceType"] == instance
    assert made.get("InstanceMarketOptions", {}).get("MarketType") == market
    target = made.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    assert target.get("CapacityReservationId") == reservation
    kinds = [each["ResourceType"] for each in made["TagSpecifications"]]
    assert ("spot-instances-request" in kinds) == (market == "spot")


# ---- user data: a fixed script and one line, whatever the run is called ----------------------------------------------


def line_of(run_dir: str, s3: S3Config, python: str) -> str:
    content = user_data(
        dataclasses.replace(job_of(), python=python),
        Record(run_dir, s3, "0" * 64),
        request=3,
        max_run_s=86400,
    )
    assert content.startswith(SCRIPT.read_bytes()) and len(content) <= MOST_BYTES
    return content.removeprefix(SCRIPT.read_bytes()).decode()


NASTY = st.sampled_from([*"'\"\\;&|*? #!=\u00e9\u2028", "`id`", "$(touch /tmp/x)", "${HOME}"])


@settings(max_examples=12, deadline=None)
@given(st.lists(st.one_of(NASTY, st.text(max_size=5)), min_size=1).map("".join), st.booleans())
def test_no_name_comes_into_a_shell(name: str, is_python: bool):
    python = f"/opt/{name}/python" if is_python else "/opt/python"
    run_dir = "s3://bucket/runs/mine" if is_python else f"s3://bucket/a{name}/mine"
    s3 = S3Config(endpoint="http://10.0.0.1:9000")
    try:
        line = line_of(run_dir, s3, python)
    except (InputError, UnicodeEncodeError):
        assert is_python or not name.isprintable()
        return
    match = re.fullmatch(r"main 88200 1800 ([A-Za-z0-9_./+-]+) ([A-Za-z0-9+/]+=*)\n", line)
    assert match and match[1] == python
    words = [
        "launch.ec2.machine",
        run_dir,
        "--request=3",
        "--max-run-s=86400",
        *s3.flags(),
        f"--job-sha256={'0' * 64}",
    ]
    assert json.loads(base64.b64decode(match[2]))["arguments"] == words
