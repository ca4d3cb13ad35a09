"""The command `baretrain evaluate MODEL key=value ...`, which computes a trained model's metrics.

MODEL is a run, a transformers folder or a Hub id. A run's config.yaml says how to read the columns. The model is built,
and the metrics are computed, by the same code and in batches of the same shapes as during training. The run folder is
not changed. The command works with or without torchrun.
"""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from train.checkpoints.manifest import chosen_at
from train.config import Failure, RecordsConfig, S3Config, TrainConfig, check, shortlist
from train.machine import rank_setup
from train.machine.console import say
from train.machine.launched import launched
from train.machine.runtime import search_rarely
from train.machine.torchrun import end_torchrun
from train.run import compose as cli
from train.run.command import printable
from train.run.names import LABELS, TABLES
from train.run.saved import HOW_ROWS_ARE_READ, WHERE, read_data
from train.run_folder.exported import is_outdated, marked, saved_steps
from train.storage.folders import Folder
from train.storage.schema import read_object
from train.tools.checkpoints import chosen, fetch, opened
from train.tools.predict import check_output, find_run

if TYPE_CHECKING:
    from train.models.network import Network
    from train.run.evaluation import Evaluated

logger = logging.getLogger("train")
BATCH_SIZE = 32  # sequences per rank, if the model is not a run
# required keys without effect
FIXED = [
    "run_dir=runs/evaluate",
    "max_steps=1",
    "micro_batch_size=1",
    "model=any",
]
# keys that replace the run's rows with new ones
NEW_DATA = {
    "data",
    "data.path",
    "data.validation",
}
# The run's settings for its validation rows, unless the user names new ones, and for rows that were held out.
OWN_ROWS = ("validation", "more_validation", "max_validation_examples")
HELD_OUT = ("train", "validation_fraction")

USED: tuple[str, ...] = (
    "data.path",
    "data.validation",
    "data.format",
    "data.label_map",
    "data.max_bad_rows",
)
USED += ("eval_batch_size", "eval_examples", "backend.device", "backend.precision", "s3.endpoint")


@dataclass
class Model:
    """The model to evaluate, where it is, and where the result goes."""

    location: str
    s3: S3Config
    cache_dir: str | None
    output: Path | None
    run: tuple[TrainConfig, Folder] | None
    step: int | None  # training step of the weights; None if unknown
    is_chosen: bool  # True if --checkpoint gave the step
    settings: dict[str, Any]  # the settings that the evaluation of that step has chosen
    holds_out: (
        bool  # True if the rows were split off the training rows, which must then be read too
    )


# ---- settings ------------------------------------------------------------------------------------------------------


def find(options: Namespace) -> Model:
    """Return the model that the flags name. Raises InputError if flags contradict each other."""
    output = None if options.output is None else check_output(options.output)
    composed = cli.compose_config(
        TrainConfig,
        [each for each in options.settings if each.startswith(("s3.", "data.cache_dir="))],
    )
    s3, step, is_chosen = (
        OmegaConf.to_object(composed.s3),
        options.checkpoint,
        options.checkpoint is not None,
    )
    assert isinstance(s3, S3Config)
    run = find_run(options.model, s3)
    check(
        run is not None or not is_chosen,
        f"--checkpoint {step}: {options.model} is not the run_dir of a run",
    )
    is_of_rows = run is not None and isinstance(run[0].data, RecordsConfig)
    holds_out = run is not None and is_of_rows and read_data(run[1])["validation"] is None
    holds_out &= not NEW_DATA & {each.partition("=")[0] for each in options.settings}
    model = Model(
        options.model, s3, composed.data.cache_dir, output, run, step, is_chosen, {}, holds_out
    )
    if run is not None and not is_chosen:
        model.step = None if is_outdated(run[1]) else marked(run[1], "weights")
    if run is not None and (is_chosen or (model.step is None and saved_steps(run[1]))):
        with opened(run[1], model.cache_dir) as store:
            model.step = chosen(store, step)[0]
            model.settings = chosen_at(model.step, store.look_at_all()[0])
    return model


