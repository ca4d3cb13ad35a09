"""`baretrain train` with graphs that torch.compile traces, counts and runs, and no kernels, which take g++ a minute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from train import __main__ as program
from train.parallel import compiled


def without_kernels(put: Callable[[Any, str, Any], Any] = setattr) -> None:
    """Do so by `put(object, name, value)`."""
    eager = compiled.lookup_backend("aot_eager")
    put(compiled, "lookup_backend", lambda _: eager)


if __name__ == "__main__":
    without_kernels()
    sys.exit(program.main())
