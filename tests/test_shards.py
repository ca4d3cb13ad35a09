"""Looking into prepared data by `python -m train.shards`."""

import os
import re
import shutil

import pytest
from rejections import rejects
from saved_steps import flip
from streaming import upload

from train import shards
from train.config import S3Config, ShardsConfig
from train.data.shards.format import read_manifest
from train.data.shards.prepared import PreparedData


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


def test_verify_passes_whole_data_and_names_all_that_is_damaged(prepared, tmp_path, capsys):
    assert called(capsys, "verify", prepared)[0] == 0
    copy = shutil.copytree(prepared, tmp_path / "data")
    manifest = read_manifest(copy)
    first, second = manifest.splits["train"][0].file, manifest.splits["validation"][0].file
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    flip(copy / first, -1)
    for damage, says in (
        (lambda: os.truncate(copy / second, 99), f"{second} has 99 bytes, the manifest says"),
        ((copy / second).unlink, f"{second} is missing"),
    ):
        damage()
        code, output = called(capsys, "verify", copy)
        assert code == 1 and says in output.out
        assert f"{first} has sha256" in output.out and "not the tokenizer that made the shards" in output.out


def test_a_run_looks_at_lengths_before_it_begins_and_at_checksums_if_asked(prepared, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "data")
    shard = copy / read_manifest(copy).splits["train"][0].file
    flip(shard, -5)
    given = PreparedData, ShardsConfig(path=str(copy)), S3Config()
    rejects(f"{shard.name} has sha256", PreparedData(*given[1:]).verify)
    os.truncate(shard, 99)
    rejects(f"{shard.name} has 99 bytes, the manifest says", *given)
    shard.unlink()
    rejects(f"{shard.name} is missing", *given)


def test_head_shows_text_and_marks_what_is_to_predict(prepared, capsys):
    code, output = called(capsys, "head", prepared, "-n", 2)
    assert code == 0
    lines = output.out.splitlines()
    assert [line for line in lines if line.startswith("---")] == ["--- train 0", "--- train 1"]
    marked = lines[2].split()
    assert any(piece == "<[MASK]>" for piece in marked)
    assert 1 <= sum(piece.startswith("<") and piece.endswith(">") for piece in marked) <= round(32 * 0.15)
    assert "[MASK]" not in lines[1] and lines[1].startswith("[CLS]")


def test_stats_agree_with_what_the_preparation_counted(prepared, capsys):
    code, output = called(capsys, "stats", prepared, "-n", 5)
    manifest = read_manifest(prepared)
    assert code == 0
    assert f"{manifest.rows('train'):,} sequences" in output.out
    entropy = float(output.out.split("unigram entropy ")[1].split()[0])
    assert entropy == pytest.approx(manifest.counts["unigram_entropy"], abs=0.01)  # the tail is in no sequence
    frequencies = [int(line.split()[0].replace(",", "")) for line in output.out.splitlines()[4:]]
    assert len(frequencies) == 5 and frequencies == sorted(frequencies, reverse=True)


# ---- in S3 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def location(bucket, prepared, tmp_path):
    """Prepared data in S3, and the flags that lead there."""
    location = upload(bucket, prepared)
    flags = ["--endpoint", bucket.service.endpoint, "--region", "us-east-1", "--path-style"]
    return [location, *flags, "--cache-dir", str(tmp_path / "cache")]


def test_s3_shows_what_the_disk_shows(location, prepared, capsys):
    for command in ("head", "stats"):
        assert called(capsys, command, *location)[1].out == called(capsys, command, prepared)[1].out


def test_ls_of_s3_reads_the_manifest_alone(location, prepared, bucket, capsys):
    bucket.proxy.set()
    listed = called(capsys, "ls", *location)[1].out.splitlines()
    assert listed[1:] == called(capsys, "ls", prepared)[1].out.splitlines()[1:]
    assert [request.path for request in bucket.proxy.requests()] == [f"/{bucket.name}/data/manifest.json"]


def test_verify_of_s3_reads_every_byte(location, bucket, capsys):
    code, output = called(capsys, "verify", *location)
    assert code == 0 and "shards are whole" in output.out
    names = [shard.file for shard in shards.read_manifest(shards.open_folder(location[0], bucket.config())).shards]
    bucket.flip(f"data/{names[0]}", -1)
    bucket.client.delete_object(Bucket=bucket.name, Key=f"data/{names[1]}")
    code, output = called(capsys, "verify", *location)
    assert code == 1
    assert f"{names[0]} has sha256" in output.out and f"{names[1]} is missing" in output.out
