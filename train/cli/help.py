"""Help on settings: the comments of train/config, and the groups and options of conf/. No Hydra here."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
import tokenize
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
    return item, comments(kind).get(name, "").replace("None", "null")


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
    """Comments of the fields of a dataclass, inherited fields included."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            texts |= own_comments(textwrap.dedent(inspect.getsource(base)))
    return texts


def own_comments(source: str) -> dict[str, str]:
    """Comments of the fields of one class. A comment stands beside a field and continues below, or stands above it."""
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    items = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    methods = [item.lineno for item in node.body if isinstance(item, ast.FunctionDef)]
    texts: dict[str, list[str]] = {ast.unparse(item.target): [] for item in items}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, above, below = token.start[0], "", ""
        if token.type != tokenize.COMMENT or row > min(methods, default=row):
            continue
        for item in items:
            if item.lineno <= row:
                above = ast.unparse(item.target)
                is_beside = row <= (item.end_lineno or 0)
            else:
                below = below or ast.unparse(item.target)
        name = above if above and (is_beside or texts[above]) else below
        if name:
            texts[name].append(token.string.lstrip("# "))
    return {name: " ".join(lines) for name, lines in texts.items()}


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
