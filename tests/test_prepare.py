"""Preparation: what it writes, that it is the same every time, that it goes on, and what it refuses."""

import errno
import json
import os
import re
import shutil
import signal
import tempfile

import numpy as np
import pytest
from forks import run_forked
from running import ROOT, SEQ_LEN, prepare_config, run, write_corpus
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from train import prepare
from train.config import InputError
from train.data import preparation, tokenizer
from train.data.corpus import open_corpus
from train.data.encoding import starts_of
from train.data.packing import Packer
from train.data.preparation import digest
from train.data.shards import ShardSet, check_files, read_manifest


def content(folder):
    """Bytes of everything a training run reads."""
    names = ["manifest.json", "tokenizer/tokenizer.json", *(path.name for path in folder.glob("*-*.safetensors"))]
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def test_the_manifest_tells_what_is_there(prepared):
    manifest = read_manifest(prepared)
    check_files(prepared, manifest, checksums=True)
    assert manifest.seq_len == SEQ_LEN
    assert manifest.rows("train") > 100
    assert manifest.rows("validation") > 20
    assert manifest.counts["documents"] == 120
    assert 0 < manifest.counts["unigram_entropy"] < np.log(120)


def test_the_text_can_be_read_back(prepared, corpus):
    manifest = read_manifest(prepared)
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    found = []
    for split in ("train", "validation"):
        shards = ShardSet(prepared, manifest, split)
        for tokens in shards.rows(np.arange(len(shards))).tokens:
            assert (tokens[0], tokens[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
            found.append(tokenizer.decode(tokens, skip_special_tokens=True))
    words = corpus.read_text().split()
    assert len(" ".join(found).split()) > 0.97 * len(words)
    assert sum(word in words for text in found for word in text.split()[1:-1]) > 0.9 * len(words) * 0.9


def test_unigram_entropy_is_that_of_the_training_tokens(prepared):
    shards = ShardSet(prepared, read_manifest(prepared), "train")
    tokens = shards.rows(np.arange(len(shards))).tokens.ravel()
    share = np.bincount(tokens[tokens >= 5]) / (tokens >= 5).sum()
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
    assert read_manifest(prepared).counts["unigram_entropy"] == pytest.approx(entropy, abs=0.01)  # the tail


def test_the_same_text_and_seed_give_the_same_bytes(prepared, corpus, tmp_path):
    moved = shutil.copy(corpus, tmp_path / "elsewhere.txt")
    prepare.prepare(prepare_config(tmp_path / "again", moved))
    assert content(tmp_path / "again") == content(prepared)


def test_another_seed_holds_out_other_documents(prepared, corpus, tmp_path):
    prepare.prepare(prepare_config(tmp_path / "other", corpus, "seed=1"))
    held_out = "validation-00000.safetensors"
    assert content(tmp_path / "other")[held_out] != content(prepared)[held_out]


def test_equal_documents_are_never_on_both_sides(tmp_path):
    text = write_corpus(tmp_path / "text.txt").read_text()
    (tmp_path / "twice.txt").write_text(text + "\n\n" + text)
    manifest = prepare.prepare(prepare_config(tmp_path / "out", tmp_path / "twice.txt"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    decoded = {}
    for split in ("train", "validation"):
        shards = ShardSet(tmp_path / "out", manifest, split)
        rows = shards.rows(np.arange(len(shards))).tokens
        decoded[split] = " ".join(tokenizer.batch_decode(rows, skip_special_tokens=True))
    sentences = {document.split(".")[0] for document in text.split("\n\n")}
    seen = {split: {sentence for sentence in sentences if sentence in found} for split, found in decoded.items()}
    assert len(seen["train"]) > 50
    assert len(seen["validation"]) > 10
    assert not seen["train"] & seen["validation"]


def test_finished_work_is_not_done_twice(prepared, corpus):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    prepare.prepare(prepare_config(prepared, corpus))
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


SMALL = ["rows_per_shard=16"]
KILLED_AT = """
import os, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
from running import prepare_config
from train import prepare
from train.data import encoding, merge, preparation, tokenizer
encoding.CHUNK_CHARS = 1000
kept = {target}
calls = 0
def dying(*arguments, **settings):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return kept(*arguments, **settings)
{target} = dying
prepare.prepare(prepare_config({output!r}, {corpus!r}, "rows_per_shard=16", *{overrides!r}))
"""


def killed_at(output, corpus, target, call, *overrides):
    """A preparation in a process that is killed at a call of a function."""
    paths = {"root": str(ROOT), "tests": str(ROOT / "tests"), "output": str(output), "corpus": str(corpus)}
    code = KILLED_AT.format(**paths, target=target, call=call, overrides=overrides)
    died = run_forked(["-c", code], os.environ)
    assert died.returncode == -signal.SIGKILL, died.stderr


REMEMBERED = [("preparation.write_shard", 4), ("merge.write_manifest", 1)]  # what was done by then is


@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("tokenizer.train_tokenizer", 1),
        ("tokenizer.publish_tokenizer", 1),
        ("preparation.write_shard", 1),
        *REMEMBERED,
    ],
)
def test_a_killed_preparation_goes_on_to_the_same_bytes(corpus, tmp_path, target, call):
    prepare.prepare(prepare_config(tmp_path / "whole", corpus, *SMALL))
    output = tmp_path / "killed"
    killed_at(output, corpus, target, call)
    assert bool(list(output.glob("part-*"))) == ((target, call) in REMEMBERED)
    with pytest.raises(InputError, match="did not finish"):
        read_manifest(output)
    prepare.prepare(prepare_config(output, corpus, *SMALL))
    assert content(output) == content(tmp_path / "whole")
    assert len(content(output)) > 8  # several shards
    assert not list(output.glob("part-*"))


def test_a_merge_that_was_killed_before_it_tidied_up_is_tidied_up(corpus, tmp_path):
    killed_at(tmp_path / "out", corpus, "merge.remove_states", 1)
    assert list((tmp_path / "out").glob("part-*"))
    prepare.prepare(prepare_config(tmp_path / "out", corpus, *SMALL))
    assert not list((tmp_path / "out").glob("part-*"))


def test_a_resumed_preparation_keeps_what_was_written(corpus, tmp_path):
    output = tmp_path / "killed"
    killed_at(output, corpus, "preparation.write_shard", 4)
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("train-*.safetensors")}
    assert len(before) >= 2
    prepare.prepare(prepare_config(output, corpus, *SMALL))
    kept = [name for name, time in before.items() if (output / name).stat().st_mtime_ns == time]
    assert len(kept) >= 2


def test_an_unsplit_preparation_is_one_stream_of_all_documents(prepared, corpus):
    """Packed here again, in one go, from the same pieces."""
    manifest = read_manifest(prepared)
    info = manifest.tokenizer
    assert [shard.file for shard in manifest.splits["train"]] == ["train-00000.safetensors"]
    pieces = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    texts = [text for text in corpus.read_text().split("\n\n") if digest(text, 0)[0] >= 0.2]
    ids = [pieces.encode(text, add_special_tokens=False).ids for text in texts]
    packer = Packer(SEQ_LEN, info.cls_id, info.sep_id, starts_of(pieces), 0, np.dtype(np.uint16))
    rows = packer.add(np.array(sum(ids, []), np.int32), np.array([len(text) for text in ids], np.int64))
    found = ShardSet(prepared, manifest, "train").rows(np.arange(manifest.rows("train")))
    for name in ("tokens", "pivot", "same_document"):
        np.testing.assert_array_equal(getattr(found, name), getattr(rows, name))


@pytest.mark.parametrize(("seq_len", "dtype"), [(8, np.uint16), (512, np.uint16), (65535, np.uint32)])
def test_shards_are_64_mib_whatever_their_sequences(seq_len, dtype):
    rows = preparation.rows_of_shard(seq_len, np.dtype(dtype))
    assert 0.98 * 2**26 < rows * (seq_len * np.dtype(dtype).itemsize + 3) <= 2**26


def test_the_default_size_of_a_shard_is_used(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "SHARD_BYTES", 20 * (2 * SEQ_LEN + 3))
    manifest = prepare.prepare(prepare_config(tmp_path / "out", corpus))
    assert {shard.rows for shard in manifest.splits["train"][:-1]} == {20}


def test_of_a_large_corpus_the_tokenizer_reads_stretches_from_all_over(tmp_path):
    texts = [f"document {number} " + "word " * 20 for number in range(5000)]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    cfg = prepare_config(tmp_path / "out", tmp_path / "text.txt", "tokenizer.train_bytes=60000")
    corpus = open_corpus(cfg.corpus)
    found = [int(text.split()[1]) for text in prepare.training_texts(cfg, corpus)]
    assert 200 < len(found) < 600 and len(set(found)) == len(found)
    assert np.histogram(found, 10, (0, 5000))[0].min() >= 20
    assert found == [int(text.split()[1]) for text in prepare.training_texts(cfg, corpus)]


def test_a_pretrained_tokenizer_is_taken_as_it_is(prepared, corpus, tmp_path):
    again = prepare.prepare(
        prepare_config(tmp_path / "out", corpus, f"tokenizer.pretrained={prepared / 'tokenizer'}", "seq_len=16")
    )
    assert again.tokenizer.vocab_size == read_manifest(prepared).tokenizer.vocab_size
    assert again.seq_len == 16


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_still_reads_whole_documents(prepared, corpus, tmp_path):
    folder = shutil.copytree(prepared / "tokenizer", tmp_path / "tokenizer")
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(8)
    stored.enable_padding(length=8)
    stored.save(str(folder / "tokenizer.json"))
    again = prepare.prepare(prepare_config(tmp_path / "out", corpus, f"tokenizer.pretrained={folder}"))
    assert again.counts["tokens"] == read_manifest(prepared).counts["tokens"]


def test_special_tokens_spelt_in_a_text_do_not_structure_it(corpus, tmp_path):
    text = corpus.read_text().replace("ba", "[SEP] [MASK] <pad> [CLS]", 50)
    (tmp_path / "tricky.txt").write_text(text)
    manifest = prepare.prepare(prepare_config(tmp_path / "out", tmp_path / "tricky.txt"))
    info = manifest.tokenizer
    shards = ShardSet(tmp_path / "out", manifest, "train")
    tokens = shards.rows(np.arange(len(shards))).tokens
    assert not np.isin(tokens, [info.mask_id, info.pad_id]).any()
    assert (tokens[:, 1:] != info.cls_id).all()
    assert (tokens == info.sep_id).sum() < 2 * len(tokens) + 120  # two a sequence, and the ends of 120 documents


# ---- refused -------------------------------------------------------------------------------------------------------


def refused(output, corpus, *overrides):
    with pytest.raises(InputError) as error:
        prepare.prepare(prepare_config(output, corpus, *overrides))
    assert "\n" not in str(error.value)
    assert not (output / "manifest.json").exists() or "other settings" in str(error.value)
    return str(error.value)


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n\n  \n")
    assert "holds no text" in refused(tmp_path / "out", tmp_path / "empty.txt")


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path, prepared):
    (tmp_path / "short.txt").write_text("the old city\n\nthe new house\n")
    ready = f"tokenizer.pretrained={prepared / 'tokenizer'}"
    assert "less than one sequence of 32" in refused(tmp_path / "out", tmp_path / "short.txt", ready)


