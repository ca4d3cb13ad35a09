"""S3 through boto3: small files and uploads. Shards are read by train/data/shards/download.py.

boto3 retries after throttling, 5xx responses and lost connections, also of a client that has seen many of them. If a
request still fails, the error has a one-line message.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from boto3.exceptions import RetriesExceededError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay

from train.config import InputError, NotPermitted, S3Config, Unreachable, check, check_endpoint
from train.storage import aws_errors, s3_route
from train.storage.atomic_io import warn_once
from train.storage.aws_errors import (
    EXPIRED,
    NOT_ALLOWED,
    UNKNOWN,
    Rejected,
    code_of,
    one_line,
)
from train.storage.foreign import check_size
from train.storage.s3_session import credentials, open_service, open_session
from train.storage.schema import Head, is_path

CONNECTIONS = 32  # connections that are kept open
ATTEMPTS = 6  # of a request; if each fails immediately, the pauses between them take about 15 s
PART_BYTES = 16 * 2**20  # bytes of a part in a multipart upload
UPLOAD_THREADS = 4
DOWNLOAD_ATTEMPTS = (
    2  # of a part whose body breaks off; each consists of ATTEMPTS requests if none is answered
)
TRANSFER = TransferConfig(
    multipart_threshold=PART_BYTES,
    multipart_chunksize=PART_BYTES,
    max_concurrency=UPLOAD_THREADS,
    num_download_attempts=DOWNLOAD_ATTEMPTS,
    preferred_transfer_client="classic",  # AWS's other client, CRT, raises different errors
)
TRANSFER.max_in_memory_upload_chunks = UPLOAD_THREADS  # the default is ten
BODY_BROKEN = (
    ReadTimeoutError,
    ResponseStreamingError,
    IncompleteReadError,
    FlexibleChecksumError,
)
BROKEN_OFF = (ConnectionError, HTTPClientError, RetriesExceededError, *BODY_BROKEN)
# the only answer that says so: a status 404 without it may come from a proxy
MISSING = "NoSuchKey"
UNSAID = " (or it is missing, which S3 says only to users who may list the bucket; or the bucket makes requesters pay:"
UNSAID += " copy it with aws s3 cp --request-payer requester)"
TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
ELSEWHERE = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
NO_CONDITIONS = "it rejects a conditional write (If-None-Match), without which two jobs could own one run folder: "
NO_CONDITIONS += "use a server that has conditional writes, or a disk"
USUAL_ENDPOINT = re.compile(r"https://s3(\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
WRITER = "writer"  # metadata key of created objects; the value identifies the call that created the object
DEFAULT_REGION = "us-east-1"  # the default of AWS's tools; compatible servers accept it


def split(location: str) -> tuple[str, str]:
    """Split s3://bucket/prefix into bucket and prefix, without outer slashes. Raises InputError if it has no bucket."""
    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    check(bool(bucket), f"{location} names no bucket; write s3://bucket/folder")
    advice = "use its alias as the name of the bucket (it ends in -s3alias; the console and aws s3control show it)"
    check(not bucket.startswith("arn:"), f"{location} is the ARN of an access point: {advice}")
    check(
        "@" not in bucket,
        "s3://...@... contains credentials; remove them, and set them as AWS's tools expect",
    )
    return bucket, prefix.strip("/")


def open_client(session: Any, s3: S3Config) -> Any:
    attempt_s = s3.timeout_s / ATTEMPTS
    config = Config(
        connect_timeout=attempt_s / 2,
        read_timeout=attempt_s,
        max_pool_connections=CONNECTIONS,
        # The newer modes pause for only 3 s in total, and stop retrying after a few dozen errors per client.
        retries={"mode": "legacy", "total_max_attempts": ATTEMPTS},
        s3={"addressing_style": "path" if s3.path_style else "virtual"},
    )
    region = session.region_name or DEFAULT_REGION
    client = open_service(
        session, "s3", endpoint_url=s3.endpoint, region_name=region, config=config
    )
    client.meta.events.register_first("needs-retry.s3", reject_another_region)
    client.meta.events.register_first("needs-retry.s3", partial(renew_credentials, session, s3))
    return client


