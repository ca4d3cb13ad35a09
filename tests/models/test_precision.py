"""Precisions of GPUs, and their clock. fp16 runs on the CPU as well, which is how its scaled losses are tested."""

from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from forks import DEVICE
from rejections import rejects
from toy import toy as toy

from train.config import BackendConfig, ModelConfig, XLAConfig
from train.models.encoder import build_masked_lm
from train.models.network import is_norm
from train.parallel.ddp import DDP
from train.parallel.precision import check_precision
from train.run import checkpoint_manager
from train.tasks.mlm import loss_sum

FP16 = BackendConfig(device=DEVICE, precision="fp16")


def build(architecture, *, hidden_size=32, num_layers=2, max_positions=40):
    """A small masked language model of 200 tokens."""
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": 2}
    sizes |= {"intermediate_size": 4 * hidden_size, "max_positions": max_positions}
    cfg = ModelConfig(architecture=architecture, **sizes)
    return build_masked_lm(cfg, vocab_size=200, pad_id=0, seq_len=32)


def batch(rows):
    """Ids, segments, and positions to predict."""
    ids = torch.randint(5, 200, (rows, 32))
    return ids, torch.zeros_like(ids), torch.arange(8).expand(rows, 8)


# a factor of the toy's losses with which no gradient overflows at the first scale, 65536
SMALL = 2.0**-10


def test_fp16_learns_what_fp32_learns(toy):
    toy.scale = lambda call: SMALL
    for name, backend in (
        ("fp32", BackendConfig(device=DEVICE, precision="fp32")),
        ("fp16", FP16),
    ):
        assert toy.train(name, max_steps=20, eval_every=20, backend=backend) == ("done", 20)
    # The model's outputs, about 1, are rounded to 11 bits (2**-11), and 20 steps of Adam move the weights by 0.2.
    for key, tolerance in (("loss", 0.01), ("grad_norm", 0.03)):
        assert toy.values("train", key, "fp16") == pytest.approx(
            toy.values("train", key, "fp32"), rel=tolerance
        )
    assert toy.values("train", "loss", "fp16") != toy.values("train", "loss", "fp32")
    assert toy.values("train", "loss_scale", "fp16") == [65536.0] * 20
    assert "loss_scale" not in toy.lines("train", "fp32")[0]


@pytest.mark.parametrize(
    "architecture",
    "albert bert deberta-v2 distilbert electra eurobert modernbert mpnet nomic_bert rembert roberta roformer".split(),
)
def test_norms_that_return_bf16_keep_gradients_within_two_percent_of_fp32(architecture):
    """Twelve layers, whose states pass from one to the next in bf16 alone."""
    found = {}
    for name, norms in (
        ("fp32", None),
        ("fp32 norms", torch.float32),
        ("bf16 norms", torch.bfloat16),
    ):
        torch.manual_seed(0)
        model = build(architecture, num_layers=12, hidden_size=64).eval()  # without dropout
        ids, segments, positions = batch(4)
        if norms is not None:
            model.narrow_norms(norms)
        seen = set()
        for module in filter(is_norm, model.network.modules()):
            module.register_forward_hook(
                lambda _module, _inputs, output, seen=seen: seen.add(output.dtype)
            )
        with torch.autocast("cpu", torch.bfloat16, enabled=norms is not None):
            logits = model(ids, segments, positions)
        loss_sum(logits.flatten(0, 1), ids[:, :8].flatten()).backward()
        assert seen == {norms or torch.float32}
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        assert (
            {weight.dtype for weight in weights}
            == {weight.grad.dtype for weight in weights}
            == {torch.float32}
        )
        found[name] = torch.cat([weight.grad.flatten() for weight in weights]).double()
    exact = found.pop("fp32")
    for name, gradient in found.items():
        assert float((gradient - exact).norm() / exact.norm()) < 0.02, name


