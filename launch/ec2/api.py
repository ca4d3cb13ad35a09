"""Calls to AWS in several regions. Each error becomes one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from botocore.config import Config
from botocore.exceptions import ClientError

from train.config import S3Config, check
from train.storage.aws_errors import NOT_ALLOWED, explained
from train.storage.s3_session import open_service, open_session

TRIES, CONNECT_S, READ_S = 6, 10.0, 60.0
QUOTA = ("InstanceLimitExceeded", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded")
LATER = (  # errors after which the subnet is tried again, since it may have capacity later
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientCapacity",
    "InsufficientAddressCapacity",
    "InsufficientVolumeCapacity",
    "UnfulfillableCapacity",
    "ReservationCapacityExceeded",
)
# skip the subnet
NEVER = (
    "InsufficientFreeAddressesInSubnet",
    "Unsupported",
    "VolumeLimitExceeded",
    *QUOTA,
)
# EC2 does not know the profile, or not yet
NO_PROFILE = "InvalidParameterValue (instance profile)"
CURES = {
    **dict.fromkeys(QUOTA, "Service Quotas in the console shows the quota, and takes requests"),
    **dict.fromkeys(
        NOT_ALLOWED,
        "your user's or role's policy does not allow it: baretrain launch iam prints one that does (docs/ec2.md)",
    ),
    "InsufficientFreeAddressesInSubnet": "name a larger subnet (cluster.subnets)",
    "Unsupported": "this zone, or this market, does not have the type: name other subnets (cluster.subnets)",
    "InvalidInstanceType": "the region does not have this type: choose another region (cluster.regions)",
    "InvalidAMIID.NotFound": "image ids differ by region: name one of this region (cluster.image; baretrain ami list)",
    "ParameterNotFound": "build an image (baretrain ami neuron, or cuda) and promote it (baretrain ami promote), which "
    "makes the parameter (cluster.image); AWS's Deep Learning images lack baretrain",
    "InvalidSubnetID.NotFound": "the region does not have this subnet (cluster.subnets, cluster.regions)",
    "InvalidGroup.NotFound": "the region does not have this security group (cluster.security_group)",
    "InvalidCapacityReservationId.NotFound": "the region does not have this one (cluster.capacity_reservation)",
    "InvalidIamInstanceProfileName.NotFound": "create it (baretrain launch iam prints its policy)",
    NO_PROFILE: "create it (cluster.instance_profile; baretrain launch iam prints its policy); EC2 accepts a new "
    "profile only after some seconds",
}


class Api:
    def __init__(self, profile: str | None = None, region: str | None = None) -> None:
        """Open a session. The default region is `region`, or else the profile's."""
        self.session = open_session(S3Config(profile=profile))
        self.default_region = region or self.session.region_name
        self.clients: dict[tuple[str, str, int], Any] = {}
        # raises an error if no resource may be made any more
        self.before_create: Callable[[], None] = lambda: None

    def regions(self, named: Sequence[str]) -> list[str]:
        """Return the named regions, or else the default region. Raises InputError if there is none."""
        regions = list(dict.fromkeys(named)) or (
            [self.default_region] if self.default_region else []
        )
        check(
            bool(regions),
            "no region is named: set one, such as us-east-1, in the settings or in AWS_DEFAULT_REGION",
        )
        return regions

    def client(self, region: str, service: str = "ec2", *, tries: int = TRIES) -> Any:
        if (service, region, tries) not in self.clients:
            retries = {"mode": "standard", "total_max_attempts": tries}
            config = Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries=retries)
            client = open_service(self.session, service, region_name=region, config=config)
            self.clients[service, region, tries] = client
            if tries == 1:
                client.meta.events.register("before-send.ec2", lambda **_: self.before_create())
        return self.clients[service, region, tries]

    def ask(
        self,
        region: str,
        operation: str,
        *,
        service: str = "ec2",
        tries: int = TRIES,
        **parameters: Any,
    ) -> dict[str, Any]:
        """Call an operation, named as in boto3. Raises the errors of `train.storage.aws_errors.explain`."""
        with explained(f"{region}, {operation}", cures=CURES):
            try:
                answer: dict[str, Any] = getattr(
                    self.client(region, service, tries=tries), operation
                )(**parameters)
            except ClientError as error:
                said = error.response.get("Error", {})
                if said.get(
                    "Code"
                ) == "InvalidParameterValue" and "iamInstanceProfile" in said.get("Message", ""):
                    said["Code"] = NO_PROFILE
                raise
        return answer

    def create(self, region: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Call an operation that makes a resource, without retries: boto3 would retry even if capacity is lacking.

        `before_create` is called once the request is signed. If it raises an error, the request is not sent.
        """
        return self.ask(region, operation, tries=1, **parameters)

    def instance_type(self, region: str, name: str) -> dict[str, Any]:
        """Return EC2's description of an instance type. Raises InputError if the region does not have it."""
        return dict(
            self.ask(region, "describe_instance_types", InstanceTypes=[name])["InstanceTypes"][0]
        )

    def image(self, region: str, ident: str) -> dict[str, Any]:
        """Return EC2's description of an image. Raises InputError if there is none."""
        seen = self.ask(region, "describe_images", ImageIds=[ident], IncludeDeprecated=True)[
            "Images"
        ]
        check(
            bool(seen), f"there is no image {ident} in {region}, or it belongs to another account"
        )
        return dict(seen[0])

    def pages(
        self,
        region: str,
        operation: str,
        key: str,
        *,
        by: Mapping[str, Sequence[str]] | None = None,
        service: str = "ec2",
        **parameters: Any,
    ) -> list[Any]:
        """Return the items on all pages of an operation's answer. `by` maps names of filters to their values."""
        if by is not None:
            parameters["Filters"] = [
                {"Name": name, "Values": [*values]} for name, values in by.items()
            ]
        with explained(f"{region}, {operation}", cures=CURES):
            client = self.client(region, service)
            is_paged = client.can_paginate(operation)
            ask = (
                client.get_paginator(operation).paginate
                if is_paged
                else getattr(client, operation)
            )
            pages = ask(**parameters) if is_paged else [ask(**parameters)]
            return [item for page in pages for item in page.get(key, ())]


def growing(first_s: float, most_s: float) -> Iterator[float]:
    """Yield pauses forever, each twice as long as the previous one, up to `most_s`."""
    while True:
        yield first_s
        first_s = min(2 * first_s, most_s)
