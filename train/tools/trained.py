"""The model that `predict` and `evaluate` are given, and the settings that it brings.

A model is a run, a transformers folder or a Hub id. Of a run, the export is used, or the best checkpoint if the export
is missing or outdated; its config.yaml says how to read the columns.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import OmegaConf

from train.config import RecordsConfig, S3Config, ShardsConfig, TrainConfig, check
from train.config.data import is_named
from train.run import compose as cli
from train.run.command import Parser
from train.run.names import LABELS
from train.run.saved import HOW_ROWS_ARE_READ, read_config
from train.storage.folders import Folder, is_s3, local_path, open_folder
from train.storage.hub_access import check_model
from train.tasks import TASKS

if TYPE_CHECKING:
    from train.tasks.state import TaskState

Found = TypeVar("Found")
# Required settings of a run, without effect on a trained model.
FIXED = ("run_dir=runs/evaluate", "max_steps=1", "micro_batch_size=1", "model=any")


@dataclass(frozen=True)
class Trained:
    """A trained model, and where it is."""

    location: str  # as the user gave it
    source: str  # a folder with its files, or a Hub id
    s3: S3Config
    cache_dir: str | None
    run: Folder | None  # the folder of the run that trained it
    cfg: TrainConfig | None  # the settings of that run that apply to its model
    state: TaskState | None  # the state of its task, which exports of runs have


def run_with(
    find: Callable[[Namespace], tuple[Found, cli.Given]],
    act: Callable[[TrainConfig, Found], int],
    parser: Parser,
    arguments: Sequence[str],
) -> int:
    """Run a command, and return its exit code. `find` returns what the flags name, for `act`, and settings."""
    found: list[Found] = []

    def given(options: Namespace) -> cli.Given:
        named, settings = find(options)
        found.append(named)
        return settings

    def action(cfg: TrainConfig) -> int:
        return act(cfg, found[0])

    return cli.run(TrainConfig, action, parser, arguments=arguments, given=given)


def find_trained(
    location: str, settings: Sequence[str], check_rows: Callable[[TrainConfig], None]
) -> Trained:
    """Return the model at a location. The settings for S3 and the cache are used.

    If a run's model is to read rows, `check_rows` is called with the settings that read them, before torch is imported.
    Raises InputError if there is no such model. If a run has no usable export, its best checkpoint is exported.
    """
    # Torch takes seconds to import, so the location is checked first.
    needed = [each for each in settings if each.startswith(("s3.", "data.cache_dir="))]
    composed = cli.compose_config(TrainConfig, needed)
    s3 = OmegaConf.to_object(composed.s3)
    assert isinstance(s3, S3Config)
    check_model("MODEL", location)
    run = find_run(location, s3)
    if run is None:
        cfg = None
    else:
        cfg = read_config(run)
        check_early(cfg, settings, check_rows)
    from train.data.shards.cache import cache_dir
    from train.models.source import located
    from train.tasks.state import NAME, read_state

    cache = cache_dir(RecordsConfig(path="", cache_dir=composed.data.cache_dir))
    source = located("MODEL", location, s3, cache, needs="config.json")
    state = read_state(source)
    check(
        run is None or state is not None,
        f"{source} has no {NAME}: an earlier version wrote it; export it again",
    )
    return Trained(location, source, s3, composed.data.cache_dir, run, cfg, state)


def check_early(
    cfg: TrainConfig, settings: Sequence[str], check_rows: Callable[[TrainConfig], None]
) -> None:
    """Call `check_rows` if rows are typed for the model of a run, whose settings are `cfg`."""
    typed = typed_keys(settings)
    if "data.path" not in typed or typed.keys() & {"task", "data"}:
        return
    of_rows = [each for each in settings if each.startswith(("data.", "s3."))]
    values = dict(rows_of_run(cfg, typed))
    if values:
        options = [*FIXED, f"task={cfg.task.kind}", "data=records"]
        check_rows(cli.load_config(TrainConfig, [*options, *of_rows], values))


def find_run(location: str, s3: S3Config) -> Folder | None:
    """Return the folder at a location if it is that of a run."""
    if not is_s3(location) and not local_path(location).is_dir():
        return None
    folder = open_folder(location, s3)
    names = folder.names_here()
    is_run = "config.yaml" in names and "config.json" not in names
    return folder if is_run else None


def typed_keys(settings: Sequence[str]) -> dict[str, str]:
    """Return the settings on a command line as text by key."""
    pairs = (each.partition("=") for each in settings)
    return {key: text for key, _, text in pairs}


def settings_of(
    trained: Trained, typed: Mapping[str, str], values: Mapping[str, Any], *, backend: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Return the options and values with which a model is used: its task's, those for its rows, and `values`.

    Settings that the user `typed` override them. Raises InputError if a typed setting would change the model.
    """
    for key, text in typed.items():
        is_fixed = key == "experiment" or key.split(".")[0] == "model"
        check(
            not is_fixed,
            f"{key}={text}: {trained.location} is used as it is; leave that setting out",
        )
    task = task_of(trained, typed)
    groups = {"task": task, "data": "records"}
    if issubclass(TASKS[task].settings.learns_from, ShardsConfig):
        groups["data"] = "shards"
    if backend is not None:
        groups["backend"] = backend
    known = dict(rows_of_run(trained.cfg, typed))
    if trained.state is not None and trained.state.kind == task:
        known["seed"] = trained.state.seed
        known |= {f"task.{name}": value for name, value in trained.state.settings.items()}
    if TASKS[task].inputs:
        known |= outputs_of(trained, task)
    known |= {**values, "model.pretrained": trained.source}
    # Others may have written the model's files, whose labels are among these settings.
    check(
        "${" not in json.dumps(known, default=str),
        f"{trained.location} has a reference ${{...}} in its files: references are not resolved",
    )
    # An option other than the model's has settings of its own.
    for group in groups.keys() & typed.keys():
        if typed[group] != groups[group]:
            known = {
                key: value
                for key, value in known.items()
                if not key.startswith(f"{group}.") or key == LABELS
            }
    return [*FIXED, *(f"{group}={option}" for group, option in groups.items())], known


