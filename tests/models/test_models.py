"""The masked-position head is the model's own, exports are plain transformers, FLOPs are counted right."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM, DebertaV2Config
from transformers.activations import ACT2FN
from transformers.models.deberta_v2 import modeling_deberta_v2

from train.config import BackendConfig, HeadSize, ModelConfig
from train.models.encoder import build_masked_lm, states_at
from train.models.heads import PaddedEncoder
from train.parallel.ddp import DDP

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


def test_relative_positions_are_computed_once_for_a_length_and_change_nothing(monkeypatch):
    """As in DeBERTa v3. On a GPU each computation copies a number from the host."""
    computed = []
    compute = modeling_deberta_v2.make_log_bucket_position

    def counted(relative, *others):
        computed.append(relative.size(-1))
        return compute(relative, *others)

    monkeypatch.setattr(modeling_deberta_v2, "make_log_bucket_position", counted)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DebertaV2Config(
        vocab_size=V,
        **sizes,
        intermediate_size=64,
        relative_attention=True,
        position_buckets=8,
        pos_att_type="p2c|c2p",
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    )
    network = modeling_deberta_v2.DebertaV2ForSequenceClassification(config)
    model = PaddedEncoder(network).eval()
    DDP(BackendConfig(device="cpu")).place(model)
    ids, segments, _ = batch()

    def answers(model):
        return [model(ids[:, :length], None, segments) for length in (S, S, 7)]

    with torch.inference_mode():
        predicted = answers(model)
    trained = answers(model)
    torch.stack(trained).sum().backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    assert computed == [S, 7]
    model.encoder._forward_pre_hooks.clear()
    model.zero_grad()
    wanted = answers(model)
    torch.stack(wanted).sum().backward()
    assert computed == [S, 7, S, S, 7]
    for found, again, each in zip(predicted, trained, wanted, strict=True):
        assert torch.equal(found, each) and torch.equal(again, each)
    for gradient, weight in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(gradient, weight.grad)


class Products(TorchDispatchMode):
    """The numbers of columns of all matrix products."""

    def __init__(self):
        super().__init__()
        self.columns = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.columns |= {result.size(-1)}
        return result


def outcome(model):
    """Return logits and gradients by name, and the columns of matrix products, of a pass forward and backward."""
    model.zero_grad()
    with Products() as products:
        logits = model(*batch())
        labels = torch.arange(3 * P) % V
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return {**gradients, "logits": logits.detach()}, products.columns


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.02)])
@pytest.mark.parametrize("architecture", ["albert", "bert", "distilbert", "electra", "modernbert"])
def test_on_a_gpu_rows_of_logits_are_aligned_and_nothing_else_changes(
    architecture, precision, tolerance, tmp_path
):
    """But for the order of sums."""
    model = build(architecture)
    on_gpu = SimpleNamespace(device=torch.device("cpu"), precision=precision, is_cuda=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        wanted, plain_columns = outcome(model)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        DDP.place(on_gpu, model)
        found, columns = outcome(model)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert V in plain_columns and V not in columns and 128 in columns
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.export(tmp_path)
    plain = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert plain.get_output_embeddings().weight.shape[0] == V


@pytest.mark.parametrize(
    ("sizes", "rows", "length", "is_too_much"),
    [
        # BERT-large and BERT-base; a CUDA graph of PyTorch 2.9 counts up to 2 ** 32 random numbers
        ((24, 16), 64, 512, True),
        ((24, 16), 32, 512, False),
        ((12, 12), 128, 512, True),
        ((12, 12), 128, 128, False),
    ],
)
def test_the_random_numbers_of_a_pass_are_counted(sizes, rows, length, is_too_much):
    with torch.device("meta"):
        model = build("bert")
    config = model.network.config
    config.num_hidden_layers, config.num_attention_heads = sizes
    assert model.drawn_numbers(rows, length) == sizes[0] * sizes[1] * rows * length**2
    assert (model.drawn_numbers(rows, length) >= 2**32) == is_too_much
    config.attention_probs_dropout_prob = 0.0
    assert model.drawn_numbers(rows, length) == 0
