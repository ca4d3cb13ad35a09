"""Labelled rows and questions of any format as the same tables; what cannot be used is named, counted and rejected."""

import gzip
import json
import os
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import datasets
import huggingface_hub.constants
import pyarrow.parquet
import pytest
from rejections import rejects

from train.config import ColumnsConfig, RecordsConfig, S3Config
from train.data.files.find import is_match, matching
from train.data.records import formats
from train.data.records.raw import read_raw, read_texts
from train.data.records.sources import version
from train.tasks.classify.task import CLASSIFY_ROWS
from train.tasks.multilabel.task import MULTILABEL_ROWS
from train.tasks.qa import QAConfig
from train.tasks.qa.windows import qa_rows

S3 = S3Config()
LONG = "a" * 2**19 + "\n"
ROWS = [(f"text number {number}", str(number % 2)) for number in range(40)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one, and no network; the library's own caches are elsewhere and must stay empty."""
    caches = tmp_path / "caches"
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, caches / name)
    # the environment is read at its import
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "data").mkdir()
    yield tmp_path / "data"
    assert not any(path.is_file() for path in caches.rglob("*"))


def put(folder: Path, name: str, content: str | bytes) -> str:
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(folder / name)


def csv_of(rows, header=("text", "label"), delimiter=","):
    return "".join(delimiter.join(row) + "\n" for row in [header, *rows])


def labelled(*labels):
    return csv_of([(f"text {number}", str(label)) for number, label in enumerate(labels)])


def read(path, *, seed=0, s3=S3, kind=CLASSIFY_ROWS, **settings):
    columns = settings.pop("columns", {})
    cfg = RecordsConfig(path=str(path), columns=ColumnsConfig(**columns), **settings)
    return read_raw(cfg, kind, s3, seed=seed, folder=Path(mkdtemp()))


def new_rows(path, *, labels=(), kind=CLASSIFY_ROWS, **settings):
    cfg = RecordsConfig(
        path="unused", columns=ColumnsConfig(**settings.pop("columns", {})), **settings
    )
    return list(read_texts(cfg, kind, str(path), S3, labels=labels))


# ---- CSV ----------------------------------------------------------------------------------------------------------


def test_all_of_the_original_text_comes_through(folder):
    originals = (
        'plain|a "quote"|back\\slash|ends in \\|new\nline|a\r\nb|c\rd| blanks |é😀,;\t\''.split(
            "|"
        )
    )
    for name, escape, quoted in (("a.csv", "\\", '\\"'), ("b.csv.gz", None, '""')):
        texts = [text.replace("\\", "\\\\") if escape else text for text in originals]
        rows = "".join('"' + text.replace('"', quoted) + '","1"\n' for text in texts)
        path = put(folder, name, f'text,label\n{rows}"","x"\n')
        good = new_rows(put(folder, f"good-{name}", f"text,label\n{rows}"), escape=escape)
        assert [row["text"] for row in good] == originals
        # the line that it begins on
        rejects(rf"{name}:13: an empty text", read, path, escape=escape)
    rejects(r"a\.csv:3: not CSV: ',' expected after '\"'", read, folder / "a.csv")
    path = put(folder, "c.csv", "1,good\n0,bad\n")
    rows = new_rows(path, header=False, columns={"text": "1", "label": "0"})
    assert rows == [
        {"id": "0", "text": "good", "label": "1"},
        {"id": "1", "text": "bad", "label": "0"},
    ]


def test_quotation_marks_are_text_where_tabs_separate_fields_and_swallow_no_row_unsaid(
    folder, caplog
):
    marks = {3: '"open {}', 7: '{} closed"'}  # of twenty rows
    texts = [
        marks.get(number % 20, "{}").format(text) for number, (text, _) in enumerate(ROWS * 5)
    ]
    rows = [(text, "01"[number % 2]) for number, text in enumerate(texts)]
    path = put(folder, "a.tsv", csv_of(rows, delimiter="\t"))
    raw = read(path)
    assert (
        sum(map(len, raw.splits.values())) == 200 == raw.dropped["train"].read_lines
        and not caplog.messages
    )
    assert [row["text"] for row in new_rows(path)] == texts
    assert [
        row["text"] for row in new_rows(put(folder, "b.txt", csv_of(rows, delimiter="\t")), **TABS)
    ] == texts
    assert not caplog.messages
    assert len(new_rows(path, quote='"')) == 160
    first, second = caplog.messages
    assert first.startswith(
        f"{path}:5 and 9 more rows: a field has lines that look like rows, or very many lines; if"
    )
    assert second == f"{path}: 200 lines were read as 160 rows"
    dropped = read(path, quote='"').dropped["train"]
    assert (dropped.read_lines, dropped.read_rows, dropped.bad_rows) == (200, 160, 0)
    caplog.clear()
    put(folder, "c.tsv", csv_of([('"he said ""a"""', "1"), ('"so"', "0")], delimiter="\t"))
    new_rows(folder / "c.tsv")
    assert (
        "c.tsv:2 and 0 more rows: quotation marks around fields are kept; data.quote='\"' removes"
        in caplog.text
    )
    caplog.clear()
    put(folder, "d.tsv", "text\tlabel\n" + '"so"\t0\n"a"\t"1"\n')  # as R writes all fields
    new_rows(folder / "d.tsv")
    assert "d.tsv:3 and 0 more rows: quotation marks" in caplog.text


