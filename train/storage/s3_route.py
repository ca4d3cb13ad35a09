"""The proxy and certificate authorities that boto3 uses for S3, and their settings for the s3torchconnector."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from train.config import check

PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
# the environment variable by which OpenSSL finds the file of authorities
AUTHORITIES = "SSL_CERT_FILE"
PORTS = {"http": 80, "https": 443}


def proxy_to(endpoint: str) -> str | None:
    """Return the URL of boto3's proxy for a server; None without a proxy. Raises InputError if it is unusable."""
    scheme = urlsplit(endpoint).scheme
    given = get_environ_proxies(endpoint).get(scheme)
    if not given:
        return None
    url = given if "://" in given else f"http://{given.removeprefix('//')}"  # as botocore does
    is_usable = re.fullmatch(
        r"https?://([^/?#]*@)?([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?([/?#].*)?", url, re.ASCII
    )
    shown = re.sub("//.*@", "//", url)  # without a password
    check(
        bool(is_usable),
        f"{scheme}_proxy={shown}: a proxy for S3 must be http://HOST:PORT or https://HOST:PORT",
    )
    return url


def authorities(session: Any) -> str:
    """Return the path of the file with the certificate authorities that boto3 trusts."""
    named = session.get_config_variable("ca_bundle")
    return str(
        get_cert_path(os.environ.get("REQUESTS_CA_BUNDLE", True) if named is None else named)
    )


def check_route(endpoint: str, session: Any) -> None:
    """Raise InputError if boto3 cannot use the proxy, or if the file of authorities for https:// is missing."""
    proxy_to(endpoint)
    file = authorities(session)
    is_there = not endpoint.startswith("https:") or Path(file).is_file()
    check(
        is_there,
        f"there is no certificate file {file} (see AWS_CA_BUNDLE, ca_bundle in ~/.aws, REQUESTS_CA_BUNDLE)",
    )


def variables(endpoint: str, session: Any) -> dict[str, str | None]:
    """Return the environment variables that make the s3torchconnector use boto3's proxy and authorities.

    A variable with the value None must be unset, because the connector ignores NO_PROXY. Raises InputError if the
    connector cannot send the proxy's user or password.
    """
    proxy = proxy_to(endpoint)
    if proxy is not None:
        parts = urlsplit(proxy)
        user, at, host = parts.netloc.rpartition("@")
        # the connector does not decode %40, %2F and %3F
        is_plain = not re.search("[@/?]", unquote(user))
        check(
            is_plain,
            f"the proxy {host} cannot be used for shards: its user or password contains @, / or ?",
        )
        port = "" if parts.port else f":{PORTS[parts.scheme]}"  # the connector has no default port
        proxy = f"{parts.scheme}://{unquote(user)}{at}{host.rstrip(':')}{port}"
    return {**dict.fromkeys(PROXIES, proxy), AUTHORITIES: authorities(session)}
