"""The command line of `baretrain train` and `baretrain prepare`: from Hydra overrides to an exit code."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from train.config import (
    SPLITS,
    BackendConfig,
    CorpusConfig,
    FilesCorpusConfig,
    HFCorpusConfig,
    InputError,
    InstanceConfig,
    PrepareConfig,
    RecordsConfig,
    ShardsConfig,
    TrainConfig,
    XLAConfig,
    check,
    check_choice,
    check_values,
    flatten,
    leaves,
)
from train.machine.console import say, speech
from train.parallel.optim import OPTIMIZERS, SCHEDULES
from train.run.command import (
    DONE,
    EXITS,
    FAILED,
    REJECTED,
    STOPPED,
    Parser,
    Quiet,
    command_parser,
    guarded,
)
from train.run.help import Schema, groups, settings_help, type_name, walk
from train.run.names import SELECTORS, close_to, opened, quoted
from train.run.precedence import of_fine_tuning, options_of_weights, over_recipe
from train.tasks import TASKS

# names that actions import from this module
__all__ = [
    "DONE",
    "FAILED",
    "REJECTED",
    "STOPPED",
    "quoted",
]

SCHEMAS: list[Schema] = [  # `schemas` adds those of tasks and optimizers
    ("data", "shards", ShardsConfig),
    ("data", "records", RecordsConfig),
    ("backend", XLAConfig.name, XLAConfig),
    *(("parallel", schema.name, schema) for schema in SPLITS),
    ("corpus", "plain", CorpusConfig),
    ("corpus", "files", FilesCorpusConfig),
    ("corpus", "hf", HFCorpusConfig),
]
# files in conf/; `launch` adds one
CONFIGS: dict[type, str] = {
    TrainConfig: "train",
    PrepareConfig: "prepare",
}

Config = TypeVar("Config")
Given = tuple[Sequence[str], Mapping[str, Any]]  # overrides, and values by key


def schemas() -> list[Schema]:
    """Return the schemas of all options, including those of the user's own tasks and optimizers."""
    tasks: list[Schema] = [("task", kind, spec.settings) for kind, spec in TASKS.items()]
    return [
        *tasks,
        *(("optim", name, spec.settings) for name, spec in OPTIMIZERS.items()),
        *SCHEMAS,
    ]


def add_schema(schema: type, name: str, options: Sequence[tuple[str, str, type]]) -> None:
    """Add the schema of conf/`name`.yaml, and the dataclasses of its groups' options."""
    CONFIGS[schema] = name
    SCHEMAS.extend(option for option in options if option not in SCHEMAS)


def load_config(
    schema: type[Config], overrides: Sequence[str], values: Mapping[str, Any] | None = None
) -> Config:
    """Compose the schema's file in conf/ with the overrides. Raises InputError if a key, option or value is wrong.

    `values` are values by key, which replace those of the files; the overrides take precedence.
    """
    return to_settings(compose_config(schema, overrides, values), schema)


def load_backend(overrides: Sequence[str]) -> tuple[BackendConfig, InstanceConfig]:
    """Return a run's backend and instance settings. Other settings may be missing from the overrides."""
    required = ("run_dir=none", "data.path=none", "max_steps=1", "micro_batch_size=1")
    cfg = load_config(TrainConfig, [*required, *overrides])
    return cfg.backend, cfg.instance


def to_settings(composed: DictConfig, schema: type[Config]) -> Config:
    """Convert settings to dataclasses. Raises InputError if one is missing or impossible."""
    # The values are not resolved: config.yaml would store the value of ${oc.env:...}.
    plain = OmegaConf.to_container(composed)
    assert isinstance(plain, dict)
    check_values({str(key): value for key, value in plain.items()})
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise InputError(error_text(error, schema)) from error
    assert isinstance(config, schema)
    if isinstance(config, TrainConfig):
        check_choice("optim.schedule", config.optim.schedule, tuple(SCHEDULES))
    return config


