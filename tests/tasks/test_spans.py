"""Answers are chosen and scored as SQuAD's official scripts do."""

import random
import warnings

import numpy as np
import pytest

from train.tasks.qa.spans import (
    LOWEST,
    Answers,
    Span,
    WindowScores,
    best_threshold,
    evaluate,
    f1_of,
    normalised,
    read,
    score,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchmetrics.functional.text import squad

CRAFTED = [  # what was answered, what is right
    ("Denver Broncos", ["Denver Broncos", "The Denver Broncos!"]),
    ("the Broncos", ["Denver Broncos", "Broncos"]),
    ("", ["Denver"]),
    ("in 1,000 A.D.", ["1000 AD", "1,000"]),
    ("Theatre of the Absurd", ["theatre of absurd"]),
    ("  two\n words ", ["Two Words"]),
    ("Beyonc\u00e9", ["beyonc\u00e9", "Beyonce"]),
    ("Beyonce\u0301", ["Beyonc\u00e9"]),  # another spelling of the same letter is another word
    ("\u201cquoted\u201d", ["quoted"]),  # only ASCII punctuation is left out
    ("it's", ["its"]),
    ("a-b", ["ab", "a b"]),
    ("Athens another", ["thens nother"]),  # articles are whole words
    ("one one two", ["one two two"]),
    ("\u4e1c\u4eac", ["\u4e1c\u4eac \u5e02", "\u4e1c\u4eac"]),
    ("\u0130stanbul", ["istanbul"]),
]
WORDS = [
    "The",
    "a",
    "an",
    "theory",
    "B.C.",
    "b",
    "c",
    "c's",
    "\u00e9t\u00e9",
    "--",
    "x-y",
    "\t",
    "Xy",
    "and",
    "",
]


def oracle(pairs):
    """torchmetrics' SQuAD: v1.1, but that two answers without a word have an F1 of 1, as in v2."""
    given = [{"id": str(i), "prediction_text": text} for i, (text, _) in enumerate(pairs)]
    right = [{"id": str(i), "answers": {"text": texts}} for i, (_, texts) in enumerate(pairs)]
    return {name: float(value) for name, value in squad(given, right).items()}


def answered(texts):
    """The answers of a model that has one span for each question, or none."""
    return [Answers([Span(text, 1.0, 0)] if text else [], 0.0) for text in texts]


def random_text(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(0, 5)))


def test_answers_score_as_officially():
    for pair in CRAFTED:
        exact, f1 = score(*pair)
        assert {"exact_match": 100 * exact, "f1": 100 * f1} == pytest.approx(
            oracle([pair]), abs=1e-4
        ), pair
    for pair in (("a an the", ["The"]), ("!?", ["..."]), ("", ["the"])):
        # in v1 answers without a word are equal and have nothing in common
        assert score(*pair) == (
            1,
            0,
        )
    rng = random.Random(0)
    pairs = [
        (random_text(rng), [random_text(rng) for _ in range(rng.randint(1, 4))])
        for _ in range(900)
    ]
    pairs = [(given, right) for given, right in pairs if all(map(normalised, [given, *right]))]
    given, right = zip(*pairs, strict=True)
    result = evaluate(answered(given), right)
    assert result == pytest.approx(oracle(pairs), abs=1e-3)
    assert len(pairs) > 250 and 0 < result["exact_match"] < result["f1"] < 100


def test_in_v2_nothing_agrees_with_nothing_only():
    rng = random.Random(1)
    pairs = [(random_text(rng), [random_text(rng)]) for _ in range(500)]
    given, right = zip(*pairs, strict=True)
    result = evaluate(answered(given), right, threshold=np.inf)
    assert {name: result[name] for name in ("exact_match", "f1")} == pytest.approx(
        oracle(pairs), abs=1e-3
    )
    assert (f1_of("", ""), f1_of("", "", v2=True), f1_of("the", "", v2=True)) == (0, 1, 1)
    assert f1_of("", "x", v2=True) == f1_of("x", "", v2=True) == 0
    assert score("", [], v2=True) == (1, 1)
    assert score("x", [], v2=True) == (0, 0)
    assert score("", ["the", "x"], v2=True) == (0, 0)  # an answer of articles alone is none
    assert score("", ["the"], v2=True) == (1, 1)


def reached(threshold, odds, scores, has_answer):
    """Mean score, 0 to 100, of the answers with a threshold."""
    return 100 * np.where(odds > threshold, ~has_answer, scores).mean()


def test_no_threshold_is_better():
    rng = np.random.default_rng(0)
    for _ in range(200):
        has_answer = rng.random(12) < 0.7
        scores = np.where(has_answer, rng.choice([0, 0.5, 1], 12), 0.0)
        odds = rng.normal(size=12).round(1) - 1.5 * has_answer
        threshold, value = best_threshold(odds, scores, has_answer)
        assert value == pytest.approx(
            max(reached(one, odds, scores, has_answer) for one in [-9, *odds])
        )
        assert value == pytest.approx(reached(threshold, odds, scores, has_answer))
    threshold, value = best_threshold(
        np.array([-3.0, -1.0]), np.zeros(2), np.array([False, False])
    )
    assert threshold < -3 and value == 100  # no answer is best for all


def reading(text, odds):
    """Of one span that "no answer" is above by `odds`."""
    return Answers([Span(text, 1.0, 0)], 1.0 + odds)


# Worked out by hand. Odds in rising order: right span, right in part (F1 2/3), no answer, no answer, right span.
V2 = [
    (reading("the red fox", -3.0), ["red fox"]),
    (reading("red", -2.0), ["red fox"]),
    (reading("anything", -1.0), []),
    (reading("something", 1.0), []),
    (reading("blue", 2.0), ["blue", "blue sky"]),
]


