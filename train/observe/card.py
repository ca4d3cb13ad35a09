"""The model card, RUN/export/README.md. It is made from the run folder alone, without torch, on any machine.

The card may be published, so it contains no host names or endpoints, and only the last part of each path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config.checks import shortlist
from train.observe.report.data import (
    Records,
    classes_table,
    labels_table,
    metrics_table,
    read_mapping,
    splits_of,
    splits_table,
)
from train.observe.report.page import facts, fill_template
from train.observe.report.run import Run, last, read_run
from train.observe.report.texts import at_step, count, printable
from train.run_folder.exported import TASK_STATE
from train.run_folder.run_folder import RunFolder
from train.storage.atomic_io import write_atomic
from train.tasks import TASKS, TaskSpec

NAME = "README.md"
HERE = "path/to/this/folder"  # the model's location in the code example; `push.send` replaces it with the Hub id
SETTINGS = (  # (label, key in config.yaml or environment.json)
    ("Optimizer", "optim.name"),
    ("Peak learning rate", "optim.lr"),
    ("Learning rate of the head", "optim.head_lr"),
    ("Schedule", "optim.schedule"),
    ("Warm-up (steps)", "plan.warmup_steps"),
    ("Weight decay", "optim.weight_decay"),
    ("Gradient clipping norm", "optim.max_grad_norm"),
    ("Global batch (sequences)", "plan.global_batch_size"),
    ("Padded to (tokens)", "identity.data.lengths"),
    ("Frozen layers", "model.freeze_layers"),
    ("Seed", "seed"),
)
COLUMNS = ("exported", "best", "last")  # of the table of scores
MOST_LABELS = 20  # names in the first sentence
# Rows of the report's table.
TRAINED = ("Steps done", "Sequence length (tokens)", "Precision")
MACHINES = (
    "Instance",
    "Device",
    "World size (ranks)",
    "Training time (h:mm:ss)",
    "Tokens/s over the whole run",
    "Cost",
    "Versions",
)


def write(folder: RunFolder) -> Path:
    """Write the card next to the exported model, in this machine's copy of the run folder."""
    folder.ownership.check()
    if folder.is_remote and folder.folder.size("evaluation.json") is not None:
        evaluation = folder.folder.read("evaluation.json")
        write_atomic(folder.path / "evaluation.json", evaluation)
    folder.export.mkdir(parents=True, exist_ok=True)
    text = card(folder.path, Path(folder.location).name)
    write_atomic(folder.export / NAME, text.encode())
    return folder.export / NAME


def card(path: Path, name: str) -> str:
    """Return the card, titled `name`, of the run in the folder `path`. Raises InputError if it is not a run folder."""
    run = read_run(path)
    records = run.records or Records()
    figures = facts(run, run)
    task = task_of(run)
    values = {
        "metadata": metadata(run, records, name),
        "name": name,
        "begins_from": begins_from(run),
        "parameters": figures["Parameters"],
        "scores": scores_table(run),
        "exported_step": run.exported_step,
        "is_evaluated": run.exported_step in set(run.evaluations.step),
        "evaluated_step": count(records.step),
        "metrics": metrics_table(records),
        "classes": {
            name: classes_table(split) for name, split in splits_of(records.evaluation).items()
        },
        "data": public_name(run, "data.path"),
        "data_id": run.value("identity.data"),
        "data_tables": [splits_table(records), labels_table(records)],
        "settings": [("Setting", "Value"), *settings(run, figures)],
        "machines": [("", ""), *((label, figures[label]) for label in MACHINES)],
        "data_note": records.note,
        "task": task,
        "sentence": "",
        "code": "",
    }
    if task is not None:
        names = shortlist(records.labels, MOST_LABELS) or "unknown"
        number = len(records.labels) or "several"
        values["sentence"] = task.sentence.format(labels=number, names=names)
        values["code"] = code(run, task)
    return fill_template("card.md.j2", values, show=text)


def code(run: Run, task: TaskSpec) -> str:
    """Return Python code that uses the model."""
    location = hub_id(run, "hub.push_to") or HERE
    if task.code:
        return task.code.replace("{model}", location)
    example = task.example
    if run.config.get("data.columns.text_pair"):
        example = example.replace('"A text."', '{"text": "A text.", "text_pair": "Another text."}')
    call = f'pipe = pipeline("{task.pipeline}", model="{location}")\npipe({example})'
    return f"from transformers import pipeline\n\n{call}"


def task_of(run: Run) -> TaskSpec | None:
    """Return the run's task; None if this version of baretrain lacks it."""
    return TASKS.get(str(run.config.get("task.kind")))


