"""What is read from S3 before a run: read again where a checksum says so, waited for where it must be there, and what
S3 refuses is never taken for damage.
"""

from __future__ import annotations

import pytest
from running import SEQ_LEN
from services.fault_proxy import Fault
from streaming import upload

from train import predict, storage
from train.config import InputError, MLMConfig, QAConfig, RecordsConfig, ShardsConfig, TrainConfig, Unreachable
from train.data.preparation import Part, read_state
from train.data.prepared import PreparedData
from train.data.shards import read_manifest
from train.data.table_files import FORMAT, NAME, bring, find_facts
from train.storage import LocalFolder, canonical_json, open_folder, sha256_bytes

FILES = ["manifest.json", "tokenizer/tokenizer.json"]


@pytest.fixture
def data(bucket, prepared, tmp_path, monkeypatch):
    """Prepared data in the bucket, and a way to open it in a new cache."""
    monkeypatch.setattr(storage, "MISSING_PAUSE_S", 0.05)
    location = upload(bucket, prepared)
    bucket.proxy.set()
    return lambda: PreparedData(ShardsConfig(path=location, cache_dir=str(tmp_path / "cache")), bucket.config())


# ---- read again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_byte_that_changes_on_the_way_is_read_again(bucket, data, name):
    bucket.proxy.set(Fault("flip", match=f"^GET .*{name}", after=500, times=2))
    assert data().manifest.seq_len == SEQ_LEN
    assert [seen.fault for seen in bucket.proxy.requests(name)] == ["flip", "flip", None]


@pytest.mark.parametrize("name", FILES)
def test_what_is_damaged_in_the_bucket_is_said_after_a_few_reads(bucket, data, name):
    content = bytearray(bucket.get(f"data/{name}"))
    content[500] ^= 1
    bucket.put(f"data/{name}", bytes(content))
    with pytest.raises(InputError, match=f"/data/{name} .*prepare (the data )?again"):
        data()
    assert len(bucket.proxy.requests(name)) == storage.READS


@pytest.mark.parametrize("name", [NAME, "train.arrow"])
def test_prepared_tables_are_read_again_too(bucket, tmp_path, name):
    content = b"x" * 1000
    digest = sha256_bytes(content)
    facts = {"format": FORMAT, "id": digest, "kind": "words", "labels": [], "settings": {}, "selection": {}}
    facts |= {"tokenizer_sha256": digest, "splits": {}, "files": {"train.arrow": {"bytes": 1000, "sha256": digest}}}
    folder = open_folder(bucket.location("tables"), bucket.config())
    folder.write("train.arrow", content)
    folder.write(NAME, canonical_json(facts))
    bucket.proxy.set(Fault("flip", match=f"^GET .*{name}", times=2))
    assert find_facts(folder) == facts
    bring(folder, facts, tmp_path)
    assert (tmp_path / "train.arrow").read_bytes() == content


# ---- waited for -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "train-00000.safetensors"])
def test_a_file_that_is_missing_for_a_moment_is_waited_for(bucket, data, caplog, name):
    bucket.proxy.set(Fault("status", match=f"(GET|HEAD) .*{name}", code=404, error="NoSuchKey", times=4))
    opened = data()
    opened.verify()
    assert sum(seen.fault == "status" for seen in bucket.proxy.requests(name)) == 4
    assert [line for line in caplog.messages if f"/data/{name} is missing; asked again" in line]


@pytest.mark.parametrize("name", [*FILES, "train-00000.safetensors"])
def test_a_file_that_stays_missing_is_named_after_a_while(bucket, data, monkeypatch, name):
    monkeypatch.setattr(storage, "MISSING_S", 0.1)
    monkeypatch.setattr("train.data.prepared.MISSING_S", 0.1)
    bucket.client.delete_object(Bucket=bucket.name, Key=f"data/{name}")
    with pytest.raises(InputError, match=f"{name} is missing|holds no {name}"):
        data().verify()


# ---- refusals keep their meaning ------------------------------------------------------------------------------------


def config(task, data):
    return TrainConfig(run_dir="run", max_steps=1, micro_batch_size=1, task=task, data=data)


def threshold(folder):
    run = config(QAConfig(unanswerable=True), RecordsConfig(path="x"))
    return predict.threshold_of(predict.Origin("x", (run, folder), run.data), None)


@pytest.mark.parametrize(
    "error", [InputError("s3://b/x: no permission to read it"), Unreachable("S3 is away")], ids=str
)
@pytest.mark.parametrize(
    "read",
    [
        read_manifest,
        lambda folder: read_state(folder, Part(1, 1), "id"),
        find_facts,
        lambda folder: predict.precision_of(config(MLMConfig(), ShardsConfig(path="x")), folder),
        threshold,
    ],
    ids=["manifest", "state of a part", "tables", "precision of a run", "threshold of a run"],
)
def test_what_s3_refuses_is_not_taken_for_damage(tmp_path, read, error):
    class Refusing(LocalFolder):
        def read(self, name):
            raise error

        def size(self, name):
            return 1

    with pytest.raises(type(error), match=f"^{error}$"):
        read(Refusing(tmp_path))


def test_a_file_in_place_of_prepared_data_is_said(tmp_path):
    path = tmp_path / "passwd"
    path.touch()
    with pytest.raises(InputError, match=f"^data.path={path} is a file, not a folder; give the folder that"):
        read_manifest(path)
