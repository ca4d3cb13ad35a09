"""PNG figures of runs: curves. Matplotlib is imported where it is used."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from train.observe.report.data import number
from train.observe.report.run import Run, Table, known
from train.observe.report.texts import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito: safe for colour-blind eyes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", ":", "-.")  # runs 7 to 12 are dashed, and so on
MARK: Any = {"linestyle": (0, (6, 3)), "lw": 1.2, "color": "#555555"}  # style of reference lines
DOT: Any = {"marker": "o", "linestyle": "", "ms": 5, "mec": "#222222", "mew": 0.8}
DPI = 200
FEW_POINTS = 40  # of a curve with so few points, each is marked
WIDTH = 4.5  # inches: so narrow that in three columns, or on a phone, its text is as large as the page's
HEIGHT = 3.0
ROW = 0.19  # height of a row of a legend
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
    "agg.path.chunksize": 10_000,  # a curve may have any number of points
    "legend.frameon": False,
    "text.parse_math": False,  # a run's name may contain dollar signs
}


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # label of the y axis
    key: str  # key in the metrics lines
    is_validation: bool = False
    is_share: bool = False
    from_zero: bool = True
    spikes: bool = False  # use a logarithmic axis if values differ by more than a factor of 100


X_LABELS = {
    "step": "optimizer step",
    "examples": "sequences consumed",
    "since_start_s": "seconds since the first start",
}
LOSS = Panel("Training and validation loss", "loss (nats)", "loss", from_zero=False)
THROUGHPUT = Panel("Throughput", "tokens per second", "tokens_per_s")
OVER_TIME = replace(LOSS, title="Training loss over time")
PANELS = (  # shown below the panels on quality
    Panel("Learning rate", "learning rate", "lr"),
    Panel("Model FLOP/s utilisation (MFU)", "share of peak FLOP/s", "mfu", is_share=True),
    Panel("Waiting for data", "share of the steps' time", "data_wait_share", is_share=True),
    Panel("Gradient norm", "global L2 norm", "grad_norm", spikes=True),
)


def panels(runs: list[Run]) -> Iterator[Panel]:
    """Yield the panels of these runs, most important first: loss, scores, others."""
    yield LOSS
    for name in {name: None for run in runs for name in run.summary["scores"] if name != "loss"}:
        metric = runs[0].metric(name)
        yield Panel(
            f"Validation {metric.title}",
            metric.title,
            name,
            is_validation=True,
            from_zero=False,
            spikes=metric.sign < 0,
        )
    yield from (THROUGHPUT, *PANELS)


def x_axis(runs: list[Run]) -> str:
    """Return the key of the x axis: sequences if the batch sizes differ and all runs count sequences, else steps."""
    batches = {run.value("plan.global_batch_size") for run in runs}
    are_counted = all(run.train.examples.notna().all() for run in runs)
    if len(batches) > 1 and are_counted:
        return "examples"
    return "step"


def curves(runs: list[Run]) -> list[tuple[str, str]]:
    """Return (title, PNG in base64) of the curves that have a value."""
    wanted = [(panel, x_axis(runs)) for panel in panels(runs)]
    if len(runs) > 1:
        wanted.append((OVER_TIME, "since_start_s"))
    result = []
    with style():
        for panel, x in wanted:
            figure = draw(panel, runs, x)
            if figure is not None:
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png")
                result.append((panel.title, base64.b64encode(buffer.getvalue()).decode()))
    return result


# ---- a figure ------------------------------------------------------------------------------------------------------


def draw(panel: Panel, runs: list[Run], x: str) -> Figure | None:
    """Draw a panel. Return None if no run has a value for it."""
    from matplotlib.figure import Figure

    points = [points_of(run, panel.key, x, panel.is_validation) for run in runs]
    if all(each.empty for each in points):
        return None
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    axes = figure.add_subplot(title=panel.title, xlabel=X_LABELS[x], ylabel=panel.unit)
    for index, (run, each) in enumerate(zip(runs, points, strict=True)):
        name = "training"
        if len(runs) > 1:
            name = shortened(run.label)
        elif panel.is_validation:
            name = "validation"
        marker = ""
        if len(each) <= FEW_POINTS:
            marker = "o"
        # The space matters: Matplotlib omits names that begin with "_" from the legend.
        label = f" {name}"
        axes.plot(
            each.x, each.y, marker=marker, ms=3, clip_on=each.empty, label=label, **look(index)
        )
    if panel.key == "loss":
        add_validation(axes, runs, x)
    if panel.key == "masked_accuracy":
        add_marks(axes, runs, "neighbour_accuracy", "table of neighbouring tokens")
    finish(axes, panel, [y for each in points for y in each.y], last_x(runs, x))
    add_legend(figure, axes, num_columns=3 if len(runs) == 1 else 1)
    return figure


def points_of(run: Run, key: str, x: str, is_validation: bool = True) -> Table:
    """Return the known points of a curve, in the columns x and y."""
    lines = run.evaluations if is_validation else run.train
    # A run of another task lacks the column.
    points = lines.reindex(columns=[x, key]).dropna().reset_index(drop=True)
    return points.set_axis(["x", "y"], axis=1)


def last_x(runs: list[Run], x: str) -> float:
    """Return the right end of the x axis, which all curves share; its left end is 0."""
    end = 0.0
    for run in runs:
        for lines in (run.train, run.evaluations):
            end = max(end, known(lines[x].max()) or 0.0)
    return end or 1.0


def add_validation(axes: Axes, runs: list[Run], x: str) -> None:
    """Draw validation points and unigram entropy on the loss figure, each named once in the legend."""
    has_points = False
    for index, run in enumerate(runs):
        points = points_of(run, "loss", x)
        has_points |= not points.empty
        axes.plot(points.x, points.y, **DOT, color=look(index)["color"], clip_on=points.empty)
    if has_points:
        axes.plot([], [], **DOT, color="#bbbbbb", label=" validation")
    # A loss that includes sentence-order prediction is not comparable with the entropy of tokens.
    of_tokens = [run for run in runs if "sop_loss" not in run.summary["scores"]]
    add_marks(axes, of_tokens, "unigram_entropy", "unigram entropy")


def add_marks(axes: Axes, runs: Iterable[Run], key: str, name: str) -> None:
    """Draw a horizontal line at each distinct value. The legend has one entry for all of them."""
    found = (number(run.environment, key) for run in runs)
    values = {value for value in found if value is not None}
    for value in values:
        axes.axhline(value, **MARK)
    if values:
        axes.plot([], [], **MARK, label=f" {name}")


def finish(axes: Axes, panel: Panel, ys: list[float], end: float) -> None:
    """Set limits and ticks of a panel's axes, given its values `ys` and the end of the x axis."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(plain)
    if panel.spikes and min(ys) > 0 and max(ys) > 100 * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif min(ys) >= 0 and (panel.from_zero or axes.get_ylim()[0] < 0):
        axes.set_ylim(bottom=0)
    if panel.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    else:
        axes.yaxis.set_major_formatter(plain)


def add_legend(figure: Figure, axes: Axes, *, num_columns: int) -> None:
    """Add a legend below the axes if it has more than one entry. A long one must not squeeze the axes."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        figure.legend(loc="outside lower center", ncols=num_columns)
        num_rows = math.ceil(len(names) / num_columns)
        figure.set_figheight(HEIGHT + ROW * num_rows)


# ---- for all figures -----------------------------------------------------------------------------------------------


def plain(value: float, _: float | None = None) -> str:
    return f"{value:,g}"


def look(index: int) -> dict[str, Any]:
    """Return the colour and the dash pattern of a run by its index, the same in every figure."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


@contextmanager
def style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        # Matplotlib draws a box; the HTML shows the name.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield
