"""Answers as spans of a context, and SQuAD's scores of answers, computed on the host.

Metrics follow the official scripts, evaluate-v1.1.py and evaluate-v2.0.py of
https://rajpurkar.github.io/SQuAD-explorer; the choice of spans follows `postprocess_qa_predictions` of the
question-answering example of transformers. As in that example, a token in several windows is a candidate in each of
them, and the highest score wins. Google's BERT uses only the window in which the token has the most context.

Shapes: k tokens of a window with the highest scores.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LOWEST = -1e30  # the score of a token that cannot begin or end an answer
ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


# ---- how an answer scores ------------------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def f1_of(given: str, wanted: str, *, v2: bool = False) -> float:
    """Return F1 over the words of two answers. It is 0 if one is empty; in v2 it is 1 if both are empty."""
    mine = normalised(given).split()
    theirs = normalised(wanted).split()
    if v2 and not (mine and theirs):
        return float(mine == theirs)
    same = (Counter(mine) & Counter(theirs)).total()
    if not same:
        return 0.0
    precision = same / len(mine)
    recall = same / len(theirs)
    return 2 * precision * recall / (precision + recall)


def score(given: str, wanted: Sequence[str], *, v2: bool = False) -> tuple[float, float]:
    """Return exact match and F1 (0 to 1), each for the closest right answer. In v2 there may be no right answer."""
    if v2:
        wanted = [answer for answer in wanted if normalised(answer)] or [""]
    exact = max(float(normalised(given) == normalised(answer)) for answer in wanted)
    return exact, max(f1_of(given, answer, v2=v2) for answer in wanted)


# ---- from scores to spans ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowScores:
    """The scores of a model for one window of a context."""

    # sum of the start and end logits of [CLS]
    null_score: float
    # [k], with LOWEST outside of the context
    start_scores: np.ndarray
    # [k] int64: tokens of the window
    starts: np.ndarray
    end_scores: np.ndarray
    ends: np.ndarray
    # the first token of `offsets`
    context_first: int
    # [tokens of the context, 2]: begin and end of each token, in characters of the context
    offsets: np.ndarray

    @staticmethod
    def of(statistics: np.ndarray, context_first: int, offsets: np.ndarray) -> WindowScores:
        """Return a window from [1 + 4 * k]: null score, k start scores, their tokens, k end scores, their tokens."""
        parts = statistics[1:].astype(np.float64).reshape(4, -1)
        start_scores, starts, end_scores, ends = parts
        return WindowScores(
            null_score=float(statistics[0]),
            start_scores=start_scores,
            starts=starts.astype(np.int64),
            end_scores=end_scores,
            ends=ends.astype(np.int64),
            context_first=context_first,
            offsets=offsets,
        )

    def best(self, n_best: int, max_answer_tokens: int) -> list[tuple[float, int, int]]:
        """Return (score, begin, end) of the `n_best` spans with the highest scores; [begin, end) are characters."""
        # all pairs of a start and an end, [k, k]
        tokens = self.ends - self.starts[:, None] + 1
        is_start = self.start_scores > LOWEST
        is_end = self.end_scores > LOWEST
        is_span = (tokens >= 1) & (tokens <= max_answer_tokens)
        start, end = np.nonzero(is_span & is_start[:, None] & is_end)
        scores = self.start_scores[start] + self.end_scores[end]
        order = np.argsort(-scores, kind="stable")[:n_best]
        first_tokens = self.starts[start[order]] - self.context_first
        last_tokens = self.ends[end[order]] - self.context_first
        begins = self.offsets[first_tokens, 0].tolist()
        stops = self.offsets[last_tokens, 1].tolist()
        return list(zip(scores[order].tolist(), begins, stops, strict=True))


@dataclass(frozen=True)
class Span:
    text: str
    # the sum of its start logit and its end logit
    score: float
    # the index of its first character in the context
    begin: int


@dataclass(frozen=True)
class Answers:
    """A model's answers to one question: spans, best first, and the score of "no answer"."""

    spans: list[Span]
    null_score: float

    @property
    def null_odds(self) -> float:
        """The score of "no answer" minus the score of the best span."""
        if not self.spans:
            return float("inf")
        return self.null_score - self.spans[0].score

    @property
    def best(self) -> str:
        if self.spans:
            return self.spans[0].text
        return ""

    def answer(self, threshold: float | None) -> str:
        """Return the best span; "" if there is a `threshold` and "no answer" scores higher by more than that."""
        if threshold is not None and self.null_odds > threshold:
            return ""
        return self.best

    def n_best(self, *, v2: bool) -> list[dict[str, Any]]:
        """Return all spans with probabilities (softmax of scores), for prediction files. v2 includes the empty span."""
        spans = list(self.spans)
        if v2 or not spans:
            spans.append(Span("", self.null_score, 0))
        spans.sort(key=lambda span: -span.score)
        scores = np.array([span.score for span in spans])
        shares = np.exp(scores - scores.max())
        shares = (shares / shares.sum()).tolist()
        return [
            {
                "text": span.text,
                "probability": share,
                "score": span.score,
                "begin": span.begin,
            }
            for span, share in zip(spans, shares, strict=True)
        ]


