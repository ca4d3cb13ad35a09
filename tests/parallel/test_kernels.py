"""Kernels and bytes of a layer that is compiled for a GPU, counted without one, and which of them add in any order.

PyTorch built for CUDA makes the code on any machine; two libraries made here answer in place of CUDA's runtime and
driver. 52 activations are 1.3 GB for 128 sequences of 128 tokens, half a millisecond on an H100.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import ROOT

REASONS = {
    "PyTorch is not built for CUDA": torch.version.cuda is None,
    "no gcc": shutil.which("gcc") is None,
}
pytestmark = [pytest.mark.skipif(is_so, reason=reason) for reason, is_so in REASONS.items()]
pytestmark.append(pytest.mark.slow)
# Triton's kernels of a layer, forward and backward, and the activations [tokens, width] in bf16 that they move.
# One product for queries, keys and values costs 4 activations, and was faster by 1.0 ms of 24.4 on an H100.
MOST_KERNELS, MOST_ACTIVATIONS = (28, 55) if torch.__version__ >= "2.11" else (32, 62)

SUCCEED = """cudaSetDevice cudaGetLastError cudaPeekAtLastError cudaDeviceSynchronize cudaStreamSynchronize
    cudaStreamQuery cudaEventRecord cudaEventDestroy cudaEventQuery cudaStreamWaitEvent cudaFree
    cudaDeviceGetStreamPriorityRange"""
ANSWER = {
    "cudaGetDeviceCount": 1,
    "cudaGetDevice": 0,
    "cudaDeviceGetAttribute": 0,
    "cudaDriverGetVersion": 13000,
}
ANSWER |= {"cudaRuntimeGetVersion": 13000, "cudaEventCreate": 1, "cudaEventCreateWithFlags": 1}
RUNTIME = "".join(f"int {name}(void) {{ return 0; }}\n" for name in SUCCEED.split())
RUNTIME += "".join(
    f"int {name}(int *out) {{ *out = {value}; return 0; }}\n" for name, value in ANSWER.items()
)
RUNTIME += r"""
#include <dlfcn.h>
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { *status = 0; return 0; }
static int find(const char *name, void **found, int *status) {
    *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    if (status) *status = 0;
    return 0;
}
int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags, int *status) {
    return find(name, found, status);
}
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned v, unsigned long long f, int *status) {
    return find(name, found, status);
}
"""
# What PyTorch looks up in the driver; no call of these has an effect.
DRIVER = """CtxFromGreenCtx CtxGetCurrent CtxPopCurrent CtxPushCurrent CtxSetCurrent DeviceGet DeviceGetAttribute
    DeviceGetCount DeviceGetDevResource DeviceGetUuid DevicePrimaryCtxRetain FuncSetCacheConfig GetErrorName
    GetErrorString GreenCtxCreate GreenCtxDestroy GreenCtxStreamCreate Init LaunchCooperativeKernel LinkAddData_v2
    MemAddressFree MemAddressReserve MemCreate MemExportToShareableHandle MemGetAddressRange_v2
    MemGetAllocationGranularity MemGetAllocationPropertiesFromHandle MemImportFromShareableHandle MemMap MemRelease
    MemRetainAllocationHandle MemSetAccess MemUnmap MemsetD32Async MulticastAddDevice MulticastBindMem MulticastCreate
    MulticastUnbind OccupancyMaxActiveBlocksPerMultiprocessor StreamWriteValue32 TensorMapEncodeTiled"""
DRIVER = "".join(f"int cu{name}(void) {{ return 0; }}\n" for name in DRIVER.split())
DRIVER += "int cuDevicePrimaryCtxGetState(int device, int *flags, int *on) { *flags = 0; *on = 1; return 0; }\n"


def build(code: str, library: Path) -> None:
    options = ["-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-x", "c", "-", "-ldl"]
    subprocess.run(["gcc", "-o", str(library), *options], input=code, text=True, check=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Figures of the code by what it is of."""
    folder = tmp_path_factory.mktemp("cuda")
    build(RUNTIME, folder / "runtime.so")
    build(DRIVER, folder / "libcuda.so.1")
    own = {
        "LD_PRELOAD": str(folder / "runtime.so"),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    own |= {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, str(ROOT / "tests/cuda_code.py")]
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert {name: each["graphs"] for name, each in figures.items()} == dict.fromkeys(figures, 2)
    return figures


@pytest.mark.parametrize("architecture", ["albert", "bert"])
def test_a_layer_has_few_kernels_that_move_few_bytes(made, architecture):
    layer = made[f"layer of {architecture}"]
    assert 0 < layer["kernels"] <= MOST_KERNELS and 0 < layer["activations"] <= MOST_ACTIVATIONS, (
        layer
    )


def test_what_is_compiled_adds_in_one_order_and_embeddings_inside_only_if_a_run_is_deterministic(
    made,
):
    atomics = {name: each["atomics"] for name, each in made.items()}
    assert atomics.pop("with embeddings") > 0
    assert atomics == dict.fromkeys(atomics, 0)
