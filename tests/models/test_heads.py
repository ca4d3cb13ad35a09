"""Heads for labels and spans: padding is not seen, on CPU and XLA; checkpoints load or are rejected."""

import json
import shutil

import pytest
import torch
from rejections import rejects
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from train.config import BackendConfig, HeadSize, ModelConfig
from train.models import encoder
from train.models.encoder import build_masked_lm
from train.models.heads import PaddedEncoder, build_with_head, logits_of
from train.models.network import READING_PADDING
from train.parallel.ddp import DDP
from train.parallel.guards import watch_masks
from train.storage.model_folder import ENCODERS

S, V, PAD = 12, 101, 1
LABELS = ["bad", "so so", "good"]
COMMON = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_positions": 40,
    "intermediate_size": 64,
}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SIZES = {"label": HeadSize(labels=3), "span": HeadSize(token_labels=2)}
# Architectures whose positions begin behind the id of padding.
COUNTS_BEHIND_PADDING = ("data2vec-text", "ibert", "longformer", "mpnet", "roberta")
HEADS = {"label": AutoModelForSequenceClassification, "span": AutoModelForQuestionAnswering}


def sizes(architecture="bert", **changes):
    factorised = {"embedding_size": 16} if architecture in ("albert", "electra") else {}
    return ModelConfig(**{"architecture": architecture, **COMMON, **factorised, **changes})


def begun(folder, **changes):
    """The settings of a model that begins with weights in a folder."""
    return ModelConfig(pretrained=str(folder), **changes)


def build(head, cfg, *, labels=LABELS, sharp=True, seq_len=S):
    torch.manual_seed(0)
    settings = {"vocab_size": V, "pad_id": PAD, "seq_len": seq_len}
    settings["labels"] = ("start", "end") if head == "span" else labels
    names = {
        "label": "SequenceClassification",
        "span": "QuestionAnswering",
        "token": "TokenClassification",
    }
    model = build_with_head(names[head], cfg, **settings)
    with torch.no_grad():
        for parameter in model.parameters() if sharp else ():
            if parameter.ndim > 1:
                # new weights are so small that attention is a mean, and a mask hardly shows
                parameter.mul_(10)
    return model.eval()


