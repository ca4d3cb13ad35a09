"""The command line of `baretrain train` and `baretrain prepare`: from Hydra overrides to an exit code."""

from __future__ import annotations

import copy
import functools
import re
from argparse import Namespace
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

from hydra import compose, initialize_config_module
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

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
)
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
from train.run.help import OWN_OPTIONS, groups, settings_help, show_yaml, words_as_text
from train.run.names import opened, quoted
from train.run.own import check_imports
from train.run.precedence import check_numbers, over_recipe
from train.run.spelling import close_to, hint_on, spelling
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
    return checked(compose_config(schema, overrides, values), schema, overrides)


def load_backend(overrides: Sequence[str]) -> tuple[BackendConfig, InstanceConfig]:
    """Return a run's backend and instance settings. Other settings may be missing from the overrides."""
    composed = compose_config(TrainConfig, overrides)
    check_values({key: OmegaConf.to_container(composed[key]) for key in ("backend", "instance")})
    backend, instance = (
        OmegaConf.to_object(composed.backend),
        OmegaConf.to_object(composed.instance),
    )
    assert isinstance(backend, BackendConfig) and isinstance(instance, InstanceConfig)
    return backend, instance


def checked(composed: DictConfig, schema: type[Config], overrides: Sequence[str] = ()) -> Config:
    """Convert settings to dataclasses. Raises InputError if one is missing or impossible."""
    try:
        # not resolved: config.yaml would store the value of ${oc.env:...}
        plain = OmegaConf.to_container(composed)
        assert isinstance(plain, dict)
        check_values({str(key): value for key, value in plain.items()})
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error, schema, overrides)) from error
    assert isinstance(config, schema)
    # the task and optimizer must exist, with settings of the right class
    if isinstance(config, TrainConfig):
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
        check_override(schema, override, overrides)
    listed = groups(CONFIGS[schema])
    # Hydra has no syntax for "no option of this group". If that is the group's default, group=null is dropped.
    overrides = [
        each
        for each in overrides
        if not (each.endswith("=null") and each.removesuffix("=null") in listed)
    ]
    try:
        options = tuple(each for each in overrides if is_option(each, listed))
        composed = copy.deepcopy(
            compose_options(CONFIGS[schema], options, tuple(CONFIGS.items()), tuple(schemas()))
        )
        for key, known in (values or {}).items():
            OmegaConf.update(composed, key, known, force_add=True)
        typed = [parsed(each) for each in overrides if each not in options]
        choose_form(composed, typed)
        for value in typed:
            OmegaConf.update(composed, value.key_or_group, value.value(), merge=True)
        for key, value in preferred(schema, overrides).items():
            OmegaConf.update(composed, key, value)
        for key, value in users_own.items():
            where = "of the data chosen here" if key.startswith("data.") else "of this command"
            check(
                OmegaConf.select(composed, key) is not None,
                f"{key} is not a setting {where}; --cfg job lists all",
            )
            OmegaConf.update(composed, key, value, merge=True, force_add=True)
        check_numbers(composed, {each: parsed(each).value() for each in overrides})
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error, schema, given)) from error
    return composed


def choose_form(composed: DictConfig, overrides: Sequence[Override]) -> None:
    """Replace the data's settings by those of its form that data.format names, if there is one."""
    for each in overrides:
        if each.key_or_group == "data.format":
            form = OmegaConf.select(composed, f"data.forms.{each.value()}")
            if form is not None:
                for key, value in form.items():
                    OmegaConf.update(composed, f"data.{key}", value, merge=True, force_add=True)


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
    with initialize_config_module("conf", version_base="1.3"), words_as_text():
        return compose(name, overrides=list(options))


@functools.lru_cache(maxsize=1024)
def parsed(override: str) -> Override:
    """Parse an override. Raises HydraException."""
    return OverridesParser.create().parse_override(override)


def is_option(override: str, listed: Container[str]) -> bool:
    """Return whether an override chooses an option of a group, and does not set values."""
    key = parsed(override).key_or_group
    return (key in listed or "/" in key) and not isinstance(parsed(override).value(), dict)


def check_override(schema: type, override: str, overrides: Sequence[str]) -> None:
    """Raise InputError unless `override`, one of `overrides`, is key=value with a known key and option of a group."""
    check(
        not override.startswith("+"), f"{override}: settings cannot be added; write it without +"
    )
    check(
        not override.startswith("~"),
        f"{override}: settings cannot be removed; give the value you want",
    )
    key, _, value = override.partition("=")
    is_accepted = partial(works, schema, overrides)
    try:
        read = parsed(override)
    except HydraException as error:
        check_printable(override)
        raise InputError(
            f"{override} is not key=value; {hint_on(override, is_accepted)}"
        ) from error
    check(
        key != "" and read.package is None, f"{override} is not key=value: {key!r} is not a name"
    )
    if read.is_sweep_override():
        several = (
            f"{override} has several values, but sweeps are not supported: start one run for each"
        )
        raise InputError(" or ".join(filter(None, [several, spelling(key, value, is_accepted)])))
    listed = groups(CONFIGS[schema])
    top = key.split(".")[0].split("/")[0]
    if top not in listed and all(top != item.name for item in fields(schema)):
        raise InputError(
            f"{top if '.' in key else key} is not a setting; {close_to(top, known_keys(schema))}"
        )
    default, options = listed.get(key, (None, []))
    chosen = read.value()
    if options and not isinstance(chosen, dict):
        text = str(chosen) if isinstance(chosen, str | QuotedString) else ""
        check(
            text in options or (chosen is None and default is None),
            f"{override}: there is no such {key}; choose one of: {', '.join(options)}",
        )


