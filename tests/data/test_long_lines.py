"""Very long lines: cut for the tokenizer in time that grows with them alone, and read up to a limit."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any, cast

import pytest
from rejections import rejects

from train.config import FilesCorpusConfig, RecordsConfig
from train.data.files import text as files_text
from train.data.records.formats import file_table
from train.data.text import corpus_files
from train.data.text.corpus import open_corpus
from train.data.text.tokenizer import MAX_LINE_BYTES, short_lines

SQUAD = """{{"data": [{{"paragraphs": [{{"context": "{}", "qas": ["""
SQUAD += """{{"id": "1", "question": "a", "answers": []}}]}}]}}]}}"""


class AsItIs:
    """A normalizer that changes nothing."""

    def normalize_str(self, text: str) -> str:
        return text


def lines_as_before(line: str) -> list[str]:
    """The same as `short_lines` of one line, said as plainly as can be, in quadratic time."""
    result = []
    while line:
        head = line if len(line.encode()) <= MAX_LINE_BYTES else line[: MAX_LINE_BYTES // 4]
        if len(head) < len(line):
            head = head.rpartition(" ")[0] or head
        result.append(head)
        line = line[len(head) :].lstrip()
    return result


@pytest.mark.parametrize("alphabet", ["ab ", "a", "é日😀 ", "ab\x1c  "])
def test_lines_for_the_tokenizer_are_cut_where_they_always_were(alphabet: str) -> None:
    rng = random.Random(0)
    for size in (0, 1, 999, 1000, 1001, 3999, 4000, 4001, 4002, 5000, 20_000):
        line = "".join(rng.choices(alphabet, k=size)).strip()
        given = [part for text in line.splitlines() for part in lines_as_before(text)]
        assert list(short_lines([line], cast(Any, AsItIs()), 2**30)) == given


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "rows", "conll", "squad"])
def test_a_line_is_read_up_to_a_limit_that_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_text, "LONGEST_LINE_CHARS", 1000)
    monkeypatch.setattr(corpus_files, "MAX_DOCUMENT_CHARS", 1000)
    form = {"csv": "text\n{}\n", "text": "a\n{}\n", "conll": "a O\n{} O\n", "squad": SQUAD}.get(
        kind, '{{"text": "a"}}\n{{"text": "{}"}}\n'
    )
    path = tmp_path / f"a.{({'rows': 'jsonl', 'squad': 'json'}).get(kind, kind)}.gz"

    def read(num_chars: int) -> int:
        path.write_bytes(gzip.compress(form.format("x" * num_chars).encode()))
        if kind in ("rows", "conll", "squad"):
            data = RecordsConfig(path="x")
            return sum(1 for _ in file_table(path, path.name, data, ["text"]).rows())
        cfg = FilesCorpusConfig(kind=kind, name="test", path=str(path))
        return sum(1 for _ in open_corpus(cfg).documents())

    assert read(800) > 0
    rejects(
        r"a\.\w+\.gz(:2: a line of|:) more than 1,000 characters, which is the limit", read, 1100
    )
