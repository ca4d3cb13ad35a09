"""EC2 for tests: moto's server, and what it lacks.

moto has no placement groups, capacity reservations and quotas, starts machines twice for the same ClientToken, lists
what it made at once, and always has capacity. The operations below stand in for that. What a request says of network
cards is dropped by moto, so that tests look at requests.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
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
from moto.servicequotas.responses import ServiceQuotasResponse

REGION, ACCOUNT = "us-east-1", "123456789012"  # the latter is moto's
ALIVE = ("pending", "running")
BEGAN_S = time.time()
UBUNTU = "ami-785db401"  # an image that moto has
# What botocore reads of each service, a third of a second for EC2, is read once for all sessions of a process.
shared_loader = functools.cache(botocore.session.create_loader)


@dataclass
class FakeEc2:
    endpoint: str
    without: dict[str, str] = field(default_factory=dict)  # subnet: the error that it answers to RunInstances
    hides_s: float = 0.0  # after which a new machine is listed
    passed_s: float = 0.0  # of a time that does not wait, see `now`
    groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # placement groups, by region and name
    reservations: list[dict[str, Any]] = field(default_factory=list)
    quotas: list[dict[str, Any]] = field(default_factory=list)
    dry_run_error: str = ""  # an error
    tokens: dict[str, tuple[dict[str, Any], Any]] = field(default_factory=dict)  # request and answer
    hidden: dict[str, float] = field(default_factory=dict)  # machine: when it is listed
    requests: list[dict[str, Any]] = field(default_factory=list)  # each RunInstances as it arrived
    clients: dict[tuple[str, str], Any] = field(default_factory=dict)
    members: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # machines of each placement group

    def now(self) -> float:
        return BEGAN_S + self.passed_s

    def client(self, service: str = "ec2", region: str = REGION) -> Any:
        """One for each region."""
        if (service, region) not in self.clients:
            self.clients[service, region] = boto3.client(service, region_name=region)
        return self.clients[service, region]

    def subnets(self, region: str = REGION) -> dict[str, str]:
        """The default VPC's subnets by their zones."""
        wanted = [{"Name": "default-for-az", "Values": ["true"]}]
        seen = self.client(region=region).describe_subnets(Filters=wanted)["Subnets"]
        return {each["AvailabilityZone"]: each["SubnetId"] for each in seen}

    def private_subnets(self) -> list[str]:
        """Of the first region, one in each zone of a VPC that is not the default one."""
        client = self.client()
        there = client.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["false"]}])["Subnets"]
        if not there:
            vpc = client.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
            for number, zone in enumerate(self.subnets()):
                client.create_subnet(VpcId=vpc, CidrBlock=f"10.9.{4 * number}.0/22", AvailabilityZone=zone)
            return self.private_subnets()
        return [each["SubnetId"] for each in sorted(there, key=lambda each: each["AvailabilityZone"])]

    def machines(self, *states: str, region: str = REGION) -> list[Any]:
        """Moto's own objects of the machines in one of the states (pending and running), hidden or not, by age."""
        seen = [each for each in ec2_backends[ACCOUNT][region].all_instances() if each.state in (states or ALIVE)]
        return sorted(seen, key=lambda each: (each.launch_time, each.ami_launch_index))

    def tags(self, ident: str, region: str = REGION) -> dict[str, str]:
        """Of a machine. Moto's own answer goes through the tags of all."""
        return ec2_backends[ACCOUNT][region].tags.get(ident, {})

    def forget(self, region: str = REGION) -> None:
        """The machines that have ended, as EC2 does after an hour."""
        backend = ec2_backends[ACCOUNT][region]
        for ident, reservation in list(backend.reservations.items()):
            if all(each.state == "terminated" for each in reservation.instances):
                del backend.reservations[ident]
                for each in reservation.instances:
                    backend.tags.pop(each.id, None)

    def anything(self, region: str = REGION) -> list[str]:
        """All that costs or stays: machines, volumes, tagged interfaces, groups other than the default VPC's own.
        Interfaces that moto makes with machines have no tags, and stay when these end.
        """
        client = self.client(region=region)
        left = [each.id for each in self.machines(*ALIVE, "stopping", "stopped", region=region)]
        left += [each["VolumeId"] for each in client.describe_volumes()["Volumes"]]
        interfaces = client.describe_network_interfaces()["NetworkInterfaces"]
        left += [each["NetworkInterfaceId"] for each in interfaces if each.get("TagSet")]
        groups = client.describe_security_groups()["SecurityGroups"]
        left += [each["GroupId"] for each in groups if each["GroupName"] != "default"]
        return [*left, *(name for where, name in self.groups if where == region)]


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
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": fake.endpoint,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "example",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_DEFAULT_REGION": REGION,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{fake.endpoint}/moto-api/reset", method="POST")).close()
    run, describe = EC2Response.run_instances, EC2Response.describe_instances
    terminate = EC2Response.terminate_instances
    volumes = EC2Response.describe_volumes
    stand_ins = {
        "run_instances": lambda self: run_instances(fake, self, run),
        "describe_instances": lambda self: describe_instances(fake, self, describe),
        "terminate_instances": lambda self: terminate_instances(fake, self, terminate),
        "describe_volumes": lambda self: describe_volumes(fake, self, volumes),
        "create_placement_group": lambda self: create_placement_group(fake, self),
        "describe_placement_groups": lambda self: describe_placement_groups(fake, self),
        "delete_placement_group": lambda self: delete_placement_group(fake, self),
        "describe_capacity_reservations": lambda self: ActionResult({"CapacityReservations": fake.reservations}),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(EC2Response, name, stand_in, raising=False)
    quotas = lambda self: ActionResult({"Quotas": fake.quotas})  # noqa: E731
    monkeypatch.setattr(ServiceQuotasResponse, "list_service_quotas", quotas, raising=False)
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
            raise EC2ClientError("IdempotentParameterMismatch", "The request has other parameters.")
        return answer
    subnet = given["NetworkInterfaces"][0]["SubnetId"] if "NetworkInterfaces" in given else None
    if given.get("DryRun") and fake.dry_run_error:
        raise EC2ClientError(fake.dry_run_error, "You are not authorized to perform this operation.")
    if not given.get("DryRun") and subnet in fake.without:
        raise EC2ClientError(fake.without[subnet], "We currently do not have sufficient capacity.")
    group = given.get("Placement", {}).get("GroupName")
    if group is not None and (response.region, group) not in fake.groups:
        raise EC2ClientError("InvalidPlacementGroup.Unknown", f"The placement group {group} is unknown.")
    answer = usual(response)
    if token:
        fake.tokens[token] = given, answer
    if group is not None:
        fake.members.setdefault((response.region, group), []).extend(each.id for each in answer.result.instances)
    fake.hidden |= {each.id: fake.now() + fake.hides_s for each in answer.result.instances}
    return answer


def describe_instances(fake: FakeEc2, response: Any, usual: Any) -> Any:
    answer = usual(response)
    for made in answer.result["Reservations"]:
        made.instances = [each for each in made.instances if fake.hidden.get(each.id, 0) <= fake.now()]
    return answer


def terminate_instances(fake: FakeEc2, response: Any, usual: Any) -> Any:
    """EC2 knows no machine that it does not list."""
    hidden = [each for each in response._get_params()["InstanceIds"] if fake.hidden.get(each, 0) > fake.now()]
    if hidden:
        raise EC2ClientError("InvalidInstanceID.NotFound", f"The instance ID {hidden[0]} does not exist.")
    return usual(response)


def describe_volumes(fake: FakeEc2, response: Any, usual: Any) -> Any:
    """A volume is listed with its machine."""
    answer = usual(response)
    hidden = {ident for ident, at in fake.hidden.items() if at > fake.now()}
    volumes = answer.result["Volumes"]
    answer.result["Volumes"] = [
        each for each in volumes if not each.attachment or each.attachment.instance_id not in hidden
    ]
    return answer


def create_placement_group(fake: FakeEc2, response: Any) -> Any:
    given = response._get_params()
    key = response.region, given["GroupName"]
    if key in fake.groups:
        raise EC2ClientError("InvalidPlacementGroup.Duplicate", "The placement group is there already.")
    tags = given["TagSpecifications"][0]["Tags"]
    fake.groups[key] = {
        "GroupName": given["GroupName"],
        "State": "available",
        "Strategy": given["Strategy"],
        "Tags": tags,
    }
    return ActionResult({"PlacementGroup": fake.groups[key]})


def describe_placement_groups(fake: FakeEc2, response: Any) -> Any:
    wanted = {each["Name"]: each["Values"] for each in response._get_params().get("Filters", ())}
    seen = [group for (region, _), group in fake.groups.items() if region == response.region]
    for name, values in wanted.items():
        if name in ("group-name", "state"):
            key = {"group-name": "GroupName", "state": "State"}[name]
            seen = [each for each in seen if each[key] in values]
        else:
            key = name.removeprefix("tag:")
            seen = [each for each in seen if {tag["Key"]: tag["Value"] for tag in each["Tags"]}.get(key) in values]
    return ActionResult({"PlacementGroups": seen})


def delete_placement_group(fake: FakeEc2, response: Any) -> Any:
    name = response._get_params()["GroupName"]
    members = fake.members.get((response.region, name), [])
    if any(response.ec2_backend.get_instance(ident).state not in ("terminated",) for ident in members):
        raise EC2ClientError("InvalidPlacementGroup.InUse", f"The placement group {name} is in use.")
    if fake.groups.pop((response.region, name), None) is None:
        raise EC2ClientError("InvalidPlacementGroup.Unknown", f"The placement group {name} is unknown.")
    return ActionResult({})