# ---- metadata ------------------------------------------------------------------------------------------------------


def metadata(run: Run, records: Records, name: str) -> str:
    """Return the YAML header that the Hub reads: huggingface_hub's ModelCardData, including results (model-index)."""
    from huggingface_hub import EvalResult, ModelCardData

    dataset = public_name(run, "data.path")
    task = task_of(run)
    pipeline = task.pipeline if task else None
    evaluated = [
        EvalResult(
            task_type=pipeline or str(run.config.get("task.kind")),
            dataset_type=hub_id(run, "data.path") or re.sub(r"[^A-Za-z0-9._-]+", "-", dataset),
            dataset_name=dataset,
            dataset_config=run.config.get("data.name"),
            dataset_split=split,
            dataset_revision=run.config.get("data.revision"),
            metric_type=run.metric(metric).hub_name or metric,
            metric_name=metric,
            metric_value=round(value, 6),
        )
        for split, metric, value in exported_scores(run, records)
    ]
    head = ModelCardData(
        base_model=hub_id(run, "model.pretrained"),
        datasets=hub_id(run, "data.path"),
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["baretrain"],
        model_name=name,
        eval_results=evaluated or None,
    )
    return str(head.to_yaml()).rstrip()


def exported_scores(run: Run, records: Records) -> Iterator[tuple[str, str, float]]:
    """Yield (split, metric, value) for each score of the exported weights."""
    others = [name for name in splits_of(records.evaluation) if name != "validation"]
    for name, points in run.summary["scores"].items():
        value, _ = points.get("exported", (None, 0))
        if value is None:
            continue
        of_others = [each for each in others if name.startswith(f"{each}_")]
        split = next(iter(of_others), "validation")
        yield split, name.removeprefix(f"{split}_"), value


# ---- names that may be published -----------------------------------------------------------------------------------


def hub_id(run: Run, key: str) -> str | None:
    """Return a setting's value if it is a Hub id and not an existing path, otherwise None."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    value = str(run.config.get(key) or "")
    is_file = key == "data.path" and run.config.get("data.format") not in ("hub", "auto")
    if not value or is_file or Path(value).exists():
        return None
    try:
        validate_repo_id(value)
    except HFValidationError:
        return None
    return value


def public_name(run: Run, key: str) -> str:
    """Return a setting's Hub id, or else the last part of its path."""
    path = str(run.config.get(key) or "unknown").rstrip("/\\")
    return hub_id(run, key) or re.split(r"[/\\]", path)[-1]


# ---- sections ------------------------------------------------------------------------------------------------------


def begins_from(run: Run) -> str:
    """Return what the training began from: a model's name, or random weights."""
    if run.config.get("model.pretrained"):
        return public_name(run, "model.pretrained")
    return f"random weights ({run.summary['model']})"


def scores_table(run: Run) -> list[list[str]]:
    """Return the exported, the best and the last value of each score; [] if the run was not evaluated."""
    if run.evaluations.empty:
        return []
    rows = [["Validation", *COLUMNS]]
    for name, points in run.summary["scores"].items():
        row = [name.replace("_", " ")]
        for which in COLUMNS:
            shown = "unknown"
            if which in points:
                shown = at_step(*points[which])
            row.append(shown)
        rows.append(row)
    return rows


def settings(run: Run, figures: dict[str, str]) -> Iterator[tuple[str, str]]:
    known = {**run.config, **run.environment, **exported_settings(run)}
    yield "Epochs", count(last(run.train.epoch))
    for label in TRAINED:
        yield label, figures[label]
    wanted = list(SETTINGS)
    task = task_of(run)
    if task is not None:
        wanted += task.card_settings
    for label, key in wanted:
        value = known.get(key)
        if value not in (None, False, 0, []):
            yield label, str(value).strip("[]")


def exported_settings(run: Run) -> dict[str, Any]:
    """Return the task's settings in the export, which include the thresholds that were chosen for its weights."""
    state = read_mapping(run.folder, f"export/{TASK_STATE}", json.loads)
    settings = state.get("settings")
    if not isinstance(settings, dict):
        return {}
    return {f"task.{name}": value for name, value in settings.items()}


def text(value: object) -> str:
    """Return the value with Markdown characters escaped: names and labels come from the user."""
    shown = printable("unknown" if value is None else value)
    escaped = re.sub(r"([\\`*_\[\]|#<>~])", r"\\\1", shown)
    return escaped.replace("&", "&amp;")
