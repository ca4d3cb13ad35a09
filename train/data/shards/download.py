"""The download of shards from S3 into the cache with s3torchconnector, which only this module imports.

The connector retries, but has no time limit (it waits six minutes on a dead connection) and verifies no checksum. This
module therefore ends an attempt at a shard when nothing arrives for a while, begins the next attempt with a new client,
and compares length and sha256 with the manifest before the file gets the shard's name.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from s3torchconnector import S3ClientConfig, S3Exception, S3MapDataset
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from train.config import InputError, Unreachable
from train.data.shards.cache import ShardCache
from train.data.shards.format import Shard
from train.storage import aws_errors, s3_route
from train.storage.atomic_io import discard
from train.storage.aws_errors import TABLE, code_of, is_temporary, one_line, problem_and_cure
from train.storage.checksums import fault_of, fault_of_file
from train.storage.folders import Folder
from train.storage.s3 import DEFAULT_REGION, BotoCoreError, ClientError, S3Folder, open_client
from train.storage.s3_session import credentials, open_session

logger = logging.getLogger("train")
# upper limits of the random pauses between attempts; the limit doubles
FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    1.0,
    10.0,
)
# the connector's limits for parts; it keeps one in memory
MIN_PART_BYTES, MAX_PART_BYTES = (
    5 * 2**20,
    512 * 2**20,
)
CONNECTOR_ATTEMPTS = 3
MAX_DOUBTS = 3  # Doubtful errors after which a shard is no longer tried
# the size of the first request, and the time that later ones should take
FIRST_BYTES, REQUEST_S = (
    8 * 2**20,
    5.0,
)
# phrases in the connector's errors, and AWS's codes for them
FINAL = {"bucket does not exist": "NoSuchBucket"}
PASSING = {  # phrases of faults that may pass: a new role takes a while to work everywhere, a copy may be in progress
    "No signing credentials": "NoCredentialsError",
    "TIME_TOO_SKEWED": "RequestTimeTooSkewed",
    "TOKEN_EXPIRED": "ExpiredToken",
    "key does not exist": "it is not in the bucket",
}
# errors that may pass
RETRIED = (
    *aws_errors.CREDENTIALS,
    *aws_errors.NOT_ALLOWED,
    "RequestTimeTooSkewed",
)
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Doubtful(RuntimeError):
    """An error that retries rarely cure, such as a missing bucket or an object that does not match the manifest."""


class Silent(Unreachable):
    """The end of an attempt at which nothing arrived for data.attempt_s."""


class Client:
    """A client of the connector for the objects of one data set, with boto3's current credentials.

    boto3 finds and renews credentials in more ways than the connector. After a failure, a new client must be made,
    because the credentials may have expired.
    """

    def __init__(self, folder: S3Folder, files: Sequence[str], *, largest_bytes: int) -> None:
        self.folder = folder
        put_back()  # programs that boto3 starts for credentials may need the user's proxy
        try:
            self.session = open_session(folder.s3)
            frozen = credentials(self.session)
        except InputError as error:  # a file of ~/.aws or a token may be being replaced
            raise Unreachable(f"cannot get credentials: {error}") from error
        self.credentials = (
            (None,) * 3 if frozen is None else (frozen.access_key, frozen.secret_key, frozen.token)
        )
        self.request_bytes = FIRST_BYTES
        self.numbers = {file: number for number, file in enumerate(files)}
        self.streams = S3MapDataset.from_objects(
            [f"{folder.location}/{file}" for file in files],
            region=self.session.region_name or DEFAULT_REGION,
            endpoint=folder.endpoint,
            # A stream is one request. The connector's usual readers copy all of it again, or ask for the length first.
            reader_constructor=lambda bucket, key, get_object_info, get_stream: get_stream,
            s3client_config=S3ClientConfig(
                part_size=min(
                    max(largest_bytes, MIN_PART_BYTES), MAX_PART_BYTES
                ),  # one request per shard
                force_path_style=folder.s3.path_style,
                max_attempts=CONNECTOR_ATTEMPTS,
            ),
        )

    def read(self, file: str, *, most_bytes: int, on_bytes: Callable[[], None]) -> list[bytes]:
        """Return the content of an object in chunks. If it is longer than `most_bytes`, only its beginning is read.

        `on_bytes` is called whenever bytes arrive. Raises Doubtful or Unreachable.

        The connector returns a response only when all of it has arrived. The first request therefore asks for only
        FIRST_BYTES. Later ones ask for what should arrive within REQUEST_S at the measured speed: often a whole shard.
        """
        pieces: list[bytes] = []
        start = 0
        try:
            while start <= most_bytes:
                first, stop, began_s = start, start + self.request_bytes, time.monotonic()
                if stop >= most_bytes:
                    stop = most_bytes + 1  # one byte more shows whether the object is longer
                for piece in self.streams[self.numbers[file]](start, stop):
                    pieces.append(piece)
                    start += len(piece)
                    on_bytes()
                if start < stop:  # the object ends here
                    break
                self.request_bytes = max(
                    FIRST_BYTES, int(REQUEST_S * (stop - first) / (time.monotonic() - began_s))
                )
            return pieces
        except S3Exception as error:  # one class for all errors: only the text distinguishes them
            # the object ended with the previous request
            if pieces and "<Code>InvalidRange</Code>" in str(error):
                return pieces
            raise self.explain(error, file) from error

    def explain(self, error: S3Exception, file: str) -> Exception:
        """Return Doubtful or Unreachable, with the problem and its cure."""
        text = one_line(error)
        for phrase, meaning in (FINAL | PASSING).items():
            if phrase in text:
                known = (
                    "; ".join(problem_and_cure(meaning, service="S3"))
                    if meaning in TABLE
                    else meaning
                )
                return (Doubtful if phrase in FINAL else Unreachable)(f"{known} ({text})")
        status, code, said = answer_in(text)
        if "Forbidden" in text:  # the connector's text is the same for all codes of status 403
            status, code, said = self.answer_to_boto3(file)
        if not code:
            return Unreachable(text)
        known = "; ".join(filter(None, problem_and_cure(code, said, status=status, service="S3")))
        return (Unreachable if is_temporary(status, code) or code in RETRIED else Doubtful)(known)

    def answer_to_boto3(self, file: str) -> tuple[int, str, str]:
        """Return the status, code and text of S3's answer to boto3. The code is "" if boto3 gets the object."""
        try:
            # the folder's connections belong to another process
            client = open_client(self.session, self.folder.s3)
            client.get_object(**self.folder.address(file), Range="bytes=0-0")["Body"].close()
        except ClientError as error:
            status = int(error.response["ResponseMetadata"]["HTTPStatusCode"])
            return status, code_of(error), one_line(error.response["Error"].get("Message") or "")
        except BotoCoreError as error:
            return 0, code_of(error), one_line(error)
        except InputError as error:  # the credentials are gone since
            raise Unreachable(str(error)) from error
        return 0, "", ""