TABS = {"format": "csv", "delimiter": "\t"}
BAD = {  # a row, and why it is left out
    b"fine,1": None,
    b"too,many,fields": "3 fields where the header has 2",
    b"few": "1 field where the header has 2",
    b'"early" quote,1': "not CSV: ",
    b"caf\xe9,1": "byte 0xe9 is not utf-8",
    b",1": "an empty text",
    b"no label,": "an empty label",
    b"unknown,7": "unknown label 7; the labels are 0, 1",
    b"nul \0,1": "",  # for which Python 3.10 has its own words
    b"also fine,0": None,
}


def test_bad_rows_are_named_by_line_counted_and_left_out_or_rejected(folder):
    bad = put(folder, "a.csv", b"\n".join([b"text,label", *BAD]))
    path = put(folder, "good.csv", csv_of(ROWS))
    settings = {"validation": "a.csv", "labels": ["0", "1"]}
    raw = read(path, **settings, max_bad_rows=8)
    assert raw.splits["validation"]["text"][:] == ["fine", "also fine"]
    # rows, not lines: those that are bad count
    assert raw.splits["validation"]["id"][:] == [
        "0",
        "9",
    ]
    dropped = raw.dropped["validation"]
    assert dropped.bad_rows == 8 and dropped.left_out == 0 and raw.dropped["train"].bad_rows == 0
    reasons = [
        f"{bad}:{line}: {reason}"
        for line, reason in enumerate(BAD.values(), 2)
        if reason is not None
    ]
    for example, reason in zip(dropped.bad_examples, reasons, strict=True):
        assert example.startswith(reason)
    rejects(
        r"validation: 8 bad rows, .*max_bad_rows=7 .*a\.csv:3: 3 fields",
        read,
        path,
        **settings,
        max_bad_rows=7,
    )
    path = put(folder, "many.csv", csv_of([*ROWS, *[("", "1")] * 30]))
    rejects(
        r"30 bad rows, .*: (\S+many\.csv:\d+: an empty text; ){2}\.\.\.$",
        read,
        path,
        max_bad_rows=20,
    )


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (
            "text,sentiment\na,1\n",
            {},
            r"a\.csv:2: no column label \(data.columns.label\); the columns are: text, sent",
        ),
        ("text;label\na;1\n", {}, "columns are: text;label; the delimiter seems to be ';'"),
        (
            "text;label\na, b;1\n",
            {},
            "2 fields where the header has 1; the delimiter seems to be ';'",
        ),
        (
            "text, label\na,1\n",
            {},
            r'columns are: text,  label; " label" exists: blanks and capitals matter',
        ),
        (",".join(map(str, range(10**4))) + "\n" + "a," * 9999, {}, r"18, 19, \.\.\. \(10,000\)"),
        (
            f'text,label\n"{LONG * 3}",1\n',
            {},
            r"a\.csv:2: a field of more than .* characters, or an unclosed quote",
        ),
        (
            'text,label\na,1\n"b,1\nc,0\n',
            {},
            r"a\.csv:3: not CSV: .*: the field's quote is not closed",
        ),
        (
            'text,label\n"b,1\n"c",0\n',
            {},
            r"a\.csv:2: not CSV: .*: the field's quote is not closed",
        ),
        ("text,text\na,1\n", {}, r"a\.csv:1: two columns are named text"),
        (b"t\xe9xt,label\na,1\n", {}, r"a\.csv:1: no header: byte 0xe9 is not utf-8"),
        ("text,label\n", {}, r"train: no row is left: there is none in .*/a\.csv$"),
        ("", {}, r"train: no row is left: there is none in .*/a\.csv$"),
        (
            "text,label\n",
            {"format": "csv"},
            r"there is none in .*/a\.csv, read as data\.format=csv$",
        ),
        (
            "text,label\na,1\n",
            {"validation_fraction": 1 - 1e-9},
            "train: no row is left: .* of 1 rows leaves none",
        ),
        (
            "text,label\na,1\nb,1\n",
            {"validation_fraction": 1e-9},
            "validation: no row is left: .* leaves none",
        ),
        (csv_of([(text, "1") for text, _ in ROWS]), {}, "train: all .* rows have the label 1"),
        (
            csv_of(ROWS),
            {"label_map": {"0": None, "1": None}},
            "train: no row is left.* data.label_map maps 40 to null",
        ),
        (
            csv_of(ROWS),
            {"quote": ","},
            r"data.delimiter, data.quote and data.escape are \[',', ','\]: they must",
        ),
        (csv_of(ROWS), {"validation": "a.*"}, r"a\.csv: both in train and in validation"),
        (
            "text;label\na;2,5\nb;3,0\n",
            {"delimiter": ";"},
            "not all plain whole ones, such as 2,5",
        ),
        (csv_of([*ROWS, ("text", "label"), *ROWS]), {}, r"1 bad row.*a\.csv:42: the header again"),
        (
            '{"data": [{"text": "a"}]}',
            {"format": "jsonl"},
            "no column text .*: data; are the rows in data",
        ),
    ],
)
def test_unusable_data_is_one_line(folder, content, settings, message):
    rejects(message, read, put(folder, "a.csv", content), **settings)


