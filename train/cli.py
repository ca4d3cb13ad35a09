"""The command line of `python -m train` and `python -m train.prepare`: Hydra overrides in, an exit code out.

Exit codes: 0 done, 1 failed, 2 configuration or input refused, 75 stopped on request with a checkpoint.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import TypeVar

import hydra
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.config import (
    ClassifyConfig,
    CorpusConfig,
    Failure,
    FilesCorpusConfig,
    HFCorpusConfig,
    InputError,
    MLMConfig,
    PrepareConfig,
    QAConfig,
    RecordsConfig,
    S3Config,
    ShardsConfig,
    TrainConfig,
    Unreachable,
    XLAConfig,
    check,
    launched_rank,
)

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 75  # 75: EX_TEMPFAIL of sysexits.h, "try again later"

CHOSEN = (  # schemas that a group's option decides on
    MLMConfig,
    ClassifyConfig,
    QAConfig,
    ShardsConfig,
    RecordsConfig,
    XLAConfig,
    FilesCorpusConfig,
    HFCorpusConfig,
)

TABLES = ("data.label_map", "data.more_validation")

Config = TypeVar("Config", TrainConfig, PrepareConfig)
Flagged = Callable[[argparse.Namespace, S3Config], int]


def register_schemas() -> None:
    """Make the dataclasses known to Hydra; `conf/*.yaml` name them in their defaults lists."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="prepare_schema", node=PrepareConfig)
    for group, name, node in (
        ("task", "mlm_schema", MLMConfig),
        ("task", "classify_schema", ClassifyConfig),
        ("task", "qa_schema", QAConfig),
        ("data", "shards_schema", ShardsConfig),
        ("data", "records_schema", RecordsConfig),
        ("backend", "xla_schema", XLAConfig),
        ("corpus", "plain_schema", CorpusConfig),
        ("corpus", "files_schema", FilesCorpusConfig),
        ("corpus", "hf_schema", HFCorpusConfig),
    ):
        store.store(group=group, name=name, node=node)


def load_config(schema: type[Config], overrides: list[str]) -> Config:
    """Compose `conf/train.yaml` or `conf/prepare.yaml` with the command line's overrides and check every value.

    Raises InputError, one line, for an unknown key or option, a wrong type, a missing or an impossible value.
    """
    composed = compose_config(schema, overrides)
    try:
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error, schema)) from error
    assert isinstance(config, schema)
    return config


def compose_config(schema: type[Config], overrides: list[str]) -> DictConfig:
    """The same without the checks that need every value: names, options and types are right."""
    register_schemas()
    parser = OverridesParser.create()
    for override in overrides:
        check(not override.startswith("+"), f"{override}: settings cannot be added, only given; write it without +")
        try:
            parser.parse_override(override)
        except HydraException as error:
            raise InputError(f"{override} is not key=value; quote special characters, as in 'key=\"a (b)\"'") from error
    try:
        with initialize_config_module("conf", version_base="1.3"):
            composed = compose(config_name(schema), overrides=[*chain.from_iterable(map(opened, overrides))])
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error, schema)) from error
    for key in TABLES:
        given = any(override.startswith(f"{key}=") for override in overrides)
        is_known = given and OmegaConf.get_type(composed, "data") is RecordsConfig
        check(is_known or not given, f"{key} is not a setting of the data chosen here; --cfg job lists all")
    return composed


def opened(override: str) -> list[str]:
    """Tables of the user's own names take new ones, which Hydra wants to be told one by one: data.label_map={1: a}."""
    key = override.partition("=")[0]
    if key not in TABLES:
        return [override]
    table = OverridesParser.create().parse_override(override).value()
    if not isinstance(table, dict):
        raise InputError(f"{override}: {key} is a table, as {key}={{a: b, c: d}}")
    names = {str(name): "null" if to is None else f"'{to}'" for name, to in table.items()}
    odd = [name for name in names if not name.replace("_", "").replace("-", "").isalnum()]
    check(not odd, f"{key}: {', '.join(odd)} cannot be said on a command line; write the table in a YAML of conf/data")
    return [f"++{key}.{name}={to}" for name, to in names.items()]


