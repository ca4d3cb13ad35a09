"""The table of tasks, which can be read without torch.

A task is a class of settings in `train.config.tasks`, a module in this folder with its class, and an entry of TASKS.
The module needs torch and is imported only if a run has the task. No module of this folder that the table names is
imported here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from train.config import RecordsConfig, TaskConfig, TrainConfig, check
from train.config.tasks import (
    ClassifyConfig,
    MLMConfig,
    MultiLabelConfig,
    NERConfig,
    QAConfig,
    RegressConfig,
)
from train.tasks.spec import LOSS, Metric, Task, TaskSpec

QA_CODE = """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{model}")
model = AutoModelForQuestionAnswering.from_pretrained("{model}")
question, context = "Who wrote it?", "It was written by somebody."
inputs = tokenizer(question, context, truncation="only_second", return_tensors="pt")
with torch.no_grad():
    output = model(**inputs)
first, last = output.start_logits.argmax(), output.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))"""
QA_NOTE = """baretrain predict reads long contexts in windows, and takes the span with the highest sum of two logits.
There is no answer if the sum for the first token is higher by more than the threshold, which Training lists."""
TEXTS = {"text": "text to label or score", "text_pair": "second text, for a model of pairs"}

TASKS: dict[str, TaskSpec] = {
    "mlm": TaskSpec(
        settings=MLMConfig,
        module="train.tasks.mlm:MaskedLMTask",
        head="MaskedLM",
        metrics=(
            # With sentence-order prediction, "loss" is the sum of "mlm_loss" and "sop_loss".
            replace(LOSS, name="mlm_loss", hub_name="loss"),
            replace(LOSS, hub_name="loss"),
            replace(LOSS, name="sop_loss", hub_name="loss"),
            Metric("masked_accuracy", hub_name="accuracy"),
            Metric("perplexity", higher_is_better=False),
            Metric("sop_accuracy", hub_name="accuracy"),
        ),
        pipeline="fill-mask",
        sentence="It fills in masked tokens, and is a starting point for fine-tuning.",
        example='f"It fills in {pipe.tokenizer.mask_token} tokens."',
        card_settings=(("Masked tokens", "task.mask_rate"),),
    ),
    "classify": TaskSpec(
        settings=ClassifyConfig,
        module="train.tasks.classify:Classification",
        head="SequenceClassification",
        metrics=(
            Metric("f1_macro", hub_name="f1"),
            Metric("f1_weighted", hub_name="f1"),
            Metric("accuracy"),
            Metric("matthews_correlation"),
            Metric("f1"),  # F1 of the second label, if there are two labels
            LOSS,
        ),
        pipeline="text-classification",
        sentence="It labels a text, or a pair of texts, with one of {labels} labels: {names}.",
        example='"A text.", truncation=True',
        card_settings=(
            ("Label smoothing", "task.label_smoothing"),
            ("Class weights", "task.class_weights"),
        ),
        inputs=TEXTS,
        optional=("text_pair",),
    ),
    "qa": TaskSpec(
        settings=QAConfig,
        module="train.tasks.qa.task:QuestionAnswering",
        head="QuestionAnswering",
        metrics=(
            Metric("f1"),
            Metric("has_answer_f1", hub_name="f1"),
            Metric("no_answer_f1", hub_name="f1"),
            Metric("best_f1", hub_name="f1"),
            Metric("exact_match"),
            Metric("has_answer_exact_match", hub_name="exact_match"),
            LOSS,
        ),
        pipeline="question-answering",
        sentence="It finds the answer to a question in a context, as a span of it.",
        example='question="Who wrote it?", context="It was written by somebody."',
        code=QA_CODE,
        note=QA_NOTE,
        card_settings=(
            ("Window stride (tokens)", "task.stride"),
            ("Threshold of no answer", "task.null_threshold"),
        ),
        inputs={
            "question": "question to answer from --context",
            "context": "text that contains the answer",
        },
        target="answers",
    ),
    "multilabel": TaskSpec(
        settings=MultiLabelConfig,
        module="train.tasks.multilabel:MultiLabel",
        head="SequenceClassification",
        problem_type="multi_label_classification",
        metrics=(
            Metric("f1_micro", hub_name="f1"),
            Metric("f1_macro", hub_name="f1"),
            Metric("average_precision"),
            Metric("subset_accuracy", hub_name="accuracy"),
            LOSS,
        ),
        pipeline="text-classification",
        sentence="It labels a text, or a pair of texts, with any of {labels} labels: {names}.",
        example='"A text.", top_k=None, truncation=True',
        note="A label is predicted if its score is at least the threshold, which Training lists.",
        card_settings=(
            ("Threshold", "task.threshold"),
            ("Weights of positives", "task.positive_weights"),
        ),
        inputs=TEXTS,
        optional=("text_pair",),
    ),
    "regress": TaskSpec(
        settings=RegressConfig,
        module="train.tasks.regress:Regression",
        head="SequenceClassification",
        problem_type="regression",
        metrics=(
            Metric("mse", higher_is_better=False),
            Metric("mae", higher_is_better=False),
            Metric("rmse", higher_is_better=False),
            Metric("pearson", hub_name="pearsonr"),
            Metric("spearman", hub_name="spearmanr"),
            LOSS,
        ),
        pipeline="text-classification",
        sentence="It predicts a number for a text, or a pair of texts: {names}.",
        example='"A text.", truncation=True',
        note="The score of the pipeline is the predicted number.",
        inputs=TEXTS,
        optional=("text_pair",),
    ),
    "ner": TaskSpec(
        settings=NERConfig,
        module="train.tasks.ner:TokenClassification",
        head="TokenClassification",
        metrics=(
            Metric("f1"),
            Metric("accuracy"),
            Metric("precision"),
            Metric("recall"),
            LOSS,
        ),
        pipeline="token-classification",
        sentence="It tags each word of a text with one of {labels} tags: {names}.",
        example='"Anna lives in Bonn ."',
        note="The tag of a word is that of its first token.",
        inputs={"tokens": "words to tag, separated by spaces"},
        target="tags",
    ),
}


def spec_of(cfg: TaskConfig) -> TaskSpec:
    return TASKS[cfg.kind]


def scores_of(kind: str, splits: Iterable[str] = ()) -> dict[str, Metric]:
    """Return the metrics that a task declares, by name, also with the prefixes of further validation `splits`.

    Everything else in an evaluation is no score. Of an unknown task, only the loss is known.
    """
    if kind in TASKS:
        declared = TASKS[kind].metrics
    else:
        declared = (LOSS,)
    scores = {metric.name: metric for metric in declared}
    for split in splits:
        for metric in declared:
            name = f"{split}_{metric.name}"
            scores[name] = replace(metric, name=name)
    return scores


def best_metric(cfg: TrainConfig) -> Metric:
    """Return the metric that best.metric names."""
    splits = cfg.data.more_validation if isinstance(cfg.data, RecordsConfig) else ()
    unknown = Metric(cfg.best.metric, higher_is_better=None)
    return scores_of(cfg.task.kind, splits).get(cfg.best.metric, unknown)


def class_of(spec: TaskSpec) -> Any:
    """Return the class of a task. This imports torch."""
    module, _, name = spec.module.partition(":")
    return getattr(import_module(module), name)


def build_task(cfg: TrainConfig) -> Task:
    """Return a run's task after opening and checking its data. Raises InputError if the data is unsuitable."""
    task: Task = class_of(spec_of(cfg.task)).of_run(cfg)
    check(
        cfg.best.metric in task.metrics,
        f"best.metric={cfg.best.metric} must be one of this task's metrics: {', '.join(task.metrics)}",
    )
    check(
        best_metric(cfg).sign != 0,
        f"best.metric={cfg.best.metric} has no direction: declare in the task's TaskSpec whether higher is better",
    )
    return task
