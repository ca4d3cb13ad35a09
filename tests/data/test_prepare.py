"""Preparation: what it writes, that it is the same every time, that it goes on, and what it rejects."""

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from rejections import rejects
from running import SEQ_LEN, prepare_config, prepare_here
from tokenizers import Tokenizer

from train.data.random_bits import text_uniform
from train.data.shards.format import ShardSet
from train.data.shards.manifest import check_files, read_manifest
from train.data.text import encoding, preparation, tokenizer
from train.data.text.corpus import open_corpus
from train.data.text.encoding import starts_of
from train.data.text.packing import Packer
from train.tools import prepare


def content(folder):
    """Bytes of everything a training run reads."""
    names = [
        "manifest.json",
        "tokenizer/tokenizer.json",
        *(path.name for path in folder.glob("*-*.safetensors")),
    ]
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def test_the_manifest_holds_what_is_there(prepared):
    manifest = read_manifest(prepared)
    check_files(prepared, manifest, checksums=True)
    assert (manifest.seq_len, manifest.counts["documents"]) == (SEQ_LEN, 120)
    held_out = ShardSet(prepared, manifest, "validation")
    pairs = held_out.rows(np.arange(len(held_out))).same_document.sum()
    assert manifest.counts["validation_pairs"] == pairs > 0
    shards = ShardSet(prepared, manifest, "train")
    tokens = shards.rows(np.arange(len(shards))).tokens.ravel()
    share = np.bincount(tokens[tokens >= 5]) / (tokens >= 5).sum()
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
    assert manifest.counts["unigram_entropy"] == pytest.approx(entropy, abs=0.01)  # the tail
    assert 0 < manifest.counts["neighbour_accuracy"] < 1


class Killed(BaseException):
    """Stands for a kill: nothing of the program catches it."""