def test_v2_is_judged_by_the_given_threshold_and_the_best_one_stands_beside():
    given = evaluate(*zip(*V2, strict=True), threshold=0.0)
    # Given: red fox, red, anything, "", "".
    assert given["exact_match"] == pytest.approx(100 * (1 + 0 + 0 + 1 + 0) / 5)
    assert given["f1"] == pytest.approx(100 * (1 + 2 / 3 + 0 + 1 + 0) / 5)
    assert given["has_answer_exact_match"] == pytest.approx(100 / 3)
    assert given["has_answer_f1"] == pytest.approx(100 * (1 + 2 / 3) / 3)
    assert given["no_answer_f1"] == pytest.approx(50)
    # From "no answer to any" (2 right): +1, then +2/3, then down.
    assert (given["best_f1"], given["best_f1_threshold"]) == (
        pytest.approx(100 * (3 + 2 / 3) / 5),
        -2.0,
    )
    best = evaluate(*zip(*V2, strict=True), threshold=given["best_f1_threshold"])
    assert {name: value for name, value in best.items() if "best" in name} == {
        n: given[n] for n in best if "best" in n
    }
    assert best["f1"] == best["best_f1"] == pytest.approx(100 * (1 + 2 / 3 + 1 + 1 + 0) / 5)
    assert best["exact_match"] == pytest.approx(60) and best["no_answer_f1"] == 100
    doubted = reading("fox", 0.5)  # there is no answer above the threshold only
    assert (doubted.answer(None), doubted.answer(0.5), doubted.answer(0.4)) == ("fox", "fox", "")
    sure = evaluate([reading("x", -1.0)], [["x"]], threshold=0.0)
    assert sure["f1"] == 100 and sure["no_answer_f1"] == 0  # and no NaN


CONTEXT = "The red fox ran  home"
# of Metaspace: with the space before
OFFSETS = np.array([[0, 3], [3, 7], [7, 11], [11, 15], [16, 21]])
FIRST = 4  # tokens of the question before it


def window(starts, ends, *, null=0.0, k=3, offsets=OFFSETS):
    """Of scores for each token of the context."""
    tops = [np.argsort(-np.array(scores), kind="stable")[:k] for scores in (starts, ends)]
    parts = [
        np.append(np.array(scores)[top], top + FIRST)
        for scores, top in zip((starts, ends), tops, strict=True)
    ]
    return WindowScores.of(np.concatenate([[null], *parts]).astype(np.float32), FIRST, offsets)


def test_the_best_span_has_the_highest_sum_and_is_no_longer_than_allowed():
    one = window([0, 5, 1, 0, 0], [0, 0, 2, 0, 4])
    assert read([one], CONTEXT, n_best=3, max_answer_tokens=5).best == "red fox ran  home"
    assert read([one], CONTEXT, n_best=3, max_answer_tokens=3).best == "red fox"
    assert read([one], CONTEXT, n_best=3, max_answer_tokens=2).spans[0] == Span("red fox", 7.0, 4)
    # outside of the context
    padded = window([LOWEST, 1, LOWEST, LOWEST, LOWEST], [LOWEST, 1, LOWEST, LOWEST, LOWEST])
    assert [
        span.text for span in read([padded], CONTEXT, n_best=9, max_answer_tokens=5).spans
    ] == ["red"]
    backwards = window([0, 0, 0, 0, 9], [9, 0, 0, 0, 0], k=1)  # no span ends before it starts
    result = read([backwards], CONTEXT, n_best=3, max_answer_tokens=5)
    assert (result.spans, result.best, result.answer(None), result.null_odds) == (
        [],
        "",
        "",
        float("inf"),
    )
    assert result.n_best(v2=False) == [{"text": "", "probability": 1.0, "score": 0.0, "begin": 0}]
    context, offsets = (
        "\U0001f600 Zo\u00eb \u6771\u4eac",
        np.array([[0, 1], [0, 1], [2, 5], [6, 7], [7, 8]]),
    )
    # cut by characters; two tokens are of one
    unicode = window([0, 0, 3, 0, 0], [0, 0, 0, 0, 3], offsets=offsets)
    assert read([unicode], context, n_best=3, max_answer_tokens=3).best == "Zo\u00eb \u6771\u4eac"


def test_of_several_windows_the_best_counts_and_a_span_counts_once():
    first = window([0, 3, 0, 0, 0], [0, 3, 0, 0, 0], null=2.0)
    second = window([0, 4, 0, 0, 5], [0, 4, 0, 0, 1], null=1.5)
    result = read([first, second], CONTEXT, n_best=20, max_answer_tokens=1)
    assert [(span.text, span.score) for span in result.spans[:2]] == [("red", 8.0), ("home", 6.0)]
    assert len({(span.text, span.begin) for span in result.spans}) == len(result.spans)
    # of the window that doubts least, as officially
    assert (result.null_score, result.null_odds) == (
        1.5,
        -6.5,
    )
    sure = read(
        [window([0, 3, 0, 0, 0], [0, 3, 1, 0, 0], null=5.0)],
        CONTEXT,
        n_best=2,
        max_answer_tokens=2,
    )
    plain, v2 = sure.n_best(v2=False), sure.n_best(v2=True)
    assert [one["text"] for one in plain] == ["red", "red fox"]
    assert plain[0]["probability"] == pytest.approx(1 / (1 + np.exp(-2)))
    assert [one["text"] for one in v2] == ["red", "", "red fox"]
    assert sum(one["probability"] for one in v2) == pytest.approx(1)
