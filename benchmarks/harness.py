"""Code that the benchmarks share: arguments, rounds, processes, statistics over rounds, and tables."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parent.parent
QUIET = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}  # arguments of the Trainer
Result = dict[str, Any]
Name = TypeVar("Name")


def hide_torch_xla() -> None:
    """Hide torch_xla from this process: accelerate imports it if installed, and the Trainer then trains on it."""
    sys.modules["torch_xla"] = None  # type: ignore[assignment]


def parser(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with an integer option for each keyword argument, whose value is the default."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in numbers.items():
        result.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, metavar="N", help=f"[{value}]"
        )
    return result


def turns(rounds: int, sides: Sequence[Name]) -> Iterator[tuple[int, Name]]:
    """Yield each round's number with each side. In every other round, the sides come in reverse order."""
    for number in range(rounds):
        order = list(sides)
        if number % 2:
            order.reverse()
        for side in order:
            yield number, side


# ---- processes -----------------------------------------------------------------------------------------------------


def run(*command: str, **environment: str) -> str:
    """Run a command in the repository; return its stdout. Raises RuntimeError with the end of stderr if it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stdout


def answer(*words: str, **environment: str) -> Result:
    """Run a module; return the JSON object in the last line that it prints. Raises RuntimeError if it fails."""
    result: Result = json.loads(run(sys.executable, "-m", *words, **environment).splitlines()[-1])
    return result


@dataclass(frozen=True)
class Usage:
    """The time used by a process and by those of its children that it waited for."""

    wall_s: float
    cpu_s: float


def run_timed(module: str, *words: str, log: Path, **environment: str) -> Usage:
    """Run a module in a new process. Raises RuntimeError with the end of its log if it fails."""
    began_s = time.perf_counter()
    env = {**os.environ, **environment}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words], stdout=file, stderr=file, cwd=ROOT, env=env
        )
        _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    return Usage(wall_s, used.ru_utime + used.ru_stime)


class Job:
    """A function that runs in a forked process with a separate session. Its output goes to a log."""

    def __init__(self, function: Callable[..., Any], *args: Any, log: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.log = log
        self.reader, writer = context.Pipe(duplex=False)
        self.process = context.Process(target=self.act, args=(writer, function, args))
        self.process.start()
        writer.close()

    def act(self, writer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        os.setsid()
        with self.log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            writer.send(function(*args))
        except Exception as error:
            writer.send({"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
            raise

    def result(self, timeout_s: float) -> Result:
        """Return the function's result, or {"error": the reason}, and end the process."""
        answer: Result = {"error": f"it took over {timeout_s:.0f} s"}
        with suppress(EOFError):
            if self.reader.poll(timeout_s):
                answer = {"error": "its process ended without a result"}
                answer = self.reader.recv()
        self.end()
        if "error" in answer:
            answer["log"] = self.log.read_text(errors="replace")[-2000:]
        return answer

    def end(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):  # it has ended, or its session does not exist yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def torchrun(ranks: int, *words: str, max_restarts: int = 0) -> list[str]:
    """Return the arguments of `python -m` that start a module on several ranks of this machine."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    return ["torch.distributed.run", *options, "-m", *words]


def lines(run_dir: Path, kind: str) -> list[Result]:
    """Return the lines of one kind in a run's metrics.jsonl."""
    from train.observe.lines import read_lines
    from train.storage.folders import LocalFolder

    return [line for line in read_lines(LocalFolder(run_dir)) if line["kind"] == kind]


# ---- numbers -------------------------------------------------------------------------------------------------------


def three(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the minimum, the median and the maximum."""
    return min(values), statistics.median(values), max(values)


def ratios(ones: Iterable[float], others: Iterable[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Format minimum / **median** / maximum, or one number if all are equal; "" if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    least, middle, greatest = (shown(value, digits) for value in three(known))
    if least == greatest:
        return middle
    return f"{least} / **{middle}** / {greatest}"


def shown(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, without an exponent; whole numbers keep all digits."""
    if value == int(value):
        return f"{int(value):,}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = []
    for cells in (head, ["---"] * len(head), *rows):
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- the machine ---------------------------------------------------------------------------------------------------


def machine(*packages: str) -> str:
    """Return the processor, the system, and the versions of Python and `packages`."""
    from train.machine.environment import processor
    from train.machine.memory import usable_cpus

    cores = f"{usable_cpus()} virtual cores of {processor() or platform.machine()}"
    versions = [f"{name} {metadata.version(name)}" for name in packages]
    return ", ".join(
        (cores, platform.platform(terse=True), f"Python {platform.python_version()}", *versions)
    )
