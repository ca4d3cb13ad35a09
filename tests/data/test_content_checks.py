"""Labels whose shape says that they are something else are rejected or remarked on; names of classes are not."""

import json
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import pytest
from rejections import rejects

from train.config import ColumnsConfig, RecordsConfig, S3Config
from train.data.records.content_checks import (
    LABEL_CHECKS,
    TableFacts,
    reject_faults,
)
from train.data.records.raw import read_raw
from train.tasks.classify import CLASSIFY_ROWS
from train.tasks.multilabel import MULTILABEL_ROWS

REGRESS, CLASSES = "task=regress.*data.labels", "list all classes in data.labels"
MANY = f"more than 50 different numbers, such as .*{REGRESS}"
REJECTED = {
    "fractions": (["n/a", "0.5", "1.5"], f"such as 0.5: .*{REGRESS}"),
    "exponents": (["0e0", "1e0"], f"such as 0e0: .*{REGRESS}"),
    "per cent": (["12%", "80 %"], f"12%: .*{REGRESS}"),
    "decimal commas": (["0,64", "2,92"], REGRESS),
    "years": ([str(year) for year in range(1900, 1960)] * 4, MANY),
    "a list": (
        ["['bad', 'boat']", "boat"],
        f"a list: task=multilabel learns several labels.*{CLASSES}",
    ),
    "a list of one": (["['bad']", "boat"], "a list: task=multilabel"),
    "a list of numpy": (["[0 1 0]", "boat"], "a list: task=multilabel"),
    "capitals": (
        ["Neg", "neg", "neg"],
        r"differ only in capitals.*data\.label_map=\{'Neg': 'neg'\}.*data\.labels",
    ),
    "blanks inside": (["very  good", "very good"], r"data\.label_map="),
    "wide letters": (["\uff4eeg", "neg"], r"data\.label_map="),
    "texts": (
        [f"n{number}" for number in range(60)],
        r"60 different labels in 60 rows.*data\.columns\.label right",
    ),
    "joined": (
        ["bad;boat;road", "bad", "boat"],
        r"several labels: task=multilabel with data\.label_separator=';'",
    ),
}
ACCEPTED = {
    "numbers": ["-1", "0", "1"],
    "codes of diseases": ["E11.9", "I10", "J45.909", "401.9"],
    "many": [f"class {number}" for number in range(1500)] * 2,
    "words": ["5 stars", "18-25", "1st", "3D", "4/5", "C++", "Sports, outdoors", "Sports"],
    "with brackets": ["(none)", "[NEU]", "a (b)", "f(x, y) and g", ":)", "{x}"],
    "few rows": ["a", "b", "c"],
}


def column_of(labels, **facts):
    return TableFacts("label", "label", counts=Counter(labels), **facts)


@pytest.mark.parametrize(("labels", "message"), REJECTED.values(), ids=REJECTED)
def test_what_is_no_class_is_rejected_with_the_setting_that_decides(labels, message):
    rejects(message, reject_faults, column_of(labels), LABEL_CHECKS)


@pytest.mark.parametrize("labels", ACCEPTED.values(), ids=ACCEPTED)
def test_names_of_classes_are_accepted_without_a_word(labels):
    reject_faults(column_of(labels), LABEL_CHECKS)


def test_tags_may_contain_any_sign():
    tags = ["NN|NNS", "NN", "NNS", ",", ";", "-LRB-", "``", "$", "Case=Nom|Number=Sing"]
    reject_faults(column_of(tags, takes_words=True), LABEL_CHECKS)


def test_long_labels_are_looked_at_in_no_time():
    for text in ("a, " * 10**5 + "(", "1" * 10**4 + "x", "1,234" * 10**4 + "x", "'" * 10**5):
        reject_faults(column_of([text, f"[{text}"]), LABEL_CHECKS)


# ---- the rows of a file ----------------------------------------------------------------------------------------------


def read(tmp_path: Path, given, *, kind=MULTILABEL_ROWS, rows=40, **settings):
    lines = [
        json.dumps({"text": f"text {n}", "label": label})
        for n, label in enumerate(islice(cycle(given), rows))
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cfg = RecordsConfig(
        path=str(tmp_path / "a.jsonl"), columns=ColumnsConfig(tags="label"), **settings
    )
    return read_raw(cfg, kind, S3Config(), seed=0, folder=tmp_path)


def read_lists(tmp_path: Path, given, **settings):
    raw = read(tmp_path, given, **settings)
    splits = [row for split in raw.splits.values() for row in split]
    found = {int(row["id"]): [raw.labels[number] for number in row["label"]] for row in splits}
    return [found[number] for number in range(len(given))]


HOT = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0, 1, 1]]
MEANT = [["rude", "kind"], [], ["loud", "kind"]]


@pytest.mark.parametrize(
    "labels", [HOT, [[bool(each) for each in row] for row in HOT], list(map(str, HOT))], ids=str
)
def test_a_number_for_each_label_is_read_if_the_labels_are_named(tmp_path, labels):
    assert read_lists(tmp_path, labels, labels=["rude", "loud", "kind"]) == MEANT
    rejects(
        r"lists of 3 numbers, all 0 or 1: .*data\.labels=\[A,B,C\].*data\.columns\.label=\[",
        read,
        tmp_path,
        labels,
    )


LISTS = ["['rude', 'loud']", '["rude", "loud"]', "[rude, loud]", "[rude loud]"]


@pytest.mark.parametrize("separator", [None, ","])
@pytest.mark.parametrize("text", LISTS)
def test_a_list_as_text_is_the_list(tmp_path, text, separator):
    labels = [text, "['rude']", "[]"]
    wanted = [["rude", "loud"], ["rude"], []]
    assert read_lists(tmp_path, labels, label_separator=separator) == wanted


def test_a_name_in_brackets_is_no_list(tmp_path):
    labels = ["(none)", "rude|loud", "{x}"]
    assert read_lists(tmp_path, labels, label_separator="|") == [
        ["(none)"],
        ["rude", "loud"],
        ["{x}"],
    ]


def test_lists_of_class_numbers_are_no_flags(tmp_path):
    assert read_lists(tmp_path, [[0], [1], [0, 1], []]) == [["0"], ["1"], ["0", "1"], []]
    assert read_lists(tmp_path, [[0, 1], [1, 2], [2, 0]]) == [["0", "1"], ["1", "2"], ["2", "0"]]


def test_listed_labels_and_labels_merged_by_the_map_are_not_checked(tmp_path):
    assert read(tmp_path, ["Neg", "neg"], kind=CLASSIFY_ROWS, labels=["Neg", "neg"]).labels == [
        "Neg",
        "neg",
    ]
    merged = read(tmp_path, ["Neg", "neg", "pos"], kind=CLASSIFY_ROWS, label_map={"Neg": "neg"})
    assert merged.labels == ["neg", "pos"]
    rejects(r"data\.label_map", read, tmp_path, ["Neg", "neg"], kind=CLASSIFY_ROWS)


def test_composed_and_decomposed_letters_are_the_same_label(tmp_path):
    labels = ["cafe\u0301", "caf\u00e9", "bar"]
    assert read(tmp_path, labels, kind=CLASSIFY_ROWS).labels == ["bar", "caf\u00e9"]
    assert read(tmp_path, labels, kind=CLASSIFY_ROWS, labels=["cafe\u0301", "bar"]).labels == [
        "cafe\u0301",
        "bar",
    ]
    assert read(tmp_path, labels, kind=CLASSIFY_ROWS, label_map={"cafe\u0301": "inn"}).labels == [
        "inn",
        "bar",
    ]
