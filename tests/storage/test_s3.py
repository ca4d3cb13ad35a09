"""Folders on disk and in S3: what both do alike, and every way in which S3 rejects, against a real server."""

from __future__ import annotations

import base64
import errno
import os
import random
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest
from rejections import rejects
from services.fault_proxy import Fault
from services.process import free_port

from launch.ec2.api import Api
from train.config import InputError, NotPermitted, Unreachable
from train.storage import s3
from train.storage.folders import open_folder

MIB = 2**20
pytestmark = pytest.mark.usefixtures("pauses")
DISK_AND_S3 = pytest.mark.parametrize("kind", ["disk", "s3"])


@pytest.fixture
def folder(request, kind, tmp_path):
    if kind == "disk":
        return open_folder(str(tmp_path / "runs" / "data"), s3.S3Config())
    return in_s3(request.getfixturevalue("bucket"))


def in_s3(bucket, prefix="runs/data", **changes):
    return bucket.folder(prefix, **changes)


# ---- what both do alike ---------------------------------------------------------------------------------------------


@DISK_AND_S3
def test_a_missing_file_is_an_error_to_read_and_none_to_remove(folder):
    for _ in range(2):  # without the folder, and with it
        rejects("runs/data/missing", folder.read, "missing", error=FileNotFoundError)
        assert folder.size("missing") is None
        folder.remove("missing")
        assert folder.names("missing") == []
        folder.write("other", b"")


@DISK_AND_S3
def test_names_come_in_order_with_those_of_subfolders(folder):
    for name in ("b/c", "b.txt", "a", "b/a/d"):
        folder.write(name, b"x")
    assert folder.names() == ["a", "b.txt", "b/a/d", "b/c"]
    assert folder.names("b/") == ["b/a/d", "b/c"]
    assert folder.names("b") == ["b.txt", "b/a/d", "b/c"]
    folder.remove("b/a/d")
    assert folder.names("b/") == ["b/c"]


@DISK_AND_S3
def test_a_file_goes_up_and_comes_back(folder, tmp_path):
    (tmp_path / "here").write_bytes(b"first")
    for name, here in (("a/b", "here"), ("c", "copy")):
        folder.upload(name, tmp_path / here)
        folder.download(name, tmp_path / "copy")
    assert folder.read("c") == b"first" and folder.listing() == {
        name: folder.head(name) for name in ("a/b", "c")
    }
    folder.remove("c")
    rejects("c", folder.download, "c", tmp_path / "copy", error=FileNotFoundError)
    assert folder.head("c") is None and (tmp_path / "copy").read_bytes() == b"first"


@DISK_AND_S3
@pytest.mark.parametrize("how", ["write", "create"])
def test_a_write_that_fails_leaves_nothing(request, kind, folder, monkeypatch, how):
    folder.write("other", b"x")
    if kind == "disk":
        monkeypatch.setattr(
            os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        )
        words = "cannot write .*/model: No space left on device; free some space or choose another folder"
    else:
        proxy = request.getfixturevalue("bucket").proxy
        proxy.set(Fault("status", match="^PUT|^POST .*uploadId", skip=3, code=507, error="Full"))
        words = "s3://.*/model: S3 answers 507 Full: by the fault proxy"
        if how == "create":
            proxy.set(Fault("status", match="^PUT", code=507, error="Full"))
    rejects(words, getattr(folder, how), "model", b"x" * 40 * MIB)
    assert folder.names() == ["other"]
    assert folder.size("model") is None
    if kind == "disk":
        assert [path.name for path in folder.path.iterdir()] == ["other"]
    else:
        bucket = request.getfixturevalue("bucket")
        assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


# ---- the disk -------------------------------------------------------------------------------------------------------


# ---- S3 at work -----------------------------------------------------------------------------------------------------


def test_more_names_than_one_listing_holds(bucket):
    """1,000 in general, ten here."""
    for number in range(25):
        bucket.put(f"runs/data/{number:02d}", b"")
    folder = in_s3(bucket)
    folder.client.meta.events.register(
        "before-parameter-build.s3", lambda params, **_: params.update(MaxKeys=10)
    )
    assert folder.names() == [f"{number:02d}" for number in range(25)]
    assert len(bucket.proxy.requests("list-type")) == 3


