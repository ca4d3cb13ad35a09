"""Settings of S3."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from train.config.checks import Section, check, setting


@dataclass(kw_only=True)
class S3Config(Section, prefix="s3."):
    """How S3 is reached. None: as AWS's own tools find it (environment, ~/.aws, the instance's role)."""

    endpoint: str | None = None  # URL of an S3-compatible server
    region: str | None = None
    profile: str | None = None  # of ~/.aws: the credentials that are used
    path_style: bool = False  # the bucket is in the path, not in the host name; most S3-compatible servers need it
    timeout_s: float = setting(60.0, above=0)  # after which a request without an answer fails, all its retries included

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is not None:
            check_endpoint("s3.endpoint", self.endpoint)

    def flags(self) -> list[str]:
        """The same settings as command line flags."""
        given = {"--endpoint": self.endpoint, "--region": self.region, "--profile": self.profile}
        flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]  # it may begin with a dash
        return [*flags, "--path-style"] if self.path_style else flags


def check_endpoint(key: str, url: str) -> None:
    """Raise InputError, without repeating the URL, if it is more than a server's address: run folders keep it."""
    try:
        parts = urlsplit(url)
        has_secret = "@" in url or bool(parts.query or parts.fragment)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # the port or the address is none
        has_secret, ok = "@" in url, False
    check(
        not has_secret,
        f"{key} holds more than an address (user:password@, ? or #), and run folders would keep it; give "
        "http://host:port, and credentials as AWS's tools do (environment, ~/.aws, a role)",
    )
    check(ok, f"{key}={url} must be a server's address, http:// or https://, as http://host:port")
