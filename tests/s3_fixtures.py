"""Fixtures: a real S3 server, whose store all processes of a test run share, and a fresh bucket in it for a test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.endpoint
import pytest
from botocore.config import Config
from services.fault_proxy import OF_A_TEST, FaultProxy
from services.process import set_aws
from services.s3_server import PACKAGES, S3Server, missing_programs

from train.config import S3Config
from train.storage.folders import Folder, open_folder

REGION = "us-east-1"


@dataclass
class S3Service:
    """A gateway, and before it the proxy, which is what the tested code talks to."""

    server: S3Server
    proxy: FaultProxy

    @property
    def endpoint(self) -> str:
        return self.proxy.endpoint

    def client(self, endpoint: str | None = None, tries: int = 3) -> Any:
        """boto3's. None: past the proxy, since what a test does to prepare and to look is not for it to count."""
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.server.endpoint,
            region_name=REGION,
            aws_access_key_id=self.server.key,
            aws_secret_access_key=self.server.secret,
            config=Config(retries={"mode": "standard", "total_max_attempts": tries}),
        )


@dataclass
class Bucket:
    name: str
    service: S3Service
    client: Any  # see S3Service.client

    @property
    def proxy(self) -> FaultProxy:
        return self.service.proxy

    def location(self, prefix: str = "") -> str:
        return f"s3://{self.name}/{prefix}".rstrip("/")

    def config(self, **changes: Any) -> S3Config:
        return S3Config(**{"endpoint": self.service.endpoint, "region": REGION, **changes})

    def folder(self, prefix: str = "run", **changes: Any) -> Folder:
        return open_folder(self.location(prefix), self.config(**changes))

    def overrides(self) -> list[str]:
        """The same for a command line."""
        return [
            f"s3.endpoint={self.service.endpoint}",
            f"s3.region={REGION}",
        ]

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def flip(self, key: str, at: int) -> None:
        """Change a bit of an object."""
        content = bytearray(self.get(key))
        content[at] ^= 1
        self.put(key, bytes(content))


@pytest.fixture(scope="session")
def s3_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[S3Service]:
    missing = missing_programs()
    if missing:
        reason = f"no S3 server to test with ({', '.join(missing)} missing): apt-get install {' '.join(PACKAGES)}"
        if request.config.getoption("--require-services"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()  # of this process; the parent is that of all workers
    pid = os.getppid() if is_worker else os.getpid()  # the process that ends last
    server = S3Server((base.parent if is_worker else base) / "s3", ends_with_pid=pid)
    proxy = FaultProxy(server.port, log=tmp_path_factory.mktemp("proxy") / "log")
    yield S3Service(server, proxy)
    proxy.stop()
    server.kill()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that boto3 wants between its tries, in seconds; nobody waits for them."""
    wanted: list[float] = []
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=wanted.append))
    return wanted


@pytest.fixture
def bucket(s3_server: S3Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A new one, no faults, and an environment (that of child processes too) that leads to it and nowhere else."""
    set_aws(monkeypatch, s3_server.server.key, s3_server.server.secret)
    s3_server.server.start_gateway()  # a test may have killed it
    name = f"{OF_A_TEST}{uuid.uuid4().hex}"
    client = s3_server.client()
    s3_server.proxy.bucket = name
    s3_server.proxy.set()
    client.create_bucket(Bucket=name)
    yield Bucket(name, s3_server, client)
    s3_server.proxy.set()
