"""The precision of a run on CPUs and GPUs: the dtype of matrix products, and the order of a GPU's sums."""

from __future__ import annotations

import os
from typing import Any

import torch

from train.config import check

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# under autocast; deberta-v2, the type of DeBERTa v3, runs in all precisions
ONLY_FP32 = {"deberta"}


def pick_precision(name: str, device: torch.device) -> str:
    """Return the precision. `auto` is bf16 if the device multiplies it natively, else fp16 if a GPU does, else fp32.

    Emulated bf16 and fp16 are slower than fp32. CUDA devices multiply fp16 natively with compute capability 7.0 or
    higher (V100, T4), bf16 and TF32 with 8.0 or higher.
    """
    is_cuda = device.type == "cuda"
    capability = (0, 0)
    found = "is a CPU"
    if is_cuda:
        capability = torch.cuda.get_device_capability(device)
        found = f"one has {capability[0]}.{capability[1]}"
    check(
        name != "tf32" or capability >= (8, 0),
        f"backend.precision=tf32 needs a CUDA device of compute capability 8.0 or higher, and this {found}; "
        "set backend.precision=fp32",
    )
    if name != "auto":
        return name
    if not is_cuda:
        is_native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bf16" if is_native else "fp32"
    if capability >= (8, 0):
        return "bf16"
    return "fp16" if capability >= (7, 0) else "fp32"


def check_precision(model: Any, precision: str) -> None:
    """Raise InputError if the model's code in transformers fails under this precision's autocast."""
    kind = getattr(getattr(getattr(model, "network", None), "config", None), "model_type", "")
    check(
        kind not in ONLY_FP32 or precision not in AUTOCAST,
        f"{kind} does not run in backend.precision={precision}: its code in transformers fills masks with a number "
        f"that {precision} cannot represent. Set backend.precision=fp32",
    )


def set_deterministic(wanted: bool) -> None:
    """If `wanted`, use only kernels that always add in the same order. Operations without such kernels raise errors.

    https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    """
    import torch._inductor.config  # late: it takes a second

    # Otherwise a compiled reduction would be timed with several sizes of its blocks in each process.
    torch._inductor.config.dynamic_scale_rblock = not wanted
    if wanted:
        # read by the first matrix product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # torch would fill uninitialised memory, which only helps to find faults and costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)
