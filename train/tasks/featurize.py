"""Text to tokens, for training, evaluation and new texts alike: what makes the features of both tasks.

See `train.data.features.Featurizer` for what they hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from train.config import QAConfig, check

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast


class Reader:
    """Token ids out of a fast tokenizer's encodings, and counts of what was done to the texts of each split.

    "[SEP]" in a text is text. Some vocabularies have such a piece nevertheless, which then becomes the unknown one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        names = ("cls", "sep", "pad", "mask")
        reserved = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
        unknown = tokenizer.unk_token_id
        self.stand_ins: dict[int, int] = {} if unknown is None else dict.fromkeys(reserved, unknown)
        self._notes: dict[str, Counter[str]] = {}

    def ids(self, encoding: Encoding) -> list[int]:
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token if is_special else self.stand_ins.get(token, token) for token, is_special in pairs]

    def count(self, split: str, **numbers: int) -> None:
        self._notes.setdefault(split, Counter()).update(numbers)

    def notes(self, split: str) -> dict[str, float]:
        return {name: float(number) for name, number in self._notes.get(split, Counter()).items()}


def second_at(encoding: Encoding) -> int:
    """The first token of segment 1; the length where a tokenizer (RoBERTa's) or a single text has none."""
    segments = encoding.type_ids
    return segments.index(1) if 1 in segments else len(segments)


class ClassifyFeaturizer(Reader):
    """Texts to tokens, cut at `seq_len`; of a pair, the longer one is cut. See `train.data.features.Featurizer`."""

    kind = "classify"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int) -> None:
        super().__init__(tokenizer)
        self.settings: dict[str, Any] = {"version": 1, "seq_len": seq_len}

    def features(self, rows: dict[str, list], indices: list[int], *, split: str) -> dict[str, list]:
        """Rows of `text`, `text_pair` if there are pairs, and `label`; without it, it is 0 (the loss means nothing)."""
        encoded = self.tokenizer(
            rows["text"],
            rows.get("text_pair"),
            truncation="longest_first",
            max_length=self.settings["seq_len"],
            split_special_tokens=True,
            verbose=False,
        ).encodings
        self.count(split, truncated=sum(bool(encoding.overflowing) for encoding in encoded))
        return {
            "input_ids": [self.ids(encoding) for encoding in encoded],
            "second_at": [second_at(encoding) for encoding in encoded],
            "length": [len(encoding.ids) for encoding in encoded],
            "row": list(indices),
            "label": rows.get("label", [0] * len(indices)),
        }


class QAFeaturizer(Reader):
    """Windows of [CLS] question [SEP] context [SEP]. See `train.data.features.Featurizer`."""

    kind = "qa"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int, task: QAConfig) -> None:
        """InputError for a tokenizer that does not begin with [CLS], and for windows without room to overlap."""
        super().__init__(tokenizer)
        self.task = task
        self.settings: dict[str, Any] = {
            "version": 1,
            "seq_len": seq_len,
            "stride": task.stride,
            "max_question_tokens": task.max_question_tokens,
            "unanswerable": task.unanswerable,
        }
        begins = tokenizer("a", "b")["input_ids"][0] == tokenizer.cls_token_id
        check(
            begins and tokenizer.padding_side == tokenizer.truncation_side == "right",
            f"the {tokenizer.cls_token} of this tokenizer is not what a sequence begins with, where unanswerable "
            "questions point; choose a model as bert, albert, roberta, distilbert",
        )
        special = tokenizer.num_special_tokens_to_add(pair=True)
        room = seq_len - special - task.max_question_tokens
        check(
            task.stride < room,
            f"task.stride={task.stride} leaves no room: of seq_len={seq_len} a question may take "
            f"task.max_question_tokens={task.max_question_tokens} and special tokens {special}, so that {max(room, 0)} "
            "are left of the context; raise seq_len or lower one of the others",
        )

    def features(self, rows: dict[str, list], indices: list[int], *, split: str) -> dict[str, list]:
        """Rows of `question`, `context` and `answers`, the first of which is the one to learn; without any, and in
        windows that do not hold it, start and end are [CLS].
        """
        answers = rows.get("answers", [{"text": []}] * len(indices))
        if "answers" in rows and not self.task.unanswerable:  # none that were read are so
            bad = next((i for i, answer in zip(indices, answers, strict=True) if not answer["text"]), None)
            check(bad is None, f"row {bad} of {split} has no answer; for SQuAD v2 set task.unanswerable=true")
        encoded = self.tokenizer(
            self.shortened(rows["question"], split),
            rows["context"],
            truncation="only_second",
            max_length=self.settings["seq_len"],
            stride=self.task.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            split_special_tokens=True,
            verbose=False,
        )
        owners = encoded["overflow_to_sample_mapping"]
        windows = [
            self.window(encoding, answers[owner]) for encoding, owner in zip(encoded.encodings, owners, strict=True)
        ]
        in_reach = {owner for owner, window in zip(owners, windows, strict=True) if window["end"]}
        wanted = {number for number, answer in enumerate(answers) if answer["text"]}
        self.count(split, answers_in_no_window=len(wanted - in_reach))
        columns: dict[str, list] = {name: [window[name] for window in windows] for name in windows[0]}
        return {**columns, "row": [indices[owner] for owner in owners]}

    def window(self, encoding: Encoding, answer: dict[str, list]) -> dict[str, Any]:
        of = encoding.sequence_ids  # not the segments: RoBERTa has none
        first = of.index(1) if 1 in of else 0
        end = first + of.count(1)
        offsets = np.array(encoding.offsets[first:end], np.int32).reshape(-1, 2)
        start, stop = (0, 0)
        if answer["text"]:
            begin = answer["answer_start"][0]
            start, stop = place_of(begin, begin + len(answer["text"][0]), offsets, first)
        return {
            "input_ids": self.ids(encoding),
            "second_at": second_at(encoding),
            "length": len(encoding.ids),
            "start": start,
            "end": stop,
            "context_first": first,
            "context_end": end,
            "offsets": offsets.ravel().tolist(),
        }

    def shortened(self, questions: Sequence[str], split: str) -> list[str]:
        """Without spaces in front (some of SQuAD's have many), and no longer than max_question_tokens."""
        stripped = [question.lstrip() for question in questions]
        found = self.pieces(stripped)
        is_long = [len(encoding.ids) > self.task.max_question_tokens for encoding in found]
        self.count(split, cut_questions=sum(is_long))
        return [self.cut(text) if long else text for text, long in zip(stripped, is_long, strict=True)]

    def cut(self, question: str) -> str:
        most = self.task.max_question_tokens
        while len((found := self.pieces([question])[0]).ids) > most:  # what is left may be other, and more, tokens
            question = question[: min(found.offsets[most - 1][1], len(question) - 1)]
        return question

    def pieces(self, texts: list[str]) -> list[Encoding]:
        encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
        found: list[Encoding] = encoded.encodings
        return found


def place_of(begin: int, end: int, offsets: np.ndarray, first: int) -> tuple[int, int]:
    """First and last token of the characters [begin, end), of tokens with `offsets` [n, 2] from `first` on; (0, 0), as
    [CLS] is the place of what is not there, unless all of it is.

    Several tokens may be of the same character, and a token may begin with the space before its word.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    if not len(offsets) or begin < begins[0] or end > ends[-1]:
        return 0, 0
    start = int(np.searchsorted(ends, begin, side="right"))
    stop = int(np.searchsorted(begins, end, side="left")) - 1
    return (first + start, first + stop) if start <= stop else (0, 0)
