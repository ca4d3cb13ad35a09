"""PNG figures of runs: curves, and bar charts that compare runs. Matplotlib is imported where it is used."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from train.observe.report.comparison import times
from train.observe.report.lines import number, points
from train.observe.report.run import Run, last_finite
from train.observe.report.texts import file_name, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito: safe for colour-blind eyes
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)
DASHES = ("-", "--", ":", "-.")  # runs 7 to 12 are dashed, and so on
MAX_POINTS = 200  # per curve: in a figure 600 px wide, more points only add noise and file size
MARK: Any = {"linestyle": (0, (6, 3)), "lw": 1.2, "color": "#555555"}  # style of reference lines
DPI = 200
WIDTH = 4.5  # inches: so narrow that in three columns, or on a phone, its text is as large as the page's
SMALL = 9  # size of the smallest text in points; a page shows at least one pixel per point
STYLE: Any = {
    "font.size": 10,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.titlesize": 11,
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
    "text.parse_math": False,  # a run's name may contain dollar signs
}


@dataclass(frozen=True)
class Panel:
    name: str  # file name of the PNG
    title: str
    unit: str  # label of the y axis
    key: str  # key in the metrics lines
    kind: str = "train"
    percent: bool = False
    from_zero: bool = True
    at_most: tuple[float, ...] = ()  # the y axis ends at the first of these that no value exceeds
    spikes: bool = False  # use a logarithmic axis if values differ by more than a factor of 100


X_LABELS = {
    "step": "optimizer step",
    "examples": "sequences consumed",
    "since_start_s": "seconds since the first start",
}
LOSS = Panel(
    "training_loss", "Training and validation loss", "loss (nats)", "loss", from_zero=False
)
THROUGHPUT = Panel("tokens_per_second", "Throughput", "tokens per second", "tokens_per_s")
PANELS = (  # shown below the panels on quality
    Panel("learning_rate", "Learning rate", "learning rate", "lr"),
    Panel("mfu", "Model FLOP/s utilisation (MFU)", "share of peak FLOP/s", "mfu", percent=True),
    Panel("padding_share", "Padding", "share of all tokens", "padding_share", percent=True),
    Panel(
        "data_wait_share",
        "Waiting for data",
        "share of the steps' time",
        "data_wait_share",
        percent=True,
    ),
    Panel("goodput", "Goodput", "share of the elapsed time", "goodput", percent=True),
    Panel("gradient_norm", "Gradient norm", "global L2 norm", "grad_norm", spikes=True),
)


def panels(runs: list[Run]) -> Iterator[Panel]:
    """Yield the panels of these runs, most important first: loss, throughput, quality, others."""
    yield from (LOSS, THROUGHPUT)
    for name in {name: None for run in runs for name in run.summary["scores"] if name != "loss"}:
        metric, file = runs[0].metric(name), file_name("validation", name)
        limits: dict[str, Any] = {
            "spikes": metric.sign < 0,
            "at_most": (1.0, 100.0) if metric.sign > 0 else (),
        }
        yield Panel(
            file,
            f"Validation {metric.title}",
            metric.title,
            name,
            kind="eval",
            from_zero=False,
            **limits,
        )
    yield from PANELS


def percent(value: float, _: float | None = None) -> str:
    return f"{100 * value:g}%"


def plain(value: float, _: float | None = None) -> str:
    return f"{value:,g}"


def x_axis(runs: list[Run]) -> str:
    """Return the key of the x axis: sequences if the batch sizes differ and all runs count sequences, else steps."""
    batches = {run.summary["global_batch_size"] for run in runs}
    lines = [line for run in runs for kind in ("train", "eval") for line in run.drawn(kind)]
    return (
        "examples"
        if len(batches) > 1 and all(number(line, "examples") is not None for line in lines)
        else "step"
    )


def last_x(runs: list[Run], x: str) -> float:
    """Return the right end of the x axis, which all curves share; its left end is 0."""
    lines = [line for run in runs for kind in ("train", "eval") for line in run.drawn(kind)]
    return (
        max((value for line in lines if (value := number(line, x)) is not None), default=0.0)
        or 1.0
    )


def look(number: int) -> dict[str, Any]:
    """Return the colour and the dash pattern of a run by its index, the same in every figure."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def curve(
    axes: Axes,
    xs: list[float],
    ys: list[float],
    lows: list[float],
    highs: list[float],
    *,
    band: bool,
    **style: Any,
) -> None:
    """Draw a line of at most MAX_POINTS means, and a band from the lowest to the highest value, which shows spikes."""
    size = math.ceil(len(xs) / MAX_POINTS) or 1
    groups = [slice(start, start + size) for start in range(0, len(xs), size)]
    middle = [fmean(xs[group]) for group in groups]
    marker = "o" if len(xs) <= 40 else ""
    axes.plot(
        middle,
        [fmean(ys[group]) for group in groups],
        marker=marker,
        ms=3,
        clip_on=not xs,
        **style,
    )
    if band and size > 1:
        bounds = [min(lows[group]) for group in groups], [max(highs[group]) for group in groups]
        axes.fill_between(middle, *bounds, color=style["color"], alpha=0.2, linewidth=0)


