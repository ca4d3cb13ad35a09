"""Training from S3: the run that reads from disk, bit for bit, whatever S3 does; or one named error on all ranks."""

import errno
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from running import ROOT, command, lines, prepare_config, run, train_config, train_overrides
from services.fault_proxy import Fault

from train import __main__, loop, prepare
from train.config import InputError, Unreachable
from train.data import download
from train.data.shards import read_manifest
from train.preempt import StopRequest

SHARD = r"^GET .*train-\d+\.safetensors"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(download, "LONGEST_PAUSE_S", 0.5)


@pytest.fixture(scope="module")
def shards(tmp_path_factory, corpus):
    """A prepared data set of a dozen shards."""
    folder = tmp_path_factory.mktemp("shards") / "data"
    prepare.prepare(prepare_config(folder, corpus, "rows_per_shard=16"))
    assert len(read_manifest(folder).splits["train"]) >= 8
    return folder


def upload(bucket, folder, prefix="data"):
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return bucket.location(prefix)


def overrides(bucket, run_dir, data, *more):
    """Of a run that reads from the bucket, with short times and a cache of its own."""
    short = ["data.attempt_s=2", "data.deadline_s=20", f"data.cache_dir={run_dir}-cache"]
    return [*train_overrides(run_dir, data, "max_epochs=9", *short, *bucket.overrides()), *more]


def losses(run_dir):
    return [line["loss"] for line in lines(run_dir, "train")]


@pytest.fixture(scope="module")
def from_disk(tmp_path_factory, shards):
    run_dir = tmp_path_factory.mktemp("runs") / "disk"
    loop.run(train_config(run_dir, shards, "max_steps=30", "eval_every=10"), StopRequest())
    return run_dir


def assert_same(run_dir, from_disk):
    assert losses(run_dir) == losses(from_disk)
    assert [line["loss"] for line in lines(run_dir, "eval")] == [line["loss"] for line in lines(from_disk, "eval")]


def train_from(bucket, run_dir, data, *more):
    from train import cli
    from train.config import TrainConfig

    settings = overrides(bucket, run_dir, data, "max_steps=30", "eval_every=10", *more)
    return loop.run(cli.load_config(TrainConfig, settings), StopRequest())


def test_a_run_from_s3_is_the_run_from_disk(bucket, shards, from_disk, tmp_path):
    train_from(bucket, tmp_path / "run", upload(bucket, shards))
    assert_same(tmp_path / "run", from_disk)
    gets = [
        request.path for request in bucket.proxy.requests() if request.method == "GET" and "safetensors" in request.path
    ]
    manifest = read_manifest(shards)
    names = [shard.file for split in manifest.splits.values() for shard in split]
    assert sorted(path.rpartition("/")[2] for path in gets) == sorted(names)  # once each


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 3)])
def test_ranks_and_loader_processes_share_one_download_of_each_shard(
    bucket, shards, from_disk, tmp_path, ranks, workers
):
    settings = overrides(bucket, tmp_path / "run", upload(bucket, shards), "max_steps=30", "eval_every=10")
    found = run([*settings, f"data.num_workers={workers}"], ranks=ranks)
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
        (Fault("status", r"train-00003", code=404, error="NoSuchKey"), InputError, "it is not in the bucket"),
        (Fault("status", r"train-00003", code=403, error="AccessDenied"), InputError, "S3 refuses access to it"),
        (Fault("stall", r"train-00003"), Unreachable, r"not whole within 2 s.*given up after 6 s"),
        (Fault("status", r"train-00003"), Unreachable, r"given up after 6 s"),
    ],
    ids=["flipped byte", "missing", "forbidden", "stall", "503"],
)
def test_a_shard_that_cannot_be_had_ends_the_run_and_is_named(bucket, shards, tmp_path, fault, expected, message):
    location = upload(bucket, shards)
    bucket.proxy.set(fault)
    began_s = time.monotonic()
    with pytest.raises(expected, match=rf"{location}/train-00003.safetensors: .*{message}"):
        train_from(bucket, tmp_path / "run", location, "data.verify=false", "data.deadline_s=6")
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


def test_an_object_replaced_during_the_run_is_noticed(bucket, shards, tmp_path):
    """With a window of one shard the later ones are fetched long after the start."""
    location = upload(bucket, shards)
    manifest = read_manifest(shards)
    first = manifest.splits["train"][0].file
    for shard in manifest.splits["train"][1:]:  # put there by someone who prepares again, after our first look
        bucket.put(f"data/{shard.file}", (shards / first).read_bytes()[:-2] + b"xy")
    with pytest.raises(InputError, match="damaged or replaced"):
        train_from(bucket, tmp_path / "run", location, "data.verify=false", "data.window_shards=1")


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


def plain_folder(bucket, location):
    from train.s3 import S3Folder

    folder = S3Folder(location, bucket.config())
    folder.client = bucket.client
    return folder


# ---- the cache -----------------------------------------------------------------------------------------------------


def num_shards(shards):
    return sum(map(len, read_manifest(shards).splits.values()))


def cached(run_dir):
    return sorted(Path(f"{run_dir}-cache").rglob("*.safetensors"))