def works(schema: type, overrides: Sequence[str], override: str) -> bool:
    """Return whether a spelling of an override is accepted together with the others that are well formed."""
    key = override.partition("=")[0]

    def is_read(each: str) -> bool:
        with suppress(HydraException):
            return not parsed(each).is_sweep_override()
        return False

    if override in overrides or not is_read(override):
        return False
    try:
        load_config(schema, [*(each for each in overrides if is_read(each)), override])
    except InputError as error:  # Other settings may be missing.
        return key not in str(error)
    return True


def preferred(schema: type, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings that follow from the overrides and replace a recipe's; see `train.run.precedence`."""
    given = {override.partition("=")[0]: parsed(override).value() for override in overrides}
    return over_recipe(dict(flatten(given)), groups(CONFIGS[schema]))


KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "bool": "true or false",
    "string": "text",
}


def explain(error: BaseException, schema: type, overrides: Sequence[str] = ()) -> str:
    """Turn an error of Hydra or OmegaConf, which has several lines, into a one-line message for the user."""
    while (
        isinstance(cause := error.__cause__, HydraException)
        or getattr(cause, "full_key", None) is not None
    ):
        # under a debugger OmegaConf adds another cause, which names no setting
        assert cause is not None
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    full_key = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )
    first = lines[0] if lines else type(error).__name__
    if "missing mandatory value" in first.lower():
        return f"{full_key} is not set: give {full_key}=... on the command line"
    if " not in '" in first or "is not in struct" in first:
        name, keys = full_key.rsplit(".", 1)[-1], known_keys(schema)
        if name in {key.rpartition(".")[2] for key in keys}:
            group = full_key.rpartition(".")[0]
            where = f"of the {group} chosen here" if group else "at the top level but in a group"
            options = (
                (f"{kind}={option}", fields(node))
                for kind, option, node in schemas()
                if kind == group
            )
            others = " or ".join(
                option for option, settings in options if name in {each.name for each in settings}
            )
            return f"{full_key} is not a setting {where}; {f'{others} has it' if others else '--cfg job lists all'}"
        return f"{full_key} is not a setting; {close_to(full_key, keys)}"
    seen = ([full_key] + [override for override in overrides if is_of(override, full_key)])[-1]
    if match := re.search(
        r"(?:could not be converted to|Cannot convert .* to|is not a valid) (\w+)", first
    ):
        return f"{seen}: {full_key} must be {KINDS.get(match[1], match[1])}"
    if "is not Optional" in first or "Incompatible value 'None'" in first:
        return f"{seen}: {full_key} cannot be null; leave it out"
    if "is not a ListConfig" in first:
        return f"{seen}: {full_key} must be a list, such as {full_key}=[a,b]"
    if (
        "is not a subclass of" in first
        or "not a DictConfig" in first
        or "Cannot merge DictConfig with" in first
    ):
        return f"{seen}: {full_key} is a group of settings; give one of them, such as {full_key}.name=value"
    noise = (
        "full_key:|object_type=|reference_type=|Set the env|See https|Config search path|provider="
    )
    message = " ".join(line for line in lines if not re.match(noise, line))
    return f"{seen}: {message}" if full_key and full_key not in message else message


def is_of(override: str, full_key: str) -> bool:
    """Return whether an override sets `full_key`, a part of it, or the section or list that contains it."""
    key = override.partition("=")[0]
    return (
        full_key == key
        or full_key.startswith((f"{key}.", f"{key}["))
        or key.startswith(f"{full_key}.")
    )


def known_keys(schema: type) -> list[str]:
    """Return the keys of all settings of the schema, including its groups' options, for "did you mean"."""
    sections: list[tuple[str, Any]] = [
        (item.name, item.default_factory) for item in fields(schema)
    ]
    sections += [
        (group, kind) for group, _, kind in schemas() if group in {name for name, _ in sections}
    ]
    inner = [
        f"{name}.{item.name}"
        for name, kind in sections
        if is_dataclass(kind)
        for item in fields(kind)
    ]
    return [*(item.name for item in fields(schema)), *inner]


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
            key = flag.lstrip("-")
            is_setting = "=" in flag or key in known_keys(schema)
            hint = (
                f"settings have no dashes: {key if '=' in key else f'{key}=...'}"
                if is_setting
                else "see --help"
            )
            raise InputError(f"{flag} is not a flag; {hint}")
        keys = {override.partition("=")[0] for override in options.settings}
        check_typed(schema, options.settings)
        first, values = given(options) if callable(given) else (given, {})
        values = {key: value for key, value in values.items() if key not in keys}
        overrides = [
            override for override in first if override.partition("=")[0] not in keys
        ] + options.settings
        if options.cfg is None:
            try:
                cfg = load_config(schema, overrides, values)
            except InputError:
                # the unknown name may be in a file that the run's first start imported
                check_imports(overrides)
                raise
            return action(cfg)
        composed = compose_config(schema, overrides, values)
        shown = OmegaConf.to_yaml(composed)
        if "???" not in shown:  # no required setting is missing
            checked(composed, schema, overrides)
        show_yaml(shown)
        return DONE

    return guarded(
        act,
        interrupted=("interrupted; the same command resumes it", STOPPED),
    )
