"""Labelled rows and questions of any format as the same tables; what cannot be used is named, counted and rejected."""

import gzip
import json
import os
from pathlib import Path
from tempfile import mkdtemp

import datasets
import huggingface_hub.constants
import pyarrow.parquet
import pytest
from rejections import rejects

from train.config import ColumnsConfig, RecordsConfig, S3Config
from train.config.tasks import QAConfig
from train.data.files.find import is_match, matching
from train.data.records.raw import read_raw, read_texts
from train.data.records.sources import version
from train.tasks.classify import CLASSIFY_ROWS
from train.tasks.multilabel import MULTILABEL_ROWS
from train.tasks.qa.windows import qa_rows

S3 = S3Config()
LONG = "a" * 2**19 + "\n"
ROWS = [(f"text number {number}", str(number % 2)) for number in range(40)]
TEXTS = [text for text, _ in ROWS]
OBJECTS = [{"text": text, "label": label} for text, label in ROWS]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty one, and no network; the library's own caches are elsewhere and must stay empty."""
    caches = tmp_path / "caches"
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, caches / name)
    # The environment is read at its import.
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


def lines_of(rows):
    return "\n".join(map(json.dumps, rows))


def read(path, *, seed=0, s3=S3, kind=CLASSIFY_ROWS, **settings):
    columns = settings.pop("columns", {})
    cfg = RecordsConfig(path=str(path), columns=ColumnsConfig(**columns), **settings)
    return read_raw(cfg, kind, s3, seed=seed, folder=Path(mkdtemp()))


def all_texts(raw):
    return [text for table in raw.splits.values() for text in table["text"]]


def new_rows(path, *, labels=(), kind=CLASSIFY_ROWS, **settings):
    columns = ColumnsConfig(**settings.pop("columns", {}))
    cfg = RecordsConfig(path="unused", columns=columns, **settings)
    return [example for example, _ in read_texts(cfg, kind, str(path), S3, labels=labels)]


def new_texts(path, **settings):
    return [row["text"] for row in new_rows(path, **settings)]


# ---- CSV ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quotes", "quoted"), [("escaped", '\\"'), ("auto", '""')])
def test_all_of_the_original_text_comes_through(folder, quotes, quoted):
    originals = (
        'plain|a "quote"|back\\slash|ends in \\|new\nline|a\r\nb|c\rd| blanks |é😀,;\t\''.split(
            "|"
        )
    )
    texts = originals
    if quotes == "escaped":
        texts = [text.replace("\\", "\\\\") for text in originals]
    rows = "".join('"' + text.replace('"', quoted) + '","1"\n' for text in texts)
    path = put(folder, "a.csv.gz", f"text,label\n{rows}")
    assert new_texts(path, quotes=quotes) == originals
    put(folder, "a.csv.gz", f'text,label\n{rows}"","x"\n')
    rejects(r"gz:13: an empty text", read, path, quotes=quotes)  # the line that it begins on


def test_a_file_without_a_header_has_numbered_columns_and_a_wrong_dialect_is_named(folder):
    path = put(folder, "c.csv", "1,good\n0,bad\n")
    rows = new_rows(path, header=False, columns={"text": "1", "label": "0"})
    assert rows == [
        {"id": "0", "text": "good", "label": "1"},
        {"id": "1", "text": "bad", "label": "0"},
    ]
    path = put(folder, "a.csv", 'text,label\nplain,1\n"a \\"quote\\"",1\n')
    rejects(r"a\.csv:3: not CSV: ',' expected after '\"'", read, path)


def test_quotation_marks_are_text_where_tabs_separate_fields(folder):
    rows = [(f'"open {text}', label) for text, label in ROWS]
    path = put(folder, "a.tsv", csv_of(rows, delimiter="\t"))
    assert new_texts(path) == [text for text, _ in rows]
    put(folder, "b.txt", csv_of(rows, delimiter="\t"))
    assert new_texts(folder / "b.txt", format="csv", delimiter="\\t") == new_texts(path)
    rejects("the field's quote is not closed", new_texts, path, quotes="doubled")


