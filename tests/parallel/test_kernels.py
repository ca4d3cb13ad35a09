"""Kernels of a compiled layer, and the bytes that they move, counted without a GPU.

TorchInductor writes the kernels that it would write for an H100: the layer is set up, compiled and called by `DDP` on
the runtime of `fake_cuda`. What would load a kernel counts its launches instead. A change that makes Inductor fuse
less, for example norms that return fp32, raises a count. Libraries' kernels (matrix products, attention) do not count.
"""

import importlib.util
import re
from types import SimpleNamespace

import pytest
import torch

from train.config import BackendConfig, ModelConfig
from train.models.encoder import build_masked_lm
from train.parallel.ddp import DDP

SEQUENCES, TOKENS, WIDTH = 128, 128, 768
ACTIVATION_BYTES = 2 * SEQUENCES * TOKENS * WIDTH
# The dropout of each architecture's base model, and what its layer may need, forward and backward: launches, and
# activations [tokens, width] in bf16 that are read or written. These are the counts with PyTorch 2.9.1.
LAYERS = {
    "albert": (0.0, 32, 61.7),
    "bert": (0.1, 33, 68.7),
}
# The estimates are written into each kernel, nothing is read from a cache, and no process compiles in the background.
INDUCTOR = {
    "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def count_launches():
    """Make kernels that only count. Returns the list to which each launch adds the bytes that Inductor estimates."""
    import triton
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.compiler import GPUTarget

    moved_bytes = []

    def load(_compiler, _name, source, **_device):
        gigabytes = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)[1]

        def run(*_args, **_options):
            moved_bytes.append(float(gigabytes) * 1e9)

        return SimpleNamespace(run=run)

    AsyncCompile.triton = load
    # Triton's own driver would be linked to CUDA's.
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(get_current_target=lambda: target)
    triton.runtime.driver.set_active(driver)
    return moved_bytes


def layer_of(architecture, dropout):
    """Return a layer as a run on a GPU sets it up, and the backend."""
    cfg = ModelConfig(
        architecture=architecture,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=WIDTH // 64,
        intermediate_size=4 * WIDTH,
        max_positions=TOKENS,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    model = build_masked_lm(cfg, vocab_size=1000, pad_id=0, seq_len=TOKENS)
    backend = DDP(BackendConfig(compile="layers", precision="bf16"))
    backend.setup_model(model)
    return model.known_layers()[0], backend


def counted():
    """Count the launches of each layer's passes. Run this on `fake_cuda`: what it replaces ends with that process."""
    moved_bytes = count_launches()
    counts = {}
    for architecture, (dropout, *_) in LAYERS.items():
        layer, backend = layer_of(architecture, dropout)
        states = torch.zeros(SEQUENCES, TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda")
        with backend.autocast():
            result = layer(states.requires_grad_(), None)
        result.backward(torch.zeros_like(result))
        activations = round(sum(moved_bytes) / ACTIVATION_BYTES, 1)
        counts[architecture] = [len(moved_bytes), activations]
        moved_bytes.clear()
    return counts


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
def test_a_compiled_layer_has_few_kernels_that_move_few_bytes(fake_cuda, tmp_path):
    """More launches or bytes than today mean that something no longer fuses."""
    folders = dict.fromkeys(FOLDERS, str(tmp_path))
    answer = fake_cuda(counted, **INDUCTOR, **folders)
    counts = {architecture: answer[architecture] for architecture in LAYERS}
    for architecture, (_, most_kernels, most_activations) in LAYERS.items():
        kernels, activations = counts[architecture]
        assert 0 < kernels <= most_kernels, counts
        assert 0 < activations <= most_activations, counts