def settings_of(model: Model, typed: Mapping[str, str]) -> list[str]:
    """Return the settings with which to evaluate a model. Settings that the user `typed` override them.

    Raises InputError if a typed setting would change the model or train it.
    """
    # needs torch, so it is imported after the flags have been checked
    from train.data.shards.cache import (
        cache_dir,
    )
    from train.models.source import located
    from train.tasks.state import read_state

    for key in typed:
        is_fixed = key == "experiment" or key.split(".")[0] == "model"
        check(
            not is_fixed,
            f"{key}={typed[key]}: {model.location} is evaluated as it is; leave that setting out",
        )
        check(
            key != "data.train",
            f"{key}={typed[key]}: nothing is trained; name the rows with data.validation",
        )
    cache = cache_dir(RecordsConfig(path="", cache_dir=model.cache_dir))
    source = located("MODEL", model.location, model.s3, cache, needs="config.json")
    given = dict(
        settings_of_run(*model.run, typed, model.holds_out)
        if model.run is not None
        else settings_of_model(source, typed)
    )
    if (state := read_state(source)) is not None:
        given |= {"task": state.kind, "seed": state.seed}
        settings = model.settings if model.is_chosen else state.settings
        given |= {f"task.{name}": value for name, value in settings.items()}
    if given.get("task") != "mlm":
        from train.tasks.predictor import Predictor

        trained = Predictor(source, RecordsConfig(path=""), run=model.run, seq_len=None)
        outputs, is_new = (
            trained.task.settings_of_outputs(),
            model.run is None or bool(NEW_DATA & typed.keys()),
        )
        if state is not None and model.run is None:
            given["seq_len"] = state.seq_len
        given = {"task": trained.task.cfg.kind, **outputs, **given, **(outputs if is_new else {})}
    # Another option than the model's has other settings.
    for group in {
        group
        for group in {"data", "task", "backend"} & typed.keys()
        if typed[group] != given.get(group)
    }:
        given = {
            key: value
            for key, value in given.items()
            if not key.startswith(f"{group}.") or key == LABELS
        }
    given["model.pretrained"] = source
    return [*FIXED, *(f"{key}={as_text(key, value)}" for key, value in given.items())]


def settings_of_run(
    cfg: TrainConfig, run: Folder, typed: Mapping[str, str], holds_out: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a run that apply to an evaluation, including the batch size and lengths that it used."""
    try:
        facts = read_object(run.read("environment.json"))
    except FileNotFoundError:
        facts = {}
    plan, identity = (
        value if isinstance(value := facts.get(name), dict) else {}
        for name in ("plan", "identity")
    )
    yield from {"task": cfg.task.kind, "seed": cfg.seed, "backend": cfg.backend.name}.items()
    yield from (
        (f"task.{name}", value) for name, value in asdict(cfg.task).items() if name != "kind"
    )
    yield from ((f"backend.{name}", getattr(cfg.backend, name)) for name in ("norms", "compile"))
    yield "backend.precision", facts.get("precision", cfg.backend.precision)
    sizes = (
        plan.get("eval_batch_size"),
        cfg.eval_batch_size,
        cfg.micro_batch_size,
        cfg.global_batch_size,
    )
    yield "eval_batch_size", next(filter(None, sizes))
    is_new = bool(NEW_DATA & typed.keys())
    if not is_new:
        yield "eval_examples", cfg.eval_examples
    own = read_data(run)
    names: list[str] = (
        [] if {"data", "data.path"} & typed.keys() else [key for key in WHERE if key in own]
    )
    if names and launched().rank == 0:
        where = (
            f"{printable(run.location)}/config.yaml names data.path={printable(str(own['path']))}"
        )
        say(f"{where}, which is read; data.path=... reads other data", file=sys.stderr)
    if not isinstance(cfg.data, RecordsConfig):
        yield from {"data": "shards", "data.path": own["path"]}.items()
        return
    names += [] if is_new else OWN_ROWS
    names += HELD_OUT if holds_out else []
    yield from ((f"data.{name}", own[name]) for name in names)
    yield from ((f"data.{name}", getattr(cfg.data, name)) for name in HOW_ROWS_ARE_READ)
    yield from (
        (f"data.columns.{name}", value) for name, value in asdict(cfg.data.columns).items()
    )
    yield from {
        "data": "records",
        "data.format": format_of(cfg.data, typed),
        "seq_len": cfg.seq_len,
    }.items()
    yield "data.lengths", identity.get("data.lengths", cfg.data.lengths)


def format_of(data: RecordsConfig, typed: Mapping[str, str]) -> str:
    """Return the run's data.format, or "auto" if a new file's name shows its format."""
    from train.config.data import is_named

    names = [typed[key] for key in ("data.path", "data.validation") if key in typed]
    return (
        "auto"
        if any(is_named(name) and not name.endswith(".json") for name in names)
        else data.format
    )


def settings_of_model(source: str, typed: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings for a model that is not a run."""
    from train.models.pretrained import read_model_config

    names = " ".join(read_model_config(source).architectures or ())
    task = typed.get("task") or ("mlm" if "MaskedLM" in names or "PreTraining" in names else None)
    yield from {"eval_batch_size": BATCH_SIZE, "backend.precision": "fp32"}.items()
    yield "data", "shards" if task == "mlm" else "records"
    if task is not None:
        yield "task", task


def as_text(key: str, value: Any) -> str:
    """Return a value in the form of an override on the command line."""
    if key == LABELS or key in TABLES:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return cli.quoted(value)
    if isinstance(value, list):
        return f"[{','.join(as_text('', each) for each in value)}]"
    return json.dumps(value)


# ---- command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = cli.settings_parser(
        "evaluate",
        TrainConfig,
        "Evaluate a trained model on labelled rows or prepared text, with the same metrics as in training.",
        examples=(
            "runs/tweets data.path=new.csv",
            "runs/tweets --checkpoint 500 --output scores.json",
            "torchrun --standalone --nproc-per-node=8 -m train evaluate s3://bucket/runs/tweets data.path=new.csv",
            "org/model data.path=new.csv data.columns.label=sentiment",
        ),
        keys=USED,
        model="run_dir of a run (its validation data is read unless data.path names other data), a folder, or a Hub id",
    )
    parser.add_argument(
        "--checkpoint",
        type=int,
        metavar="STEP",
        help="step of a run (default: the exported or best)",
    )
    parser.add_argument("--output", metavar="FILE", help="file for a JSON object with the metrics")
    found: list[Model] = []

    def given(options: Namespace) -> list[str]:
        found.append(find(options))
        return settings_of(found[0], dict(each.partition("=")[::2] for each in options.settings))

    def act(cfg: TrainConfig) -> int:
        return evaluate(cfg, found[0])

    code = cli.run(TrainConfig, act, parser, arguments=arguments, given=given)
    if code != cli.DONE:
        end_torchrun()
    return code


