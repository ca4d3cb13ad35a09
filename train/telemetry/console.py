"""What a run shows on the console: a line of the log for each line of the metrics, and a progress bar on a terminal."""

from __future__ import annotations

import logging
from typing import Any

from tqdm import tqdm

logger = logging.getLogger("train")


class RunConsole:
    def __init__(self, *, step: int, total_steps: int, is_first_rank: bool) -> None:
        self.total_steps, self.width = total_steps, len(str(total_steps))
        self.bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            disable=None if is_first_rank else True,  # None: off unless the output is a terminal
        )

    def train(self, line: dict[str, Any]) -> None:
        """Show a train line."""
        loss, speed, mfu = line["loss"], line["tokens_per_s"], line.get("mfu")
        shown = {"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}"}
        self.bar.set_postfix(shown | ({} if mfu is None else {"mfu": f"{mfu:.1%}"}), refresh=False)
        logger.info(
            f"step {line['step']:{self.width}}/{self.total_steps}  loss {loss:7.4f}  lr {line['lr']:.2e}  "
            f"grad {line['grad_norm']:6.3f}  {speed:9,.0f} tokens/s"
            + ("" if mfu is None else f"  mfu {mfu:5.1%}")
            + f"  data wait {line['data_wait_s'] / (line['step_s'] * line['steps']):4.0%}"
            + (f"  compiled {line['compile_s']:.1f} s" if "compile_s" in line else "")
        )

    def evaluation(self, step: int, metrics: dict[str, float], eval_s: float) -> None:
        shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        logger.info(f"step {step:{self.width}} evaluation  {shown}  ({eval_s:.1f} s)")
