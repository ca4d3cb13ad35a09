"""PNG figures of a run's labelled data and of the evaluation in evaluation.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from train.observe.report.data import Evaluated, Records
from train.observe.report.figures import MARK, SMALL, WIDTH, axes_of, look, percent, png_of, style
from train.observe.report.texts import file_name, printable, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A heat map with more labels than this shows no names, or no numbers.
MAX_LABELS = 40
MAX_NUMBERED = 12
ROW, SMALL_ROW = 0.5, 0.17  # height of a row of text in inches, with and without numbers
MAX_SCATTERED = 8  # maximum number of scatter plots per split, one for each target


def data_figures(records: Records) -> Iterator[tuple[str, str, bytes]]:
    """Yield (file name, title, PNG) for each figure of the data and of that evaluation."""
    with style():
        if any(sum(split.counts) for split in records.splits):
            yield "lengths_by_split", "Lengths", png_of(length_steps(records))
        for evaluated in records.evaluated:
            if evaluated.confusion:
                name = file_name("confusion", evaluated.name)
                yield name, f"Confusion: {evaluated.name}", png_of(heat_map(evaluated))
            filled = [(target, pairs) for target, pairs in evaluated.pairs.items() if pairs]
            for number, (target, pairs) in enumerate(filled[:MAX_SCATTERED], 1):
                name = file_name(f"scatter_{number}", evaluated.name)
                title = f"{target}: {evaluated.name}"
                yield name, title, png_of(scatter(title, pairs))


def length_steps(records: Records) -> Figure:
    """Draw a histogram of the row lengths in each split, and the lengths to which batches are padded."""
    figure, axes = axes_of(
        "Lengths", xlabel="tokens, including special tokens", ylabel="share of the split's rows"
    )
    known = [split for split in records.splits if sum(split.counts)]
    for index, split in enumerate(known):
        shares = [value / sum(split.counts) for value in split.counts]
        label = f" {shortened(split.name)}"
        if split.padding_share is not None:
            label += f", {split.padding_share:.1%} padding"
        axes.stairs(shares, [0, *split.up_to], lw=1.6, label=label, **look(index))
    for length in records.lengths:
        axes.axvline(length, **MARK)
    axes.plot([], [], **MARK, label=" padded to")
    ticks = [0, *max((split.up_to for split in known), key=len)]
    # Bins of longer rows are wider.
    axes.set_xscale("symlog", base=2, linthresh=ticks[1], linscale=0.5)
    axes.set_xticks(ticks[:: math.ceil(len(ticks) / 12)], minor=False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(percent)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def heat_map(evaluated: Evaluated) -> Figure:
    """Draw the confusion matrix, coloured by the share of the true label's examples, with numbers if they fit."""
    rows = evaluated.confusion
    shares = [[value / (sum(row) or 1) for value in row] for row in rows]
    has_names, has_numbers = len(rows) <= MAX_LABELS, len(rows) <= MAX_NUMBERED
    size = WIDTH
    if has_names:
        size = max(WIDTH, 2 + len(rows) * (ROW if has_numbers else SMALL_ROW))
    title = f"Confusion: {printable(evaluated.name)}"
    figure, axes = axes_of(title, width=size, height=size - 0.5, xlabel="predicted", ylabel="true")
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.grid(visible=False)
    if has_names:
        names = [shortened(label, 16) for label in evaluated.labels]
        axes.set_xticks(range(len(rows)), names, rotation=90 if len(rows) > 3 else 0, ha="center")
        axes.set_yticks(range(len(rows)), names)
    if has_numbers:
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                colour = "#ffffff" if shares[y][x] > 0.5 else "#1b1f24"
                text = f"{value:,.0f}\n{shares[y][x]:.0%}"
                axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=SMALL)
    figure.colorbar(image, format=percent, shrink=0.8)
    return figure


def scatter(title: str, pairs: list[list[float]]) -> Figure:
    """Draw each row's true and predicted number, and the line where the two are equal."""
    truth = [pair[0] for pair in pairs]
    predicted = [pair[1] for pair in pairs]
    both = [*truth, *predicted]
    ends = [min(both), max(both)]
    name = shortened(title, 40)
    figure, axes = axes_of(name, height=WIDTH - 0.5, xlabel="true", ylabel="predicted")
    axes.plot(ends, ends, **MARK)
    axes.scatter(truth, predicted, s=12, lw=0, alpha=0.5, color=look(0)["color"])
    return figure
