"""Looking into prepared data by `python -m train.shards`."""

import re
import shutil

import pytest
from running import run

from train import shards
from train.data.shards import read_manifest


def said(capsys, *arguments):
    code = shards.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def test_ls_names_every_shard_with_its_rows(prepared, capsys):
    code, told = said(capsys, "ls", prepared)
    manifest = read_manifest(prepared)
    assert code == 0
    assert manifest.id[:12] in told.out
    for shard in [*manifest.splits["train"], *manifest.splits["validation"]]:
        assert re.search(rf"{shard.file} +{shard.rows:,} rows .*{shard.sha256[:12]}", told.out)


def test_verify_passes_whole_data_and_names_all_that_is_damaged(prepared, tmp_path, capsys):
    assert said(capsys, "verify", prepared)[0] == 0
    copy = shutil.copytree(prepared, tmp_path / "data")
    manifest = read_manifest(copy)
    first, second = manifest.splits["train"][0].file, manifest.splits["validation"][0].file
    content = bytearray((copy / first).read_bytes())
    content[-1] ^= 1
    (copy / first).write_bytes(content)
    (copy / second).unlink()
    code, told = said(capsys, "verify", copy)
    assert code == 1
    assert f"{first} is damaged: sha256" in told.out and f"{second} is missing" in told.out


def test_verify_sees_a_truncated_shard_and_another_tokenizer(prepared, tmp_path, capsys):
    copy = shutil.copytree(prepared, tmp_path / "data")
    shard = copy / read_manifest(copy).splits["train"][0].file
    shard.write_bytes(shard.read_bytes()[:-2])
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")
    code, told = said(capsys, "verify", copy)
    assert code == 1
    assert "the manifest says" in told.out and "not the tokenizer that made the shards" in told.out


def test_head_shows_text_and_marks_what_is_to_predict(prepared, capsys):
    code, told = said(capsys, "head", prepared, "-n", 2)
    assert code == 0
    lines = told.out.splitlines()
    assert [line for line in lines if line.startswith("---")] == ["--- train 0", "--- train 1"]
    marked = lines[2].split()
    assert any(piece == "<[MASK]>" for piece in marked)
    assert 1 <= sum(piece.startswith("<") and piece.endswith(">") for piece in marked) <= round(32 * 0.15)
    assert "[MASK]" not in lines[1] and lines[1].startswith("[CLS]")


def test_stats_agree_with_what_the_preparation_counted(prepared, capsys):
    code, told = said(capsys, "stats", prepared, "-n", 5)
    manifest = read_manifest(prepared)
    assert code == 0
    assert f"{manifest.rows('train'):,} sequences" in told.out
    assert f"unigram entropy {manifest.counts['unigram_entropy']:.3f}" in told.out
    frequencies = [int(line.split()[0].replace(",", "")) for line in told.out.splitlines()[4:]]
    assert len(frequencies) == 5 and frequencies == sorted(frequencies, reverse=True)


@pytest.mark.parametrize("command", ["ls", "verify", "head", "stats"])
def test_a_folder_without_data_is_one_line(tmp_path, capsys, command):
    code, told = said(capsys, command, tmp_path)
    assert code == 2
    assert told.err.count("\n") == 1 and "no manifest.json" in told.err


def test_it_runs_as_a_program(prepared):
    assert run(["ls", str(prepared)], module="train.shards").returncode == 0
