"""What is asked of EC2, before anything is: network interfaces, requests, policies, and rejections of settings."""

from __future__ import annotations

import copy
import gzip
import json
import re
from importlib import resources

import botocore.session
import pytest
from botocore.validate import ParamValidator
from ec2_launching import OWN, RUN, USER_DATA
from hypothesis import given
from hypothesis import strategies as st
from planning import plan
from running import ROOT
from test_launch_golden import check_golden

from launch.ec2.account import EFA, EFA_ONLY, INTERFACE, Interface, Resolved, Site, layout
from launch.ec2.config import Ec2Config
from launch.ec2.iam import machine_policy, operator_policy
from launch.ec2.request import RUN_TAG, run_id, run_instances
from launch.record import Record
from launch.schedulers import cluster_of
from train.config import InputError, S3Config

TYPES = json.loads(gzip.decompress((resources.files("moto") / "ec2/resources/instance_types.json.gz").read_bytes()))
SITE = Site("us-east-1", "subnet-0123456789abcdef0", "us-east-1b", "vpc-1", "ami-0123456789abcdef0", "/dev/sda1")
FIRST = [Interface(0, 0, INTERFACE)]
APART = [*FIRST, Interface(0, 1, EFA_ONLY)]


def others(last: int, device: int = 0, kind: str = EFA_ONLY) -> list[Interface]:
    return [Interface(card, device, kind) for card in range(1, last + 1)]


@pytest.mark.parametrize(
    ("instance", "expected"),
    [
        ("trn1.2xlarge", FIRST),
        ("trn1.32xlarge", [*APART, *others(7)]),
        ("trn1n.32xlarge", [*APART, *others(15)]),
        ("trn2.48xlarge", [*APART, *others(15)]),
        ("p4d.24xlarge", [*APART, *others(3)]),
        ("p5.48xlarge", [*APART, *others(31)]),
        ("g6e.48xlarge", [*APART, *others(3)]),
        ("g6e.12xlarge", [Interface(0, 0, EFA)]),
        ("hpc6id.32xlarge", [Interface(0, 0, EFA), Interface(1, 0, EFA_ONLY)]),  # a card takes one interface
        ("p6-b300.48xlarge", [*FIRST, *others(16)]),
    ],
)
def test_interfaces_follow_the_cards_of_the_type(instance, expected):
    assert layout(TYPES[instance], Ec2Config(), machines=2) == expected
    assert layout(TYPES[instance], Ec2Config(), machines=1) == FIRST


def test_secondary_interfaces_may_have_addresses():
    cluster = Ec2Config(secondary_interfaces="efa")
    assert layout(TYPES["trn1.32xlarge"], cluster, machines=2) == [Interface(0, 0, EFA), *others(7, 1, EFA)]


def test_efa_is_never_left_out_without_a_word():
    cluster, known = Ec2Config(), TYPES["trn1.32xlarge"]
    # As botocore before 1.43.90 passes EC2's answer on.
    network = copy.deepcopy(known["NetworkInfo"])
    for card in network["NetworkCards"]:
        del card["InterfaceTypes"]
    old = {**known, "NetworkInfo": network}
    with pytest.raises(InputError, match="trn1.32xlarge supports EFA") as rejection:
        layout(old, cluster, machines=2)
    assert str(rejection.value).rpartition(" ")[2] in (ROOT / "pyproject.toml").read_text()
    assert layout(old, cluster, machines=1) == FIRST


cards = st.builds(
    lambda most, types: {"MaximumNetworkInterfaces": most, "InterfaceTypes": types},
    st.integers(1, 5),
    st.sampled_from([["interface"], ["interface", "efa"], ["interface", "efa", "efa-only"]]),
)


@given(st.lists(cards, min_size=1, max_size=20), st.permutations(range(20)), st.integers(0, 20), st.booleans())
def test_as_many_efa_interfaces_as_fit_and_a_first_one_with_an_address(made, numbers, most, uses_efa):
    numbered = [{**card, "NetworkCardIndex": index} for index, card in enumerate(made)]
    network = {"NetworkCards": sorted(numbered, key=lambda card: numbers[card["NetworkCardIndex"]])}
    network["EfaInfo"] = {"MaximumEfaInterfaces": most}
    chosen = layout({"InstanceType": "t", "NetworkInfo": network}, Ec2Config(), machines=1 + uses_efa)
    assert (chosen[0].card, chosen[0].device) == (0, 0) and chosen[0].type != EFA_ONLY
    assert len({(each.card, each.device) for each in chosen}) == len(chosen)
    able = [card["NetworkCardIndex"] for card in numbered if EFA in card["InterfaceTypes"]]
    assert [each.card for each in chosen if each.type != INTERFACE] == able[: most * uses_efa]
    for each in chosen:
        assert each.type in numbered[each.card]["InterfaceTypes"]
        assert each.device < numbered[each.card]["MaximumNetworkInterfaces"]


