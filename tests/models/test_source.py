"""Where a model begins: a folder, a run of ours with and without an export, on disk and in S3; and its tokenizer."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from finetuning import word_tokenizer
from rejections import rejects
from running import ROOT
from tokenizers import processors
from transformers import AutoModelForMaskedLM, CanineTokenizer

from train.config import ModelConfig, S3Config
from train.models.encoder import build_masked_lm
from train.models.heads import build_with_head
from train.models.source import resolved, task_tokenizer

LOCAL = S3Config()
WORDS = ["the", "a", "cat", "dog", "sat"]


def write_tokenizer(folder, *, words=WORDS, **special):
    word_tokenizer(words, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What transformers' from_pretrained reads, of a small BERT."""
    path = tmp_path_factory.mktemp("folder")
    cfg = ModelConfig(
        architecture="bert", hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8
    )
    build_masked_lm(cfg, vocab_size=10, pad_id=0, seq_len=16).export(path)
    return write_tokenizer(path)


@pytest.mark.parametrize(
    ("single", "lacking"),
    [("<s> $A </s>", None), ("<s> $A", "sep_token"), ("$A </s>", "cls_token")],
)
def test_the_ends_of_a_text_are_the_missing_special_tokens(tmp_path, single, lacking):
    """As in EuroBERT's tokenizer, which has bos and eos only, if its post-processor puts them there."""
    special = {"cls_token": None, "sep_token": None, "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = word_tokenizer(WORDS, **special)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B </s>", special_tokens=ids
    )
    tokenizer.save_pretrained(tmp_path)
    cfg = ModelConfig(tokenizer=str(tmp_path))
    if lacking is None:
        made = task_tokenizer(cfg)
        assert (made.cls_token, made.sep_token) == ("<s>", "</s>")
    else:
        rejects(
            f"has no {lacking}, .*; name one of its tokens in its tokenizer_config.json",
            task_tokenizer,
            cfg,
        )


def from_run(path, **changes):
    return ModelConfig(pretrained=str(path), **changes)


def test_what_is_there_already_stays_as_it_is(folder, tmp_path):
    assert resolved(ModelConfig(), LOCAL, tmp_path) == ModelConfig()
    assert (
        resolved(ModelConfig(pretrained="google/bert"), LOCAL, tmp_path).tokenizer == "google/bert"
    )
    cfg = resolved(from_run("google/bert", tokenizer="other", freeze_layers=2), LOCAL, tmp_path)
    assert cfg == ModelConfig(pretrained="google/bert", tokenizer="other", freeze_layers=2)
    cfg = resolved(from_run(folder), LOCAL, tmp_path)
    assert cfg == ModelConfig(pretrained=str(folder), tokenizer=str(folder))
    assert resolved(cfg, LOCAL, tmp_path) == cfg
    assert not list(tmp_path.iterdir())


def test_a_run_gives_its_export(finished, tmp_path):
    cfg, export = resolved(from_run(finished), LOCAL, tmp_path), f"{finished}/export"
    assert cfg == ModelConfig(pretrained=export, tokenizer=export)
    sizes = {"vocab_size": len(task_tokenizer(cfg)), "pad_id": 0, "seq_len": 32}
    model = build_with_head("SequenceClassification", cfg, labels=["a", "b"], **sizes)
    wanted = AutoModelForMaskedLM.from_pretrained(export).get_input_embeddings().weight
    assert model.network.albert.embeddings.word_embeddings.weight.equal(wanted)
    alone = resolved(ModelConfig(architecture="bert", tokenizer=str(finished)), LOCAL, tmp_path)
    assert (alone.pretrained, alone.tokenizer) == (None, export)


