"""Figures of runs as PNGs: curves, bars of several runs, labelled data. Matplotlib is imported where it is used."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from train.report.comparison import times
from train.report.data import Evaluated, Records, label_names
from train.report.lines import number, points
from train.report.run import Run
from train.report.texts import file_name, printable, shortened, spoken

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito: apart for colour-blind eyes
DASHES = ("-", "--", ":", "-.")  # the second six runs are dashed, and so on
MAX_POINTS = 200  # of a curve: at 600 px more points are noise, which makes PNGs large
MARK: Any = {"linestyle": (0, (6, 3)), "lw": 1.2, "color": "#555555"}  # of a line that is no curve
MAX_LABELS, MAX_NUMBERED = 40, 12  # labels that a figure names; labels up to which the heat map has numbers
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar sign in the name of a run is a dollar sign
}


@dataclass(frozen=True)
class Panel:
    name: str  # of the PNG
    title: str
    unit: str  # label of the y axis
    key: str  # of the lines
    kind: str = "train"
    percent: bool = False
    from_zero: bool = True
    spikes: bool = False  # a logarithmic axis where values differ a hundredfold


X_LABELS = {
    "step": "optimizer step",
    "examples": "sequences consumed",
    "train_s": "seconds in steps",
    "since_start_s": "seconds since the first start",
}
LOSS = Panel("training_loss", "Training and validation loss", "loss (nats)", "loss", from_zero=False)
THROUGHPUT = Panel("tokens_per_second", "Throughput", "tokens per second", "tokens_per_s")
PANELS = (  # below the quality
    Panel("learning_rate", "Learning rate", "learning rate", "lr"),
    Panel("mfu", "Model FLOP/s utilisation (MFU)", "share of peak FLOP/s", "mfu", percent=True),
    Panel("padding_share", "Padding", "share of all tokens", "padding_share", percent=True),
    Panel("data_wait_share", "Waiting for data", "share of elapsed time", "data_wait_share", percent=True),
    Panel("goodput", "Goodput", "share of the time since the first start", "goodput", percent=True),
    Panel("gradient_norm", "Gradient norm", "global L2 norm", "grad_norm", spikes=True),
)


def panels(runs: list[Run]) -> Iterator[Panel]:
    """Yield the panels of these runs, with what readers look for first: loss, throughput, quality."""
    yield from (LOSS, THROUGHPUT)
    for name in {name: None for run in runs for name in run.summary["scores"] if name != "loss"}:
        unit, file, spikes = spoken(name), file_name("validation", name), runs[0].direction(name) < 0
        yield Panel(file, f"Validation {unit}", unit, name, kind="eval", from_zero=False, spikes=spikes)
    yield from PANELS


def percent(value: float, _: float | None = None) -> str:
    return f"{100 * value:g}%"


def x_axis(runs: list[Run]) -> str:
    """Steps; or sequences, if batch sizes differ, so that equal steps are unequal work, and all runs have them."""
    batches = {run.summary["global_batch_size"] for run in runs}
    lines = [line for run in runs for kind in ("train", "eval") for line in run.drawn(kind)]
    return "examples" if len(batches) > 1 and all(number(line, "examples") is not None for line in lines) else "step"


def look(number: int) -> dict[str, Any]:
    """Colour and dash of a run by its number, the same on every figure."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def curve(
    axes: Axes, xs: list[float], ys: list[float], lows: list[float], highs: list[float], *, band: bool, **style: Any
) -> None:
    """Draw a line of at most MAX_POINTS means and, so that no spike is lost, a band from lowest to highest value."""
    size = math.ceil(len(xs) / MAX_POINTS) or 1
    groups = [slice(start, start + size) for start in range(0, len(xs), size)]
    middle = [fmean(xs[group]) for group in groups]
    axes.plot(middle, [fmean(ys[group]) for group in groups], marker="o" if len(xs) <= 40 else "", ms=3, **style)
    if band and size > 1:
        bounds = [min(lows[group]) for group in groups], [max(highs[group]) for group in groups]
        axes.fill_between(middle, *bounds, color=style["color"], alpha=0.2, linewidth=0)


def add_validation(axes: Axes, runs: list[Run], x: str) -> None:
    """Draw validation points and unigram entropy on the loss figure, each named once in the legend."""
    has_points = False
    for index, run in enumerate(runs):
        xs, ys = points(run.evaluations, LOSS.key, x)[:2]
        axes.plot(xs, ys, "o", ms=5, color=look(index)["color"], mec="#222222", mew=0.8)
        has_points |= bool(xs)
    if has_points:
        axes.plot([], [], "o", ms=5, color="#bbbbbb", mec="#222222", mew=0.8, label=" validation")
    # With sentence-order prediction the loss is not only that of the tokens.
    of_tokens = [all("sop_loss" not in line for line in run.evaluations) for run in runs]
    entropies = [run.summary["unigram_entropy"] if of else None for run, of in zip(runs, of_tokens, strict=True)]
    add_marks(axes, entropies, "unigram entropy of the corpus")


