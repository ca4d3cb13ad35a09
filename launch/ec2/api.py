"""Calls of AWS, in several regions, and what their errors mean: each is one line with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)

from train.config import InputError, S3Config, Unreachable
from train.storage.s3 import one_line, open_session

TRIES, CONNECT_S, READ_S = 6, 10.0, 60.0
SUBNET, REGION = "subnet", "region"  # where else the same request may succeed

# Each of these ends the use of a subnet, or of a whole region, for now.
NO_CAPACITY = {
    "InsufficientInstanceCapacity": SUBNET,
    "InsufficientHostCapacity": SUBNET,
    "InsufficientReservedInstanceCapacity": SUBNET,
    "InsufficientCapacity": SUBNET,
    "InsufficientAddressCapacity": SUBNET,
    "UnfulfillableCapacity": SUBNET,
    "SpotMaxPriceTooLow": SUBNET,
    "ReservationCapacityExceeded": SUBNET,
    "InsufficientFreeAddressesInSubnet": SUBNET,
    "Unsupported": SUBNET,
    "InsufficientVolumeCapacity": SUBNET,
    "InstanceLimitExceeded": REGION,
    "VcpuLimitExceeded": REGION,
    "MaxSpotInstanceCountExceeded": REGION,
    "MaxSpotFleetRequestCountExceeded": REGION,
    "VolumeLimitExceeded": REGION,
}
RENEW = "renew them (aws sso login, or aws configure)"
UNKNOWN = "AWS does not know these credentials: aws sts get-caller-identity shows whose they are"
CREDENTIALS = {
    "ExpiredToken": f"the credentials have expired: {RENEW}",
    "ExpiredTokenException": f"the credentials have expired: {RENEW}",
    "RequestExpired": "the credentials have expired, or this machine's clock is wrong (chrony)",
    "AuthFailure": UNKNOWN,
    "InvalidClientTokenId": UNKNOWN,
    "UnrecognizedClientException": UNKNOWN,
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: aws configure",
}
NO_PERMISSION = "the policy of your user or role lacks it: python -m launch iam prints one that is enough"
CURES = {
    "InstanceLimitExceeded": "python -m launch quota says what to ask for",
    "VcpuLimitExceeded": "python -m launch quota says what to ask for",
    "MaxSpotInstanceCountExceeded": "python -m launch quota says what to ask for",
    "InsufficientFreeAddressesInSubnet": "name a larger subnet (cluster.subnets), or keep "
    "cluster.secondary_interfaces=efa-only: one address a machine",
    "Unsupported": "this zone, or this market, does not have the type: name other subnets (cluster.subnets)",
    "UnauthorizedOperation": NO_PERMISSION,
    "AccessDenied": NO_PERMISSION,
    "AccessDeniedException": NO_PERMISSION,
    "IdempotentParameterMismatch": "another request had the same token: python -m launch clean RUN, then launch again",
    "InvalidParameterCombination": "these settings exclude one another; a public address is for one interface only",
    "InvalidParameterValue": "a setting of cluster= has a value that EC2 does not take",
    "InvalidInstanceType": "the region does not have this type: choose another region (cluster.regions)",
    "InvalidAMIID.NotFound": "the region does not have this image: images are of one region (cluster.image)",
    "InvalidAMIID.Malformed": "cluster.image must be an id such as ami-0123456789abcdef0, or a parameter of SSM",
    "InvalidSubnetID.NotFound": "the region does not have this subnet (cluster.subnets, cluster.regions)",
    "InvalidGroup.NotFound": "the region does not have this security group (cluster.security_group)",
    "InvalidCapacityReservationId.NotFound": "the region does not have it (cluster.capacity_reservation)",
    "InvalidIamInstanceProfileName.NotFound": "create it (python -m launch iam prints its policy)",
    "OptInRequired": "the account has not been enabled for it: enable the region, or the service, in the console",
    "Blocked": "the account is blocked: ask AWS's support",
    "PendingVerification": "AWS still verifies the account: try in some minutes",
}
TEMPORARY = {"RequestLimitExceeded", "Throttling", "ThrottlingException", "InternalError", "InternalFailure"}
TEMPORARY |= {"Unavailable", "ServiceUnavailable", "InternalServerError", "RequestTimeout", "BandwidthLimitExceeded"}


class Refused(InputError):
    """An answer of AWS that says no."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class NoCapacity(Refused):
    """There are no such machines in a subnet, or in a region (`scope`), now or for this account."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)
        self.scope = NO_CAPACITY[code]


class BadCredentials(InputError):
    """Nothing can be asked: it says nothing about what was asked for."""


class Api:
    def __init__(self, profile: str | None = None, region: str | None = None) -> None:
        """`region`: the default one, if neither settings nor the profile name one."""
        self.session = open_session(S3Config(profile=profile))
        self.default_region = region or self.session.region_name
        self.clients: dict[tuple[str, str], Any] = {}

    def client(self, region: str, service: str = "ec2") -> Any:
        if (service, region) not in self.clients:
            config = Config(
                connect_timeout=CONNECT_S,
                read_timeout=READ_S,
                retries={"mode": "standard", "total_max_attempts": TRIES},
            )
            self.clients[service, region] = self.session.client(service, region_name=region, config=config)
        return self.clients[service, region]

    def ask(self, region: str, operation: str, *, service: str = "ec2", **parameters: Any) -> dict[str, Any]:
        """Call an operation, named as boto3 does. Refused, BadCredentials or Unreachable instead of boto3's errors."""
        with explained(region, operation):
            answer: dict[str, Any] = getattr(self.client(region, service), operation)(**parameters)
        return answer

    def pages(self, region: str, operation: str, key: str, *, service: str = "ec2", **parameters: Any) -> list[Any]:
        """All items of an operation that answers page by page."""
        with explained(region, operation):
            pages = self.client(region, service).get_paginator(operation).paginate(**parameters)
            return [item for page in pages for item in page.get(key, ())]

    def dry_run(self, region: str, operation: str, **parameters: Any) -> None:
        """Ask whether EC2 would do it: success is an error too. It does not say whether there is capacity."""
        try:
            self.ask(region, operation, DryRun=True, **parameters)
        except Refused as error:
            if error.code != "DryRunOperation":
                raise


