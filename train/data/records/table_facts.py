"""Facts about prepared examples: lengths, padding, classes. Lengths are in tokens, including special ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

# The share of rows up to each length.
QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "longest": 1.0}
SHORTEST_EDGE = 4
STEP = 16  # tokens; lengths are multiples of this, which suits matrix units
LEAST_GAIN = 0.01  # share of computed tokens that one more length must save; each one makes batches less mixed
MOST_GRAPHS = 3  # maximum number of lengths from data.lengths=auto if each needs a compiled graph


def column(table: Dataset, name: str) -> np.ndarray:
    """Return a column of numbers, [rows]. If it has lists of numbers, they are concatenated."""
    values = table.select_columns(name).with_format("arrow")[:].column(name).combine_chunks()
    if hasattr(values.type, "value_type"):
        values = values.flatten()
    numbers: np.ndarray = values.to_numpy()
    return numbers


def facts_of_split(
    examples: Dataset,
    features: Dataset,
    *,
    target: str,
    labels: Sequence[str],
    seq_len: int,
    notes: dict[str, float],
) -> dict[str, Any]:
    """Return a split's facts for tables.json and the report. `target`: the column of the labels in `examples`."""
    lengths = column(features, "length")
    counts: list[int] = []
    if labels:
        counts = np.bincount(column(examples, target), minlength=len(labels)).tolist()
    quantiles = np.quantile(lengths, list(QUANTILES.values()), method="higher").tolist()
    return {
        "examples": len(examples),
        "rows": len(features),
        "tokens": int(lengths.sum()),
        "label_counts": dict(zip(labels, counts, strict=True)),
        "length_quantiles": dict(zip(QUANTILES, map(int, quantiles), strict=True)),
        "length_histogram": length_histogram(lengths, seq_len),
        "padding_share": round(padding_share(lengths, [seq_len]), 6),
        "notes": notes,
    }


def cut_words(*, rows: int, tokens: int, notes: Mapping[str, float], seq_len: int) -> str:
    """Return a sentence about rows cut at `seq_len` and their lost tokens; "" if none. `tokens`: the rows' tokens."""
    num_cut = int(notes.get("truncated", 0))
    lost = int(notes.get("tokens_cut", 0))
    loss = f"{lost:,} of {tokens + lost:,} tokens ({lost / max(1, tokens + lost):.1%}) are lost"
    if num_cut:
        return f"{num_cut:,} of {rows:,} rows are cut at {seq_len} tokens: {loss}"
    return ""


def length_histogram(lengths: np.ndarray, seq_len: int) -> dict[str, list[int]]:
    """Return row counts by length: counts[i] rows have more than up_to[i - 1] and at most up_to[i] tokens.

    `up_to` is 4, 6, 8, 12, 16, ...: powers of two and the midpoints between them, up to seq_len.
    """
    powers = [SHORTEST_EDGE * 2**number for number in range(seq_len.bit_length())]
    edges = [edge for power in powers for edge in (power, power + power // 2) if edge < seq_len]
    edges.append(seq_len)
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
    return {"up_to": edges, "counts": counts.tolist()}


def padding_share(lengths_of_rows: np.ndarray, lengths: Sequence[int]) -> float:
    """Return the share of padding tokens if each row is padded to the first of the ascending `lengths` that fits."""
    padded = np.asarray(lengths)[np.searchsorted(lengths, lengths_of_rows)].sum()
    return 1 - float(lengths_of_rows.sum() / padded)


def best_lengths(
    lengths_of_rows: np.ndarray,
    longest: int,
    most: int,
    *,
    step: int = STEP,
    shortest: int = 1,
    enough: float = 0.0,
) -> list[int]:
    """Return the fewest ascending lengths with a padding share of at most `enough`, or else the best `most` lengths.

    The last length is `longest`; the others are multiples of `step` and at least `shortest`. There are fewer than
    `most` if one more would save less than LEAST_GAIN.
    """
    choices = np.array([*range(-(-shortest // step) * step, longest, step), longest])
    rows_up_to = np.cumsum(np.bincount(lengths_of_rows.clip(0, longest), minlength=longest + 1))[
        choices
    ]
    # computed tokens of the rows up to each choice, if it is the last length
    padded = choices * rows_up_to
    # [before, last]: True if `before` is longer than `last`
    is_behind = np.tri(len(choices), k=-1, dtype=bool)
    # for each added length, the index of the best length before each choice
    ways: list[np.ndarray] = []
    while len(ways) + 1 < most and padded[-1] * (1 - enough) > lengths_of_rows.sum():
        totals = padded[:, None] + choices * (rows_up_to - rows_up_to[:, None])
        totals[is_behind] = np.iinfo(np.int64).max
        if totals[:, -1].min() > padded[-1] * (1 - LEAST_GAIN):
            break
        ways.append(totals.argmin(0))
        padded = totals.min(0)
    used = [len(choices) - 1]
    for before in reversed(ways):
        used.append(int(before[used[-1]]))
    best = sorted(set(used))
    has_rows = np.diff(rows_up_to[best], prepend=0) > 0
    has_rows[-1] = True
    return choices[best][has_rows].tolist()