def request(*own: str, instance: str = "trn1.32xlarge", group: str | None = "sg-1", placement: str | None = "p"):
    _, job = plan([*OWN, f"instance={instance}", "nodes=4", *own], RUN)
    cluster = cluster_of(job)
    assert isinstance(cluster, Ec2Config)
    resolved = Resolved("id", job.id, "", [SITE], layout(TYPES[instance], cluster, job.nodes))
    record = Record(job.run_dir, S3Config(**job.s3))
    made = run_instances(
        job, cluster, record, resolved, SITE, number=7, max_run_s=3600, group=group, placement=placement
    )
    return {**made, "UserData": USER_DATA.decode()}  # which has tests of its own


def errors_of(made: dict) -> str:
    """What botocore's model of RunInstances has against a request."""
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    return str(ParamValidator().validate(made, shape).generate_report())


@pytest.mark.parametrize("instance", ["trn1.32xlarge", "p5.48xlarge", "p4d.24xlarge", "g6e.48xlarge"])
def test_the_request_for_a_type(instance):
    made = request(instance=instance)
    assert errors_of(made) == ""
    text = json.dumps(made, indent=1, sort_keys=True) + "\n"
    text = re.sub("{[^{}]*}", lambda found: re.sub(r"\s+", " ", found[0]), text)  # an interface or a tag is one line
    alike = {"g6e.48xlarge": "p4d.24xlarge"}.get(instance, instance)  # both have four network cards
    check_golden(f"ec2_{alike}.json", text.replace(instance, alike))


@pytest.mark.parametrize(
    ("own", "market", "reservation"),
    [
        ([], None, None),
        (["cluster.market=spot"], "spot", None),
        (["cluster.capacity_reservation=cr-0123456789abcdef0"], None, "cr-0123456789abcdef0"),
        (
            ["cluster.market=capacity-block", "cluster.capacity_reservation=cr-0123456789abcdef0"],
            "capacity-block",
            "cr-0123456789abcdef0",
        ),
    ],
)
def test_every_market_is_a_request_that_botocore_accepts(own, market, reservation):
    made = request(*own)
    assert errors_of(made) == ""
    assert made.get("InstanceMarketOptions", {}).get("MarketType") == market
    target = made.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    assert target.get("CapacityReservationId") == reservation
    if market == "spot":
        options = made["InstanceMarketOptions"]["SpotOptions"]
        assert options == {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        assert "spot-instances-request" in [each["ResourceType"] for each in made["TagSpecifications"]]
    assert not {"SubnetId", "SecurityGroupIds", "KeyName"} & made.keys()
    for specification in made["TagSpecifications"]:
        assert RUN_TAG in [tag["Key"] for tag in specification["Tags"]]


def test_a_single_interface_has_the_address_that_was_asked_for():
    for wanted in (True, False):
        made = request("nodes=1", f"cluster.public_address={wanted}", instance="trn1.2xlarge")
        assert [each["AssociatePublicIpAddress"] for each in made["NetworkInterfaces"]] == [wanted]
    with pytest.raises(InputError, match="one network interface, trn1.32xlarge has 9"):
        request("cluster.public_address=true")


def test_a_run_is_known_by_its_location_alone():
    _, job = plan(OWN, RUN)
    record = Record(job.run_dir, S3Config(**job.s3))
    assert run_id(record) == run_id(Record(f"{record.run_dir}.launch/", S3Config(**job.s3)))


def test_a_machine_may_nothing_of_ec2_and_an_operator_only_what_is_tagged():
    machine = machine_policy(["s3://bucket/runs"], ["s3://data/albert"])
    actions = {action for each in machine["Statement"] for action in each["Action"]}
    assert not [action for action in actions if action.startswith(("ec2:", "iam:"))]
    wide = [each for each in machine["Statement"] if each["Resource"] == ["*"]]
    assert [each["Sid"] for each in wide] == ["Session"]
    operator = operator_policy(["s3://bucket/runs"], ["s3://data/albert"], "machine", "1" * 12)
    by_name = {each["Sid"]: each for each in operator["Statement"]}
    assert by_name["Read0"]["Resource"] == ["arn:aws:s3:::data/albert/*"]  # a launch looks for the data
    assert by_name["Write0"]["Resource"] == ["arn:aws:s3:::bucket/runs/*"]  # not those of bucket/runs-of-others
    assert by_name["Machines"]["Condition"]["StringEquals"] == {"ec2:MetadataHttpTokens": "required"}
    for name in ("Machines", "MadeWithThem", "Groups"):
        assert by_name[name]["Condition"]["Null"] == {f"aws:RequestTag/{RUN_TAG}": "false"}
    assert by_name["EndOnlyOwn"]["Condition"]["Null"] == {f"ec2:ResourceTag/{RUN_TAG}": "false"}
    assert by_name["GiveOneRole"]["Resource"] == [f"arn:aws:iam::{'1' * 12}:role/machine"]