BAD = {  # a row, and why it is left out
    b"fine,1": None,
    b"too,many,fields": "3 fields where the header has 2",
    b"few": "1 field where the header has 2",
    b'"early" quote,1': "not CSV: ",
    b"caf\xe9,1": "byte 0xe9 is not utf-8",
    b",1": "an empty text",
    b"no label,": "an empty label",
    b"unknown,7": "unknown label 7; the labels are 0, 1",
    b"nul \0,1": "a NUL character",
    b"also fine,0": None,
}


def test_bad_rows_are_named_by_line_counted_and_left_out_or_rejected(folder):
    bad = put(folder, "a.csv", b"\n".join([b"text,label", *BAD]))
    path = put(folder, "good.csv", csv_of(ROWS))
    settings = {"validation": "a.csv", "labels": ["0", "1"]}
    raw = read(path, **settings, max_bad_rows=8)
    assert raw.splits["validation"]["text"][:] == ["fine", "also fine"]
    assert raw.splits["validation"]["id"][:] == ["0", "9"]  # rows, not lines: bad ones count
    dropped = raw.dropped["validation"]
    assert dropped.bad_rows == 8 and dropped.left_out == 0 and raw.dropped["train"].bad_rows == 0
    reasons = [(line, reason) for line, reason in enumerate(BAD.values(), 2) if reason]
    for example, (line, reason) in zip(dropped.bad_examples, reasons, strict=True):
        assert example.startswith(f"{bad}:{line}: {reason}")
    says = r"validation: 8 bad rows, .*max_bad_rows=7 .*a\.csv:3: 3 fields"
    rejects(says, read, path, **settings, max_bad_rows=7)


UNUSABLE = [
    (
        "text,sentiment\na,1\n",
        {},
        r"a\.csv:2: no column label \(data.columns.label\); the columns are: text, sent",
    ),
    ("text;label\na;1\n", {}, "columns are: text;label; the delimiter seems to be ';'"),
    (f'text,label\n"{LONG * 3}",1\n', {}, r"a\.csv:2: a field of more than .* not closed"),
    ('text,label\na,1\n"b,1\nc,0\n', {}, r"a\.csv:3: .*: the field's quote is not closed"),
    ("text,text\na,1\n", {}, r"a\.csv:1: two columns are named text"),
    (b"t\xe9xt,label\na,1\n", {}, r"a\.csv:1: no header: byte 0xe9 is not utf-8"),
    ("text,label\n", {}, r"train: no row is left: of .*/a\.csv, .* 0 rows are bad"),
    ("text,label\na,1\nb,0\n", {"validation_fraction": 1e-9}, "validation: .* leaves none"),
    (csv_of([(text, "1") for text in TEXTS]), {}, "^all rows have the label 1, so"),
    (
        csv_of(ROWS),
        {"label_map": {"0": None, "1": None}},
        "0 rows are bad and 40 are left out by data.label_map",
    ),
    (csv_of(ROWS), {"validation": "a.*"}, r"a\.csv: both in train and in validation"),
    ("text;label\na;2,5\nb;3,0\n", {"delimiter": ";"}, "not all plain whole ones, such as 2,5"),
]


@pytest.mark.parametrize(("content", "settings", "message"), UNUSABLE)
def test_unusable_data_is_one_line(folder, content, settings, message):
    rejects(message, read, put(folder, "a.csv", content), **settings)


def test_lines_may_end_in_carriage_returns_and_line_feeds(folder):
    text = csv_of([*ROWS, ("bad",)]).replace("\n", "\r\n")
    rejects(r"a\.csv:42: 1 field where the header has 2", read, put(folder, "a.csv", text))
    lines = lines_of(OBJECTS).replace("\n", "\r\n")
    assert new_texts(put(folder, "a.jsonl", lines)) == TEXTS


# ---- splits -------------------------------------------------------------------------------------------------------


