"""Hydra: what a typed override says, and the settings that conf/ composes. Its import takes a tenth of a second."""

from __future__ import annotations

import functools
from typing import Any

from hydra import compose, initialize_config_module
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from train.config import InputError, check, check_printable
from train.run.help import OWN_OPTIONS, Schema


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
    try:
        with initialize_config_module("conf", version_base="1.3"):
            return compose(name, overrides=list(options))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(" ".join(str(error).split())) from error


@functools.lru_cache(maxsize=1024)
def parsed(override: str) -> tuple[str, Any]:
    """Return the key and the value of an override. Raises InputError unless it is key=value, with one value."""
    try:
        read: Override = OverridesParser.create().parse_override(override)
        value = read.value()
    except HydraException as error:
        check_printable(override)
        quoting = "quote a value with special characters: 'key=\"...\"'"
        raise InputError(f"{override} is not key=value; {quoting}") from error
    key = read.key_or_group
    is_plain = read.type is OverrideType.CHANGE and read.package is None and key != ""
    check(is_plain, f"{override} is not key=value")
    check(
        not read.is_sweep_override(),
        f"{override} has several values, but sweeps are not supported: start one run for each; a list is [a,b]",
    )
    return key, value