def add_validation(axes: Axes, runs: list[Run], x: str) -> None:
    """Draw validation points and unigram entropy on the loss figure, each named once in the legend."""
    has_points = False
    for index, run in enumerate(runs):
        xs, ys = points(run.evaluations, LOSS.key, x)[:2]
        axes.plot(
            xs, ys, "o", ms=5, color=look(index)["color"], mec="#222222", mew=0.8, clip_on=not xs
        )
        has_points |= bool(xs)
    if has_points:
        axes.plot([], [], "o", ms=5, color="#bbbbbb", mec="#222222", mew=0.8, label=" validation")
    # A loss that includes sentence-order prediction is not comparable with the entropy of tokens.
    of_tokens = [all("sop_loss" not in line for line in run.evaluations) for run in runs]
    entropies = [
        run.summary["unigram_entropy"] if of else None
        for run, of in zip(runs, of_tokens, strict=True)
    ]
    add_marks(axes, entropies, "unigram entropy")


def add_marks(axes: Axes, values: list[float | None], name: str) -> None:
    """Draw a horizontal line at each distinct value. The legend has one entry for all of them."""
    known = {value for value in values if value is not None}
    for value in known:
        axes.axhline(value, **MARK)
    if known:
        axes.plot([], [], **MARK, label=f" {name}")


def finish(axes: Axes, panel: Panel, ys: list[float], end: float) -> None:
    """Set limits and ticks of a panel's axes, given its values `ys` and the end of the x axis."""
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(plain)
    low, high = axes.get_ylim()
    if not ys:
        axes.set_yticks([])
    elif panel.spikes and min(ys) > 0 and max(ys) > 100 * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif min(ys) >= 0 and (panel.from_zero or low < 0):
        axes.set_ylim(bottom=0)
    limits = (1.0,) if panel.percent else panel.at_most
    most = next((limit for limit in limits if ys and max(ys) <= limit), high)
    if high > most:
        axes.set_ylim(top=most)
    axes.yaxis.set_major_formatter(percent if panel.percent else plain)


@contextmanager
def style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        # Matplotlib draws a box; the HTML shows the name
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def axes_of(
    title: str, *, width: float = WIDTH, height: float = 3.0, **more: str
) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    return figure, figure.add_subplot(title=title, **more)


