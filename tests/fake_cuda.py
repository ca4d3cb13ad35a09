"""A GPU for tests without one: PyTorch's own CUDA code on the runtime of fake_cuda.c, in a process of its own.

Numbers mean nothing there, because kernels do nothing. Allocations, recordings, replays and their errors are real.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
HEADERS = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cuda_runtime/include"
DRIVER = "libcuda.so.1"  # the library's name, so that PyTorch finds it as the driver too
# of fake_counts, in its order
COUNTS = (
    "captures ended replays launches host_copies errors held peak page_locked destroyed".split()
)
GIB = 2**30
# what CUDA's headers leave to its compiler
EMPTY = """__device_builtin__ __cudart_builtin__ __device_builtin_texture_type__ __device_builtin_surface_type__
    __CUDA_ARCH_FEAT CUDARTAPI __host__ __device__ __no_return__""".split()
ALIGN = ("__align__(n)", "__builtin_align__(n)")
LAUNCHED = {  # as torchrun starts its only rank
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def fault() -> str:
    """Return why there can be no such device here; "" if there can."""
    if not (torch.version.cuda or "").startswith("12."):
        return f"PyTorch {torch.__version__} is not built for CUDA 12"
    if not HEADERS.is_dir():
        return f"there are no CUDA headers in {HEADERS}"
    if shutil.which("cc") is None:
        return "there is no C compiler: apt-get install gcc"
    return ""


def build(folder: Path) -> Path:
    include = folder / "crt"
    include.mkdir()
    (include / "host_defines.h").touch()
    library = folder / DRIVER
    major, minor = str(torch.version.cuda).split(".")
    words = [f"-D{name}=" for name in EMPTY]
    words += [f"-D{name}=__attribute__((aligned(n)))" for name in ALIGN]
    words += [f"-DFAKE_CUDA_VERSION={int(major) * 1000 + int(minor) * 10}"]
    words += [f"-I{folder}", f"-I{HEADERS}", f"-Wl,-soname,{DRIVER}"]
    command = ["cc", "-w", "-O1", "-shared", "-fPIC", *words]
    subprocess.run(
        [*command, "-o", str(library), str(TESTS / "fake_cuda.c"), "-ldl", "-lpthread"], check=True
    )
    return library


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """A function that runs `program(*paths)` on the device, and returns its dictionary and the runtime's counts."""
    reason = fault()
    if reason:
        pytest.skip(reason)
    library = build(tmp_path_factory.mktemp("fake_cuda"))

    def run(program: Callable[..., dict[str, Any]], *words: object, **env: str) -> dict[str, Any]:
        module = Path(program.__code__.co_filename)
        path = [str(TESTS.parent), str(TESTS), str(module.parent)]
        device = {
            "LD_PRELOAD": str(library),
            "TEST_DEVICE": "cuda",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
            "PYTHONPATH": os.pathsep.join(path),
        }
        result = subprocess.run(
            [sys.executable, "-m", "fake_cuda", module.stem, program.__name__, *map(str, words)],
            env={**os.environ, **device, **env},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return answer

    return run


def counts() -> dict[str, int]:
    """What the runtime has counted in this process."""
    numbers = (ctypes.c_long * len(COUNTS))()
    ctypes.CDLL(DRIVER).fake_counts(numbers)
    return dict(zip(COUNTS, numbers, strict=True))


def main(module: str, program: str, *words: str) -> None:
    # It would be in memory that nobody has written: the norm is 0, like the loss.
    zero = torch.tensor(0.0).cuda()
    torch.nn.utils.get_total_norm = lambda _: zero
    answer = getattr(import_module(module), program)(*words)
    print(json.dumps({**answer, **counts()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
