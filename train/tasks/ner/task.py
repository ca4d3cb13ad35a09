"""A tag for each word of a sentence: features, loss and evaluation.

Shapes: B sentences, S tokens, M tokens of the longest batches, C tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import List
from torch import Tensor, nn

from train.config import TrainConfig
from train.data.batches.masking import IGNORE_INDEX
from train.data.files.errors import BadRow
from train.data.records.kinds import NUMBERS, STRING, Row, RowKind
from train.data.records.table_facts import column
from train.data.records.token_rows import Lists
from train.models.heads import PaddedEncoder, logits_of
from train.tasks.finetune import FineTuning, Split, json_lines
from train.tasks.ner import scores
from train.tasks.texts import Sizes, TextFeaturizer, second_at
from train.tasks.topk import topk

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

METRICS = ("loss", *scores.NAMES)
COLUMNS = {"labels": "labels"}  # input of a batch: column of the features
OUTSIDE = "O"  # the tag of words that are in no entity
TAG = re.compile(r"O|[BIES]-\S+")


class TokenClassifier(PaddedEncoder):
    """A tag for each token: logits [B, S, C]."""

    head, head_share = "TokenClassification", 1.0


# ---- words to tokens -----------------------------------------------------------------------------------------------


def read_words(row: Row) -> dict[str, list[str]]:
    return {"tokens": row.texts("tokens")}


def check_tag(tag: str) -> None:
    if not TAG.fullmatch(tag):
        raise BadRow(f"the tag {tag[:40]} is neither O nor a type behind B- or I-, as B-PER; see data.label_map")


NER_ROWS = RowKind(
    "ner",
    columns={"tokens": List(STRING), "tags": List(STRING)},
    read=read_words,
    target="tags",
    check_each=check_tag,
    split_by="tokens",
    tokens={
        "labels": NUMBERS,  # of each token: its word's tag, or IGNORE_INDEX behind the first token of a word
        "words": NUMBERS,  # the numbers of the words that have a label here
    },
)


class NERFeaturizer(TextFeaturizer):
    """Words to tokens, truncated to `seq_len`: the first token of a word has its tag. See `Featurizer`.

    Words are joined by spaces, as any tokenizer saw text when its model was trained.
    """

    kind = NER_ROWS

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int) -> None:
        super().__init__(tokenizer)
        self.settings: dict[str, Any] = {"version": 1, "seq_len": seq_len}

    def features(self, rows: dict[str, list], indices: list[int], *, split: str) -> dict[str, list]:
        """The features of rows of `tokens` and `tags`, which become 0 in rows to predict."""
        sentences = rows["tokens"]
        tags = rows.get("tags", [[0] * len(words) for words in sentences])
        encoded = self.tokenizer(
            [" ".join(words) for words in sentences],
            truncation=True,
            max_length=self.settings["seq_len"],
            split_special_tokens=True,
            verbose=False,
        ).encodings
        labels, numbers = [], []
        for encoding, words, tags_of_words in zip(encoded, sentences, tags, strict=True):
            read, tokens = first_tokens(encoding, words)
            labels.append(np.full(len(encoding.ids), IGNORE_INDEX))
            labels[-1][tokens] = np.array(tags_of_words)[read]
            numbers.append(read)
            self.count(split, truncated=bool(encoding.overflowing), words_without_tokens=len(words) - len(read))
        return {
            "input_ids": [self.ids(encoding) for encoding in encoded],
            "second_at": [second_at(encoding) for encoding in encoded],
            "length": [len(encoding.ids) for encoding in encoded],
            "row": list(indices),
            "labels": labels,
            "words": numbers,
        }


def first_tokens(encoding: Encoding, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the words that have tokens, rising, and the first token of each. Words behind the end of a
    truncated sentence have none, nor have those whose characters the tokenizer drops.
    """
    sequences = encoding.sequence_ids
    first = sequences.index(0) if 0 in sequences else 0
    offsets = np.array(encoding.offsets[first : first + sequences.count(0)]).reshape(-1, 2)
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    begins = ends - [len(word) for word in words]
    # A token may begin with the space before its word: the first one that ends inside the word is meant.
    tokens = np.searchsorted(offsets[:, 1], begins, side="right")
    begins_of_tokens = np.append(offsets[:, 0], np.iinfo(np.int64).max)[tokens]
    read = np.flatnonzero(begins_of_tokens < ends)
    tokens, kept = np.unique(tokens[read], return_index=True)  # a token of two words is the first one's
    return read[kept], tokens + first


