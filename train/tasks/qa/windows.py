"""The windows of tokens into which questions and contexts are split, in training, evaluation and prediction alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import List, Value

from train.config import check
from train.config.tasks import MOST_QUESTION_TOKENS, QAConfig
from train.data.files.errors import BadRow
from train.data.records.featurizer import Featurizer
from train.data.records.kinds import NUMBER, NUMBERS, STRING, RowKind
from train.data.records.row import Row
from train.data.records.squad import answers_of

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast


def read_question(row: Row) -> dict[str, str]:
    texts: dict[str, str] = {key: row.text(key) for key in ("question", "context")}
    for key, text in texts.items():
        if not text.strip():
            raise BadRow(f"an empty {row.columns[key]}")
    return texts


def qa_rows(task: QAConfig) -> RowKind:
    """Return the kind of rows with questions. Without task.unanswerable, a question without an answer is a bad row."""

    def read_answers(value: Any, texts: dict[str, str], is_learnt: bool) -> dict[str, list[Any]]:
        answers = answers_of(value, texts["context"])
        if is_learnt and not task.unanswerable and not answers["text"]:
            raise BadRow("no answer; for SQuAD v2 set task.unanswerable=true")
        return answers

    return RowKind(
        "qa",
        columns={
            "question": STRING,
            "context": STRING,
            "answers": {"text": List(STRING), "answer_start": List(Value("int64"))},
        },
        read=read_question,
        target="answers",
        read_target=read_answers,
        split_by="context",
        has_unique_ids=True,  # predictions and answers are matched by their ids
        tokens={
            "start": NUMBER,  # first and last token of the answer; 0, which is [CLS], if the window has none
            "end": NUMBER,
            "context_first": NUMBER,  # first token of the context in this window
            "context_end": NUMBER,  # index after the context's last token
            "offsets": NUMBERS,  # begin and end of each context token, in characters of the context
        },
    )


class QAFeaturizer(Featurizer):
    """Windows of [CLS] question [SEP] context [SEP]."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int, task: QAConfig
    ) -> None:
        # Raises InputError if sequences do not begin with [CLS], or if windows are too short to overlap by task.stride.
        super().__init__(
            tokenizer, seq_len=seq_len, stride=task.stride, unanswerable=task.unanswerable
        )
        self.task, self.kind = task, qa_rows(task)
        self.most = min(MOST_QUESTION_TOKENS, seq_len // 4)  # tokens of a question
        cls, special = tokenizer.cls_token, tokenizer.num_special_tokens_to_add(pair=True)
        other = "choose a model like bert, albert, roberta, distilbert"
        check(
            tokenizer("a", "b")["input_ids"][0] == tokenizer.cls_token_id,
            f"this tokenizer does not begin sequences with its {cls}, the answer to unanswerable questions; {other}",
        )
        check(
            "left" not in (tokenizer.padding_side, tokenizer.truncation_side),
            f"this tokenizer pads or cuts sequences on the left; {other}",
        )
        left = seq_len - special - self.most
        check(
            task.stride < left,
            f"seq_len={seq_len} minus {self.most} tokens of the question and {special} special tokens leaves {left} "
            f"tokens for the context, which must be more than task.stride={task.stride}; raise seq_len or lower "
            "task.stride",
        )

    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        # The model learns the first answer. If the window does not contain it, start and end are [CLS].
        answers = rows.get("answers", [{"text": []}] * len(indices))
        encoded = self.encode(
            self.shortened(rows["question"], split),
            rows["context"],
            truncation="only_second",
            stride=self.task.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        owners = encoded["overflow_to_sample_mapping"]
        windows = [
            self.window(encoding, answers[owner])
            for encoding, owner in zip(encoded.encodings, owners, strict=True)
        ]
        in_reach = {owner for owner, window in zip(owners, windows, strict=True) if window["end"]}
        wanted = {number for number, answer in enumerate(answers) if answer["text"]}
        self.count(split, answers_in_no_window=len(wanted - in_reach))
        own = {name: [window[name] for window in windows] for name in self.kind.tokens}
        return {
            **self.columns(split, encoded.encodings, [indices[owner] for owner in owners]),
            **own,
        }

    def window(self, encoding: Encoding, answer: dict[str, list]) -> dict[str, Any]:
        sequences = encoding.sequence_ids  # RoBERTa has no token_type_ids
        first = 0
        if 1 in sequences:
            first = sequences.index(1)
        end = first + sequences.count(1)
        offsets = np.array(encoding.offsets[first:end], np.int32).reshape(-1, 2)
        start = stop = 0
        if answer["text"]:
            begin = answer["answer_start"][0]
            behind = begin + len(answer["text"][0])
            start, stop = answer_tokens(begin, behind, offsets, first)
        return {
            "start": start,
            "end": stop,
            "context_first": first,
            "context_end": end,
            "offsets": offsets.ravel().tolist(),
        }

    def shortened(self, questions: Sequence[str], split: str) -> list[str]:
        """Return the questions without leading spaces (some of SQuAD's have many), cut to `most` tokens."""
        stripped = [question.lstrip() for question in questions]
        encodings = self.pieces(stripped)
        is_long = [len(encoding.ids) > self.most for encoding in encodings]
        self.count(split, cut_questions=sum(is_long))
        self.tokens_cut = np.zeros(len(questions), np.int64)
        for number in np.flatnonzero(is_long):
            stripped[number] = self.cut(stripped[number])
            kept = self.pieces([stripped[number]])[0]
            self.tokens_cut[number] = len(encodings[number].ids) - len(kept.ids)
        return stripped

    def cut(self, question: str) -> str:
        # The shortened text may be split differently, into more tokens.
        while True:
            (encoding,) = self.pieces([question])
            if len(encoding.ids) <= self.most:
                return question
            end = encoding.offsets[self.most - 1][1]
            question = question[: min(end, len(question) - 1)]

    def pieces(self, texts: list[str]) -> list[Encoding]:
        encoded = self.tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        encodings: list[Encoding] = encoded.encodings
        return encodings


def answer_tokens(begin: int, end: int, offsets: np.ndarray, first: int) -> tuple[int, int]:
    """Return the first and last token of characters [begin, end); (0, 0), which is [CLS], if `offsets` lacks any.

    `offsets` [n, 2] has the begin and end character of n tokens, from token `first` on. Several tokens may cover
    the same character, and a token may begin with the space before its word.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    if not len(offsets) or begin < begins[0] or end > ends[-1]:
        return 0, 0
    start = int(np.searchsorted(ends, begin, side="right"))
    stop = int(np.searchsorted(begins, end, side="left")) - 1
    if start > stop:
        return 0, 0
    return first + start, first + stop
