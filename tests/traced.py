"""`baretrain train` with graphs that torch.compile traces, counts and runs, and no kernels, which take g++ a minute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch._dynamo

from train import __main__ as program


def without_kernels(put: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Do so by `put(object, name, value)`."""
    eager = torch._dynamo.lookup_backend("aot_eager")
    put(torch._dynamo, "lookup_backend", lambda _: eager)


if __name__ == "__main__":
    without_kernels()
    sys.exit(program.main())
