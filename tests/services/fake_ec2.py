"""EC2 for tests: moto's server, and what it lacks.

moto has no placement groups, starts machines twice for the same ClientToken, lists what it made at once, and always has
capacity. The operations below stand in for that. What a request says of network cards is dropped by moto, so that tests
look at requests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
import botocore.session
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer
from services.process import set_aws

REGION, ACCOUNT = "us-east-1", "123456789012"  # the latter is moto's
ALIVE = ("pending", "running")
BEGAN_S = time.time()
UBUNTU = "ami-785db401"  # an image that moto has
# What botocore reads of each service, a third of a second for EC2, is read once for all sessions of a process.
shared_loader = functools.cache(botocore.session.create_loader)


@dataclass
class FakeEc2:
    endpoint: str
    # subnet: the error that it answers to RunInstances
    without: dict[str, str] = field(default_factory=dict)
    hides_s: float = 0.0  # after which a new machine is listed
    passed_s: float = 0.0  # of a time that does not wait, see `now`
    groups: set[tuple[str, str]] = field(default_factory=set)  # placement groups: region and name
    # request and answer
    tokens: dict[str, tuple[dict[str, Any], Any]] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)  # machine: when it is listed
    requests: list[dict[str, Any]] = field(default_factory=list)  # each RunInstances as it arrived
    clients: dict[str, Any] = field(default_factory=dict)

    def now(self) -> float:
        return BEGAN_S + self.passed_s

    def is_listed(self, ident: str) -> bool:
        return self.hidden.get(ident, 0.0) <= self.now()

    def client(self, service: str = "ec2") -> Any:
        if service not in self.clients:
            self.clients[service] = boto3.client(service, region_name=REGION)
        return self.clients[service]

    def subnets(self, *, are_default: bool = True) -> dict[str, str]:
        """The subnets of the default VPC, or of others, by their zones."""
        wanted = [{"Name": "default-for-az", "Values": [str(are_default).lower()]}]
        seen = self.client().describe_subnets(Filters=wanted)["Subnets"]
        return {each["AvailabilityZone"]: each["SubnetId"] for each in seen}

    def private_subnets(self) -> list[str]:
        """One in each zone of a VPC that is not the default one."""
        if not self.subnets(are_default=False):
            vpc = self.client().create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
            for number, zone in enumerate(self.subnets()):
                self.client().create_subnet(
                    VpcId=vpc, CidrBlock=f"10.9.{4 * number}.0/22", AvailabilityZone=zone
                )
        return [subnet for _, subnet in sorted(self.subnets(are_default=False).items())]

    def machines(self, *states: str) -> list[Any]:
        """Moto's own objects of the machines in one of the states (pending and running), hidden or not, by age."""
        seen = [
            each
            for each in ec2_backends[ACCOUNT][REGION].all_instances()
            if each.state in (states or ALIVE)
        ]
        return sorted(seen, key=lambda each: (each.launch_time, each.ami_launch_index))

    def tags(self, ident: str) -> dict[str, str]:
        """Of a machine. Moto's own answer goes through the tags of all."""
        return ec2_backends[ACCOUNT][REGION].tags.get(ident, {})

    def forget(self) -> None:
        """The machines that have ended, as EC2 does after an hour."""
        backend = ec2_backends[ACCOUNT][REGION]
        for ident, reservation in list(backend.reservations.items()):
            if all(each.state == "terminated" for each in reservation.instances):
                del backend.reservations[ident]
                for each in reservation.instances:
                    backend.tags.pop(each.id, None)

    def anything(self) -> list[str]:
        """All that costs: machines, volumes, tagged interfaces.
        Interfaces that moto makes with machines have no tags, and stay when these end.
        """
        client = self.client()
        left = [each.id for each in self.machines(*ALIVE, "stopping", "stopped")]
        left += [each["VolumeId"] for each in client.describe_volumes()["Volumes"]]
        interfaces = client.describe_network_interfaces()["NetworkInterfaces"]
        return [*left, *(each["NetworkInterfaceId"] for each in interfaces if each.get("TagSet"))]


@functools.cache
def moto_server() -> ThreadedMotoServer:
    """One for the process, until it ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    return server


@contextlib.contextmanager
def fake_ec2(monkeypatch: Any) -> Iterator[FakeEc2]:
    """The server, with nothing in it, and an environment that leads to it and nowhere else."""
    host, port = moto_server().get_host_and_port()
    fake = FakeEc2(f"http://{host}:{port}")
    monkeypatch.setattr(botocore.session, "create_loader", shared_loader)
    set_aws(
        monkeypatch,
        "AKIAEXAMPLE",
        "example",
        AWS_ENDPOINT_URL=fake.endpoint,
        AWS_DEFAULT_REGION=REGION,
    )
    urllib.request.urlopen(
        urllib.request.Request(f"{fake.endpoint}/moto-api/reset", method="POST")
    ).close()
    for stand_in in STAND_INS:
        usual = getattr(EC2Response, stand_in.__name__, None)
        act = lambda self, act=stand_in, usual=usual: act(fake, self, usual)  # noqa: E731
        monkeypatch.setattr(EC2Response, stand_in.__name__, act, raising=False)
    fake.client("iam").create_instance_profile(InstanceProfileName="machine")
    yield fake


def run_instances(fake: FakeEc2, response: Any, usual: Any) -> Any:
    """RunInstances with tokens, errors by subnet, and machines that are not shown at once."""
    given = dict(response._get_params())
    fake.requests.append(given)
    token = given.get("ClientToken", "")
    if token in fake.tokens:
        before, answer = fake.tokens[token]
        if before != given:
            raise EC2ClientError(
                "IdempotentParameterMismatch", "The request has other parameters."
            )
        return answer
    subnet = given["NetworkInterfaces"][0]["SubnetId"] if "NetworkInterfaces" in given else None
    if subnet in fake.without:
        raise EC2ClientError(fake.without[subnet], "We do not have sufficient capacity.")
    group = given.get("Placement", {}).get("GroupName")
    if group is not None and (response.region, group) not in fake.groups:
        raise EC2ClientError(
            "InvalidPlacementGroup.Unknown", f"The placement group {group} is unknown."
        )
    answer = usual(response)
    made = [each.id for each in answer.result.instances]
    if token:
        fake.tokens[token] = given, answer
    fake.hidden |= dict.fromkeys(made, fake.now() + fake.hides_s)
    return answer


def describe_instances(fake: FakeEc2, response: Any, usual: Any) -> Any:
    answer = usual(response)
    for made in answer.result["Reservations"]:
        made.instances = [each for each in made.instances if fake.is_listed(each.id)]
    return answer


def terminate_instances(fake: FakeEc2, response: Any, usual: Any) -> Any:
    """EC2 knows no machine that it does not list."""
    for ident in response._get_params()["InstanceIds"]:
        if not fake.is_listed(ident):
            raise EC2ClientError(
                "InvalidInstanceID.NotFound", f"The instance ID {ident} does not exist."
            )
    return usual(response)


def create_placement_group(fake: FakeEc2, response: Any, usual: Any) -> Any:
    key = response.region, response._get_params()["GroupName"]
    if key in fake.groups:
        raise EC2ClientError(
            "InvalidPlacementGroup.Duplicate", "The placement group is there already."
        )
    fake.groups.add(key)
    return ActionResult({})


STAND_INS = (run_instances, describe_instances, terminate_instances, create_placement_group)
