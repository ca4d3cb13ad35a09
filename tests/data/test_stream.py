"""Training from S3: the run that reads from disk, bit for bit, whatever S3 does; or one named error."""

import json
import os
import random
import signal
import socket
import ssl
import subprocess
import uuid
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from forks import TORCHRUN, launch, start_forked
from rejections import rejects
from run_results import losses
from running import eventually, lines, run, train_here
from services.fault_proxy import Fault
from services.relay import relaying
from streaming import overrides, upload, windowed

from train import loop
from train.config import ShardsConfig, TrainConfig, Unreachable
from train.data.shards import cache, download, prefetch
from train.data.shards.cache import ShardCache
from train.data.shards.download import Downloader
from train.data.shards.manifest import Shard, read_manifest
from train.data.shards.order import ShardSampler
from train.data.shards.prefetch import Prefetcher
from train.data.shards.prepared import TOKENIZER, PreparedData
from train.run import compose as cli
from train.run import feed
from train.run.feed import check_same_data
from train.run.stopping import StopRequest
from train.storage.folders import sha256_bytes

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_run_from_s3_with_faults_and_a_small_cache_is_the_run_from_disk(
    bucket, shards, tmp_path, monkeypatch
):
    """Windows of one shard: the order of a run from disk with the same windows. Files of the user stay in the cache."""
    options = ["max_steps=30", "eval_every=10"]
    with monkeypatch.context() as small:
        small.setattr(feed, "WINDOW_SHARDS", 1)
        train_here(tmp_path / "disk", shards, *options)
    folder = tmp_path / "run-cache" / read_manifest(shards).id[:16]
    folder.mkdir(parents=True)
    (folder / "thesis.safetensors").write_text("not of this data set")
    location = upload(bucket, shards)
    bucket.proxy.set(Fault("status", share=0.05, seed=3, code=500, error="InternalError"))
    settings = overrides(bucket, tmp_path / "run", location, *options, windowed(shards))
    loop.run(cli.load_config(TrainConfig, settings), StopRequest())
    assert losses(tmp_path / "run") == losses(tmp_path / "disk")
    scores = [
        [line["loss"] for line in lines(tmp_path / name, "eval")] for name in ("run", "disk")
    ]
    assert scores[0] == scores[1]
    samples = [(tmp_path / name / "samples.json").read_bytes() for name in ("run", "disk")]
    assert samples[0] == samples[1]  # read from the validation data after the last step
    assert [request for request in bucket.proxy.requests() if request.fault]
    assert (folder / "thesis.safetensors").exists()
    assert len(list(folder.glob("*.safetensors"))) - 1 < len(read_manifest(shards).shards)


def test_a_killed_run_leaves_no_process_and_its_command_goes_on_at_once_on_other_ranks(
    bucket, shards, tmp_path
):
    """Fetcher and loaders notice the death late; on two ranks with loaders a shard is fetched once."""
    train_here(tmp_path / "disk", shards, "max_steps=30", "eval_every=10")
    settings = overrides(
        bucket, tmp_path / "run", upload(bucket, shards), "max_steps=30", "eval_every=10"
    )
    settings += ["checkpoint.every=5", "data.num_workers=1"]
    process = start_forked(["train", *settings], os.environ)
    eventually(
        lambda: (tmp_path / "run/checkpoints/step_00000010").exists() or not process.is_alive()
    )
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    done = run(settings, ranks=2)
    assert done.returncode == 0, done.stderr
    assert len(children) >= 2  # fetcher and loader
    assert not psutil.wait_procs(children, timeout=90)[1]
    by_step = {line["step"]: line["loss"] for line in lines(tmp_path / "run", "train")}
    assert list(by_step.values()) == pytest.approx(losses(tmp_path / "disk"), rel=2e-5)
    asked = bucket.proxy.requests(f"^GET /{bucket.name}/.*safetensors")
    # others ask for the length alone
    fetched = [request for request in asked if request.range]
    assert len(fetched) == len(read_manifest(shards).shards)


def test_two_machines_fetch_their_parts_and_evaluate_as_one(bucket, shards, tmp_path):
    """Each has a cache of its own. The samples of the report are those of one machine, too."""
    options = ["global_batch_size=12", "micro_batch_size=2", "max_steps=3"]
    train_here(tmp_path / "disk", shards, *options)
    words = launch(
        "train", overrides(bucket, tmp_path / "run", upload(bucket, shards), *options), ranks=1
    )[1:]
    nodes = []
    for node in (0, 1):
        place = ["--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1"]
        nodes.append(
            start_forked(
                [TORCHRUN, *place, *words, f"data.cache_dir={tmp_path / str(node)}"], os.environ
            )
        )
    for node in nodes:
        node.join()
    assert [node.exitcode for node in nodes] == [0, 0]
    scores = [
        [line["loss"] for line in lines(tmp_path / name, "eval")] for name in ("run", "disk")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=2e-5)
    assert len(json.loads((tmp_path / "run/samples.json").read_bytes())["samples"]) == 8
    fetched = [
        {path.name for path in (tmp_path / str(node)).rglob("validation-*")} for node in (0, 1)
    ]
    held_out = {shard.file for shard in read_manifest(shards).splits["validation"]}
    assert fetched[0] | fetched[1] == held_out and fetched[1] < held_out


