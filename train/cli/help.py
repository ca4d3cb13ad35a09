"""Help on settings: the comments of train/config, and the groups and options of conf/. No Hydra here."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from importlib import resources

import yaml
from omegaconf import MISSING

WIDTH = 110  # columns


def settings_help(schema: type, name: str, keys: Sequence[str]) -> str:
    """The most used settings of a schema with their defaults and meaning, and the groups of conf/`name`.yaml."""
    lines = ["most used settings (key=value; --cfg job prints all, train/config explains all):"]
    for key in keys:
        item, comment = explained_field(schema, key)
        lines += hanging(f"{key}={shown_default(item)}", comment, indent=34)
    lines += ["", "groups, each with the option taken by default and all options (group=option; see conf/):"]
    for group, (default, options) in groups(name).items():
        lines += hanging(f"{group}={default or 'null'}", " | ".join(options), indent=34)
    return "\n".join(lines)


def hanging(head: str, text: str, *, indent: int) -> list[str]:
    """Lines of a hanging indent: `head`, and `text` in a column at its right."""
    first = f"  {head:{indent - 2}}" if len(head) < indent - 2 else f"  {head}  "
    wrapped = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False)
    return wrapped or [first.rstrip()]


# ---- settings ------------------------------------------------------------------------------------------------------


def explained_field(schema: type, key: str) -> tuple[Field, str]:
    """The field at "checkpoint.every", in the section's class or one that extends it, and its comment."""
    *path, name = key.split(".")
    for part in path:
        schema = typing.get_type_hints(schema)[part]
    kinds = [schema, *schema.__subclasses__()]
    item, kind = next((item, kind) for kind in kinds for item in fields(kind) if item.name == name)
    texts = (" | ".join(item.metadata.get("among", ())), comments(kind).get(name, "").replace("None", "null"))
    return item, "; ".join(text for text in texts if text)


def shown_default(item: Field) -> str:
    """The default as it is written on the command line; dots for a setting that has none."""
    if callable(item.default_factory):
        return str(item.default_factory())
    value = item.default
    if value is NO_DEFAULT or value == MISSING:
        return "..."
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def comments(kind: type) -> dict[str, str]:
    """Comments of the fields of a dataclass, inherited ones too. One stands beside its field and continues below."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        name = ""
        for line in inspect.getsource(base).splitlines() if is_dataclass(base) else ():
            if match := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                name = match[1]
                texts[name] = match[2] or ""
            elif line.startswith("    # ") and texts.get(name):
                texts[name] += line.removeprefix("    #")
            else:
                name = ""
    return texts


# ---- groups --------------------------------------------------------------------------------------------------------


@functools.cache
def groups(name: str) -> dict[str, tuple[str | None, list[str]]]:
    """Groups of conf/`name`.yaml, each with its default option (None: no option) and all options."""
    folder = resources.files("conf")
    listed = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))["defaults"]
    options_of = {}
    for entry in listed:
        if isinstance(entry, dict):
            ((group, default),) = entry.items()
            if not group.startswith("override "):
                files = (file.name for file in (folder / group).iterdir())
                options = sorted(file.removesuffix(".yaml") for file in files if file.endswith(".yaml"))
                options_of[group] = (default, options)
    return options_of
