"""`baretrain train` with a clock: `python -m benchmarks.peers.clocked RESULT SETTINGS...`.

RESULT is the JSON file to write: the CPU seconds of the training loop without evaluations, and its tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from train import __main__ as program
from train import entry


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that still run."""
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in children)


def clocked(seen: dict[str, Any]) -> None:
    """Note in `seen` what the training loop takes."""
    from train import loop  # imports torch

    train = loop.Training.train
    evaluate = loop.evaluate

    def trained(training: loop.Training) -> str:
        began_s = cpu_s()
        reason = train(training)
        seen["train_cpu_s"] = cpu_s() - began_s - seen.pop("evaluate_s")
        seen["tokens"] = training.metrics.own_tokens
        return reason

    def evaluated(*words: Any) -> Any:
        began_s = cpu_s()
        score = evaluate(*words)
        seen["evaluate_s"] = seen.get("evaluate_s", 0.0) + cpu_s() - began_s
        return score

    loop.Training.train = trained  # type: ignore[method-assign]
    loop.evaluate = evaluated


def main() -> int:
    result, *words = sys.argv[1:]
    seen: dict[str, Any] = {}
    run = entry.code_of_run

    def timed(*given: Any) -> int:
        clocked(seen)
        return run(*given)

    entry.code_of_run = timed
    code = program.main(["train", *words])
    Path(result).write_text(json.dumps(seen))
    return code


if __name__ == "__main__":
    sys.exit(main())