ONE_BY_ONE = """
import sys
from train.run import feed
from train.data.shards import prefetch
feed.WINDOW_SHARDS = prefetch.DOWNLOADS = 1
from train.__main__ import main
sys.exit(main())
"""


def test_the_end_of_a_run_waits_for_no_shard(bucket, shards, tmp_path):
    """A loader process looks ahead, and waits for a shard that hangs, when the last step is done."""
    location = upload(bucket, shards)
    bucket.proxy.set(Fault("stall", "train-", skip=1))  # one comes, and serves the first step
    more = ["max_steps=1", "eval_every=null", "export=false"]
    more += ["data.num_workers=2", "data.verify=false"]
    settings = overrides(bucket, tmp_path / "run", location, *more)
    process = start_forked(["-c", ONE_BY_ONE, *settings], os.environ)
    process.join(60)
    assert process.exitcode == 0
    assert losses(tmp_path / "run")


def test_ranks_that_read_different_data_are_rejected():
    check_same_data(["a" * 64] * 2)
    rejects(
        r"rank 1 reads different data \(id b{12}\) from rank 0 \(id a{12}\)",
        check_same_data,
        ["a" * 64, "b" * 64],
    )


@pytest.fixture
def large(bucket, tmp_path, monkeypatch):
    """A function that fetches a shard to this machine, or to a disk that is full."""
    content = random.Random(0).randbytes(400_000)
    bucket.put("data/large.safetensors", content)
    shard = Shard("large.safetensors", 1, len(content), sha256_bytes(content))
    cfg = ShardsConfig(path="", cache_dir=str(tmp_path))
    cache = ShardCache(cfg, SimpleNamespace(shards=[shard], id=shard.sha256))

    def hold_full(*, alone):
        lock = ShardCache.hold(cache, alone=alone)
        (cache.run / shard.file).symlink_to("/dev/full")
        return lock

    def fetch_it(*, is_full=False, attempt_s=60.0, deadline_s=60.0):
        monkeypatch.setattr(download, "ATTEMPT_S", attempt_s)
        monkeypatch.setattr(prefetch, "DEADLINE_S", deadline_s)
        if is_full:
            monkeypatch.setattr(cache, "hold", hold_full)
        place = bucket.location("data"), bucket.config(), cache
        with Prefetcher(*place, lambda _: [shard], deletes=False):
            cache.wait([shard])
        return (cache.folder / shard.file).read_bytes() == content

    return fetch_it


def answer(code, error, **more):
    return Fault("status", "large", code=code, error=error, **more)


FAULTS = {
    "throttled at first": answer(503, "SlowDown", times=6),
    "429, which the connector takes for final": answer(429, "TooManyRequests", times=4),
    "a connection cut in the body": Fault("reset", "large", after=1000, times=5),
    "no answer, twice": Fault("stall", "large", times=2),
    "an answer that stops in the middle": Fault("stall", "large", after=700, times=2),
    "a byte flipped on the way": Fault("flip", "large", after=900, times=2),
    "credentials rejected as expired, at first": answer(400, "ExpiredToken", times=2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_shard_comes_whole_through_faults(bucket, large, name):
    bucket.proxy.set(FAULTS[name])
    assert large(attempt_s=0.5)
    assert [request for request in bucket.proxy.requests() if request.fault]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (answer(404, "NoSuchKey"), "is missing; it was damaged or replaced"),
        (answer(403, "AccessDenied"), "no permission .*; add the permission to the role's"),
        (answer(403, "InvalidObjectState"), "S3 answers 403 InvalidObjectState"),
        (answer(400, "KMS.DisabledException"), "KMS key .*by the.*; enable the"),
        (answer(403, "InvalidAccessKeyId"), "does not recognise these credentials"),
        (answer(403, "RequestTimeTooSkewed"), "this machine's clock is wrong.*; set it"),
        (answer(400, "ExpiredToken"), "the AWS credentials have expired .*; renew them"),
        (Fault("stall", "large"), "nothing arrived within 0.5 s"),
        (Fault("flip", "large", after=900), "has sha256 .*, the manifest says"),
    ],
    ids=lambda value: value.error or value.do if isinstance(value, Fault) else "",
)
def test_a_shard_that_does_not_come_is_given_up_and_named(bucket, large, fault, message):
    bucket.proxy.set(fault)
    url = f"{bucket.location('data')}/large.safetensors"
    with pytest.raises(Unreachable, match=f"^{url}.*{message}.*; given up after 1 s"):
        large(attempt_s=0.5 if fault.do == "stall" else 60.0, deadline_s=1.0)


