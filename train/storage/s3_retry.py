"""How long a request to S3 is retried: one deadline for all its attempts, hooked into a boto3 client.

boto3 makes the attempts; this module decides whether there is another one, and after which pause.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

from train.host.launched import is_first
from train.storage.aws_errors import is_temporary

logger = logging.getLogger("train")
ATTEMPTS = 7  # at most, of a request that fails at once; the pauses between them take some 30 s
SILENT_ATTEMPTS = 6  # of a request that gets no answer, within s3.timeout_s
DENIED_S = 15.0  # a new role takes seconds to be known everywhere: until S3 has accepted one request, 403 is retried
FIRST_WARNING_S, NEXT_WARNING_S = 3.0, 10.0  # of waiting, before a warning is logged


class NotAnswered(BotoCoreError):
    """No attempt of a request was answered."""

    fmt = "{error} ({attempts} attempts in {seconds:.0f} s; s3.timeout_s={timeout_s:g})"


class RetryPolicy:
    """Decides on retries for one client. After a request that was given up, others get one attempt each until S3
    answers again: a run that ends during an outage does not wait for each of its last files.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.attempt_s = timeout_s, timeout_s / SILENT_ATTEMPTS
        self.is_away = self.was_accepted = False
        self.denied_s: float | None = None  # when S3 first denied this client a request, time.monotonic()
        self.warned_s = 0.0  # time.monotonic()

    def hook_into(self, client: Any) -> None:
        client.meta.events.register("before-call.s3", self.begin)
        client.meta.events.register_first("needs-retry.s3", self.again)

    def begin(self, context: dict[str, Any], **_: object) -> None:
        now_s = time.monotonic()
        context["retry_until"] = now_s, now_s + self.timeout_s

    def again(
        self,
        response: tuple[Any, dict[str, Any]] | None,
        operation: Any,
        attempts: int,
        caught_exception: Exception | None,
        request_dict: dict[str, Any],
        **_: object,
    ) -> float | None:
        """Return the pause before the next attempt, or None if boto3 is to take the answer or error as it is. Raises
        the error that ends the request, where boto3 would retry.
        """
        parsed = response[1] if response else {}
        status, code = parsed.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), parsed.get("Error", {}).get("Code")
        now_s, (began_s, until_s) = time.monotonic(), request_dict["context"]["retry_until"]
        if status == 403 and code in ("AccessDenied", "403") and not self.was_accepted:  # 403: of HEAD
            self.denied_s = self.denied_s or now_s
            until_s = min(until_s, self.denied_s + DENIED_S)
            is_last = attempts >= ATTEMPTS or now_s >= until_s
        elif isinstance(caught_exception, ConnectionError | HTTPClientError) or is_temporary(status, code):
            is_last = attempts >= ATTEMPTS or self.is_away or now_s + self.attempt_s > until_s
            self.is_away = is_last
            until_s -= self.attempt_s
        else:
            self.is_away = self.is_away and response is None
            self.was_accepted = self.was_accepted or 200 <= status < 300
            return None
        if not is_last:
            pause_s = min(random.random() * 2 ** (attempts - 1), max(0.0, until_s - now_s))
            reason = caught_exception or f"{status} {code} for {request_dict['url'].split('?')[0]}"
            self.warn(reason, began_s, until_s, pause_s)
            return pause_s
        if caught_exception is not None:
            seconds = now_s - began_s
            raise NotAnswered(error=caught_exception, attempts=attempts, seconds=seconds, timeout_s=self.timeout_s)
        parsed["ResponseMetadata"]["RetryAttempts"] = attempts - 1
        raise ClientError(parsed, operation.name)

    def warn(self, reason: object, began_s: float, until_s: float, pause_s: float) -> None:
        now_s = time.monotonic()
        if now_s + pause_s - began_s >= FIRST_WARNING_S and now_s - self.warned_s >= NEXT_WARNING_S:
            self.warned_s = now_s
            text = "waiting for S3: %s; retried for up to %.0f s"
            logger.log(logging.WARNING if is_first() else logging.DEBUG, text, reason, until_s - now_s)