# ---- splits -------------------------------------------------------------------------------------------------------


def test_held_out_rows_depend_on_text_and_seed_alone(folder):
    rows = [(f"text {number % 300}", str(number % 2)) for number in range(600)]
    first = read(put(folder, "a.csv", csv_of(rows)), validation_fraction=0.2).splits
    train, held_out = (set(first[split]["text"]) for split in ("train", "validation"))
    assert not train & held_out and len(train | held_out) == 300 and 30 < len(held_out) < 90
    other = read(put(folder, "b.csv", csv_of(rows[::-1])), validation_fraction=0.2).splits
    assert set(other["validation"]["text"]) == held_out
    assert (
        set(read(folder / "a.csv", validation_fraction=0.2, seed=1).splits["validation"]["text"])
        != held_out
    )


def test_samples_are_drawn_with_the_seed_and_keep_the_order(folder):
    path = put(folder, "a.csv", csv_of([(f"{number}", str(number % 2)) for number in range(500)]))
    settings = {"validation": "b.csv", "max_train_examples": 100, "max_validation_examples": 50}
    put(folder, "b.csv", csv_of(ROWS))

    def drawn(seed):
        splits = read(path, seed=seed, **settings).splits
        assert len(splits["validation"]) == 40
        return [int(text) for text in splits["train"]["text"]]

    once = drawn(0)
    assert len(once) == 100 and once == sorted(once) and max(once) > 300
    assert once == drawn(0) != drawn(1)


def test_files_below_a_folder(folder):
    (folder / "sub").mkdir()
    for number in range(3):
        put(folder, f"sub/part-{number}.csv", csv_of(ROWS[number * 10 : number * 10 + 10]))
    put(folder, "dev.jsonl", '{"text": "a", "label": 1}\n')
    put(folder, "mm.jsonl", '{"text": "b", "label": 0.0}\n')
    rejects(
        r"contains 5 files \(dev.jsonl, mm.jsonl, .*; say which is for training: data.train",
        read,
        folder,
    )
    raw = read(
        folder,
        train="sub/part-*.csv",
        validation="dev.jsonl",
        more_validation={"mismatched": "mm.jsonl"},
    )
    assert list(raw.splits) == ["train", "validation", "mismatched"] == list(raw.dropped)
    assert raw.splits["train"]["text"][:] == [text for text, _ in ROWS[:30]]
    assert raw.splits["train"]["id"][:] == [str(number) for number in range(30)]
    assert raw.splits["validation"]["label"][:] == [1] and raw.splits["mismatched"]["label"][
        :
    ] == [0]


# ---- labels -------------------------------------------------------------------------------------------------------


def test_a_glob_matches_the_same_names_on_disk_and_in_s3(tmp_path):
    names = [
        "a.jsonl",
        "train/a.jsonl",
        "train/b1.csv",
        "train/deep/er/a.jsonl",
        "train/.x/a.jsonl",
        ".a.jsonl",
    ]
    names += ["train/[a].jsonl", "train/__pycache__/a.jsonl", "other/train/a.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = [
        "train/**/*.jsonl",
        "**/a.jsonl",
        "**",
        "train/**",
        "**/train/*",
        "*.jsonl",
        "*/*.jsonl",
        "train/?1.csv",
    ]
    patterns += [
        "**/**/a.jsonl",
        "train/b[0-9].csv",
        "train/[!b]*",
        "train/[[]a].jsonl",
        "train/**.jsonl",
        ".*.jsonl",
    ]
    patterns += [
        "t*/**/er/*",
        "train/.x/*",
        "**/.x/*",
        "./train/*.csv",
        "train",
        "A.jsonl",
        "**/deep/**/*.jsonl",
    ]
    for pattern in patterns:
        here = {
            path.relative_to(tmp_path).as_posix() for path in matching(str(tmp_path / pattern))
        }
        assert here == {name for name in names if is_match(name, pattern)}, pattern