def test_held_out_rows_depend_on_text_and_seed_alone(folder):
    rows = [(f"text {number % 300}", str(number % 2)) for number in range(600)]
    path = put(folder, "a.csv", csv_of(rows))

    def held_out(path, seed=0):
        splits = read(path, seed=seed, validation_fraction=0.2).splits
        train, validation = (set(splits[split]["text"]) for split in ("train", "validation"))
        assert not train & validation and len(train | validation) == 300
        return validation

    first = held_out(path)
    assert 30 < len(first) < 90
    assert held_out(put(folder, "b.csv", csv_of(rows[::-1]))) == first != held_out(path, seed=1)


def test_samples_are_drawn_with_the_seed_and_keep_the_order(folder):
    path = put(folder, "a.csv", csv_of([(f"{number}", str(number % 2)) for number in range(500)]))
    settings = {"validation": "b.csv", "max_train_examples": 100}
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
    rejects(r"5 files \(dev.jsonl, mm.jsonl, .*; say which is for training", read, folder)
    files = {"train": "sub/part-*.csv", "validation": "dev.jsonl"}
    raw = read(folder, **files, more_validation={"mismatched": "mm.jsonl"})
    assert list(raw.splits) == ["train", "validation", "mismatched"] == list(raw.dropped)
    assert raw.splits["train"]["text"][:] == TEXTS[:30]
    assert raw.splits["train"]["id"][:] == [str(number) for number in range(30)]
    labels = [raw.splits[split]["label"][:] for split in ("validation", "mismatched")]
    assert labels == [[1], [0]]


PATTERNS = "train/**/*.jsonl **/a.jsonl ** *.jsonl */*.jsonl train/?1.csv train/[[]a].jsonl .*.jsonl train/.x/*"


def test_a_glob_matches_the_same_names_on_disk_and_in_s3(tmp_path):
    files = "a.jsonl train/a.jsonl train/b1.csv train/deep/er/a.jsonl train/.x/a.jsonl .a.jsonl train/[a].jsonl"
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern in PATTERNS.split():
        found = matching(str(tmp_path / pattern))
        here = {path.relative_to(tmp_path).as_posix() for path in found}
        assert here == {name for name in files.split() if is_match(name, pattern)}, pattern


# ---- labels -------------------------------------------------------------------------------------------------------


def test_labels_are_found_and_sorted_or_keep_the_order_of_the_settings(folder):
    numbers = [(f"text {number}", str(number % 12)) for number in range(200)]
    raw = read(put(folder, "a.csv", csv_of(numbers)))
    assert raw.labels == [str(number) for number in range(12)]
    assert all(raw.labels[row["label"]] == str(int(row["id"]) % 12) for row in raw.splits["train"])
    words = csv_of([("a", "no"), ("b", "Yes"), ("c", "maybe")])
    path = put(folder, "b.csv", words)
    assert read(path).labels == ["Yes", "maybe", "no"]
    put(folder, "dev.csv", csv_of([("x", "no"), ("y", "other")]))
    labels = ["maybe", "other", "no", "Yes"]
    raw = read(path, validation="dev.csv", labels=labels)
    assert raw.labels == labels and raw.splits["validation"]["label"][:] == [2, 1]
    rejects(r"dev\.csv:3: unknown label other; the labels", read, path, validation="dev.csv")


def test_label_map(folder):
    stars = [1, 2.0, "3", 4, 5, 1.5, None, -1]
    rows = [{"text": f"{number}", "label": stars[number % 8]} for number in range(80)]
    path = put(folder, "a.jsonl", lines_of(rows))
    left_out = {"3": None, "": None, "-1": None}
    names = {"5": "good", "1.0": "very bad", "2": "bad", "4": "good", "1.5": "bad", **left_out}
    raw = read(path, label_map=names)
    assert raw.labels == ["good", "very bad", "bad"]  # in the order of the map
    of_row = {int(row["id"]) % 8: raw.labels[row["label"]] for row in raw.splits["train"]}
    assert of_row == {0: "very bad", 1: "bad", 3: "good", 4: "good", 5: "bad"}
    assert raw.dropped["train"].left_out == 30 and not raw.remarks
    del names["2"]
    raw = read(path, label_map=names)
    assert raw.labels == ["good", "very bad", "bad", "2"]
    says = "data.label_map does not name 2: these labels are left unchanged"
    assert raw.remarks == [says]


