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


def test_verify_names_all_that_is_damaged_and_a_run_what_has_another_length(prepared, tmp_path, capsys):
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


def test_s3_shows_what_the_disk_shows_ls_reads_the_manifest_alone_and_verify_every_byte(
    bucket, prepared, tmp_path, capsys
):
    flags = ["--endpoint", bucket.service.endpoint, "--region", "us-east-1", "--path-style"]
    location = [upload(bucket, prepared), *flags, "--cache-dir", str(tmp_path / "cache")]
    for command, first in (("ls", 1), ("head", 0), ("stats", 0)):
        bucket.proxy.set()
        shown, wanted = (called(capsys, command, *where)[1].out.splitlines() for where in (location, [prepared]))
        assert shown[first:] == wanted[first:] and shown
        if command == "ls":
            assert [request.path for request in bucket.proxy.requests()] == [f"/{bucket.name}/data/manifest.json"]
    assert called(capsys, "verify", *location)[0] == 0
    names = [shard.file for shard in read_manifest(prepared).shards]
    bucket.flip(f"data/{names[0]}", -1)
    bucket.client.delete_object(Bucket=bucket.name, Key=f"data/{names[1]}")
    code, output = called(capsys, "verify", *location)
    assert code == 1 and f"{names[0]} has sha256" in output.out and f"{names[1]} is missing" in output.out