@pytest.mark.parametrize("asked_for", [8000, 20])
def test_a_vocabulary_that_does_not_suit_the_text_is_refused_with_one_that_does(tmp_path, corpus, asked_for):
    said = refused(tmp_path / "out", corpus, f"tokenizer.vocab_size={asked_for}")
    assert said.startswith(f"tokenizer.vocab_size={asked_for} is ")
    advice = re.search(r"set (tokenizer\.vocab_size=\d+) or", said)[1]
    prepare.prepare(prepare_config(tmp_path / "out", corpus, advice))  # nothing of the refused call stands in the way


def test_text_for_which_no_vocabulary_is_small_enough_gets_no_advice_that_would_be_refused(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(["one two", "two one"] * 20))
    said = refused(tmp_path / "out", tmp_path / "text.txt", "validation_fraction=0.5")
    assert said.endswith("is more than this text can fill: give more text")


def test_an_error_of_the_corpus_is_not_told_as_one_of_the_tokenizer(tmp_path, corpus):
    path = tmp_path / "text.txt"
    path.write_bytes(corpus.read_bytes() + b"\n\nbinary \0\n")
    said = refused(tmp_path / "out", path)
    assert said.startswith(f"{path}:") and said.endswith("(utf-16?)")


def test_an_interrupt_while_the_tokenizer_is_trained_is_one():
    def texts():
        yield "some text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenizer.train_tokenizer(texts(), vocab_size=30, lowercase=True, train_bytes=1000)