def batch(lengths=(S, 7, 3)):
    """Ids, 1 for tokens, segments."""
    torch.manual_seed(1)
    real = (torch.arange(S) < torch.tensor(lengths)[:, None]).long()
    ids = torch.where(real.bool(), torch.randint(5, V, real.shape), PAD)
    return ids, real, (torch.arange(S) > 4).long() * real


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    """A BERT exported by our pretraining."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("mlm")
    build_masked_lm(sizes(), vocab_size=V, pad_id=PAD, seq_len=S).export(folder)
    return folder


@pytest.fixture(scope="module")
def labelled_folder(tmp_path_factory):
    """A classifier exported by our fine-tuning."""
    folder = tmp_path_factory.mktemp("labelled")
    build("label", sizes()).export(folder)
    return folder


PUBLISHED = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "embedding_size": 16,
    "pad_token_id": PAD,
    "num_labels": 3,
}
OWN_SIZES = {  # in transformers' names
    "big_bird": {"block_size": 4},  # with more than 44 tokens its attention is sparse
    "longformer": {"attention_window": [16, 16]},
    "luke": {"entity_vocab_size": 9},
    "modernbert": {"local_attention": 16},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "squeezebert": {"embedding_size": 32},
}


def save_small(architecture, folder):
    """Write a model of a few layers, as it could be published."""
    defaults = AutoConfig.for_model(architecture)
    given = {name: value for name, value in PUBLISHED.items() if hasattr(defaults, name)}
    config = AutoConfig.for_model(architecture, **{**given, **OWN_SIZES.get(architecture, {})})
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # new weights are so small that attention is a mean
        embeddings = model.get_input_embeddings().weight
        embeddings[PAD] = embeddings[7]  # zeros in new weights
    model.save_pretrained(folder)


def state_of(model):
    """Everything that a forward pass could leave behind."""
    plain = (int, float, str, bool, type(None), tuple)
    numbers = {
        name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    values = {
        (name, key): value if isinstance(value, plain) else type(value)
        for name, module in model.named_modules()
        for key, value in [*vars(module).items(), *module._modules.items()]
    }
    return numbers, values


@pytest.mark.parametrize("architecture", ENCODERS.split())
@torch.inference_mode()
def test_an_answer_depends_on_its_row_alone(architecture, tmp_path):
    """Not on other rows, batches or padding, which some architectures read: their rows are padded to one length."""
    longest = 64
    save_small(architecture, tmp_path)
    model = build("token", begun(tmp_path), seq_len=longest, sharp=False)
    others = torch.randint(5, V, (2, longest))

    def answer(length, *, with_others=True):
        ids = torch.full((3, length), PAD)
        ids[0, :11], ids[1:] = torch.arange(10, 21), others[:, :length]
        batch = {
            "input_ids": ids,
            "attention_mask": (ids != PAD).long(),
            "token_type_ids": torch.zeros_like(ids),
        }
        rows = 3 if with_others else 1
        return logits_of(model, {name: value[:rows] for name, value in batch.items()})[0, :11]

    wanted = answer(longest)
    numbers, values = state_of(model)
    differences = [float((answer(length) - wanted).abs().max()) for length in (11, 16, 24)]
    assert (max(differences) > 1e-5) == (architecture in READING_PADDING)
    torch.testing.assert_close(answer(longest, with_others=False), wanted, rtol=0, atol=1e-5)
    assert torch.equal(answer(longest), wanted)
    after, values_after = state_of(model)
    assert values_after == values
    assert all(torch.equal(value, numbers[name]) for name, value in after.items())


@pytest.mark.parametrize("architecture", ["albert", "bert", "deberta-v2", "distilbert", "roberta"])
def test_a_batch_without_padding_needs_no_mask(architecture):
    """Bit for bit."""
    model = build("label", sizes(architecture))
    masks = []
    model.network.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    for lengths in ((S, S, S), (S, 7, 3)):
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = dict(zip(names, batch(lengths), strict=True))
        (fed,) = DDP(BackendConfig(device="cpu")).to_device(
            [{"inputs": inputs, "count": 3, "tokens": sum(lengths)}]
        )
        assert torch.equal(logits_of(model, fed["inputs"]), logits_of(model, inputs))
        assert "attention_mask" in inputs
    assert [mask is None for mask in masks] == [True, False, False, False]


@pytest.mark.parametrize("architecture", ["albert", "bert", "deberta-v2", "distilbert", "roberta"])
@pytest.mark.parametrize("way", ["autocast", "products", "weights"])
def test_padding_is_not_seen_in_bf16(architecture, way):
    model, (ids, real, segments) = build("label", sizes(architecture)), batch()
    exact = model(ids, real, segments)
    if way == "weights":
        model.bfloat16()
    if way == "products":
        model.attend_by_products(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=way != "weights"):
        result = model(ids, real, segments)
        other = model(torch.where(real.bool(), ids, 9), real, segments)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, other)
    assert (result - exact).abs().max() < 0.3 * exact.abs().max()


def test_on_cpus_in_bf16_attention_is_by_products_with_the_same_gradients_but_not_in_models_for_long_sequences():
    """PyTorch's SDPA is slow there."""
    gradients = {}
    for precision, positions, way in (
        ("fp32", 40, "sdpa"),
        ("bf16", 40, "eager"),
        ("bf16", 4096, "sdpa"),
    ):
        model = build("label", sizes(max_positions=positions, **NO_DROPOUT), sharp=False).train()
        backend = DDP(BackendConfig(device="cpu", precision=precision))
        backend.setup_model(model)
        assert model.network.config._attn_implementation == way
        with backend.autocast():
            gradients[way] = outcome(model, batch())[1] if positions == 40 else gradients[way]
    for name, exact in gradients["sdpa"].items():
        assert (gradients["eager"][name] - exact).abs().max() <= 0.05 * exact.abs().max() + 1e-5, (
            name
        )
    # any module
    DDP(BackendConfig(device="cpu", precision="bf16")).setup_model(torch.nn.Linear(2, 2))
    for positions, way in ((40, "sdpa"), (4096, "eager")):  # what was asked for stays
        model = build("label", sizes(max_positions=positions, attention=way))
        DDP(BackendConfig(device="cpu", precision="bf16")).setup_model(model)
        assert model.network.config._attn_implementation == way


