"""A deadline for all attempts of an S3 request, hooked into a boto3 client.

boto3 sends the requests. This module decides whether and when it retries.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from train.machine.launched import is_first
from train.storage.aws_errors import is_temporary

logger = logging.getLogger("train")
ATTEMPTS = 7  # at most; if each fails immediately, the pauses between them take about 30 s
SILENT_ATTEMPTS = 6  # attempts that fit into s3.timeout_s if none gets a response
FIRST_WARNING_S = 3.0
NEXT_WARNING_S = 10.0  # between warnings


class NotAnswered(BotoCoreError):
    """An error raised because no attempt of a request got a response."""

    fmt = "{error} ({attempts} attempts in {seconds:.0f} s; s3.timeout_s={timeout_s:g})"


class RetryPolicy:
    """The retry decisions for one client."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.attempt_s = timeout_s, timeout_s / SILENT_ATTEMPTS
        self.warned_s = 0.0  # time.monotonic() at the last warning

    def hook_into(self, client: Any) -> None:
        client.meta.events.register("before-call.s3", self.begin)
        client.meta.events.register_first("needs-retry.s3", self.again)

    def begin(self, context: dict[str, Any], **_: object) -> None:
        context["began_s"] = time.monotonic()

    def again(
        self,
        response: tuple[Any, dict[str, Any]] | None,
        operation: Any,
        attempts: int,
        caught_exception: Exception | None,
        request_dict: dict[str, Any],
        **_: object,
    ) -> float | None:
        """Return the seconds before the next attempt; None if boto3 should handle the response or error itself.

        If there is no time for another attempt, raises the error that ends the request.
        """
        if response:
            parsed = response[1]
        else:
            parsed = {}
        status, code = (
            parsed.get("ResponseMetadata", {}).get("HTTPStatusCode", 0),
            parsed.get("Error", {}).get("Code"),
        )
        if not isinstance(
            caught_exception, ConnectionError | HTTPClientError
        ) and not is_temporary(status, code):
            return None
        waited_s = time.monotonic() - request_dict["context"]["began_s"]
        left_s = self.timeout_s - self.attempt_s - waited_s
        if attempts < ATTEMPTS and left_s >= 0:
            pause_s = min(random.random() * 2 ** (attempts - 1), left_s)
            self.warn(
                caught_exception or f"{status} {code} for {request_dict['url'].split('?')[0]}",
                waited_s + pause_s,
            )
            return pause_s
        if caught_exception is not None:
            timeout_s = self.timeout_s
            raise NotAnswered(
                error=caught_exception, attempts=attempts, seconds=waited_s, timeout_s=timeout_s
            )
        parsed["ResponseMetadata"]["RetryAttempts"] = attempts - 1
        raise ClientError(parsed, operation.name)

    def warn(self, reason: object, waited_s: float) -> None:
        now_s = time.monotonic()
        if waited_s >= FIRST_WARNING_S and now_s - self.warned_s >= NEXT_WARNING_S:
            self.warned_s = now_s
            text = "waiting for S3: %s; retrying for up to %.0f s"
            logger.log(
                logging.WARNING if is_first() else logging.DEBUG,
                text,
                reason,
                self.timeout_s - waited_s,
            )