def test_a_second_run_reads_the_cache_and_mends_what_is_damaged_in_it(bucket, shards, from_disk, tmp_path):
    location = upload(bucket, shards)
    cache = f"data.cache_dir={tmp_path}/cache"
    train_from(bucket, tmp_path / "first", location, cache)
    damaged = next((tmp_path / "cache").rglob("train-00002.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    bucket.proxy.set()
    train_from(bucket, tmp_path / "second", location, cache)
    assert_same(tmp_path / "second", from_disk)
    assert [request.path[-20:] for request in bucket.proxy.requests("^GET .*safetensors")] == [f"/{damaged.name}"[-20:]]


def test_a_cache_smaller_than_the_data_is_bounded_and_changes_nothing(bucket, shards, tmp_path):
    """Windows of one shard: the order of a run from disk with the same windows."""
    manifest = read_manifest(shards)
    sizes = [shard.bytes for split in manifest.splits.values() for shard in split]
    validation = sum(shard.bytes for shard in manifest.splits["validation"])
    limit = validation + 4 * max(sizes)
    assert limit < sum(sizes) * 0.8
    loop.run(
        train_config(tmp_path / "disk", shards, "max_steps=30", "eval_every=10", "data.window_shards=1"), StopRequest()
    )
    mine = tmp_path / "run-cache" / manifest.id[:16]
    mine.mkdir(parents=True)
    (mine / "thesis.safetensors").write_text("not of this data set")
    largest = []
    stop = threading.Event()

    def watch():
        while not stop.wait(0.02):
            largest.append(sum(path.stat().st_size for path in mine.glob("[!.]*-0*.safetensors") if path.exists()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        train_from(bucket, tmp_path / "run", upload(bucket, shards), f"data.cache_gb={limit / 1e9}")
    finally:
        stop.set()
        thread.join()
    assert_same(tmp_path / "run", tmp_path / "disk")
    assert max(largest) <= limit
    assert (mine / "thesis.safetensors").exists()
    assert len(cached(tmp_path / "run")) < num_shards(shards)


def test_a_cache_without_room_for_one_window_is_refused(bucket, shards, tmp_path):
    with pytest.raises(
        InputError, match=r"the cache may take .* GB, windows of 1 shards need .* GB; raise data.cache_gb"
    ):
        train_from(bucket, tmp_path / "run", upload(bucket, shards), "data.cache_gb=0.000001")
    with pytest.raises(InputError, match=r"free, the shards would take|the cache may take"):
        train_from(bucket, tmp_path / "more", bucket.location("data"), "data.cache_gb=0.00002", "data.window_shards=5")


def test_a_cache_that_cannot_be_written_is_refused(bucket, shards, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write to .*file"):
        train_from(bucket, tmp_path / "run", upload(bucket, shards), f"data.cache_dir={tmp_path}/file/cache")


def test_a_disk_that_fills_up_during_the_run_is_named(bucket, shards, tmp_path, monkeypatch):
    def full(self, chunk):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download.Part, "write", full)
    with pytest.raises(InputError, match=r"train-\d+.safetensors: cannot be written to .*: No space left on device"):
        train_from(bucket, tmp_path / "run", upload(bucket, shards))


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


def test_two_runs_share_a_cache_unless_one_has_to_delete(bucket, shards, tmp_path):
    from train.config import DataConfig
    from train.data.cache import lock, open_cache

    cache = open_cache(DataConfig(path="", cache_dir=str(tmp_path)), read_manifest(shards))
    with lock(cache, alone=False), lock(cache, alone=False):
        with pytest.raises(InputError, match="another run uses"):
            lock(cache, alone=True)
    with lock(cache, alone=True), pytest.raises(InputError, match="another run uses"):
        lock(cache, alone=False)


def test_the_loss_of_the_fetching_process_is_named(bucket, shards, tmp_path, monkeypatch):
    from train.data import cache, fetcher

    monkeypatch.setattr(cache, "STARTS_WITHIN_S", 1.0)
    monkeypatch.setattr(fetcher.Fetcher, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(Unreachable, match="the process that fetches shards on this node is gone"):
        train_from(bucket, tmp_path / "run", upload(bucket, shards))


def test_a_killed_run_leaves_no_process_and_goes_on_with_another_number_of_ranks(bucket, shards, from_disk, tmp_path):
    settings = overrides(bucket, tmp_path / "run", upload(bucket, shards), "max_steps=30", "eval_every=10")
    settings += ["checkpoint.every=5", "data.num_workers=1"]
    process = subprocess.Popen(command(settings), cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "run/checkpoints/step_00000010").exists():
        time.sleep(0.05)
    children = descendants(process.pid)
    process.kill()
    process.wait()
    assert len(children) >= 2  # fetcher and loader
    deadline_s = time.monotonic() + 15
    while any(alive(pid) for pid in children) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in children)
    found = run(settings, ranks=2)
    assert found.returncode == 0, found.stderr
    by_step = {line["step"]: line["loss"] for line in lines(tmp_path / "run", "train")}
    assert list(by_step.values()) == pytest.approx(losses(from_disk), rel=2e-5)


def descendants(pid):
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pid):
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(bucket, monkeypatch, tmp_path, capsys):
    """What a run says that is refused: one line."""

    def message(data, *more):
        settings = overrides(bucket, tmp_path / "refused", data, *more)
        monkeypatch.setattr("sys.argv", ["train", *map(str, settings)])
        code = __main__.main()
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
    assert "is of a run with data=" in refused(upload(bucket, prepared, "other"), f"run_dir={tmp_path}/run")
