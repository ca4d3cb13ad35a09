"""Help on settings, made from comments in train/config and from the files in conf/. It does not import Hydra."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from importlib import resources
from typing import Any

import yaml
from omegaconf import MISSING

from train.config.checks import LIMITS
from train.machine.console import say

OWN_OPTIONS: dict[
    tuple[str, str], type
] = {}  # settings of each (group, option) that has no file in conf/
WIDTH = 110  # columns
TYPES: dict[object, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Any: "list or one value",
}


def show_yaml(text: str) -> None:
    """Print a YAML text; as ASCII if it has characters that would be escaped when they are printed."""
    lines = text.removesuffix("\n").split("\n")
    if not all(map(str.isprintable, lines)):
        lines = yaml.safe_dump(yaml.safe_load(text), sort_keys=False).splitlines()
    say(*lines)


def settings_help(schema: type, name: str, keys: Sequence[str]) -> str:
    """Return help on the settings `keys` of a schema, and on the groups of conf/`name`.yaml."""
    lines = [
        "most-used settings (key=value; --cfg job prints all, baretrain settings explains all):"
    ]
    for key in keys:
        item, meaning = explained_field(schema, key)
        lines += hanging(f"{key}={shown_default(item)}", meaning, indent=34)
    lines += [
        "",
        "groups, each with its default option and all options (group=option; see conf/):",
    ]
    for group, (default, options) in groups(name).items():
        lines += hanging(f"{group}={default or 'null'}", " | ".join(options), indent=34)
    return "\n".join(lines)


def hanging(head: str, text: str, *, indent: int) -> list[str]:
    """Return lines with a hanging indent: `head` on the left, `text` in a column on the right."""
    if len(head) > WIDTH - indent:
        above = textwrap.wrap(head, WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
        return [*above, *hanging("", text, indent=indent)]
    first = f"  {head:{indent - 2}}" if len(head) < indent - 2 else f"  {head}  "
    wrapped = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False
    )
    return wrapped or [first.rstrip()]


# ---- settings ------------------------------------------------------------------------------------------------------


def explained_field(schema: type, key: str) -> tuple[Field, str]:
    """Return the field and the comment of a key such as "checkpoint.every". A subclass of the section may define it."""
    *path, name = key.split(".")
    for part in path:
        schema = typing.get_type_hints(schema)[part]
    kinds = [schema, *schema.__subclasses__()]
    item, kind = next((item, kind) for kind in kinds for item in fields(kind) if item.name == name)
    texts = (" | ".join(item.metadata.get("among", ())), comment(kind, name))
    return item, ". ".join(text for text in texts if text)


def comment(kind: type, name: str) -> str:
    """Return the comment of a field, with None replaced by null, as on the command line."""
    return comments(kind).get(name, "").replace("None", "null")


def shown_default(item: Field) -> str:
    """Return the default as the command line spells it; "..." if there is none."""
    if callable(item.default_factory):
        return plain(item.default_factory())
    return "..." if item.default in (NO_DEFAULT, MISSING) else plain(item.default)


def plain(value: Any) -> str:
    """Return a value as the command line spells it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {plain(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    for base in reversed(kind.__mro__):
        above: list[str] = []
        for line in inspect.getsource(base).splitlines() if is_dataclass(base) else ():
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
                continue
            if match := re.match(r"    (\w+): ", line):
                texts[match[1]] = " ".join(above) or texts.get(match[1], "")
            above = []
    return texts


# ---- groups --------------------------------------------------------------------------------------------------------


@functools.cache
def groups(name: str) -> dict[str, tuple[str | None, list[str]]]:
    """Return the groups of conf/`name`.yaml, each with its default option (None: no option) and all options."""
    folder = resources.files("conf")
    listed = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))["defaults"]
    options_of = {}
    for entry in listed:
        if isinstance(entry, dict):
            ((group, default),) = entry.items()
            files = (file.name for file in (folder / group).iterdir())
            options = sorted(
                file.removesuffix(".yaml") for file in files if file.endswith(".yaml")
            )
            options += [name for own_group, name in OWN_OPTIONS if own_group == group]
            options_of[group] = (default, options)
    return options_of


def add_option(group: str, name: str, settings: type) -> None:
    """Add an option that has no file in conf/, with its settings."""
    OWN_OPTIONS[group, name] = settings
    groups.cache_clear()


def option_values(group: str, option: str) -> dict[str, Any]:
    """Return the settings in an option's file, or in its class if it has no file, without inherited settings."""
    if (own := OWN_OPTIONS.get((group, option))) is not None:
        named = {
            item.name: item.default
            for item in fields(own)
            if item.name in inspect.get_annotations(own)
        }
        return {name: value for name, value in named.items() if value is not NO_DEFAULT}
    text = (resources.files("conf") / group / f"{option}.yaml").read_text(encoding="utf-8")
    with words_as_text():
        return {
            key: value for key, value in (yaml.safe_load(text) or {}).items() if key != "defaults"
        }


@contextmanager
def words_as_text() -> Iterator[None]:
    """Make YAML read `no`, `off`, `yes` and `on` as text, as in overrides: labels may be such words."""
    known = yaml.SafeLoader.yaml_implicit_resolvers
    truths = re.compile("(true|True|TRUE|false|False|FALSE)$")
    yaml.SafeLoader.yaml_implicit_resolvers = {
        first: [
            (tag, truths if tag == "tag:yaml.org,2002:bool" else pattern)
            for tag, pattern in resolvers
        ]
        for first, resolvers in known.items()
    }
    try:
        yield
    finally:
        yaml.SafeLoader.yaml_implicit_resolvers = known


def option_help(group: str, option: str) -> str:
    """Return the first sentence of the comment in an option's file; for an instance without a comment, its devices."""
    text = (resources.files("conf") / group / f"{option}.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("# @package")]
    words = " ".join(
        line.removeprefix("# ")
        for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    )
    if not words and group == "instance":
        values = yaml.safe_load(text)
        return (
            f"{values['accelerator']}, {values['devices']} x {values['device_memory_gib']:g} GiB"
        )
    return re.split(r"\. (?=[A-Z])|\.$", words, maxsplit=1)[0]