def test_labels_are_found_and_sorted_or_keep_the_order_of_the_settings(folder):
    numbers = [(f"text {number}", str(number % 12)) for number in range(200)]
    raw = read(put(folder, "a.csv", csv_of(numbers)))
    assert raw.labels == [str(number) for number in range(12)]
    assert all(raw.labels[row["label"]] == str(int(row["id"]) % 12) for row in raw.splits["train"])
    words = csv_of([("a", "no"), ("b", "Yes"), ("c", "maybe")])
    assert read(put(folder, "b.csv", words)).labels == ["Yes", "maybe", "no"]
    put(folder, "dev.csv", csv_of([("x", "maybe"), ("y", "1")]))
    path = put(folder, "c.csv", csv_of(ROWS))
    raw = read(path, validation="dev.csv", labels=["1", "0", "maybe"])
    assert raw.labels == ["1", "0", "maybe"] and raw.splits["validation"]["label"][:] == [2, 0]
    assert all(raw.labels[row["label"]] == str(int(row["id"]) % 2) for row in raw.splits["train"])
    rejects(
        r"dev\.csv:2: unknown label maybe; the labels are 0, 1", read, path, validation="dev.csv"
    )


def test_label_map(folder):
    stars = [1, 2.0, "3", 4, 5, 1.5, None, -1]
    lines = [json.dumps({"text": f"{number}", "label": stars[number % 8]}) for number in range(80)]
    path = put(folder, "a.jsonl", "\n".join(lines))
    names = {
        "5": "good",
        "1.0": "very bad",
        "2": "bad",
        "3": None,
        "4": "good",
        "": None,
        "-1": None,
        "1.5": "bad",
    }
    raw = read(path, label_map=names)
    assert raw.labels == ["very bad", "bad", "good"]  # by the numbers of the data
    of_row = {int(row["id"]) % 8: raw.labels[row["label"]] for row in raw.splits["train"]}
    assert of_row == {0: "very bad", 1: "bad", 3: "good", 4: "good", 5: "bad"}
    assert raw.dropped["train"].left_out == 30 and not raw.remarks
    del names["2"]
    raw = read(path, label_map=names)
    assert raw.labels == ["very bad", "bad", "2", "good"]
    assert raw.remarks == ["data.label_map does not name 2: these labels are left unchanged"]
    assert read(path, label_map=names | {"4": "a", "b": "x"}).labels == [
        "very bad",
        "bad",
        "2",
        "a",
        "good",
    ]
    raw = read(path, label_map=names, labels=["bad", "good", "very bad"], max_bad_rows=10)
    assert (
        "a.jsonl:2: unknown label 2; the labels are bad, good"
        in raw.dropped["train"].bad_examples[0]
    )


def test_a_label_is_the_same_in_any_format(folder):
    for number, (first, second, same) in enumerate(
        [("0.0", "+1", [0, 1.0]), ("False", "TRUE", [False, True])]
    ):
        path = put(
            folder,
            f"{number}.csv",
            csv_of([(text, (first, second)[int(label)]) for text, label in ROWS]),
        )
        names = ["0", "1"] if number == 0 else ["false", "true"]
        lines = [json.dumps({"text": text, "label": same[int(label)]}) for text, label in ROWS]
        put(folder, f"{number}.jsonl", "\n".join(lines))
        raw = read(path, validation=f"{number}.jsonl")
        assert raw.labels == names and raw.splits["validation"]["label"][:] == [0, 1] * 20
        # 0 and 1 are in their order, words in the alphabet's
        raw = read(path, label_map={second: "a", first: "b"})
        assert raw.labels == (["b", "a"] if number == 0 else ["a", "b"])
        assert read(path, labels=[second, first]).labels == [second, first]


def test_any_number_of_labels_for_a_row(folder):
    put(folder, "dev.jsonl", '{"text": "bad", "label": ["art"]}')

    def labels_of(*rows):
        lines = [
            json.dumps({"text": f"text {number}", "label": row}) for number, row in enumerate(rows)
        ]
        path = put(folder, "a.jsonl", "\n".join(lines))
        raw = read(path, kind=MULTILABEL_ROWS, validation="dev.jsonl", label_map={"old": None})
        return [[raw.labels[each] for each in row] for row in raw.splits["train"]["label"]]

    assert labels_of(["fun", "art"], [], ["art", "art"], ["art", "old"]) == [
        ["fun", "art"],
        [],
        ["art"],
        ["art"],
    ]
    assert labels_of(["art"], []) == [["art"], []]
    rejects("train: no row has a label, so there is nothing to learn", labels_of, [], [])
    rejects(
        "train: all 3 rows have the label art, so there is nothing to learn",
        labels_of,
        *[["art"]] * 3,
    )


SINGLE = [
    (
        ["bad", "boat"],
        r"label holds \['bad', 'boat'\], which is a list: task=multilabel .*; task=classify learns one",
    ),
    ([], "a list: task=multilabel learns several labels"),
    ({"value": "bad"}, r"an object, not a label; .*data\.columns\.label=label\.value"),
    ({"text": ["a"], "answer_start": [1]}, "which are answers: set task=qa"),
]