@pytest.mark.parametrize(
    ("first", "second", "same", "names"),
    [("0.0", "+1", [0, 1.0], ["0", "1"]), ("False", "TRUE", [False, True], ["false", "true"])],
)
def test_a_label_is_the_same_in_any_format(folder, first, second, same, names):
    rows = [(text, (first, second)[int(label)]) for text, label in ROWS]
    path = put(folder, "a.csv", csv_of(rows))
    objects = [{"text": text, "label": same[int(label)]} for text, label in ROWS]
    put(folder, "a.jsonl", lines_of(objects))
    raw = read(path, validation="a.jsonl")
    assert raw.labels == names and raw.splits["validation"]["label"][:] == [0, 1] * 20
    assert read(path, label_map={second: "a", first: "b"}).labels == ["a", "b"]
    assert read(path, labels=[second, first]).labels == [second, first]


def test_any_number_of_labels_for_a_row(folder):
    put(folder, "dev.jsonl", '{"text": "bad", "label": ["art"]}')

    def labels_of(*rows):
        objects = [{"text": f"text {number}", "label": row} for number, row in enumerate(rows)]
        path = put(folder, "a.jsonl", lines_of(objects))
        raw = read(path, kind=MULTILABEL_ROWS, validation="dev.jsonl", label_map={"old": None})
        return [[raw.labels[each] for each in row] for row in raw.splits["train"]["label"]]

    given = [["fun", "art"], [], ["art", "art"], ["art", "old"]]
    assert labels_of(*given) == [["fun", "art"], [], ["art"], ["art"]]
    assert labels_of(["art"], []) == [["art"], []]
    rejects("^no row has a label, so there is nothing to learn", labels_of, [], [])
    rejects("^all rows have the label art", labels_of, *[["art"]] * 3)


@pytest.mark.parametrize("label", [["bad", "boat"], [], {"value": "bad"}], ids=str)
def test_what_is_not_one_label_is_rejected_by_row(folder, label):
    path = put(folder, "a.jsonl", lines_of([*OBJECTS, {"text": "x", "label": label}]))
    says = (
        r"a\.jsonl:41: label holds .*, not a label: task=multilabel .*columns\.label=label\.NAME"
    )
    rejects(f"1 bad row, .*{says}", read, path)


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
    assert sorted(all_texts(raw)) == sorted(TEXTS)
    examples = zip(raw.dropped["train"].bad_examples, bad.values(), strict=True)
    for line, (where, reason) in zip(range(81, 91, 2), examples, strict=True):
        assert f"a.json:{line}: " in where and reason in where


DOCUMENTS = {
    "a list": lambda rows: json.dumps(rows),
    "an indented list": lambda rows: json.dumps(rows, indent=2),
    "a line for each": lambda rows: "[" + ",\n".join(map(json.dumps, rows)) + "]",
}


@pytest.mark.parametrize("write", DOCUMENTS.values(), ids=DOCUMENTS)
def test_one_json_document_is_read_as_its_rows(folder, write):
    path = put(folder, "a.json.gz", write([*OBJECTS, {"text": "last"}]))
    assert new_texts(path) == [*TEXTS, "last"]
    for content, message in (
        (write([*OBJECTS, 3]), "gz, row 41: 3 where an object should be"),
        (write(OBJECTS)[:-1], r"gz:\d+: not JSON: "),
        (write([[]]), r"gz, row 1: \[\] where an object"),
    ):
        rejects(message, read, put(folder, "a.json.gz", content))


def test_a_column_that_is_not_read_may_have_any_type(folder):
    columns, kind = table().to_dict(), pyarrow.map_(pyarrow.string(), pyarrow.int8())
    counts = pyarrow.array([[("a", 1)]] * len(ROWS), kind)
    path = folder / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns | {"counts": counts}), path)
    assert len(all_texts(read(path))) == 40
    rejects("a.parquet cannot be read as Parquet: ", read, path, columns={"label": "counts"})


