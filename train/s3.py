"""S3 through boto3: small files, uploads, credentials. Shards are read by `train.data.fetch`, with the connector.

Temporary faults (throttling, 5xx, lost connections) are tried again by boto3, for as long as `train.s3_patience` says;
what stays is told in one line.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import RetriesExceededError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    ResponseStreamingError,
)
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay

from train.config import InputError, S3Config, Unreachable, check, check_endpoint
from train.s3_patience import ATTEMPTS, NotAnswered, Patience, is_temporary
from train.untrusted import is_path, shown

logger = logging.getLogger("train")

METADATA_ATTEMPTS = 5
CONNECTIONS = 32  # kept open
PART_BYTES = 16 * 2**20  # of a multipart upload
UPLOAD_THREADS = 4
TRANSFER = TransferConfig(
    multipart_threshold=PART_BYTES,
    multipart_chunksize=PART_BYTES,
    max_concurrency=UPLOAD_THREADS,
    preferred_transfer_client="classic",  # AWS's other one has errors of its own
)
TRANSFER.max_in_memory_upload_chunks = UPLOAD_THREADS  # of files; ten by itself
BODY_BROKEN = (ReadTimeoutError, ResponseStreamingError, IncompleteReadError, FlexibleChecksumError)
BROKEN_OFF = (NotAnswered, ConnectionError, HTTPClientError, RetriesExceededError, *BODY_BROKEN)
MISSING = ("NoSuchKey", "NotFound", "404")  # the last is of HEAD, whose answers have no words
TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
UNKNOWN = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure")
ELSEWHERE = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
USUAL_ENDPOINT = re.compile(r"https://s3(\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
WRITER = "writer"  # metadata of a created object: which call it was
DEFAULT_REGION = "us-east-1"  # where S3 sends those who do not say, and what compatible servers take


def split(location: str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of s3://bucket/prefix. InputError if there is no bucket."""
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    check(bool(bucket), f"{location} names no bucket; write s3://bucket/folder")
    check(
        "@" not in bucket, "s3://...@... holds credentials; write s3://bucket/folder, and give them as AWS's tools do"
    )
    return bucket, prefix.strip("/")


def open_session(s3: S3Config, *, skips_environment: bool = False) -> Any:
    """boto3's session: it knows the credentials and renews them; if asked, without those in the environment."""
    try:
        session = boto3.session.Session(profile_name=s3.profile, region_name=s3.region)
        # Many ranks of a machine ask its metadata service at once; boto3 would ask once and find no credentials.
        session._session.set_config_variable("metadata_service_num_attempts", METADATA_ATTEMPTS)
        if skips_environment:
            session._session.get_component("credential_provider").remove("env")
        return session
    except ProfileNotFound as error:
        name = f"s3.profile={s3.profile}" if s3.profile else f"AWS_PROFILE={os.environ.get('AWS_PROFILE')}"
        raise InputError(f"{name} is not in ~/.aws; aws configure list-profiles shows them") from error