def evaluate(cfg: TrainConfig, model: Model) -> int:
    rank_setup.prepare(launched(), forks=False)
    search_rarely()  # Garbage is collected rarely until the task is imported.
    from train.data.records.sources import NO_ROWS
    from train.entry import leave_at_once
    from train.parallel.ranks import AGREED
    from train.run.evaluation import evaluate_alone
    from train.run.stopping import StoppedEarly, StopRequest

    if isinstance(cfg.data, RecordsConfig) and not model.holds_out:
        cfg = replace(cfg, data=replace(cfg.data, train=NO_ROWS))
    try:
        with (
            TemporaryDirectory(prefix="baretrain-evaluate-", ignore_cleanup_errors=True) as folder,
            StopRequest() as stop,
        ):
            cfg = replace(cfg, run_dir=folder, tensorboard=False)
            result = evaluate_alone(
                cfg, stop, step=model.step, load=lambda network: load(network, model)
            )
    except StoppedEarly as signal:
        raise Failure(f"stopped on {signal}: nothing was evaluated") from signal
    except AGREED:
        raise
    except Exception as error:
        if launched().world_size > 1:  # Other ranks may wait for this one forever, so end the job.
            logger.exception("rank %d: %s", launched().rank, error)
            leave_at_once(cli.FAILED)
        raise
    if launched().rank == 0:
        report(cfg, model, result)
    return cli.DONE


def load(network: Network, model: Model) -> None:
    """Load the checkpoint's weights if the export's may differ. Raises InputError if the head was never trained.

    They may differ if --checkpoint names a step, or if training standardised the targets.
    """
    from train.checkpoints.loader import fitting, read_weights

    new = shortlist(sorted(network.new))
    check(not new, f"{model.location} holds no weights for {new}: its head was not trained")
    is_scaled = getattr(network, "scale", None) is not None
    if model.run is None or model.step is None or not (model.is_chosen or is_scaled):
        return
    with opened(model.run[1], model.cache_dir) as store:
        if not model.is_chosen and model.step not in store.steps():
            return  # The checkpoint was removed; the network has the export's weights.
        path = fetch(store, model.step, "model")
        with fitting(path):
            network.load_state_dict(read_weights(path, store.manifest(model.step)))


def report(cfg: TrainConfig, model: Model, result: Evaluated) -> None:
    from train.observe.journal import encoded, evaluation_words
    from train.storage.atomic_io import write_atomic

    ranks = f", {launched().world_size} ranks" if launched().world_size > 1 else ""
    where = f"{result.precision} on {result.device}{ranks}"
    say(
        f"{model.location}: {result.rows:,} validation rows of data.path={cfg.data.path}, {where}",
        file=sys.stderr,
    )
    step = "" if model.step is None else f"step {model.step} "
    say(f"{step}{evaluation_words(result.metrics, result.eval_s)}")
    if model.output is not None:
        about = {
            "model": model.location,
            "step": model.step,
            "task": cfg.task.kind,
            "data": cfg.data.path,
        }
        figures = {**asdict(result), "metrics": json.loads(encoded(result.metrics))}
        write_atomic(
            model.output, encoded({**about, **figures, "world_size": launched().world_size})
        )