def renew_credentials(
    session: Any,
    s3: S3Config,
    response: tuple[Any, dict[str, Any]] | None,
    attempts: int,
    **_: object,
) -> float | None:
    """If S3 rejects the keys of the first attempt, retry immediately with the keys that ~/.aws contains now."""
    # boto3 reads these keys only once, but renews all other kinds of credentials.
    held = session.get_credentials()
    code = response and response[1].get("Error", {}).get("Code")
    is_rejected = code in (*EXPIRED, *UNKNOWN)
    if attempts > 1 or not is_rejected or isinstance(held, RefreshableCredentials):
        return None
    # the file is missing or half written: S3's answer is reported instead
    with suppress(InputError, Unreachable):
        present = credentials(open_session(s3))
        if present is not None:
            held.access_key = present.access_key
            held.secret_key = present.secret_key
            held.token = present.token
    return 0.0


def reject_another_region(
    response: tuple[Any, dict[str, Any]] | None, operation: Any, **_: object
) -> None:
    """Reject a bucket in another region. boto3 would silently use that region, but the s3torchconnector would fail."""
    if response is None:
        return
    parsed = response[1]
    status = parsed["ResponseMetadata"].get("HTTPStatusCode")
    code = parsed.get("Error", {}).get("Code")
    # "400" is the code for HEAD, whose responses have no body
    if status == 301 or code in (*ELSEWHERE, "400"):
        raise ClientError(parsed, operation.name)


