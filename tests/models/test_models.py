"""The masked-position head is the model's own, exports are plain transformers, FLOPs are counted right."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM
from transformers.activations import ACT2FN

from train.config import HeadSize, ModelConfig
from train.models.encoder import build_masked_lm, states_at

S, P, V = 24, 5, 101
COMMON = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 40}
ARCHITECTURES = {
    "albert": {"embedding_size": 16, "intermediate_size": 64},
    "bert": {"intermediate_size": 64},
    "roberta": {"intermediate_size": 64},
    "distilbert": {},
    "electra": {"embedding_size": 16, "intermediate_size": 64},
    "deberta-v2": {"intermediate_size": 64},  # no SDPA in transformers
    "modernbert": {"intermediate_size": 64},
}


def build(model, **changes):
    torch.manual_seed(0)
    cfg = ModelConfig(**{"architecture": model, **COMMON, **ARCHITECTURES[model], **changes})
    return build_masked_lm(cfg, vocab_size=V, pad_id=0, seq_len=S).eval()


def batch(rows=3):
    torch.manual_seed(1)
    ids = torch.randint(5, V, (rows, S))
    segments = (torch.arange(S) > 10).long().expand(rows, S)
    positions = torch.rand(rows, S).argsort(1)[:, :P].sort(1).values
    return ids, segments, positions


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers_at_the_positions_asked_for(architecture, tmp_path):
    model = build(architecture)
    ids, segments, positions = batch()
    result = model(ids, segments, positions)
    model.export(tmp_path)
    with torch.device("meta"):
        empty = build(architecture, pretrained=str(tmp_path)).state_dict()
    assert {name: value.shape for name, value in empty.items()} == {
        n: v.shape for n, v in model.state_dict().items()
    }
    assert all(value.is_meta for value in empty.values())
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    inputs = {"token_type_ids": segments} if model.has_segments else {}
    whole = plain(input_ids=ids, **inputs).logits
    assert result.shape == (3, P, V)
    wanted = whole.gather(1, positions[..., None].expand(-1, -1, V))
    # the same sums in another order
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_picked_as_by_gather_bit_for_bit(dtype):
    torch.manual_seed(0)
    hidden, grad = torch.randn(3, S, 8).to(dtype), torch.randn(3, P, 8).to(dtype)
    _, _, positions = batch()
    positions[:, :2] = 0  # unused slots: the gradients of one position are added up

    def outcome(pick):
        states = pick(leaf := hidden.clone().requires_grad_(), positions)
        states.backward(grad)
        return states.detach(), leaf.grad

    wanted = outcome(
        lambda hidden, positions: hidden.gather(1, positions[..., None].expand(-1, -1, 8))
    )
    assert all(torch.equal(*pair) for pair in zip(outcome(states_at), wanted, strict=True))


def test_the_head_of_albert_sees_the_asked_positions_its_decoder_is_the_embedding_and_its_activation_is_fused():
    model = build("albert")
    seen = []
    model.network.predictions.register_forward_hook(
        lambda _module, inputs, _output: seen.append(inputs[0].shape)
    )
    model(*batch())
    assert seen == [(3, P, 32)]
    assert (
        model.network.predictions.decoder.weight
        is model.network.albert.embeddings.word_embeddings.weight
    )
    assert model.network.config.hidden_act == "gelu_pytorch_tanh"
    x = torch.linspace(-6, 6, 1000)
    torch.testing.assert_close(
        ACT2FN["gelu_pytorch_tanh"](x), ACT2FN["gelu_new"](x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("architecture", ["albert", "bert", "roberta", "modernbert"])
def test_flops_are_those_that_torch_counts(architecture):
    model = build(architecture, hidden_size=64, num_heads=2)
    # Attention as plain matrix products: the counter does not see into the CPU's fused kernel.
    # by its method some versions of ModernBERT cannot change it
    model.network.config._attn_implementation = "eager"
    counter = FlopCounterMode(display=False)
    ids, segments, positions = batch(1)
    with counter:
        model(ids, segments, positions).sum().backward()
    formula = model.train_flops(HeadSize(predictions=P), S)
    # The embedding needs no gradient for its input, nor does what follows it: the count is a little below 3 x forward.
    assert counter.get_total_flops() == pytest.approx(formula, rel=0.02)
