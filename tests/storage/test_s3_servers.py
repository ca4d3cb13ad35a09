"""What servers and policies of buckets demand, against moto: encryption, no trailing checksums, whole prefixes."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
from botocore.awsrequest import AWSResponse
from moto.server import ThreadedMotoServer
from rejections import rejects
from services.process import set_aws

from train.storage.folders import open_folder
from train.storage.s3 import S3Config

ARN = "arn:aws:kms:us-east-1:123456789012:key/0a-b"
MIB = 2**20
DENIED = "User: arn:aws:iam::1:user/me is not authorized to perform: s3:PutObject on resource: x "
DENIED += "with an explicit deny in a resource-based policy"


@pytest.fixture(scope="module")
def server():
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def folder(server, monkeypatch):
    """A new bucket of a server without demands; `demand` adds one."""
    set_aws(monkeypatch, "key", "secret")
    monkeypatch.setattr(random, "random", lambda: 0.0)  # no pauses between attempts

    def opened(demand=lambda request: None, **settings):
        folder = open_folder("s3://bucket/runs/data", S3Config(endpoint=server, **settings))
        folder.client.create_bucket(Bucket="bucket")
        folder.client.meta.events.register(
            "before-send.s3", lambda request, **_: answer(request, demand(request))
        )
        return folder

    return opened


def answer(request, error):
    """Return the answer of a server that rejects a request; None passes it on."""
    if error is None:
        return None
    status, code, text = error
    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
    return AWSResponse(
        request.url, status, {}, SimpleNamespace(stream=lambda: iter([body]), read=lambda: body)
    )


def is_write(request):
    return request.method == "PUT" or (request.method == "POST" and "uploads" in request.url)


def names_key(request):
    """Demand encryption of each object, as a bucket's policy does."""
    is_part = "partNumber" in request.url
    is_encrypted = "x-amz-server-side-encryption" in request.headers
    return (
        (403, "AccessDenied", DENIED)
        if is_write(request) and not is_part and not is_encrypted
        else None
    )


WRITES = {
    "write": lambda folder, path: folder.write("a", b"x"),
    "parts": lambda folder, path: folder.write("a", b"x" * 20 * MIB),
    "upload": lambda folder, path: folder.upload("a", path),
    "create": lambda folder, path: folder.create("a", b"x"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("sse", ["AES256", "aws:kms", ARN])
def test_every_write_asks_for_the_encryption_that_is_set(folder, tmp_path, how, sse):
    (tmp_path / "a").write_bytes(b"x")
    encrypted = folder(names_key, sse=sse)
    encrypted.remove("a")
    WRITES[how](encrypted, tmp_path / "a")
    stored = encrypted.client.head_object(Bucket="bucket", Key="runs/data/a")
    assert stored["ServerSideEncryption"] == ("AES256" if sse == "AES256" else "aws:kms")
    assert sse != ARN or stored["SSEKMSKeyId"] == ARN
    plain = folder(names_key)
    says = "no permission to write it: .* explicit deny .*; .* set s3.sse$"
    rejects(says, WRITES[how], plain, tmp_path / "a")


def test_an_encryption_that_s3_does_not_have_is_rejected():
    for sse in ("aes256", "kms", "arn:aws:s3:::bucket", f"{ARN} ", ""):
        rejects("must be AES256, aws:kms, or the ARN of a KMS key", S3Config, sse=sse)


LACKS = {  # of a server that lacks a feature: the header, its answer, the call, and what is said
    "condition": (
        "If-None-Match",
        (501, "NotImplemented", "A header"),
        "create",
        "conditional write .*, or a disk",
    ),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_a_server_lacks_is_named_with_its_cure(folder, monkeypatch, what):
    header, error, how, says = LACKS[what]
    monkeypatch.setattr("train.storage.s3.ATTEMPTS", 2)

    def demand(request):
        return error if is_write(request) and header in request.headers else None

    rejects(f"S3 answers {error[0]} {error[1]}.*{says}", getattr(folder(demand), how), "a", b"x")


def test_a_directory_bucket_is_listed_by_whole_prefixes(folder):
    def demand(request):
        prefix = re.search(r"[?&]prefix=([^&]*)", request.url)
        is_whole = prefix is None or prefix[1] == "" or prefix[1].endswith("%2F")
        return (
            None
            if is_whole
            else (400, "InvalidRequest", "This bucket does not support this prefix")
        )

    directory = folder(demand)
    for name in ("list/ab", "list/abc/d", "list/b"):
        directory.write(name, b"x")
    assert directory.names("list/ab") == ["list/ab", "list/abc/d"]
    assert directory.names("list/abc") == ["list/abc/d"] and directory.names(
        "li"
    ) == directory.names("list/")
    assert directory.names("nothing") == [] and "list" in directory.names_here()


@pytest.mark.parametrize(
    "name",
    ["arn:aws:s3:us-west-2:123456789012:accesspoint/mine", "arn:aws:s3::1:accesspoint:m.mrap"],
)
def test_the_arn_of_an_access_point_is_rejected_and_its_alias_named(name):
    rejects(
        f"^s3://{name}/a is the ARN of an access point: use its alias",
        open_folder,
        f"s3://{name}/a",
        S3Config(),
    )
