"""Training from S3: the run that reads from disk, bit for bit, whatever S3 does; or one named error on all ranks."""

import json
import os
import random
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from forks import launch, run_forked
from running import lines, prepare_config, run, train_config, train_overrides
from services.fault_proxy import Fault
from streaming import SHARD, assert_same, losses, num_shards, overrides, train_from, upload

from train import attempt, loop, prepare, s3_patience, storage
from train.config import InputError, ShardsConfig, Unreachable
from train.data import fetch
from train.data.cache import Cache
from train.data.download import Downloader, Part
from train.data.shards import Shard, read_manifest
from train.preempt import StopRequest
from train.s3 import S3Folder
from train.storage import sha256_bytes

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_run_from_s3_is_the_run_from_disk(bucket, shards, from_disk, tmp_path):
    train_from(bucket, tmp_path / "run", upload(bucket, shards))
    assert_same(tmp_path / "run", from_disk)
    gets = [
        request.path for request in bucket.proxy.requests() if request.method == "GET" and "safetensors" in request.path
    ]
    manifest = read_manifest(shards)
    names = [shard.file for split in manifest.splits.values() for shard in split]
    assert sorted(path.rpartition("/")[2] for path in gets) == sorted(names)  # once each


def test_ranks_and_loader_processes_share_one_download_of_each_shard(bucket, shards, from_disk, tmp_path):
    settings = overrides(bucket, tmp_path / "run", upload(bucket, shards), "max_steps=30", "eval_every=10")
    found = run([*settings, "data.num_workers=3"], ranks=2)
    assert found.returncode == 0, found.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(from_disk), rel=2e-5)
    shard_gets = bucket.proxy.requests(r"^GET .*safetensors")
    assert len(shard_gets) == len({request.path for request in shard_gets}) == num_shards(shards)


# ---- faults --------------------------------------------------------------------------------------------------------

FAULTS = {
    "one request in twenty fails": [
        Fault("status", SHARD, share=0.05, seed=1),
        Fault("reset", SHARD, after=500, share=0.05),
    ],
    "throttled at first": [Fault("status", SHARD, times=6, code=503, error="SlowDown")],
    "429, which the connector takes for final": [Fault("status", SHARD, times=4, code=429, error="TooManyRequests")],
    "connections cut in the body": [Fault("reset", SHARD, after=1000, times=5)],
    "no answer, twice": [Fault("stall", SHARD, times=2)],
    "an answer that stops in the middle": [Fault("stall", SHARD, after=700, times=2)],
    "a byte flipped on the way": [Fault("flip", SHARD, after=900, times=3)],
    "credentials refused as expired, at first": [Fault("status", SHARD, times=2, code=400, error="ExpiredToken")],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_nothing(bucket, shards, from_disk, tmp_path, fault):
    location = upload(bucket, shards)
    bucket.proxy.set(*FAULTS[fault])
    train_from(bucket, tmp_path / "run", location)
    assert_same(tmp_path / "run", from_disk)
    if fault != "one request in twenty fails":  # chance may spare so few requests
        assert [request for request in bucket.proxy.requests() if request.fault]


def test_every_request_may_fail_one_time_in_twenty(bucket, shards, from_disk, tmp_path):
    location = upload(bucket, shards)
    bucket.proxy.set(Fault("status", share=0.05, seed=3, code=500, error="InternalError"))
    train_from(bucket, tmp_path / "run", location)
    assert_same(tmp_path / "run", from_disk)
    assert [request for request in bucket.proxy.requests() if request.fault]


def test_a_server_that_dies_and_comes_back_changes_nothing(bucket, shards, from_disk, tmp_path):
    location = upload(bucket, shards)
    bucket.proxy.set(
        Fault("rate", SHARD, bytes_per_s=2000.0)
    )  # half a second a shard: it dies while some are on the way

    def die():
        time.sleep(2.5)
        bucket.service.server.kill()
        time.sleep(3)
        bucket.proxy.set()
        bucket.service.server.start_gateway()

    thread = threading.Thread(target=die)
    thread.start()
    try:
        train_from(bucket, tmp_path / "run", location, "data.downloads=1")
    finally:
        thread.join()
    assert_same(tmp_path / "run", from_disk)


@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        (Fault("flip", r"train-00003", after=900), InputError, "sha256 is .*, the manifest says .* 3 times"),
        (
            Fault("status", r"train-00003", code=404, error="NoSuchKey"),
            Unreachable,
            "it is not in the bucket.*after 4 s",
        ),
        (
            Fault("status", r"train-00003", code=403, error="AccessDenied"),
            Unreachable,
            "S3 refuses access to it.*after 4 s",
        ),
        (Fault("stall", r"train-00003"), Unreachable, r"not whole within 2 s.*given up after 4 s"),
        (Fault("status", r"train-00003"), Unreachable, r"given up after 4 s"),
    ],
    ids=["flipped byte", "missing", "forbidden", "stall", "503"],
)
def test_a_shard_that_cannot_be_had_ends_the_run_and_is_named(bucket, shards, tmp_path, fault, expected, message):
    location = upload(bucket, shards)
    bucket.proxy.set(fault)
    began_s = time.monotonic()
    with pytest.raises(expected, match=rf"{location}/train-00003.safetensors: .*{message}"):
        train_from(bucket, tmp_path / "run", location, "data.verify=false", "data.deadline_s=4")
    assert time.monotonic() - began_s < 40  # far below what the connector alone takes: six minutes


