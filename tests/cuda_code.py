"""The kernels that Inductor would make for an H100, on a machine without a GPU: python cuda_code.py prints JSON.

Fake tensors of a CUDA device are traced; Inductor's code is caught before it is loaded, and Triton's kernels in it are
counted with the bytes that each reads and writes, by Inductor's own count. `test_kernels` starts this with libraries
that answer for the CUDA runtime and driver.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface
import torch._inductor.config
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.misc_patterns
import torch._inductor.fx_passes.pad_mm
import torch._subclasses.fake_tensor
import torch.cuda.amp.common
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from train.config import ModelConfig
from train.models.encoder import MaskedLM, build_masked_lm
from train.parallel.precision import set_deterministic
from train.tasks.mlm import loss_sum

B, S, H, P, V = 128, 128, 768, 20, 1000  # sequences, tokens, width, predictions, vocabulary
BF16 = torch.bfloat16
ACTIVATION_BYTES = 2 * B * S * H
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "warp_size": 32,
}
H100 |= {
    "total_memory": 80 * 2**30,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
}
H100 |= {
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
}
H100 |= {
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 * 2**20,
    "gcnArchName": "",
    "uuid": "0",
}
H100 |= {"is_integrated": 0, "is_multi_gpu_board": 0}
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
codes: list[str] = []  # of the graphs so far


class Caught(BaseException):
    """The code of a graph is made."""


def returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def pretend() -> None:
    """Have PyTorch and Triton take this machine for one with an H100, and Inductor stop behind its code."""
    card = SimpleNamespace(**H100)
    cuda = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
    }
    cuda |= {
        "get_device_properties": card,
        "get_device_name": card.name,
        "is_bf16_supported": True,
        "_lazy_init": None,
    }
    cuda |= {
        "is_initialized": True,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "synchronize": None,
    }
    cuda |= {"set_device": None, "current_stream": SimpleNamespace(cuda_stream=0)}
    for name, value in cuda.items():
        setattr(torch.cuda, name, returns(value))
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state, module.set_rng_state = returns(torch.get_rng_state()), returns(None)
    torch.cuda.amp.common.amp_definitely_not_available = returns(False)
    torch._C._cuda_getCurrentRawStream = returns(0)
    interface = torch._dynamo.device_interface.CudaInterface
    worker = {"get_device_properties": card, "current_device": 0}
    own = {
        "get_raw_stream": 0,
        "current_device": 0,
        "get_compute_capability": 90,
        "is_available": True,
    }
    own |= {
        "device_count": 1,
        "raise_if_triton_unavailable": None,
        "is_triton_capable": True,
        "synchronize": None,
    }
    own |= {"is_bf16_supported": True, "get_device_properties": card}
    for place, values in ((interface.Worker, worker), (interface, own)):
        for name, value in values.items():
            setattr(place, name, staticmethod(returns(value)))
    driver = {
        "get_current_target": GPUTarget("cuda", 90, 32),
        "get_current_device": 0,
        "get_current_stream": 0,
    }
    driver |= {
        "get_active_torch_device": torch.device("cuda", 0),
        "get_device_interface": torch.cuda,
    }
    triton.runtime.driver.set_active(
        SimpleNamespace(**{name: returns(value) for name, value in driver.items()})
    )
    torch._subclasses.fake_tensor.init_gpu_context = returns(None)
    # These passes would compute with real tensors of the device.
    torch._inductor.fx_passes.fuse_attention._sfdp_init = returns(None)
    torch._inductor.fx_passes.pad_mm._pad_mm_init = returns(None)
    torch._inductor.fx_passes.misc_patterns._misc_patterns_init = returns(None)
    F.scaled_dot_product_attention = flash
    settings = torch._inductor.config
    (
        settings.force_disable_caches,
        settings.joint_graph_constant_folding,
        settings.compile_threads,
    ) = True, False, 1
    settings.benchmark_kernel = True  # kernels then say how many gigabytes they move
    GraphLowering._compile_to_module_lines = catch


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    **others: Any,
) -> Tensor:
    """The kernel that PyTorch chooses on the device."""
    assert attn_mask is None and not others.get("is_causal")
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    result: Tensor = attend(query, key, value, dropout_p, False, False, scale=others.get("scale"))[
        0
    ]
    return result


def catch(_graph: Any, wrapper_code: Any) -> None:
    codes.append(wrapper_code.value)
    raise Caught


def compiled_inside(
    graph: torch.fx.GraphModule, inputs: list[Any], **options: Any
) -> Callable[..., Any]:
    """Have Inductor make the code of a graph; the graph itself goes on with fake tensors."""
    runnable = copy.deepcopy(graph)
    with suppress(Caught):
        compile_fx.compile_fx_inner(graph, inputs, **options)

    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return runnable(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def codes_of(function: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    """Return the code of the forward and of the backward pass of a function of fake tensors."""
    codes.clear()
    graph = torch.fx.Graph()
    graph.output(
        (
            graph.call_function(
                function, tuple(graph.placeholder(f"x{n}") for n in range(len(inputs)))
            ),
        )
    )
    with FAKE:
        made = compile_fx.compile_fx(
            torch.fx.GraphModule(nn.Module(), graph), list(inputs), inner_compile=compiled_inside
        )
        (out,) = made(*inputs)
        out.backward(torch.empty_like(out))
    return list(codes)


def codes_of_module(module: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> list[str]:
    """Return the code of call(module, *inputs) in autocast, with the module's weights as inputs of its graphs."""
    holder = nn.ModuleList([module])
    weights = {
        name: fake(*weight.shape, dtype=weight.dtype) for name, weight in holder.named_parameters()
    }
    weights |= {
        name: fake(*value.shape, dtype=value.dtype) for name, value in holder.named_buffers()
    }

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = holder

        def forward(self, *given: Tensor) -> Tensor:
            with torch.autocast("cuda", BF16):
                return call(self.held[0], *given)

    caller = Caller()

    def function(*given: Tensor) -> Tensor:
        named = {f"held.{name}": value for name, value in zip(weights, given, strict=False)}
        result: Tensor = torch.func.functional_call(caller, named, given[len(named) :])
        return result

    return codes_of(function, *weights.values(), *inputs)


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FAKE:
        return torch.empty(
            shape, device="cuda", dtype=dtype, requires_grad=dtype.is_floating_point
        )


