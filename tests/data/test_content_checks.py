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
    ROW_CHECKS,
    TableFacts,
    items_of,
    remarks_on,
    shortages,
)
from train.data.records.raw import read_raw
from train.tasks.classify import CLASSIFY_ROWS
from train.tasks.multilabel import MULTILABEL_ROWS

REGRESS, CLASSES = "task=regress.*data.labels", "list all classes in data.labels"
REJECTED = {
    "fractions": (["n/a", "0.5", "1.5"], f"such as 0.5: .*{REGRESS}"),
    "infinity": (["1", "2", "inf"], REGRESS),
    "exponents": (["0e0", "1e0"], f"such as 0e0: .*{REGRESS}"),
    "as numpy writes": (["0.000000000000000000e+00", "1"], REGRESS),
    "per cent": (["12%", "80 %"], f"12%: .*{REGRESS}"),
    "decimal commas": (["0,64", "2,92"], REGRESS),
    "thousands": (["1,234", "12"], REGRESS),
    "thin spaces": (["1\u202f234", "low"], REGRESS),
    "wide digits": (["\uff11.\uff15", "2"], REGRESS),
    "currency": (["$5", "low"], REGRESS),
    "years": (
        [str(year) for year in range(1900, 1960)] * 4,
        f"more than 50 different numbers, such as 1959: .*{REGRESS}",
    ),
    "ratings of few rows": (
        [str(number) for number in range(60)],
        f"more than 50 different numbers.*{REGRESS}",
    ),
    "true and 1": (
        ["true", "0", "1"],
        r"the labels are 0, 1, true, where true may mean 1: data\.label_map=",
    ),
    "dates": (["2024-01-05", "ok"], f"date or time 2024-01-05.*data.columns.label.*{CLASSES}"),
    "dates with dots": (["5.1.2024", "ok"], "the date or time 5.1.2024"),
    "times": (["2024-01-05 00:00:00", "ok"], "the date or time"),
    "names of months": (["5 Jan 2024", "March 3, 2024"], "the date or time"),
    "a list": (
        ["['bad', 'boat']", "boat"],
        f"a list: task=multilabel learns several labels.*{CLASSES}",
    ),
    "numbers in a list": (["[1, 2]", "boat"], "a list: task=multilabel learns several labels"),
    "a list of numpy": (["[0 1 0]", "boat"], "a list: task=multilabel"),
    "a list without quotes": (["[bad, boat]", "boat"], "a list: task=multilabel"),
    "an empty list": (["[]", "boat"], "a list: task=multilabel"),
    "a set": (["{'bad', 'boat'}", "boat"], "a list: task=multilabel"),
    "a tuple": (["('bad', 'boat')", "boat"], "a list: task=multilabel"),
    "an object": (['{"value": "bad"}', "boat"], r"an object: .*\(data\.columns\.label\)"),
    "capitals": (
        ["Neg", "neg", "neg"],
        r"differ only in capitals.*data\.label_map=\{'Neg': 'neg'\}.*data\.labels",
    ),
    "blanks inside": (["very  good", "very good"], r"data\.label_map="),
    "wide letters": (["\uff4eeg", "neg"], r"data\.label_map="),
    "an invisible letter": (["neg\u200b", "neg"], r"data\.label_map=.*u200b"),
    "forms of an emoji": (["\u2764", "\u2764\ufe0f"], r"data\.label_map="),
    "leading zeros": (["01", "1"], r"data\.label_map="),
    "texts": (
        [f"n{number}" for number in range(60)],
        r"60 different labels in 60 rows.*data\.columns\.label right",
    ),
    "joined": (
        ["bad;boat;road", "bad", "boat"],
        r"several labels: task=multilabel with data\.label_separator=';'",
    ),
    "joined by commas": (["bad, boat", "bad", "boat"], r"data\.label_separator=','"),
}
REMARKED = {
    "perhaps joined": (["bad;boat", "road"], "data.label_separator=';'"),
    "paths": (["Books|Fiction", "Books|Crime", "Books"], "data.label_separator='|'"),
    "codes of diseases": (["E11.9", "I10", "J45.909", "401.9"], "also holds 401.9"),
    "a date among names": (["good", "bad", "2024-01-05"], "also holds 2024-01-05"),
    "ids": (
        [str(1000 + 7 * number) for number in range(60)] * 15,
        "60 different numbers in label are learnt",
    ),
    "ratings": (
        [str(number) for number in range(1, 101)] * 3,
        "100 different numbers in label are learnt as classes",
    ),
}
ACCEPTED = {
    "numbers": ["0", "1", "2"],
    "negative numbers": ["-1", "0", "1"],
    "numbers with zeros": [f"{number:03}" for number in range(4, 900, 8)] * 3,
    "numbers with zeros and points": ["004", "510", "808.8"],
    "countries": ["de", "en", "pt-BR", "zh_Hans", "NO", "IE"],
    "intents": [f"card_{number}" for number in range(77)] * 2,
    "intents as numbers": [str(number) for number in range(50)] * 3,
    "many": [f"class {number}" for number in range(1500)] * 2,
    "words": [
        "5 stars",
        "18-25",
        "2020-2021",
        "1st",
        "3D",
        "B2B",
        "4/5",
        "C++",
        "R&D",
        "Sports, outdoors",
        "Sports",
    ],
    "with brackets": ["(none)", "[NEU]", "a (b)", "f(x, y) and g", ":)", "{x}"],
    "dots": ["v1.2.3", "1.2.3", "sec. 4"],
    "two of a pair": ["Yes", "maybe", "no"],
    "few rows": ["a", "b", "c"],
}