def test_the_other_ranks_stop_with_the_same_message(bucket, shards, tmp_path):
    location = upload(bucket, shards)
    bucket.proxy.set(Fault("flip", r"train-00003", after=900))
    found = run(overrides(bucket, tmp_path / "run", location, "max_steps=30", "data.num_workers=1"), ranks=2)
    exits = [json.loads((tmp_path / f"run/log/exit_rank_{rank:04d}.json").read_bytes()) for rank in (0, 1)]
    assert exits[0]["reason"] == exits[1]["reason"]
    assert "train-00003.safetensors: sha256 is" in exits[0]["reason"]
    before, _, after = found.stderr.partition("error: ")
    assert "error: " not in after and "Traceback" not in before  # torchrun adds its own after it


def test_replaced_shards_are_noticed_when_they_come(bucket, shards, tmp_path):
    location = upload(bucket, shards)
    manifest = read_manifest(shards)
    first = manifest.splits["train"][0].file
    for shard in manifest.splits["train"][1:]:  # of the same length: no listing shows it
        bucket.put(f"data/{shard.file}", (shards / first).read_bytes()[:-2] + b"xy")
    with pytest.raises(InputError, match="damaged or replaced"):
        train_from(bucket, tmp_path / "run", location, "data.verify=false", "data.window_shards=1")


def test_what_several_shards_wait_for_is_waited_for_once(bucket, shards, tmp_path):
    """Not a deadline for each of the micro batches of a step, and each of the shards."""
    location = upload(bucket, shards)
    bucket.proxy.set(Fault("status", SHARD))
    more = ["data.deadline_s=3", "data.verify=false", "data.num_workers=1", "global_batch_size=16"]
    began_s = time.monotonic()
    with pytest.raises(Unreachable, match="given up after 3 s"):
        train_from(bucket, tmp_path / "run", location, *more)
    assert time.monotonic() - began_s < 10 * 3  # of 16 micro batches and 8 shards


def test_a_slow_link_is_slow_and_no_error(bucket, shards, tmp_path, monkeypatch):
    """A shard takes longer than one try: what came of it is kept."""
    for name in ("MIN_PIECE_BYTES", "MAX_PIECE_BYTES"):
        monkeypatch.setattr(fetch, name, 300)
    location = upload(bucket, shards)
    size = read_manifest(shards).splits["train"][0].bytes
    bucket.proxy.set(Fault("rate", SHARD, bytes_per_s=size / 4))
    small = ["data.downloads=1", "data.attempt_s=2", "data.deadline_s=60", "max_steps=1", "data.window_shards=1"]
    train_from(bucket, tmp_path / "run", location, *small)
    asked = [request.range for request in bucket.proxy.requests(SHARD)]
    assert len(set(asked)) >= size // 300 and losses(tmp_path / "run")