# ---- S3 in trouble --------------------------------------------------------------------------------------------------


def everything(folder):
    """Each operation with the action that a rejection of it names."""
    return [
        ("read", lambda: folder.read("a")),
        ("read", lambda: folder.size("a")),
        ("write", lambda: folder.write("a", b"x")),
        ("write", lambda: folder.create("b", b"x")),
        ("list", lambda: folder.names("a")),
        ("delete", lambda: folder.remove("a")),
    ]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", times=3),
        Fault("status", times=3, code=429, error="TooManyRequests"),
        Fault("status", times=3, code=400, error="RequestTimeout"),
        Fault("lose", times=1),
    ],
    ids=lambda fault: f"{fault.do} {fault.code} {fault.error}",
)
def test_what_passes_is_waited_for(bucket, fault):
    folder = in_s3(bucket)
    content = os.urandom(20 * MIB)
    for act, expected in (
        (lambda: folder.write("a", content), None),
        (lambda: folder.read("a"), content),
        (lambda: folder.size("a"), len(content)),
        (lambda: folder.create("b", b"x"), True),
        (lambda: folder.create("b", b"x"), False),
        (lambda: folder.names(), ["a", "b"]),
        (lambda: folder.remove("b"), None),
    ):
        bucket.proxy.set(fault)
        assert act() == expected
        assert (
            len([request for request in bucket.proxy.requests() if request.fault]) == fault.times
        )


@pytest.mark.parametrize("is_there", [True, False])
def test_what_stays_is_unreachable_after_some_tries(bucket, monkeypatch, pauses, is_there):
    """Each time: also for a client that has seen many errors."""
    monkeypatch.setattr(random, "random", lambda: 0.5)  # the jitter
    nobody = f"http://127.0.0.1:{free_port()}"
    folder = in_s3(bucket) if is_there else in_s3(bucket, endpoint=nobody)
    says = (
        rf"S3 answers 503 .*, {s3.ATTEMPTS} times$"
        if is_there
        else f"no complete answer from {nobody}: Could not"
    )
    for _verb, act in everything(folder):
        bucket.proxy.set(Fault("status"))
        pauses.clear()
        rejects(rf"^s3://.*/[ab]: {says}", act, error=Unreachable)
        assert 10 < sum(pauses) < 20 and len(pauses) == s3.ATTEMPTS - 1
        assert len(bucket.proxy.requests()) == s3.ATTEMPTS * is_there


EUROPE = {"x-amz-bucket-region": "eu-west-3"}
IN_EUROPE = "the bucket is in region eu-west-3, not us-east-1; set s3.region"
REJECTIONS = {  # code and status of S3, and what is said of them
    ("RequestTimeTooSkewed", 403): "this machine's clock is wrong",
    ("NotImplemented", 501): "S3 answers 501 NotImplemented: by the fault proxy",
    (
        "ExpiredToken",
        400,
    ): "the AWS credentials have expired (ExpiredToken); renew them (aws sso login)",
    (
        "PermanentRedirect",
        301,
    ): IN_EUROPE,  # boto3 would ask again there; the connector, for the shards, could not
}


@pytest.mark.parametrize(("error", "code"), REJECTIONS)
def test_what_no_try_changes_is_asked_once_and_named(bucket, error, code):
    bucket.proxy.set(Fault("status", code=code, error=error, headers=EUROPE))
    rejects(f"^s3://.*/runs/data/a: {re.escape(REJECTIONS[error, code])}", in_s3(bucket).read, "a")
    # ~/.aws may hold others by now
    assert len(bucket.proxy.requests()) == 1 + (error == "ExpiredToken")


@pytest.mark.parametrize(
    "fault", [Fault("reset", after=MIB), Fault("stall", after=MIB)], ids=["reset", "stall"]
)
def test_a_body_that_breaks_off_is_read_again(bucket, monkeypatch, fault):
    monkeypatch.setattr(s3, "ATTEMPTS", 3)
    folder, content = in_s3(bucket, timeout_s=3.0), os.urandom(3 * MIB)  # 0.5 s for an attempt
    bucket.put("runs/data/a", content)
    fault.times = 2
    bucket.proxy.set(fault)
    assert folder.read("a") == content
    fault.times = None
    bucket.proxy.set(fault)
    rejects(
        f"/a: no complete answer from {bucket.service.endpoint}: ",
        folder.read,
        "a",
        error=Unreachable,
    )
    assert len(bucket.proxy.requests()) == 3


