"""Settings whose values contain names that the user has chosen: labels, values of columns, files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from train.config import check

TABLES = ("data.label_map", "data.more_validation", "compare.variants")
LABELS = "data.labels"


def opened(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate the overrides for Hydra from the values with names, which Hydra may reject: {-1: neg}, [don't]."""
    for_hydra: list[str] = []
    users_own: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key in TABLES:
            users_own[key] = {**users_own.get(key, {}), **own_table(key, text)}
        elif key == LABELS:
            users_own[key] = own_list(key, text)
        else:
            for_hydra.append(f"{key}={quoted(text)}" if text.startswith("~") else override)
    return for_hydra, users_own


def quoted(text: str) -> str:
    """Quote the value of an override, so that Hydra reads all of it as text except references (${...})."""
    return QuotedString(text, Quote.double).with_quotes()


def own_table(key: str, text: str) -> dict[str, str | None]:
    """Parse a table of names as Hydra does or, if that fails, as YAML, whose plain scalars allow more characters."""
    value: Any
    try:
        value = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException:
        value = as_written(text)
    check(isinstance(value, dict), f"{key}={text}: {key} must be a table, such as {{a: b, c: d}}")
    return {str(name): None if to in (None, "null") else str(to) for name, to in value.items()}


def own_list(key: str, text: str) -> list[str]:
    """Parse a list of names, each taken literally: [no, null, 1e3] contains these three words."""
    value = as_written(text)
    ok = isinstance(value, list) and all(isinstance(name, str) for name in value)
    check(ok, f"{key}={text}: {key} must be a list, such as [a, b]")
    return value


def as_written(text: str) -> Any:
    """Parse YAML with every scalar as text. Returns None if the YAML is invalid."""
    try:
        return yaml.BaseLoader(text).get_single_data()
    except yaml.YAMLError:
        return None
