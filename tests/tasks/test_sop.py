"""Sentence-order prediction: which segments are swapped, what is learnt from it, and what is reported."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from finetuning import batch_of
from rejections import rejects
from running import lines, prepare_here, train_config, train_here
from transformers import AlbertForPreTraining, AutoModelForMaskedLM

from train.config import ModelConfig
from train.data.batches.loader import Swapper
from train.data.batches.masking import IGNORE_INDEX
from train.models.encoder import build_masked_lm
from train.tasks import build_task

S, B = 16, 400
CLS, SEP = 2, 3
SOP = "task.sop=true"


@pytest.fixture(scope="module")
def rows():
    """Sequences of tokens that are all different, cut at every possible index; some are of two documents."""
    tokens = np.tile(np.arange(10, 10 + S), (B, 1)).astype(np.uint16)
    pivot = np.arange(B, dtype=np.uint16) % (S - 4) + 3
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    tokens[np.arange(B), pivot - 1] = SEP
    return tokens, pivot, (np.arange(B) % 5 != 0).astype(np.uint8)


def swap(rows, *, epoch=0, seed=1):
    return Swapper(seed)(*rows, np.full(B, epoch), np.arange(B))


def test_swapped_sequences_hold_the_second_segment_first(rows):
    tokens, pivot, same_document = rows
    swapped, new_pivot, labels = swap(rows)
    for row in range(B):
        cut = pivot[row]
        first, second = tokens[row, 1 : cut - 1].tolist(), tokens[row, cut:-1].tolist()
        parts = [second, first] if labels[row] == 1 else [first, second]
        assert swapped[row].tolist() == [CLS, *parts[0], SEP, *parts[1], SEP]
        assert new_pivot[row] == len(parts[0]) + 2
    assert ((labels == IGNORE_INDEX) == (same_document == 0)).all()
    assert 0.4 < (labels[same_document == 1] == 1).mean() < 0.6


def test_an_empty_segment_has_no_order(rows):
    tokens, _, _ = rows
    # some only in data made elsewhere
    pivot = np.resize(np.array([0, 2, S - 1, S, 60_000], np.uint16), B)
    swapped, new_pivot, labels = Swapper(1)(
        tokens, pivot, np.ones(B, np.uint8), np.zeros(B, int), np.arange(B)
    )
    assert (
        (labels == IGNORE_INDEX).all() and (swapped == tokens).all() and (new_pivot == pivot).all()
    )


@pytest.fixture(scope="module")
def task(prepared, tmp_path_factory):
    return build_task(train_config(tmp_path_factory.mktemp("sop") / "run", prepared, SOP))


def test_the_loss_is_that_of_transformers_for_both_objectives(task):
    torch.manual_seed(0)
    model = task.build_model().eval()
    assert isinstance(model.network, AlbertForPreTraining)
    inputs = batch_of(task.train_data(), range(8))
    whole = AlbertForPreTraining(model.network.config).eval()
    whole.load_state_dict(model.network.state_dict())
    labels = torch.full_like(inputs["input_ids"], IGNORE_INDEX)
    row, slot = torch.nonzero(inputs["labels"] != IGNORE_INDEX, as_tuple=True)
    labels[row, inputs["positions"][row, slot]] = inputs["labels"][row, slot]
    with torch.no_grad():
        theirs = whole(inputs["input_ids"], token_type_ids=inputs["token_type_ids"])
        tokens = F.cross_entropy(
            theirs.prediction_logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        order = F.cross_entropy(theirs.sop_logits, inputs["order"], reduction="sum")
        ours = task.loss(model, inputs)
    torch.testing.assert_close(ours, tokens + task.predictions * order)


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "sop"
    train_here(run_dir, prepared, SOP)
    return run_dir


def test_the_accuracy_of_the_order_is_reported_and_the_export_has_the_head(whole):
    line = lines(whole, "eval")[-1]
    assert line["loss"] == pytest.approx(line["mlm_loss"] + line["sop_loss"])
    assert line["perplexity"] == pytest.approx(math.exp(line["mlm_loss"]))
    assert 0.3 < line["sop_accuracy"] < 0.8 and 0.3 < line["sop_loss"] < 1.2
    model, report = AutoModelForMaskedLM.from_pretrained(
        whole / "export", output_loading_info=True
    )
    assert not report["missing_keys"] and model.config.architectures == ["AlbertForPreTraining"]
    assert (
        AlbertForPreTraining.from_pretrained(
            whole / "export"
        ).sop_classifier.classifier.out_features
        == 2
    )


def test_only_models_with_a_head_for_the_order_can_learn_it():
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}
    fit = {"vocab_size": 50, "pad_id": 0, "seq_len": 16, "predicts_order": True}
    electra = ModelConfig(architecture="electra", **sizes)
    rejects(
        "task.sop=true needs a model of type albert or bert, not electra",
        build_masked_lm,
        electra,
        **fit,
    )
    model = build_masked_lm(ModelConfig(architecture="bert", **sizes), **fit)
    ids = torch.ones(2, 16, dtype=torch.long)
    tokens, order = model(ids, torch.zeros_like(ids), ids[:, :3])
    assert tokens.shape == (2, 3, 50) and order.shape == (2, 2)


def test_data_whose_documents_are_shorter_than_a_sequence_has_no_order_to_learn(corpus, tmp_path):
    """Rejected at the start: the first evaluation, which needs such a sequence, may be thousands of steps away."""
    words = corpus.read_text().split()
    text = tmp_path / "short.txt"
    text.write_text("\n".join("\n".join(words[at : at + 2]) + "\n" for at in range(0, 4000, 2)))
    prepare_here(tmp_path / "data", text)
    rejects(
        "task.sop=true, but in .*/data no validation sequence has two segments of the same",
        build_task,
        train_config(tmp_path / "run", tmp_path / "data", SOP),
    )
