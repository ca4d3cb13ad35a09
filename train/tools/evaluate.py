"""The command `baretrain evaluate MODEL key=value ...`, which computes a trained model's metrics.

MODEL is a run, a transformers folder or a Hub id. A run's config.yaml says how to read the columns. The model is built,
and the metrics are computed, by the same code and in batches of the same shapes as during training. The run folder is
not changed. The command works with or without torchrun.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import (
    EvaluatedConfig,
    RecordsConfig,
    TelemetryConfig,
    TrainConfig,
    check,
    flatten,
    shortlist,
)
from train.machine import rank_setup
from train.machine.console import note, say
from train.machine.launched import launched
from train.machine.runtime import search_rarely
from train.machine.torchrun import end_torchrun
from train.run import compose as cli
from train.run.command import printable
from train.run.early import check_data, check_exists
from train.run.saved import WHERE, read_data
from train.run_folder.exported import is_outdated, marked, saved_steps
from train.storage.folders import Folder
from train.storage.schema import read_object
from train.tools.checkpoints import chosen, fetch, opened
from train.tools.trained import (
    Trained,
    find_trained,
    output_path,
    run_with,
    settings_of,
    typed_keys,
)

if TYPE_CHECKING:
    from train.models.network import Network
    from train.run.evaluation import Evaluated

BATCH_SIZE = 32  # sequences per rank, if the model is not a run
# The keys that replace the run's rows with new ones.
NEW_DATA = {"data", "data.path", "data.validation"}
# The run's settings for its validation rows, unless the user names new ones, and for rows that were held out.
OWN_ROWS = ("validation", "more_validation")
HELD_OUT = ("train", "validation_fraction")
USED: tuple[str, ...] = ("data.path", "data.validation", "data.format", "data.label_map")
USED += ("data.max_bad_rows", "eval_batch_size", "eval_examples", "backend.device")
USED += ("backend.precision", "s3.endpoint")


@dataclass(frozen=True)
class Model:
    """The model to evaluate, and where the result goes."""

    trained: Trained
    output: Path | None
    step: int | None  # training step of the weights; None if unknown
    # True if the rows were held out of the training rows.
    holds_out: bool


# ---- settings ------------------------------------------------------------------------------------------------------


def find(options: Namespace) -> tuple[Model, cli.Given]:
    """Return the model that the flags name, and the settings with which to evaluate it.

    Raises InputError if a typed setting would train the model.
    """
    output = None
    if options.output is not None:
        output = output_path(options.output)
    typed = typed_keys(options.settings)
    check(
        "data.train" not in typed, "data.train: nothing is trained; name rows with data.validation"
    )
    if "data.path" in typed:
        check_exists(typed["data.path"].strip("\"'"))
    trained = find_trained(options.model, options.settings, check_labelled)
    run, cfg = trained.run, trained.cfg
    if run is None or cfg is None:
        values: dict[str, Any] = {"eval_batch_size": BATCH_SIZE, "backend.precision": "fp32"}
        model = Model(trained, output, step=None, holds_out=False)
        return model, settings_of(trained, typed, values, backend=None)
    is_new = bool(NEW_DATA & typed.keys())
    is_of_rows = isinstance(cfg.data, RecordsConfig)
    holds_out = is_of_rows and not is_new and read_data(run)["validation"] is None
    values = dict(settings_of_run(run, cfg, typed, holds_out=holds_out))
    model = Model(trained, output, step_of(trained, run), holds_out)
    return model, settings_of(trained, typed, values, backend=cfg.backend.name)


def check_labelled(cfg: TrainConfig) -> None:
    """Check the rows of an evaluation, which reads none for training. Raises InputError."""
    check_data(replace(cfg, data=EvaluatedConfig(**vars(cfg.data))))


def step_of(trained: Trained, run: Folder) -> int | None:
    """Return the step of the run's weights: of its export or, if that cannot be used, of its best checkpoint."""
    if not is_outdated(run):
        return marked(run, "weights")
    if not saved_steps(run):
        return None
    with opened(run, trained.cache_dir) as store:
        return chosen(store, None)[0]