def figures(made: list[str]) -> dict[str, float]:
    """Return the number of Triton's kernels, the bytes that they move in activations, and the atomic additions."""
    kernels, moved_bytes = 0, 0.0
    for code in made:
        named = re.finditer(
            r"^(triton_\w+) = async_compile.triton\(.*?'kernel_num_gb': ([\d.e-]+)",
            code,
            re.S | re.M,
        )
        gigabytes = {match[1]: float(match[2]) for match in named}
        body = code[code.rindex("def call(") :].split("def benchmark_compiled_module")[0]
        calls = re.findall(r"^\s*(triton_\w+)\.run\(", body, re.M)
        kernels += len(calls)
        moved_bytes += 1e9 * sum(gigabytes[name] for name in calls)
    return {
        "graphs": len(made),
        "kernels": kernels,
        "activations": round(moved_bytes / ACTIVATION_BYTES, 1),
        "atomics": sum(code.count("tl.atomic_add") for code in made),
    }


def model_of(architecture: str) -> MaskedLM:
    """Return a model of two layers whose norms return bf16, as `train.parallel.backends` makes it."""
    cfg = ModelConfig(
        architecture=architecture,
        hidden_size=H,
        num_layers=2,
        num_heads=H // 64,
        intermediate_size=4 * H,
        embedding_size=128 if architecture == "albert" else None,
        max_positions=512,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = build_masked_lm(cfg, vocab_size=V, pad_id=0, seq_len=S)
    model.narrow_norms(BF16)
    model.join_projections()
    return model.train()


def main() -> None:
    albert, bert = model_of("albert"), model_of("bert")
    pretend()
    states = fake(B, S, H, dtype=BF16)
    ids, positions = fake(B, S, dtype=torch.int64), fake(B, P, dtype=torch.int64)
    narrow = fake(B, S, 128, dtype=BF16)  # what ALBERT's embeddings are
    made = {
        "layer of albert": codes_of_module(
            albert.known_layers()[0], lambda layer, x: layer(x, None), states
        ),
        "layer of bert": codes_of_module(
            bert.known_layers()[0], lambda layer, x: layer(x, None), states
        ),
        "encoder": codes_of_module(
            albert.encoder, lambda part, x: part(x).last_hidden_state, narrow
        ),
        "loss": codes_of(loss_sum, fake(B * P, V, dtype=BF16), fake(B * P, dtype=torch.int64)),
        "with embeddings": codes_of_module(
            albert, lambda model, *x: model(*x), ids, ids, positions
        ),
    }
    set_deterministic(True)
    made["with embeddings, deterministic"] = codes_of_module(
        albert, lambda model, *x: model(*x), ids, ids, positions
    )
    print(json.dumps({name: figures(each) for name, each in made.items()}))


if __name__ == "__main__":
    main()
