"""S3 through boto3: small files, uploads, credentials. Shards are read by `train.data.fetch`, with the connector.

Temporary faults (throttling, 5xx, lost connections) are tried again by boto3; what stays is told in one line.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from train.config import InputError, S3Config, check

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 20
ATTEMPTS = 8  # of one request, by boto3, with growing pauses of up to 20 s
PART_BYTES = 16 * 2**20  # of a multipart upload
UPLOAD_THREADS = 4
MISSING = ("404", "NoSuchKey", "NotFound")
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
UNKNOWN = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure")
ELSEWHERE = ("301", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
DEFAULT_REGION = "us-east-1"  # where S3 sends those who do not say, and what compatible servers take


class Unreachable(RuntimeError):
    """S3 did not answer as it should; the same command may succeed later."""


def split(location: str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of s3://bucket/prefix. InputError if there is no bucket."""
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    check(bool(bucket), f"{location} names no bucket; write s3://bucket/folder")
    return bucket, prefix.strip("/")


def open_session(s3: S3Config) -> Any:
    """boto3's session: it knows the credentials and renews them."""
    try:
        return boto3.session.Session(profile_name=s3.profile, region_name=s3.region)
    except ProfileNotFound as error:
        raise InputError(f"s3.profile={s3.profile} is not in ~/.aws; aws configure list-profiles shows them") from error


def open_client(session: Any, s3: S3Config) -> Any:
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        s3={"addressing_style": "path" if s3.path_style else "auto"},
    )
    region = session.region_name or DEFAULT_REGION
    try:
        return session.client("s3", endpoint_url=s3.endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise InputError(f"S3 cannot be used with these settings: {error}") from error


class S3Folder:
    """See `train.storage.Folder`."""

    def __init__(self, location: str, s3: S3Config) -> None:
        self.bucket, self.prefix = split(location)
        self.location = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.s3, self.session = s3, open_session(s3)
        self.client = open_client(self.session, s3)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def read(self, name: str) -> bytes:
        with self.telling("read", name):
            answer = self.client.get_object(Bucket=self.bucket, Key=self.key(name))
            try:
                return bytes(answer["Body"].read())
            except (HTTPClientError, IncompleteReadError):  # boto3 tries requests again, but not what comes after them
                whole = io.BytesIO()
                self.client.download_fileobj(self.bucket, self.key(name), whole)
                return whole.getvalue()

    def write(self, name: str, content: bytes) -> None:
        """In parts, sent side by side, if it is large; readers see the whole or nothing."""
        transfer = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=UPLOAD_THREADS
        )
        with self.telling("write", name):
            self.client.upload_fileobj(io.BytesIO(content), self.bucket, self.key(name), Config=transfer)

    def create(self, name: str, content: bytes) -> bool:
        try:
            with self.telling("write", name):
                self.client.put_object(Bucket=self.bucket, Key=self.key(name), Body=content, IfNoneMatch="*")
        except FileExistsError:
            return False
        return True

    def size(self, name: str) -> int | None:
        try:
            with self.telling("read", name):
                return int(self.client.head_object(Bucket=self.bucket, Key=self.key(name))["ContentLength"])
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        with self.telling("delete", name):
            self.client.delete_object(Bucket=self.bucket, Key=self.key(name))

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.key(prefix))
        with self.telling("list", prefix):
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return sorted(key.removeprefix(self.prefix).lstrip("/") for key in keys)

    @contextmanager
    def telling(self, verb: str, name: str) -> Iterator[None]:
        """Errors of S3 as FileNotFoundError, FileExistsError, one line for the user, or Unreachable."""
        place = f"s3://{self.bucket}/{self.key(name)}"
        try:
            yield
        except ClientError as error:
            raise self.explain(error, verb, place) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise InputError(
                f"{place}: no AWS credentials on this machine; attach a role to the instance, or aws configure"
            ) from error
        except (ConnectionError, HTTPClientError) as error:
            where = self.s3.endpoint or "S3"
            raise Unreachable(f"{place}: no answer from {where} ({type(error).__name__})") from error
        except BotoCoreError as error:
            raise InputError(f"{place}: {error}") from error

    def explain(self, error: ClientError, verb: str, place: str) -> Exception:
        code = str(error.response.get("Error", {}).get("Code", ""))
        answer = error.response.get("ResponseMetadata", {})
        status, headers = int(answer.get("HTTPStatusCode", 0)), answer.get("HTTPHeaders", {})
        # HEAD answers have no body, so the status is all that is told.
        if code == "NoSuchBucket" or (status == 404 and not self.bucket_exists()):
            return InputError(f"{place}: there is no bucket {self.bucket}; check the name (aws s3 ls)")
        if code in MISSING:
            return FileNotFoundError(place)
        if code in ("PreconditionFailed", "ConditionalRequestConflict"):
            return FileExistsError(place)
        if code in EXPIRED:
            return InputError(f"{place}: the AWS credentials have expired; renew them (aws sso login)")
        if code in UNKNOWN:
            return InputError(f"{place}: S3 does not know these credentials ({code}); aws sts get-caller-identity")
        if code in ELSEWHERE or status == 301:
            region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region", "another one")
            return InputError(
                f"{place}: the bucket is in region {region}, not {self.client.meta.region_name}; set s3.region"
            )
        if code in ("403", "AccessDenied", "AllAccessDisabled"):
            return InputError(
                f"{place}: no permission to {verb} it; the role or user needs it in its policy (or the "
                "bucket's); aws sts get-caller-identity shows who asks"
            )
        if status == 400 and code == "400":
            return InputError(f"{place}: S3 refuses the request (400), as for credentials that have expired")
        if status >= 500 or status == 429 or code in ("SlowDown", "RequestTimeout"):
            return Unreachable(f"{place}: S3 answers {status} {code}, {ATTEMPTS} times")
        return InputError(f"{place}: S3 answers {status} {code}: {error.response.get('Error', {}).get('Message', '')}")

    def bucket_exists(self) -> bool:
        """Also True if it cannot be told."""
        try:
            self.client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            return str(error.response.get("Error", {}).get("Code")) not in ("404", "NoSuchBucket")
        except BotoCoreError:
            return True
        return True