def test_a_slow_but_steady_link_is_waited_for(bucket, large, monkeypatch):
    """Each request brings a quarter of the shard, in less than the time after which silence ends an attempt."""
    monkeypatch.setattr(download, "REQUEST_BYTES", 100_000)
    bucket.proxy.set(Fault("delay", "large", seconds=1.0))
    assert large(attempt_s=3.5)
    assert [request.range for request in bucket.proxy.requests("large")] == [
        "bytes=0-99999",
        "bytes=100000-199999",
        "bytes=200000-299999",
        "bytes=300000-399999",
    ]


def test_a_full_disk_is_named(large):
    with pytest.raises(Unreachable, match="large.* cannot be written to .*: No space left on"):
        large(is_full=True, deadline_s=0.0)


@pytest.mark.parametrize("request_bytes", [8 * 2**20, 1000])
def test_an_object_that_is_shorter_than_the_manifest_says_is_named(
    bucket, large, tmp_path, monkeypatch, request_bytes
):
    """Also one that ends where a request does."""
    monkeypatch.setattr(download, "REQUEST_BYTES", request_bytes)
    bucket.put("data/large.safetensors", b"x" * 1000)
    says = "has 1000 bytes, the manifest says 400000; it was damaged or replaced"
    with pytest.raises(Unreachable, match=says):
        large(deadline_s=0.0)
    assert not list(tmp_path.rglob("large*"))


