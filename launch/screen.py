"""A run's status as text: one screen that refreshes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.status import Status
from launch.values import shown_duration, shown_moment
from train.cli.command import printable
from train.config import Unreachable

Row = tuple[str, str]
MOST_ATTEMPTS = 5  # shown: the last ones
MOST_CHARS = 400  # of a text from elsewhere
BAR_CHARS = 40
GOOD, BAD, OPEN = "green", "red", "yellow"
STYLES = {"running": GOOD, "done": GOOD, "failed": BAD, "refused": BAD, "vanished": BAD, "unknown": BAD}


def clean(text: str) -> str:
    """One line that no terminal acts on, cut if it is very long."""
    line = printable(text)
    return line if len(line) <= MOST_CHARS else f"{line[:MOST_CHARS]}..."


# ---- what is said ----------------------------------------------------------------------------------------------------


def rows(status: Status) -> list[Row]:
    """Label and text of each fact that is known."""
    shown = [*of_job(status), *of_run(status), *of_attempts(status)]
    return [(label, clean(text)) for label, text in shown if text]


def of_job(status: Status) -> list[Row]:
    answer, history = status.answer, status.history
    handle = history.submission.handle if history.submission else {}
    named = ", ".join(f"{key} {value}" for key, value in handle.items() if isinstance(value, str | int))
    says = f"does not answer: {answer.failure}" if answer.failure else f"{answer.text} ({named})"
    nodes = (history.submission.nodes if history.submission else None) or 0
    machines = ", ".join(answer.nodes) or (f"{nodes} asked for" if nodes and status.is_active else "")
    submitted = history.submission.time_unix_s if history.submission else None
    asked = {"stop asked": history.stop_asked_unix_s, "cancelled": history.cancelled_unix_s}
    ended = history.ended
    return [
        ("scheduler", f"{answer.scheduler}: {says}" if answer.scheduler else says),
        ("machines", machines),
        ("submitted", f"{shown_moment(submitted)}{f', {history.submissions} times' * (history.submissions > 1)}"),
        *((label, shown_moment(at)) for label, at in asked.items() if at is not None),
        ("gate", "; ".join(f"{node} failed: {reason}" for node, reason in history.failed_gate.items())),
        ("ended", f"{shown_moment(ended.time_unix_s)}: {ended.outcome}, {ended.reason}" if ended else ""),
    ]


def of_run(status: Status) -> list[Row]:
    progress = status.progress
    evaluation = "  ".join(f"{name} {value:.4f}" for name, value in progress.scores.items())
    mfu = "" if progress.mfu is None else f", MFU {progress.mfu:.1%}"
    left_s, age_s, end = status.time_left_s, status.line_age_s, progress.outcome
    return [
        ("step", shown_step(status)),
        ("loss", "" if progress.loss is None else f"{progress.loss:.4f}"),
        ("evaluation", f"step {progress.evaluated_step or 0:,}: {evaluation}" if evaluation else ""),
        ("speed", "" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f} tokens/s{mfu}"),
        ("goodput", "" if progress.goodput is None else f"{progress.goodput:.1%}"),
        ("time left", "" if left_s is None else shown_duration(left_s)),
        ("checkpoint", "" if progress.checkpoint is None else f"step {progress.checkpoint:,}"),
        ("cost", "" if progress.cost_usd is None else f"${progress.cost_usd:,.2f}"),
        ("last line", "" if age_s is None else f"{shown_duration(round(age_s))} ago"),
        ("outcome", f"{end.outcome}: {end.reason}" if end and not status.history.running_attempt else ""),
    ]


def of_attempts(status: Status) -> list[Row]:
    rows: list[Row] = []
    for each in status.history.attempts[-MOST_ATTEMPTS:]:
        where = f" on {', '.join(each.nodes)}" if each.nodes else ""
        if each.is_over:
            end = f"{each.outcome}{f' at step {each.step:,}' if each.step else ''}, {each.reason}"
            text = f"{end}; then: {each.next}" if each.next else end
        else:
            text = f"since {shown_moment(each.began_unix_s)}{where}"
        rows.append((f"attempt {each.number}", text))
    return rows


def shown_step(status: Status) -> str:
    step, total = status.progress.step, status.progress.total_steps
    if step is None:
        return "" if total is None else f"none yet of {total:,}"
    return f"{step:,}" if total is None else f"{step:,} of {total:,} ({step / total:.1%})"


def plain_lines(status: Status) -> list[str]:
    shown = [(clean(status.run_dir), status.state), *rows(status)]
    width = max(len(label) for label, _ in shown[1:]) if len(shown) > 1 else 0
    facts = [f"{label:{width}}  {text}" for label, text in shown[1:]]
    return [f"{shown[0][0]}: {status.state}", *facts, *(f"attention: {clean(each)}" for each in status.disagreements)]


def one_line(status: Status) -> str:
    """The state in a line, for a log: without what changes though nothing happens."""
    known = [(label, text) for label, text in rows(status) if label in ("step", "loss", "speed", "time left")]
    line = "  ".join([status.state, *(f"{label} {text}" for label, text in known)])
    return "  attention: ".join([line, *(clean(each) for each in status.disagreements)])


def columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


# ---- on a terminal ---------------------------------------------------------------------------------------------------


def open_console() -> Console:
    return Console(file=sys.stdout, force_terminal=sys.stdout.isatty(), highlight=False, markup=False, emoji=False)


def screen(status: Status) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    step, total = status.progress.step, status.progress.total_steps
    for label, text in rows(status):
        facts.add_row(Text(label, style="dim"), Text(text))
        if label == "step" and step and total:
            facts.add_row("", ProgressBar(total=total, completed=min(step, total), width=BAR_CHARS))
    title = Text.assemble((clean(status.run_dir), "bold"), "  ", (status.state, STYLES.get(status.state, OPEN)))
    return Group(title, facts, *(Text(f"attention: {clean(each)}", style=OPEN) for each in status.disagreements))


def show(status: Status, *, as_json: bool = False) -> None:
    """Print a status once."""
    console = open_console()
    if as_json:
        print(status.to_json())
    elif console.is_terminal:
        console.print(screen(status))
    else:
        print("\n".join(plain_lines(status)))


def watch(ask: Callable[[], Status], every_s: float, *, as_json: bool = False) -> None:
    """Show the status again and again until the job has ended: on a terminal one screen, elsewhere a line for each
    change.
    """
    console, answers = open_console(), repeated(ask, every_s)
    if as_json:
        for answer in answers:
            print(answer.to_json(), flush=True) if isinstance(answer, Status) else warn(answer)
    elif console.is_terminal:
        watch_screen(console, answers)
    else:
        before = ""
        for answer in answers:
            line = one_line(answer) if isinstance(answer, Status) else clean(str(answer))
            if line != before:
                print(f"{shown_moment(time.time())}  {line}", flush=True)
            before = line


def watch_screen(console: Console, answers: Iterator[Status | Unreachable]) -> None:
    last: RenderableType = ""
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for answer in answers:
            if isinstance(answer, Status):
                last = screen(answer)
                live.update(last, refresh=True)
            else:
                live.update(Group(last, Text(f"no answer: {clean(str(answer))}", style=BAD)), refresh=True)


def repeated(ask: Callable[[], Status], every_s: float) -> Iterator[Status | Unreachable]:
    """Yield the status until the job has ended. A service that does not answer is asked again."""
    while True:
        try:
            answer: Status | Unreachable = ask()
        except Unreachable as error:
            answer = error
        yield answer
        if isinstance(answer, Status) and answer.answer.is_active is False:
            return
        time.sleep(every_s)


def warn(error: Exception) -> None:
    print(clean(str(error)), file=sys.stderr, flush=True)
