"""Causes of error texts, by the table causes.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Cause:
    name: str
    pattern: str
    cause: str
    cure: str


CAUSES = [Cause(**row) for row in yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text(encoding="utf-8"))]


def explain(text: str) -> list[Cause]:
    """Rows whose pattern occurs in the text (a message or a whole log), in the order of the table."""
    return [cause for cause in CAUSES if re.search(cause.pattern, text, re.IGNORECASE | re.MULTILINE)]
