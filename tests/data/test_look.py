"""What a look at rows decides: the task and its columns, or the setting that decides."""

import re

import pytest

from tests.rejections import rejects
from train.data.records.columns import columns_of
from train.data.records.look import reading_of

TEXTS = [f"text number {n}" for n in range(40)]


def rows(**columns):
    """Return 40 rows; each column repeats its values."""
    return [{name: values[n % len(values)] for name, values in columns.items()} for n in range(40)]


def look(given=None, task=None, **columns):
    reading = reading_of(columns_of(rows(**columns)), given or {}, task)
    return reading.task, reading.settings


READ = {
    "names": (
        {"tweet": TEXTS, "label": ["good", "bad"]},
        ("classify", {"data.columns.label": "label", "data.columns.text": "tweet"}),
    ),
    "the label wins over other names of labels": (
        {"text": TEXTS, "label": ["0", "1"], "topic": ["a", "b"]},
        ("classify", {"data.columns.label": "label", "data.columns.text": "text"}),
    ),
    "last words of names": (
        {"airline_sentiment": ["good", "bad"], "confidence": ["0.5", "1.0"], "tweetText": TEXTS},
        (
            "classify",
            {"data.columns.label": "airline_sentiment", "data.columns.text": "tweetText"},
        ),
    ),
    "content": (
        {"id": [str(n) for n in range(40)], "kind": ["x", "y"], "said": TEXTS},
        ("classify", {"data.columns.label": "kind", "data.columns.text": "said"}),
    ),
    "stars are classes": (
        {"review": TEXTS, "stars": [1, 2, 3, 4, 5]},
        ("classify", {"data.columns.label": "stars", "data.columns.text": "review"}),
    ),
    "scores": (
        {"sentence1": TEXTS, "sentence2": TEXTS, "score": [0.5, 1.0, 4.8]},
        (
            "regress",
            {
                "data.columns.label": "score",
                "data.columns.text": "sentence1",
                "data.columns.text_pair": "sentence2",
            },
        ),
    ),
    "pairs": (
        {"premise": TEXTS, "hypothesis": TEXTS, "label": [0, 1, 2]},
        (
            "classify",
            {
                "data.columns.label": "label",
                "data.columns.text": "premise",
                "data.columns.text_pair": "hypothesis",
            },
        ),
    ),
    "lists": (
        {"text": TEXTS, "labels": [["a", "b"], [], ["b"]]},
        ("multilabel", {"data.columns.label": "labels", "data.columns.text": "text"}),
    ),
    "lists as text": (
        {"text": TEXTS, "labels": ["['a', 'b']", "[]", "['b']"]},
        ("multilabel", {"data.columns.label": "labels", "data.columns.text": "text"}),
    ),
    "labels between bars": (
        {"text": TEXTS, "tags": ["a|b", "a", "b|c", "c|a"]},
        (
            "multilabel",
            {
                "data.columns.label": "tags",
                "data.columns.text": "text",
                "data.label_separator": "|",
            },
        ),
    ),
    "a comma inside names of classes": (
        {"text": TEXTS, "label": ["food, drink", "cars, bikes"]},
        ("classify", {"data.columns.label": "label", "data.columns.text": "text"}),
    ),
    "columns of 0 and 1": (
        {"comment_text": TEXTS, "toxic": [0, 1], "threat": [1, 0, 0]},
        (
            "multilabel",
            {"data.columns.label": ["toxic", "threat"], "data.columns.text": "comment_text"},
        ),
    ),
    "words with tags": (
        {"tokens": [["Ann", "ran"]], "ner_tags": [[1, 0]]},
        ("ner", {"data.columns.tokens": "tokens", "data.columns.tags": "ner_tags"}),
    ),
    "spans of texts": (
        {"text": TEXTS, "label": [[[0, 4, "PER"]], []]},
        ("ner", {"data.columns.tokens": "text", "data.columns.tags": "label"}),
    ),
    "parts of speech": (
        {"tokens": [["Ann", "ran"]], "tags": [["PROPN", "VERBAL"]]},
        (
            "ner",
            {
                "data.columns.tokens": "tokens",
                "data.columns.tags": "tags",
                "task.scheme": "none",
            },
        ),
    ),
    "rows without a label": (
        {"text": TEXTS, "label": [0, 1, 2, -1]},
        (
            "classify",
            {
                "data.columns.label": "label",
                "data.label_map": {"-1": None},
                "data.columns.text": "text",
            },
        ),
    ),
    "decimal commas": (
        {"text": TEXTS, "label": ["0,64", "1,5", "2,25"]},
        ("regress", {"data.columns.label": "label", "data.columns.text": "text"}),
    ),
    "questions": (
        {"question": TEXTS, "context": TEXTS, "answers": [{"text": ["a"], "answer_start": [0]}]},
        ("qa", {"data.columns.answers": "answers"}),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_task_and_its_columns_are_told_by_names_and_content(name):
    columns, expected = READ[name]
    assert look(**columns) == expected


def test_what_the_user_typed_holds():
    columns = {"a": TEXTS, "b": TEXTS, "topic": ["x", "y"], "sentiment": ["u", "v"]}
    given = {"data.columns.label": "topic", "data.columns.text": "b"}
    assert look(given, **columns) == ("classify", {"data.columns.label": "topic"})
    stars = {"text": TEXTS, "stars": [1, 2, 3, 4, 5]}
    assert look(task="regress", **stars)[0] == "regress"


UNCLEAR = {
    "several columns may be the label: sentiment, topic; say which is: data.columns.label=": {
        "text": TEXTS,
        "sentiment": ["u", "v"],
        "topic": ["x", "y"],
    },
    "several columns hold texts: first, other; say which to read: data.columns.text=": {
        "first": TEXTS,
        "other": TEXTS,
        "label": ["x", "y"],
    },
    "no column looks like labels; the columns are: text": {"text": TEXTS},
    "several columns hold texts: text, other; say which to read: data.columns.text=text": {
        "text": TEXTS,
        "other": TEXTS,
        "label": ["x", "y"],
    },
    "no column holds texts of several words": {"text": ["a", "b"], "label": ["x", "y"]},
    "label holds 40 different whole numbers: task=regress learns an amount, task=classify": {
        "text": TEXTS,
        "label": list(range(40)),
    },
}


NESTED = {
    "an object": ({"a": 1}, "; data.columns.label=label.NAME reads a value inside an object"),
    "lists": ([["a"], ["b"]], ""),
    "a list of objects": ([{"a": 1}], ""),
}


@pytest.mark.parametrize("name", NESTED)
def test_objects_and_lists_inside_labels_are_rejected(name):
    label, cure = NESTED[name]
    says = re.escape(f"label holds {label}, not a label or a list of labels{cure}")
    rejects(f"{says}$", look, text=TEXTS, label=[label, label])


def test_one_bad_label_is_left_to_the_run():
    assert look(text=TEXTS, label=["x", {"a": 1}, "y", "x"])[0] == "classify"


@pytest.mark.parametrize("says", UNCLEAR)
def test_two_readings_name_the_setting_that_decides(says):
    rejects(says, look, **UNCLEAR[says])


def test_columns_of_texts_that_are_not_read_are_named():
    columns = columns_of(rows(title=TEXTS, text=TEXTS, note=TEXTS, label=["x", "y"]))
    assert reading_of(columns, {}).unread == ["title", "note"]


SPANS = [[[0, 4, "PER"]], [[0, 4, "LOC"], [5, 11, "PER"]]]
WORDS = [["one", "two"]]
SEEN = {
    "lists of labels": ({"text": TEXTS, "labels": [["b"], ["a", "b"]]}, "2 labels (a, b)"),
    "lists as text": ({"text": TEXTS, "labels": ["['b']", "['a', 'b']"]}, "2 labels (a, b)"),
    "labels with a separator": (
        {"text": TEXTS, "labels": ["a;b", "a", "b", "a;b"]},
        "2 labels (a, b)",
    ),
    "columns of bits": (
        {"text": TEXTS, "rude": [0, 1], "toxic": [1, 0]},
        "2 labels (rude, toxic)",
    ),
    "lists of bits name nothing": ({"text": TEXTS, "labels": [[0, 1], [1, 0]]}, ""),
    "nor do those of bits as fractions": ({"text": TEXTS, "labels": [[0.0, 1.0], [1.0, 0.0]]}, ""),
    "spans": ({"text": TEXTS, "spans": SPANS}, "2 types of entities (LOC, PER)"),
    "spans as objects": (
        {"text": TEXTS, "spans": [[{"start": 0, "end": 4, "labels": ["ORG"]}]]},
        "1 type of entities (ORG)",
    ),
    "spans and a list as text": (
        {"text": TEXTS, "spans": [[[0, 4, "PER"]], "['label']"]},
        "1 type of entities (PER)",
    ),
    "tags": (
        {"tokens": WORDS, "tags": [["B-PER", "O"], ["O", "S-LOC"]]},
        "2 types of entities (LOC, PER)",
    ),
    "plain tags": ({"tokens": WORDS, "tags": [["article", "noun"]]}, "2 tags (article, noun)"),
    "numbers of unknown tags": ({"tokens": WORDS, "tags": [[0, 3]]}, ""),
    "tags that are none": ({"tokens": WORDS, "tags": [[{"a": 1}]]}, ""),
}


@pytest.mark.parametrize("name", SEEN)
def test_labels_and_types_of_entities_are_named(name):
    columns, seen = SEEN[name]
    assert reading_of(columns_of(rows(**columns)), {}).seen == seen


def test_names_of_numbered_tags_are_those_of_the_data_set():
    columns = columns_of(
        rows(tokens=WORDS, ner_tags=[[0, 1]]), {"ner_tags": ["O", "B-PER", "I-PER"]}
    )
    assert reading_of(columns, {}).seen == "1 type of entities (PER)"
