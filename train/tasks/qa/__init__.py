"""The span of a context that answers a question (SQuAD): the task's settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import HeadSize, TaskConfig, check, setting
from train.tasks.spec import LOSS, Metric, TaskSpec


@dataclass(kw_only=True)
class QAConfig(TaskConfig):
    """Question answering with a span of a context, as in SQuAD. Long contexts are read in overlapping windows."""

    kind: str = "qa"
    # The number of tokens that two neighbouring windows of a context share.
    stride: int = setting(128, above=0)
    # The maximum number of tokens in a question; longer ones are cut, and the log counts them.
    max_question_tokens: int = setting(64, above=0)
    # The maximum number of tokens in an answer of the model.
    max_answer_tokens: int = setting(30, above=0)
    # Allow questions without an answer, as in SQuAD v2.
    unanswerable: bool = False
    # The margin by which "no answer" must outscore the best span to be chosen, in SQuAD v2; None uses 0 in evaluations,
    # and in baretrain predict the margin with the best F1 on the validation data.
    null_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.null_threshold is None or self.unanswerable,
            "task.null_threshold needs task.unanswerable=true",
        )

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(token_labels=2)


CODE = """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{model}")
model = AutoModelForQuestionAnswering.from_pretrained("{model}")
question, context = "Who wrote it?", "It was written by somebody."
inputs = tokenizer(question, context, truncation="only_second", return_tensors="pt")
with torch.no_grad():
    output = model(**inputs)
first, last = output.start_logits.argmax(), output.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))"""

NOTE = """baretrain predict reads long contexts in windows, and takes the span with the highest sum of its two logits.
There is no answer if the sum for the first token is higher by more than the threshold, which Training lists."""

SPEC = TaskSpec(
    settings=QAConfig,
    module="train.tasks.qa.task",
    head="QuestionAnswering",
    metrics=(
        *(
            Metric(f"{group}f1", hub_name="f1")
            for group in ("", "has_answer_", "no_answer_", "best_")
        ),
        *(
            Metric(f"{group}exact_match", hub_name="exact_match")
            for group in ("", "has_answer_", "best_")
        ),
        LOSS,
    ),
    pipeline="question-answering",
    sentence="It finds the answer to a question in a context, as a span of it.",
    example='question="Who wrote it?", context="It was written by somebody."',
    code=CODE,
    note=NOTE,
    card_settings=(
        ("Window stride (tokens)", "task.stride"),
        ("Threshold of no answer", "task.null_threshold"),
    ),
    does="answers questions",
    inputs={
        "question": "question to answer from --context",
        "context": "text that contains the answer",
    },
    options={"null_threshold": 'margin by which "no answer" must outscore the best span'},
)
