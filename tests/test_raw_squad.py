"""SQuAD files of both versions and question answering in other formats."""

import json
from pathlib import Path

import datasets
import pytest

from train.config import ColumnsConfig, InputError, RecordsConfig, S3Config
from train.data.raw import read_raw, read_texts

S3 = S3Config()
CONTEXT = "The Normans (Norman: Nourmands) gave their name to Normandy. Café 😀 owners agreed."


def question(name, text="Normandy", start=None, **more):
    start = CONTEXT.index(text) if start is None else start
    return {"id": name, "question": f"  what is {name}?", "answers": [{"text": text, "answer_start": start}], **more}


def squad(*qas, context=CONTEXT, **more):
    return json.dumps(
        {**more, "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]}, indent=1
    )


def read(folder: Path, *names, unanswerable=True, **settings):
    columns = ColumnsConfig(**settings.pop("columns", {}))
    cfg = RecordsConfig(path=str(folder), train=names[0], validation=names[1], columns=columns, **settings)
    return read_raw(cfg, "qa", S3, seed=0, scratch=folder / "scratch", unanswerable=unanswerable)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.json").write_text(squad(question("one"), question("two", "owners"), version="1.1"))
    return tmp_path


def test_version_1(folder):
    (folder / "dev.json").write_text(squad(question("three", "😀")))
    raw = read(folder, "train.json", "dev.json")
    assert raw.labels == [] and raw.splits["train"].column_names == ["id", "question", "context", "answers"]
    assert raw.splits["train"][1] == {
        "id": "two",
        "question": "  what is two?",
        "context": CONTEXT,
        "answers": {"text": ["owners"], "answer_start": [CONTEXT.index("owners")]},
    }
    assert raw.splits["validation"][0]["answers"]["text"] == ["😀"]  # offsets are characters, not bytes


def test_version_2(folder):
    plausible = question("impossible", is_impossible=True, plausible_answers=[{"text": "x", "answer_start": 0}])
    also = {"id": "empty", "question": "why?", "answers": [], "is_impossible": True}
    (folder / "dev.json").write_text(squad(plausible, also, question("there", is_impossible=False), version="v2.0"))
    answers = read(folder, "train.json", "dev.json").splits["validation"]["answers"]
    assert [answer["text"] for answer in answers] == [[], [], ["Normandy"]]
    assert answers[0]["answer_start"] == []


def test_without_unanswerable_a_question_without_an_answer_is_a_bad_row(folder):
    empty = {"id": "empty", "question": "why?", "answers": []}
    (folder / "dev.json").write_text(squad(empty, question("there")))
    files = ("train.json", "dev.json")
    with pytest.raises(InputError, match=r"dev\.json, question empty: no answer; for SQuAD v2 set task.unanswerable"):
        read(folder, *files, unanswerable=False)
    raw = read(folder, *files, unanswerable=False, max_bad_rows=1)
    assert raw.splits["validation"]["id"][:] == ["there"] and raw.dropped["validation"]["bad_rows"] == 1
    assert len(read(folder, *files).splits["validation"]) == 2


def test_answers_that_are_not_where_they_should_be(folder):
    qas = [
        question("fine"),
        question("shifted", start=CONTEXT.index("Normandy") + 1),
        question("behind", start=1000),
        question("before", text="The", start=-2),
        {"id": "none", "question": "why?"},
        {"id": "shape", "question": "why?", "answers": ["Normandy"]},
        question(7),
        {"id": "blank", "question": " ", "answers": []},
        "no object",
    ]
    (folder / "dev.json").write_text(squad(*qas))
    with pytest.raises(
        InputError, match=r"7 bad rows, .*dev\.json, question shifted: answer 'Normandy' is not at char"
    ):
        read(folder, "train.json", "dev.json")
    raw = read(folder, "train.json", "dev.json", max_bad_rows=7)
    assert raw.splits["validation"]["id"][:] == ["fine", "7"]
    assert [place.partition(": ")[0].rpartition(", ")[2] for place in raw.dropped["validation"]["examples"]] == [
        "question shifted",
        "question behind",
        "question before",
        "question none",
        "question shape",
        "question blank",
        "data[0].paragraphs[0].qas[8]",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [\n}', r"dev\.json:2: not JSON: "),
        ('{"data": {}}', "is not SQuAD"),
        ('{"data": [{"paragraphs": 3}]}', r"dev\.json, data\[0\]: no list paragraphs"),
        (squad(question("one"), question("one")), "two questions have the id one"),
        (squad(question("one")).replace("Norman:", "\\ud83d"), "half of a surrogate pair"),
        ('{"data": []}', "validation: no row is left"),
    ],
)
def test_broken_files_are_one_line(folder, content, message):
    (folder / "dev.json").write_text(content)
    with pytest.raises(InputError, match=message) as error:
        read(folder, "train.json", "dev.json", format="squad")
    assert "\n" not in str(error.value)


def test_the_hub_shape_is_checked_too(folder):
    rows = {
        "id": ["a", "b", "c"],
        "question": ["q"] * 3,
        "context": [CONTEXT] * 3,
        "answers": [
            {"text": ["Normandy", "The"], "answer_start": [CONTEXT.index("Normandy"), 0]},
            {"text": [], "answer_start": []},
            {"text": ["Normandy"], "answer_start": [3]},
        ],
    }
    tables = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows), dev=datasets.Dataset.from_dict(rows))
    tables.save_to_disk(folder / "saved")
    with pytest.raises(InputError, match="split train, row 3: answer 'Normandy' is not at character 3 of the context"):
        read(folder / "saved", "train", "dev")
    raw = read(folder / "saved", "train", "dev", max_bad_rows=1, columns={"id": "id"})
    assert raw.splits["train"]["answers"][:] == rows["answers"][:2] and raw.splits["train"]["id"][:] == ["a", "b"]


def test_contexts_are_held_out_whole(folder):
    paragraphs = [
        {
            "context": f"{number} is it",
            "qas": [{"id": f"{number}-{i}", "question": "q", "answers": []} for i in range(5)],
        }
        for number in range(100)
    ]
    (folder / "all.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    splits = read(folder, "all.json", None, validation_fraction=0.3).splits
    held_out = set(splits["validation"]["context"])
    assert 10 < len(held_out) < 50 and len(splits["validation"]) == 5 * len(held_out)
    assert not held_out & set(splits["train"]["context"])


def test_new_questions(folder):
    (folder / "new.jsonl").write_text('{"question": "q", "context": "c"}\n')
    cfg = RecordsConfig(path="unused")
    assert list(read_texts(cfg, "qa", str(folder / "new.jsonl"), S3)) == [{"id": "0", "question": "q", "context": "c"}]
    rows = list(read_texts(cfg, "qa", str(folder / "train.json"), S3))
    assert [row["id"] for row in rows] == ["one", "two"] and rows[0]["answers"]["text"] == ["Normandy"]
    (folder / "new.json").write_text(squad({"id": "a", "question": "q"}))
    assert "answers" not in next(iter(read_texts(cfg, "qa", str(folder / "new.json"), S3)))
