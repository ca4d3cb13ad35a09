"""How often Python looks for garbage.

torch and transformers make half a million objects when they are imported and hardly any garbage; Python's usual
threshold has it search for some at every 700th (benchmarks/README.md).
"""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
RARE = 100_000  # objects, not 0: the preparation of a task's data may leave garbage too


def search_rarely() -> None:
    """Call it before the heavy imports."""
    gc.set_threshold(RARE)


def search_as_usual() -> None:
    """Call it before a device opens, whose memory garbage would hold. What is there by now is never searched again."""
    if gc.get_threshold()[0] == RARE:
        gc.freeze()
        gc.set_threshold(*USUAL)
