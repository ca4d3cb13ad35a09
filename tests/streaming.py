"""What the tests of training from S3 share. Fixtures among it."""

import pytest
from running import prepare_config, train_overrides

from train.data.shards import cache, download, prefetch
from train.data.shards.manifest import read_manifest
from train.tools import prepare


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(prefetch, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(prefetch, "LONGEST_PAUSE_S", 0.5)
    monkeypatch.setattr(prefetch, "DEADLINE_S", 20.0)
    monkeypatch.setattr(download, "ATTEMPT_S", 2.0)


@pytest.fixture(scope="session")
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
    """The settings of a run that reads from the bucket, with a cache of its own."""
    own = f"data.cache_dir={run_dir}-cache"
    return [*train_overrides(run_dir, data, "max_epochs=9", own, *bucket.overrides()), *more]


def windowed(shards):
    """The setting of a cache that holds windows of one shard."""
    manifest = read_manifest(shards)
    validation = sum(shard.bytes for shard in manifest.splits["validation"])
    limit = validation + cache.WINDOWS_HELD * max(shard.bytes for shard in manifest.shards)
    return f"data.cache_gb={(limit + 1) / 1e9}"  # a byte for the rounding
