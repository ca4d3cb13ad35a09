"""boto3's clients of a region, and its errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from train.config import Failure, InputError, Unreachable

ATTEMPTS, TIMEOUT_S = 5, 20
CREDENTIALS = "give credentials as AWS's tools take them (aws configure, aws sso login, AWS_PROFILE, a role)"
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
UNKNOWN = ("AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch")
REFUSED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
LIMITED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "InternalError", "ServiceUnavailable")


class Account:
    """The clients of one set of credentials."""

    def __init__(self, profile: str | None = None) -> None:
        try:
            self.session = boto3.Session(profile_name=profile)
        except ProfileNotFound as error:
            raise InputError(f"profile {profile} is not in ~/.aws; aws configure list-profiles shows them") from error

    def has_credentials(self) -> bool:
        with aws_errors("credentials"):
            return self.session.get_credentials() is not None

    def region(self) -> str:
        """The one that the profile or the environment names."""
        region = self.session.region_name
        if region is None:
            raise InputError("no region is known: give regions=[us-east-1], --region us-east-1 or AWS_DEFAULT_REGION")
        return str(region)

    def client(self, service: str, region: str) -> Any:
        retries = {"mode": "standard", "total_max_attempts": ATTEMPTS}
        config = Config(retries=retries, connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S)
        with aws_errors(f"{service} in {region}"):
            return self.session.client(service, region_name=region, config=config)

    def ec2(self, region: str) -> Any:
        return self.client("ec2", region)

    def ssm(self, region: str) -> Any:
        return self.client("ssm", region)


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def aws_errors(what: str) -> Iterator[None]:
    """Raise AWS's errors as InputError or Failure: `what` was asked, what is wrong, what would be right."""
    try:
        yield
    except ClientError as error:
        raise explained(error, what) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise InputError(f"{what}: there are no AWS credentials; {CREDENTIALS}") from error
    except (SSOError, TokenRetrievalError) as error:
        raise InputError(f"{what}: the AWS credentials have expired; aws sso login renews them") from error
    except NoRegionError as error:
        raise InputError(f"{what}: no region is known; give regions=[us-east-1]") from error
    except (ConnectionError, HTTPClientError) as error:
        raise Unreachable(f"{what}: AWS does not answer ({one_line(error)})") from error
    except BotoCoreError as error:
        raise InputError(f"{what}: {one_line(error)}") from error


def explained(error: ClientError, what: str) -> Exception:
    code, message = code_of(error), str(error.response.get("Error", {}).get("Message", ""))
    text = one_line(message)
    if code in EXPIRED:
        return InputError(f"{what}: the AWS credentials have expired; renew them (aws sso login)")
    if code in UNKNOWN:
        return InputError(f"{what}: AWS does not know these credentials ({code}); aws sts get-caller-identity")
    if code in REFUSED:
        cure = "docs/images.md lists the permissions that a build needs"
        return InputError(f"{what}: these credentials may not do that ({text}); {cure}")
    if code == "OptInRequired":
        return InputError(f"{what}: this account has not enabled the region ({text})")
    if code in LIMITED:
        return Unreachable(f"{what}: AWS answers {code} ({text})")
    return Failure(f"{what}: AWS answers {code} ({text})")


def one_line(error: object) -> str:
    return " ".join(str(error).split())
