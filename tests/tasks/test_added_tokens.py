"""Tokens that a preparation adds to the tokenizer of a model: the embeddings grow in training, and exports agree."""

import numpy as np
import pytest
import torch
from rejections import rejects
from running import lines, prepare_config, run, train_config, train_here, train_overrides
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM

from train import loop
from train.data.shards.format import ShardSet, read_manifest
from train.run.stopping import StopRequest
from train.tasks import build_task
from train.tools import prepare

ADDED = ["Wuzu", "ba-be"]  # the tokenizer reads text in lower case


@pytest.fixture(scope="module")
def published(tokenizer, tmp_path_factory):
    """A BERT with its tokenizer, and a second one, whose vocabulary has rows to spare."""
    folders = []
    for name, size in (("exact", len(tokenizer)), ("spare", len(tokenizer) + 8)):
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForMaskedLM(
            BertConfig(vocab_size=size, max_position_embeddings=32, **sizes, **no_dropout)
        )
        model.cls.predictions.bias.data.normal_()
        folders.append(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


@pytest.fixture(scope="module")
def grown(published, corpus, tmp_path_factory):
    """Data of a text with two more words, prepared with that tokenizer and both of them."""
    folder = tmp_path_factory.mktemp("grown")
    (folder / "text.txt").write_text(
        corpus.read_text().replace(" to", " wuzu").replace(" ba", " ba-be")
    )
    given = [f"tokenizer.pretrained={published[0]}", f"tokenizer.add_tokens=[{','.join(ADDED)}]"]
    prepare.prepare(prepare_config(folder / "data", folder / "text.txt", *given))
    return folder / "data"


def of(model, *more):
    return [
        "model=any",
        "model.embedding_size=null",
        f"model.pretrained={model}",
        "checkpoint.every=1",
        "eval_every=2",
        "max_steps=4",
        *more,
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_new_rows_begin_as_the_mean_and_the_others_as_they_were(
    published, grown, tmp_path, number, caplog
):
    first, size = len(AutoTokenizer.from_pretrained(published[0])), (122, 128)[number]
    task = build_task(train_config(tmp_path / "run", grown, *of(published[number])))
    model, before = (
        task.build_model().network,
        AutoModelForMaskedLM.from_pretrained(published[number]),
    )
    assert first == 120 and model.config.vocab_size == size
    for rows, old in (
        (model.get_input_embeddings().weight, before.get_input_embeddings().weight),
        (model.get_output_embeddings().bias, before.get_output_embeddings().bias),
    ):
        kept = torch.cat([old[:first], old[first + 2 :]])
        assert torch.equal(torch.cat([rows[:first], rows[first + 2 :]]), kept)
        assert all(torch.allclose(row, kept.mean(0), atol=1e-6) for row in rows[first : first + 2])
    says = f"the embeddings grow from {(120, 128)[number]} rows to {size}; new rows, which start as the mean of the "
    assert task.remarks[-1] == f"{says}others: 120 'Wuzu', 121 'ba-be'"


@pytest.mark.slow
def test_export_and_tokenizer_agree_after_a_stop_and_on_two_ranks(published, grown, tmp_path):
    tokens = ShardSet(grown, read_manifest(grown), "train")
    tokens = tokens.rows(np.arange(len(tokens))).tokens
    assert min((tokens == row).sum() for row in (120, 121)) > 20
    train_here(tmp_path / "one", grown, *of(published[0]))
    asked = StopRequest()
    asked.reason = "SIGTERM"
    loop.run(train_config(tmp_path / "stopped", grown, *of(published[0])), asked)
    assert train_here(tmp_path / "stopped", grown, *of(published[0])) == ("done", 4)
    weights = [
        (tmp_path / name / "export/model.safetensors").read_bytes() for name in ("one", "stopped")
    ]
    assert weights[0] == weights[1]
    losses = [line["loss"] for line in lines(tmp_path / "one", "train")]
    for name, split in (("fsdp", []), ("pipeline", ["parallel.micro_batches=2"])):
        given = train_overrides(
            tmp_path / name, grown, *of(published[0]), f"parallel={name}", *split
        )
        done = run(given, ranks=2)
        assert done.returncode == 0, done.stderr
        assert [line["loss"] for line in lines(tmp_path / name, "train")] == pytest.approx(
            losses, rel=1e-4
        )
    export = tmp_path / "pipeline/export"
    model, tokenizer = (
        AutoModelForMaskedLM.from_pretrained(export),
        AutoTokenizer.from_pretrained(export),
    )
    assert (
        len(tokenizer)
        == model.config.vocab_size
        == len(model.get_input_embeddings().weight)
        == 122
    )
    ids = tokenizer("be wuzu ba-be", add_special_tokens=False)["input_ids"]
    assert {120, 121} <= set(ids) and tokenizer.decode([120, 121]) == "".join(ADDED).lower()
    # What has learnt them begins nothing anew.
    task = build_task(train_config(tmp_path / "next", grown, *of(export)))
    assert task.new_rows == {} and task.build_model().network.config.vocab_size == 122
    weight = task.build_model().network.get_input_embeddings().weight
    assert torch.equal(weight, model.get_input_embeddings().weight)


def test_what_cannot_grow_is_one_line(published, grown, prepared, tmp_path):
    frozen = train_config(tmp_path / "run", grown, *of(published[0], "model.freeze_layers=1"))
    rejects("model.freeze_layers=1: 2 added tokens need new embeddings", build_task, frozen)
    larger = prepare_config(tmp_path / "larger", tmp_path / "text.txt", "tokenizer.vocab_size=140")
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"{number} und {number * 7} dazu" for number in range(3000))
    )
    prepare.prepare(larger)
    says = "has a different tokenizer than the data; prepare it with tokenizer.pretrained="
    rejects(
        says, build_task, train_config(tmp_path / "run", tmp_path / "larger", *of(published[0]))
    )
    piece = next(
        piece
        for piece in AutoTokenizer.from_pretrained(published[0]).get_vocab()
        if piece.isalpha()
    )
    for given, says in (
        (f"[{piece}]", f"'{piece}' is already a piece of the tokenizer"),
        ("[x,x]", "'x' is already a piece of the tokenizer"),
        (
            "[wuzu,WUZU]",
            r"'(wuzu|WUZU)' cannot be added: the tokenizer reads it as \[12[01]\], not as \[12[01]\]",
        ),
        ("[' ']", "' ' cannot be added"),
    ):
        pretrained = [f"tokenizer.pretrained={published[0]}", f"tokenizer.add_tokens={given}"]
        rejects(
            says,
            prepare.prepare,
            prepare_config(tmp_path / "out", tmp_path / "text.txt", *pretrained),
        )
    new = ["tokenizer.add_tokens=[x]"]
    rejects(
        "tokenizer.add_tokens needs tokenizer.pretrained",
        prepare_config,
        tmp_path,
        tmp_path / "text.txt",
        *new,
    )