def test_a_byte_that_changed_on_the_way_is_noticed(bucket):
    """Where the server returns a checksum, as AWS does and this one does not."""
    content = os.urandom(3 * MIB)
    bucket.put("runs/data/a", content)
    checksum = base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()
    fault = Fault("flip", after=MIB, times=1, headers={"x-amz-checksum-crc32": checksum})
    bucket.proxy.set(fault)
    assert in_s3(bucket).read("a") == content
    fault.times = None
    bucket.proxy.set(fault)
    with pytest.raises(
        Unreachable,
        match="no complete answer from .*: Expected checksum .* did not match calculated",
    ):
        in_s3(bucket).read("a")


def test_a_body_that_is_damaged_on_the_way_up_is_rejected(bucket):
    """Encrypted connections notice it themselves."""
    folder = in_s3(bucket)
    content = os.urandom(20 * MIB)
    bucket.proxy.set(Fault("damage", match="^PUT"))
    for act in (folder.write, folder.create):
        rejects("S3 answers 400 XAmzContentSHA256Mismatch", act, "a", content, error=Unreachable)
    bucket.proxy.set()
    assert folder.names() == []


# ---- what the user has to fix ---------------------------------------------------------------------------------------


KEY, SECRET = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
UNKNOWN = "s3://.*/a: S3 does not recognise these credentials "
UNUSABLE = [  # environment (None: not set), settings, and what is said of them
    (
        {KEY: None, SECRET: None},
        {},
        "s3://.*/a: no AWS credentials on this machine; attach a role",
    ),
    ({SECRET: None}, {}, f"AWS credentials: Partial .* in env, missing: {SECRET}; attach a role"),
    ({KEY: "wrong"}, {}, rf"{UNKNOWN}\(InvalidAccessKeyId\); aws sts get-call"),
    (
        {"AWS_PROFILE": "nobody"},
        {},
        "AWS_PROFILE=nobody is not in ~/.aws; aws configure list-profiles",
    ),
    (
        {},
        {"endpoint": "http://a b"},
        "AWS's settings cannot be used: ValueError: Invalid endpoint",
    ),
]


@pytest.mark.parametrize(
    ("environment", "settings", "says"), UNUSABLE, ids=[each[2] for each in UNUSABLE]
)
def test_credentials_and_settings_that_cannot_be_used_are_named_in_one_line(
    bucket, monkeypatch, environment, settings, says
):
    for name, value in environment.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    rejects(f"^{says}", lambda: in_s3(bucket, **settings).read("a"))


ROLE = "role_arn = arn:aws:iam::1:role/x"
BROKEN = {  # what is said of a file of ~/.aws, by its content
    "[default]\nregion = a\nregion = b\n": "Unable to parse config file: .*/aws; check .*/aws and ",
    "\xff\xfe[\0d\0": "Unable to parse config file: .*/aws; check",
    "[default]\ns3 =\nregion = a\n": "AttributeError: 'str' object has no .*; check .*/aws and ",
    f"[default]\n{ROLE}\nsource_profile = b\n[profile b]\n{ROLE}\nsource_profile = default\n": "Infinite loop",
    "[default]\ncredential_process = /no/such\n": "No such file or directory: '/no/such'; check .*/aws and ",
    "[default]\ncredential_process = /bin/echo x\n": "JSONDecodeError: .*; check .*/aws and ",
    f"[default]\n{ROLE}\nweb_identity_token_file = /no/token\n": "No such file or directory: '/no/token'; check",
    f"[default]\n{ROLE}\nweb_identity_token_file = /proc\n": "Is a directory: '/proc'; check",
}


@pytest.fixture
def without_keys(monkeypatch, tmp_path):
    """An environment whose credentials can come only from the file that is returned."""
    for name in (KEY, SECRET):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    return tmp_path / "aws"