class S3Folder:
    """A folder in a bucket. See `train.storage.folders.Folder`."""

    def __init__(self, location: str, s3: S3Config) -> None:
        self.bucket, self.prefix = split(location)
        self.location = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self.s3 = s3
        self.session = open_session(s3)
        self.client = open_client(self.session, s3)
        self.encryption = encryption(s3)
        endpoint = self.client.meta.endpoint_url  # may come from the environment or ~/.aws
        check_endpoint("the endpoint of AWS_ENDPOINT_URL or ~/.aws", endpoint)
        s3_route.check_route(endpoint, self.session._session)
        # None: AWS's endpoint of the region
        self.endpoint = None if USUAL_ENDPOINT.fullmatch(endpoint) else endpoint

    def key(self, name: str) -> str:
        if self.prefix:
            return f"{self.prefix}/{name}"
        return name

    def address(self, name: str) -> dict[str, str]:
        """Return the bucket and key as arguments for boto3."""
        return {"Bucket": self.bucket, "Key": self.key(name)}

    def read(self, name: str) -> bytes:
        retrying = Retrying(  # boto3 retries a request, but not the reading of its response
            retry=retry_if_exception_type(BODY_BROKEN),
            stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(self.s3.timeout_s),
            reraise=True,
        )
        with self.explained("read", name):
            return retrying(lambda: self._read(name))

    def _read(self, name: str) -> bytes:
        answer = self.client.get_object(**self.address(name))
        check_size(f"{self.location}/{name}", answer["ContentLength"])
        return bytes(answer["Body"].read())

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def write(self, name: str, content: bytes) -> None:
        with self.explained("write", name):
            self._send(name, io.BytesIO(content))

    def upload(self, name: str, path: Path) -> None:
        with self.explained("write", name), path.open("rb") as file:
            self._send(name, file)

    def _send(self, name: str, file: BinaryIO) -> None:
        address = self.bucket, self.key(name)
        self.client.upload_fileobj(file, *address, ExtraArgs=self.encryption, Config=TRANSFER)

    def download(self, name: str, path: Path) -> None:
        with self.explained("read", name):
            try:
                self.client.download_file(self.bucket, self.key(name), str(path), Config=TRANSFER)
            except ClientError:  # of a HEAD, which does not say why
                self._get(name)
                raise

    def create(self, name: str, content: bytes) -> bool:
        mark = uuid.uuid4().hex
        options = {
            **self.address(name),
            **self.encryption,
            "IfNoneMatch": "*",
            "Metadata": {WRITER: mark},
        }
        for _ in range(ATTEMPTS):
            try:
                with self.explained("write", name):
                    self.client.put_object(Body=content, **options)
                return True
            except Rejected as error:
                if error.code == "NotImplemented":
                    raise Rejected(f"{error}; {NO_CONDITIONS}", error.code) from error
                raise
            # an earlier attempt may have created it, but its response was lost
            except FileExistsError:
                with suppress(FileNotFoundError), self.explained("read", name):
                    return bool(self._get(name)["Metadata"].get(WRITER) == mark)
        return False

    def head(self, name: str) -> Head | None:
        try:
            with self.explained("read", name):
                answer = self._get(name)
        except FileNotFoundError:
            return None
        return Head(int(answer["ContentLength"]), answer["ETag"])

    def size(self, name: str) -> int | None:
        head = self.head(name)
        return head and head.size

    def _get(self, name: str) -> Any:
        """Return boto3's response to GET for a file, without its body. Unlike HEAD, GET says why it fails."""
        answer = self.client.get_object(**self.address(name))
        answer["Body"].close()
        return answer

    def remove(self, name: str) -> None:
        try:
            with self.explained("delete", name):
                self.client.delete_object(**self.address(name))
        except NotPermitted:
            text = "no permission to delete (s3:DeleteObject): old checkpoints and other files of a run are kept"
            warn_once(("delete", self.location), f"{self.location}: {text}")
            raise

    def names(self, prefix: str = "") -> list[str]:
        return list(self.listing(prefix))

    def listing(self, prefix: str = "") -> dict[str, Head]:
        listed = {}
        odd = []
        for name, item in sorted(self._list(prefix).items()):
            if is_path(name):
                listed[name] = item
            elif not name.endswith("/"):
                # The console's "folders" are empty objects whose names end in a slash.
                odd.append(name)
        if odd:
            text = f"objects whose names are not valid file names are skipped: {odd[:3]}"
            warn_once(("names", self.location), f"{self.location}: {text}")
        return listed

    def names_here(self) -> set[str]:
        return {name.rstrip("/") for name in self._list("", Delimiter="/")} - {""}

    def _list(self, prefix: str, **options: str) -> dict[str, Head]:
        """Return the objects and, with a Delimiter, the prefixes that have objects under them."""
        paginator = self.client.get_paginator("list_objects_v2")
        start = self.key(prefix)
        # directory buckets list only prefixes that end in a slash
        whole = start[: start.rfind("/") + 1]
        listed = {}
        with self.explained("list", prefix):
            for page in paginator.paginate(Bucket=self.bucket, Prefix=whole, **options):
                for item in page.get("Contents", ()):
                    listed[item["Key"]] = Head(item["Size"], item["ETag"])
                for item in page.get("CommonPrefixes", ()):
                    listed[item["Prefix"]] = Head(0, "")
        top = self.key("")
        return {
            key.removeprefix(top): item for key, item in listed.items() if key.startswith(start)
        }

    @contextmanager
    def explained(self, action: str, name: str) -> Iterator[None]:
        """Raise S3's errors as FileNotFoundError, FileExistsError, InputError or Unreachable, in one line."""
        url = f"s3://{self.bucket}/{self.key(name)}"
        try:
            yield
        except ClientError as error:
            raise self.explain(error, action, url) from error
        except BROKEN_OFF as error:
            where = self.s3.endpoint or "S3"
            reason = one_line(error).replace(' on endpoint URL: "None"', "")
            raise Unreachable(f"{url}: no complete answer from {where}: {reason}") from error
        except BotoCoreError as error:
            raise aws_errors.explain(error, url, service="S3") from error
        except FileNotFoundError as error:
            # of a file on this machine: only S3 can say that an object is missing
            raise Unreachable(f"{url}: cannot {action} it: {one_line(error)}") from error

    def explain(self, error: ClientError, action: str, url: str) -> Exception:
        """Return the exception for an error response of S3. `action` is what failed: read, write, delete or list."""
        code = code_of(error)
        answer = error.response.get("ResponseMetadata", {})
        if code == MISSING:
            return FileNotFoundError(url)
        if code in TAKEN:
            return FileExistsError(url)
        if code in ELSEWHERE or answer.get("HTTPStatusCode") == 301:
            region = answer.get("HTTPHeaders", {}).get("x-amz-bucket-region")
            region = region or error.response["Error"].get("Region", "another one")
            here = self.client.meta.region_name
            return Rejected(
                f"{url}: the bucket is in region {region}, not {here}; set s3.region", code
            )
        text = one_line(error.response["Error"].get("Message") or "")
        if code in NOT_ALLOWED:
            if "not authorized" in text:
                hint = f": {text}"
            elif action == "read":
                hint = UNSAID
            else:
                hint = ""
            cure = aws_errors.problem_and_cure(code, text)[1]
            if action == "write" and not self.encryption:
                cure += "; if the bucket's policy demands encryption, set s3.sse"
            kind = NotPermitted if action == "delete" else InputError
            return kind(f"{url}: no permission to {action} it{hint}; {cure}")
        return aws_errors.explain(error, url, service="S3")


def encryption(s3: S3Config) -> dict[str, str]:
    """Return boto3's arguments for writes that ask for s3.sse."""
    if s3.sse is None:
        return {}
    if s3.sse.startswith("arn:"):
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": s3.sse}
    return {"ServerSideEncryption": s3.sse}
