"""The command line of `baretrain train` and `baretrain prepare`: from Hydra overrides to an exit code."""

from __future__ import annotations

import copy
import functools
from argparse import Namespace
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from hydra import compose, initialize_config_module
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
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
    check_printable,
    check_values,
    flatten,
    leaves,
)
from train.machine.console import say
from train.parallel.optim import OPTIMIZERS, check_optimizer
from train.run.command import (
    DONE,
    EXITS,
    FAILED,
    REJECTED,
    STOPPED,
    Parser,
    command_parser,
    guarded,
)
from train.run.help import OWN_OPTIONS, groups, settings_help, type_name
from train.run.names import close_to, opened, quoted
from train.run.precedence import over_recipe
from train.tasks import TASKS, spec_of

# names that actions import from this module
__all__ = [
    "DONE",
    "FAILED",
    "REJECTED",
    "STOPPED",
    "quoted",
]

Schema = tuple[str, str, type]  # (group, option, dataclass)
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


@functools.cache
def register(configs: tuple[tuple[type, str], ...], options: tuple[Schema, ...]) -> None:
    """Register dataclasses with Hydra: as the schemas of files in conf/, or as the options in OWN_OPTIONS."""
    store = ConfigStore.instance()
    # Composing Hydra's own options as well, which nothing here reads, would take half as long again.
    store.store(group="hydra", name="config", node=HydraConf(defaults=[]))
    for schema, file in configs:
        store.store(name=f"{file}_schema", node=schema)
    for group, name, node in options:
        store.store(
            group=group, name=name if (group, name) in OWN_OPTIONS else f"{name}_schema", node=node
        )


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
    return to_settings(compose_config(schema, overrides, values), schema, overrides)


def load_backend(overrides: Sequence[str]) -> tuple[BackendConfig, InstanceConfig]:
    """Return a run's backend and instance settings. Other settings may be missing from the overrides."""
    composed = compose_config(TrainConfig, overrides)
    check_values({key: OmegaConf.to_container(composed[key]) for key in ("backend", "instance")})
    backend = OmegaConf.to_object(composed.backend)
    instance = OmegaConf.to_object(composed.instance)
    assert isinstance(backend, BackendConfig) and isinstance(instance, InstanceConfig)
    return backend, instance


def to_settings(
    composed: DictConfig, schema: type[Config], overrides: Sequence[str] = ()
) -> Config:
    """Convert settings to dataclasses. Raises InputError if one is missing or impossible."""
    try:
        # The values are not resolved: config.yaml would store the value of ${oc.env:...}.
        plain = OmegaConf.to_container(composed)
        assert isinstance(plain, dict)
        check_values({str(key): value for key, value in plain.items()})
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(error_text(error, schema, overrides)) from error
    assert isinstance(config, schema)
    if isinstance(config, TrainConfig):
        # The task and optimizer must exist, with settings of the right class.
        spec_of(config.task)
        check_optimizer(config.optim)
    return config


def check_typed(schema: type, typed: Sequence[str]) -> None:
    """Raise InputError if several options of one group are on the command line."""
    for group in groups(CONFIGS[schema]):
        options = sorted({override for override in typed if override.startswith(f"{group}=")})
        check(len(options) < 2, f"{' and '.join(options)} choose the same thing; give one of them")


