"""Readers of a run's metrics lines, on disk or in S3, from either end. This module does not import torch.

Damaged lines and an unfinished last line are skipped, so that the run's other lines can still be used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from train.config.checks import LAST_UNIX_S
from train.run_folder.metrics_files import rows, rows_back
from train.storage.folders import Folder
from train.storage.schema import BadContent, of_type, read_json

Line = dict[str, Any]
KEYS: dict[str, type] = {"kind": str, "attempt": int, "step": int, "time_unix_s": float}


def read_lines(folder: Folder) -> Iterator[Line]:
    """Yield the lines, oldest first. A missing file has no lines."""
    with suppress(FileNotFoundError):
        yield from sound(rows(folder), b"", [])


def read_back(
    folder: Folder,
    *,
    containing: bytes = b"",
    limit_bytes: float = math.inf,
    damage: list[str] | None = None,
) -> Iterator[Line]:
    """Yield the lines that contain the bytes `containing`, newest first, from the last `limit_bytes` of the run.

    The error of the first damaged line read is appended to `damage`. An unfinished last line is not an error.
    """
    faults = [] if damage is None else damage
    with suppress(FileNotFoundError):
        yield from sound(rows_back(folder, limit_bytes), containing, faults)


def sound(found: Iterator[bytes], containing: bytes, damage: list[str]) -> Iterator[Line]:
    """Yield the lines that are not damaged."""
    for number, row in enumerate(found):
        if containing not in row or not row.strip():
            continue
        try:
            line = parse(row)
        except BadContent as error:
            if number and not damage:  # row 0 may be the file's unfinished last line
                damage.append(str(error))
        else:
            yield line


def parse(row: bytes) -> Line:
    """Parse a line. Raises BadContent if it is damaged."""
    try:
        line = read_json(row)
    except BadContent as error:
        raise BadContent(f"a line {str(error).removeprefix('it ')}") from error
    try:
        for key, hint in KEYS.items():
            of_type(hint, line[key], key)
        if 0 <= line["time_unix_s"] < LAST_UNIX_S:
            return dict(line)
    except (BadContent, LookupError, TypeError):
        pass
    what = "kind, attempt, step and time_unix_s; an earlier version wrote others"
    raise BadContent(f"a line is not an object with {what}")
