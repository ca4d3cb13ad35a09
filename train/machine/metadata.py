"""EC2's instance metadata service, version 2. Every request carries a token; proxies and redirects are not used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from http.client import HTTPConnection
from urllib.parse import urlsplit

from train.config import check

ENDPOINTS = {"ipv4": "http://169.254.169.254", "ipv6": "http://[fd00:ec2::254]"}
TIMEOUT_S = 1.0  # seconds per request; the service runs on the machine's host
TOKEN_S = 21600  # the longest lifetime of a token
RENEWS_S = 300  # how long before its end a token is renewed


class Metadata:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.url = urlsplit(endpoint)
        check(
            self.url.scheme == "http" and self.url.hostname is not None,
            f"AWS_EC2_METADATA_SERVICE_ENDPOINT={endpoint} must be a URL like {ENDPOINTS['ipv4']}",
        )
        self.token = ""
        self.renew_at_s = 0.0

    def get(self, path: str) -> str | None:
        """Return the text of a category under /latest/meta-data/; None if the category does not exist.

        Raises OSError, HTTPException or ValueError if the service does not answer, or if its answer is invalid.
        """
        # the second attempt has a new token, in case the service has lost the first
        for _ in range(2):
            if time.monotonic() >= self.renew_at_s:
                self.renew()
            status, body = self.request(
                "GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self.token}
            )
            if status != 401:
                break
            self.renew_at_s = 0.0
        if status not in (200, 404):
            raise OSError(f"the request for {path} failed with status {status}")
        if status == 404:
            return None
        return body.decode("ascii")

    def renew(self) -> None:
        asked_s = time.monotonic()
        try:
            status, body = self.request(
                "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            )
        except TimeoutError as error:
            hint = "for containers the instance needs HttpPutResponseHopLimit=2"
            raise TimeoutError(f"no token within {TIMEOUT_S:g} s ({hint})") from error
        if status != 200:
            raise OSError(f"the request for a token failed with status {status}")
        self.token = body.decode("ascii")
        self.renew_at_s = asked_s + TOKEN_S - RENEWS_S

    def request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = HTTPConnection(self.url.hostname or "", self.url.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self.url.path.rstrip("/") + path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def metadata_endpoint(environ: Mapping[str, str]) -> str:
    """Return the URL of the service, from the environment variables that botocore reads."""
    mode = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower()
    return environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or ENDPOINTS.get(
        mode, ENDPOINTS["ipv4"]
    )
