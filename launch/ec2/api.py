"""Calls to AWS in several regions. Each error becomes one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from botocore.config import Config

from train.config import S3Config, check
from train.storage.aws_errors import NOT_ALLOWED, explained
from train.storage.s3_session import open_service, open_session

CONFIG = Config(
    connect_timeout=10.0,
    read_timeout=60.0,
    retries={"mode": "standard", "total_max_attempts": 4},
)
QUOTA = ("InstanceLimitExceeded", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded")
# Errors after which the subnet is tried again, since it may have capacity later.
LATER = (
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientCapacity",
    "InsufficientAddressCapacity",
    "InsufficientVolumeCapacity",
    "UnfulfillableCapacity",
    "ReservationCapacityExceeded",
)
# Errors after which the subnet is left out.
NEVER = ("InsufficientFreeAddressesInSubnet", "Unsupported", "VolumeLimitExceeded", *QUOTA)
SETUP = "baretrain launch setup makes what a launch needs (docs/ec2.md)"
CURES = {
    **dict.fromkeys(QUOTA, "ask AWS for a higher quota (Service Quotas, Amazon EC2)"),
    **dict.fromkeys(
        NOT_ALLOWED,
        "your policy does not allow it: the one that baretrain launch setup makes does (docs/ec2.md)",
    ),
    "InsufficientFreeAddressesInSubnet": "name a larger subnet (cluster.subnets)",
    "Unsupported": "this zone, or this market, does not have the type: name other subnets (cluster.subnets)",
    "InvalidInstanceType": "the region does not have this type: choose another region (cluster.regions)",
    "InvalidAMIID.NotFound": "image ids differ by region: name one of this region (cluster.image)",
    "ParameterNotFound": "build an image (baretrain ami neuron, or cuda) and promote it (baretrain ami promote), which "
    "makes the parameter (cluster.image); AWS's Deep Learning images lack baretrain",
    "InvalidSubnetID.NotFound": "the region does not have this subnet (cluster.subnets, cluster.regions)",
    **dict.fromkeys(("InvalidGroup.NotFound", "InvalidPlacementGroup.Unknown"), SETUP),
    "InvalidCapacityReservationId.NotFound": "the region does not have this one (cluster.capacity_reservation)",
}


class Api:
    def __init__(self, region: str | None = None) -> None:
        """Open a session. The default region is `region`, or else the profile's."""
        self.session = open_session(S3Config())
        self.default_region = region or self.session.region_name
        self.clients: dict[tuple[str, str], Any] = {}

    def regions(self, named: Sequence[str]) -> list[str]:
        """Return the named regions, or else the default region. Raises InputError if there is none."""
        regions = list(dict.fromkeys(named))
        if not regions and self.default_region:
            regions = [self.default_region]
        check(
            bool(regions),
            "no region is named: set one, such as us-east-1, in the settings or in AWS_DEFAULT_REGION",
        )
        return regions

    def client(self, region: str, service: str = "ec2") -> Any:
        if (service, region) not in self.clients:
            client = open_service(self.session, service, region_name=region, config=CONFIG)
            self.clients[service, region] = client
        return self.clients[service, region]

    def ask(
        self, region: str, operation: str, *, service: str = "ec2", **parameters: Any
    ) -> dict[str, Any]:
        """Call an operation, named as in boto3. Raises the errors of `train.storage.aws_errors.explain`."""
        with explained(f"{region}, {operation}", cures=CURES):
            answer = getattr(self.client(region, service), operation)(**parameters)
        return dict(answer)

    def pages(
        self,
        region: str,
        operation: str,
        key: str,
        *,
        by: Mapping[str, Sequence[str]] | None = None,
        **parameters: Any,
    ) -> list[Any]:
        """Return the items on all pages of an answer of EC2. `by` maps names of filters to their values."""
        filters = [{"Name": name, "Values": [*values]} for name, values in (by or {}).items()]
        with explained(f"{region}, {operation}", cures=CURES):
            client = self.client(region)
            if not client.can_paginate(operation):
                return list(getattr(client, operation)(Filters=filters, **parameters)[key])
            pages = client.get_paginator(operation).paginate(Filters=filters, **parameters)
            return [item for page in pages for item in page[key]]

    def wait(self, region: str, waiter: str, *, service: str, **parameters: Any) -> None:
        """Wait until a resource is ready, or has failed."""
        with explained(f"{region}, {waiter}", cures=CURES):
            self.client(region, service).get_waiter(waiter).wait(**parameters)

    def parameter(self, region: str, name: str) -> str | None:
        """Return the value of an SSM parameter; None if there is none."""
        answer = self.ask(region, "get_parameters", service="ssm", Names=[name])
        found = answer["Parameters"]
        if found:
            return str(found[0]["Value"])
        return None

    def instance_type(self, region: str, name: str) -> dict[str, Any]:
        """Return EC2's description of an instance type. Raises InputError if the region does not have it."""
        answer = self.ask(region, "describe_instance_types", InstanceTypes=[name])
        return dict(answer["InstanceTypes"][0])

    def image(self, region: str, ident: str) -> dict[str, Any]:
        """Return EC2's description of an image. Raises InputError if there is none."""
        answer = self.ask(region, "describe_images", ImageIds=[ident], IncludeDeprecated=True)
        check(
            bool(answer["Images"]),
            f"there is no image {ident} in {region}, or it belongs to another account",
        )
        return dict(answer["Images"][0])


def growing(first_s: float, most_s: float) -> Iterator[float]:
    """Yield pauses forever, each twice as long as the previous one, up to `most_s`."""
    while True:
        yield first_s
        first_s = min(2 * first_s, most_s)