@pytest.mark.parametrize("form", ["hub", "saved"])
def test_a_file_is_no_data_set(folder, form):
    path = put(folder, "a.json", json.dumps(OBJECTS))
    reason = f"a.json is a file, which data.format={form} does not read; set data=records"
    rejects(reason, read, path, format=form)


def table(names=("neg", "pos")):
    label = datasets.ClassLabel(names=list(names))
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = {"text": TEXTS, "label": [int(label) for _, label in ROWS]}
    return datasets.Dataset.from_dict(rows, features)


def saved(path, **splits):
    datasets.DatasetDict(splits).save_to_disk(path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "saved", "hub"])
def test_names_of_labels_in_the_data(folder, kind):
    path, settings = folder / "set", {"validation": "test"}
    if kind == "saved":
        saved(path, train=table(), test=table().select(range(10)))
    else:
        path.mkdir()
        table().to_parquet(path / "train-00000.parquet")
        table().select(range(10)).to_parquet(path / "test-00000.parquet")
    if kind == "parquet":
        settings = {"train": "train-*", "validation": "test-*"}
    elif kind == "hub":
        settings["format"] = "hub"
    raw = read(path, **settings)
    assert raw.labels == ["neg", "pos"] and len(raw.splits["train"]) == 40
    assert raw.splits["validation"]["label"][:] == [0, 1] * 5
    for more in (
        {"labels": ["pos", "neg"]},
        {"labels": ["good", "bad"], "label_map": {"neg": "bad", "pos": "good"}},
        {"labels": ["good", "bad"], "label_map": {"0": "bad", "1": "good"}},
    ):
        raw = read(path, **settings, **more)
        assert raw.labels == more["labels"]
        assert raw.splits["validation"]["label"][:] == [1, 0] * 5
    mapped = read(path, **settings, label_map={"pos": "good", "-1": None})
    assert mapped.labels == ["neg", "good"]  # in their order
    many = [f"label {number}" for number in range(1500)]
    for message, more in (
        ("unknown label neg; the labels are good, bad", {"labels": ["good", "bad"]}),
        (r"unknown label neg; the labels are label 0, .*label 9, ... \(1,500\)", {"labels": many}),
        ("no column body .*; the columns are: text, label", {"columns": {"text": "body"}}),
    ):
        rejects(message, read, path, **settings, **more)


def test_a_folder_that_does_not_hold_the_split_or_is_broken_is_one_line(folder):
    table().save_to_disk(folder / "one")
    assert len(all_texts(read(folder / "one"))) == 40
    saved(folder / "two", train=table(), test=table())
    for name in ("three", "four"):
        (folder / name).mkdir()
    put(folder, "three/train.jsonl", '{"text": "a", "label": 1}\n{"text": \n')
    os.mkfifo(folder / "pipe.csv")
    os.mkfifo(folder / "four/train.csv")
    for name, settings, message in (
        ("one", {"validation": "test"}, "is one data set without splits; leave out test"),
        ("two", {"validation": "dev"}, "has no split dev; there are train, test"),
        ("three", {"format": "hub"}, f"data.path={folder}/three cannot be read: "),
        ("nowhere", {}, "there is no such file or folder"),
        ("pipe.csv", {}, "pipe.csv is neither a file nor a folder"),
        ("four", {}, "four/train.csv is no regular file .a pipe"),
    ):
        rejects(message, read, folder / name, **settings)


def test_one_row_of_json_lines_may_lack_a_column(folder):
    path = put(folder, "a.jsonl", lines_of([{"text": "first"}, *OBJECTS]))
    raw = read(path, max_bad_rows=1)
    assert len(all_texts(raw)) == 40
    assert raw.dropped["train"].bad_examples == [f"{path}:1: no label"]
    path = put(folder, "b.jsonl", '[]\n{"text": "first"}\n{"body": "x"}\n')
    says = r"b\.jsonl:2: no column label .*; the columns are: text, body"
    rejects(says, read, path, max_bad_rows=3)


# ---- new data, versions, S3 -----------------------------------------------------------------------------------


