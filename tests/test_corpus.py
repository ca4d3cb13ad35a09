"""Every source of text gives the documents it should, and bad input is named with its place."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from train.config import CorpusConfig, FilesCorpusConfig, HFCorpusConfig, HFDataset, InputError
from train.data import corpus as corpus_module
from train.data import corpus_files, documents
from train.data.corpus import Corpus, open_corpus
from train.data.documents import Part

TEXTS = ["The first one, with a comma.", "Der zweite\nhat zwei Zeilen: äöü €", "third"]


def files(kind: str, path: Path | str, **settings: Any) -> Corpus:
    return open_corpus(FilesCorpusConfig(kind=kind, name="test", path=str(path), **settings))


def hub(*sets: HFDataset) -> Corpus:
    return open_corpus(HFCorpusConfig(kind="hf", name="test", datasets=list(sets)))


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents()]


def error_of(kind: str, path: Path | str, **settings: Any) -> str:
    """The message of the InputError that opening and reading gives; one line."""
    with pytest.raises(InputError) as caught:
        texts(files(kind, path, **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of rows in the format that the name ends in."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def gzipped(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


# ---- all sources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_table_gives_the_texts_of_its_column_in_order(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / name, [{"id": i, "body": text} for i, text in enumerate(["", *TEXTS, "  "])])
    corpus = files(path.suffix[1:], path, column="body")
    assert texts(corpus) == TEXTS
    assert texts(corpus) == TEXTS  # a second pass starts again


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv"])
def test_a_gzipped_file_gives_what_the_plain_one_gives(tmp_path: Path, kind: str) -> None:
    plain = tmp_path / f"a.{kind}"
    if kind == "text":
        plain.write_text("\n\n".join(TEXTS), encoding="utf-8")
    else:
        write_rows(plain, [{"text": text} for text in TEXTS])
    packed = gzipped(plain)
    assert texts(files(kind, plain)) == texts(files(kind, packed)) == TEXTS
    assert sum(document.source_bytes for document in files(kind, packed).documents()) == packed.stat().st_size


@pytest.mark.parametrize("name", ["rows.text", "rows.jsonl", "rows.csv", "rows.parquet"])
def test_source_bytes_add_up_to_the_total(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    kind = path.suffix[1:]
    rows = [{"text": f"document {i} " + "word " * (i % 50)} for i in range(1000)]
    if kind == "text":
        path.write_text("\n\n".join(row["text"] for row in rows))
    else:
        write_rows(path, rows)
    corpus = files(kind, path)
    sizes = [document.source_bytes for document in corpus.documents()]
    assert len(sizes) == 1000 and min(sizes) >= 0
    assert sum(sizes) == corpus.total_bytes


def test_a_folder_is_read_below_in_the_order_of_names_and_only_files_of_its_kind(tmp_path: Path) -> None:
    for name in ["z.txt", "sub/deep/b.md", "sub/a.rst", "a.text", "b.TXT", ".hidden.txt", ".git/x.txt", "no.bin"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    gzipped(tmp_path / "a.text")
    assert texts(files("text", tmp_path)) == ["a.text", "a.text", "b.TXT", "sub/a.rst", "sub/deep/b.md", "z.txt"]


def test_a_glob_and_a_single_file_take_what_they_name(tmp_path: Path) -> None:
    for name in ["b/2.log", "a/deep/1.log", "a/1.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(files("text", tmp_path / "**" / "*.log")) == ["a/deep/1.log", "b/2.log"]
    assert texts(files("text", tmp_path / "b/2.log")) == ["b/2.log"]


def test_the_fingerprint_changes_with_the_files_and_not_with_their_place(tmp_path: Path) -> None:
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


def test_a_kind_that_is_unknown_or_not_that_of_the_settings_is_refused() -> None:
    with pytest.raises(InputError, match=r"corpus\.kind=books .*pydocs, text, jsonl, csv, parquet, hf"):
        open_corpus(CorpusConfig(kind="books", name="test"))
    with pytest.raises(InputError, match="use corpus=text"):
        open_corpus(CorpusConfig(kind="text", name="test"))


def test_a_path_without_files_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("x")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "*.txt"):
        with pytest.raises(InputError, match="matches no file") as caught:
            files("text", path)
        assert str(path) in str(caught.value)


def test_a_link_to_nowhere_and_a_file_without_permission_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "nowhere")
    assert f"{link} is not a regular file, or a link to nowhere" in error_of("text", tmp_path)
    link.unlink()
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, who may run this, can read everything
    assert f"{secret} cannot be read: permission denied" in error_of("text", tmp_path)


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**"])
def test_links_in_a_circle_give_each_file_once_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pattern: str
) -> None:
    folder, outside = tmp_path / "in", tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    outside.mkdir()
    for path in (folder / "a.txt", folder / "sub" / "b.txt", outside / "c.txt"):
        path.write_text(path.stem)
    (folder / "to_c").symlink_to(outside)  # followed, and once
    (folder / "twice").symlink_to(outside)
    (folder / "again").symlink_to("sub")
    (folder / "a_copy.txt").symlink_to("a.txt")
    for link, target in (("sub/up", ".."), ("itself", "."), ("neighbours", "..")):
        (folder / link).symlink_to(target)
    documents.report_left_out.cache_clear()
    assert texts(files("text", folder / pattern if pattern else folder)) == ["a", "b", "c"]
    named = {record.args[0].relative_to(folder).as_posix() for record in caplog.records}  # type: ignore[union-attr, index]
    assert named == {"twice", "again", "a_copy.txt", "sub/up", "itself", "neighbours"}


def test_a_folder_that_cannot_be_listed_is_named_instead_of_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="locked cannot be read: Permission denied"):
        files("text", tmp_path)


def test_an_error_of_the_system_while_reading_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    path.write_text("x")
    corpus = files("text", path)
    path.unlink()
    with pytest.raises(InputError, match=r"gone\.txt cannot be read: No such file"):
        texts(corpus)


# ---- parts ---------------------------------------------------------------------------------------------------------

COUNTS = [1, 2, 3, 7, 64, 1000]  # more than there are documents, and than bytes in some files, too
ROWS = [{"text": f"document {i}, äöü " + "word " * (i * 7 % 31), "id": i} for i in range(90)]


def in_parts(corpus: Corpus, count: int) -> list[str]:
    """The texts of all parts, one after the other."""
    return [document.text for index in range(count) for document in corpus.documents(Part(index, count))]


def several_files(folder: Path, suffix: str) -> Path:
    """A folder of the same rows in four files, two without any row or byte if the format allows it."""
    folder.mkdir()
    for name, rows in (("a", ROWS[:7]), ("b", ROWS[7:8]), ("d", ROWS[8:])):
        if suffix == ".txt":
            (folder / f"{name}.txt").write_text("\n\n".join(row["text"] for row in rows) + "\n", encoding="utf-8")
        else:
            write_rows(folder / f"{name}{suffix}", rows)
    if suffix in (".txt", ".jsonl"):
        (folder / "c").with_suffix(suffix).touch()
        (folder / "e").with_suffix(suffix).touch()
    return folder


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".parquet"])
def test_parts_of_files_hold_each_document_once_and_in_order(tmp_path: Path, suffix: str) -> None:
    kind = "text" if suffix == ".txt" else suffix[1:]
    corpus = files(kind, several_files(tmp_path / "plain", suffix))
    assert texts(corpus) == [row["text"].strip() for row in ROWS]
    for count in COUNTS:
        assert in_parts(corpus, count) == texts(corpus)
    if suffix != ".parquet":
        for path in list((tmp_path / "plain").iterdir()):
            gzipped(path)
            path.unlink()
        packed = files(kind, tmp_path / "plain")
        assert len(texts(packed)) == 90 and all(in_parts(packed, count) == texts(packed) for count in COUNTS)


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        ("\n\n\none\nstill one\n\n\n\ntwo\n \n", {}),
        ("one\r\nstill one\r\n\r\ntwo\r\n", {}),
        ("one\rstill one\r\rtwo\n\nthree\r\rfour\r", {}),  # line ends of old Macs
        ("no end", {}),
        ("before\n= One =\n\na\n= Two =\nb = c\n= Three =\n", {"separator": "^= .* =$"}),
        ("one\n\nfile\n", {"separator": None}),
        ("\n".join(["123456"] * 9) + "\n\n" + "\n".join(["abc"] * 9), {}),  # cut after 20 characters
        ("äöü\n\n€\n\n日本\n", {}),
        ("äöü\n\nüöä\n", {"encoding": "latin-1"}),
        ("日本\n\n語\n" * 9, {"encoding": "shift_jis"}),
        ("\u0a0a\n\nb\n\nc\n" * 9, {"encoding": "utf-16"}),
        ("a\n" + "long line " * 9 + "\nb\n\n" + "x" * 99 + "\n\nc\n" + "end " * 20, {}),  # cut after 10 characters
        ("a\n" + "long line " * 9 + "\nb\n= c =\n" + "x" * 99, {"separator": "^= .* =$"}),
        ("a\n" + "long line " * 9 + "\nb\n\nc\n", {"separator": None}),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_document_belongs_to_the_part_in_which_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(corpus_files, "MAX_DOCUMENT_CHARS", 20)
    monkeypatch.setattr(documents, "MAX_LINE_CHARS", 40)
    monkeypatch.setattr(documents, "STRETCH", re.compile(documents.STRETCH.pattern.replace("65536", "10"), re.DOTALL))
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode(settings.get("encoding", "utf-8")))
    corpus = files("text", path, **settings)
    for count in [*range(1, path.stat().st_size + 3), 1000]:
        assert in_parts(corpus, count) == texts(corpus)


def test_parts_of_text_and_their_bytes_are_about_equal(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join("word " * (i % 50) for i in range(2000)))
    corpus = files("text", path)
    parts = [list(corpus.documents(Part(index, 8))) for index in range(8)]
    for part in parts:
        assert sum(document.source_bytes for document in part) == pytest.approx(path.stat().st_size / 8, rel=0.05)
        assert sum(len(document.text) for document in part) == pytest.approx(path.stat().st_size / 8, rel=0.05)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_part_opens_no_other_file_and_decodes_no_other_bytes(tmp_path: Path, suffix: str) -> None:
    folder = several_files(tmp_path / "in", suffix)
    corpus = files("text" if suffix == ".txt" else "jsonl", folder)
    expected = [document.text for document in corpus.documents(Part(3, 4))]
    assert len(expected) > 10
    path = folder / f"d{suffix}"
    path.write_bytes(b"\xff" * 500 + path.read_bytes()[500:])  # nobody could decode that
    for name in ("a", "b", "c", "e"):
        path.with_stem(name).unlink()
    found = [document.text for index in (12, 13, 14) for document in corpus.documents(Part(index, 16))]
    assert len(found) > 5 and found == expected[: len(found)]


def test_a_mistake_in_a_part_is_named_with_the_place_that_it_was_read_from(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' * 9 + "[]\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 5 from byte 78 on: not a JSON object"):
        list(files("jsonl", path).documents(Part(1, 2)))


def test_parts_of_data_sets_share_the_files_and_hold_each_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "BLOCK_DOCUMENTS", 4)
    folder = several_files(tmp_path / "set", ".parquet")
    corpus = hub(
        HFDataset(path=str(folder), rows_per_document=2),
        HFDataset(path="json", data_files=str(write_rows(tmp_path / "more.jsonl", ROWS))),
    )
    whole = texts(corpus)
    assert len(whole) == 4 + 1 + 41 + 90  # a document ends with its file
    for count in (1, 2, 4):
        assert in_parts(corpus, count) == whole
    for count in (5, 13):
        assert sorted(in_parts(corpus, count)) == sorted(whole)


def test_parts_of_the_python_documentation_hold_each_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = open_corpus(CorpusConfig(kind="pydocs", name="test"))
    monkeypatch.setattr(corpus, "modules", corpus.modules[:3])
    assert len(texts(corpus)) > 50
    for count in COUNTS:
        assert in_parts(corpus, count) == texts(corpus)


# ---- text ----------------------------------------------------------------------------------------------------------


def test_blank_lines_part_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n \none\nstill one\n\t\n\n\ntwo\n")
    assert texts(files("text", path)) == ["one\nstill one", "two"]


def test_the_usual_separator_is_the_same_as_the_expression() -> None:
    for character in map(chr, range(0x3100)):
        for line in (character, f"{character}\n", f" {character}", f"{character}x\n"):
            assert line.isspace() == (re.search(corpus_files.BLANK, line.rstrip("\n")) is not None)


def test_a_line_that_matches_the_separator_begins_the_next_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before\n= One =\n\na\n= Two =\nb = c\n")
    assert texts(files("text", path, separator="^= .* =$")) == ["before", "= One =\n\na", "= Two =\nb = c"]


def test_without_a_separator_a_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    (tmp_path / "b.txt").write_text("c")
    assert texts(files("text", tmp_path, separator=None)) == ["a\n\nb", "c"]


def test_line_ends_of_other_systems_and_a_byte_order_mark_make_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content in (b"a\nb\n\nc", b"a\r\nb\r\n\r\nc\r\n", b"a\rb\r\rc", b"\xef\xbb\xbfa\nb\n\nc"):
        path.write_bytes(content)
        assert texts(files("text", path)) == ["a\nb", "c"]


def test_unicode_is_left_as_it_is(tmp_path: Path) -> None:
    text = "cafe\u0301 \u2028 ﬁ \x85 \U0001f600"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert texts(files("text", tmp_path)) == [text]


def test_a_stretch_without_separators_is_cut_at_a_line_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_files, "MAX_DOCUMENT_CHARS", 10)
    (tmp_path / "a.txt").write_text("123456\n123456\n123456\n")
    assert texts(files("text", tmp_path)) == ["123456\n123456", "123456"]
    assert texts(files("text", tmp_path, separator=None)) == ["123456\n123456\n123456"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "shift_jis", "UTF8"])
def test_other_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    text = "日本\n\n語" if encoding == "shift_jis" else "äö\n\nü"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert texts(files("text", tmp_path, encoding=encoding)) == text.split("\n\n")


@pytest.mark.parametrize("offset", [0, 5, 8191, 8192, 100_001])
@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_that_does_not_decode_is_named_with_its_offset(tmp_path: Path, offset: int, packed: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("é".encode() * (offset // 2) + b"x" * (offset % 2) + b"\xe9 la carte")
    if packed:
        path = gzipped(path)
    message = error_of("text", path)
    assert message.startswith(f"{path}: byte 0xe9 at offset {offset} is not utf-8;")
    assert "corpus.encoding=latin-1" in message and "corpus.errors=replace" in message
    assert texts(files("text", path, errors="replace"))[0].endswith("\ufffd la carte")
    assert texts(files("text", path, encoding="latin-1"))[0].endswith("é la carte")


def test_a_character_cut_by_the_end_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one two €".encode()[:-1])
    assert "byte 0xe2 at offset 8" in error_of("text", tmp_path)


def test_the_offset_counts_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\xff")
    assert "byte 0xff at offset 5" in error_of("text", tmp_path)


def test_utf_16_without_its_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("plain".encode("utf-16-le"))
    message = error_of("text", tmp_path, encoding="utf-16")
    assert message.startswith(str(tmp_path / "a.txt")) and "BOM" in message


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_a_binary_file_is_refused(tmp_path: Path, errors: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"text\nthen \0 bytes")
    assert f"{tmp_path / 'a.txt'}:2: a NUL" in error_of("text", tmp_path, errors=errors)


def test_a_gz_that_is_none_or_is_cut_or_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress(str(list(range(1000))).encode())
    for content in (b"plain text", whole[: len(whole) // 2], whole[:-4], whole[:-1] + b"?", whole[:10] + b"\xff" * 20):
        path.write_bytes(content)
        assert error_of("text", path).startswith(f"{path} cannot be read: ")


def test_a_separator_that_is_no_expression_and_an_unknown_encoding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert error_of("text", tmp_path, separator="(").startswith("corpus.separator=( is no regular expression")
    for encoding in ("utf-88", "hex"):
        assert error_of("text", tmp_path, encoding=encoding).startswith(f"corpus.encoding={encoding} is not known")


# ---- jsonl ---------------------------------------------------------------------------------------------------------


def test_blank_lines_of_json_lines_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "one\\r\\ntwo"}\n\n  \n{"text": "three"}')
    assert texts(files("jsonl", tmp_path)) == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "cut', "not a JSON object"),
        ("[", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('["text"]', "a list"),
        ('{"body": "x", "id": 1}', "no column=text; the columns are: body, id"),
        ('{"text": null}', "column text holds None (NoneType), not a string"),
        ('{"text": 12}', "column text holds 12 (int), not a string"),
        ('{"text": "half \\ud83d"}', "half of a surrogate pair; set corpus.errors=replace"),
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    message = error_of("jsonl", path)
    assert message.startswith(f"{path}:3: ") and expected in message


def test_half_a_surrogate_pair_is_replaced_on_demand_and_a_whole_one_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d \\ud83d\\ude00"}\n')
    assert texts(files("jsonl", tmp_path, errors="replace")) == ["\ufffd \U0001f600"]


def test_bytes_that_do_not_decode_are_named_in_tables_too(tmp_path: Path) -> None:
    for kind, content in (("jsonl", b'{"text": "\xe9"}'), ("csv", b"text\nabcdefg \xe9")):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(content)
        assert f"byte 0xe9 at offset {content.index(0xE9)}" in error_of(kind, path)


# ---- csv -----------------------------------------------------------------------------------------------------------


def test_a_csv_field_may_be_longer_than_the_module_allows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", [{"text": "x" * 200_000}])
    assert texts(files("csv", path)) == ["x" * 200_000]


@pytest.mark.parametrize(
    ("content", "place", "expected"),
    [
        ("id,body\n1,x\n", 1, "no column=text; the columns are: id, body"),
        ("", 1, "no column=text; the columns are: (none)"),
        ("id,text\n1,x\n\n2,a,b\n", 4, "3 fields where the header has 2"),
        ('id,text\n1,"x\ny"\n2\n', 4, "1 fields where the header has 2"),
        ('id,text\n1,"never closed\n2,x\n', 3, "not CSV: unexpected end of data"),
        ('id,text\n1,"a" b\n', 2, "not CSV"),
    ],
)
def test_a_bad_row_of_csv_is_named(tmp_path: Path, content: str, place: int, expected: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    message = error_of("csv", path)
    assert message.startswith(f"{path}:{place}: ") and expected in message


# ---- parquet -------------------------------------------------------------------------------------------------------


def test_a_null_of_parquet_is_no_document(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}, {"text": "b"}])
    assert texts(files("parquet", path)) == ["a", "b"]


def test_every_kind_of_string_column_is_read(tmp_path: Path) -> None:
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        table = pyarrow.table({"text": pyarrow.array(TEXTS).cast(kind)})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        assert texts(files("parquet", tmp_path)) == TEXTS


def test_bad_parquet_is_refused_before_anything_is_read(tmp_path: Path) -> None:
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
        with pytest.raises(InputError) as caught:
            files("parquet", tmp_path)
        assert str(path) in str(caught.value) and expected in str(caught.value)


def test_parquet_damaged_inside_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", [{"text": os.urandom(500).hex()} for _ in range(20)])
    content = bytearray(path.read_bytes())
    content[4:2000] = bytes(1996)
    path.write_bytes(content)
    assert error_of("parquet", path).startswith(f"{path} cannot be read as Parquet: ")


# ---- hf ------------------------------------------------------------------------------------------------------------


def test_data_sets_follow_each_other_and_rows_can_be_joined(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.parquet", [{"body": f"s{i}", "id": i} for i in range(5)])
    path = write_rows(tmp_path / "more.jsonl", [{"text": "a"}, {"text": None}, {"text": " b\r\nc "}])
    corpus = hub(
        HFDataset(path=str(tmp_path / "set"), column="body", rows_per_document=2),
        HFDataset(path="json", data_files=str(path)),
    )
    expected = ["s0\ns1", "s2\ns3", "s4", "a", "b\nc"]
    assert texts(corpus) == texts(corpus) == expected
    assert [document.source_bytes for document in corpus.documents()] == [len(text) for text in expected]
    assert corpus.total_bytes is None


def test_the_fingerprint_of_data_sets_changes_with_names_and_local_files(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    sets = [
        HFDataset(path="user/set"),
        HFDataset(path="user/set", name="en"),
        HFDataset(path="user/set", split="test"),
        HFDataset(path="json", data_files=str(path)),
        HFDataset(path=str(tmp_path)),
    ]
    before = [hub(item).fingerprint() for item in sets]
    assert before == [hub(item).fingerprint() for item in sets]
    write_rows(path, [{"text": "longer"}])
    after = [hub(item).fingerprint() for item in sets]
    assert len({*before, *after}) == 7 and before[:3] == after[:3]


def test_a_data_set_that_is_not_to_be_had_is_named_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"body": "a", "id": 1}])
    here = HFDataset(path="json", data_files=str(path), column="body")
    for bad, expected in (
        (HFDataset(path=str(tmp_path / "nowhere")), r"nowhere cannot be opened: .*; a local"),
        (HFDataset(path=str(tmp_path), split="dev"), r"cannot be opened: Bad split: dev\. Available splits"),
        (HFDataset(path=str(tmp_path), name="en"), r"cannot be opened: BuilderConfig 'en' not found"),
        (HFDataset(path=str(tmp_path)), "no column=text; the columns are: body, id"),
    ):
        with pytest.raises(InputError, match=expected):
            next(iter(hub(here, bad).documents()))

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'user/set' on the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        InputError, match=r"^data set user/set cannot be opened: .*HF_HUB_OFFLINE is set; a local folder works too$"
    ):
        texts(hub(HFDataset(path="user/set")))


def test_bad_rows_of_a_data_set_are_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": [1]}])
    with pytest.raises(InputError, match=r"json, row 1: column text holds \[1\] \(list\), not a string"):
        texts(hub(HFDataset(path="json", data_files=str(path))))
    path.write_text('{"text": "a"}\n{"text": nul')
    with pytest.raises(InputError, match=r"data set json .*: .*JSON parse error"):
        texts(hub(HFDataset(path="json", data_files=str(path))))
    with pytest.raises(InputError, match="rows_per_document=0"):
        hub(HFDataset(path="json", rows_per_document=0))


# ---- pydocs --------------------------------------------------------------------------------------------------------


def test_the_python_documentation_is_megabytes_and_the_same_each_time() -> None:
    first, second = (open_corpus(CorpusConfig(kind="pydocs", name="test")) for _ in range(2))
    documents = list(first.documents())
    assert documents == list(second.documents())
    assert first.fingerprint() == second.fingerprint()
    assert first.total_bytes == sum(document.source_bytes for document in documents) > 1_500_000
    assert min(len(document.text) for document in documents) >= 100
    joined = "\n".join(document.text for document in documents)
    assert "Assert statements are a convenient way to insert debugging" in joined  # a topic
    assert "Wrap a single paragraph of text, returning a list of wrapped lines." in joined  # a docstring


def test_docstrings_of_all_a_module_defines_are_found_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "b.py").write_text('"""' + "not this one " * 20 + '"""')
    (tmp_path / "broken.py").write_text("def :")
    (tmp_path / "copy.py").write_text(f'"""klass {"word " * 5}\n\nindented"""\ndef f():\n    """{"new " * 40}"""')
    (tmp_path / "short.py").write_text('"""Too short."""')
    names = ["module", "klass", "method", "inner", "guarded", "method"]
    source = '''"""{} {pad}"""
raise SystemExit
class A:
    """{} {pad}

        indented
    """
    def f(self):
        """{} {pad}"""
        async def g():
            """{} {pad}"""
try:
    x
except E:
    def h():
        """{} {pad}"""
def again():
    """{} {pad}"""
'''
    (tmp_path / "a.py").write_text(source.format(*names, pad="word " * 5))
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(corpus_module, "topics", {})
    found = texts(open_corpus(CorpusConfig(kind="pydocs", name="test")))
    assert len(found) == 2 and found[1] == ("new " * 40).strip()  # what a.py said already is not said again
    assert [part.split()[0] for part in found[0].split("\n\n")] == [*names[:2], "indented", *names[2:5]]
