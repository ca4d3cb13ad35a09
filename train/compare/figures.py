"""The panels of a comparison: bars beside the baseline's, and the loss over steps and over time."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.compare.measures import Entry, factor, ratio
from train.report.figures import STYLE, axes_of, curve, look, metric, png_of, points, shortened, x_axis
from train.report.run import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEMORY = (  # what the peak is taken from: the first that every run has
    ("peak_device_bytes", "device memory, GB, of rank 0 as PyTorch counts it"),
    ("monitored_device_bytes", "device memory, GB, the most that the monitor saw"),
    ("peak_host_bytes", "host memory, GB, of the process of rank 0"),
)
PARTS = (("train_s", "steps", 1.0), ("compile_s", "compiling", 0.6), ("rest_s", "start-up, evaluation, saves", 0.25))


@dataclass(frozen=True)
class Panel:
    name: str
    title: str
    draw: Callable[[Axes], None]


def panels(entries: Sequence[Entry]) -> Iterator[Panel]:
    """Yield the panels for which there are figures."""

    def known(key: str) -> bool:
        return any(entry.facts[key] for entry in entries)

    if known("tokens_per_s"):
        yield Panel("throughput", "Throughput", lambda axes: bars(axes, entries, "tokens_per_s", "{:,.0f}", "tokens/s"))
    if known("wall_s"):
        yield Panel("time", "Billable time", lambda axes: stacked(axes, entries))
    if known("cost_usd"):
        yield Panel("cost", "Cost", lambda axes: bars(axes, entries, "cost_usd", "${:,.2f}", "US dollars"))
    if known("compile_s"):
        yield Panel("compile", "Compiling", lambda axes: bars(axes, entries, "compile_s", "{:,.1f} s", "seconds"))
    for key, unit in MEMORY:
        if all(entry.facts[key] for entry in entries):
            yield Panel("memory", "Peak memory", lambda axes, key=key, unit=unit: memory(axes, entries, key, unit))  # type: ignore[misc]
            break
    if known("train_loss"):
        over = "steps" if x_axis([entry.run for entry in entries]) == "step" else "sequences"
        yield Panel("loss_steps", f"Training loss over {over}", lambda axes: losses(axes, entries, over_time=False))
        yield Panel("loss_time", "Training loss over time", lambda axes: losses(axes, entries, over_time=True))


@contextmanager
def style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box in the figure; the HTML has the name
        yield


def picture(panel: Panel) -> bytes:
    """The PNG of one panel."""
    with style():
        figure, axes = axes_of(panel.title)
        panel.draw(axes)
        return png_of(figure)


def poster(drawn: Sequence[Panel], headline: str) -> bytes:
    """One PNG of all panels, with what the comparison says above them."""
    from matplotlib.figure import Figure

    rows = (len(drawn) + 1) // 2
    lines = [line for sentence in headline.splitlines() for line in textwrap.wrap(sentence, 145)]
    with style():
        figure = Figure(figsize=(12, 3.2 * rows + 0.25 * len(lines)), dpi=120, layout="constrained")
        figure.suptitle("\n".join(lines), fontsize=11, x=0.01, horizontalalignment="left")
        for index, panel in enumerate(drawn, 1):
            panel.draw(figure.add_subplot(rows, 2, index, title=panel.title))
        return png_of(figure)


# ---- bars ----------------------------------------------------------------------------------------------------------


def bars(axes: Axes, entries: Sequence[Entry], key: str, form: str, unit: str, *, scale: float = 1.0) -> None:
    """A bar for each run, with its figure and how many times the baseline's it is."""
    values = [entry.facts[key] for entry in entries]
    colours = [look(index)["color"] for index in range(len(entries))]
    drawn = axes.barh(range(len(entries)), [(value or 0.0) * scale for value in values], 0.6, color=colours)
    texts = ["unknown" if value is None else form.format(value * scale) for value in values]
    axes.bar_label(
        drawn, [f" {text}{times(entry, entries[0], key)}" for text, entry in zip(texts, entries, strict=True)]
    )
    finish(axes, entries, unit)


def memory(axes: Axes, entries: Sequence[Entry], key: str, unit: str) -> None:
    bars(axes, entries, key, "{:,.2f} GB", unit, scale=1e-9)


def stacked(axes: Axes, entries: Sequence[Entry]) -> None:
    """A bar for each run, of the parts of its billable time."""
    left = [0.0] * len(entries)
    for key, name, alpha in PARTS:
        widths = [part_s(entry, key) for entry in entries]
        colours = [look(index)["color"] for index in range(len(entries))]
        drawn = axes.barh(range(len(entries)), widths, 0.6, left=left, color=colours, alpha=alpha)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.barh(0, 0, color="#555555", alpha=alpha, label=f" {name}")  # for the legend
    walls = [entry.facts["wall_s"] for entry in entries]
    texts = [
        "unknown" if wall_s is None else f"{wall_s:,.0f} s{times(entry, entries[0], 'wall_s')}"
        for wall_s, entry in zip(walls, entries, strict=True)
    ]
    axes.bar_label(drawn, [f" {text}" for text in texts])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(PARTS), fontsize=8)
    finish(axes, entries, "seconds from the first start to the last line")


def part_s(entry: Entry, key: str) -> float:
    """A part of the billable time; 0 where the whole is unknown."""
    facts = entry.facts
    if facts["wall_s"] is None:
        return 0.0
    parts = {"train_s": facts["train_s"] or 0.0, "compile_s": facts["compile_s"] or 0.0}
    return parts[key] if key in parts else max(0.0, facts["wall_s"] - sum(parts.values()))


def times(entry: Entry, baseline: Entry, key: str) -> str:
    value = None if entry is baseline else ratio(entry, baseline, key)
    return "" if value is None else f"  ({factor(value)} times)"


def finish(axes: Axes, entries: Sequence[Entry], unit: str) -> None:
    axes.set_yticks(range(len(entries)), [shortened(entry.label, 24) for entry in entries])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(right=1.45 * axes.get_xlim()[1])  # room for the figures
    axes.set_xlabel(unit)


# ---- curves --------------------------------------------------------------------------------------------------------


def losses(axes: Axes, entries: Sequence[Entry], *, over_time: bool) -> None:
    """The training loss of each run over its steps, or over the time since its first start."""
    runs = [entry.run for entry in entries]
    x = "train_s" if over_time else x_axis(runs)
    starts = [number(run.environment, "first_started_unix_s") for run in runs]
    is_billable = over_time and all(start is not None for start in starts)
    for index, (entry, start) in enumerate(zip(entries, starts, strict=True)):
        xs, ys = points(entry.run.lines["train"], metric("loss"), "time_unix_s" if is_billable else x)
        xs = [value - start for value in xs] if is_billable and start is not None else xs
        if xs:
            curve(axes, xs, ys, band=False, label=f" {shortened(entry.label, 24)}", **look(index))
    units = {"step": "optimizer step", "examples": "sequences consumed", "train_s": "seconds in steps"}
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the first start" if is_billable else units[x])
    axes.set_ylabel("loss (nats)")
    axes.legend(loc="best", fontsize=8)