def column_of(labels, **facts):
    return TableFacts("label", "label", counts=Counter(labels), **facts)


def check_column(facts):
    return remarks_on(facts, LABEL_CHECKS)


@pytest.mark.parametrize(("labels", "message"), REJECTED.values(), ids=REJECTED)
def test_what_is_no_class_is_rejected_with_the_setting_that_decides(labels, message):
    rejects(message, check_column, column_of(labels))


@pytest.mark.parametrize(("labels", "message"), REMARKED.values(), ids=REMARKED)
def test_what_may_be_no_class_is_remarked_on(labels, message):
    (said,) = check_column(column_of(labels))
    assert message in said


@pytest.mark.parametrize("labels", ACCEPTED.values(), ids=ACCEPTED)
def test_names_of_classes_are_accepted_without_a_word(labels):
    assert check_column(column_of(labels)) == []


def test_tags_may_contain_any_sign():
    tags = ["NN|NNS", "NN", "NNS", ",", ";", "-LRB-", "``", "$", "Case=Nom|Number=Sing"]
    assert check_column(column_of(tags, takes_words=True)) == []


NO_WORDS = {
    "numbers": [["1", "2", "3"], ["1", "2"]],
    "ids": [["s7", "s7"], ["s8", "s8"]],
    "ids with numbers": [["s7.1", "s7.2", "s7.3"]],
    "signs and numbers": [["1.5", "2"], ["3", "99"]],
}
WORDS = {
    "words": [["Anna", "sings"], ["She", "too"]],
    "numbers among words": [["1", "2", "3"], ["Anna", "99"]],
    "few": [["2024", "1"]],
    "sentences of one word": [["2024"]] * 9,
}


@pytest.mark.parametrize("sentences", [*NO_WORDS.values(), *WORDS.values()], ids=str)
def test_sentences_whose_words_are_numbers_or_ids_are_rejected(sentences):
    facts = TableFacts("tags", "tags", takes_words=True)
    for sentence in sentences:
        facts.add_words(sentence)
    if sentences in NO_WORDS.values():
        rejects("nothing but digits and signs.*data.columns.tokens", remarks_on, facts, ROW_CHECKS)
    else:
        assert remarks_on(facts, ROW_CHECKS) == []


def test_lines_that_fields_have_swallowed_and_labels_without_a_name_are_remarked_on():
    facts = TableFacts("label", "label", rows=160, lines=200, unmapped={"b", "a"})
    said = remarks_on(facts, ROW_CHECKS)
    assert said == [
        "data.label_map does not name a, b: these labels are left unchanged",
        "200 lines were read as 160 rows: if no text has line ends, set data.quotes=none",
    ]
    facts = TableFacts("label", "label", rows=160, lines=160)
    assert remarks_on(facts, ROW_CHECKS) == []


def test_labels_that_are_not_learnt_or_not_measured_and_few_examples_are_remarked_on():
    train = {"examples": 99, "label_counts": {"n": 99, "p": 1, "q": 0}}
    held_out = {"examples": 10, "label_counts": {"n": 10, "p": 0, "q": 1}}
    assert list(shortages({"train": train, "validation": held_out})) == [
        "train has no row with the label q: it cannot be learnt",
        "validation has no row with the label p: it is not measured",
        "validation has only 10 examples: one answer moves a score by 10%; hold out at least 30",
    ]


def test_long_labels_are_looked_at_in_no_time():
    for text in ("a, " * 10**5 + "(", "1" * 10**4 + "x", "1,234" * 10**4 + "x", "'" * 10**5):
        assert items_of(text) is None
        check_column(column_of([text, f"[{text}"]))


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


LISTS = [
    "['rude', 'loud']",
    '["rude", "loud"]',
    "['rude' 'loud']",
    "[rude, loud]",
    "{'rude', 'loud'}",
]


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
