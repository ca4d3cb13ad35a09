"""A tag for each word of a sentence: features, loss, metrics and predictions.

Metrics come from seqeval, which follows CoNLL's script conlleval: an entity is right if its first word, its last word
and its type are right. seqeval is imported by the first evaluation: with scikit-learn this takes a second, which must
not delay the first step. Tags that are not entities (task.scheme=none) are scored per word.

Shapes: B sentences, S tokens, M tokens of the longest batches, C tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, List
from torch import Tensor

from train.config import check
from train.config.tasks import NERConfig
from train.data.batches.masking import IGNORE_INDEX
from train.data.files.errors import BadRow
from train.data.records.conll import TAG
from train.data.records.featurizer import Featurizer
from train.data.records.kinds import NUMBERS, STRING, RowKind
from train.data.records.row import Row
from train.data.records.spans import words_of
from train.data.records.table_facts import column
from train.data.records.token_rows import Lists
from train.models.heads import names_of_head
from train.tasks.finetune import Entry, TextTask, examples_of, known, table_of
from train.tasks.texts import Sizes
from train.tasks.topk import topk

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

BIOES = {"L": "E", "U": "S"}  # BILOU's prefixes that seqeval lacks, and their equivalents in BIOES
NAMES = ("precision", "recall", "f1", "accuracy")
Tags = Sequence[list[str]]  # tags of the words of each sentence


# ---- words to tokens -----------------------------------------------------------------------------------------------


def check_tag(tag: str) -> None:
    if not TAG.fullmatch(tag):
        raise BadRow(
            f"the tag {tag[:40]} is neither O nor a type with a prefix, such as B-PER; map it with data.label_map, or "
            "set task.scheme=none for other tags"
        )


def read_words(row: Row) -> dict[str, Any]:
    """Return the words of a row. If it has a text in their place, the spans in the column of tags become tags."""
    column = str(row.columns["tags"])
    spans = None
    if row.has("tags"):
        spans = row.value("tags")
    are_tags = isinstance(spans, list) and any(isinstance(each, str) for each in spans)
    if are_tags or not isinstance(row.value("tokens"), str):
        return {"tokens": row.texts("tokens")}
    given = [] if spans is None else spans
    words, tags = words_of(row.text("tokens"), given, column)
    if not words:
        raise BadRow(f"an empty {row.columns['tokens']}")
    if spans is not None:
        row.values = {**row.values, column: tags}
    return {"tokens": words}


def ner_rows(scheme: str) -> RowKind:
    """Return the kind of rows with words and tags."""
    return RowKind(
        "ner",
        columns={"tokens": List(STRING), "tags": List(STRING)},
        read=read_words,
        target="tags",
        check_each=check_tag if scheme == "entities" else lambda _: None,
        split_by="tokens",
        tokens={
            "labels": NUMBERS,  # the tag of the word that a token begins; IGNORE_INDEX if it begins none
            "words": NUMBERS,  # the indices of the words that have a label
        },
    )


class NERFeaturizer(Featurizer):
    """Words as tokens, truncated to `seq_len`. The first token of a word has the word's tag.

    Words are joined by spaces, because models were trained on running text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int, scheme: str = "entities"
    ) -> None:
        if scheme == "entities":
            settings = {}
        else:
            settings = {"scheme": scheme}
        super().__init__(tokenizer, seq_len=seq_len, **settings)
        self.kind = ner_rows(scheme)

    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        sentences = rows["tokens"]
        tags = rows.get("tags", [[0] * len(words) for words in sentences])
        texts = [" ".join(words) for words in sentences]
        encoded = self.encode(texts, truncation=True).encodings
        self.count_cut(split, encoded, texts)
        labels = []
        numbers = []
        for encoding, words, tags_of_words in zip(encoded, sentences, tags, strict=True):
            read, tokens = first_tokens(encoding, words)
            of_tokens = np.full(len(encoding.ids), IGNORE_INDEX)
            of_tokens[tokens] = np.array(tags_of_words)[read]
            labels.append(of_tokens)
            numbers.append(read)
            self.count(split, words_without_tokens=len(words) - len(read))
        columns = self.columns(split, encoded, indices)
        return {**columns, "labels": labels, "words": numbers}


