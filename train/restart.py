"""torchrun starts again whatever did not exit with 0, also what ended on request or for good. No torch here."""

from __future__ import annotations

import os
from typing import Any

from train.run_folder import RunFolder


class Over(RuntimeError):
    """torchrun has restarted a run for which that is no use."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        super().__init__(f"not started again: it {outcome['outcome']} ({outcome['reason']})")
        self.was_stopped = outcome["outcome"] == "stopped"


def check_restart(folder: RunFolder) -> None:
    """Raises Over if an earlier life of this torchrun has ended for good."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        outcome = folder.last_outcome()
        if outcome and outcome["launch"] == launch() and not (outcome["goes_on"] and outcome["outcome"] == "failed"):
            raise Over(outcome)


def launch() -> list[str]:
    """What tells the restarts of one torchrun from another one."""
    return [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