def outcome(model, inputs, compute=lambda: None):
    """Logits and gradients of a weighted sum, by name."""
    model.zero_grad()
    logits = model(*inputs)
    (
        logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape).to(logits.device)
    ).sum().backward()
    compute()
    return logits.detach().cpu(), {
        n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("albert", "fp32"), ("albert", "autocast"), ("bert", "weights"), ("deberta-v2", "fp32")],
)
def test_on_xla_batches_with_and_without_padding_are_one_graph(architecture, precision):
    torch_xla = pytest.importorskip("torch_xla")
    from train.parallel.xla import metric

    model = build("label", sizes(architecture, **NO_DROPOUT), sharp=False).train()
    batches = [batch(lengths) for lengths in ((S, S), (S, 3))]
    wanted = [outcome(model, inputs) for inputs in batches]
    if precision == "weights":
        model.bfloat16()
    model.to(torch_xla.device())
    watch_masks(model)
    tolerance, compiled = (1e-4 if precision == "fp32" else 0.1), []
    for inputs, (logits, gradients) in zip(batches, wanted, strict=True):
        inputs = [tensor.to(torch_xla.device()) for tensor in inputs]
        torch_xla.sync()
        before = metric("CompileTime")[0]
        with torch.autocast("xla", torch.bfloat16, enabled=precision == "autocast"):
            result = outcome(model, inputs, torch_xla.sync)
        compiled.append(metric("CompileTime")[0] > before)
        torch.testing.assert_close(
            result[0].float(), logits, rtol=tolerance, atol=tolerance * logits.abs().max()
        )
        for name, gradient in gradients.items():
            atol = tolerance * max(gradient.abs().max(), 1e-3)
            torch.testing.assert_close(
                result[1][name].float(), gradient, rtol=tolerance, atol=atol
            )
    assert compiled == [True, False]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    "architecture", ["albert", "bert", "deberta-v2", "distilbert", "electra", "roberta"]
)
def test_all_parameters_are_learnt_and_the_head_is_what_is_not_the_encoder(architecture, head):
    model = build(head, sizes(architecture)).train()
    outcome(model, batch())
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    encoder = {id(parameter) for parameter in model.network.base_model.parameters()}
    result = {id(parameter) for parameter in model.head_parameters()}
    assert (
        result == {id(parameter) for parameter in model.parameters()} - encoder
        and len(result) >= 2
    )


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (
            ["good", "bad", "so so"],
            r"labels bad, so so, good, but the data has good, bad, so so; .*\[bad,so so,good\]",
        ),
        (["bad", "good", "no"], "has bad, good, no; model.new_head=true"),
        (
            ["bad", "good"],
            "labels bad, so so, good, but the data has bad, good; model.new_head=true",
        ),
    ],
)
def test_a_head_for_other_labels_is_rejected_unless_a_new_one_is_wanted(
    labelled_folder, labels, says, log
):
    rejects(says, build, "label", begun(labelled_folder), labels=labels)
    cfg = begun(labelled_folder, new_head=True)
    model = build("label", cfg, labels=labels, sharp=False)
    assert "randomly initialised: classifier" in log.text
    assert model.network.config.id2label == dict(enumerate(labels))
    theirs = load_file(labelled_folder / "model.safetensors")
    weight = model.network.classifier.weight
    assert (
        weight.shape[0] == len(labels)
        and 0.01 < weight.std() < 0.04
        and not model.network.classifier.bias.any()
    )
    assert weight.shape != theirs["classifier.weight"].shape or not torch.equal(
        weight, theirs["classifier.weight"]
    )
    assert torch.equal(model.network.bert.pooler.dense.weight, theirs["bert.pooler.dense.weight"])


