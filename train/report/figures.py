"""The figures of the report, as PNGs. Matplotlib is imported where it is used: reading a run needs none."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from train.config import lower_is_better
from train.report.data import Evaluated, Records, label_names
from train.report.run import Line, Run, number, scores, summarise
from train.storage.folders import sha256_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito: apart for colour-blind eyes
DASHES = ("-", "--", ":", "-.")  # the second six runs are dashed, and so on
MAX_LABELS, MAX_NUMBERED = 40, 12  # labels that a figure names; labels up to which the heat map has numbers
MAX_POINTS = 200  # of a curve: at 600 px more points are noise, which makes PNGs large
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
    value: Callable[[Line], float | None]
    kind: str = "train"
    percent: bool = False
    from_zero: bool = True
    spikes: bool = False  # a logarithmic axis where values differ a hundredfold


def metric(key: str) -> Callable[[Line], float | None]:
    return lambda line: number(line, key)


def waiting_share(line: Line) -> float | None:
    waited, step_s = number(line, "data_wait_s"), number(line, "step_s")
    steps = number(line, "steps")
    return waited / (step_s * steps) if waited is not None and step_s and steps else None


LOSS = Panel("training_loss", "Training and validation loss", "loss (nats)", metric("loss"), from_zero=False)
THROUGHPUT = Panel("tokens_per_second", "Throughput", "tokens per second", metric("tokens_per_s"))
PANELS = (
    LOSS,
    THROUGHPUT,
    Panel("learning_rate", "Learning rate", "learning rate", metric("lr")),
    Panel("mfu", "Model FLOP/s utilisation (MFU)", "share of peak FLOP/s", metric("mfu"), percent=True),
    Panel("padding_share", "Padding", "share of all tokens", metric("padding_share"), percent=True),
    Panel("data_wait_share", "Waiting for data", "share of elapsed time", waiting_share, percent=True),
    Panel("goodput", "Goodput", "share of the time since the first start", metric("goodput"), percent=True),
    Panel("gradient_norm", "Gradient norm", "global L2 norm", metric("grad_norm"), spikes=True),
)


def panels(runs: list[Run]) -> Iterator[Panel]:
    """Yield the panels of these runs, with what readers look for first: loss, throughput, quality."""
    yield from (LOSS, THROUGHPUT)
    yield from eval_panels(runs)
    yield from (panel for panel in PANELS if panel not in (LOSS, THROUGHPUT))


def eval_panels(runs: list[Run]) -> Iterator[Panel]:
    for name in {name: None for run in runs for name in scores(run.lines["eval"]) if name != "loss"}:
        unit, file, spikes = printable(name.replace("_", " ")), file_name("validation", name), lower_is_better(name)
        yield Panel(file, f"Validation {unit}", unit, metric(name), kind="eval", from_zero=False, spikes=spikes)


def file_name(prefix: str, name: str) -> str:
    """The name of a figure's file, without its suffix: the same in every report. A hash keeps names apart that a file
    cannot have in full.
    """
    plain = re.sub(r"[^a-z0-9_]", "_", name)[:60]
    hashed = "" if plain == name else f"_{sha256_bytes(name.encode(errors='surrogatepass'))[:8]}"
    return f"{prefix}_{plain}{hashed}"


def points(lines: list[Line], value: Callable[[Line], float | None], x: str) -> tuple[list[float], list[float]]:
    pairs = [(number(line, x), value(line)) for line in lines]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def x_axis(runs: list[Run]) -> str:
    """Steps; or sequences, if batch sizes differ, so that equal steps are unequal work, and all runs have them."""
    batches = {summarise(run)["global_batch_size"] for run in runs}
    lines = [line for run in runs for kind in ("train", "eval") for line in run.lines[kind]]
    return "examples" if len(batches) > 1 and all(number(line, "examples") is not None for line in lines) else "step"


def printable(text: object) -> str:
    """The text without what a terminal, a figure or UTF-8 cannot show: control and direction marks, lone surrogates."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def labels(runs: list[Run]) -> list[str]:
    """Folder names, with as many parent folders as make them different."""
    for depth in range(1, max(len(run.path.parts) for run in runs) + 1):
        names = [printable(Path(*run.path.parts[-depth:])) for run in runs]
        if len(set(names)) == len(names):
            break
    return names


