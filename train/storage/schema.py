"""Checks of files that somebody else may have written: file names in them, their fields, and the fields' types.

A manifest, an index or a bucket's listing names files that are then read, written or deleted here. Each of these names
is checked as a `FileName` or `RelativePath` before it becomes a path, so that no path leads out of its folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import (
    Any,
    NamedTuple,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import yaml

from train.config import InputError
from train.config.checks import LARGEST_FLOAT

MAX_NAME_BYTES = 200  # file systems allow 255; temporary names add up to 54 bytes
MAX_PATH_BYTES = 1000  # S3 allows 1024 for a key
# JSON numbers above are not exact for all programs, and sums of counts stay below 2^63
MAX_COUNT = 2**53
MAX_DEPTH = 50  # levels of lists and objects inside each other
MAX_YAML_BYTES = 2**22  # the parser needs about a minute for this much
SHOWN_CHARS = 80  # characters of a value that an error shows

T = TypeVar("T")


class BadContent(InputError, ValueError):
    """An error raised because a file that others may have written is invalid. The message is one line.

    It is also a ValueError, like the errors of parsers, so that code can catch both in the same way.
    """


class FileName(str):
    """The name of a file in a folder: printable, without slashes, not hidden, and not like a command-line option."""

    def __new__(cls, name: object) -> FileName:
        ok = (
            isinstance(name, str) and name.isprintable() and not re.search(r"[/\\]|^[.-]|^$", name)
        )
        if not ok or len(str(name).encode()) > MAX_NAME_BYTES:
            raise BadContent(f"{shown(name)} is not the name of a file")
        return super().__new__(cls, name)


class RelativePath(str):
    """A path inside a folder: file names with slashes between them."""

    def __new__(cls, path: object) -> RelativePath:
        if not isinstance(path, str) or len(path.encode(errors="replace")) > MAX_PATH_BYTES:
            raise BadContent(f"{shown(path)} is not a path inside a folder")
        for part in path.split("/"):
            try:
                FileName(part)
            except BadContent:
                raise BadContent(f"{shown(path)} is not a path inside a folder") from None
        return super().__new__(cls, path)


class Sha256(str):
    """64 lower-case hexadecimal digits."""

    def __new__(cls, value: object) -> Sha256:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            raise BadContent(f"{shown(value)} is not a sha256")
        return super().__new__(cls, value)


def is_path(name: str) -> bool:
    """Return whether a name is a valid RelativePath."""
    try:
        RelativePath(name)
    except BadContent:
        return False
    return True


def shown(value: object) -> str:
    """Return a value as text for an error message: short, and without control characters."""
    text = ascii(value)
    if len(text) <= SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]}..."


class FileEntry(TypedDict):
    """The length and checksum of a file, as recorded in a manifest."""

    bytes: int
    sha256: Sha256


class Head(NamedTuple):
    """The length and version of a file, which can be found without reading the file."""

    size: int  # bytes
    version: str  # changes with the content; in S3 it is the ETag


# ---- records -------------------------------------------------------------------------------------------------------


def read_json(content: bytes) -> Any:
    """Return the value in a JSON file. Raises BadContent if it is invalid, repeats a key, or is not plain."""
    try:
        value = json.loads(content, object_pairs_hook=without_repetition)
    except BadContent:
        raise
    except (ValueError, RecursionError) as error:
        raise BadContent(
            f"it is not JSON: {' '.join(str(error).split())[:SHOWN_CHARS]}"
        ) from error
    check_plain(value)
    return value


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in table if keys.count(key) > 1)
        raise BadContent(f"it has the key {shown(repeated)} twice")
    return table


def check_plain(value: Any, depth: int = 0) -> None:
    """Raise BadContent if a parsed value is nested too deep, or has an integer for which floats are too small."""
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise BadContent(f"it is nested more than {MAX_DEPTH} levels deep")
        for item in value.values() if isinstance(value, dict) else value:
            check_plain(item, depth + 1)
    elif isinstance(value, int) and abs(value) >= LARGEST_FLOAT:
        raise BadContent("it has a number that is too large")


def read_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a file. Raises BadContent if the file contains anything else."""
    value = read_json(content)
    if not isinstance(value, dict):
        raise BadContent(f"it is not a JSON object but {value!r:.40}")
    return value


class PlainLoader(yaml.SafeLoader):
    """A YAML loader that rejects aliases, which could make a short file expand endlessly."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise BadContent("it contains an alias (*NAME)")
        return super().compose_node(parent, index)


def read_yaml(content: bytes) -> Any:
    """Return the plain values of a YAML file. Raises BadContent if it is invalid, or too long for the parser."""
    if len(content) > MAX_YAML_BYTES:
        raise BadContent(f"it has more than {MAX_YAML_BYTES:,} bytes")
    try:
        value = PlainLoader(content).get_single_data()
        check_plain(value)
        return value
    except BadContent:
        raise
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        raise BadContent(
            f"it is not YAML: {' '.join(str(error).split())[:SHOWN_CHARS]}"
        ) from error


def record(kind: type[T], values: object, where: str = "") -> T:
    """Make a dataclass or a TypedDict from parsed JSON.

    Raises BadContent at the first field that is missing, unknown or of the wrong type. A field of type `int` must be a
    count, 0 or more. A field of type `float` may be any number.
    """
    if not isinstance(values, dict):
        raise BadContent(f"{where or 'it'} is {shown(values)}, not an object")
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        needed = set(kind.__required_keys__)  # type: ignore[attr-defined]
    else:
        needed = {
            item.name
            for item in fields(kind)  # type: ignore[arg-type]
            if item.default is MISSING and item.default_factory is MISSING
        }
    if where:
        prefix = f"{where}."
    else:
        prefix = ""
    if lacking := sorted(needed - values.keys()):
        raise BadContent(f"{prefix}{lacking[0]} is missing")
    if unknown := sorted(values.keys() - hints.keys(), key=str):
        raise BadContent(f"{prefix}{shown(unknown[0])} is not known")
    return kind(
        **{name: of_type(hints[name], value, f"{prefix}{name}") for name, value in values.items()}
    )


def of_type(hint: Any, value: object, where: str) -> Any:
    """Return `value` as the type `hint`, with names and records converted. Raises BadContent if the type differs."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (Union, UnionType):  # X | None
        if value is None:
            return None
        return of_type(inner[0], value, where)
    if origin is list and isinstance(value, list):
        return [of_type(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        pairs = ((of_type(inner[0], key, where), item) for key, item in value.items())
        return {key: of_type(inner[1], item, f"{where}.{shown(key)}") for key, item in pairs}
    if is_typeddict(hint) or is_dataclass(hint):
        return record(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, FileName | RelativePath | Sha256):
        return checked(hint, value, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {  # whether the value has this type, and the type's name in an error
        int: (is_number and isinstance(value, int) and 0 <= value <= MAX_COUNT, "a count"),
        float: (is_number, "a number"),
        bool: (isinstance(value, bool), "true or false"),
        str: (isinstance(value, str), "a string"),
        list: (False, "a list"),
        dict: (False, "an object"),
    }
    ok, name = kinds.get(origin or hint, (False, str(hint)))
    if not ok:
        raise BadContent(f"{where} is {shown(value)}, not {name}")
    return value


def checked(make: Callable[[object], T], value: object, where: str) -> T:
    try:
        return make(value)
    except BadContent as error:
        raise BadContent(f"{where}: {error}") from None