def test_a_head_without_an_entry_is_rejected():
    settings = {"labels": LABELS, "vocab_size": V, "pad_id": PAD, "seq_len": S}
    rejects(
        "head MultipleChoice is unknown; choose one of: SequenceClassification, ",
        build_with_head,
        "MultipleChoice",
        sizes(),
        **settings,
    )


def test_labels_without_names_are_those_of_the_data(labelled_folder, tmp_path, log):
    config = json.loads((labelled_folder / "config.json").read_text())
    config |= {
        "id2label": {str(n): f"LABEL_{n}" for n in range(3)},
        "label2id": {f"LABEL_{n}": n for n in range(3)},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(labelled_folder / "model.safetensors", tmp_path)
    model = build("label", begun(tmp_path), sharp=False)
    assert model.network.config.id2label == dict(enumerate(LABELS))
    assert (
        "LABEL_0 is taken as bad, LABEL_1 is taken as so so" in log.text
        and "set data.labels" in log.text
    )
    log.clear()
    build("label", begun(tmp_path), labels=["0", "1", "2"], sharp=False)
    assert "LABEL" not in log.text
    torch.testing.assert_close(model(*batch()), build("label", sizes())(*batch()))
    rejects(
        "the labels LABEL_0, LABEL_1, LABEL_2, but the data has a, b",
        build,
        "label",
        begun(tmp_path),
        labels=["a", "b"],
    )


NORM = "bert.embeddings.LayerNorm.bias"


# of transformers 4
DISTANCES = {"bert.encoder.layer.0.attention.self.distance_embedding.weight": torch.zeros(63, 16)}


def bare(weights):
    """The weights of the encoder, named as transformers names those of a model without a head."""
    return {
        name.removeprefix("bert."): value
        for name, value in weights.items()
        if name.startswith("bert.")
    }


def changed(folder, target, change):
    """A copy of a checkpoint with other tensors."""
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(
        change(load_file(folder / "model.safetensors")),
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    return begun(target)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: {f"other.{name}": value for name, value in w.items()},
            r"lacks \d\d weights of the encoder: bert",
        ),
        (
            lambda w: {
                name: value for name, value in w.items() if "layer.1.output.dense" not in name
            },
            "lacks 2 weights of the encoder: bert.encoder.layer.1.output.dense.bias, ",
        ),
        (lambda w: {**w, NORM: torch.full((32,), torch.nan)}, f"{NORM} contains NaN or infinity"),
        (
            lambda w: {**w, NORM: torch.zeros(32, dtype=torch.int8)},
            rf"{NORM} has quantised weights \(I8\)",
        ),
        (
            lambda w: {**w, NORM: torch.zeros(7)},
            rf"{NORM} is \[7\] instead of \[32\]; its config.json is another",
        ),
        (
            lambda w: w | DISTANCES,
            "does not read: bert.encoder.layer.0.attention.self.distance_embedding.weight$",
        ),
        (
            lambda w: bare(w | DISTANCES),
            "does not read: encoder.layer.0.attention.self.distance_embedding.weight$",
        ),
        (
            lambda w: bare(w) | {"rel_bias.weight": torch.zeros(7)},
            "does not read: rel_bias.weight$",
        ),
        (
            lambda w: {**w, "classifier.bias": torch.zeros(7)},
            r"classifier.bias is \[7\] instead of \[3\]; model.new_h",
        ),
    ],
    ids=[
        "another architecture",
        "a layer is missing",
        "not finite",
        "int8",
        "another size",
        "distances",
        "of a bare one",
        "a bias",
        "a head",
    ],
)
def test_a_checkpoint_that_does_not_hold_the_encoder_is_rejected(
    encoder_folder, tmp_path, change, says
):
    rejects(says, build, "label", changed(encoder_folder, tmp_path, change))