def answer_in(text: str) -> tuple[int, str, str]:
    """Return the status, code and text of the S3 answer quoted in a connector error; 0 or "" for what it lacks."""
    status, code, said = (
        re.search(pattern, text)
        for pattern in (
            r"response_status: (\d+)",
            "<Code>(.*?)</Code>",
            "<Message>(.*?)</Message>",
        )
    )
    return int(status[1]) if status else 0, code[1] if code else "", said[1] if said else ""


def put(variables: Mapping[str, str | None]) -> None:
    """Set variables in the environment of the C library, where the connector looks for them. None unsets a variable.

    Python's os.environ keeps the user's values, because boto3 reads them there.
    """
    for name, value in variables.items():
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)


def put_back() -> None:
    """Undo `put`, so that programs started by this process have the user's environment."""
    put(
        {
            name: os.environ.get(name)
            for name in (*CREDENTIALS, *s3_route.PROXIES, s3_route.AUTHORITIES)
        }
    )


class Downloader:
    """The downloads of one data set. Several threads may call `download` at the same time, for different shards."""

    def __init__(self, source: Folder, cache: ShardCache) -> None:
        assert isinstance(source, S3Folder)
        self.source, self.cache, self.cfg = source, cache, cache.cfg
        self.route = s3_route.variables(source.client.meta.endpoint_url, source.session._session)
        self.lock = threading.Lock()
        self.client: Client | None = None

    def download(
        self,
        shard: Shard,
        *,
        limit_s: float = math.inf,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Put a shard into the cache unless it is already there.

        A damaged shard is kept until an intact one replaces it, because other runs may be reading it. `on_failure` is
        called with the reason after each failed attempt. Raises InputError if no further attempt can cure the fault,
        and Unreachable after `limit_s` seconds.
        """
        path, url = self.cache.folder / shard.file, f"{self.source.location}/{shard.file}"
        fault = fault_of_file(path, shard.entry, checksum=True)
        if fault is None:
            return
        if path.exists():
            logger.warning("%s in the cache %s; it is fetched again", shard.file, fault)
        doubts, reads, answers = 0, set[Future[list[bytes]]](), list[BaseException]()

        def attempt() -> None:
            nonlocal doubts
            try:
                self.store(shard, self.fetch(shard, reads))
            except Doubtful as doubt:
                doubts += 1
                if doubts >= MAX_DOUBTS:
                    raise InputError(f"{doubt}, {doubts} times") from doubt
                raise

        def after_failure(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            reason = f"{url}: {error} ({state.attempt_number} attempts)"
            logger.warning(
                "%s; next attempt in %.1f s",
                reason,
                state.next_action.sleep if state.next_action else 0.0,
            )
            on_failure(reason)
            if error is not None and not isinstance(error, Silent):
                answers.append(error)

        retrying = Retrying(
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            retry=retry_if_exception_type((Unreachable, Doubtful)),
            before_sleep=after_failure,
            stop=stop_after_delay(limit_s),
            reraise=True,
        )
        try:
            retrying(attempt)
        except (InputError, Unreachable, Doubtful) as error:
            kind = InputError if isinstance(error, InputError) else Unreachable
            answer = f"{answers[-1]}; then " if answers and isinstance(error, Silent) else ""
            raise kind(f"{url}: {answer}{error}") from error

    def fetch(self, shard: Shard, reads: set[Future[list[bytes]]]) -> list[bytes]:
        """Return a shard's content, read by a new thread or by one of an earlier attempt, whichever finishes first.

        `reads`: the results that earlier threads may still produce. A read cannot be stopped, and may succeed late.
        """
        content, clients, heard_s = Future[list[bytes]](), list[Client](), [time.monotonic()]

        def hear() -> None:
            heard_s[0] = time.monotonic()
            self.cache.heard()

        def read() -> None:
            try:
                # in this thread, because looking for credentials may hang
                clients.append(self.current_client())
                content.set_result(
                    clients[0].read(shard.file, most_bytes=shard.bytes, on_bytes=hear)
                )
            except BaseException as error:  # raised again in the waiting thread
                content.set_exception(error)

        reads.add(content)
        threading.Thread(target=read, daemon=True).start()
        ended = set[Future[list[bytes]]]()
        while not ended and (left_s := heard_s[0] + self.cfg.attempt_s - time.monotonic()) > 0:
            ended = wait(reads, left_s, return_when=FIRST_COMPLETED).done
        reads -= ended
        whole = [each for each in ended if each.exception() is None]
        if not whole and self.client in clients:
            self.client = None
        if not ended:
            limit = f"nothing arrived within {self.cfg.attempt_s:g} s (data.attempt_s)"
            raise Silent(f"{limit}; raise it for a slow link")
        return (whole or list(ended))[0].result()

    def store(self, shard: Shard, content: list[bytes]) -> None:
        """Write a shard to the cache, under its name. Raises Doubtful if the content does not match the manifest."""
        digest = hashlib.sha256()
        for piece in content:
            digest.update(piece)
        fault = fault_of(shard.entry, sum(map(len, content)), digest.hexdigest)
        if fault is not None:
            raise Doubtful(
                f"it {fault}; it was damaged or replaced: put the original back or prepare again"
            )
        part = self.cache.run / shard.file
        try:
            with part.open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
            part.rename(self.cache.folder / shard.file)
        except OSError as error:
            discard(part)
            kind = Unreachable if error.errno in (errno.ENOSPC, errno.EDQUOT) else InputError
            raise kind(f"cannot be written to {self.cache.folder}: {error.strerror}") from error

    def current_client(self) -> Client:
        """Return the current client, or a new one after a failure."""
        with self.lock:
            if self.client is None:
                files = [shard.file for shard in self.cache.manifest.shards]
                self.client = Client(self.source, files, largest_bytes=self.cache.largest_bytes)
            put(self.route | dict(zip(CREDENTIALS, self.client.credentials, strict=True)))
            return self.client
