"""Sizes and parameters of models without transformers, beside what transformers builds."""

import json
from dataclasses import replace

import pytest
import torch
from rejections import rejects
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from train.config import HeadSize, ModelConfig
from train.models import model_sizes
from train.models.model_sizes import (
    DEFAULTS,
    Shape,
    find_shape,
    knows_vocabulary,
    shape_of,
)

NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
)
VOCABULARY, LABELS = HeadSize(predictions=10), HeadSize(labels=3)


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_defaults_are_those_of_transformers(architecture: str):
    config = AutoConfig.for_model(architecture)
    assert shape_of(json.loads(config.to_json_string())) == DEFAULTS[architecture]
    assert config.hidden_size == DEFAULTS[architecture].hidden_size


@pytest.mark.parametrize("architecture", DEFAULTS)
@pytest.mark.parametrize(
    ("head", "auto"),
    [
        (VOCABULARY, AutoModelForMaskedLM),
        (LABELS, AutoModelForSequenceClassification),
        (HeadSize(token_labels=2), AutoModelForTokenClassification),
    ],
)
def test_parameters_are_counted_as_in_the_model(architecture: str, head: HeadSize, auto):
    shape = replace(
        DEFAULTS[architecture],
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=3,
        vocab_size=500,
    )
    shape = replace(shape, embedding_size=32) if shape.is_albert else shape
    sizes = {name: getattr(shape, name) for name in NAMES} | {
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    if architecture == "distilbert":
        sizes |= {"dim": 96, "hidden_dim": 384, "n_layers": 3, "n_heads": 4}
    if shape.is_albert:
        sizes["embedding_size"] = 32
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(architecture, **sizes))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert shape.trained_parameters(head) == pytest.approx(count, rel=0.01)


def test_published_models_have_as_many_parameters_and_frozen_parts_have_no_gradients():
    large = Shape("bert", 30_522, 1024, 4096, 24)
    assert large.trained_parameters(VOCABULARY) == pytest.approx(335e6, rel=0.01)
    albert = Shape("albert", 30_000, 768, 3072, 12, embedding_size=128)
    assert albert.trained_parameters(VOCABULARY) == pytest.approx(11.2e6, rel=0.01)
    whole, embeddings = large.trained_parameters(LABELS), large.embedding_parameters()
    four = large.trained_parameters(LABELS, freeze_layers=4)
    assert four == whole - embeddings - 4 * large.layer_parameters()


def test_a_shape_is_read_from_wherever_the_model_comes(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "vocab_size": 99}
    new = find_shape(ModelConfig(architecture="bert", **sizes))
    assert new == Shape("bert", 99, 64, 128, 2)
    assert find_shape(ModelConfig(architecture="bert"), vocab_size=7) == replace(
        DEFAULTS["bert"], vocab_size=7
    )
    assert find_shape(ModelConfig(architecture="deberta-v2")) is None
    monkeypatch.setattr(model_sizes, "fetched", lambda source, files: tmp_path / "hub")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text('{"model_type": "bert", "hidden_size": 12}')
    assert find_shape(ModelConfig(pretrained="some/bert")) == replace(
        DEFAULTS["bert"], hidden_size=12
    )
    assert find_shape(ModelConfig(pretrained="s3://bucket/run")) is None
    assert not knows_vocabulary(ModelConfig()) and knows_vocabulary(ModelConfig(), vocab_size=7)
    (tmp_path / "run/export").mkdir(parents=True)
    assert find_shape(ModelConfig(pretrained=str(tmp_path / "run"))) is None
    config = {
        "model_type": "distilbert",
        "vocab_size": 99,
        "dim": 64,
        "hidden_dim": 128,
        "n_layers": 2,
    }
    (tmp_path / "run/export/config.json").write_text(json.dumps(config))
    shape = find_shape(ModelConfig(pretrained=str(tmp_path / "run")))
    assert shape == Shape("distilbert", 99, 64, 128, 2, type_vocab_size=0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "it is not a JSON object"),
        ('{"model_type": "bert", "hidden_size": "768"}', "hidden_size is '768', not a count"),
        ('{"model_type": "bert", "hidden_size": 0}', "hidden_size=0 is not a possible size"),
        (
            '{"model_type": "bert", "num_hidden_layers": 1000000000000}',
            "num_hidden_layers=1000000000000 is not a p",
        ),
        ("{" * 100_000, "it is not JSON"),
    ],
)
def test_a_damaged_configuration_is_rejected_in_one_line(tmp_path, text: str, says: str):
    (tmp_path / "config.json").write_text(text)
    rejects(f"config.json is damaged: {says}", find_shape, ModelConfig(pretrained=str(tmp_path)))