def draw(panel: Panel, runs: list[Run], x: str) -> bytes | None:
    """Return the PNG of a panel; None if no run has a value for it. A loss that was never finite counts as a value."""
    curves = [points(run.drawn(panel.kind), panel.key, x) for run in runs]
    values = [y for each in curves for ys in each[1:] for y in ys]
    lost = [last_finite(run) if panel.key == LOSS.key else None for run in runs]
    if not values and lost.count(None) == len(runs):
        return None
    end = last_x(runs, x)
    names = ["validation" if panel.kind == "eval" else "training"]
    if len(runs) > 1:
        ends = ["" if line is None else " (diverged)" for line in lost]
        names = [f"{shortened(run.label)}{how}" for run, how in zip(runs, ends, strict=True)]
    figure, axes = axes_of(panel.title, xlabel=X_LABELS[x], ylabel=panel.unit)
    for index, (name, each) in enumerate(zip(names, curves, strict=True)):
        label = f" {name}"  # The space matters: Matplotlib omits names that begin with "_" from the legend.
        curve(axes, *each, band=len(runs) == 1, label=label, **look(index))
    if panel.name == LOSS.name:
        add_validation(axes, runs, x)
    if len(runs) == 1 and lost[0] is not None:
        axes.axvspan(
            number(lost[0], x) or 0.0,
            end,
            color=MARK["color"],
            alpha=0.2,
            lw=0,
            label=" no finite loss",
        )
    if panel.key == "masked_accuracy":
        add_marks(
            axes,
            [run.summary["neighbour_accuracy"] for run in runs],
            "table of neighbouring tokens",
        )
    finish(axes, panel, values, end)
    handles, named = axes.get_legend_handles_labels()
    if len(handles) > 1:
        widths = [len(name) + 7 for name in named]  # widths in characters; about 60 fit in a row
        columns = len(widths) if sum(widths) <= 60 else max(1, 60 // max(widths))
        figure.legend(loc="outside lower center", ncols=columns)
        # a long legend must not squeeze the axes
        figure.set_figheight(3.0 + 0.19 * math.ceil(len(handles) / columns))
    return png_of(figure)


def png_of(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


# ---- several runs --------------------------------------------------------------------------------------------------


class Bars(NamedTuple):
    """A bar chart of one value in the summary, with a bar for each run."""

    name: str  # file name of the PNG
    title: str
    key: str  # key of the summary
    form: str  # format of the value at the end of the bar
    unit: str


BARS = (
    Bars("throughput_by_run", "Throughput", "tokens_per_s", "{:,.0f}", "tokens/s"),
    Bars(
        "time_by_run",
        "Billable time",
        "wall_s",
        "{:,.0f} s",
        "seconds from the first start to the last line",
    ),
    Bars("cost_by_run", "Cost", "cost_usd", "${:,.2f}", "US dollars"),
    Bars("compiling_by_run", "Compiling", "compile_s", "{:,.1f} s", "seconds"),
)


def bars_of(runs: list[Run]) -> list[Bars]:
    """Return the bar charts that have a value to show."""
    return [bars for bars in BARS if any(run.summary[bars.key] for run in runs)]


def draw_bars(bars: Bars, runs: list[Run]) -> bytes:
    """Return the PNG of a bar chart. Each bar shows its value and the ratio to the first run's value."""
    from matplotlib.ticker import MaxNLocator

    values = [run.summary[bars.key] for run in runs]
    texts = ["unknown" if value is None else bars.form.format(value) for value in values]
    ratios = [times(run, runs[0], bars.key) for run in runs]
    texts = [
        f" {text}  ({ratio})" if ratio else f" {text}"
        for text, ratio in zip(texts, ratios, strict=True)
    ]
    colours = [look(index)["color"] for index in range(len(runs))]
    figure, axes = axes_of(bars.title, height=max(3.0, 1.6 + 0.3 * len(runs)), xlabel=bars.unit)
    drawn = axes.barh(range(len(runs)), [value or 0.0 for value in values], 0.6, color=colours)
    axes.bar_label(drawn, texts, fontsize=SMALL)
    axes.set_yticks(range(len(runs)), [shortened(run.label, 16) for run in runs])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(plain)
    axes.set_xlim(right=1.9 * axes.get_xlim()[1])  # leaves space for the values
    return png_of(figure)


def curves(runs: list[Run]) -> list[tuple[str, str, bytes]]:
    """Return (name, title, PNG) of the curves and, for several runs, of the bar charts."""
    x = x_axis(runs)
    with style():
        drawn = [(panel.name, panel.title, draw(panel, runs, x)) for panel in panels(runs)]
        if len(runs) > 1:
            over_time = replace(
                LOSS, name="training_loss_over_time", title="Training loss over time"
            )
            drawn.append((over_time.name, over_time.title, draw(over_time, runs, "since_start_s")))
            drawn += [(bars.name, bars.title, draw_bars(bars, runs)) for bars in bars_of(runs)]
    return [(name, title, png) for name, title, png in drawn if png is not None]