def open_client(session: Any, s3: S3Config, patience: Patience) -> Any:
    config = Config(
        connect_timeout=patience.attempt_s / 2,
        read_timeout=patience.attempt_s,
        max_pool_connections=CONNECTIONS,
        # The newer modes pause for 3 s in all, and retry no more once the client has met a few dozen errors.
        retries={"mode": "legacy", "total_max_attempts": ATTEMPTS},
        s3={"addressing_style": "path" if s3.path_style else "virtual"},
    )
    region = session.region_name or DEFAULT_REGION
    try:
        client = session.client("s3", endpoint_url=s3.endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        reason = re.sub(r"\S*@", "", one_line(error))  # of a URL with credentials, the server
        raise InputError(f"S3 cannot be used with these settings: {reason}") from None
    patience.hook_into(client)
    client.meta.events.register_first("needs-retry.s3", refuse_another_region)
    return client


def refuse_another_region(response: tuple[Any, dict[str, Any]] | None, operation: Any, **_: object) -> None:
    """boto3 would go to the bucket's own region without a word; the connector cannot, so the first shard would fail."""
    if response is None:
        return
    parsed = response[1]
    status, code = parsed["ResponseMetadata"].get("HTTPStatusCode"), parsed.get("Error", {}).get("Code")
    if status == 301 or code in (*ELSEWHERE, "400"):  # 400: an answer to HEAD has no words
        raise ClientError(parsed, operation.name)


def one_line(error: object) -> str:
    return " ".join(str(error).split())


class S3Folder:
    """See `train.storage.Folder`."""

    def __init__(self, location: str, s3: S3Config) -> None:
        self.bucket, self.prefix = split(location)
        self.location = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.s3, self.session = s3, open_session(s3)
        self.has_warned = False  # of names
        self.patience = Patience(s3.timeout_s)
        self.client = open_client(self.session, s3, self.patience)
        endpoint = self.client.meta.endpoint_url  # also out of the environment and ~/.aws
        check_endpoint("the endpoint of AWS_ENDPOINT_URL or ~/.aws", endpoint)
        self.endpoint = None if USUAL_ENDPOINT.fullmatch(endpoint) else endpoint  # None: AWS's own for the region

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def place(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key(name)}

    def read(self, name: str) -> bytes:
        began_s = time.monotonic()
        with self.telling("read", name), self.patience.one_deadline() as until_s:
            # boto3 tries requests again, but not what comes after them.
            retrying = Retrying(
                retry=retry_if_exception_type(BODY_BROKEN),
                stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(self.s3.timeout_s),
                before_sleep=lambda _: self.patience.speak(f"{self.key(name)} breaks off", began_s, until_s, 0.0),
                reraise=True,
            )
            return retrying(self._get, name)

    def _get(self, name: str) -> bytes:
        return bytes(self.client.get_object(**self.place(name))["Body"].read())

    def write(self, name: str, content: bytes) -> None:
        """In parts, sent side by side, if it is large; readers see the whole or nothing."""
        with self.telling("write", name):
            self.client.upload_fileobj(io.BytesIO(content), self.bucket, self.key(name), Config=TRANSFER)

    def upload(self, name: str, path: Path) -> None:
        """The same with a file of this machine. Memory: UPLOAD_THREADS parts."""
        with self.telling("write", name), path.open("rb") as file:
            self.client.upload_fileobj(file, self.bucket, self.key(name), Config=TRANSFER)

    def replace(self, name: str, content: bytes, version: str | None) -> str:
        """Write a whole file if it still is of this version (None: whatever it is); gives the new one. FileExistsError
        or FileNotFoundError if it is not.
        """
        condition = {} if version is None else {"IfMatch": version}
        with self.telling("write", name):
            answer = self.client.put_object(**self.place(name), Body=content, **condition)
        return str(answer["ETag"]).strip('"')  # Ceph compares it without

    def download(self, name: str, path: Path) -> None:
        """A file to this machine, in parts; FileNotFoundError if there is none. The caller verifies it."""
        with self.telling("read", name):
            self.client.download_file(self.bucket, self.key(name), str(path), Config=TRANSFER)

    def create(self, name: str, content: bytes) -> bool:
        mark = uuid.uuid4().hex
        for _ in range(ATTEMPTS):
            try:
                with self.telling("write", name):
                    self.client.put_object(**self.place(name), Body=content, IfNoneMatch="*", Metadata={WRITER: mark})
                return True
            except FileExistsError:  # maybe by a first try of ours, whose answer got lost
                head = self.head(name)
                if head is not None:
                    return bool(head["Metadata"].get(WRITER) == mark)
        return False

    def size(self, name: str) -> int | None:
        head = self.head(name)
        return None if head is None else int(head["ContentLength"])

    def head(self, name: str) -> Any:
        """boto3's answer about a file; None if there is none."""
        try:
            with self.telling("read", name), self.patience.one_deadline():
                try:
                    return self.client.head_object(**self.place(name))
                except ClientError as error:
                    if is_temporary(error.response["ResponseMetadata"]["HTTPStatusCode"], None):
                        raise
                    answer = self.client.get_object(**self.place(name))  # unlike HEAD's, its errors have a reason
                    answer["Body"].close()
                    return answer
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        with self.telling("delete", name):
            self.client.delete_object(**self.place(name))

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.key(prefix))
        with self.telling("list", prefix):
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        # The console's "folders" are empty objects whose names end in a slash.
        names = sorted(key.removeprefix(self.key("")) for key in keys if not key.endswith("/"))
        odd = [name for name in names if not is_path(name)]
        if odd and not self.has_warned:
            self.has_warned = True
            logger.warning("%s: left out, as no file here can have such a name: %s", self.location, shown(odd[:3]))
        return [name for name in names if is_path(name)]

    def names_here(self) -> set[str]:
        top = self.key("")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=top, Delimiter="/")
        with self.telling("list", ""):
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
            keys += [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
        return {key.removeprefix(top).rstrip("/") for key in keys} - {""}

    @contextmanager
    def telling(self, verb: str, name: str) -> Iterator[None]:
        """Errors of S3 as FileNotFoundError, FileExistsError, one line for the user, or Unreachable."""
        place = f"s3://{self.bucket}/{self.key(name)}"
        try:
            yield
        except ClientError as error:
            raise self.explain(error, verb, place) from error
        except NoCredentialsError as error:
            raise InputError(
                f"{place}: no AWS credentials on this machine; attach a role to the instance, or aws configure"
            ) from error
        except BROKEN_OFF as error:
            where, reason = self.s3.endpoint or "S3", one_line(error).replace(' on endpoint URL: "None"', "")
            raise Unreachable(f"{place}: no whole answer from {where}: {reason}") from error
        except BotoCoreError as error:
            raise InputError(f"{place}: {one_line(error)}") from error

    def explain(self, error: ClientError, verb: str, place: str) -> Exception:
        told, answer = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
        code, status = str(told.get("Code", "")), int(answer.get("HTTPStatusCode", 0))
        if code == "NoSuchBucket":
            return InputError(f"{place}: there is no bucket {self.bucket}; check the name (aws s3 ls)")
        if code in MISSING:
            return FileNotFoundError(place)
        if code in TAKEN:
            return FileExistsError(place)
        if code in EXPIRED:
            return InputError(f"{place}: the AWS credentials have expired; renew them (aws sso login)")
        if code in UNKNOWN:
            return InputError(f"{place}: S3 does not know these credentials ({code}); aws sts get-caller-identity")
        if code in ELSEWHERE or status == 301:
            region = answer.get("HTTPHeaders", {}).get("x-amz-bucket-region") or told.get("Region", "another one")
            here = self.client.meta.region_name
            return InputError(f"{place}: the bucket is in region {region}, not {here}; set s3.region")
        if code in ("AccessDenied", "AllAccessDisabled"):
            hint = " (or it is missing: S3 says so only to who may list the bucket)" if verb == "read" else ""
            return InputError(
                f"{place}: no permission to {verb} it{hint}; the role or user needs it in its policy (or the "
                "bucket's); aws sts get-caller-identity shows who asks"
            )
        if code == "RequestTimeTooSkewed":
            return InputError(
                f"{place}: this machine's clock is wrong, S3 does not accept its signature; set it (chrony)"
            )
        if is_temporary(status, code):
            times = answer.get("RetryAttempts", 0) + 1
            return Unreachable(f"{place}: S3 answers {status} {code}{f', {times} times' if times > 1 else ''}")
        return InputError(f"{place}: S3 answers {status} {code}: {one_line(told.get('Message', ''))}")