def test_a_model_whose_code_fails_in_bf16_is_rejected_there():
    model = build("deberta", num_layers=1)
    DDP(BackendConfig(device="cpu", precision="fp32")).place(model)
    narrow = DDP(BackendConfig(device="cpu", precision="bf16"))
    rejects(
        "deberta does not run in backend.precision=bf16: .* Set backend.precision=fp32",
        narrow.place,
        model,
    )
    check_precision(model, "bf16_stochastic")  # of XLA, whose weights are in bf16
    assert model.to(torch.bfloat16)(*batch(2)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "architecture", ["albert", "bert", "distilbert", "electra", "roberta", "modernbert"]
)
def test_joined_projections_compute_what_three_products_do(architecture):
    model = build(architecture).eval()
    inputs = batch(2)
    found = []
    for _ in range(2):
        model.zero_grad()
        logits = model(*inputs)
        logits.square().sum().backward()
        found.append(
            [logits, *(weight.grad for weight in model.parameters() if weight.grad is not None)]
        )
        before = [
            module.forward for module in model.modules() if isinstance(module, torch.nn.Linear)
        ]
        model.join_projections()
    joined = [module.forward for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert (joined != before) == (architecture != "modernbert")  # which has one product already
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_an_overflow_is_skipped_and_halves_the_scale_and_is_no_sign_of_a_broken_run(
    toy, monkeypatch
):
    monkeypatch.setattr(checkpoint_manager, "MAX_ROLLBACKS", 0)
    """Three in a row, and three steps in a row without a finite gradient would be too many."""
    toy.scale = lambda call: 1e6 if 3 <= call <= 5 else SMALL
    assert toy.train(max_steps=8, backend=FP16, checkpoint={"every": 1, "keep": 0}) == ("done", 8)
    assert toy.values("train", "loss_scale") == [
        2.0**power for power in (16, 16, 15, 14, 13, 13, 13, 13)
    ]
    assert toy.weights(2) == toy.weights(5) != toy.weights(6)
    assert len(toy.faults()) == 3 and all("skipped steps: 1;" in fault for fault in toy.faults())


def test_a_run_that_was_stopped_goes_on_with_its_scale_bit_for_bit(toy):
    """The first scales are too large for the toy: a run that forgot its own would skip steps again."""
    settings = {"max_steps": 32, "backend": FP16, "checkpoint": {"every": 16}}
    toy.train("whole", **settings)
    with pytest.raises(RuntimeError, match="killed"):
        toy.losses, toy.scale = 0, lambda call: 1.0 if call <= 18 else killed()
        toy.train("cut", **settings)
    toy.scale = lambda call: 1.0
    toy.train("cut", **settings)
    scales = toy.values("train", "loss_scale", "whole")
    assert scales[16:] == toy.values("train", "loss_scale", "cut")[-16:]
    assert 1 < scales[-1] < 65536
    assert toy.weights(32, "whole") == toy.weights(32, "cut")
    files = (
        toy.folder / name / "checkpoints/step_00000032/optimizer.pt" for name in ("whole", "cut")
    )
    states = [torch.load(file)["loss_scale"] for file in files]
    assert states[0] == states[1] and states[0]["_growth_tracker"] > 16


def killed():
    raise RuntimeError("killed")


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device as far as opening it goes; `.capability` is its compute capability."""
    device = SimpleNamespace(capability=(8, 0))
    for name, answer in {
        "device_count": lambda: 1,
        "get_device_name": lambda _: "a GPU",
        "is_available": lambda: (
            True
        ),  # else PyTorch scales losses only where torch_xla is installed
        "get_device_capability": lambda _: device.capability,
        "get_device_properties": lambda _: SimpleNamespace(),
        "set_device": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    yield device
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("capability", "chosen"), [((6, 1), "fp32"), ((7, 0), "fp16"), ((8, 0), "bf16")]
)
def test_auto_is_what_the_gpu_multiplies_natively(cuda, capability, chosen):
    cuda.capability = capability
    backend = DDP(BackendConfig(device="cuda"))
    assert (backend.precision, backend.scaler.is_enabled()) == (chosen, chosen == "fp16")
    assert DDP(BackendConfig(device="cpu")).precision != "fp16"


def test_deterministic_kernels_are_for_one_run_on_a_gpu(cuda):
    backend = DDP(BackendConfig(device="cuda", deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert not inductor_config.dynamic_scale_rblock
    backend.close()
    assert not torch.are_deterministic_algorithms_enabled()
    assert inductor_config.dynamic_scale_rblock
    rejects("backend.deterministic=true is only for GPUs", XLAConfig, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [128, 512])
def test_backward_passes_of_a_deterministic_run_are_bitwise_equal(seq_len):
    """More tokens than one kernel's table of embeddings takes; attention with and without a mask."""
    backend = DDP(BackendConfig(device=DEVICE, precision="bf16", deterministic=True))
    torch.manual_seed(0)
    model = build("bert", hidden_size=128, max_positions=512)
    backend.place(model)
    ids = torch.randint(5, 200, (4096 // seq_len, seq_len), device=backend.device)
    positions = torch.arange(0, seq_len, 8, device=backend.device).expand(len(ids), -1)
    real, states = torch.ones_like(ids), torch.randn(*ids.shape, 128, device=backend.device)
    real[:, -9:] = 0
    found = []
    for _ in range(3):
        torch.manual_seed(1)  # of dropout
        with backend.autocast():
            logits = model(ids, torch.zeros_like(ids), positions)
            masked = model.network.base_model.encoder(
                states, attention_mask=model.mask(real)
            ).last_hidden_state
            loss = (
                loss_sum(logits.flatten(0, 1), ids.gather(1, positions).flatten())
                + masked.float().square().mean()
            )
        loss.backward()
        found.append([weight.grad for weight in model.parameters() if weight.grad is not None])
        model.zero_grad(set_to_none=True)
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
    backend.close()
