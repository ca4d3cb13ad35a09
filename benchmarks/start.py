"""The time from the command to the end of the first step: the demo's model in our program and in a Trainer script.

    python -m benchmarks.start --data data/demo [--rounds 5] [--trees OTHER_CHECKOUT ...] \
        [--accelerate FOLDER]

--data is the folder that `make demo` prepares. Each start is a new process, and the sides take turns. Once a process
prints "step 1", its times are read: wall seconds since its start, and CPU seconds, including its child processes.
`--trees` also times our program in other checkouts. The Trainer is timed only with --accelerate, a folder filled by
`pip install --target FOLDER --no-deps accelerate`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

import psutil

from benchmarks import harness
from benchmarks.harness import ROOT, ratios, three, turns


def ours(data: Path, scratch: Path) -> list[str]:
    """Return the command of the demo, which prints a line for each step; it is killed after the first."""
    run_dir = tempfile.mkdtemp(dir=scratch)
    settings = [
        f"data.path={data}",
        f"run_dir={run_dir}/run",
        "log_every=1",
        "backend=ddp",
        "backend.device=cpu",
    ]
    return ["train", "experiment=demo", "model=albert_tiny", *settings]


def trainer(data: Path, _: Path) -> list[str]:
    return ["benchmarks.peers.first_step", str(data)]


def time_start(words: list[str], *folders: Path) -> tuple[float, float]:
    """Return wall and CPU seconds until the first line that begins with "step 1". `folders` become PYTHONPATH."""
    command = [sys.executable, "-m", *words]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "HF_HUB_OFFLINE": "1",
    }
    began_s = time.perf_counter()
    with psutil.Popen(
        command, cwd=folders[0], env=environ, stdout=PIPE, stderr=STDOUT, text=True
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if " ".join(line.split()).startswith("step 1"):
                break
        else:
            raise RuntimeError(
                f"{' '.join(command)} ended without a first step:\n{''.join(lines)}"
            )
        wall_s = time.perf_counter() - began_s
        family = [process, *process.children(recursive=True)]
        cpu_s = sum(process.cpu_times()[2:4])  # of ended children
        for each in family:
            cpu_s += sum(each.cpu_times()[:2])
        for each in family:
            each.kill()
    return wall_s, cpu_s


def compare(
    data: Path, rounds: int, trees: list[Path], accelerate: Path | None
) -> dict[str, object]:
    """Return minimum, median and maximum of each side's seconds and of its ratios to ours in the same round."""
    sides = {"ours": (ours, [ROOT]), **{f"ours at {tree}": (ours, [tree]) for tree in trees}}
    if accelerate is not None:
        sides["trainer"] = (trainer, [ROOT, accelerate])
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    # a killed run's loader may still write
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for number, side in turns(rounds + 1, list(sides)):
            command, folders = sides[side]
            clocks = time_start(command(data, Path(name)), *folders)
            print(
                f"round {number}, {side}: {clocks[0]:.2f} s, {clocks[1]:.2f} s of CPU",
                file=sys.stderr,
                flush=True,
            )
            if number:  # the first round fills the page cache
                taken[side].append(clocks)
    result: dict[str, object] = {}
    for index, clock in enumerate(("wall", "cpu")):
        seconds = {side: [clocks[index] for clocks in rows] for side, rows in taken.items()}
        for side, values in seconds.items():
            result[f"{side}, {clock} s"] = three(values)
            if side != "ours":
                result[f"{side} / ours, {clock}"] = three(ratios(values, seconds["ours"]))
    return result


def main() -> None:
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--trees", type=Path, nargs="*", default=[], help="other checkouts to time as well"
    )
    parser.add_argument(
        "--accelerate",
        type=Path,
        help="folder with accelerate, which only the Trainer's side uses",
    )
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.trees]
    accelerate = None if options.accelerate is None else options.accelerate.resolve()
    print(json.dumps(compare(options.data.resolve(), options.rounds, trees, accelerate), indent=1))


if __name__ == "__main__":
    main()
