"""The reader of metrics.jsonl, on disk or in S3, from the first line or from the last. It does not import torch.

Damaged lines and an unfinished last line are left out, so that the other lines of the run can still be used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from train.config import check
from train.config.checks import LARGEST
from train.system.appended import rows, rows_back
from train.system.folders import Folder
from train.system.schema import BadContent

Line = dict[str, Any]
NAME = "metrics.jsonl"
NUMBER = (int, float)


def read_lines(folder: Folder, *, containing: bytes = b"") -> Iterator[Line]:
    """Yield the lines that contain the bytes `containing`, oldest first; none if the file is missing."""
    with suppress(FileNotFoundError):
        yield from sound(rows(folder, NAME), folder, containing, [])


def read_back(
    folder: Folder, *, containing: bytes = b"", limit_bytes: int | None = None, damage: list[str] | None = None
) -> Iterator[Line]:
    """Yield the lines that `read_lines` yields, newest first, from the last `limit_bytes` of the file."""
    # The fault of the first damaged line that is read is appended to `damage`.

    def limited() -> Iterator[bytes]:
        left = limit_bytes
        for number, row in enumerate(rows_back(folder, NAME)):
            left = None if left is None else left - len(row) - 1
            if left is not None and left < 0:
                return
            if number or is_whole(row):
                yield row

    with suppress(FileNotFoundError):
        yield from sound(limited(), folder, containing, [] if damage is None else damage)


def is_whole(row: bytes) -> bool:
    try:
        json.loads(row)
    except (ValueError, RecursionError):
        return False
    return True


def sound(found: Iterator[bytes], folder: Folder, containing: bytes, damage: list[str]) -> Iterator[Line]:
    """Yield the lines that are not damaged. Raises InputError if an earlier version wrote the first of them."""
    has_sound = False
    for row in found:
        if containing in row and row.strip():
            try:
                line = parse(row)
            except BadContent as error:
                if not damage:
                    damage.append(str(error))
                continue
            check(
                line is not None or has_sound,
                f"{folder.location}/{NAME} is from an earlier version: its lines do not name their attempt. Use that "
                "version, or start a new run from its weights with model.init_from",
            )
            if line is not None:
                has_sound = True
                yield line


def parse(row: bytes) -> Line | None:
    """Parse a line; None if an earlier version wrote it, without an attempt. Raises BadContent if it is damaged."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise BadContent(f"is not JSON: {error}") from error
    if isinstance(line, dict):
        if "attempt" not in line and {"kind", "time_unix_s", "step"} <= line.keys():
            return None
        counts = [line.get("attempt"), line.get("step")]
        is_valid = isinstance(line.get("kind"), str) and isinstance(line.get("time_unix_s"), NUMBER)
        if is_valid and all(isinstance(count, int) and 0 <= count < LARGEST for count in counts):
            return line
    raise BadContent("is not a metrics line: expected an object with kind, attempt, step and time_unix_s")


def first_damage(folder: Folder) -> str:
    """Return a text with the number and the fault of the first damaged line; "" if only the last is unfinished."""
    reason = ""
    for number, row in enumerate(rows(folder, NAME), 1):
        if reason:
            return reason
        try:
            parse(row) if row.strip() else None
        except BadContent as error:
            reason = f"{folder.location}/{NAME} line {number} {error}"
    return ""