@pytest.mark.parametrize(("label", "message"), SINGLE, ids=str)
def test_what_is_not_one_label_is_rejected_by_row(folder, label, message):
    lines = [json.dumps({"text": text, "label": other}) for text, other in ROWS]
    path = put(folder, "a.jsonl", "\n".join([*lines, json.dumps({"text": "x", "label": label})]))
    rejects(r"1 bad row, .*a\.jsonl:41: " + f".*{message}", read, path)


# ---- formats ------------------------------------------------------------------------------------------------------


def test_json_lines_with_objects_in_them(folder):
    lines = [json.dumps({"review": {"body": text, "stars": int(label)}}) for text, label in ROWS]
    bad = {
        '{"review": 1}': "no review.body",
        "[1]": "not a JSON object on one line but a list",
        "{": "not a JSON object on one line",
        '{"review": {"body": 3, "stars": 1}}': "int), not a str",
        '{"review": {"body": "\\ud83d", "stars": 1}}': "half",
    }
    path = put(folder, "a.json", "\n\n".join([*lines, *bad]))
    raw = read(path, columns={"text": "review.body", "label": "review.stars"}, max_bad_rows=5)
    assert sorted(row["text"] for table in raw.splits.values() for row in table) == sorted(
        text for text, _ in ROWS
    )
    examples = enumerate(zip(raw.dropped["train"].bad_examples, bad.values(), strict=True))
    assert all(
        f"a.json:{81 + 2 * number}: " in where and reason in where
        for number, (where, reason) in examples
    )


DOCUMENTS = {
    "a list": lambda rows: json.dumps(rows),
    "an indented list": lambda rows: json.dumps(rows, indent=2),
    "a line for each": lambda rows: "[" + ",\n".join(map(json.dumps, rows)) + "]",
    "wrapped": lambda rows: json.dumps({"version": 1, "tags": ["a"], "rows": rows}, indent=2),
}


@pytest.mark.parametrize("write", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
def test_one_json_document_is_read_as_its_rows(folder, write, name):
    rows = [{"text": text, "label": label} for text, label in ROWS]
    found = new_rows(put(folder, name, write([*rows, {"text": "last"}])))
    assert [row["text"] for row in found] == [text for text, _ in ROWS] + ["last"]
    for content, message in (
        (write([*rows, 3]), f"{name}, row 41: a int where an object should be"),
        (write(rows)[:-1], rf"{name}:\d+: not JSON: "),
        (
            write([[]]),
            f"{name}, row 1: a list where"
            if write is not DOCUMENTS["wrapped"]
            else "0 lists of rows",
        ),
    ):
        rejects(message, read, put(folder, name, content))


def test_lines_may_end_in_carriage_returns_alone(folder):
    text = csv_of([*ROWS, ("bad",)])
    says = r"1 bad row, .*a\.csv:42: 1 field where the header has 2"
    for end in ("\n", "\r\n", "\r"):
        rejects(says, read, put(folder, "a.csv", text.replace("\n", end)))
        lines = end.join(json.dumps({"text": text, "label": label}) for text, label in ROWS)
        assert [row["text"] for row in new_rows(put(folder, "a.jsonl", lines))] == [
            text for text, _ in ROWS
        ]


@pytest.mark.parametrize("header", ["text,label", "Text,Label", "\ufefftext, label"])
def test_files_that_were_joined_have_another_header(folder, header):
    rows = csv_of(ROWS).removeprefix("text,label\n")
    path = put(folder, "a.csv", f"text,label\n{rows}{header}\n{rows}")
    rejects(r"1 bad row.*a\.csv:42: the header again", read, path)
    path = put(
        folder, "b.csv", f"text,label\n{rows}{','.join(reversed(header.split(',')))}\n{rows}"
    )
    rejects(
        r"b\.csv:42: a second header, whose columns are in another order",
        read,
        path,
        max_bad_rows=99,
    )


def test_a_column_that_is_not_read_may_have_any_type(folder):
    columns = table().to_dict()
    counts = pyarrow.array(
        [[("a", 1)]] * len(ROWS), pyarrow.map_(pyarrow.string(), pyarrow.int8())
    )
    pyarrow.parquet.write_table(pyarrow.table(columns | {"counts": counts}), folder / "a.parquet")
    assert sum(map(len, read(folder / "a.parquet").splits.values())) == 40
    rejects(
        "a.parquet cannot be read as Parquet: ",
        read,
        folder / "a.parquet",
        columns={"label": "counts"},
    )


def table(names=("neg", "pos")):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))}
    )
    rows = {"text": [text for text, _ in ROWS], "label": [int(label) for _, label in ROWS]}
    return datasets.Dataset.from_dict(rows, features)


