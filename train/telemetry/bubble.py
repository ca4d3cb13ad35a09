"""The bubble of a pipeline: the share of the passes' time in which ranks wait for other stages, as it was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Bubble:
    ideal: float  # the share that parts of equal cost would wait
    lines: int = 0
    passes_s: float = 0.0  # of all ranks, in forward and backward passes, of all lines but the first: it warms up
    spans_s: float = 0.0  # of all ranks, from the first pass of a step to the last one

    def see(self, passes_s: float, spans_s: float) -> dict[str, float]:
        """Count what all ranks took since the last line. Gives the fields of the line; none if there are no stages."""
        if not spans_s:
            return {}
        self.lines += 1
        if self.lines > 1:
            self.passes_s, self.spans_s = self.passes_s + passes_s, self.spans_s + spans_s
        return {"bubble_share": max(0.0, 1 - passes_s / spans_s)}

    def fields(self) -> dict[str, float]:
        """What the summary says of all lines."""
        if not self.spans_s:
            return {}
        return {"bubble_share": max(0.0, 1 - self.passes_s / self.spans_s), "bubble_share_ideal": self.ideal}
