"""What is worth knowing about prepared examples: lengths, padding, classes. Lengths are in tokens, special ones too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

QUANTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "longest": 1.0}  # shares of rows that are as short
SHORTEST_EDGE = 4
SHOWN_LABELS = 10
STEP = 16  # suggested lengths are multiples of it, as matrix units like them


def column(table: Dataset, name: str) -> np.ndarray:
    """[rows]: a column of numbers; of lists of numbers, those of all rows in one."""
    values = table.select_columns(name).with_format("arrow")[:].column(name).combine_chunks()
    numbers: np.ndarray = (values.flatten() if hasattr(values.type, "value_type") else values).to_numpy()
    return numbers


def facts_of_split(
    examples: Dataset, features: Dataset, *, target: str, labels: Sequence[str], seq_len: int, notes: dict[str, float]
) -> dict[str, Any]:
    """What tables.json and the report say of rows and what was made of them. `target`: the column of the labels."""
    lengths = column(features, "length")
    counts = np.bincount(column(examples, target), minlength=len(labels)).tolist() if labels else []
    return {
        "examples": len(examples),
        "rows": len(features),
        "tokens": int(lengths.sum()),
        "label_counts": dict(zip(labels, counts, strict=True)),
        "length_quantiles": {
            name: int(np.quantile(lengths, share, method="higher")) for name, share in QUANTILES.items()
        },
        "length_histogram": length_histogram(lengths, seq_len),
        "padding_share": round(padding_share(lengths, [seq_len]), 6),
        "notes": notes,
    }


def untrained_labels(label_counts: dict[str, int]) -> str:
    """Return a line about the labels that no training row has; empty if there is none."""
    names = [name for name, count in label_counts.items() if not count]
    more = ", ..." if len(names) > SHOWN_LABELS else ""
    return (
        f"no training row has the label {', '.join(names[:SHOWN_LABELS])}{more}: it cannot be learnt" if names else ""
    )


def length_histogram(lengths: np.ndarray, seq_len: int) -> dict[str, list[int]]:
    """counts[i] rows are longer than up_to[i - 1] and at most up_to[i] tokens, which are 4, 6, 8, 12, 16, ...: powers
    of two and what is halfway between, up to seq_len.
    """
    powers = [SHORTEST_EDGE * 2**number for number in range(seq_len.bit_length())]
    edges = [edge for power in powers for edge in (power, power + power // 2) if edge < seq_len]
    edges.append(seq_len)
    counts = np.bincount(np.searchsorted(edges, lengths), minlength=len(edges))
    return {"up_to": edges, "counts": counts.tolist()}


def padding_share(lengths_of_rows: np.ndarray, lengths: Sequence[int]) -> float:
    """Share of padding in batches where each row is padded to the first of the rising `lengths` that it fits into."""
    padded = np.asarray(lengths)[np.searchsorted(lengths, lengths_of_rows)].sum()
    return 1 - float(lengths_of_rows.sum() / padded)


def best_lengths(lengths_of_rows: np.ndarray, seq_len: int, num_lengths: int) -> list[int]:
    """At most `num_lengths` lengths with the least padding: seq_len the last, the others multiples of STEP."""
    rows_up_to = np.cumsum(np.bincount(lengths_of_rows, minlength=seq_len + 1))

    def padded(lengths: Sequence[int]) -> int:
        rows = np.diff(rows_up_to[list(lengths)], prepend=0)
        return int(rows @ np.asarray(lengths))

    shorter = range(STEP, seq_len, STEP)
    choices = ([*some, seq_len] for some in combinations(shorter, min(num_lengths - 1, len(shorter))))
    best = min(choices, key=padded)
    used = np.diff(rows_up_to[best], prepend=0) > 0
    return [length for length, has_rows in zip(best, used, strict=True) if has_rows or length == seq_len]