@contextmanager
def killed_in(module, name, call):
    """Kills what runs in the block at a call of a function."""
    kept, calls = getattr(module, name), count(1)

    def dying(*arguments, **settings):
        if next(calls) == call:
            raise Killed
        return kept(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(encoding, "CHUNK_CHARS", 1000)
        patched.setattr(module, name, dying)
        yield


# which call
KILLED_AT = {
    "publish_tokenizer": 1,
    "write_shard": 4,
    "write_manifest": 1,
    "remove_states": 1,
}


@pytest.mark.parametrize("name", KILLED_AT)
def test_a_killed_preparation_continues_to_the_same_bytes(corpus, shards, tmp_path, name):
    output, was_begun = tmp_path / "killed", name != "publish_tokenizer"
    with killed_in(preparation if was_begun else tokenizer, name, KILLED_AT[name]):
        prepare_here(output, corpus, "rows_per_shard=16")
    assert bool(list(output.glob("train-*"))) == was_begun
    assert (output / "manifest.json").exists() == (name == "remove_states")
    prepare_here(output, corpus, "rows_per_shard=16")
    assert content(output) == content(shards)
    assert not list(output.glob("part-*"))


def test_each_split_is_one_stream_of_the_documents_that_a_hash_of_their_text_gives_it(
    prepared, corpus
):
    """So equal documents are never on both sides."""
    documents = corpus.read_text().split("\n\n")
    ordered = sorted(documents, key=lambda text: text_uniform(text, 0))
    sums = np.cumsum([len(text) for text in ordered])
    held_out = set(ordered[: np.abs(sums - 0.25 * sums[-1]).argmin() + 1])
    check_streams(
        prepared,
        *([text for text in documents if (text in held_out) == number] for number in range(2)),
    )


def check_streams(folder, *texts_of_splits):
    """Assert that each split is one stream of these texts, packed here again, in one go, from the same pieces."""
    manifest = read_manifest(folder)
    info = manifest.tokenizer
    pieces = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    for number, (split, texts) in enumerate(
        zip(("train", "validation"), texts_of_splits, strict=True)
    ):
        assert [shard.file for shard in manifest.splits[split]] == [f"{split}-00000.safetensors"]
        ids = [pieces.encode(text, add_special_tokens=False).ids for text in texts]
        packer = Packer(
            SEQ_LEN, info.cls_id, info.sep_id, starts_of(pieces), number, np.dtype(np.uint16)
        )
        rows = packer.add(
            np.array(sum(ids, []), np.int32), np.array([len(text) for text in ids], np.int64)
        )
        result = ShardSet(folder, manifest, split).rows(np.arange(manifest.rows(split)))
        assert len(rows) > 20
        for name in ("tokens", "pivot", "same_document"):
            np.testing.assert_array_equal(getattr(result, name), getattr(rows, name))


def test_of_a_large_corpus_the_tokenizer_reads_stretches_from_all_over(tmp_path):
    texts = [f"document {number} " + "word " * 20 for number in range(5000)]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    cfg = prepare_config(tmp_path / "out", tmp_path / "text.txt", "tokenizer.train_bytes=60000")
    corpus = open_corpus(cfg.corpus)
    held_out = preparation.choose_held_out(corpus, 0.2, 0)
    result = [int(text.split()[1]) for text in prepare.training_texts(cfg, corpus, held_out)]
    assert 200 < len(result) < 600 and len(set(result)) == len(result)
    assert np.histogram(result, 10, (0, 5000))[0].min() >= 20
    assert result == [
        int(text.split()[1]) for text in prepare.training_texts(cfg, corpus, held_out)
    ]


def test_special_tokens_spelt_in_a_text_do_not_structure_it(corpus, tmp_path):
    text = corpus.read_text().replace("ba", "[SEP] [MASK] <pad> [CLS]", 50)
    (tmp_path / "tricky.txt").write_text(text)
    manifest = prepare_here(tmp_path / "out", tmp_path / "tricky.txt")
    info = manifest.tokenizer
    shards = ShardSet(tmp_path / "out", manifest, "train")
    tokens = shards.rows(np.arange(len(shards))).tokens
    assert not np.isin(tokens, [info.mask_id, info.pad_id]).any()
    assert (tokens[:, 1:] != info.cls_id).all()
    assert (tokens == info.sep_id).sum() < 2 * len(
        tokens
    ) + 120  # two a sequence, and the ends of 120 documents


def rejected(output, corpus, *overrides):
    said = rejects("", lambda: prepare_here(output, corpus, *overrides))
    assert not Path(output, "manifest.json").exists() or "other settings" in said
    return said


@pytest.mark.parametrize(
    ("content", "overrides", "expected"),
    [
        (b"the old city\n\nthe new house\n", ["{ready}"], "less than one sequence of 32"),
        (
            b"one two\n\ntwo one\n\n" * 20,
            ["validation_fraction=0.5"],
            "no tokenizer can be made from this text: Vocabulary size too high",
        ),
        (
            b"\n\nbinary \0\n",
            [],
            "text.txt:3: a NUL character",
        ),  # not as an error of the tokenizer
        (
            b"one",
            ["validation_fraction=0.999999"],
            "all of 1 documents are held out for validation",
        ),
    ],
)
def test_text_that_is_too_little_or_none_is_rejected(
    tmp_path, prepared, content, overrides, expected
):
    (tmp_path / "text.txt").write_bytes(content)
    given = [
        text.format(ready=f"tokenizer.pretrained={prepared / 'tokenizer'}") for text in overrides
    ]
    assert expected in rejected(tmp_path / "out", tmp_path / "text.txt", *given)


@pytest.mark.parametrize("asked_for", [8000, 20])
def test_a_vocabulary_that_does_not_suit_the_text_is_rejected_and_another_may_follow(
    tmp_path, corpus, asked_for
):
    said = rejected(tmp_path / "out", corpus, f"tokenizer.vocab_size={asked_for}")
    assert said.startswith(f"tokenizer.vocab_size={asked_for}: no tokenizer can be made from this")
    prepare_here(tmp_path / "out", corpus)


def test_a_tokenizer_is_not_trained_beyond_the_memory(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(tokenizer, "available_bytes", lambda: 10**5)
    says = "more than is free; set tokenizer.train_bytes=5000 or less"
    assert rejected(tmp_path / "out", corpus).endswith(says)


def test_an_interrupt_while_the_tokenizer_is_trained_is_one():
    def texts():
        yield "some text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenizer.train_tokenizer(texts(), vocab_size=30, lowercase=True, train_bytes=1000)


def test_another_preparation_and_somebody_elses_folder_are_left_alone(prepared, corpus, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "copy")
    before = content(copy)
    assert "seq_len: 32 -> 64" in rejected(copy, corpus, "seq_len=64")
    assert "tokenizer.vocab_size: 120 -> 100" in rejected(copy, corpus, "tokenizer.vocab_size=100")
    more = tmp_path / "text.txt"
    more.write_text(corpus.read_text() + "\nMore.\n")
    rejects("the corpus has changed", prepare.prepare, prepare_config(copy, more))
    assert content(copy) == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    assert "has files (thesis.tex) but no preparation" in rejected(tmp_path / "out", corpus)
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"settings": 5}', '{"settings": {"parts": "x"}}']
)
def test_a_claim_of_another_making_is_one_line(tmp_path, corpus, content):
    (tmp_path / "source.json").write_text(content)
    assert "source.json is damaged: " in rejected(tmp_path, corpus)


WITHOUT_TORCH = """
import sys
from train.__main__ import baretrain
code = baretrain()
assert "torch._C" not in sys.modules and "transformers" in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_command_imports_no_torch_for_a_corpus_of_files(prepared, tmp_path, kind):
    path = tmp_path / f"corpus.{kind}"
    rows = Dataset.from_dict({"text": [f"a text, number {number}" for number in range(200)]})
    write = {"jsonl": rows.to_json, "parquet": rows.to_parquet}[kind]
    write(path)
    settings = {
        "corpus": kind,
        "corpus.path": path,
        "tokenizer.pretrained": prepared / "tokenizer",
        "output": tmp_path / "shards",
        "seq_len": 16,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-c", WITHOUT_TORCH, "prepare", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stdout + done.stderr
    assert read_manifest(tmp_path / "shards").rows("train") > 0
