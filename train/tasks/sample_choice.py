"""Which validation examples become samples of what a model learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from train.run_folder.samples import Sample

CANDIDATES = 4  # examples that the model answers for each sample that is shown
MOST_CHARS_READ = 20_000  # of all of them, which bounds the time


def spread(num_rows: int, most: int) -> np.ndarray:
    """The numbers of at most so many rows, from the first to the last."""
    return np.unique(np.linspace(0, num_rows - 1, most).astype(np.int64))


def candidates(examples: Dataset, most: int, *, target: str, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of the whole table, as `train.data.records.raw.read_texts` returns them, without those that are too long."""
    num_chars = 0
    for row in examples.select(spread(len(examples), CANDIDATES * most)):
        chars = sum(len(str(value)) for value in row.values() if isinstance(value, str | list))
        if num_chars + chars <= MOST_CHARS_READ:
            num_chars += chars
            value = row[target]
            if labels:
                value = [labels[each] for each in value] if isinstance(value, list) else labels[value]
            yield {**row, target: value}


def mixed(answered: Sequence[Sample], most: int) -> list[Sample]:
    """The first so many, up to half of them wrong ones if there are, in their order."""
    is_right = np.array([sample.answers[0].score == 1 for sample in answered], bool)
    num_wrong = min((~is_right).sum(), max(most // 2, most - is_right.sum()))
    chosen = [*np.flatnonzero(~is_right)[:num_wrong], *np.flatnonzero(is_right)[: most - num_wrong]]
    return [answered[number] for number in sorted(chosen)]