@pytest.mark.slow
@pytest.mark.parametrize("content", BROKEN, ids=BROKEN.values())
def test_a_broken_file_of_aws_is_named_and_no_object_counts_as_missing(
    without_keys, tmp_path, content
):
    without_keys.write_bytes(content.encode("latin-1"))
    says = rf"^AWS's settings cannot be used: .*{BROKEN[content]}"
    nobody = s3.S3Config(endpoint=f"http://127.0.0.1:{free_port()}", timeout_s=0.1)
    acts = [
        lambda folder: folder.read("a"),
        lambda folder: folder.size("a"),
        lambda folder: folder.names(),
    ]
    acts += [
        lambda folder: folder.download("a", tmp_path / "a"),
        lambda folder: folder.remove("a"),
    ]
    for act in acts:
        rejects(says, lambda act=act: act(open_folder("s3://bucket/runs", nobody)))
    rejects(says, lambda: Api(region="us-east-1").image("us-east-1", "ami-1"))


def test_only_the_answer_of_s3_says_that_an_object_is_missing(bucket, tmp_path):
    folder = in_s3(bucket)
    bucket.put("runs/data/a", b"x")
    rejects(
        "/a: cannot read it: .*No such file",
        folder.download,
        "a",
        tmp_path / "no" / "a",
        error=Unreachable,
    )
    rejects(
        "/a: cannot write it: .*No such file",
        folder.upload,
        "a",
        tmp_path / "no",
        error=Unreachable,
    )
    bucket.proxy.set(Fault("status", code=404, error="", match="runs/data/a"))  # of a proxy, say
    for act in (folder.read, folder.size, folder.head):
        rejects("/a: S3 answers 404", act, "a")
    rejects("/a: S3 answers 404", folder.download, "a", tmp_path / "a")


def test_a_missing_permission_is_named(bucket, monkeypatch):
    """By every operation, with its action."""
    bucket.put("runs/data/a", b"x")
    key, secret = bucket.service.server.add_user()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    for action, act in everything(in_s3(bucket)):
        says = f"/[ab]: no permission to {action} it.*; add the permission to the role's"
        with pytest.raises(InputError, match=says) as raised:
            act()
        assert ("or it is missing" in str(raised.value)) == (action == "read")
        # which a run continues without
        assert isinstance(raised.value, NotPermitted) == (action == "delete")
    assert bucket.keys() == ["runs/data/a"]


def test_credentials_renewed_in_a_file_are_taken_up(bucket, monkeypatch, tmp_path):
    """boto3 reads the file once. Whatever comes first, and several threads at once."""
    file = tmp_path / "credentials"
    server = bucket.service.server
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    bucket.put("runs/data/a", b"x")

    def at_once(folder):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(folder.read, ["a"] * 8)) == [b"x"] * 8

    for number in range(7):
        file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = old\n")
        folder = in_s3(bucket)
        acts = [partial(at_once, folder), *(act for _verb, act in everything(folder))]
        rejects("does not recognise these credentials", folder.write, "b", b"x")
        file.write_text("[default]\naws_access_key_id = half\n")  # as another program writes it
        rejects("does not recognise these credentials", folder.write, "b", b"x")
        file.write_text(
            f"[default]\naws_access_key_id = {server.key}\naws_secret_access_key = {server.secret}\n"
        )
        acts[number]()


# ---- how long S3 is waited for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "do"), [("read", "stall"), ("download", "delay"), ("size", "delay")]
)
def test_a_silent_s3_is_given_up_after_the_deadline_whatever_is_asked(
    bucket, tmp_path, action, do
):
    """Two layers that ask again, of boto3 and of its transfers or ours, do not multiply."""
    bucket.put("runs/data/a", b"x" * 1000)
    folder = in_s3(bucket, timeout_s=1.2)
    arguments = {"download": ["a", tmp_path / "a"]}.get(action, ["a"])
    bucket.proxy.set(Fault(do, match="^GET" if action != "size" else ""))
    words = rf"^s3://.*/runs/data/a: no complete answer from {bucket.service.endpoint}: "
    most = s3.ATTEMPTS
    if action == "download":  # after a HEAD, which is answered
        most = 1 + s3.DOWNLOAD_ATTEMPTS * s3.ATTEMPTS
    rejects(words, getattr(folder, action), *arguments, error=Unreachable)
    assert len(bucket.proxy.requests("^(GET|HEAD).*runs/data/a")) <= most


# ---- what programs read ---------------------------------------------------------------------------------------------
