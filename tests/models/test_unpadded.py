"""Layers that read no padding: logits and gradients are those of padded rows."""

import json

import pytest
import torch
from test_heads import NO_DROPOUT, S, build, sizes

from train.config import BackendConfig
from train.models import unpadded
from train.models.network import ADDING, repeated_layers
from train.models.unpadded import MULTIPLE, similar_rows
from train.parallel.ddp import DDP

LENGTHS = (S, 7, 3, 5, 0, 1, 2, 1)  # 31 tokens of 96 places; one row has none


def rows(lengths=LENGTHS):
    """Ids, 1 for tokens, segments."""
    torch.manual_seed(1)
    real = (torch.arange(S) < torch.tensor(lengths)[:, None]).long()
    ids = torch.where(real.bool(), torch.randint(5, 101, real.shape), 1)
    return ids, real, (torch.arange(S) > 4).long() * real


def watched(model):
    """The shapes of what the first layer reads, as they come."""
    shapes = []
    first = repeated_layers(model.network)[0]

    def see(_layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        shapes.append(list(hidden.shape[:2]))

    first.register_forward_pre_hook(see, with_kwargs=True)
    return shapes


def outcome(model, inputs):
    """Logits where a row has tokens to answer for, and gradients of a weighted sum, by name."""
    logits = model(*inputs)
    real = inputs[1].bool()
    is_answered = real[:, 0] if logits.ndim == 2 else real
    logits = logits[is_answered]
    (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return logits.detach(), gradients


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("head", ["label", "token", "span"])
@pytest.mark.parametrize("architecture", ADDING)
def test_logits_and_gradients_are_those_of_padded_rows(architecture, head, attention, monkeypatch):
    monkeypatch.setattr(unpadded, "GROUP_PAIRS", 10)
    assert similar_rows(sorted(LENGTHS)) == [3, 2, 1, 1, 1]
    found = []
    seen = []
    for leaves_out in (False, True):
        model = build(head, sizes(architecture, attention=attention, **NO_DROPOUT)).train()
        if leaves_out:
            model.leave_out_padding()
        shapes = watched(model)
        found.append(outcome(model, rows()))
        seen.append(shapes[0])
    assert seen == [[8, S], [1, MULTIPLE]]
    (logits, gradients), (other_logits, other_gradients) = found
    torch.testing.assert_close(other_logits, logits, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        if gradient is None:
            assert other_gradients[name] is None
            continue
        closeness = {"rtol": 1e-4, "atol": 1e-5 * float(gradient.abs().max() + 1)}
        torch.testing.assert_close(other_gradients[name], gradient, **closeness)


def test_rows_of_similar_lengths_are_one_group():
    for lengths, groups in {
        (): [],
        (0,): [1],
        (30,) * 11: [11],
        (2, 3, 4, 5, 50, 55, 60, 70): [8],
        (2, 3, 4, 5, 250, 260, 270, 280): [4, 4],
        (20, 20, 300, 512): [2, 1, 1],
        (20, 20, 20, 300, 512): [3, 1, 1],
    }.items():
        assert similar_rows(lengths) == groups


def test_attention_reads_groups_that_are_made_once_for_each_batch(monkeypatch):
    read = []
    plain = unpadded.ATTENTION["eager"]

    def seen(module, query, key, value, mask, **options):
        read.append((query.shape[0], query.shape[2], tuple(mask.shape)))
        return plain(module, query, key, value, mask, **options)

    made = []
    of_batch = unpadded.Groups.__init__

    def make(groups, padding):
        made.append(padding)
        of_batch(groups, padding)

    monkeypatch.setitem(unpadded.ATTENTION, "eager", seen)
    monkeypatch.setattr(unpadded.Groups, "__init__", make)
    monkeypatch.setattr(unpadded, "GROUP_PAIRS", 50)
    model = build("label", sizes(attention="eager", **NO_DROPOUT)).train()
    model.leave_out_padding()
    model(*rows())
    one_layer = [(5, 8, (5, 1, 1, 8)), (2, 8, (2, 1, 1, 8)), (1, 16, (1, 1, 1, 16))]
    layers = model.network.config.num_hidden_layers
    assert read == one_layer * layers and layers > 1
    assert len(made) == 1


def test_where_nothing_is_saved_rows_are_read_as_they_are():
    model = build("token", sizes(**NO_DROPOUT)).train()
    model.leave_out_padding()
    shapes = watched(model)
    model(*rows((S, S, 9)))  # 33 tokens of 36 places: 64 would be read
    ids, _, segments = rows()
    model(ids, None, segments)
    model.eval()
    model(*rows())
    assert shapes == [[3, S], [8, S], [8, S]]


def test_only_cpus_that_compile_nothing_leave_it_out_and_only_of_architectures_that_are_known():
    for architecture, expected in (("bert", True), ("deberta-v2", False)):
        model = build("label", sizes(architecture)).train()
        DDP(BackendConfig(device="cpu")).leave_out_padding(model)
        assert model.leaves_out_padding == expected
        shapes = watched(model)
        model(*rows())
        assert shapes == [[1, MULTIPLE] if expected else [8, S]]
    model = build("label", sizes()).train()
    DDP(BackendConfig(device="cpu", compile="layers")).leave_out_padding(model)
    assert not model.leaves_out_padding
    model.network.config.chunk_size_feed_forward = 3
    model.leave_out_padding()
    assert not model.leaves_out_padding


def test_a_class_of_the_users_reads_rows():
    model = build("label", sizes()).train()
    plain = type(model.network)
    model.network.__class__ = type("Mine", (plain,), {"__module__": "mine"})
    model.leave_out_padding()
    shapes = watched(model)
    model(*rows())
    assert not model.leaves_out_padding and shapes == [[8, S]]


def test_places_that_a_mask_hides_may_lie_anywhere():
    ids, real, segments = rows()
    real[0, 3] = 0
    real[1, 0] = 0
    found = []
    for leaves_out in (False, True):
        model = build("token", sizes(**NO_DROPOUT)).train()
        if leaves_out:
            model.leave_out_padding()
        found.append(model(ids, real.bool(), segments)[real.bool()])
    torch.testing.assert_close(*found)


def test_a_batch_without_tokens_is_read_as_it_is():
    model = build("token", sizes(**NO_DROPOUT)).train()
    for _ in range(2):  # the second time changes nothing
        model.leave_out_padding()
    shapes = watched(model)
    model(*rows([0, 0]))
    model(*rows())
    assert shapes == [[2, S], [1, MULTIPLE]]


def test_exports_know_nothing_of_it(tmp_path):
    for name, leaves_out in (("plain", False), ("without", True)):
        model = build("label", sizes())
        if leaves_out:
            model.leave_out_padding()
        model.export(tmp_path / name)
    plain, without = (tmp_path / name for name in ("plain", "without"))
    for file in ("config.json", "model.safetensors"):
        assert (plain / file).read_bytes() == (without / file).read_bytes()
    assert "unpadded" not in json.dumps(json.loads((without / "config.json").read_text()))