def add_marks(axes: Axes, values: list[float | None], name: str) -> None:
    """Draw a horizontal line for each different value of the runs, in the run's colour if there are several."""
    known = {value: values.index(value) for value in values if value is not None}
    for value, first in known.items():
        axes.axhline(value, **MARK | ({"color": look(first)["color"]} if len(set(values)) > 1 else {}))
    if known:
        axes.plot([], [], **MARK, label=f" {name}")


def finish(axes: Axes, panel: Panel, ys: list[float]) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    def plain(value: float, _: float | None = None) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(plain)
    if panel.spikes and min(ys) > 0 and max(ys) > 100 * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.from_zero and min(ys) >= 0:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(percent if panel.percent else plain)


@contextmanager
def style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box in the figure; the HTML has the name
        yield


def axes_of(title: str, *, height: float = 3.4, **more: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, height), dpi=200, layout="constrained")
    return figure, figure.add_subplot(title=title, **more)


def draw(panel: Panel, runs: list[Run], x: str) -> bytes | None:
    """The PNG of a panel; None if no run has a value for it."""
    curves = [points(run.drawn(panel.kind), panel.key, x) for run in runs]
    values = [y for each in curves for ys in each[1:] for y in ys]
    if not values:
        return None
    alone = "validation" if panel.kind == "eval" else "training"
    names = [run.label for run in runs] if len(runs) > 1 else [alone]
    figure, axes = axes_of(panel.title, xlabel=X_LABELS[x], ylabel=panel.unit)
    for index, (name, each) in enumerate(zip(names, curves, strict=True)):
        label = f" {shortened(name)}"  # the space: a name that begins with "_" would be left out of the legend
        curve(axes, *each, band=len(runs) == 1, label=label, **look(index))
    if panel.name == LOSS.name:
        add_validation(axes, runs, x)
    if panel.key == "masked_accuracy":
        add_marks(axes, [run.summary["neighbour_accuracy"] for run in runs], "table of neighbours, counted")
    finish(axes, panel, values)
    handles, named = axes.get_legend_handles_labels()
    if len(handles) > 1:
        widths = [len(name) + 7 for name in named]  # in letters, of about 75 that fit in a row
        columns = len(widths) if sum(widths) <= 75 else max(1, 75 // max(widths))
        figure.legend(loc="outside lower center", ncols=columns)
        figure.set_figheight(3.4 + 0.21 * math.ceil(len(handles) / columns))  # many runs must not squeeze the axes
    return png_of(figure)


def png_of(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# ---- several runs --------------------------------------------------------------------------------------------------


class Bars(NamedTuple):
    """A bar for each run, of one figure of its summary."""

    name: str  # of the PNG
    title: str
    key: str  # of the summary
    form: str  # of the figure beside the bar
    unit: str
    scale: float = 1.0


BARS = (
    Bars("throughput_by_run", "Throughput", "tokens_per_s", "{:,.0f}", "tokens/s"),
    Bars("time_by_run", "Billable time", "wall_s", "{:,.0f} s", "seconds from the first start to the last line"),
    Bars("cost_by_run", "Cost", "cost_usd", "${:,.2f}", "US dollars"),
    Bars("compiling_by_run", "Compiling", "compile_s", "{:,.1f} s", "seconds"),
)
MEMORY = (  # what the peak is taken from: the first that every run has
    ("peak_device_bytes", "device memory, GB, of rank 0 as PyTorch counts it"),
    ("monitored_device_bytes", "device memory, GB, the most that the monitor saw"),
    ("peak_host_bytes", "host memory, GB, of the process of rank 0"),
)


def bars_of(runs: list[Run]) -> list[Bars]:
    """The bars for which there are figures."""
    memory = [Bars("memory_by_run", "Peak memory", key, "{:,.2f} GB", unit, scale=1e-9) for key, unit in MEMORY]
    memory = [bars for bars in memory if all(run.summary[bars.key] for run in runs)][:1]
    return [*(bars for bars in BARS if any(run.summary[bars.key] for run in runs)), *memory]


def draw_bars(bars: Bars, runs: list[Run]) -> bytes:
    """The PNG of bars, each with its figure and how many times the first run's it is."""
    values = [run.summary[bars.key] for run in runs]
    texts = ["unknown" if value is None else bars.form.format(value * bars.scale) for value in values]
    ratios = [times(run, runs[0], bars.key) for run in runs]
    texts = [f" {text}  ({ratio})" if ratio else f" {text}" for text, ratio in zip(texts, ratios, strict=True)]
    colours = [look(index)["color"] for index in range(len(runs))]
    figure, axes = axes_of(bars.title, height=max(3.4, 1.6 + 0.3 * len(runs)), xlabel=bars.unit)
    drawn = axes.barh(range(len(runs)), [(value or 0.0) * bars.scale for value in values], 0.6, color=colours)
    axes.bar_label(drawn, texts)
    axes.set_yticks(range(len(runs)), [shortened(run.label, 24) for run in runs])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(right=1.45 * axes.get_xlim()[1])  # space for the figures
    return png_of(figure)


def curves(runs: list[Run]) -> list[tuple[str, str, bytes]]:
    """(name, title, PNG) of the curves, and for several runs of the bars beside the first one's."""
    x = x_axis(runs)
    with style():
        drawn = [(panel.name, panel.title, draw(panel, runs, x)) for panel in panels(runs)]
        if len(runs) > 1:
            # Over the time in steps if a run did not record its start.
            is_recorded = all("since_start_s" in line for run in runs for line in run.train)
            over_time = replace(LOSS, name="training_loss_over_time", title="Training loss over time")
            png = draw(over_time, runs, "since_start_s" if is_recorded else "train_s")
            drawn.append((over_time.name, over_time.title, png))
            drawn += [(bars.name, bars.title, draw_bars(bars, runs)) for bars in bars_of(runs)]
    return [(name, title, png) for name, title, png in drawn if png is not None]


# ---- labelled data and its best evaluation -------------------------------------------------------------------------


def data_figures(records: Records) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, title, content) of the PNGs on the data and on the best evaluation."""
    with style():
        if any(split.label_counts for split in records.splits):
            yield "labels_by_split", "Labels", png_of(label_bars(records))
        if any(sum(split.counts) for split in records.splits):
            yield "lengths_by_split", "Lengths", png_of(length_steps(records))
        for evaluated in records.evaluated:
            if evaluated.confusion:
                name = file_name("confusion", evaluated.name)
                yield name, f"Confusion: {evaluated.name}", png_of(heat_map(evaluated))


def label_bars(records: Records) -> Figure:
    """Bars of the share of each label in each split, of the most frequent ones if there are many."""
    splits = [split for split in records.splits if split.label_counts]
    totals = {label: sum(split.label_counts.get(label, 0) for split in splits) for label in label_names(records)}
    frequent = sorted(totals, key=lambda label: -totals[label])[:MAX_LABELS]
    names = [label for label in totals if label in frequent]
    title = "Labels" if len(names) == len(totals) else f"The {len(names)} most frequent of {len(totals)} labels"
    thickness = 0.8 / len(splits)
    figure, axes = axes_of(title, height=1.4 + max(2.0, 0.16 * len(names) * (len(splits) + 1)))
    for index, split in enumerate(splits):
        shares = [split.label_counts.get(label, 0) / (sum(split.label_counts.values()) or 1) for label in names]
        ys = [row + (index - (len(splits) - 1) / 2) * thickness for row in range(len(names))]
        bars = axes.barh(ys, shares, thickness * 0.9, color=look(index)["color"], label=f" {shortened(split.name)}")
        axes.bar_label(bars, [f" {share:.1%}" for share in shares], fontsize=8)
    axes.set_yticks(range(len(names)), [shortened(label) for label in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(right=1.15 * axes.get_xlim()[1])  # space for the figures
    axes.xaxis.set_major_formatter(percent)
    axes.set_xlabel("share of the split's rows")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def length_steps(records: Records) -> Figure:
    """Histogram of the lengths of each split's rows, with the lengths that batches are padded to."""
    figure, axes = axes_of("Lengths", xlabel="tokens, special ones included", ylabel="share of the split's rows")
    for index, split in enumerate(split for split in records.splits if sum(split.counts)):
        shares = [value / sum(split.counts) for value in split.counts]
        padding = "" if split.padding_share is None else f", {split.padding_share:.1%} padding"
        axes.stairs(shares, [0, *split.up_to], lw=1.6, label=f" {shortened(split.name)}{padding}", **look(index))
    for length in records.lengths:
        axes.axvline(length, **MARK)
    axes.plot([], [], **MARK, label=" padded to")
    ticks = [0, *max((split.up_to for split in records.splits), key=len)]
    axes.set_xscale("symlog", base=2, linthresh=ticks[1], linscale=0.5)  # the bins grow with the lengths
    axes.set_xticks(ticks[:: math.ceil(len(ticks) / 12)], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(percent)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def heat_map(evaluated: Evaluated) -> Figure:
    """The confusion matrix, coloured by the share of the true label's examples; with their number if they fit."""
    rows = evaluated.confusion
    shares = [[value / (sum(row) or 1) for value in row] for row in rows]
    figure, axes = axes_of(f"Confusion: {printable(evaluated.name)}", height=5.2, xlabel="predicted", ylabel="true")
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.grid(visible=False)
    if len(rows) <= MAX_LABELS:
        names, size = [shortened(label, 16) for label in evaluated.labels], 8 if len(rows) <= MAX_NUMBERED else 5
        axes.set_xticks(range(len(rows)), names, rotation=45 if len(rows) > 3 else 0, ha="center", fontsize=size)
        axes.set_yticks(range(len(rows)), names, fontsize=size)
    if len(rows) <= MAX_NUMBERED:
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                colour = "#ffffff" if shares[y][x] > 0.5 else "#1b1f24"
                axes.text(x, y, f"{value:,.0f}\n{shares[y][x]:.0%}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, format=percent, shrink=0.8)
    return figure