def read(
    windows: Sequence[WindowScores], context: str, *, n_best: int, max_answer_tokens: int
) -> Answers:
    """Return the best spans of all windows of a context. A span in two windows counts once, with its higher score."""
    candidates = []
    for window in windows:
        candidates += window.best(n_best, max_answer_tokens)
    candidates.sort(key=lambda span: -span[0])
    spans: dict[tuple[int, int], Span] = {}
    for value, begin, end in candidates:
        text = context[begin:end].lstrip()  # tokens may include the space before a word
        begin = end - len(text)
        if text:
            spans.setdefault((begin, end), Span(text.rstrip(), value, begin))
        if len(spans) == n_best:
            break
    null_score = min(window.null_score for window in windows)
    return Answers(list(spans.values()), null_score)


# ---- all questions -------------------------------------------------------------------------------------------------


def best_threshold(
    null_odds: np.ndarray, scores: np.ndarray, has_answer: np.ndarray
) -> tuple[float, float]:
    """Return the best threshold of `null_odds`, above which no answer is given, and its mean score (0 to 100).

    Unlike `find_best_thresh` in evaluate-v2.0.py, this keeps questions with equal odds together, since no threshold can
    separate them; and if it is best to answer no question, the threshold is below all odds instead of 0.

    `scores` [questions] are the scores of the best spans, 0 to 1. A question with neither answer nor span scores 1.
    """
    order = np.argsort(null_odds, kind="stable")
    odds = null_odds[order]
    gains = (scores - ~has_answer)[order]  # over giving no answer
    is_last_of_equal = np.append(odds[1:] != odds[:-1], True)
    totals = np.where(is_last_of_equal, np.cumsum(gains), -np.inf)
    best = int(totals.argmax())
    if totals[best] <= 0:
        below_all = float(np.nextafter(odds[0], -np.inf))
        return min(0.0, below_all), mean_percent(~has_answer)
    right = float((~has_answer).sum() + totals[best])
    return float(odds[best]), 100.0 * right / len(scores)


def evaluate(
    predicted: Sequence[Answers], wanted: Sequence[Sequence[str]], threshold: float | None = None
) -> dict[str, float]:
    """Return SQuAD's metrics (0 to 100): v2's of the answers at `threshold`; None: v1.1's of the best spans.

    exact_match and f1 are over all questions. has_answer_... are over the questions with an answer (0 if there are
    none). no_answer_f1 is the share of unanswerable questions that get no answer. best_f1 is the highest F1 that a
    threshold (best_f1_threshold) reaches on these same questions. It flatters the model, but evaluate-v2.0.py prints it
    too.
    """
    is_v2 = threshold is not None
    scores = []
    for each, answers in zip(predicted, wanted, strict=True):
        scores.append(score(each.best, answers, v2=is_v2))
    exact, f1 = np.array(scores).T
    if threshold is None:
        return {"exact_match": mean_percent(exact), "f1": mean_percent(f1)}
    has_answer = np.array([bool(answers) for answers in wanted])
    odds = np.array([each.null_odds for each in predicted])
    best, best_f1 = best_threshold(odds, f1, has_answer)
    is_null = odds > threshold
    exact = np.where(is_null, ~has_answer, exact)
    f1 = np.where(is_null, ~has_answer, f1)
    return {
        "exact_match": mean_percent(exact),
        "f1": mean_percent(f1),
        "has_answer_exact_match": mean_percent(exact[has_answer]),
        "has_answer_f1": mean_percent(f1[has_answer]),
        "no_answer_f1": mean_percent(f1[~has_answer]),
        "best_f1": best_f1,
        "best_f1_threshold": best,
    }


def mean_percent(values: np.ndarray) -> float:
    if not len(values):
        return 0.0
    return 100.0 * float(values.mean())


V1_NAMES = ("exact_match", "f1")
V2_NAMES = (
    *V1_NAMES,
    "has_answer_exact_match",
    "has_answer_f1",
    "no_answer_f1",
    "best_f1",
    "best_f1_threshold",
)