def test_documents_that_are_all_held_out_are_said_to_be(tmp_path):
    (tmp_path / "text.txt").write_text("the only document of all")
    said = refused(tmp_path / "out", tmp_path / "text.txt", "validation_fraction=0.999999")
    assert said.startswith("none of 1 documents is left for the tokenizer by validation_fraction=0.999999")


def test_undecodable_bytes_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"good line\n\ncaf\xe9 au lait\n")
    assert "0xe9" in refused(tmp_path / "out", tmp_path / "latin.txt")


def test_a_missing_path_is_refused(tmp_path):
    assert "missing.txt" in refused(tmp_path / "out", tmp_path / "missing.txt")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, corpus):
    assert "cannot write /proc/baretrain/source.json: No such file" in refused(
        ROOT.__class__("/proc/baretrain"), corpus
    )
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in refused(tmp_path / "file" / "out", corpus)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_full_temporary_folder_is_one_line(tmp_path, corpus, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        assert refused(tmp_path / "out", corpus).startswith(f"{tmp_path} is full; free some space, or set TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert refused(tmp_path / "out", corpus).startswith("no temporary folder can be made: No such file")


def test_a_preparation_with_other_settings_is_left_alone(prepared, corpus, tmp_path):
    copy = shutil.copytree(prepared, tmp_path / "copy")
    before = content(copy)
    assert "seq_len: 32 there, 64 here" in refused(copy, corpus, "seq_len=64")
    assert "tokenizer.vocab_size: 120 there, 100 here" in refused(copy, corpus, "tokenizer.vocab_size=100")
    assert content(copy) == before


def test_a_corpus_that_changed_is_noticed(tmp_path):
    text = write_corpus(tmp_path / "text.txt")
    prepare.prepare(prepare_config(tmp_path / "out", text))
    text.write_text(text.read_text() + "\nMore.\n")
    with pytest.raises(InputError, match="the corpus has changed"):
        prepare.prepare(prepare_config(tmp_path / "out", text))


def test_somebody_elses_folder_is_left_alone(tmp_path, corpus):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    assert "not empty and not a preparation" in refused(tmp_path / "out", corpus)
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]


def test_a_refused_preparation_leaves_nothing_in_the_way_of_better_settings(tmp_path, corpus, prepared):
    ready = f"tokenizer.pretrained={prepared / 'tokenizer'}"
    output = tmp_path / "out"
    assert "or less, or give more text" in refused(output, corpus, "tokenizer.vocab_size=30000")
    assert "raise validation_fraction" in refused(output, corpus, ready, "validation_fraction=0.001")
    assert [path for path in output.rglob("*") if path.is_file()] == []
    (tmp_path / "bad.txt").write_bytes(corpus.read_bytes() + b"\xff")
    assert "is not utf-8" in refused(output, tmp_path / "bad.txt", ready)
    prepare.prepare(prepare_config(output, corpus))


# ---- data that was changed afterwards ------------------------------------------------------------------------------


@pytest.fixture
def copy(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


def test_a_manifest_edited_by_hand_is_refused(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["splits"]["train"][0]["rows"] -= 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="was changed after it was written"):
        read_manifest(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="is not a manifest"):
        read_manifest(copy)


def test_a_damaged_shard_is_named(copy):
    shard = copy / "train-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    check_files(copy, read_manifest(copy), checksums=False)
    with pytest.raises(InputError, match=r"train-00000.safetensors is damaged"):
        check_files(copy, read_manifest(copy), checksums=True)
    shard.write_bytes(content[:-8])
    with pytest.raises(InputError, match=r"bytes, the manifest says"):
        check_files(copy, read_manifest(copy), checksums=False)
    shard.unlink()
    with pytest.raises(InputError, match=r"is missing"):
        check_files(copy, read_manifest(copy), checksums=False)


def test_another_tokenizer_is_refused(copy):
    tokenizer = copy / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("▁", "_"))
    with pytest.raises(InputError, match="is not the tokenizer that made the shards"):
        check_files(copy, read_manifest(copy), checksums=False)


def test_the_command_line_says_it_in_one_line_and_exits_with_2(tmp_path):
    found = run([f"output={tmp_path / 'o'}", "corpus=text", "corpus.path=/no/such/text"], module="train.prepare")
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": 5}', '{"settings": {"parts": "x"}}'])
def test_a_claim_of_another_making_is_one_line(tmp_path, corpus, content):
    (tmp_path / "source.json").write_text(content)
    with pytest.raises(InputError, match="source.json is damaged: ") as refused:
        prepare.prepare(prepare_config(tmp_path, corpus))
    assert "\n" not in str(refused.value)