@contextmanager
def explained(region: str, operation: str) -> Iterator[None]:
    """Raise errors of boto3 as one line each."""
    where = f"AWS, {region}, {operation}"
    try:
        yield
    except ClientError as error:
        raise explain(error, where) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise BadCredentials(
            f"{where}: no AWS credentials on this machine: aws configure, or set AWS_PROFILE"
        ) from error
    except (CredentialRetrievalError, SSOError, TokenRetrievalError) as error:
        raise BadCredentials(
            f"{where}: the credentials cannot be renewed ({one_line(error)}): aws sso login"
        ) from error
    except NoRegionError as error:
        raise InputError("no region is named: set cluster.regions, or AWS_DEFAULT_REGION") from error
    except EndpointConnectionError as error:
        raise Unreachable(f"{where}: {one_line(error)} (does the region exist?)") from error
    except (ConnectionError, HTTPClientError) as error:
        raise Unreachable(f"{where}: no answer: {one_line(error)}") from error
    except BotoCoreError as error:
        raise InputError(f"{where}: {one_line(error)}") from error


def explain(error: ClientError, where: str) -> Exception:
    details, answer = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    code, text = (
        str(details.get("Code", "")),
        one_line(details.get("Message", "")).split(" Encoded authorization failure")[0][:500],
    )
    if code in CREDENTIALS:
        return BadCredentials(f"{where}: {code}: {CREDENTIALS[code]}")
    if code in TEMPORARY or (int(answer.get("HTTPStatusCode", 0)) >= 500 and code not in NO_CAPACITY):
        return Unreachable(f"{where}: {code}: {text}")
    if not text.endswith((".", ")")):
        text += "."
    cure = f" {CURES[code]}" if code in CURES else ""
    line = f"{where}: {code}: {text}{cure}"
    return NoCapacity(line, code) if code in NO_CAPACITY else Refused(line, code)
