"""Looking into prepared data by `baretrain shards`."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rejections import rejects
from saved_steps import flip
from streaming import upload

from train.config import S3Config, ShardsConfig
from train.data.shards import format as shard_format
from train.data.shards.format import ShardSet, map_tensors, write_shard
from train.data.shards.manifest import read_manifest
from train.data.shards.prepared import PreparedData
from train.storage.folders import LocalFolder
from train.tools import shards


def called(capsys, *arguments):
    code = shards.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def test_ls_names_every_shard_with_its_rows(prepared, capsys):
    code, output = called(capsys, "ls", prepared)
    manifest = read_manifest(prepared)
    assert code == 0
    assert manifest.id[:12] in output.out
    for shard in [*manifest.splits["train"], *manifest.splits["validation"]]:
        assert re.search(rf"{shard.file} +{shard.rows:,} rows .*{shard.sha256[:12]}", output.out)


def test_verify_names_all_that_is_damaged_and_a_run_what_has_another_length(
    prepared, tmp_path, capsys
):
    assert called(capsys, "verify", prepared)[0] == 0
    copy = shutil.copytree(prepared, tmp_path / "data")
    manifest = read_manifest(copy)
    first, second = manifest.splits["train"][0].file, manifest.splits["validation"][0].file
    flip(copy / first, -1)
    run = ShardsConfig(path=str(copy)), S3Config()
    rejects(f"{first} has sha256", PreparedData(*run).verify)
    for damage, says in (
        (lambda: os.truncate(copy / second, 99), f"{second} has 99 bytes, the manifest says"),
        ((copy / second).unlink, f"{second} is missing"),
    ):
        damage()
        rejects(says, PreparedData, *run)
        code, output = called(capsys, "verify", copy)
        assert code == 1 and says in output.out
        assert f"{first} has sha256" in output.out
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    assert "not the tokenizer that made the shards" in called(capsys, "verify", copy)[1].out


def test_head_shows_text_and_tokens(prepared, capsys):
    code, output = called(capsys, "head", prepared, "-n", 2)
    assert code == 0
    lines = output.out.splitlines()
    assert [line for line in lines if line.startswith("---")] == ["--- train 0", "--- train 1"]
    assert lines[1].startswith("[CLS]") and len(lines[2].split()) == 32


def test_s3_shows_what_the_disk_shows_ls_reads_the_manifest_alone_and_verify_every_byte(
    bucket, prepared, tmp_path, capsys
):
    flags = ["--endpoint", bucket.service.endpoint, "--region", "us-east-1"]
    location = [upload(bucket, prepared), *flags, "--cache-dir", str(tmp_path / "cache")]
    for command, first in (("ls", 1), ("head", 0)):
        bucket.proxy.set()
        shown, wanted = (
            called(capsys, command, *where)[1].out.splitlines() for where in (location, [prepared])
        )
        assert shown[first:] == wanted[first:] and shown
        if command == "ls":
            assert [request.path for request in bucket.proxy.requests()] == [
                f"/{bucket.name}/data/manifest.json"
            ]
    assert called(capsys, "verify", *location)[0] == 0
    names = [shard.file for shard in read_manifest(prepared).shards]
    bucket.flip(f"data/{names[0]}", -1)
    bucket.client.delete_object(Bucket=bucket.name, Key=f"data/{names[1]}")
    code, output = called(capsys, "verify", *location)
    assert (
        code == 1
        and f"{names[0]} has sha256" in output.out
        and f"{names[1]} is missing" in output.out
    )


@pytest.fixture
def many(prepared, tmp_path):
    """3,000 shards of 64 sequences, one file under many names, and the tokens of it."""
    manifest = read_manifest(prepared)
    rows = ShardSet(prepared, manifest, "train").rows(np.arange(64))
    first = write_shard(LocalFolder(tmp_path), "train-00000.safetensors", rows)
    shards = [replace(first, file=f"train-{number:05d}.safetensors") for number in range(3000)]
    for shard in shards[1:]:
        os.link(tmp_path / first.file, tmp_path / shard.file)
    return tmp_path, replace(manifest, splits={**manifest.splits, "train": shards}), rows.tokens


@pytest.mark.slow
def test_of_many_shards_a_process_maps_those_read_last(many, monkeypatch):
    """And looks up a deleted one, whose space a map would hold, only among those that the next to open could free."""
    folder, manifest, tokens = many
    monkeypatch.setattr(shard_format, "MAPPED_SHARDS", 50)
    waited, looked = [], []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: looked.append(path) or exists(path))
    reader = ShardSet(folder, manifest, "train", waited.extend)
    for numbers in np.random.default_rng(0).permutation(len(reader)).reshape(-1, 512)[:20]:
        np.testing.assert_array_equal(reader.rows(numbers).tokens, tokens[numbers % 64])
        assert len(reader.maps) <= 50
    assert (
        sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines()) <= 50
    )
    assert len(looked) <= 20 and len(waited) > 5000
    first_rows = reader.first_rows
    reader.rows(first_rows[[1, 2, 3]])
    for number in (1, 2):
        (folder / manifest.splits["train"][number].file).unlink()
    reader.rows(first_rows[[*range(4, 48), 1]])  # 1 is still mapped, and needed
    assert {1, 2, 3} <= {*reader.maps}
    for number in [*reader.maps][:-46]:
        (folder / manifest.splits["train"][number].file).unlink(missing_ok=True)
    reader.rows(first_rows[[100]])
    assert 2 not in reader.maps and {1, 100} <= {*reader.maps}


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U16", "shape": [4, 2**40], "data_offsets": [0, 2**43]},
        {"dtype": "U16", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "U16", "shape": [4], "data_offsets": [-8, 0]},
        {"dtype": "U16", "shape": [4], "data_offsets": [0, 7]},
        {"dtype": "U16", "shape": 4, "data_offsets": [0, 8]},
        [],
    ],
)
def test_a_header_names_no_bytes_outside_of_its_file(tmp_path, entry):
    header = json.dumps({"tokens": entry}).encode()
    path = tmp_path / "train-00000.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    rejects(
        "train-00000.safetensors is not a shard: .*; prepare the data again", map_tensors, path
    )