def compose_config(
    schema: type[Config], given: Sequence[str], values: Mapping[str, Any] | None = None
) -> DictConfig:
    """Compose the settings and check names, options and types; values may still be missing."""
    overrides, users_own = opened(given)
    for override in overrides:
        check_override(schema, override)
    options = []
    typed = []
    listed = groups(CONFIGS[schema])
    for override in overrides:
        if not is_option(override, listed):
            typed.append(override)
        # Hydra has no syntax for "no option of this group". It is the default of groups that accept null.
        elif not override.endswith("=null"):
            options.append(override)
    try:
        base = compose_options(
            CONFIGS[schema], tuple(options), tuple(CONFIGS.items()), tuple(schemas())
        )
        composed = copy.deepcopy(base)
        for key, known in (values or {}).items():
            OmegaConf.update(composed, key, known, force_add=True)
        for override in typed:
            set_value(composed, override)
        for key, value in preferred(schema, overrides).items():
            OmegaConf.update(composed, key, value)
        for key, value in users_own.items():
            where = "of the data chosen here" if key.startswith("data.") else "of this command"
            is_known = OmegaConf.select(composed, key) is not None
            check(is_known, f"{key} is not a setting {where}; --cfg job lists all")
            OmegaConf.update(composed, key, value, merge=True, force_add=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(error_text(error, schema, given)) from error
    return composed


def set_value(composed: DictConfig, override: str) -> None:
    read = parsed(override)
    key, value = read.key_or_group, read.value()
    OmegaConf.update(composed, key, value, merge=True)
    for name, each in leaves(value, key):
        # OmegaConf has read every number except 0 as true.
        is_number = str(each)[-1:].isdigit() and str(each) not in ("0", "1")
        is_switch = isinstance(OmegaConf.select(composed, name), bool)
        check(not (is_number and is_switch), f"{override}: {name} must be true or false")


@functools.lru_cache(maxsize=32)
def compose_options(
    name: str,
    options: tuple[str, ...],
    configs: tuple[tuple[type, str], ...],
    known: tuple[Schema, ...],
) -> DictConfig:
    """Compose conf/`name`.yaml with options of its groups: most of the time, so a process does it once for each choice.

    Callers copy the result. `configs` and `known` are those of `register`.
    """
    register(configs, known)
    with initialize_config_module("conf", version_base="1.3"):
        return compose(name, overrides=list(options))


@functools.lru_cache(maxsize=1024)
def parsed(override: str) -> Override:
    """Parse an override. Raises HydraException."""
    return OverridesParser.create().parse_override(override)


def is_option(override: str, listed: Container[str]) -> bool:
    """Return whether an override chooses an option of a group, and does not set values."""
    key = parsed(override).key_or_group
    return (key in listed or "/" in key) and not isinstance(parsed(override).value(), dict)


def check_override(schema: type, override: str) -> None:
    """Raise InputError unless an override is key=value with a known key and option of a group."""
    check(
        not override.startswith("+"), f"{override}: settings cannot be added; write it without +"
    )
    check(
        not override.startswith("~"),
        f"{override}: settings cannot be removed; give the value you want",
    )
    key, equals, _ = override.partition("=")
    try:
        read = parsed(override)
    except HydraException as error:
        check_printable(override)
        hint = f"give it a value: {key}=..."
        if equals:
            hint = f"quote a value with special characters: '{key}=\"...\"'"
        raise InputError(f"{override} is not key=value; {hint}") from error
    is_named = key != "" and read.package is None
    check(is_named, f"{override} is not key=value: {key!r} is not a name")
    check(
        not read.is_sweep_override(),
        f"{override} has several values, but sweeps are not supported: start one run for each; a list is [a,b]",
    )
    listed = groups(CONFIGS[schema])
    top = key.split(".")[0].split("/")[0]
    if top not in listed and all(top != item.name for item in fields(schema)):
        name = top if "." in key else key
        raise InputError(f"{name} is not a setting; {close_to(top, known_keys(schema))}")
    if key in listed:
        check_option(override, *listed[key])


def check_option(override: str, default: str | None, options: Sequence[str]) -> None:
    """Raise InputError unless an override of a group chooses one of its options, or sets values of the section."""
    read = parsed(override)
    chosen = read.value()
    if isinstance(chosen, dict) or (chosen is None and default is None):
        return
    is_text = isinstance(chosen, str | QuotedString)
    check(
        is_text and str(chosen) in options,
        f"{override}: there is no such {read.key_or_group}; choose one of: {', '.join(options)}",
    )


def preferred(schema: type, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that follow from the overrides and replace a recipe's; see `train.run.precedence`."""
    given = {override.partition("=")[0]: parsed(override).value() for override in overrides}
    return over_recipe(dict(flatten(given)), groups(CONFIGS[schema]))


# ---- errors ----------------------------------------------------------------------------------------------------------


def error_text(error: BaseException, schema: type, overrides: Sequence[str] = ()) -> str:
    """Turn an error of Hydra or OmegaConf, which has several lines, into a one-line message for the user."""
    while isinstance(error.__cause__, HydraException | OmegaConfBaseException):
        if getattr(error, "full_key", None) and not getattr(error.__cause__, "full_key", None):
            break  # under a debugger OmegaConf adds another cause, which names no setting
        error = error.__cause__
    key = str(getattr(error, "full_key", None) or "")
    if not key:
        return " ".join(str(error).split())
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is not set: give {key}=... on the command line"
    known = settings_of(schema)
    while key not in known and "[" in key:
        key = key.rpartition("[")[0]  # an item of a list
    if key not in known and isinstance(error, AttributeError | KeyError):
        return f"{key} is not a setting; {close_to(key, known)}"
    seen = key
    for override in overrides:
        name = override.partition("=")[0]
        if key == name or key.startswith(f"{name}.") or name.startswith((f"{key}.", f"{key}[")):
            seen = override
    while key not in known and "." in key:
        key = key.rpartition(".")[0]  # a key of a table
    if key not in known:
        return f"{seen}: {str(error).splitlines()[0]}"
    if isinstance(error, AttributeError | KeyError):
        group = key.rpartition(".")[0]
        options = [
            f"{kind}={option}"
            for kind, option, node in schemas()
            if kind == group and key.rpartition(".")[2] in get_type_hints(node)
        ]
        where = " or ".join(options)
        if where:
            hint = f"{where} has it"
        else:
            hint = "--cfg job lists all"
        if group:
            place = f"of the {group} chosen here"
        else:
            place = "at the top level"
        return f"{key} is not a setting {place}; {hint}"
    if is_dataclass(known[key]):
        return f"{seen}: {key} is a group of settings; give one of them, such as {key}.name=value"
    words = type_name(known[key])
    article = "" if words.startswith(("true", "text")) else "a "
    return f"{seen}: {key} must be {article}{words}"


def settings_of(schema: type) -> dict[str, Any]:
    """Return the type of each setting and section of a schema, including those of its groups' options, by key."""
    types: dict[str, Any] = {}

    def add(kind: type, prefix: str) -> None:
        hints = get_type_hints(kind)
        for item in fields(kind):
            types[f"{prefix}{item.name}"] = hints[item.name]
            if is_dataclass(hints[item.name]):
                add(hints[item.name], f"{prefix}{item.name}.")

    add(schema, "")
    for group, _, kind in schemas():
        if group in types:
            add(kind, f"{group}.")
    return types


def known_keys(schema: type) -> list[str]:
    return list(settings_of(schema))


# ---- commands --------------------------------------------------------------------------------------------------------


def settings_parser(
    name: str,
    schema: type,
    purpose: str,
    *,
    examples: Sequence[str],
    keys: Sequence[str],
    model: str = "",
) -> Parser:
    """Make the parser of a command with settings. --help explains `keys`. `model`: help on the argument MODEL."""
    exits = {**EXITS, STOPPED: "stopped on request; the same command resumes it"}
    settings = partial(settings_help, schema, CONFIGS[schema], keys)
    imports = issubclass(schema, TrainConfig)
    parser = command_parser(
        name, purpose, examples=examples, exits=exits, settings=settings, imports=imports
    )
    if model:
        parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings, without dashes; see below"
    )
    parser.add_argument(
        "--cfg", choices=("job",), help="print all settings, as they would be used, and stop"
    )
    return parser


def hint_on_flag(name: str, schema: type) -> str:
    if "=" in name:
        return f"settings have no dashes: {name}"
    if name in known_keys(schema):
        return f"settings have no dashes: {name}=..."
    return "see --help"


def show(schema: type, overrides: Sequence[str], values: Mapping[str, Any]) -> None:
    """Print the settings, and check them unless a required one is missing."""
    composed = compose_config(schema, overrides, values)
    text = OmegaConf.to_yaml(composed)
    if "???" not in text:
        to_settings(composed, schema, overrides)
    say(*text.splitlines())


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
            raise InputError(f"{flag} is not a flag; {hint_on_flag(flag.lstrip('-'), schema)}")
        check_typed(schema, options.settings)
        keys = {override.partition("=")[0] for override in options.settings}
        first, known = given(options) if callable(given) else (given, {})
        values = {key: value for key, value in known.items() if key not in keys}
        overrides = [each for each in first if each.partition("=")[0] not in keys]
        overrides += options.settings
        if options.cfg is not None:
            show(schema, overrides, values)
            return DONE
        return action(load_config(schema, overrides, values))

    return guarded(
        act,
        interrupted=("interrupted; the same command resumes it", STOPPED),
    )