@pytest.mark.slow
def test_a_run_without_an_export_gives_its_checkpoint(finished, tmp_path, monkeypatch):
    copy = tmp_path / "run"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("export"))
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "nowhere"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)  # the export is no rank, and waits for nobody
    started, run_it = [], subprocess.run

    def recorded(*given, **rest):
        started.extend([rest["env"]] if "env" in rest else [])  # else it tries a tokenizer
        return run_it(*given, **rest)

    monkeypatch.setattr(subprocess, "run", recorded)
    cfg = resolved(from_run(copy), LOCAL, tmp_path / "cache")
    # the same code, not what is installed
    assert started[0]["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert cfg.pretrained == cfg.tokenizer
    assert cfg.pretrained.startswith(str(tmp_path / "cache/models/"))
    result, wanted = (
        AutoModelForMaskedLM.from_pretrained(where).state_dict()
        for where in (cfg.pretrained, finished / "export")
    )
    assert all(tensor.equal(wanted[name]) for name, tensor in result.items())
    assert len(task_tokenizer(cfg)) == 120
    for path in copy.glob("checkpoints/*/model.pt"):
        path.unlink()
    # it is there: nothing is exported again
    assert resolved(from_run(copy), LOCAL, tmp_path / "cache") == cfg
    rejects(
        r"model.pretrained=.*: exporting its checkpoint failed \(.*no valid checkpoint",
        resolved,
        from_run(copy),
        LOCAL,
        tmp_path / "other",
    )
    assert not [path for path in (tmp_path / "other/models").iterdir() if path.is_dir()]


def test_a_run_in_s3_is_fetched_once_and_again_when_it_has_changed(finished, bucket, tmp_path):
    files = {f"export/{path.name}": path.read_bytes() for path in (finished / "export").iterdir()}
    others = {name: (finished / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    for name, content in (files | others | {"export/tensorboard/events": b"x"}).items():
        bucket.put(f"runs/one/{name}", content)

    def fetched(name="runs/one"):
        return resolved(from_run(bucket.location(name)), bucket.config(), tmp_path)

    cfg = fetched()
    here = Path(cfg.pretrained)
    assert here.parent == tmp_path / "models" and cfg.tokenizer == cfg.pretrained
    assert {f"export/{path.name}": path.read_bytes() for path in here.iterdir()} == files
    before = here.stat().st_mtime_ns
    assert fetched() == cfg and here.stat().st_mtime_ns == before
    assert Path(fetched("runs/one/export").pretrained, "model.safetensors").stat().st_size > 0
    name = "export/model.safetensors"
    bucket.put(f"runs/one/{name}", files[name][:-4] + b"\0\0\0\0")  # of the same length
    assert fetched().pretrained != cfg.pretrained


def test_a_tokenizer_neither_cuts_nor_pads(folder, tmp_path):
    saved = write_tokenizer(tmp_path)
    content = json.loads((saved / "tokenizer.json").read_text())
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    (saved / "tokenizer.json").write_text(
        json.dumps({**content, "truncation": truncation, "padding": padding})
    )
    tokenizer = task_tokenizer(ModelConfig(tokenizer=str(saved)))
    assert tokenizer.backend_tokenizer.encode("the cat sat the cat").ids == [5, 7, 9, 5, 7]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda path: CanineTokenizer().save_pretrained(path),
            "is not a fast one .CanineTokenizer.",
        ),
        (lambda path: write_tokenizer(path, sep_token=None), "has no sep_token"),
        (lambda path: write_tokenizer(path, pad_token=None), "has no pad_token"),
        (lambda path: None, "cannot be loaded"),
        (lambda path: (path / "tokenizer.json").write_text("{"), "cannot be loaded"),
    ],
    ids=["slow", "no sep", "no pad", "empty folder", "damaged"],
)
def test_a_tokenizer_that_will_not_do_is_rejected(make, says, tmp_path):
    make(tmp_path)
    rejects(f"tokenizer {tmp_path} {says}", task_tokenizer, ModelConfig(tokenizer=str(tmp_path)))


def test_the_class_of_any_fast_tokenizer_is_accepted(tmp_path):
    """transformers 4 wrote it for ModernBERT and others."""
    path = write_tokenizer(tmp_path) / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    assert len(task_tokenizer(ModelConfig(tokenizer=str(tmp_path)))) == 10


@pytest.mark.parametrize("kind", ["albert", "modernbert", "deberta-v2"])
def test_weights_without_a_tokenizer_are_rejected(kind, folder, tmp_path):
    """transformers makes one that knows no word, or says that it could not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    rejects(
        "it has no tokenizer.json or vocabulary file$",
        task_tokenizer,
        ModelConfig(pretrained=str(tmp_path)),
    )
    assert len(task_tokenizer(ModelConfig(pretrained=str(tmp_path), tokenizer=str(folder)))) == 10
    rejects("model.tokenizer is not set", task_tokenizer, ModelConfig())


def test_a_tokenizer_of_other_words_than_the_weights_is_rejected(folder, tmp_path):
    same, other = (
        write_tokenizer(tmp_path / "same"),
        write_tokenizer(tmp_path / "other", words=WORDS[::-1]),
    )
    assert len(task_tokenizer(ModelConfig(pretrained=str(folder), tokenizer=str(same)))) == 10
    mixed = ModelConfig(pretrained=str(folder), tokenizer=str(other))
    rejects("does not have the vocabulary of the weights", task_tokenizer, mixed)
