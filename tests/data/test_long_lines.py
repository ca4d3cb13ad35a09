"""Text in very long lines: read and tokenised in time that grows with it alone; ordinary text as it always was."""

from __future__ import annotations

import gzip
import io
import random
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from running import SYLLABLES
from tokenizers import Tokenizer

from train.config import FilesCorpusConfig, InputError, RecordsConfig
from train.data.files import text as files_text
from train.data.files.text import MAX_LINE_CHARS, STRETCH, STRETCH_CHARS, stretches
from train.data.records.formats import file_table
from train.data.text.corpus import open_corpus
from train.data.text.tokenizer import MAX_LINE_BYTES, short_lines

SQUAD = """{{"data": [{{"paragraphs": [{{"context": "{}", "qas": ["""
SQUAD += """{{"id": "1", "question": "a", "answers": []}}]}}]}}]}}"""


class AsItIs:
    """A normalizer that changes nothing."""

    def normalize_str(self, text: str) -> str:
        return text


@cache
def long_text(num_chars: int) -> str:
    rng = random.Random(0)
    words = ("".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(num_chars // 4))
    return " ".join(words)[:num_chars]


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


@pytest.mark.slow
def test_stretches_are_the_text_and_cut_only_very_long_lines(prepared: Path) -> None:
    ordinary = ["\n", "short\n", long_text(MAX_LINE_CHARS - 2) + "\n"]
    long = [
        long_text(3 * MAX_LINE_CHARS) + "\n",
        "x" * (2 * MAX_LINE_CHARS) + "\n",
        long_text(MAX_LINE_CHARS) + "\n",
    ]
    lines = [*ordinary, *long, *ordinary]
    parts = list(stretches(io.StringIO("".join(lines))))
    assert "".join(parts) == "".join(lines)
    assert parts[:3] == ordinary
    assert sum(len(part) > STRETCH_CHARS for part in parts) == 2  # the ordinary ones
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    line = long_text(3 * STRETCH_CHARS)
    encoded = tokenizer.encode_batch(
        [part.strip() for part in STRETCH.findall(line)], add_special_tokens=False
    )
    assert len(encoded) >= 3
    assert (
        sum((part.ids for part in encoded), [])
        == tokenizer.encode(line, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("kind", ["text", "jsonl", "csv", "rows", "conll", "squad"])
def test_a_line_is_read_up_to_a_limit_that_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, word = 2 * MAX_LINE_CHARS, "x" * (2 * MAX_LINE_CHARS - 100)
    monkeypatch.setattr(files_text, "LONGEST_LINE_CHARS", most)
    form = {"csv": "text\n{}\n", "text": "a\n{}\n", "conll": "a O\n{} O\n", "squad": SQUAD}.get(
        kind, '{{"text": "a"}}\n{{"text": "{}"}}\n'
    )
    path = tmp_path / f"a.{({'rows': 'jsonl', 'squad': 'json'}).get(kind, kind)}.gz"

    def read(text: str) -> int:
        path.write_bytes(gzip.compress(form.format(text).encode(), 1))
        if kind in ("rows", "conll", "squad"):
            data = RecordsConfig(path="x")
            return sum(1 for _ in file_table(path, path.name, data, ["text"]).rows())
        return sum(
            1
            for _ in open_corpus(
                FilesCorpusConfig(kind=kind, name="test", path=str(path))
            ).documents()
        )

    assert read(word) > 0
    with pytest.raises(
        InputError,
        match=r"a\.\w+\.gz(:2: a line of|:) more than 2,097,152 characters, which is the limit",
    ):
        read(word * 2)