# ---- scores to tags ------------------------------------------------------------------------------------------------


def statistics(logits: Tensor, labels: Tensor, longest: int) -> Tensor:
    """[B, 1 + 2 * M] float32: loss, the tag of each token and its probability, of logits [B, S, C] and labels [B, S].
    `longest` is M.
    """
    logits = logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    tags, shares = topk(logits)[1].squeeze(-1), logits.softmax(-1).amax(-1)
    padding = (0, longest - labels.size(1))
    return torch.cat([losses.view(labels.shape).sum(1, keepdim=True), F.pad(tags, padding), F.pad(shares, padding)], 1)


def tagged(
    rows: np.ndarray, features: Dataset, sentences: Sequence[Sequence[Any]], labels: Sequence[str]
) -> Iterator[tuple[list[str], list[float]]]:
    """The tag of each word and its probability, by the statistics [sentences, 1 + 2 * M] of features; O with a
    probability of 0 for words without a token. `sentences`: something for each word of each of them.
    """
    arrow = features.with_format("arrow")[:]
    every = np.arange(len(features))
    targets, words = (Lists(arrow.column(name)).take(every) for name in ("labels", "words"))
    tags_of_tokens, shares_of_tokens = np.split(rows[:, 1:], 2, axis=1)
    for row, sentence in enumerate(sentences):
        tags, shares = [OUTSIDE] * len(sentence), [0.0] * len(sentence)
        for word, token in zip(words[row], np.flatnonzero(targets[row] != IGNORE_INDEX), strict=True):
            tags[word], shares[word] = labels[int(tags_of_tokens[row, token])], float(shares_of_tokens[row, token])
        yield tags, shares


# ---- the task ------------------------------------------------------------------------------------------------------


class NERTask(FineTuning):
    """See `train.tasks.Task`."""

    model_kind = TokenClassifier

    def __init__(self, cfg: TrainConfig) -> None:
        sizes = Sizes.of(cfg)
        featurizer = NERFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len)
        super().__init__(cfg, sizes, featurizer, train_columns=COLUMNS, eval_columns=COLUMNS, metrics=METRICS)

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The loss summed over the words."""
        logits = logits_of(model, inputs).flatten(0, 1).float()
        return F.cross_entropy(logits, inputs["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """See `statistics`."""
        return statistics(logits_of(model, inputs), inputs["labels"], self.seq_len)

    def tags(self, split: Split, rows: np.ndarray) -> tuple[Dataset, list[list[str]], list[list[str]]]:
        """The sentences of a split, the right tags of their words, and the model's."""
        examples = self.tables.examples(split.name).select(column(split.features, "row"))
        truth = [[self.labels[number] for number in numbers] for numbers in examples["tags"]]
        return examples, truth, [tags for tags, _ in tagged(rows, split.features, truth, self.labels)]

    def evaluate(self, rows: np.ndarray) -> dict[str, dict[str, float]]:
        metrics = {}
        for split in self.splits:
            part = split.of(rows)
            _, truth, predicted = self.tags(split, part)
            num_labels = max(1, int((column(split.features, "labels") != IGNORE_INDEX).sum()))
            loss = float(part[:, 0].sum(dtype=np.float64)) / num_labels
            metrics[split.name] = {"loss": loss, **scores.summary(truth, predicted)}
        return metrics

    def results(
        self, split: Split, rows: np.ndarray, metrics: dict[str, dict[str, float]]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """A line for each sentence, and the table of each type of entity."""
        examples, truth, predicted = self.tags(split, rows)
        values = zip(examples["id"], examples["tokens"], truth, predicted, strict=True)
        lines = (dict(zip(("id", "tokens", "tags", "prediction"), each, strict=True)) for each in values)
        return {f"{split.name}.jsonl": json_lines(lines)}, scores.tables(truth, predicted)