def test_new_texts_need_no_labels_and_pairs_need_one_text(folder):
    path = put(folder, "a.tsv", "text\nfirst\nsecond\n")
    assert new_rows(path) == [{"id": "0", "text": "first"}, {"id": "1", "text": "second"}]
    path = put(folder, "b.csv", "id,text,label\nx,first,2\ny,second,\nz,third,9\n")
    settings = {"label_map": {"2": "good"}, "labels": ["good", "bad"], "format": "parquet"}
    rows = new_rows(path, columns={"id": "id"}, **settings)
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
    first, of_saved = of("a.csv"), of("saved")
    assert first == of("a.csv", num_workers=3, cache_dir="x", lengths=[16, 32], max_bad_rows=1)
    changes = [
        {"delimiter": ";"},
        {"label_map": {"0": "no"}},
        {"columns": ColumnsConfig(text="b")},
        {"format": "jsonl"},
        {"validation": "b.csv"},
    ]
    assert len({first, of("b.csv"), *[of("a.csv", **change) for change in changes]}) == 7
    put(folder, "a.csv", csv_of(ROWS[:-1]))
    second = of("a.csv")
    os.utime(path, (1, 1))
    assert len({first, second, of("a.csv")}) == 3
    put(folder / "saved", "more.arrow", "")
    assert of("saved") != of_saved


def test_data_in_s3(folder, bucket):
    bucket.put("set/train.csv", csv_of(ROWS).encode())
    bucket.put("set/bad.csv", csv_of([*ROWS, ("", "1")]).encode())
    bucket.put("set/deep/train.csv", b"not taken")
    bucket.put("set/dev-1.jsonl", b'{"text": "a", "label": 1}\n')

    def splits(prefix, **settings):
        return read(bucket.location(prefix), s3=bucket.config(), **settings).splits

    found = splits("set", train="tr*.csv", validation="dev-?.jsonl")
    assert found["train"]["text"][:] == TEXTS and found["validation"]["text"][:] == ["a"]
    assert sum(map(len, splits("set/train.csv").values())) == 40
    for message, prefix, settings in (
        (r"set/nowhere\.csv: there is no such file", "set/nowhere.csv", {}),
        (r"data\.train=x-\*: there is no such file in s3://", "set", {"train": "x-*"}),
        (r"1 bad row.*: s3://\S+/set/bad\.csv:42: an empty text", "set/bad.csv", {}),
    ):
        rejects(message, splits, prefix, **settings)
    cfg = RecordsConfig(path=bucket.location("set/train.csv"))
    first, before = version(cfg, bucket.config()), len(bucket.proxy.requests("^GET"))
    bucket.put("set/train.csv", csv_of(ROWS[::-1]).encode())  # of the same size
    assert version(cfg, bucket.config()) != first
    assert len(bucket.proxy.requests("^GET")) == before + 1  # for the version, without the content


# ---- questions ----------------------------------------------------------------------------------------------------

CONTEXT = "The Normans (Norman: Nourmands) gave their name to Normandy. Café 😀 owners agreed."


def question(name, text="Normandy", start=None, **more):
    answer = {"text": text, "answer_start": CONTEXT.index(text) if start is None else start}
    return {"id": name, "question": f"  what is {name}?", "answers": [answer], **more}


