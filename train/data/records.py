"""Examples that are not sharded: a table of `datasets` whose columns have fixed lengths, drawn by number.

Order over ranks as for shards: training by `ShardSampler([len(dataset)], ...)`, evaluation by EvalOrder, whose `merged`
puts results back into the order of the data set, each example once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from train.config import check
from train.data.batches import Batch
from train.data.masking import IGNORE_INDEX
from train.data.order import PADDING

if TYPE_CHECKING:
    from datasets import Dataset

KINDS: dict[str, type] = {"i": np.int64, "u": np.int64, "b": np.int64, "f": np.float32}  # of columns: what tensors hold


class Records:
    """A Drawable (batches.py). `columns` maps names of inputs to columns of the table; `label` is the input that says
    what to learn: one number, or one for each token with IGNORE_INDEX where there is none.
    """

    def __init__(self, dataset: Dataset, columns: Mapping[str, str], *, label: str) -> None:
        missing = sorted(set(columns.values()) - set(dataset.column_names))
        check(not missing, f"the data has no column {', '.join(missing)}; there are {', '.join(dataset.column_names)}")
        check(label in columns, f"the label {label} is none of the inputs {', '.join(columns)}")
        self.columns, self.label = dict(columns), label
        self.dataset = dataset.with_format("numpy", columns=list(columns.values()))

    def __len__(self) -> int:
        return len(self.dataset)

    def draw(self, items: np.ndarray) -> Batch:
        """Tensors [K, B, ...], int64 or float32, of items [K, B] (`epoch * len + row`); PADDING has no label.

        Raises InputError for columns whose rows differ in length: pad them to a fixed one when preparing.
        """
        is_padding = items == PADDING
        rows = np.where(is_padding, 0, items % len(self))
        found = self.dataset[rows.ravel().tolist()]
        inputs: dict[str, np.ndarray] = {}
        for name, column in self.columns.items():
            values = np.asarray(found[column])
            check(values.dtype.kind in KINDS, f"column {column} has rows of different lengths; pad them to a fixed one")
            inputs[name] = values.astype(KINDS[values.dtype.kind]).reshape(*items.shape, *values.shape[1:])
        labels = inputs[self.label]
        labels[is_padding] = IGNORE_INDEX
        counts = (labels != IGNORE_INDEX).reshape(len(items), -1).sum(1)
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        return {"inputs": tensors, "count": counts.tolist()}
