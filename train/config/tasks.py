"""Settings of the tasks, one class each. `train.tasks.table` says what else belongs to a task."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from omegaconf import MISSING

from train.config.checks import Section, check, setting
from train.config.data import DataConfig, RecordsConfig, ShardsConfig

EVAL_MASK_RATE = 0.15  # of masked language modelling, as in BERT's pretraining
MOST_QUESTION_TOKENS = 64  # as in BERT's code for SQuAD


@dataclass(frozen=True)
class HeadSize:
    """The output size of a task's head per sequence, from which its FLOPs, parameters and memory are computed."""

    # positions that get a score for each token of the vocabulary
    predictions: int = 0
    # number of these positions in an evaluation
    eval_predictions: int = 0
    # scores per sequence, from a dense layer and a classifier on one token
    labels: int = 0
    # scores per token
    token_labels: int = 0


@dataclass(kw_only=True)
class TaskConfig(Section, prefix="task."):
    """Settings that all tasks share."""

    learns_from: ClassVar[type[DataConfig]] = RecordsConfig
    # The name of the task in train.tasks.TASKS; task=... sets it.
    kind: str = MISSING

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        """Return the size of the head for sequences of `seq_len` tokens; `labels` is 0 before the data is read."""
        raise NotImplementedError


@dataclass(kw_only=True)
class MLMConfig(TaskConfig):
    """Masked language modelling, with n-grams and sentence order as in ALBERT (https://arxiv.org/abs/1909.11942)."""

    learns_from: ClassVar[type[ShardsConfig]] = ShardsConfig
    kind: str = "mlm"
    # The share of a sequence's tokens to predict in training. Evaluations predict 15 %, so that runs can be compared.
    mask_rate: float = setting(0.15, above=0, below=1)
    # The maximum number of consecutive tokens (or whole words) that are masked together; runs of n have a probability
    # proportional to 1/n. A maximum of 1 is BERT's masking.
    max_ngram: int = setting(3, above=0)
    # Mask whole words instead of tokens.
    whole_word: bool = False
    # Also predict the order of two segments. The two losses have the same weight.
    sop: bool = False

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(
            predictions=max(1, round(seq_len * self.mask_rate)),
            eval_predictions=max(1, round(seq_len * EVAL_MASK_RATE)),
            labels=2 if self.sop else 0,
        )


@dataclass(kw_only=True)
class ClassifyConfig(TaskConfig):
    """Classification: one label for a text or a pair of texts."""

    kind: str = "classify"
    # The loss weights of the labels, in their order, such as [1,5,0.5]; balanced computes rows / (labels * rows of the
    # label) from the training data, and None weights all labels equally.
    class_weights: Any = None
    # The share of the target that is spread over all labels.
    label_smoothing: float = setting(0.0, least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.class_weights
        check(
            weights in (None, "balanced") or are_positive(weights, below=inf),
            f"task.class_weights={weights} must be balanced, or numbers above 0, such as [1,5,0.5]",
        )

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(labels=labels or 2)  # each further label costs 6 x hidden size FLOPs


@dataclass(kw_only=True)
class MultiLabelConfig(TaskConfig):
    """Multi-label classification: any number of labels, or none, for a text or a pair of texts."""

    kind: str = "multilabel"
    # The weights in the loss of texts that have a label, one for each label in order; texts without it have weight 1.
    # balanced computes rows without the label / rows with it from the training data; None uses 1.
    positive_weights: Any = None
    # The minimum probability at which a label is predicted, or a list of these, one for each label; best chooses it on
    # the validation data, by micro F1. The export keeps it.
    threshold: Any = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        weights, threshold = self.positive_weights, self.threshold
        check(
            weights in (None, "balanced") or are_positive(weights, below=inf),
            f"task.positive_weights={weights} must be balanced, or a list of numbers above 0",
        )
        check(
            threshold == "best"
            or are_positive(threshold, below=1)
            or are_positive([threshold], below=1),
            f"task.threshold={threshold} must be a number between 0 and 1, a list of these, or best",
        )

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(labels=labels or 2)


@dataclass(kw_only=True)
class RegressConfig(TaskConfig):
    """Regression: a number for a text or a pair of texts.

    The model learns (target - mean) / standard deviation of the training rows; the export predicts in the units of the
    data.
    """

    kind: str = "regress"

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(labels=labels or 1)


@dataclass(kw_only=True)
class NERConfig(TaskConfig):
    """Token classification: a tag for each word, such as B-PER where a name begins, I-PER inside it, O elsewhere."""

    kind: str = "ner"
    # The form of the tags: entities expects O, or a type after B-, I- and so on (IOB2, BIOES, BILOU); none allows
    # others, such as parts of speech, scored per word.
    scheme: str = setting("entities", among=("entities", "none"))

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(token_labels=labels or 9)  # the number of tags in CoNLL-2003


@dataclass(kw_only=True)
class QAConfig(TaskConfig):
    """Question answering with a span of a context, as in SQuAD. Long contexts are read in overlapping windows.

    A question is cut to 64 tokens, or a quarter of a shorter window.
    """

    kind: str = "qa"
    # The number of tokens that two neighbouring windows of a context share.
    stride: int = setting(128, above=0)
    # The maximum number of tokens in an answer of the model.
    max_answer_tokens: int = setting(30, above=0)
    # Allow questions without an answer, as in SQuAD v2.
    unanswerable: bool = False
    # The margin by which "no answer" must outscore the best span to be chosen, in SQuAD v2; None uses 0 in evaluations,
    # and the export keeps the margin with the best F1 on the validation data.
    null_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.null_threshold is None or self.unanswerable,
            "task.null_threshold needs task.unanswerable=true",
        )

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(token_labels=2)


def are_positive(values: Any, *, below: float) -> bool:
    """Return whether `values` is a list of numbers above 0 and below `below`."""
    is_list = isinstance(values, list) and bool(values)
    return is_list and all(type(each) in (int, float) and 0 < each < below for each in values)