def first_tokens(encoding: Encoding, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the words that have tokens, ascending, and the index of each such word's first token.

    Truncated words, and words whose characters the tokenizer drops, have no tokens.
    """
    sequences = encoding.sequence_ids
    first = 0
    if 0 in sequences:
        first = sequences.index(0)
    end = first + sequences.count(0)
    offsets = np.array(encoding.offsets[first:end]).reshape(-1, 2)
    lengths = np.array([len(word) for word in words])
    ends = np.cumsum(lengths + 1) - 1
    begins = ends - lengths
    # A token may begin with the space before its word, so the first token that ends inside the word counts.
    tokens = np.searchsorted(offsets[:, 1], begins, side="right")
    begins_of_all = np.append(offsets[:, 0], np.iinfo(np.int64).max)
    read = np.flatnonzero(begins_of_all[tokens] < ends)
    # a token that spans two words belongs to the first
    tokens, kept = np.unique(tokens[read], return_index=True)
    return read[kept], tokens + first


# ---- the task ------------------------------------------------------------------------------------------------------


class TokenClassification(TextTask):
    """A tag for each word.

    A prediction is {"id", "tokens", "tags" (if known), "prediction": [tag of each word], "entities": [{"type", "text",
    "first", "last", "probability"}]}. `first` and `last` are indices of words; `probability` is the mean over words.
    """

    columns = {"labels": "labels"}

    def __init__(self, cfg: NERConfig, sizes: Sizes) -> None:
        # This fails before anything is read, rather than in the first evaluation.
        check(
            find_spec("seqeval") is not None,
            "task=ner needs seqeval: pip install 'baretrain[ner]'",
        )
        super().__init__(cfg, sizes)
        self.use_scheme(cfg.scheme)

    def use_scheme(self, scheme: str) -> None:
        self.has_entities = scheme == "entities"
        self.featurizer = NERFeaturizer(
            self.sizes.tokenizer, seq_len=self.sizes.seq_len, scheme=scheme
        )
        self.metric_names = ("loss", "accuracy")
        self.csv_columns = ["id", "tokens", "prediction"]
        if self.has_entities:
            self.metric_names = ("loss", *NAMES)
            self.csv_columns.append("entities")

    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            inputs["labels"].flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )

    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 1 + 2 * M]: the loss, the tag of each token, and its probability.
        logits = logits.float()
        labels = inputs["labels"]
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        loss = losses.view(labels.shape).sum(1, keepdim=True)
        _, best = topk(logits)
        shares = logits.softmax(-1).amax(-1)
        padding = (0, self.sizes.lengths[-1] - labels.size(1))
        of_tokens = [F.pad(best.squeeze(-1), padding), F.pad(shares, padding)]
        return torch.cat([loss, *of_tokens], 1)

    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        truth, predicted = self.tags(examples, features, statistics)
        has_label = column(features, "labels") != IGNORE_INDEX
        total = float(statistics[:, 0].sum(dtype=np.float64))
        loss = total / max(1, int(has_label.sum()))
        metrics = scores(truth, predicted, has_entities=self.has_entities)
        return {"loss": loss, **metrics}

    def tags(self, examples: Dataset, features: Dataset, statistics: np.ndarray) -> list[Tags]:
        """Return the right tags of the words of the features' sentences, and the predicted tags."""
        numbers = examples_of(examples, features)["tags"]
        truth = [[self.labels[number] for number in sentence] for sentence in numbers]
        return [truth, [tags for tags, _ in self.tagged(statistics, features, truth)]]

    def tagged(
        self, rows: np.ndarray, features: Dataset, sentences: Iterable[Sequence[Any]]
    ) -> Iterator[tuple[list[str], list[float]]]:
        """Yield the tags and probabilities of the words of `sentences`, from statistics [sentences, 1 + 2 * M].

        A word without a token gets O ("" if tags are not entities) and probability 0.
        """
        unread = "O" if self.has_entities else ""
        arrow = features.with_format("arrow")[:]
        every = np.arange(len(features))
        labels = Lists(arrow.column("labels")).take(every)
        words_read = Lists(arrow.column("words")).take(every)
        tags_of_tokens, shares_of_tokens = np.split(rows[:, 1:], 2, axis=1)
        for row, sentence in enumerate(sentences):
            num_words = len(sentence)
            tags = [unread] * num_words
            shares = [0.0] * num_words
            first_tokens_of_words = np.flatnonzero(labels[row] != IGNORE_INDEX)
            for word, token in zip(words_read[row], first_tokens_of_words, strict=True):
                tag = int(tags_of_tokens[row, token])
                tags[word] = self.labels[tag]
                shares[word] = float(shares_of_tokens[row, token])
            yield tags, shares

    def scores_by_name(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, Any]:
        truth, predicted = self.tags(examples, features, statistics)
        if self.has_entities:
            return tables(truth, predicted)
        return table_of_tags(truth, predicted, self.labels)

    # ---- predictions -----------------------------------------------------------------------------------------------

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        labels = names_of_head(config)
        if not any(map(TAG.fullmatch, labels)):
            self.use_scheme("none")
        strange = [label for label in labels if not TAG.fullmatch(label)]
        check(
            not (self.has_entities and strange),
            f"{source} must predict tags such as O, B-PER and I-PER; it has {', '.join(strange[:3])}",
        )
        return labels

    def row_of(self, texts: dict[str, str]) -> dict[str, Any]:
        return {"tokens": texts["tokens"].split()}

    def predictions(
        self, rows: Iterable[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        rows = list(rows)
        answers = self.tagged(statistics, features, [row["tokens"] for row in rows])
        for row, (tags, shares) in zip(rows, answers, strict=True):
            line = known(row, "id", "tokens", "tags")
            line["prediction"] = tags
            if self.has_entities:
                line["entities"] = list(described(row["tokens"], tags, shares))
            yield line

    def in_words(self, row: Entry, answer: Any) -> str:
        pairs = zip(row["tokens"], answer, strict=True)
        return " ".join(f"{word}/{tag}" for word, tag in pairs if tag != "O")


def scores(truth: Tags, predicted: Tags, *, has_entities: bool) -> dict[str, float]:
    """Return precision, recall and F1 over the entities of all types, and the accuracy over words."""
    from seqeval.metrics.sequence_labeling import accuracy_score, precision_recall_fscore_support

    truth = bioes(truth)
    predicted = bioes(predicted)
    if not has_entities:
        return {"accuracy": float(accuracy_score(truth, predicted))}
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, predicted, average="micro", zero_division=0
    )
    return {
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "accuracy": float(accuracy_score(truth, predicted)),
    }


# ---- tags to entities ----------------------------------------------------------------------------------------------


def tables(truth: Tags, predicted: Tags) -> dict[str, Any]:
    """Return precision, recall, F1 and support for each entity type in truth or predictions."""
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    types = sorted({kind for tags in (*truth, *predicted) for kind, _, _ in entities(tags)})
    if not types:
        return {"labels": [], "per_class": {}}
    scores = precision_recall_fscore_support(
        bioes(truth), bioes(predicted), average=None, zero_division=0
    )
    return {"labels": types, "per_class": table_of(types, scores)}


def table_of_tags(truth: Tags, predicted: Tags, names: Sequence[str]) -> dict[str, Any]:
    """Return precision, recall (the accuracy on the tag's words), F1 and support for each tag, over all words."""
    from sklearn.metrics import precision_recall_fscore_support

    flat = [[tag for tags in sentences for tag in tags] for sentences in (truth, predicted)]
    scores = precision_recall_fscore_support(*flat, labels=list(names), zero_division=0)
    return {"labels": list(names), "per_class": table_of(names, scores)}


def bioes(sentences: Tags) -> Tags:
    """Return tags with BILOU's prefixes replaced, for seqeval."""
    return [[BIOES.get(tag[0], tag[0]) + tag[1:] for tag in tags] for tags in sentences]


def described(words: Sequence[str], tags: list[str], shares: list[float]) -> Iterator[Entry]:
    """Yield each entity of a sentence as a prediction has it. `shares`: the probabilities of the tags."""
    for kind, first, last in entities(tags):
        inside = slice(first, last + 1)
        yield {
            "type": kind,
            "text": " ".join(words[inside]),
            "first": first,
            "last": last,
            "probability": float(np.mean(shares[inside])),
        }


def entities(tags: list[str]) -> list[tuple[str, int, int]]:
    """Return each entity of a sentence: its type, and the indices of its first and its last word."""
    from seqeval.metrics.sequence_labeling import get_entities

    found: list[tuple[str, int, int]] = get_entities(*bioes([tags]))
    return found