def squad(*qas, version="1.1"):
    data = [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": list(qas)}]}]
    return json.dumps({"version": version, "data": data}, indent=1)


def read_questions(folder, *, message=None, unanswerable=True, **settings):
    """Of train.json and dev.json; or that they are rejected with a message."""
    put(folder, "train.json", squad(question("one"), question("two", "owners")))
    kind = qa_rows(QAConfig(unanswerable=unanswerable))
    settings = {"kind": kind, "train": "train.json", "validation": "dev.json", **settings}
    if message is None:
        return read(folder, **settings)
    return rejects(message, read, folder, **settings)


def test_squad_of_both_versions(folder):
    plausible = [{"text": "x", "answer_start": 0}]
    qas = [
        question("impossible", is_impossible=True, plausible_answers=plausible),
        {"id": "empty", "question": "why?", "answers": []},
        question("there", "😀", is_impossible=False),
    ]
    put(folder, "dev.json", squad(*qas, version="v2.0"))
    raw = read_questions(folder)
    assert qa_rows(QAConfig()).split_by == "context"  # by which rows are held out
    assert raw.labels == []
    assert raw.splits["train"][1] == {
        "id": "two",
        "question": "  what is two?",
        "context": CONTEXT,
        "answers": {"text": ["owners"], "answer_start": [CONTEXT.index("owners")]},
    }
    answers = raw.splits["validation"]["answers"]
    texts = [answer["text"] for answer in answers]
    assert texts == [[], [], ["😀"]]  # offsets are characters, not bytes
    says = r"dev\.json, question impossible: no answer; for SQuAD v2 set task.unanswerable"
    read_questions(folder, unanswerable=False, message=says)
    raw = read_questions(folder, unanswerable=False, max_bad_rows=2)
    assert raw.splits["validation"]["id"][:] == ["there"]
    assert raw.dropped["validation"].bad_rows == 2


def test_answers_that_are_not_where_they_should_be(folder):
    bad = {
        "shifted": question("shifted", start=CONTEXT.index("Normandy") + 1),
        "behind": question("behind", start=1000),
        "before": question("before", text="The", start=-2),
        "none": {"id": "none", "question": "why?"},
        "shape": {"id": "shape", "question": "why?", "answers": ["Normandy"]},
        "blank": {"id": "blank", "question": " ", "answers": []},
        "one": question("one"),
    }
    put(folder, "dev.json", squad(question("one"), *bad.values(), question(7), "no object"))
    says = r"8 bad rows, .*dev\.json, question shifted: answer 'Normandy' is not at char"
    read_questions(folder, message=says)
    raw = read_questions(folder, max_bad_rows=8)
    assert raw.splits["validation"]["id"][:] == ["one", "7"]
    named = [
        example.partition(": ")[0].rpartition(", ")[2]
        for example in raw.dropped["validation"].bad_examples
    ]
    assert named == [*(f"question {name}" for name in bad), "data[0].paragraphs[0].qas[9]"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [\n}', r"dev\.json:2: not JSON: "),
        ('{"data": {}}', "is not SQuAD"),
        ('{"data": [{"paragraphs": 3}]}', r"dev\.json, data\[0\]: no list paragraphs"),
        ('{"data": []}', "validation: no row is left"),
    ],
)
def test_broken_squad_is_one_line(folder, content, message):
    put(folder, "dev.json", content)
    read_questions(folder, format="squad", message=message)


def test_answers_in_the_shape_of_the_hub_are_checked_too(folder):
    start = CONTEXT.index("Normandy")
    answers = [
        {"text": ["Normandy", "The"], "answer_start": [start, 0]},
        {"text": [], "answer_start": []},
        {"text": ["Normandy"], "answer_start": [3]},
    ]
    rows = {"id": ["a", "b", "c"], "question": ["q"] * 3, "context": [CONTEXT] * 3}
    both = datasets.Dataset.from_dict({**rows, "answers": answers})
    path = saved(folder / "saved", train=both, dev=both)
    kind = qa_rows(QAConfig(unanswerable=True))
    settings = {"kind": kind, "train": "train", "validation": "dev"}
    says = "row 3: answer 'Normandy' is not at character 3 of the context"
    rejects(says, read, path, **settings)
    train = read(path, max_bad_rows=1, columns={"id": "id"}, **settings).splits["train"]
    assert train["answers"][:] == answers[:2] and train["id"][:] == ["a", "b"]


def test_new_questions_may_have_answers(folder):
    kind = qa_rows(QAConfig())
    path = put(folder, "new.jsonl", '{"question": "q", "context": "c"}\n')
    assert new_rows(path, kind=kind) == [{"id": "0", "question": "q", "context": "c"}]
    path = put(folder, "new.json", squad({"id": "a", "question": "q"}, question("one")))
    asked, answered = new_rows(path, kind=kind)
    assert "answers" not in asked
    assert (answered["id"], answered["answers"]["text"]) == ("one", ["Normandy"])
