"""Help on settings, made from comments in train/config and from the files in conf/. It does not import Hydra."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from importlib import resources
from typing import Any

import yaml
from omegaconf import MISSING

from train.config.checks import LIMITS

Schema = tuple[str, str, type]  # (group, option, dataclass)
# The settings of each (group, option) that has no file in conf/.
OWN_OPTIONS: dict[tuple[str, str], type] = {}
WIDTH = 110  # columns
INDENT = 34  # columns, of the explanations
TYPES: dict[object, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Any: "list or one value",
}


def settings_help(
    schema: type,
    name: str,
    keys: Sequence[str],
    options: Callable[[], Sequence[Schema]],
    own: Mapping[str, str],
) -> str:
    """Return help on the settings `keys` of a schema, and on the groups of conf/`name`.yaml.

    `own`: the command's own defaults of settings and groups, as they are shown.
    """
    lines = [
        "most-used settings (key=value; --cfg job prints all, baretrain settings explains all):"
    ]
    known: dict[str, tuple[type, Field]] = {}
    for key, kind, item in walk(schema, options()):
        known.setdefault(key, (kind, item))
    for key in keys:
        kind, item = known[key]
        parts = [" | ".join(item.metadata.get("among", ())), comment(kind, item.name)]
        default = own.get(key) or shown_default(item)
        lines += hanging(f"{key}={default}", ". ".join(filter(None, parts)))
    lines += [
        "",
        "groups, each with its default option and all options (group=option; see conf/):",
    ]
    for group, (usual, names) in groups(name).items():
        default = own.get(group) or usual or "null"
        lines += hanging(f"{group}={default}", " | ".join(names))
    return "\n".join(lines)


def hanging(head: str, text: str) -> list[str]:
    """Return lines with a hanging indent: `head` on the left, `text` in a column on the right."""
    begin = f"  {head:{INDENT - 4}}  "
    lines = textwrap.wrap(text, WIDTH, initial_indent=begin, subsequent_indent=" " * INDENT)
    return lines or [begin.rstrip()]


# ---- settings ------------------------------------------------------------------------------------------------------


def walk(
    schema: type, options: Sequence[Schema], prefix: str = ""
) -> Iterator[tuple[str, type, Field]]:
    """Yield the key, the dataclass and the field of each setting and section, also of those that only an option has.

    In the keys of a list's items, [] stands for the number.
    """
    hints = typing.get_type_hints(schema)
    for item in fields(schema):
        key = f"{prefix}{item.name}"
        hint: Any = hints[item.name]
        yield key, schema, item
        held: Any = next(filter(is_dataclass, typing.get_args(hint)), None)
        if held is not None:
            yield from walk(held, options, f"{key}[].")
        elif is_dataclass(hint):
            kinds: list[Any] = [hint]
            kinds += [option for group, _, option in options if group == key]
            for kind in kinds:
                yield from walk(kind, options, f"{key}.")


def comment(kind: type, name: str) -> str:
    """Return the comment of a field, with None replaced by null, as on the command line."""
    return comments(kind).get(name, "").replace("None", "null")


def shown_default(item: Field) -> str:
    """Return the default as the command line spells it; "..." if there is none."""
    if callable(item.default_factory):
        return plain(item.default_factory())
    if item.default in (NO_DEFAULT, MISSING):
        return "..."
    return plain(item.default)


def plain(value: Any) -> str:
    """Return a value as the command line spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {plain(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def type_name(hint: Any) -> str:
    """Return a type in the words of error messages: "whole number or null"."""
    inner = [each for each in typing.get_args(hint) if each is not types.NoneType]
    if types.NoneType in typing.get_args(hint):
        return f"{type_name(inner[0])} or null"
    if not inner:
        return TYPES.get(hint, "table")
    held = type_name(inner[-1]).removesuffix(" or null")
    if held == TYPES[Any]:
        held = "value"
    return f"{'table' if typing.get_origin(hint) is dict else 'list'} of {held}s"


def allowed(item: Field) -> str:
    """Return the choices or the limits of a field; "" if it has none."""
    limits = [
        LIMITS[name][1].format(limit) for name, limit in item.metadata.items() if name in LIMITS
    ]
    return " | ".join(map(str, item.metadata.get("among", ()))) or ", ".join(limits)


@functools.cache
def comments(kind: type) -> dict[str, str]:
    """Return the comments of a dataclass's fields, including inherited fields.

    A comment stands above its field. A field that is defined again without a comment keeps the comment of the base
    class.
    """
    texts: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines():
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
                continue
            match = re.match(r"    (\w+): ", line)
            if match:
                texts[match[1]] = " ".join(above) or texts.get(match[1], "")
            above = []
    return texts


# ---- groups --------------------------------------------------------------------------------------------------------


@functools.cache
def groups(name: str) -> dict[str, tuple[str | None, list[str]]]:
    """Return the groups of conf/`name`.yaml, each with its default option (None: no option) and all options."""
    folder = resources.files("conf")
    text = (folder / f"{name}.yaml").read_text(encoding="utf-8")
    options_of = {}
    for entry in yaml.safe_load(text)["defaults"]:
        if not isinstance(entry, dict):
            continue
        ((group, default),) = entry.items()
        files = sorted(file.name for file in (folder / group).iterdir())
        options = [file.removesuffix(".yaml") for file in files if file.endswith(".yaml")]
        options += [name for own_group, name in OWN_OPTIONS if own_group == group]
        options_of[group] = (default, options)
    return options_of


def add_option(group: str, name: str, settings: type) -> None:
    """Add an option that has no file in conf/, with its settings."""
    OWN_OPTIONS[group, name] = settings
    groups.cache_clear()


def option_values(group: str, option: str) -> dict[str, Any]:
    """Return the settings in an option's file, or in its class if it has no file, without inherited settings."""
    own = OWN_OPTIONS.get((group, option))
    if own is None:
        values: dict[str, Any] = yaml.safe_load(text_of(group, option)) or {}
        values.pop("defaults", None)
        return values
    named = inspect.get_annotations(own)
    own_values = {}
    for item in fields(own):
        if item.name in named and item.default is not NO_DEFAULT:
            own_values[item.name] = item.default
    return own_values


def text_of(group: str, option: str) -> str:
    """Return the content of an option's file."""
    file = resources.files("conf") / group / f"{option}.yaml"
    return file.read_text(encoding="utf-8")


def option_help(group: str, option: str) -> str:
    """Return the first sentence of the comment in an option's file; for an instance without a comment, its devices."""
    text = text_of(group, option)
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            comment.append(line.removeprefix("# "))
    words = " ".join(comment)
    if words or group != "instance":
        return re.split(r"\. (?=[A-Z])|\.$", words, maxsplit=1)[0]
    values = yaml.safe_load(text)
    return f"{values['accelerator']}, {values['devices']} x {values['device_memory_gib']:g} GiB"
