"""Every source of text returns the documents it should, and bad input is named with its place."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from finetuning import write_rows
from rejections import rejects

from train.config import CorpusConfig, FilesCorpusConfig, HFCorpusConfig, HFDataset
from train.data.text import corpus_files
from train.data.text.corpus import Corpus, open_corpus
from train.data.text.documents import CorpusPart

TEXTS = ["The first one, with a comma.", "Der zweite\nhat zwei Zeilen: äöü €", "third"]


def files(kind: str, path: Path | str, **settings: Any) -> Corpus:
    return open_corpus(FilesCorpusConfig(kind=kind, name="test", path=str(path), **settings))


def hub(*sets: HFDataset, **settings: Any) -> Corpus:
    return open_corpus(HFCorpusConfig(kind="hf", name="test", datasets=list(sets), **settings))


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents()]


def error_of(kind: str, path: Path | str, **settings: Any) -> str:
    """The line with which opening and reading is rejected."""
    return rejects("", lambda: texts(files(kind, path, **settings)))


def gzipped(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


# ---- all sources ---------------------------------------------------------------------------------------------------


def test_a_folder_a_glob_and_a_file_give_what_they_name_in_the_order_of_names(tmp_path):
    names = [
        "z.txt",
        "sub/deep/b.md",
        "sub/a.rst",
        "a.text",
        "b.TXT",
        ".hidden.txt",
        ".git/x.txt",
        "no.bin",
        "a/1.log",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    gzipped(tmp_path / "a.text")
    assert texts(files("text", tmp_path)) == [
        "a.text",
        "a.text",
        "b.TXT",
        "sub/a.rst",
        "sub/deep/b.md",
        "z.txt",
    ]
    assert texts(files("text", tmp_path / "**" / "*.[lm]*")) == ["a/1.log", "sub/deep/b.md"]
    assert texts(files("text", tmp_path / "no.bin")) == ["no.bin"]
    for path in (tmp_path / "a", tmp_path / "nowhere", tmp_path / "*.csv"):
        assert error_of("text", path).startswith(f"corpus.path={path} matches no file")


def test_how_many_files_are_read_and_left_out_is_said(tmp_path):
    for name in ("a.txt", "b.txt.gz", "deep/c.jsonl", "d.jsonl", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b'{"text": "a"}\n')
    for path, line in (
        (tmp_path, "2 files to read; 3 files left out (2 with .txt, 1 with no ending)"),
        (tmp_path / "d.jsonl", "d.jsonl: 1 file to read"),
        (tmp_path / "**/*", "5 files to read"),
    ):
        assert files("jsonl", path).remarks[-1].endswith(line)


def test_the_fingerprint_changes_with_the_files_and_not_with_their_place(tmp_path):
    (tmp_path / "one").mkdir()
    path = tmp_path / "one" / "a.txt"
    path.write_text("same size")
    before = files("text", path.parent).fingerprint()
    path.parent.rename(tmp_path / "two")
    path = tmp_path / "two" / "a.txt"
    assert files("text", path.parent).fingerprint() == before
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    touched = files("text", path.parent).fingerprint()
    gzipped(path)
    assert len({before, touched, files("text", path.parent).fingerprint()}) == 3


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**"])
def test_links_in_a_circle_give_each_file_once(tmp_path, pattern):
    folder, other = tmp_path / "in", tmp_path / "in" / ".other"
    (folder / "sub").mkdir(parents=True)
    other.mkdir()
    for path in (folder / "a.txt", folder / "sub" / "b.txt", other / "c.txt"):
        path.write_text(path.stem)
    (folder / "to_c").symlink_to(other)  # followed, and once
    (folder / "twice").symlink_to(other)
    (folder / "again").symlink_to("sub")
    (folder / "a_copy.txt").symlink_to("a.txt")
    for link, target in (("sub/up", ".."), ("itself", ".")):
        (folder / link).symlink_to(target)
    assert texts(files("text", folder / pattern if pattern else folder)) == ["a", "b", "c"]


@pytest.mark.parametrize("pattern", ["", "*.txt", "**/*.txt", "*/*.txt", "**"])
def test_a_link_that_leads_out_of_a_folder_is_not_followed_but_one_that_is_typed_is(
    tmp_path, pattern
):
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key.txt").write_text("secret")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    is_of_folders = pattern == "*/*.txt"
    (folder / "b.txt").symlink_to("../private" if is_of_folders else "../private/key.txt")
    assert "leads out of" in error_of("text", folder / pattern if pattern else folder)
    (folder / "b.txt").unlink()
    (folder / "sub").symlink_to("../private")
    if pattern != "*.txt":
        assert "leads out of" in error_of("text", folder / pattern if pattern else folder)
    assert (
        texts(files("text", folder / "sub/key.txt"))
        == texts(files("text", folder / "sub"))
        == ["secret"]
    )


def test_what_cannot_be_opened_is_named_instead_of_left_out(tmp_path, monkeypatch):
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "nowhere")
    assert f"{link} is not a regular file, or is a broken link" in error_of("text", tmp_path)
    link.unlink()
    (tmp_path / "a.txt").write_text("x")
    with monkeypatch.context() as rejecting:
        # root, who may run this, can read everything
        rejecting.setattr(os, "access", lambda *_: False)
        assert "a.txt cannot be read: permission denied" in error_of("text", tmp_path)


PLACES = [  # a file, and where the error is with what it says
    (
        "text",
        "é\n".encode() * 9000 + b"x \xe9 la carte",
        ":9001: byte 0xe9 is not utf-8; check corpus.encoding or",
    ),
    ("text", b"text\nthen \0 bytes", ":2: a NUL"),
    ("text", b"word " * 2**19 + b"\n\nbinary \0", ":3: a NUL"),
    ("jsonl", b'\n{"text": "\xe9"}', ":2: byte 0xe9 is not utf-8"),
    ("jsonl", b'{"text": "fine"}\n\n{"text": "cut', ":3: not a JSON object"),
    ("jsonl", b'{"body": "x", "id": 1}', ":1: no column=text; the columns are: body, id"),
    ("jsonl", b'{"text": null}', ":1: column text holds None (NoneType), not a string"),
    (
        "jsonl",
        b'{"text": "half \\ud83d"}',
        ":1: half of a surrogate pair; set corpus.errors=replace",
    ),
    ("csv", b"text\nabcdefg \xe9", ":2: byte 0xe9 is not utf-8"),
    ("csv", b"id,body\n1,x\n", ":1: no column=text; the columns are: id, body"),
    ("csv", b"id,text\n1,x\n\n2,a,b\n", ":4: 3 fields where the header has 2"),
    ("csv", b'id,text\n1,"a" b\n', ":2: not CSV"),
]


@pytest.mark.parametrize(
    ("kind", "content", "expected"), PLACES, ids=[f"{case[0]}{case[2][:30]}" for case in PLACES]
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, kind, content, expected):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content)
    for file in (path, gzipped(path)):
        assert error_of(kind, file).startswith(f"{file}{expected}")


def test_what_does_not_decode_is_replaced_on_demand(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x \xe9 la carte")
    assert texts(files("text", tmp_path, errors="replace")) == ["x \ufffd la carte"]
    (tmp_path / "a.txt").write_bytes(b"text\nthen \0 bytes")
    assert "a.txt:2: a NUL" in error_of("text", tmp_path, errors="replace")
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d \\ud83d\\ude00"}\n')
    assert texts(files("jsonl", tmp_path, errors="replace")) == ["\ufffd \U0001f600"]


# ---- parts ---------------------------------------------------------------------------------------------------------

COUNTS = [1, 2, 3, 7, 64, 1000]  # more than there are documents, and than bytes in some files, too
ROWS = [{"text": "", "id": -1}]
ROWS += [{"text": f"document {i}, äöü " + "word " * (i * 7 % 31), "id": i} for i in range(90)]


def in_parts(corpus: Corpus, count: int) -> list[str]:
    """The texts of all parts, one after the other."""
    return [
        document.text
        for index in range(count)
        for document in corpus.documents(CorpusPart(index, count))
    ]


def several_files(folder: Path, suffix: str) -> Path:
    """A folder of the same rows in four files, two without any row or byte if the format allows it."""
    folder.mkdir()
    # other formats cannot hold one, or must not
    null = [{"text": None, "id": -2}] if suffix == ".parquet" else []
    for name, rows in (("a", ROWS[:7]), ("b", ROWS[7:8]), ("d", [*null, *ROWS[8:]])):
        if suffix == ".txt":
            (folder / f"{name}.txt").write_text(
                "\n\n".join(row["text"] for row in rows) + "\n", encoding="utf-8"
            )
        else:
            write_rows(folder / f"{name}{suffix}", rows)
    if suffix in (".txt", ".jsonl"):
        (folder / "c").with_suffix(suffix).touch()
        (folder / "e").with_suffix(suffix).touch()
    return folder


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".parquet"])
def test_parts_of_files_hold_each_document_once_and_in_order(tmp_path, suffix):
    """Of packed files too; and the bytes that documents are read from add up to all of them."""
    kind = "text" if suffix == ".txt" else suffix[1:]
    folder = several_files(tmp_path / "plain", suffix)
    for packed in (False,) if suffix == ".parquet" else (False, True):
        for path in list(folder.iterdir()) if packed else ():
            gzipped(path)
            path.unlink()
        corpus = files(kind, folder)
        assert texts(corpus) == [row["text"].strip() for row in ROWS[1:]]
        assert all(in_parts(corpus, count) == texts(corpus) for count in COUNTS)
        sizes = [document.source_bytes for document in corpus.documents()]
        # The last line end, and empty files with their gzip header, belong to no document.
        assert min(sizes) >= 0 and sum(sizes) == pytest.approx(corpus.total_bytes, abs=100)


SECTIONS = {"separator": "^= .* =$"}


@pytest.mark.parametrize(
    ("content", "settings", "expected"),
    [
        ("\n \n\n\tone\nstill one\n\t\n\n\ntwo\n \n", {}, ["one\nstill one", "two"]),
        ("one\r\nstill one\r\n\r\ntwo\r\n", {}, ["one\nstill one", "two"]),
        (
            "one\rstill one\r\rtwo\n\nthree\r\rfour\r",
            {},
            ["one\nstill one", "two", "three", "four"],
        ),  # of old Macs
        ("\ufeffno end \x85 cafe\u0301 \u2028 ﬁ", {}, ["no end \x85 cafe\u0301 \u2028 ﬁ"]),
        (
            "before\n= One =\n\na\n= Two =\nb = c\n",
            SECTIONS,
            ["before", "= One =\n\na", "= Two =\nb = c"],
        ),
        ("one\n\nfile\n", {"separator": None}, ["one\n\nfile"]),
        (
            "123456\n" * 4 + "\n" + "abc\n" * 3,
            {},
            ["123456\n123456\n123456", "123456", "abc\nabc\nabc"],
        ),
        ("äöü\n\n€\n\n日本\n", {"encoding": "UTF8"}, ["äöü", "€", "日本"]),
        ("日本\n\n語\n" * 2, {"encoding": "shift_jis"}, ["日本", "語\n日本", "語"]),
        ("\u0a0a\n\nb\n\nc\n" * 2, {"encoding": "utf-16"}, ["\u0a0a", "b", "c\n\u0a0a", "b", "c"]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_document_belongs_to_the_part_in_which_it_begins(
    tmp_path, monkeypatch, content, settings, expected
):
    monkeypatch.setattr(corpus_files, "MAX_DOCUMENT_CHARS", 20)
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode(settings.get("encoding", "utf-8")))
    corpus = files("text", path, **settings)
    assert texts(corpus) == expected
    for count in [*range(1, path.stat().st_size + 3), 1000]:
        assert in_parts(corpus, count) == expected


def test_a_mistake_in_a_part_is_named_with_the_byte_that_reading_began_at(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 9 + "[]\n")
    documents = files("jsonl", path).documents(CorpusPart(1, 2))
    rejects(r"a\.jsonl, after byte 78:5: not a JSON object", list, documents)


def test_parts_of_data_sets_share_the_files_and_hold_each_document_once(tmp_path):
    folder = several_files(tmp_path / "set", ".parquet")
    corpus = hub(
        HFDataset(path=str(folder), rows_per_document=2),
        HFDataset(path="json", data_files=str(write_rows(tmp_path / "more.jsonl", ROWS))),
    )
    whole = texts(corpus)
    assert len(whole) == 4 + 1 + 42 + 90  # a document ends with its file
    for count in (1, 2, 4):
        assert in_parts(corpus, count) == whole
    for count in (5, 13):
        assert sorted(in_parts(corpus, count)) == sorted(whole)


def test_a_gz_that_is_none_or_is_cut_or_damaged_is_named(tmp_path):
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress(str(list(range(1000))).encode())
    for content in (
        b"plain text",
        whole[: len(whole) // 2],
        whole[:-4],
        whole[:-1] + b"?",
        whole[:10] + b"\xff" * 20,
    ):
        path.write_bytes(content)
        assert error_of("text", path).startswith(f"{path} cannot be read: ")


def test_bad_parquet_is_rejected_before_anything_is_read(tmp_path):
    write_rows(tmp_path / "a.parquet", [{"text": "fine"}])
    path = tmp_path / "b.parquet"
    path.write_bytes(b"no such thing")
    for rows, expected in (
        (None, "cannot be read as Parquet: Parquet magic bytes not found"),
        ([{"body": "x", "id": 1}], "no column=text; the columns are: body, id"),
        ([{"text": 1}], "column text is int64"),
        ([{"text": ["x"]}], "column text is list<"),
    ):
        if rows is not None:
            write_rows(path, rows)
        assert (said := error_of("parquet", tmp_path)).startswith(str(path)) and expected in said
    write_rows(path, [{"text": os.urandom(500).hex()} for _ in range(20)])
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(1996) + content[2000:])
    assert error_of("parquet", tmp_path).startswith(f"{path} cannot be read as Parquet: ")


def test_data_sets_follow_each_other_and_rows_can_be_joined(tmp_path):
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.parquet", [{"body": f"s{i}", "id": i} for i in range(5)])
    path = write_rows(
        tmp_path / "more.jsonl", [{"text": "a"}, {"text": None}, {"text": " b\r\nc "}]
    )
    corpus = hub(
        HFDataset(path=str(tmp_path / "set"), column="body", rows_per_document=2),
        HFDataset(path="json", data_files=str(path)),
    )
    expected = ["s0\ns1", "s2\ns3", "s4", "a", "b\nc"]
    assert texts(corpus) == texts(corpus) == expected
    assert [document.source_bytes for document in corpus.documents()] == [
        len(text) for text in expected
    ]
    assert corpus.total_bytes is None


def test_a_data_set_that_cannot_be_loaded_is_named_before_any_is_read(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"body": "a", "id": 1}])
    here = HFDataset(path="json", data_files=str(path), column="body")
    for bad, expected in (
        (HFDataset(path=str(tmp_path / "nowhere")), r"nowhere cannot be opened: .*; a local"),
        (
            HFDataset(path=str(tmp_path), split="dev"),
            r"cannot be opened: Bad split: dev\. Available splits",
        ),
        (
            HFDataset(path=str(tmp_path), name="en"),
            r"cannot be opened: BuilderConfig 'en' not found",
        ),
        (HFDataset(path=str(tmp_path)), "no column=text; the columns are: body, id"),
    ):
        rejects(expected, next, iter(hub(here, bad).documents()))


def test_bad_rows_of_a_data_set_are_named(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": [1]}])
    dataset = HFDataset(path="json", data_files=str(path))
    rejects(r"json, row 1: column text holds \[1\] \(list\), not a string", texts, hub(dataset))
    path.write_text('{"text": "a"}\n{"text": nul')
    rejects(r"data set json .*: .*JSON parse error", texts, hub(dataset))
    rejects("rows_per_document=0", hub, HFDataset(path="json", rows_per_document=0))


def test_the_python_documentation_is_topics_and_docstrings():
    corpus = open_corpus(CorpusConfig(kind="pydocs", name="test"))
    assert len(corpus.modules) > 500
    # all take ten seconds
    corpus.modules = [path for path in corpus.modules if path.name.startswith("te")]
    documents = list(corpus.documents())
    assert corpus.total_bytes == sum(document.source_bytes for document in documents) > 400_000
    assert min(len(document.text) for document in documents) >= 100
    joined = "\n".join(document.text for document in documents)
    assert "Assert statements are a convenient way to insert debugging" in joined  # a topic
    # a docstring
    assert "Wrap a single paragraph of text, returning a list of wrapped lines." in joined
    assert in_parts(corpus, 7) == texts(corpus)
