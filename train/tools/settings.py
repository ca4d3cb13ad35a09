"""`python -m train.settings`: every setting of every command, and the options of every group, as one page of Markdown.

It is made from the dataclasses of the settings with the comments beside their fields, and from the first sentences of
the files of conf/.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from inspect import get_annotations

from train.config import PrepareConfig, TrainConfig
from train.config.train import CompareConfig
from train.run.command import DONE, command_parser, guarded
from train.run.compose import schemas
from train.run.help import allowed, comment, groups, option_help, shown_default, type_name
from train.tools.bench.config import BenchConfig

INTRODUCTION = """# Settings

Every key of every command, with its type, default, values and meaning, and every option of the groups. A command
explains its most used keys, and prints the whole configuration that its settings make:

```bash
python -m train --help
python -m train --cfg job experiment=demo run_dir=runs/mine
```

This page is generated: it is what `python -m train.settings` prints, from the code and from `conf/`.

A setting is `key=value` on the command line, without dashes. `null` stands for no value; a list is `'key=[a,b]'` and a
table `'key={a: b}'`, in quotes for the shell. Where the default is `...` there is none: the key, or the option of its
group, must be given. Files of `conf/` may set different defaults; `--cfg job` shows them. What you type wins
over a recipe (`experiment=`), also where the recipe chooses the same thing by another key: `model.pretrained` over its
`model.init_from`, `max_steps` over its `max_epochs`. To type two such keys is an error; of lengths the shortest counts.
`train` stands for all commands that take the settings of a run: `python -m train`, `train.precompile`, `train.records`
and `train.doctor --collectives`.

## Every day

What most users set. All other keys are below, and each is listed once."""
OTHERS = """
## Other keys"""
EXPLAINED = {
    "train": ("train.entry", "train.tools.records"),
    "prepare": ("train.tools.prepare",),
    "launch": ("launch.__main__",),
}
GROUPS = """
## Groups

`group=option` chooses the file `conf/group/option.yaml`, which sets several keys together."""


@cache
def commands() -> dict[str, type]:
    """Return the schema of each command by the name of its file in conf/. launch and ami are above this package."""
    above = import_module("launch.config").LaunchConfig, import_module("ami.config").AmiConfig
    schemas = (TrainConfig, PrepareConfig, CompareConfig, BenchConfig, *above)
    return dict(zip(("train", "prepare", "compare", "bench", "launch", "ami"), schemas, strict=True))


def every_day() -> dict[str, set[str]]:
    """Return by command the keys that its help explains; those of labelled data are in the help of train.records."""
    used = {command: [import_module(name).USED for name in names] for command, names in EXPLAINED.items()}
    return {command: set().union(*lists) for command, lists in used.items()}


@cache
def options() -> list[tuple[str, str, type]]:
    """Return a group, the name of a schema for options of it, and its dataclass, for each schema."""
    clusters = import_module("launch.schedulers").SETTINGS
    return [*schemas(), *(("cluster", name, kind) for name, kind in clusters.items())]


def sections() -> dict[tuple[str, type], list[str]]:
    """Return the commands with a dataclass's fields under a prefix, such as "optim."; base classes come first."""
    found: dict[tuple[str, type], list[str]] = {}

    def add(kind: type, prefix: str, command: str) -> None:
        for base in filter(is_dataclass, reversed(kind.__mro__)):
            found[prefix, base] = [*dict.fromkeys([*found.get((prefix, base), []), command])]
        hints = typing.get_type_hints(kind)
        for name, inner in ((item.name, each) for item in fields(kind) for each in held(hints[item.name])):
            below = f"{prefix}{name}{'' if inner is hints[name] else '[]'}."
            for schema in (inner, *(option for group, _, option in options() if f"{group}." == below)):
                add(schema, below, command)

    for command, schema in commands().items():
        add(schema, "", command)
    return found


def held(hint: typing.Any) -> list[type]:
    """Return the dataclass that a field is, or that the items of its list are."""
    return [each for each in (hint, *typing.get_args(hint)) if isinstance(each, type) and is_dataclass(each)]


def keys(prefix: str, kind: type) -> Iterator[list[str]]:
    """Yield a row for each field that the class itself defines, except the name that its option sets."""
    hints = typing.get_type_hints(kind)
    inherited = {item.name for base in filter(is_dataclass, kind.__mro__[1:]) for item in fields(base)}
    for item in fields(kind):
        is_own = item.name in get_annotations(kind) and not (item.name in ("kind", "name") and item.name in inherited)
        if is_own and not is_dataclass(hints[item.name]):
            shown = [type_name(hints[item.name]), f"`{shown_default(item)}`", allowed(item)]
            yield [f"`{prefix}{item.name}`", *shown, comment(kind, item.name)]


def title(prefix: str, kind: type) -> str:
    if not prefix:
        return f"Top-level keys of {next(name for name, schema in commands().items() if issubclass(schema, kind))}"
    of_group = [(name, option) for group, name, option in options() if f"{group}." == prefix]
    names = [name for name, option in of_group if issubclass(option, kind)]
    return f"`{prefix}` of {', '.join(names)}" if 0 < len(names) < len(of_group) else f"`{prefix}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of Markdown, after a blank line."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return ["", *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, ["---"] * len(head), *cells))]


def tables(*, is_every_day: bool) -> Iterator[str]:
    """Yield the lines of a section for each dataclass with keys of every day, or with others."""
    chosen = every_day()
    for (prefix, kind), users in sections().items():
        used = set().union(*(chosen.get(user, ()) for user in users))
        if rows := [row for row in keys(prefix, kind) if (row[0].strip("`") in used) is is_every_day]:
            about = (kind.__doc__ or "").split("\n\n")[0]
            about = "" if about.startswith(f"{kind.__name__}(") else " ".join(about.replace("None", "null").split())
            yield from ("", f"### {title(prefix, kind)}", "", f"{about} Used by {', '.join(users)}.".strip())
            yield from table(("key", "type", "default", "values", "meaning"), rows)


def page() -> str:
    lines = [*INTRODUCTION.splitlines(), *tables(is_every_day=True), *OTHERS.splitlines(), *tables(is_every_day=False)]
    lines += GROUPS.splitlines()
    listed = [(group, name, default) for name in commands() for group, (default, _) in groups(name).items()]
    for group in dict.fromkeys(group for group, _, _ in listed):
        defaults = {name: default or "null" for each, name, default in listed if each == group}
        used = "; ".join(
            f"{', '.join(name for name in defaults if defaults[name] == value)} (default `{value}`)"
            for value in dict.fromkeys(defaults.values())
        )
        rows = [[f"`{option}`", option_help(group, option)] for option in groups(next(iter(defaults)))[group][1]]
        lines += ["", f"### `{group}=`", "", f"Used by {used}.", *table(("option", "what it is"), rows)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    purpose = "Print every setting of every command: type, default, values and meaning; and every option of the groups."
    parser = command_parser("train.settings", purpose, examples=("", "| less", "> docs/settings.md"))

    def act() -> int:
        parser.parse_args(arguments)
        print(page(), end="")
        return DONE

    return guarded(act)
