"""Hints on what was typed wrongly: lines that work for overrides that Hydra does not read, and names of settings."""

from __future__ import annotations

import difflib
import re
import shlex
import unicodedata
from collections.abc import Callable, Sequence

from train.run.names import ours, quoted

NAME = re.compile(r"\w[\w./]*")  # the name of a setting
# dashes and quotes that editors write
TYPED = str.maketrans("\u2013\u2014\u2212\u201c\u201d\u201e", '---"""')


def hint_on(override: str, works: Callable[[str], bool]) -> str:
    """Return a hint on an override that is not key=value. `works`: see `spelling`."""
    key, equals, value = override.partition("=")
    name, *index = key.strip().split("[", maxsplit=1)
    elsewhere = "docs/settings.md says what each setting can be"
    if NAME.fullmatch(name) is None:
        return f"{key.strip()!r} is not a name" if equals else elsewhere
    if index:
        return f"give the whole list, such as {name}=[a,b]"
    if not equals:
        return f"give it a value: {name}=..."
    return spelling(name, value, works) or elsewhere


def spelling(name: str, value: str, works: Callable[[str], bool]) -> str:
    """Return a hint with the first spelling of name=value that works, according to `works`; "" if none does."""
    value = value.lstrip("= ")
    plain = unicodedata.normalize("NFKC", value).translate(TYPED).strip()
    parts = re.split(r"[\s,;]+", plain.strip("[](){} "))
    items = [item if item.startswith('"') else quoted(item) for item in parts]
    numbers = [item.strip('"') for item in items]
    lists = [f"[{','.join(each)}]" for each in (numbers, items)]
    texts = [value, quoted(value), plain, plain.strip("[](){},;\"' ")]
    is_list = plain.startswith(("[", "("))
    for each in [*lists, *texts] if is_list else [*texts, *lists]:
        if works(f"{name}={each}"):
            return f"write {shlex.quote(f'{name}={each}')}"
    return ""


def close_to(name: str, keys: Sequence[str]) -> str:
    """Return a hint for an unknown name: our key, or the one with the closest last word, first in the same section."""
    section, _, word = name.rpartition(".")
    if word not in keys and (key := ours(word.lower(), keys)):
        return f"did you mean {key}?"
    last = {
        key.rpartition(".")[2]: key
        for key in sorted(keys, key=lambda key: key.rpartition(".")[0] == section)
    }
    close = difflib.get_close_matches(word, list(last), n=1)
    return f"did you mean {last[close[0]]}?" if close else "--cfg job lists all"