def test_credentials_are_looked_up_again_after_a_failure(bucket, opened, monkeypatch, tmp_path):
    """A file of ~/.aws that is replaced, or a service of credentials that pauses."""
    server = bucket.service.server
    data = opened()[0]
    shard = data.manifest.shards[0]
    keys, config = tmp_path / "credentials", tmp_path / "config"
    keys.write_text(f"[default]\naws_access_key_id={server.key}\naws_secret_access_key=wrong\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    environment = {name: os.environ.get(name) for name in download.USED}
    with data.cache.hold(alone=False):
        downloader = Downloader(data.cfg.path, data.s3, data.cache)
        for name in download.CREDENTIALS:
            monkeypatch.delenv(name, raising=False)
        rejects("safetensors: ", downloader.download, shard, error=Unreachable)
        right = keys.read_text().replace("wrong", server.secret)
        keys.unlink()
        config.write_text("[default]\ncredential_process = /bin/false\n")
        rejects("cannot get credentials: ", downloader.download, shard, error=Unreachable)
        keys.write_text(right)
        downloader.download(shard)
        download.set_for_libraries(environment)
    assert (data.folder / shard.file).exists()


@pytest.fixture
def https(bucket, tmp_path, monkeypatch):
    """The endpoint of the server behind TLS, with a certificate that AWS_CA_BUNDLE alone makes known."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        *named,
    ]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    listener = context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True)
    with relaying(listener, bucket.service.server.port) as address:
        yield f"https://localhost:{address.rpartition(':')[2]}"


DEAD = "http://127.0.0.1:9"


def test_shards_go_the_way_of_boto3(bucket, opened, https, monkeypatch):
    """Through the proxy for the endpoint and no other, with its authorities."""
    direct, proxy = bucket.service.server.endpoint, bucket.proxy.endpoint
    for endpoint, no_proxy, set_to in [
        (direct, "", {"http_proxy": proxy.replace("//", "//user:p%25@"), "HTTP_PROXY": DEAD}),
        (direct, "127.0.0.1", {"http_proxy": DEAD, "HTTP_PROXY": DEAD}),
        (https, "localhost", {"https_proxy": DEAD, "HTTPS_PROXY": DEAD}),
    ]:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**set_to, "no_proxy": no_proxy, "NO_PROXY": no_proxy}.items():
            monkeypatch.setenv(name, value)
        bucket.proxy.set()
        data = opened(endpoint=endpoint, cache=uuid.uuid4().hex)[0]
        data.bring(data.manifest.splits["validation"])
        assert all_tokens(data, "validation").any()
        assert bool(bucket.proxy.requests("safetensors")) == (not no_proxy)


TOKENS, FIRST = "tokenizer/tokenizer.json", "train-00000.safetensors"


@pytest.fixture
def data(bucket, prepared, tmp_path):
    """Prepared data in the bucket, and a way to open it in a new cache."""
    location = upload(bucket, prepared)
    bucket.proxy.set()
    return lambda: PreparedData(
        ShardsConfig(path=location, cache_dir=str(tmp_path / "cache")), bucket.config()
    )


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("manifest.json", "flipped", "/data/manifest.json .*prepare the data again"),
        ("manifest.json", "missing", "has no manifest.json"),
        (TOKENS, "flipped", f"/data/{TOKENS} .*prepare the data again"),
        (TOKENS, "missing", f"{TOKENS} is missing"),
        (FIRST, "missing", f"{FIRST} is missing"),
        (FIRST, "cut", rf"{FIRST} has \d+ bytes, the manifest says \d+"),
    ],
)
def test_what_is_damaged_or_missing_in_the_bucket_is_named(bucket, data, name, damage, says):
    key = f"data/{name}"
    if damage == "flipped":
        bucket.flip(key, 500)
    elif damage == "cut":
        bucket.put(key, bucket.get(key)[:-100])
    else:
        bucket.client.delete_object(Bucket=bucket.name, Key=key)
    rejects(says, lambda: data().verify())


@pytest.fixture
def opened(bucket, shards, tmp_path):
    """Opens the data set in one cache, and makes the prefetcher of a run that reads all of it."""
    location = upload(bucket, shards)

    def open_it(windows=None, *, cache="cache", endpoint=bucket.service.endpoint, **settings):
        cfg = ShardsConfig(path=location, cache_dir=f"{tmp_path}/{cache}", **settings)
        data = PreparedData(cfg, bucket.config(endpoint=endpoint))
        rows = [shard.rows for shard in data.manifest.splits["train"]]
        place = {"rank": 0, "world_size": 1, "lanes": windows, "window_shards": windows}
        sampler = ShardSampler(rows, seed=0, global_batch_size=8, **place)
        return data, lambda: data.prefetcher(sampler, is_first_on_machine=True)

    return open_it


def all_tokens(data, split="train"):
    reader = data.split(split)
    return reader.rows(np.arange(len(reader))).tokens


def test_two_runs_share_a_cache_unless_one_has_to_delete(bucket, shards, opened, monkeypatch):
    monkeypatch.setattr(cache, "TAKE_OVER_S", 0.1)
    small = {"windows": 1, "cache_gb": float(windowed(shards).partition("=")[2])}
    whole, prefetch_whole = opened()
    windows, prefetch_windows = opened(**small)
    with prefetch_whole():
        all_tokens(whole)
        bucket.proxy.set()
        other, prefetcher = opened()
        with prefetcher():
            all_tokens(other)
        assert not bucket.proxy.requests(f"^GET /{bucket.name}/.*safetensors")
        rejects(r"another run uses .*, and not all of the data fits", prefetch_windows)
    sizes = {shard.file: shard.bytes for shard in whole.manifest.shards}
    with prefetch_windows():
        there = windows.folder.glob
        eventually(
            lambda: (
                sum(sizes[path.name] for path in there("*.safetensors")) <= small["cache_gb"] * 1e9
            )
        )
        rejects(
            r"another run needs .* for itself; set another data.cache_dir for one of them",
            prefetch_whole,
        )


def test_a_file_that_is_lost_from_the_cache_is_fetched_again(opened, monkeypatch):
    monkeypatch.setattr(prefetch, "REPORT_EVERY_S", 0.1)
    data, prefetcher = opened()
    with prefetcher():
        right = all_tokens(data)
        (data.folder / data.manifest.splits["train"][3].file).unlink()
        np.testing.assert_array_equal(all_tokens(data), right)


def test_the_loss_of_the_fetching_process_is_named(opened, monkeypatch):
    monkeypatch.setattr(prefetch.Fetcher, "serve", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    data, prefetcher = opened()
    with (
        prefetcher(),
        pytest.raises(Unreachable, match="the process that fetches shards on this node is gone"),
    ):
        all_tokens(data)


def test_a_tokenizer_damaged_in_the_cache_is_replaced(opened, shards):
    for name in TOKENIZER:
        (opened()[0].folder / name).write_text("{}")
        assert (opened()[0].folder / name).read_bytes() == (shards / name).read_bytes()


def test_what_a_killed_download_left_is_removed_by_the_next_run(opened):
    data, prefetcher = opened()
    left = data.folder / "runs/killed" / data.manifest.shards[0].file
    left.parent.mkdir(parents=True)
    left.touch()
    with prefetcher():
        assert not left.exists()