def look(number: int) -> dict[str, Any]:
    """Colour and dash of a run by its number, the same on every figure."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def curve(axes: Axes, xs: list[float], ys: list[float], *, band: bool, **style: Any) -> None:
    """Draw a line of at most MAX_POINTS means and, so that no spike is lost, a band from lowest to highest value."""
    size = math.ceil(len(xs) / MAX_POINTS) or 1
    groups = [slice(start, start + size) for start in range(0, len(xs), size)]
    middle = [fmean(xs[group]) for group in groups]
    axes.plot(middle, [fmean(ys[group]) for group in groups], marker="o" if len(xs) <= 40 else "", ms=3, **style)
    if band and size > 1:
        lows, highs = [min(ys[group]) for group in groups], [max(ys[group]) for group in groups]
        axes.fill_between(middle, lows, highs, color=style["color"], alpha=0.2, linewidth=0)


def add_validation(axes: Axes, runs: list[Run], x: str) -> None:
    """Draw validation points and unigram entropy on the loss figure, each named once in the legend."""
    has_points = False
    for index, run in enumerate(runs):
        xs, ys = points(run.lines["eval"], metric("loss"), x)
        axes.plot(xs, ys, "o", ms=5, color=look(index)["color"], mec="#222222", mew=0.8)
        has_points = has_points or bool(xs)
    if has_points:
        axes.plot([], [], "o", ms=5, color="#bbbbbb", mec="#222222", mew=0.8, label=" validation")
    # With sentence-order prediction the loss is not only that of the tokens.
    entropies = [None if predicts_order(run) else summarise(run)["unigram_entropy"] for run in runs]
    for index, entropy in enumerate(entropies):
        if entropy is not None and entropy not in entropies[:index]:
            shared = len(set(entropies)) == 1
            axes.axhline(entropy, linestyle=(0, (6, 3)), lw=1.2, color="#555555" if shared else look(index)["color"])
    if any(entropy is not None for entropy in entropies):
        axes.plot([], [], linestyle=(0, (6, 3)), lw=1.2, color="#555555", label=" unigram entropy of the corpus")


def predicts_order(run: Run) -> bool:
    return any("sop_loss" in line for line in run.lines["eval"])


def finish(axes: Axes, panel: Panel, ys: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    def plain(value: float, _: int | None = None) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    if panel.spikes and min(ys) > 0 and max(ys) > 100 * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel.from_zero and min(ys) >= 0:
        axes.set_ylim(bottom=0)
    percent = FuncFormatter(lambda value, _: f"{100 * value:g}%")
    axes.yaxis.set_major_formatter(percent if panel.percent else FuncFormatter(plain))


def draw(panel: Panel, runs: list[Run], x: str) -> bytes | None:
    """The PNG of a panel; None if no run has a value for it."""
    from matplotlib import rc_context

    curves = [points(run.lines[panel.kind], panel.value, x) for run in runs]
    values = [y for _, ys in curves for y in ys]
    if not values:
        return None
    names = labels(runs) if len(runs) > 1 else ["training"]
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box in the legend; the HTML names it in full
        figure, axes = axes_of(panel.title, ylabel=panel.unit)
        axes.set_xlabel("optimizer step" if x == "step" else "sequences consumed")
        for index, (name, (xs, ys)) in enumerate(zip(names, curves, strict=True)):
            label = f" {shortened(name)}"  # the space: a name that begins with "_" would be left out of the legend
            curve(axes, xs, ys, band=len(runs) == 1, label=label, **look(index))
        if panel.name == LOSS.name:
            add_validation(axes, runs, x)
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


# ---- labelled data -------------------------------------------------------------------------------------------------


def data_figures(records: Records) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, title, content) of the PNGs on the data and on the best evaluation."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        if any(split.label_counts for split in records.splits):
            yield "labels_by_split", "Labels", png_of(label_bars(records))
        if any(sum(split.counts) for split in records.splits):
            yield "lengths_by_split", "Lengths", png_of(length_steps(records))
        for evaluated in records.evaluated:
            if evaluated.confusion:
                yield (
                    file_name("confusion", evaluated.name),
                    f"Confusion: {evaluated.name}",
                    png_of(heat_map(evaluated)),
                )


def axes_of(title: str, *, height: float = 3.4, **more: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, height), dpi=200, layout="constrained")
    return figure, figure.add_subplot(title=title, **more)


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
    axes.set_xlim(right=1.15 * axes.get_xlim()[1])  # room for the figures
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
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
        axes.axvline(length, linestyle=(0, (6, 3)), lw=1.2, color="#555555")
    axes.plot([], [], linestyle=(0, (6, 3)), lw=1.2, color="#555555", label=" padded to")
    ticks = [0, *max((split.up_to for split in records.splits), key=len)]
    axes.set_xscale("symlog", base=2, linthresh=ticks[1], linscale=0.5)  # the bins grow with the lengths
    axes.set_xticks(ticks[:: math.ceil(len(ticks) / 12)], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def heat_map(evaluated: Evaluated) -> Figure:
    """The confusion matrix, coloured by the share of the true label's examples; with their number if there is room."""
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
    figure.colorbar(image, format=lambda value, _: f"{100 * value:g}%", shrink=0.8)
    return figure


def shortened(text: str, length: int = 40) -> str:
    """The text, or its beginning and end if it is too long."""
    text, half = printable(text), length // 2
    return text if len(text) <= length else f"{text[: half - 1]}...{text[2 - half :]}"
