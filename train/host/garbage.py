"""How often Python looks for garbage.

torch and transformers make half a million objects when they are imported and hardly any garbage, and Python's usual
threshold has it search them every 700 objects: a sixth of the CPU time of a start (benchmarks/README.md).
"""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
RARE = 100_000  # objects, not 0: the preparation of a task's data may leave garbage too


def search_rarely() -> None:
    """Call it before the heavy imports."""
    gc.set_threshold(RARE)


def search_as_usual() -> None:
    """Call it before a device opens, whose memory garbage would hold."""
    gc.set_threshold(*USUAL)