@pytest.mark.parametrize("kind", ["parquet", "saved", "hub"])
def test_names_of_labels_in_the_data(folder, kind):
    path = folder / "set"
    if kind == "saved":
        datasets.DatasetDict(train=table(), test=table().select(range(10))).save_to_disk(path)
    else:
        path.mkdir()
        table().to_parquet(path / "train-00000.parquet")
        table().select(range(10)).to_parquet(path / "test-00000.parquet")
    names = (
        {"train": "train-*", "validation": "test-*"}
        if kind == "parquet"
        else {"validation": "test"}
    )
    settings = names | ({"format": "hub"} if kind == "hub" else {})
    raw = read(path, **settings)
    assert raw.labels == ["neg", "pos"] and len(raw.splits["train"]) == 40
    assert raw.splits["validation"]["label"][:] == [0, 1] * 5
    raw = read(path, **settings, labels=["pos", "neg"])
    assert raw.labels == ["pos", "neg"] and raw.splits["validation"]["label"][:] == [1, 0] * 5
    for given in ({"neg": "bad", "pos": "good"}, {"0": "bad", "1": "good"}):
        raw = read(path, **settings, labels=["good", "bad"], label_map=given)
        assert raw.splits["validation"]["label"][:] == [1, 0] * 5
    # in their order
    assert read(path, **settings, label_map={"pos": "good", "-1": None}).labels == [
        "neg",
        "good",
    ]
    rejects(
        "its labels are neg, pos, but data.labels are good",
        read,
        path,
        **settings,
        labels=["good", "bad"],
    )
    many = [f"label {number}" for number in range(1500)]
    rejects(
        r"data.labels are label 0, .*label 9, ... \(1,500\); use",
        read,
        path,
        **settings,
        labels=many,
    )
    rejects(
        "no column body .*; the columns are: text, label",
        read,
        path,
        **settings,
        columns={"text": "body"},
    )


def test_a_folder_that_does_not_hold_the_split_or_is_broken_is_one_line(folder):
    table().save_to_disk(folder / "one")
    assert sum(map(len, read(folder / "one").splits.values())) == 40
    datasets.DatasetDict(train=table(), test=table()).save_to_disk(folder / "two")
    (folder / "three").mkdir()
    put(folder, "three/train.jsonl", '{"text": "a", "label": 1}\n{"text": \n')
    (folder / "four").mkdir()
    os.mkfifo(folder / "pipe.csv")
    os.mkfifo(folder / "four/train.csv")
    for name, settings, message in (
        ("one", {"validation": "test"}, "is one data set without splits; leave out test"),
        ("two", {"validation": "dev"}, "has no split dev; there are train, test"),
        ("three", {"format": "hub"}, f"data.path={folder}/three cannot be read: "),
        ("nowhere", {}, "there is no such file or folder"),
        ("pipe.csv", {}, "pipe.csv is neither a regular file nor a folder .a pipe"),
        ("four", {}, "four/train.csv is neither a regular file nor a folder"),
    ):
        rejects(message, read, folder / name, **settings)


def test_hub_settings_reach_the_library(folder, monkeypatch):
    asked = []

    def load(path, *, name, revision):
        builder = SimpleNamespace(download_and_prepare=lambda: None)
        builder.as_dataset = lambda split: asked.append((path, name, split, revision)) or table()
        return builder

    monkeypatch.setattr(formats, "open_builder", load)
    raw = read("user/set", name="plain", revision="abc", train="train[:50%]", validation="dev")
    assert asked == [("user/set", "plain", split, "abc") for split in ("train[:50%]", "dev")]
    assert list(raw.splits) == ["train", "validation"]


def test_one_row_of_json_lines_may_lack_a_column(folder):
    lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
    path = put(folder, "a.jsonl", "\n".join(['{"text": "first"}', *lines]))
    raw = read(path, max_bad_rows=1)
    assert sum(map(len, raw.splits.values())) == 40
    assert raw.dropped["train"].bad_examples == [f"{path}:1: no label"]
    path = put(folder, "b.jsonl", '[]\n{"text": "first"}\n{"body": "x"}\n')
    rejects(
        r"b\.jsonl:2: no column label .*; the columns are: text, body", read, path, max_bad_rows=3
    )


# ---- new data, versions, S3 -----------------------------------------------------------------------------------