def task_of(trained: Trained, typed: Mapping[str, str]) -> str:
    """Return the name of the task that the user typed, or of the task that suits the model."""
    from train.models.pretrained import read_model_config
    from train.tasks.predictor import default_task

    if typed.get("task") in TASKS:
        return typed["task"]
    if trained.state is not None:
        return trained.state.kind
    config = read_model_config(trained.source)
    names = " ".join(config.architectures or ())
    is_pretrained = "MaskedLM" in names or "PreTraining" in names
    if is_pretrained:
        return "mlm"
    return default_task(trained.source, config).kind


def outputs_of(trained: Trained, task: str) -> dict[str, Any]:
    """Return the settings that name the model's outputs and limit its rows."""
    from train.tasks.predictor import trained_task

    given = None
    if trained.state is None or trained.state.kind != task:
        given = TASKS[task].settings()
    outputs = trained_task(trained.source, None, given).settings_of_outputs()
    if trained.state is not None and trained.run is None:
        outputs["seq_len"] = trained.state.seq_len
    return outputs


def rows_of_run(cfg: TrainConfig | None, typed: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings by which a run with the settings `cfg` read its rows."""
    if cfg is None or not isinstance(cfg.data, RecordsConfig):
        return
    data = cfg.data
    for name in HOW_ROWS_ARE_READ:
        yield f"data.{name}", getattr(data, name)
    for name, value in asdict(data.columns).items():
        yield f"data.columns.{name}", value
    names = [typed[key] for key in ("data.path", "data.validation") if key in typed]
    # A new file may have another format, which its name shows.
    is_shown = any(is_named(name) and not name.endswith(".json") for name in names)
    yield "data.format", "auto" if is_shown else data.format
    yield "data.lengths", data.lengths
    yield "seq_len", cfg.seq_len


def output_path(output: str) -> Path:
    """Return the path of the file to write. Raises InputError if no file can be written there."""
    check(
        not is_s3(output),
        f"--output {output}: the file must be on this machine; copy it to S3 afterwards",
    )
    path = local_path(output)
    check(path.parent.is_dir(), f"--output {output}: there is no folder {path.parent}")
    check(not path.is_dir(), f"--output {output} is a folder; name a file in it")
    return path