@pytest.fixture
def large(bucket, tmp_path):
    """A shard larger than what a slow link brings in an attempt, and what fetches it to this machine."""
    content = random.Random(0).randbytes(400_000)
    bucket.put("data/large.safetensors", content)
    shard = Shard("large.safetensors", 1, len(content), sha256_bytes(content))

    def fetch_it(**times):
        cfg = ShardsConfig(path="", **times)
        downloader = Downloader(
            S3Folder(bucket.location("data"), bucket.config()),
            cfg,
            SimpleNamespace(shards=[shard]),
            Cache(tmp_path, cfg.deadline_s),
        )
        downloader.bring(shard)
        return (tmp_path / shard.file).read_bytes() == content

    return fetch_it


def pieces(bucket):
    """Of each request for a part of a shard: the first and the last byte. One for all of it asks for more."""
    ranges = [request.range.removeprefix("bytes=") for request in bucket.proxy.requests("^GET .*large")]
    asked = [tuple(map(int, text.split("-"))) for text in ranges]
    return [(first, last) for first, last in asked if last < 400_000]


def test_a_link_of_less_than_a_large_piece_in_an_attempt_brings_a_shard_all_the_same(bucket, large):
    bucket.proxy.set(Fault("rate", "large", bytes_per_s=250_000))
    assert large(attempt_s=1.0, deadline_s=20.0)
    assert max(last - first for first, last in pieces(bucket)) < 250_000 < fetch.MAX_PIECE_BYTES


def test_a_fast_link_is_asked_for_larger_and_larger_pieces(bucket, large):
    bucket.proxy.set(Fault("stall", "large", times=1))
    assert large(attempt_s=2.0, deadline_s=60.0)
    sizes = [last - first + 1 for first, last in pieces(bucket)]
    assert sizes[:3] == [fetch.MIN_PIECE_BYTES * factor for factor in (1, 2, 4)]


def test_what_has_come_over_a_slow_link_is_kept_for_the_next_start(bucket, large):
    bucket.proxy.set(Fault("rate", "large", bytes_per_s=100_000))
    with pytest.raises(Unreachable, match=r"not whole within 1 s \(data.attempt_s\): 0.\d+ of 0.4 MB have come"):
        large(attempt_s=1.0, deadline_s=3.0)
    bucket.proxy.set()
    assert large()
    assert min(pieces(bucket))[0] > 0
    bucket.proxy.set()
    assert large() and not bucket.proxy.requests()


def test_what_is_left_of_a_shard_and_wrong_is_fetched_again(bucket, large, tmp_path):
    (tmp_path / ".large.safetensors.part").write_bytes(b"x" * 1000)
    assert large()


def test_an_object_that_became_shorter_than_what_has_come_is_named(bucket, large, tmp_path):
    (tmp_path / ".large.safetensors.part").write_bytes(b"x" * 2000)
    bucket.put("data/large.safetensors", b"x" * 1000)
    with pytest.raises(InputError, match="1000 bytes, the manifest says 400000; it was damaged or replaced.* 3 times"):
        large(attempt_s=2.0, deadline_s=10.0)
    assert not list(tmp_path.glob(".large*"))


def test_two_processes_that_fetch_a_shard_do_not_write_the_same_file(bucket, large, tmp_path):
    part = Part(tmp_path / ".large.safetensors.part")
    part.begin()(b"of another process")
    assert large()
    assert part.path.read_bytes() == b"of another process"
    part.close()


