"""A tag for each word, as for named entities: the task's settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from train.config import HeadSize, TaskConfig, TrainConfig, check
from train.tasks.spec import CardText, Prediction, Task, TaskSpec

if TYPE_CHECKING:
    from train.tasks.predictor import Predictor


@dataclass(kw_only=True)
class NERConfig(TaskConfig):
    """Token classification: a tag for each word, as B-PER where a person's name begins, I-PER in it, O elsewhere."""

    kind: str = "ner"

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(token_labels=labels or 9)  # as many as CoNLL-2003 has


def check_installed() -> None:
    """InputError without the library of the metrics, before anything is read."""
    check(find_spec("seqeval") is not None, "task=ner needs seqeval: pip install 'baretrain[ner]'")


def build(cfg: TrainConfig) -> Task:
    check_installed()
    from train.tasks.ner.task import NERTask

    return NERTask(cfg)


def predictor() -> type[Predictor]:
    check_installed()
    from train.tasks.ner.predictor import TagPredictor

    return TagPredictor


SPEC = TaskSpec(
    settings=NERConfig,
    build=build,
    head="TokenClassification",
    card=CardText(
        pipeline="token-classification",
        sentence="It gives each word of a text one of {labels} tags: {names}.",
        example='"Anna lives in Bonn ."',
    ),
    headline=("f1",),
    prediction=Prediction(
        does="tags words",
        inputs={"tokens": "words to tag, separated by spaces"},
        predictor=predictor,
    ),
)