def compose_config(
    schema: type, overrides: Sequence[str], values: Mapping[str, Any] | None = None
) -> DictConfig:
    """Compose the settings and check names, options and types; values may still be missing."""
    from train.run.overrides import parsed  # imported here: --help needs no Hydra

    overrides, named = opened(overrides)
    for override in overrides:
        check_override(schema, override, *parsed(override))
    options, settings = options_and_settings(overrides, groups(CONFIGS[schema]))
    typed = dict(flatten({each.partition("=")[0]: parsed(each)[1] for each in overrides}))
    composed = compose_base(schema, options, {**(values or {}), **typed})
    update(composed, values or {}, adds=True)
    for override in settings:
        set_value(composed, schema, override, *parsed(override))
    update(composed, over_recipe(typed, groups(CONFIGS[schema])))
    update(composed, of_fine_tuning(composed))
    for key, value in named.items():
        where = "of the data chosen here" if key.startswith("data.") else "of this command"
        is_known = OmegaConf.select(composed, key) is not None
        check(is_known, f"{key} is not a setting {where}; --cfg job lists all")
        OmegaConf.update(composed, key, value, merge=True, force_add=True)
    return composed


def options_and_settings(
    overrides: Sequence[str], known: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Divide overrides into those that choose an option, by the group (one of `known`), and the others.

    Raises InputError if two choose different options of a group.
    """
    from train.run.overrides import parsed

    options: dict[str, str] = {}
    settings = []
    for override in overrides:
        key, value = parsed(override)
        if key not in known or isinstance(value, dict):
            settings.append(override)
            continue
        first = options.setdefault(key, override)
        check(first == override, f"{first} and {override} choose the same thing; give one of them")
    return options, settings


def compose_base(
    schema: type, options: Mapping[str, str], values: Mapping[str, Any]
) -> DictConfig:
    """Compose the schema's file in conf/ with the chosen options, and those that follow from the other `values`."""
    from train.run.overrides import compose_options

    # Hydra has no syntax for "no option of this group". It is the default of groups that accept null.
    chosen = [override for override in options.values() if not override.endswith("=null")]
    if values.get("model.pretrained") is not None:
        chosen += options_of_weights(options, groups(CONFIGS[schema]))
    known = tuple(schemas())
    base = compose_options(CONFIGS[schema], tuple(chosen), tuple(CONFIGS.items()), known)
    return copy.deepcopy(base)


def update(composed: DictConfig, values: Mapping[str, Any], *, adds: bool = False) -> None:
    for key, value in values.items():
        OmegaConf.update(composed, key, value, force_add=adds)


def set_value(composed: DictConfig, schema: type, override: str, key: str, value: Any) -> None:
    """Set what an override names. Raises InputError if there is no such setting, or if it has another type."""
    given = dict(leaves(value, key))
    group = key.partition(".")[0]
    selector = SELECTORS.get(group)
    check(selector not in given, f"{override}: {selector} is set by {group}=..., and not alone")
    try:
        OmegaConf.update(composed, key, value, merge=True)
        for name, each in given.items():
            # OmegaConf has read every number except 0 as true.
            is_number = str(each)[-1:].isdigit() and str(each) not in ("0", "1")
            ok = not is_number or not isinstance(OmegaConf.select(composed, name), bool)
            check(ok, f"{override}: {name} must be true or false")
    except OmegaConfBaseException as error:
        raise InputError(error_text(error, schema, override)) from error


def check_override(schema: type, override: str, key: str, chosen: Any) -> None:
    """Raise InputError unless the key and, of a group, the option of an override are known."""
    listed = groups(CONFIGS[schema])
    top = key.partition(".")[0]
    if top not in listed and all(top != item.name for item in fields(schema)):
        raise InputError(f"{top} is not a setting; {close_to(top, settings_of(schema))}")
    if key in listed and not isinstance(chosen, dict):
        default, options = listed[key]
        check(
            str(chosen) in options or chosen is default is None,
            f"{override}: there is no such {key}; choose one of: {', '.join(options)}",
        )


# ---- errors ----------------------------------------------------------------------------------------------------------


def error_text(error: Exception, schema: type, override: str = "") -> str:
    """Turn an error of OmegaConf, which has several lines, into a one-line message for the user."""
    # The key, without the number of a list's item. Some errors have none.
    key = str(getattr(error, "full_key", None) or "").partition("[")[0]
    if not key:
        return " ".join(str(error).split())
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is not set: give {key}=... on the command line"
    known = settings_of(schema)
    if isinstance(error, AttributeError | KeyError):
        if key not in known:
            return f"{key} is not a setting; {close_to(key, known)}"
        group, _, name = key.rpartition(".")
        options = [
            f"{kind}={option}"
            for kind, option, node in schemas()
            if kind == group and name in get_type_hints(node)
        ]
        return f"{key} is not a setting of the {group} chosen here; {' or '.join(options)} has it"
    while key not in known and "." in key:
        key = key.rpartition(".")[0]  # a key of a table, or one below a value
    if key not in known:
        return f"{override}: {str(error).splitlines()[0]}"
    if is_dataclass(known[key]):
        return (
            f"{override}: {key} is a group of settings; give one of them, such as {key}.name=value"
        )
    words = type_name(known[key])
    article = "" if words.startswith(("true", "text")) else "a "
    return f"{override}: {key} must be {article}{words}"


def settings_of(schema: type) -> dict[str, Any]:
    """Return the type of each setting and section of a schema, including those of its groups' options, by key."""
    return {key: get_type_hints(kind)[item.name] for key, kind, item in walk(schema, schemas())}


# ---- commands --------------------------------------------------------------------------------------------------------


def settings_parser(
    name: str,
    schema: type,
    purpose: str,
    *,
    examples: Sequence[str],
    keys: Sequence[str],
    first: tuple[str, str] | None = None,
    own: Mapping[str, str] | None = None,
) -> Parser:
    """Make the parser of a command with settings. --help explains `keys`.

    `first`: the name of the argument before the settings, and help on it. `own`: the command's own defaults, as they
    are shown; "..." if it finds them in the data or in the model.
    """
    exits = {**EXITS, STOPPED: "stopped on request; the same command resumes it"}
    settings = partial(settings_help, schema, CONFIGS[schema], keys, schemas, own or {})
    imports = issubclass(schema, TrainConfig)
    parser = command_parser(
        name, purpose, examples=examples, exits=exits, settings=settings, imports=imports
    )
    if first is not None:
        name, text = first
        parser.add_argument(name, metavar=name.upper(), help=text)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings, without dashes; see below"
    )
    parser.add_argument(
        "--quiet", nargs=0, action=Quiet, help="print only warnings, errors and the result"
    )
    parser.add_argument(
        "--cfg", choices=("job",), help="print all settings, as they would be used, and stop"
    )
    return parser