def test_a_validation_shard_that_does_not_come_delays_no_training(bucket, shards, tmp_path):
    location = upload(bucket, shards)
    bucket.proxy.set(Fault("status", "validation-00000"))
    more = ["data.verify=false", "data.downloads=1", "data.deadline_s=4", "max_steps=20", "eval_every=null"]
    with pytest.raises(Unreachable, match="validation-00000.safetensors: .*given up"):
        train_from(bucket, tmp_path / "run", location, *more)  # for the evaluation at the end
    assert len(losses(tmp_path / "run")) == 20


def test_a_validation_shard_that_cannot_be_had_ends_the_run_too(bucket, shards, tmp_path):
    location = upload(bucket, shards)
    bucket.proxy.set(Fault("flip", "^GET .*validation-00000.safetensors", after=900))
    with pytest.raises(InputError, match=r"validation-00000.safetensors: sha256 is .*, the manifest says"):
        train_from(bucket, tmp_path / "run", location)
    assert [line["step"] for line in lines(tmp_path / "run", "train")][-1] == 10  # training itself did not need it


def test_xla_reads_from_s3_what_it_reads_from_disk(bucket, shards, tmp_path):
    options = ["backend=xla", "max_steps=4", "eval_every=2", "data.num_workers=1"]
    loop.run(train_config(tmp_path / "disk", shards, "max_epochs=9", *options), StopRequest())
    train_from(bucket, tmp_path / "run", upload(bucket, shards), *options)
    assert_same(tmp_path / "run", tmp_path / "disk")


def test_renewed_credentials_are_taken_up(bucket, shards, from_disk, tmp_path, monkeypatch):
    location = upload(bucket, shards)
    key, secret = bucket.service.server.key, bucket.service.server.secret
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\naws_session_token=old\n")
    bucket.proxy.set(Fault("status", SHARD, code=400, error="ExpiredToken"))  # as long as the old ones are used

    def renew():
        time.sleep(4)
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")
        bucket.proxy.set()

    thread = threading.Thread(target=renew)
    # The gateway takes no session tokens: the first look at the data is made without.
    monkeypatch.setattr("train.data.prepared.open_folder", lambda *_: plain_folder(bucket, location))
    thread.start()
    try:
        train_from(bucket, tmp_path / "run", location)
    finally:
        thread.join()
    assert_same(tmp_path / "run", from_disk)


HELPER = """
import datetime, json, os, sys
with open("{count}", "a") as file:
    file.write("1")
if os.path.exists("{down}"):
    sys.exit("no answer from the identity service")
expiration = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=5)
print(json.dumps(dict(Version=1, AccessKeyId="{key}", SecretAccessKey="{secret}", Expiration=expiration.isoformat())))
"""


def test_a_pause_of_the_service_that_gives_credentials_is_no_error(bucket, shards, from_disk, tmp_path, monkeypatch):
    """boto3 renews them early, so it asks for each download here."""
    location = upload(bucket, shards)
    monkeypatch.setattr(fetch, "ASK_EVERY_S", 0.1)
    helper, count, down = tmp_path / "helper.py", tmp_path / "count", tmp_path / "down"
    key, secret = bucket.service.server.key, bucket.service.server.secret
    helper.write_text(HELPER.format(count=count, down=down, key=key, secret=secret))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {helper}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # Requests fail as well, so that a new client is made, which asks.
    bucket.proxy.set(Fault("reset", SHARD, after=500, skip=2, times=3), Fault("rate", SHARD, bytes_per_s=8000.0))

    def pause():
        while len(bucket.proxy.requests(SHARD)) < 2:
            time.sleep(0.05)
        down.touch()
        asked = count.stat().st_size
        time.sleep(3)
        while count.stat().st_size == asked:
            time.sleep(0.05)
        down.unlink()
        bucket.proxy.set()

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        train_from(bucket, tmp_path / "run", location, "data.downloads=1")
    finally:
        thread.join(30)
    assert_same(tmp_path / "run", from_disk)