def config_name(schema: type[Config]) -> str:
    return "train" if schema is TrainConfig else "prepare"


def explain(error: BaseException, schema: type) -> str:
    """One line for the user out of Hydra's or OmegaConf's several."""
    while isinstance(error.__cause__, HydraException | OmegaConfBaseException):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    full_key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    first = lines[0] if lines else type(error).__name__
    if "missing mandatory value" in first.lower():
        return f"{full_key} is not set: give {full_key}=... on the command line"
    if " not in '" in first or "is not in struct" in first:
        name = full_key.rsplit(".", 1)[-1]
        if name in known_keys(schema):
            group = full_key.rpartition(".")[0]
            place = f"of the {group} chosen here" if group else "by itself but one of a group"
            return f"{full_key} is not a setting {place}; --cfg job lists all"
        close = difflib.get_close_matches(name, known_keys(schema), n=1)
        return f"{full_key} is not a setting" + (f"; did you mean {close[0]}?" if close else "; --cfg job lists all")
    noise = (
        "full_key:",
        "object_type=",
        "reference_type=",
        "Set the env",
        "See https",
        "Config search path",
        "provider=",
    )
    message = " ".join(line.strip() for line in lines if not line.startswith(noise))
    return f"{full_key}: {message}" if full_key and full_key not in message else message


def known_keys(schema: type) -> list[str]:
    """Every name in the schema, for "did you mean"."""
    names = []
    for item in fields(schema):
        names.append(item.name)
        if callable(item.default_factory) and is_dataclass(item.default_factory):
            names += [inner.name for inner in fields(item.default_factory)]
    return [
        *names,
        *(item.name for kind in CHOSEN for item in fields(kind)),
    ]


def run(schema: type[Config], action: Callable[[Config], int], *, given: Sequence[str] = ()) -> int:
    """Read the command line, check it, act. Hydra's own flags (--cfg job, --help, --info) are Hydra's to answer.
    `given`: overrides that the command line may override.
    """
    flags = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    try:
        if flags:
            check(not {"-m", "--multirun"} & set(flags), "sweeps are not supported: start one run for each value")
            compose_config(schema, [override for override in overrides if "=" in override])  # not a flag's value
            hydra.main(version_base="1.3", config_path="pkg://conf", config_name=config_name(schema))(refuse_flags)()
            return DONE
        keys = {override.partition("=")[0] for override in overrides}
        unsaid = [override for override in given if override.partition("=")[0] not in keys]
        return action(load_config(schema, unsaid + overrides))
    except InputError as error:
        if launched_rank() == 0 or os.environ.get("LOCAL_RANK") == "0":  # one voice per machine
            print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except Failure as error:
        if launched_rank() == 0 or os.environ.get("LOCAL_RANK") == "0":
            print(f"error: {error}{hint_of(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return STOPPED


def refuse_flags(_: object) -> None:
    raise InputError("flags and a run do not go together; give settings as key=value")


# ---- commands with flags, which are about data and not about a run ---------------------------------------------------


def add_s3_flags(parser: argparse.ArgumentParser, *, caches: bool = True) -> None:
    parser.add_argument("--endpoint", help="URL of an S3-compatible server")
    parser.add_argument("--region", help="of the bucket")
    parser.add_argument("--profile", help="of ~/.aws: whose credentials")
    parser.add_argument("--path-style", action="store_true", help="bucket in the path instead of the host name")
    if caches:
        parser.add_argument("--cache-dir", help="where shards from S3 are kept (data.cache_dir)")


def run_flags(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, action: Flagged) -> int:
    """Read flags, act, give the exit code; bad input is one line."""
    options = parser.parse_args(arguments)
    try:
        return action(options, s3_of(options))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except Failure as error:
        print(f"error: {error}{hint_of(error)}", file=sys.stderr)
        return FAILED


def s3_of(options: argparse.Namespace) -> S3Config:
    """What the flags of add_s3_flags say."""
    return S3Config(
        endpoint=options.endpoint, region=options.region, profile=options.profile, path_style=options.path_style
    )


def hint_of(error: Failure) -> str:
    return "; try again later" if isinstance(error, Unreachable) else ""
