"""The reader of metrics.jsonl. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config import check
from train.config.checks import LARGEST

NUMBER = (int, float)


def read_lines(metrics: Path, *, is_strict: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl as `parse_lines` does, none if there is no such file."""
    yield from parse_lines(metrics.read_bytes() if metrics.is_file() else b"", where=str(metrics), is_strict=is_strict)


def parse_lines(content: bytes, *, where: str = "metrics.jsonl", is_strict: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl, without a last one that is half written. Other damaged lines are left out too,
    or an InputError if `is_strict`. InputError in any case if a line does not name its attempt: an earlier version
    wrote it, and nothing here can use it.
    """
    *whole, half = content.split(b"\n")
    rows = [(number, row) for number, row in enumerate([*whole, half], 1) if row.strip()]
    for number, row in rows:
        try:
            line = json.loads(row)
        except (ValueError, RecursionError) as error:
            check(not is_strict or row is half, f"{where} line {number} is not JSON: {error}")
            continue
        if not isinstance(line, dict):
            line = {}
        check(
            "attempt" in line or not {"kind", "time_unix_s", "step"} <= line.keys(),
            f"{where} is of an earlier version: its lines do not name their attempt. Use that version, or begin a "
            "new run from its weights with model.init_from",
        )
        counts = [line.get("attempt"), line.get("step")]
        is_valid = isinstance(line.get("kind"), str) and isinstance(line.get("time_unix_s"), NUMBER)
        is_valid = is_valid and all(isinstance(count, int) and 0 <= count < LARGEST for count in counts)
        check(
            is_valid or not is_strict,
            f"{where} line {number} is not a metrics line: expected an object with kind, attempt, step and time_unix_s",
        )
        if is_valid:
            yield line