def test_new_texts_need_no_labels_and_pairs_need_one_text(folder):
    path = put(folder, "a.tsv", "text\nfirst\nsecond\n")
    assert new_rows(path) == [{"id": "0", "text": "first"}, {"id": "1", "text": "second"}]
    path = put(folder, "b.csv", "id,text,label\nx,first,2\ny,second,\nz,third,9\n")
    rows = new_rows(
        path,
        columns={"id": "id"},
        label_map={"2": "good"},
        labels=["good", "bad"],
        format="parquet",
    )
    assert [(row["id"], row["label"]) for row in rows] == [("x", "good"), ("y", None), ("z", None)]
    pair = {"text": "a", "text_pair": "b"}
    rows = new_rows(put(folder, "c.csv", "a,b\nx,\n,y\nx,y\n"), columns=pair)
    assert [(row["text"], row["text_pair"]) for row in rows] == [("x", ""), ("", "y"), ("x", "y")]
    for content, columns, message in (
        ("text,n\nfirst,1\n,2\n", {}, r"d\.csv:3: an empty text"),
        ("body\nfirst\n", {}, r"d\.csv:2: no column text"),
        ("a,b\n, \n", pair, r"d\.csv:2: an empty a"),
    ):
        rejects(message, new_rows, put(folder, "d.csv", content), columns=columns, max_bad_rows=5)
    rejects("there is no such file", new_rows, "nowhere")


def test_another_file_time_or_setting_of_reading_is_another_version(folder):
    def of(name, **settings):
        return version(RecordsConfig(path=str(folder / name), **settings), S3)

    path = Path(put(folder, "a.csv", csv_of(ROWS)))
    put(folder, "b.csv", csv_of(ROWS))
    table().save_to_disk(folder / "saved")
    first, saved = of("a.csv"), of("saved")
    assert first == of("a.csv", num_workers=3, cache_dir="x", lengths=[16, 32], max_bad_rows=1)
    changes = [
        {"delimiter": ";"},
        {"label_map": {"0": "no"}},
        {"columns": ColumnsConfig(text="b")},
    ]
    changes += [{"format": "jsonl"}, {"validation": "b.csv"}]
    assert len({first, of("b.csv"), *[of("a.csv", **change) for change in changes]}) == 7
    for change in (
        lambda: put(folder, "a.csv", csv_of(ROWS[:-1])),
        lambda: os.utime(path, (1, 1)),
    ):
        before = of("a.csv")
        change()
        assert of("a.csv") != before
    put(folder / "saved", "more.arrow", "")
    assert of("saved") != saved


def test_data_in_s3(folder, bucket):
    put(folder, "train.csv", csv_of(ROWS))
    bucket.put("set/train.csv", csv_of(ROWS).encode())
    bucket.put("set/deep/train.csv", b"not taken")
    bucket.put("set/dev-1.jsonl", b'{"text": "a", "label": 1}\n')
    table().save_to_disk(folder / "saved")
    for path in (folder / "saved").iterdir():
        bucket.put(f"saved/{path.name}", path.read_bytes())
    s3 = bucket.config()

    def splits(prefix, **settings):
        return read(bucket.location(prefix), s3=s3, **settings).splits

    there, here = splits("set/train.csv"), read(folder / "train.csv").splits
    assert all(there[name].to_dict() == here[name].to_dict() for name in here)
    result = splits("set", train="tr*.csv", validation="dev-?.jsonl")
    assert len(result["train"]) == 40 and result["validation"]["text"][:] == ["a"]
    assert sum(map(len, splits("saved").values())) == 40
    bucket.put("set/bad.csv", csv_of([*ROWS, ("", "1")]).encode())
    for message, prefix, settings in (
        (r"set/nowhere\.csv: there is no such file", "set/nowhere.csv", {}),
        (r"data\.train=x-\*: there is no such file in s3://", "set", {"train": "x-*"}),
        (r"1 bad row.*: s3://\S+/set/bad\.csv:42: an empty text", "set/bad.csv", {}),
    ):
        rejects(message, read, bucket.location(prefix), s3=s3, **settings)
    cfg = RecordsConfig(path=bucket.location("set/train.csv"))
    versions, before = [], len(bucket.proxy.requests("^GET"))
    for rows in (ROWS, ROWS[::-1]):  # of the same size
        bucket.put("set/train.csv", csv_of(rows).encode())
        versions.append(version(cfg, s3))
    assert versions[0] != versions[1] and len(bucket.proxy.requests("^GET")) == before


# ---- questions ----------------------------------------------------------------------------------------------------

CONTEXT = "The Normans (Norman: Nourmands) gave their name to Normandy. Café 😀 owners agreed."


def question(name, text="Normandy", start=None, **more):
    start = CONTEXT.index(text) if start is None else start
    return {
        "id": name,
        "question": f"  what is {name}?",
        "answers": [{"text": text, "answer_start": start}],
        **more,
    }


def squad(*qas, context=CONTEXT, **more):
    data = [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}]
    return json.dumps({**more, "data": data}, indent=1)


def read_questions(folder, *, message=None, unanswerable=True, **settings):
    """Of train.json and dev.json; or that they are rejected with a message."""
    put(folder, "train.json", squad(question("one"), question("two", "owners"), version="1.1"))
    settings = {
        "kind": qa_rows(QAConfig(unanswerable=unanswerable)),
        "train": "train.json",
        **settings,
    }
    settings = {"validation": "dev.json", **settings}
    return (
        read(folder, **settings) if message is None else rejects(message, read, folder, **settings)
    )


