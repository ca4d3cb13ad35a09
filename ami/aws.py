"""boto3's clients of a region, and its errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ProfileNotFound

from train.config import InputError
from train.storage.aws_errors import NOT_ALLOWED, explained

ATTEMPTS, TIMEOUT_S = 5, 20


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


@contextmanager
def aws_errors(what: str) -> Iterator[None]:
    """Raise AWS's errors in one line: `what` was asked, what is wrong, what would be right."""
    with explained(what, cures=dict.fromkeys(NOT_ALLOWED, "docs/images.md lists the permissions that a build needs")):
        yield
