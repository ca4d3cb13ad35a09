"""The command `baretrain finetune DATA --model MODEL --output RUN`: from a file of labelled rows to a trained model.

It looks at the rows first, says what it assumes, fills in the settings of a run, trains, and writes the report. --show
prints the `baretrain train` command with the same settings.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from train import entry
from train.config import RecordsConfig, S3Config, TrainConfig, check, flatten, shortlist
from train.machine.console import note, say, speech
from train.machine.launched import launched
from train.machine.torchrun import end_torchrun
from train.run import compose as cli
from train.run.command import Parser
from train.run.names import as_typed
from train.storage.folders import open_folder
from train.tasks import TASKS
from train.tools.trained import run_with, typed_keys

if TYPE_CHECKING:
    from train.data.records.look import Reading
    from train.data.records.sample import TableSample

EPOCHS = 3
LENGTHS = {"max_steps": "step", "max_examples": "row", "max_epochs": "epoch"}
BATCH_SIZES = (32, 16, 8)  # the largest with which a run has FEWEST_STEPS, else the smallest
FEWEST_STEPS = 100
EVAL_EVERY_LEAST = 10  # steps between evaluations, of which there is otherwise one for each epoch
EVAL_EVERY_MOST = 500
USED = (
    *("task", "data.columns.text", "data.columns.label", "data.validation", "data.max_bad_rows"),
    *("seq_len", "max_epochs", "global_batch_size", "optim.lr", "seed", "backend.precision"),
)
FOUND = ("task", "data.columns.text", "data.columns.label", "global_batch_size")
COMMAND = "report/command.txt"
TEXTS = ("text", "text_pair", "tokens", "question", "context")  # keys of data.columns
DEFAULTS = {
    **dict.fromkeys(FOUND, "..."),
    "data": "records",
    "model": "any",
    "optim": "finetune",
    "optim.lr": "5e-05",
    "max_epochs": str(EPOCHS),
}


@dataclass(frozen=True)
class Assumed:
    """Settings of a run that were filled in, and the sentences that say so."""

    settings: dict[str, Any]
    says: list[str]


def main(arguments: Sequence[str]) -> int:
    code = run_with(assume, show_or_train, finetune_parser(), arguments)
    if code == cli.REJECTED:
        end_torchrun()  # every restart would be rejected too
    return code


@dataclass(frozen=True)
class Asked:
    command: str  # of `baretrain train`, with the same settings
    is_shown: bool  # instead of run


def assume(options: Namespace) -> tuple[Asked, cli.Given]:
    """Return the command that is equal to the flags, and the settings that they leave out, which are said."""
    assumed = look(options)
    words = [f"{key}={as_typed(value)}" for key, value in assumed.settings.items()]
    if launched().rank == 0:
        note(*assumed.says)
    command = shlex.join(["baretrain", "train", *words, *options.settings])
    return Asked(command, options.show), (words, {})


def show_or_train(cfg: TrainConfig, asked: Asked) -> int:
    if not asked.is_shown:
        return train(cfg, asked.command)
    if launched().rank == 0:
        say(asked.command)
    return cli.DONE


def finetune_parser() -> Parser:
    parser = cli.settings_parser(
        "finetune",
        TrainConfig,
        "Fine-tune a published model on a file of labelled rows, and write the report. The task and the columns are "
        "found in the rows; settings that you type hold.",
        examples=(
            "tweets.csv --model distilbert/distilbert-base-uncased --output runs/tweets",
            "pairs.tsv --model models/minilm --output runs/pairs max_epochs=5 optim.lr=3e-5",
            "tweets.csv --model models/minilm --output runs/tweets --show",
            "torchrun --standalone --nproc-per-node=8 -m train finetune rows.csv --model org/model --output RUN",
        ),
        keys=USED,
        own=DEFAULTS,
        first=(
            "data",
            "a file or folder of rows, s3://bucket/prefix, or the Hub id of a data set",
        ),
    )
    parser.add_argument(
        "--model", required=True, help="a Hub id, a transformers folder, or the run_dir of a run"
    )
    parser.add_argument("--output", required=True, metavar="RUN", help="the run_dir of the run")
    parser.add_argument(
        "--show", action="store_true", help="print the command that trains, and stop"
    )
    return parser


def train(cfg: TrainConfig, command: str) -> int:
    """Train, write the report and the equal `command` beside it, and say which commands come next."""
    code = entry.attempt(cfg)
    if code == cli.DONE and launched().rank == 0:
        from train.tools.report import write_report  # imported late: it needs packages of its own

        write_report([cfg.run_dir], cfg.s3, output=None)
        open_folder(cfg.run_dir, cfg.s3).write(COMMAND, f"{command}\n".encode())
        run = shlex.join([cfg.run_dir, *cfg.s3.flags()])
        following = [
            f"predict: baretrain predict {run} data.path=NEW.csv --output answers.csv",
            f"compare: baretrain report {run} OTHER_RUN",
        ]
        if not speech.is_quiet:
            say(*following)
    return code


def look(options: Namespace) -> Assumed:
    """Look at the rows, and fill in the settings that the user has not typed."""
    # Imported late: it needs datasets.
    from train.data.records.look import reading_of
    from train.data.records.sample import read_sample

    texts = typed_keys(options.settings)
    for key in ("run_dir", "data", "data.path", "model.pretrained"):
        check(
            key not in texts, f"{key}={texts.get(key)}: a flag of finetune sets it; leave it out"
        )
    cfg, s3 = data_settings(options)
    typed = {key: value for key, value in flatten({"data": asdict(cfg)}) if key in texts}
    sample = read_sample(cfg, s3, typed)
    reading = reading_of(sample.columns, typed, texts.get("task"))
    settings = settings_of(options, sample, reading)
    if {**settings, **texts}.get("task.scheme") == "none":
        settings["best.metric"] = "accuracy"  # tags without entities have no F1
    if LENGTHS.keys() & texts.keys():
        del settings["max_epochs"]
    if "micro_batch_size" in texts:
        del settings["global_batch_size"]
    assumed = {key: value for key, value in settings.items() if key not in texts}
    plain = {key: text.strip("\"'") for key, text in texts.items()}
    return Assumed(assumed, sentences(sample, reading, {**assumed, **plain}))


def settings_of(options: Namespace, sample: TableSample, reading: Reading) -> dict[str, Any]:
    """Return all settings of the run. Raises InputError if a name in the data is a reference."""
    found = {**sample.settings, **reading.settings}
    if sample.has_fixed_columns:
        of_task = {
            key: value for key, value in reading.settings.items() if key.startswith("task.")
        }
        found = {**sample.settings, **of_task}
    # Others may have written the data, whose names are among these settings.
    for key, value in found.items():
        check(
            "${" not in str(value), f"{key}={value}: a name with a reference ${{...}} is not read"
        )
    batch_size = batch_size_for(sample.num_rows)
    steps_per_epoch = sample.num_rows // batch_size
    eval_every = min(max(steps_per_epoch, EVAL_EVERY_LEAST), EVAL_EVERY_MOST)
    return {
        "run_dir": options.output,
        "task": reading.task,
        "data": "records",
        "data.path": options.data,
        **found,
        "model.pretrained": options.model,
        "global_batch_size": batch_size,
        "max_epochs": EPOCHS,
        "eval_every": eval_every,
        "checkpoint.every": eval_every,
        "checkpoint.best": True,
        "best.metric": TASKS[reading.task].metrics[0].name,
    }


def batch_size_for(num_rows: int) -> int:
    for size in BATCH_SIZES:
        if num_rows * EPOCHS >= FEWEST_STEPS * size:
            return size
    return BATCH_SIZES[-1]


def data_settings(options: Namespace) -> tuple[RecordsConfig, S3Config]:
    """Return the settings of the data and of S3, as typed. Raises InputError if one is wrong."""
    typed = [each for each in options.settings if each.startswith(("data.", "s3.", "task="))]
    values = {"data.path": options.data}
    composed = cli.compose_config(TrainConfig, ["data=records", *typed], values)
    cfg, s3 = OmegaConf.to_object(composed.data), OmegaConf.to_object(composed.s3)
    assert isinstance(cfg, RecordsConfig) and isinstance(s3, S3Config)
    return cfg, s3


def sentences(sample: TableSample, reading: Reading, settings: Mapping[str, Any]) -> list[str]:
    """Return what is assumed, for the user to check."""
    columns = {key: value for key, value in settings.items() if key.startswith("data.columns.")}
    named = [f"{key.rpartition('.')[2]}={as_typed(value)}" for key, value in columns.items()]
    read = f"columns: {', '.join(named) or 'those of the format'}"
    if reading.unread:
        read += f"; other texts, which are not read: {shortlist(reading.unread)}"
    held_out = settings.get("data.validation")
    share = float(settings.get("data.validation_fraction", RecordsConfig.validation_fraction))
    rows = f"rows: {sample.num_rows:,}, of which {share:.0%} are held out for validation"
    if held_out:
        rows = f"rows: {sample.num_rows:,} for training; validation on {held_out}"
    rows += lengths_of(sample, settings)
    lengths = [
        f"{settings[key]} {unit if str(settings[key]) == '1' else unit + 's'}"
        for key, unit in LENGTHS.items()
        if settings.get(key) not in (None, "null")
    ]
    batch = settings.get("global_batch_size") or settings.get("micro_batch_size")
    rate = ""
    if "optim" not in settings:  # another recipe has its own
        rate = f", learning rate {settings.get('optim.lr', DEFAULTS['optim.lr'])}"
    return [
        ", ".join(filter(None, [f"task: {settings['task']}", reading.seen])),
        read,
        rows,
        f"training: {' or '.join(lengths)} of batches of {batch}{rate}, from {settings['model.pretrained']}",
        f"best: the evaluation with the best {settings['best.metric']}, every {settings['eval_every']} steps",
    ]


def lengths_of(sample: TableSample, settings: Mapping[str, Any]) -> str:
    """Return how many words the columns of texts hold in the first rows; "" if the format names the columns."""
    by_name = {column.name: column.values for column in sample.columns}
    says = ""
    for key in TEXTS:
        name = str(settings.get(f"data.columns.{key}"))
        if by_name.get(name):
            words = [
                len(value if isinstance(value, list) else str(value).split())
                for value in by_name[name]
            ]
            mean = sum(words) / len(words)
            says += f"; {name}: {mean:.0f} words on average, at most {max(words)} in the first {len(words):,}"
    return says
