"""Folders on disk and in S3: what both do alike, and every way in which S3 says no, against a real server."""

from __future__ import annotations

import base64
import errno
import os
import random
import re
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import botocore.endpoint
import pytest
from services.fault_proxy import Fault
from services.process import free_port

from train import s3, s3_patience, storage
from train.config import InputError, Unreachable
from train.storage import open_folder

MIB = 2**20
DISK_AND_S3 = pytest.mark.parametrize("kind", ["disk", "s3"])


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Those that boto3 wants between its tries, in seconds; nobody waits for them."""
    wanted = []
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=wanted.append))
    return wanted


@pytest.fixture
def folder(request, kind, tmp_path):
    if kind == "disk":
        return open_folder(str(tmp_path / "runs" / "data"), s3.S3Config())
    return in_s3(request.getfixturevalue("bucket"))


def in_s3(bucket, prefix="runs/data", **changes):
    return open_folder(bucket.location(prefix), bucket.config(**changes))


# ---- what both do alike ---------------------------------------------------------------------------------------------


@DISK_AND_S3
@pytest.mark.parametrize("name", ["a", "tokenizer/tokenizer.json", "späte Tokens +=%&?#.txt"])
def test_what_is_written_is_read(folder, name):
    for content in (b"", bytes(range(256)), b"shorter"):
        folder.write(name, content)
        assert folder.read(name) == content
        assert folder.size(name) == len(content)
        assert folder.names() == [name]


@DISK_AND_S3
def test_a_missing_file_is_an_error_to_read_and_none_to_remove(folder):
    for _ in range(2):  # without the folder, and with it
        with pytest.raises(FileNotFoundError, match="runs/data/missing"):
            folder.read("missing")
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
def test_a_folder_knows_only_its_own_files(request, kind, folder, tmp_path):
    bucket = request.getfixturevalue("bucket") if kind == "s3" else None
    place = bucket.location("runs/data2") if bucket else str(tmp_path / "runs" / "data2")
    open_folder(place, folder.s3 if bucket else s3.S3Config()).write("neighbour", b"x")
    assert folder.names() == []


@DISK_AND_S3
def test_an_existing_file_is_not_created(folder):
    assert folder.create("lock/owner", b"first")
    assert not folder.create("lock/owner", b"second")
    assert folder.read("lock/owner") == b"first"
    folder.remove("lock/owner")
    assert folder.create("lock/owner", b"third")


@DISK_AND_S3
def test_of_eight_threads_one_creates_the_file(kind, folder):
    for turn in range({"disk": 50, "s3": 10}[kind]):
        name, together = f"lock-{turn}", threading.Barrier(8)

        def create(number, name=name, together=together):
            together.wait()
            return folder.create(name, b"%d" % number * 10_000)

        with ThreadPoolExecutor(8) as threads:
            won = list(threads.map(create, range(8)))
        assert won.count(True) == 1
        assert folder.read(name) == b"%d" % won.index(True) * 10_000
    assert len(folder.names()) == turn + 1


@DISK_AND_S3
def test_eight_threads_write_the_same_file(folder):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: folder.write("a", b"%d" % number * 10_000), range(8)))
    content = folder.read("a")
    assert content == content[:1] * 10_000
    assert folder.names() == ["a"]


@DISK_AND_S3
def test_a_reader_sees_the_old_content_or_the_new_one(folder):
    """While 40 MiB arrive, which for S3 is a multipart upload."""
    old, new = b"old", os.urandom(40 * MIB)
    folder.write("model", old)
    writer = threading.Thread(target=folder.write, args=("model", new))
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append((folder.read("model"), folder.names()))
    seen.append((folder.read("model"), folder.names()))
    assert all(content in (old, new) and names == ["model"] for content, names in seen)
    assert seen[-1][0] == new


@DISK_AND_S3
@pytest.mark.parametrize("how", ["write", "create"])
def test_a_write_that_fails_leaves_nothing(request, kind, folder, monkeypatch, how):
    folder.write("other", b"x")
    if kind == "disk":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(storage, "sync_file", lambda _path: raise_(full))
        words = "cannot write .*/model: No space left on device; free some space or choose another folder"
    else:
        proxy = request.getfixturevalue("bucket").proxy
        proxy.set(Fault("status", match="^PUT|^POST .*uploadId", skip=3, code=507, error="Full"))
        words = "s3://.*/model: S3 answers 507 Full: by the fault proxy"
        if how == "create":
            proxy.set(Fault("status", match="^PUT", code=507, error="Full"))
    with pytest.raises(InputError, match=words):
        getattr(folder, how)("model", b"x" * 40 * MIB)
    assert folder.names() == ["other"]
    assert folder.size("model") is None
    if kind == "disk":
        assert [path.name for path in folder.path.iterdir()] == ["other"]
    else:
        bucket = request.getfixturevalue("bucket")
        assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


def raise_(error):
    raise error


# ---- the disk -------------------------------------------------------------------------------------------------------


def test_a_location_says_where_a_folder_is(tmp_path, bucket):
    for location in (str(tmp_path), f"file://{tmp_path}"):
        folder = open_folder(location, s3.S3Config())
        assert (type(folder), folder.location) == (storage.LocalFolder, str(tmp_path))
    for location, prefix in (("s3://b-1/a/b/", "a/b"), ("s3://b-1", ""), ("s3://b-1/", "")):
        folder = open_folder(location, bucket.config())
        assert (folder.bucket, folder.prefix, folder.location) == ("b-1", prefix, location.rstrip("/"))
    with pytest.raises(InputError, match="https://x/y: only local folders are supported here"):
        open_folder("https://x/y", s3.S3Config())
    with pytest.raises(InputError, match="s3:///a names no bucket; write s3://bucket/folder"):
        open_folder("s3:///a", bucket.config())


def test_a_file_in_place_of_a_folder_is_said(tmp_path):
    (tmp_path / "file").touch()
    folder = open_folder(str(tmp_path / "file"), s3.S3Config())
    with pytest.raises(InputError, match=r"cannot read .*file/a: Not a directory$"):
        folder.read("a")
    with pytest.raises(InputError, match="cannot delete .*file/a: Not a directory"):
        folder.remove("a")
    for write in (folder.write, folder.create):
        with pytest.raises(InputError, match="cannot write .*file/a: .*; choose another folder"):
            write("a", b"x")


# ---- S3 at work -----------------------------------------------------------------------------------------------------


def test_a_whole_bucket_is_a_folder_too(bucket):
    folder = in_s3(bucket, "")
    folder.write("a/b", b"x")
    assert folder.names() == bucket.keys() == ["a/b"]


def test_the_bucket_may_be_in_the_path_instead_of_the_host_name(bucket):
    named = bucket.service.endpoint.replace("127.0.0.1", "localhost")  # before an address it never is
    in_s3(bucket, endpoint=named).write("a", b"x")
    assert bucket.keys() == ["runs/data/a"]
    assert ".localhost" in in_s3(bucket, endpoint=named, path_style=False).client.generate_presigned_url(
        "get_object", Params={"Bucket": bucket.name, "Key": "a"}
    )


def test_more_names_than_one_listing_holds(bucket):
    """1,000 in general, ten here."""
    for number in range(25):
        bucket.put(f"runs/data/{number:02d}", b"")
    folder = in_s3(bucket)
    folder.client.meta.events.register("before-parameter-build.s3", lambda params, **_: params.update(MaxKeys=10))
    assert folder.names() == [f"{number:02d}" for number in range(25)]
    assert len(bucket.proxy.requests("list-type")) == 3


def test_folder_markers_are_no_files(bucket):
    bucket.put("runs/data/", b"")
    bucket.put("runs/data/sub/", b"")
    bucket.put("runs/data/sub/a", b"")
    assert in_s3(bucket).names() == ["sub/a"]


def test_a_large_file_goes_in_parts_and_a_small_one_at_once(bucket):
    content = os.urandom(40 * MIB)
    in_s3(bucket).write("large", content)
    assert bucket.get("runs/data/large") == content
    assert sorted(len(part.query) > 0 for part in bucket.proxy.requests("^PUT")) == [True] * 3
    bucket.proxy.set()
    in_s3(bucket).write("small", b"x")
    assert [request.query for request in bucket.proxy.requests()] == [""]


def test_a_missing_file_costs_one_request_to_read(bucket):
    with pytest.raises(FileNotFoundError):
        in_s3(bucket).read("missing")
    assert len(bucket.proxy.requests()) == 1


# ---- S3 in trouble --------------------------------------------------------------------------------------------------


def everything(folder):
    """Each operation with the verb that a refusal of it names."""
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
        Fault("status", times=3, code=500, error="InternalError"),
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
        (lambda: folder.create("b", b"x"), True),
        (lambda: folder.create("b", b"x"), False),
        (lambda: folder.names(), ["a", "b"]),
        (lambda: folder.remove("b"), None),
    ):
        bucket.proxy.set(fault)
        assert act() == expected
        assert len([request for request in bucket.proxy.requests() if request.fault]) == fault.times


def test_a_lost_answer_to_head_is_asked_for_again(bucket):
    bucket.put("runs/data/a", b"xyz")
    for fault in (Fault("status", times=3), Fault("lose", times=1)):
        bucket.proxy.set(fault)
        assert in_s3(bucket).size("a") == 3


def test_a_conflict_with_another_writer_is_settled(bucket):
    bucket.proxy.set(Fault("status", match="^PUT", times=1, code=409, error="ConditionalRequestConflict"))
    assert in_s3(bucket).create("a", b"x")
    assert bucket.get("runs/data/a") == b"x"


def test_what_stays_is_unreachable_after_all_tries(bucket):
    folder = in_s3(bucket)
    for fault in (Fault("status"), Fault("status", code=429, error="TooManyRequests")):
        for _verb, act in everything(folder):
            bucket.proxy.set()
            folder.names()  # the outage before is over
            bucket.proxy.set(fault)
            with pytest.raises(Unreachable, match=rf"^s3://.*/[ab]: S3 answers {fault.code} .*, {s3.ATTEMPTS} times$"):
                act()
            assert len(bucket.proxy.requests()) == s3.ATTEMPTS


@pytest.mark.parametrize(
    "fault", [Fault("status"), Fault("status", code=500), Fault("lose")], ids=["503", "500", "lose"]
)
def test_half_a_minute_is_waited_each_time(bucket, monkeypatch, pauses, fault):
    """Also by a client that has seen many errors."""
    monkeypatch.setattr(random, "random", lambda: 0.5)  # the jitter
    folder = in_s3(bucket)
    for _ in range(10):
        bucket.proxy.set()
        folder.names()
        bucket.proxy.set(fault)
        pauses.clear()
        with pytest.raises(Unreachable):
            folder.read("a")
        assert 25 < sum(pauses) < 40


def test_a_clock_that_is_wrong_is_named(bucket):
    bucket.proxy.set(Fault("status", code=403, error="RequestTimeTooSkewed"))
    with pytest.raises(InputError, match="this machine.s clock is wrong"):
        in_s3(bucket).read("a")


def test_a_request_that_took_too_long_for_s3_may_be_tried_later(bucket):
    bucket.proxy.set(Fault("status", code=400, error="RequestTimeout"))
    with pytest.raises(Unreachable, match=f"S3 answers 400 RequestTimeout, {s3.ATTEMPTS} times"):
        in_s3(bucket).write("a", b"x")


def test_what_no_try_mends_is_asked_once(bucket):
    bucket.proxy.set(Fault("status", code=501, error="NotImplemented"))
    with pytest.raises(InputError, match="S3 answers 501 NotImplemented: by the fault proxy"):
        in_s3(bucket).write("a", b"x")
    assert len(bucket.proxy.requests()) == 1


@pytest.mark.parametrize("fault", [Fault("reset", after=MIB), Fault("stall", after=MIB)], ids=["reset", "stall"])
def test_a_body_that_breaks_off_is_read_again(bucket, monkeypatch, fault):
    monkeypatch.setattr(s3, "ATTEMPTS", 3)
    folder, content = in_s3(bucket, timeout_s=3.0), os.urandom(3 * MIB)  # 0.5 s for an attempt
    bucket.put("runs/data/a", content)
    fault.times = 2
    bucket.proxy.set(fault)
    began_s = time.monotonic()
    assert folder.read("a") == content
    assert time.monotonic() - began_s < 10  # two stalls of 0.5 s
    fault.times = None
    bucket.proxy.set(fault)
    with pytest.raises(Unreachable, match=f"/a: no whole answer from {bucket.service.endpoint}: "):
        folder.read("a")
    assert len(bucket.proxy.requests()) == 3


def test_a_byte_that_changed_on_the_way_is_noticed(bucket):
    """Where the server gives a checksum, as AWS does and this one does not."""
    content = os.urandom(3 * MIB)
    bucket.put("runs/data/a", content)
    checksum = base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()
    fault = Fault("flip", after=MIB, times=1, headers={"x-amz-checksum-crc32": checksum})
    bucket.proxy.set(fault)
    assert in_s3(bucket).read("a") == content
    fault.times = None
    bucket.proxy.set(fault)
    with pytest.raises(Unreachable, match="no whole answer from .*: Expected checksum .* did not match calculated"):
        in_s3(bucket).read("a")


def test_a_server_that_comes_back_is_waited_for(bucket, monkeypatch):
    bucket.put("runs/data/a", b"x")
    folder, server = in_s3(bucket), bucket.service.server
    server.kill()

    def start():
        while not bucket.proxy.requests():
            time.sleep(0.005)
        server.start_gateway()

    monkeypatch.setattr(botocore.endpoint.time, "sleep", lambda _: time.sleep(2))
    starting = threading.Thread(target=start)
    starting.start()
    try:
        assert folder.read("a") == b"x"
    finally:
        starting.join()


def test_a_server_that_is_not_there_is_named(bucket, pauses):
    nobody = f"http://127.0.0.1:{free_port()}"
    folder = in_s3(bucket, endpoint=nobody)
    for _verb, act in everything(folder):
        with pytest.raises(Unreachable, match=rf"/[ab]: no whole answer from {nobody}: Could not connect .*{nobody}"):
            act()
    assert len(pauses) == s3.ATTEMPTS - 1  # known to be away, the others ask once


# ---- what the user has to mend --------------------------------------------------------------------------------------


def test_a_bucket_that_does_not_exist_is_named(bucket):
    folder = open_folder("s3://no-such-bucket/runs", bucket.config())
    for _verb, act in everything(folder):
        with pytest.raises(
            InputError, match=r"^s3://no-such-bucket/runs/[ab]: there is no bucket no-such-bucket; check"
        ):
            act()


@pytest.fixture(scope="session")
def stranger(s3_server):
    return s3_server.server.add_user("stranger")


def test_a_missing_permission_is_named(bucket, stranger, monkeypatch):
    bucket.put("runs/data/a", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", stranger[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", stranger[1])
    for verb, act in everything(in_s3(bucket)):
        with pytest.raises(InputError, match=f"/[ab]: no permission to {verb} it.*; the role or user needs") as raised:
            act()
        assert ("or it is missing" in str(raised.value)) == (verb == "read")
    assert bucket.keys() == ["runs/data/a"]


def test_missing_credentials_are_said(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for _verb, act in everything(in_s3(bucket)):
        with pytest.raises(InputError, match=r"/[ab]: no AWS credentials on this machine; attach a role"):
            act()
    assert bucket.proxy.requests() == []


@pytest.mark.parametrize(
    "name, code", [("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch")]
)
def test_wrong_credentials_are_said(bucket, monkeypatch, name, code):
    monkeypatch.setenv(name, "wrong")
    for _verb, act in everything(in_s3(bucket)):
        with pytest.raises(
            InputError, match=rf"/[ab]: S3 does not know these credentials \({code}\); aws sts get-call"
        ):
            act()


def test_half_credentials_are_said(bucket, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InputError, match="^S3 cannot be used .*: Partial .* in env, missing: AWS_SECRET_ACCESS_KEY$"):
        in_s3(bucket)


@pytest.mark.parametrize("status", [400, 403])
def test_expired_credentials_are_said(bucket, status):
    bucket.proxy.set(Fault("status", code=status, error="ExpiredToken"))
    for _verb, act in everything(in_s3(bucket)):
        with pytest.raises(InputError, match=r"/[ab]: the AWS credentials have expired; renew them \(aws sso login\)"):
            act()


@pytest.mark.parametrize(
    "status, code",
    [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed"), (400, "IllegalLocationConstraintException")],
)
def test_another_region_is_named(bucket, status, code):
    bucket.proxy.set(Fault("status", code=status, error=code, headers={"x-amz-bucket-region": "eu-west-3"}))
    for _verb, act in everything(in_s3(bucket)):
        with pytest.raises(InputError, match="/[ab]: the bucket is in region eu-west-3, not us-east-1; set s3.region"):
            act()


def test_the_bucket_is_not_followed_to_its_region_in_silence(bucket):
    """boto3 would ask again there; the connector, for the shards, could not."""
    bucket.put("runs/a", b"1")
    redirect = {"x-amz-bucket-region": "eu-west-3"}
    bucket.proxy.set(Fault("status", times=1, code=301, error="PermanentRedirect", headers=redirect))
    with pytest.raises(InputError, match="the bucket is in region eu-west-3, not us-east-1; set s3.region"):
        in_s3(bucket).read("a")
    assert len(bucket.proxy.requests()) == 1


def test_a_bucket_that_cannot_be_is_said_in_one_line(bucket):
    for _verb, act in everything(open_folder("s3://No_Bucket!/runs", bucket.config())):
        with pytest.raises(InputError, match=r"^s3://No_Bucket!/runs/[ab]: .*Invalid bucket name[^\n]*$"):
            act()


def test_a_profile_is_used(bucket, monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    file.write_text(f"[work]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    in_s3(bucket, profile="work").write("a", b"x")
    assert bucket.keys() == ["runs/data/a"]


def test_a_profile_that_does_not_exist_is_named(bucket, monkeypatch):
    with pytest.raises(
        InputError, match=r"^s3.profile=nobody is not in ~/.aws; aws configure list-profiles shows them"
    ):
        in_s3(bucket, profile="nobody")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InputError, match=r"^AWS_PROFILE=nobody is not in ~/.aws; aws configure list-profiles"):
        in_s3(bucket)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"endpoint": "http://"}, "s3.endpoint=http:// must be a server's address"),
        ({"endpoint": "http://a b"}, "S3 cannot be used with these settings: "),
        ({"region": "us east"}, "S3 cannot be used with these settings: "),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_said(bucket, changes, says):
    with pytest.raises(InputError, match=f"^{says}[^\n]+$"):
        in_s3(bucket, **changes)


# ---- how long S3 is waited for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "do"),
    [("read", "delay"), ("read", "stall"), ("download", "delay"), ("download", "stall"), ("size", "delay")],
)
def test_a_silent_s3_is_given_up_after_the_deadline_whatever_is_asked(bucket, tmp_path, verb, do):
    """Two layers that ask again, of boto3 and of its transfers or ours, do not multiply."""
    bucket.put("runs/data/a", b"x" * 1000)
    folder = in_s3(bucket, timeout_s=1.2)
    arguments = {"download": ["a", tmp_path / "a"]}.get(verb, ["a"])
    bucket.proxy.set(Fault(do, match="^GET" if verb != "size" else ""))
    words = rf"^s3://.*/runs/data/a: no whole answer from {bucket.service.endpoint}: "
    with pytest.raises(Unreachable, match=words):
        getattr(folder, verb)(*arguments)
    assert len(bucket.proxy.requests("^(GET|HEAD).*runs/data/a")) <= s3_patience.SILENT_ATTEMPTS + 1


def test_an_s3_that_was_given_up_is_asked_once_until_it_answers(bucket):
    """The last words of a run that S3 has failed come soon."""
    folder = in_s3(bucket)
    bucket.put("runs/data/a", b"x")
    counts = []
    for fault in (Fault("status"), Fault("status"), None, Fault("status")):
        bucket.proxy.set(*[fault] if fault else [])
        with pytest.raises(Unreachable) if fault else nullcontext():
            folder.read("a")
        counts.append(len(bucket.proxy.requests()))
    assert counts == [s3.ATTEMPTS, 1, 1, s3.ATTEMPTS]


def test_what_is_waited_for_is_said_and_not_too_often(bucket, monkeypatch, caplog):
    monkeypatch.setattr(s3_patience, "FIRST_WORD_S", 0.0)
    nobody = f"http://127.0.0.1:{free_port()}"
    folder = in_s3(bucket, endpoint=nobody)
    with caplog.at_level("WARNING", "train"), pytest.raises(Unreachable):
        folder.read("a")
    (line,) = caplog.messages
    assert (
        line.startswith(f'waiting for S3: Could not connect to the endpoint URL: "{nobody}/') and "runs/data/a" in line
    )
    assert re.search(r"; asked again for up to \d+ s$", line)


def test_a_permission_that_is_not_known_everywhere_yet_is_waited_for(bucket):
    bucket.put("runs/data/a", b"x")
    refusal = Fault("status", code=403, error="AccessDenied", times=3)
    for act, wanted in ((lambda each: each.read("a"), b"x"), (lambda each: each.size("a"), 1)):
        bucket.proxy.set(refusal)
        assert act(in_s3(bucket)) == wanted
        assert len(bucket.proxy.requests()) == 4


def test_who_had_permission_before_is_told_of_a_refusal_at_once(bucket):
    bucket.put("runs/data/a", b"x")
    folder = in_s3(bucket)
    folder.read("a")
    bucket.proxy.set(Fault("status", code=403, error="AccessDenied"))
    with pytest.raises(InputError, match="no permission to read it"):
        folder.read("a")
    assert len(bucket.proxy.requests()) == 1


def test_a_refusal_is_not_waited_for_longer_than_a_while(bucket, monkeypatch):
    """For all requests of a client together."""
    monkeypatch.setattr(s3_patience, "REFUSED_S", 0.0)
    bucket.proxy.set(Fault("status", code=403, error="AccessDenied"))
    with pytest.raises(InputError, match="no permission to read it"):
        in_s3(bucket).size("a")
    assert [seen.method for seen in bucket.proxy.requests()] == ["HEAD", "GET"]


def test_a_missing_bucket_costs_no_second_attempt(bucket):
    with pytest.raises(InputError, match="there is no bucket no-such-bucket"):
        open_folder("s3://no-such-bucket/runs", bucket.config()).read("a")
    assert len(bucket.proxy.requests()) == 1


def test_a_timeout_that_cannot_be_is_refused():
    with pytest.raises(InputError, match="s3.timeout_s=0 must be above 0"):
        s3.S3Config(timeout_s=0)
