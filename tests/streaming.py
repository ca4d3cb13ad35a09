"""What the tests of training from S3 share. Fixtures among it."""

import psutil
import pytest
from running import lines, prepare_config, train_config, train_overrides

from train import cli, loop, prepare
from train.config import TrainConfig
from train.data import download
from train.data.shards import read_manifest
from train.preempt import StopRequest

SHARD = r"^GET .*train-\d+\.safetensors"


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(download, "LONGEST_PAUSE_S", 0.5)


@pytest.fixture(scope="session")
def shards(tmp_path_factory, corpus):
    """A prepared data set of a dozen shards."""
    folder = tmp_path_factory.mktemp("shards") / "data"
    prepare.prepare(prepare_config(folder, corpus, "rows_per_shard=16"))
    assert len(read_manifest(folder).splits["train"]) >= 8
    return folder


@pytest.fixture(scope="session")
def from_disk(tmp_path_factory, shards):
    run_dir = tmp_path_factory.mktemp("runs") / "disk"
    loop.run(train_config(run_dir, shards, "max_steps=30", "eval_every=10"), StopRequest())
    return run_dir


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


def assert_same(run_dir, from_disk):
    assert losses(run_dir) == losses(from_disk)
    assert [line["loss"] for line in lines(run_dir, "eval")] == [line["loss"] for line in lines(from_disk, "eval")]


def train_from(bucket, run_dir, data, *more):
    settings = overrides(bucket, run_dir, data, "max_steps=30", "eval_every=10", *more)
    return loop.run(cli.load_config(TrainConfig, settings), StopRequest())


def num_shards(shards):
    return sum(map(len, read_manifest(shards).splits.values()))


def descendants(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