def run(
    schema: type[Config],
    action: Callable[[Config], int],
    parser: Parser,
    *,
    arguments: Sequence[str] | None = None,
    given: Sequence[str] | Callable[[Namespace], Given] = (),
) -> int:
    """Read and check the command line, call `action` with the settings, and return the exit code.

    `given` are further overrides, or a function that returns them, and values by key, for the parsed flags; the command
    line takes precedence.
    """

    def act() -> int:
        options, unknown = parser.parse_known_intermixed_args(arguments)
        for flag in unknown:
            raise InputError(
                f"{flag} is not a flag; see --help. Settings have no dashes: key=value"
            )
        keys = {override.partition("=")[0] for override in options.settings}
        speech.all_lines = "log_every" in keys
        first, known = given(options) if callable(given) else (given, {})
        values = {key: value for key, value in known.items() if key not in keys}
        overrides = [each for each in first if each.partition("=")[0] not in keys]
        overrides += options.settings
        if options.cfg is not None:
            composed = compose_config(schema, overrides, values)
            text = OmegaConf.to_yaml(composed)
            if "???" not in text:  # nothing required is missing
                to_settings(composed, schema)
            say(*text.splitlines())
            return DONE
        return action(load_config(schema, overrides, values))

    return guarded(
        act,
        interrupted=("interrupted; the same command resumes it", STOPPED),
    )
