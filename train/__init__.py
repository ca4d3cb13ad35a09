"""baretrain: the training side. Start at `train/loop.py`."""

from __future__ import annotations

import os
import sys
from types import TracebackType

__version__ = "0.1.0"


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report what ends the program. Ctrl-C is one line, also while torch is being imported, which takes seconds."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("RANK", "0") == "0":
        print("interrupted", file=sys.stderr)


if sys.argv[:1] == ["-m"]:  # `python -m train...` is about to begin: importing it elsewhere changes nothing
    sys.excepthook = show
