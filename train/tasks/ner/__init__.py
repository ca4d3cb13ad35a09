"""A tag for each word, such as those of named entities: the task's settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import HeadSize, TaskConfig, setting
from train.tasks.spec import LOSS, Metric, TaskSpec


@dataclass(kw_only=True)
class NERConfig(TaskConfig):
    """Token classification: a tag for each word, such as B-PER where a name begins, I-PER inside it, O elsewhere."""

    kind: str = "ner"
    # The form of the tags: entities expects O, or a type after B-, I- and so on (IOB2, BIOES, BILOU); none allows
    # others, such as parts of speech, scored per word.
    scheme: str = setting("entities", among=("entities", "none"))

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(token_labels=labels or 9)  # the number of tags in CoNLL-2003


SPEC = TaskSpec(
    settings=NERConfig,
    module="train.tasks.ner.task",
    head="TokenClassification",
    metrics=(*map(Metric, ("f1", "accuracy", "precision", "recall")), LOSS),
    pipeline="token-classification",
    sentence="It tags each word of a text with one of {labels} tags: {names}.",
    example='"Anna lives in Bonn ."',
    note="The tag of a word is that of its first token.",
    does="tags words",
    inputs={"tokens": "words to tag, separated by spaces"},
)