def settings_of_run(
    run: Folder, cfg: TrainConfig, typed: Mapping[str, str], *, holds_out: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a run that only an evaluation needs, including the batch size and lengths that it used."""
    facts: dict[str, Any] = {}
    if run.size("environment.json") is not None:
        facts = dict(flatten(read_object(run.read("environment.json"))))
    yield "backend.compile", cfg.backend.compile
    yield "backend.precision", facts.get("precision", cfg.backend.precision)
    yield "eval_batch_size", facts.get("plan.eval_batch_size", BATCH_SIZE)
    is_new = bool(NEW_DATA & typed.keys())
    if not is_new:
        yield "eval_examples", cfg.eval_examples
    own = read_data(run)
    names: list[str] = []
    if not {"data", "data.path"} & typed.keys():
        names += [name for name in WHERE if name in own]
        if launched().rank == 0:
            note(
                f"{printable(run.location)}/config.yaml names data.path={printable(str(own['path']))}, which is read; "
                "data.path=... reads other data"
            )
    if isinstance(cfg.data, RecordsConfig):
        if not is_new:
            names += OWN_ROWS
        if holds_out:
            names += HELD_OUT
        yield "data.lengths", facts.get("identity.data.lengths", cfg.data.lengths)
    for name in names:
        yield f"data.{name}", own[name]


# ---- command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = cli.settings_parser(
        "evaluate",
        TrainConfig,
        "Evaluate a trained model on labelled rows or prepared text, with the same metrics as in training.",
        examples=(
            "runs/tweets data.path=new.csv",
            "runs/tweets --output scores.json",
            "torchrun --standalone --nproc-per-node=8 -m train evaluate s3://bucket/runs/tweets data.path=new.csv",
            "org/model data.path=new.csv data.columns.label=sentiment",
        ),
        keys=USED,
        first=(
            "model",
            "run_dir of a run (its validation data is read unless data.path names other data), a folder, or a Hub id",
        ),
    )
    parser.add_argument("--output", metavar="FILE", help="file for a JSON object with the metrics")
    code = run_with(find, evaluate, parser, arguments)
    if code != cli.DONE:
        end_torchrun()
    return code


def evaluate(cfg: TrainConfig, model: Model) -> int:
    rank_setup.prepare(launched(), forks=False)
    search_rarely()  # Garbage is collected rarely until the task is imported.
    from train.run.evaluation import evaluate_alone
    from train.tools.alone import temporary_run

    if isinstance(cfg.data, RecordsConfig):
        data = EvaluatedConfig(**vars(cfg.data), holds_out=model.holds_out)
        cfg = replace(cfg, data=data)
    with temporary_run("evaluate") as (folder, stop):
        cfg = replace(cfg, run_dir=folder, telemetry=TelemetryConfig(trackers=[]))
        result = evaluate_alone(
            cfg, stop, step=model.step, load=lambda network: load(network, model)
        )
    if launched().rank == 0:
        report(cfg, model, result)
    return cli.DONE


def load(network: Network, model: Model) -> None:
    """Load the checkpoint's weights if the export's differ. Raises InputError if the head was never trained.

    They differ if training standardised the targets.
    """
    from train.checkpoints.loader import fitting, read_weights

    trained = model.trained
    new = shortlist(sorted(network.new))
    check(not new, f"{trained.location} holds no weights for {new}: its head was not trained")
    is_scaled = getattr(network, "scale", None) is not None
    if trained.run is None or model.step is None or not is_scaled:
        return
    with opened(trained.run, trained.cache_dir) as store:
        if model.step not in store.steps():
            return  # The checkpoint was removed; the network has the export's weights.
        path = fetch(store, model.step, "model")
        with fitting(path):
            network.load_state_dict(read_weights(path, store.manifest(model.step)))


def report(cfg: TrainConfig, model: Model, result: Evaluated) -> None:
    from train.observe.journal import encoded, evaluation_words
    from train.storage.atomic_io import write_atomic

    location, world_size = model.trained.location, launched().world_size
    ranks = ""
    if world_size > 1:
        ranks = f", {world_size} ranks"
    note(
        f"{location}: {result.rows:,} validation rows of data.path={cfg.data.path}, {result.precision} on "
        f"{result.device}{ranks}"
    )
    step = ""
    if model.step is not None:
        step = f"step {model.step} "
    say(f"{step}{evaluation_words(result.metrics, result.eval_s)}")
    if model.output is None:
        return
    about = {
        "model": location,
        "step": model.step,
        "task": cfg.task.kind,
        "data": cfg.data.path,
        **asdict(result),
        "metrics": json.loads(encoded(result.metrics)),
        "world_size": world_size,
    }
    write_atomic(model.output, encoded(about))