def test_sizes_that_do_not_fit_are_rejected(encoder_folder):
    hint = "raise model.max_positions, or set seq_len=11 or less"
    for head, cfg, message in (
        (
            "label",
            begun(encoder_folder, hidden_size=64),
            "model.hidden_size=64, but",
        ),
        *(
            (
                "label",
                sizes(kind, max_positions=S + PAD),
                f"seq_len=12 is longer than the model's 11 positions; {hint}",
            )
            for kind in COUNTS_BEHIND_PADDING
        ),
        ("span", sizes("eurobert"), "no AutoModelForQuestionAnswering"),
        ("span", ModelConfig(architecture="gpt2"), "gpt2 is not a known text encoder"),
        ("label", sizes(freeze_layers=3), "model.freeze_layers=3, but this bert has 2 layers"),
        (
            "label",
            sizes("albert", freeze_layers=1),
            "model.freeze_layers=1: albert shares one layer",
        ),
    ):
        rejects(message, build, head, cfg)
    given, settings = begun(encoder_folder), {"vocab_size": V, "pad_id": PAD}
    rejects(
        "positions; set seq_len=40 or less", encoder.fitting_config, given, **settings, seq_len=41
    )


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None, "cut"]
)
def test_weights_that_cannot_be_read_are_one_line(encoder_folder, tmp_path, content):
    (tmp_path / "config.json").write_bytes((encoder_folder / "config.json").read_bytes())
    if content == "cut":
        content = (encoder_folder / "model.safetensors").read_bytes()[:-1]
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    says = (
        f"model.pretrained={tmp_path} cannot be loaded"
        if content is None
        else "is damaged, or is a Git LFS pointer"
    )
    rejects(says, build, "label", begun(tmp_path))


def without_gradient(model):
    outcome(model.train(), batch())
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


@pytest.mark.parametrize("architecture", ["deberta", "deberta-v2"])
def test_relative_positions_that_a_prediction_made_can_be_trained_with(architecture, monkeypatch):
    config = build("label", sizes(architecture)).network.config
    config.relative_attention = True
    config.pos_att_type = ["c2p", "p2c"]
    model = PaddedEncoder(AutoModelForSequenceClassification.from_config(config))
    model.eval()
    model.keep_relative_positions()
    plain = model.encoder.get_rel_pos
    used = []

    def noted(*args):
        used.append(plain(*args))
        return used[-1]

    monkeypatch.setattr(model.encoder, "get_rel_pos", noted)
    inputs = batch()
    with torch.inference_mode():
        predicted = model(*inputs)
    logits, _ = outcome(model, inputs)
    torch.testing.assert_close(logits, predicted)
    assert len(used) > 1 and all(positions is used[0] for positions in used)


@pytest.mark.parametrize(
    "architecture", ["bert", "deberta-v2", "distilbert", "electra", "roberta"]
)
def test_frozen_layers_get_no_gradient_and_keep_their_dropout(architecture):
    model = build("label", sizes(architecture, freeze_layers=1))
    frozen = without_gradient(model)
    assert (
        frozen
        == {n for n, p in model.named_parameters() if ".embeddings." in n or "layer.0." in n}
        and frozen
    )
    assert all(
        module.training for module in model.modules() if isinstance(module, torch.nn.Dropout)
    )


@pytest.mark.parametrize(
    ("architecture", "freeze"),
    [
        ("albert", 0),
        ("bert", 0),
        ("bert", 1),
        ("distilbert", 0),
        ("roberta", 1),
        ("modernbert", 1),
    ],
)
@pytest.mark.parametrize("head", HEADS)
def test_flops_are_those_that_torch_counts(head, architecture, freeze):
    model = build(
        head, sizes(architecture, hidden_size=64, num_heads=2, freeze_layers=freeze, num_layers=4)
    ).train()
    # Attention as plain matrix products: the counter does not see into the CPU's fused kernel.
    model.network.set_attn_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter:
        model(*(tensor[:1] for tensor in batch())).sum().backward()
    flops = model.train_flops(SIZES[head], S)
    assert build(head, sizes("electra")).train_flops(SIZES[head], S) is None  # there is no formula
    # The first layer that learns needs no gradient for its input, so the count is a little below 3 x forward.
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.06 if freeze else 0.02)