def test_squad_of_both_versions(folder):
    plausible = question(
        "impossible", is_impossible=True, plausible_answers=[{"text": "x", "answer_start": 0}]
    )
    empty = {"id": "empty", "question": "why?", "answers": []}
    put(
        folder,
        "dev.json",
        squad(plausible, empty, question("there", "😀", is_impossible=False), version="v2.0"),
    )
    raw = read_questions(folder)
    assert qa_rows(QAConfig()).split_by == "context"  # by which rows are held out
    assert raw.labels == [] and raw.splits["train"].column_names == [
        "id",
        "question",
        "context",
        "answers",
    ]
    assert raw.splits["train"][1] == {
        "id": "two",
        "question": "  what is two?",
        "context": CONTEXT,
        "answers": {"text": ["owners"], "answer_start": [CONTEXT.index("owners")]},
    }
    answers = raw.splits["validation"]["answers"]
    # offsets are characters, not bytes
    assert [answer["text"] for answer in answers] == [
        [],
        [],
        ["😀"],
    ]
    assert answers[0]["answer_start"] == []
    says = r"dev\.json, question impossible: no answer; for SQuAD v2 set task.unanswerable"
    read_questions(folder, unanswerable=False, message=says)
    raw = read_questions(folder, unanswerable=False, max_bad_rows=2)
    assert (
        raw.splits["validation"]["id"][:] == ["there"] and raw.dropped["validation"].bad_rows == 2
    )


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
    put(folder, "dev.json", squad(*qas))
    read_questions(
        folder,
        message=r"7 bad rows, .*dev\.json, question shifted: answer 'Normandy' is not at char",
    )
    raw = read_questions(folder, max_bad_rows=7)
    assert raw.splits["validation"]["id"][:] == ["fine", "7"]
    named = [
        example.partition(": ")[0].rpartition(", ")[2]
        for example in raw.dropped["validation"].bad_examples
    ]
    bad = ("shifted", "behind", "before", "none", "shape", "blank")
    assert named == [*(f"question {name}" for name in bad), "data[0].paragraphs[0].qas[8]"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [\n}', r"dev\.json:2: not JSON: "),
        ('{"data": {}}', "is not SQuAD"),
        ('{"data": [{"paragraphs": 3}]}', r"dev\.json, data\[0\]: no list paragraphs"),
        (squad(question("one")).replace("Norman:", "\\ud83d"), "half of a surrogate pair"),
        ('{"data": []}', "validation: no row is left"),
    ],
)
def test_broken_squad_is_one_line(folder, content, message):
    put(folder, "dev.json", content)
    read_questions(folder, format="squad", message=message)


def test_a_question_whose_id_is_repeated_is_a_bad_row(folder):
    put(folder, "dev.json", squad(question("one"), question("one")))
    read_questions(folder, message="1 bad row, .*question one: an earlier row also has the id one")
    raw = read_questions(folder, max_bad_rows=1)
    assert raw.splits["validation"]["id"][:] == ["one"] and raw.dropped["validation"].bad_rows == 1


def test_answers_in_the_shape_of_the_hub_are_checked_too(folder):
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
    tables = datasets.DatasetDict(
        train=datasets.Dataset.from_dict(rows), dev=datasets.Dataset.from_dict(rows)
    )
    tables.save_to_disk(folder / "saved")
    settings = {
        "kind": qa_rows(QAConfig(unanswerable=True)),
        "train": "train",
        "validation": "dev",
    }
    rejects(
        "row 3: answer 'Normandy' is not at character 3 of the context",
        read,
        folder / "saved",
        **settings,
    )
    raw = read(folder / "saved", max_bad_rows=1, columns={"id": "id"}, **settings)
    assert raw.splits["train"]["answers"][:] == rows["answers"][:2] and raw.splits["train"]["id"][
        :
    ] == ["a", "b"]


@pytest.mark.parametrize("start", [-1, 0])
def test_an_empty_text_is_no_answer(folder, start):
    put(folder, "dev.json", squad(question("one", "", start), question("two")))
    assert [row["text"] for row in read_questions(folder).splits["validation"]["answers"]] == [
        [],
        ["Normandy"],
    ]
    put(folder, "dev.json", squad(question("one", "", 7)))
    read_questions(folder, message="an answer must be a text and a number, not '' and 7")


def test_new_questions_may_have_answers(folder):
    kind = qa_rows(QAConfig())
    path = put(folder, "new.jsonl", '{"question": "q", "context": "c"}\n')
    assert new_rows(path, kind=kind) == [{"id": "0", "question": "q", "context": "c"}]
    asked, answered = new_rows(
        put(folder, "new.json", squad({"id": "a", "question": "q"}, question("one"))), kind=kind
    )
    assert "answers" not in asked and (answered["id"], answered["answers"]["text"]) == (
        "one",
        ["Normandy"],
    )