def plain_folder(bucket, location):
    from train.s3 import S3Folder

    folder = S3Folder(location, bucket.config())
    folder.client = bucket.client
    return folder


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(bucket, monkeypatch, tmp_path, capsys):
    """What a run says that is refused: one line, after no patience."""
    monkeypatch.setattr(storage, "MISSING_S", 0.0)
    monkeypatch.setattr("train.data.prepared.MISSING_S", 0.0)
    monkeypatch.setattr(s3_patience, "REFUSED_S", 0.0)

    def message(data, *more):
        settings = overrides(bucket, tmp_path / "refused", data, *more)
        monkeypatch.setattr("sys.argv", ["train", *map(str, settings)])
        code = attempt.attempt()
        err = capsys.readouterr().err.strip().splitlines()
        assert code == 2 and err[-1].startswith("error: ") and not any("Traceback" in line for line in err), err
        return err[-1]

    return message


def test_no_such_bucket_and_nothing_prepared_there(bucket, refused, tmp_path):
    assert "there is no bucket nowhere-at-all" in refused("s3://nowhere-at-all/data")
    assert "holds no manifest.json" in refused(bucket.location("data"))


def test_credentials_that_will_not_do(bucket, refused, shards, tmp_path, monkeypatch):
    location = upload(bucket, shards)
    key, secret = bucket.service.server.add_user("newcomer")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    assert "no permission to read it" in refused(location)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "S3 does not know these credentials" in refused(location)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no AWS credentials on this machine" in refused(location)


def test_shards_that_are_not_what_the_manifest_says(bucket, refused, shards, tmp_path):
    location = upload(bucket, shards)
    content = bucket.get("data/train-00001.safetensors")
    bucket.put("data/train-00001.safetensors", content[:-100])
    message = refused(location)
    assert f"train-00001.safetensors has {len(content) - 100} bytes, the manifest says {len(content)}" in message
    bucket.client.delete_object(Bucket=bucket.name, Key="data/train-00001.safetensors")
    assert "train-00001.safetensors is missing, but the manifest names it" in refused(location)


def test_a_manifest_or_tokenizer_that_was_changed(bucket, refused, shards, tmp_path):
    location = upload(bucket, shards)
    manifest = bucket.get("data/manifest.json")
    bucket.put("data/manifest.json", manifest.replace(b'"rows": 16', b'"rows": 17', 1))
    assert "was changed after it was written" in refused(location)
    bucket.put("data/manifest.json", manifest.replace(b'"format": 1', b'"format": 9'))
    assert "format 9 is not 1" in refused(location)
    bucket.put("data/manifest.json", manifest)
    tokenizer = bucket.get("data/tokenizer/tokenizer.json")
    bucket.put("data/tokenizer/tokenizer.json", tokenizer + b" ")
    assert "is not the tokenizer that made the shards" in refused(location)
    bucket.put("data/tokenizer/tokenizer.json", tokenizer)
    assert "seq_len=64, but" in refused(location, "seq_len=64")


def test_another_data_set_under_a_run_is_refused(bucket, refused, shards, prepared, tmp_path):
    train_from(bucket, tmp_path / "run", upload(bucket, shards), "max_steps=3")
    assert "is of another run (data: " in refused(upload(bucket, prepared, "other"), f"run_dir={tmp_path}/run")


OTHER_DATA = """
import os, sys
sys.argv = [word.replace("dataRANK", "data" + os.environ["RANK"]) for word in sys.argv]
from train.__main__ import main
sys.exit(main())
"""


def test_ranks_that_read_different_data_are_refused(corpus, tmp_path):
    for number in (0, 1):
        prepare.prepare(prepare_config(tmp_path / f"data{number}", corpus, f"seed={number + 1}"))
    script = tmp_path / "other_data.py"
    script.write_text(OTHER_DATA)
    settings = train_overrides(tmp_path / "run", tmp_path / "dataRANK", "max_steps=2")
    found = run_forked(launch(str(script), settings, ranks=2), os.environ)
    assert found.returncode != 0
    assert "error: rank 1 reads other data than rank 0 (id " in found.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()
