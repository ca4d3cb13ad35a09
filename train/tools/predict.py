"""The command `baretrain predict MODEL`, which prints a model's predictions for new rows.

MODEL is a run, a transformers folder or a Hub id, and must have a head for labels or answers. A run's export is used,
or its best checkpoint if the export is missing or outdated; its config.yaml says how to read the columns. Each input
row becomes one output row, in the same order, as JSON lines or CSV. The command runs in one process, on the CPU or a
CUDA device.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from train.config import (
    BackendConfig,
    ColumnsConfig,
    InputError,
    RecordsConfig,
    S3Config,
    TrainConfig,
    check,
    check_choice,
)
from train.machine.console import say
from train.machine.launched import launched
from train.run.command import (
    DONE,
    EXITS,
    REJECTED,
    Parser,
    add_import_flag,
    add_s3_flags,
    command_parser,
    guarded,
    s3_of,
)
from train.storage.atomic_io import open_whole
from train.storage.folders import Folder, disk_errors, is_s3, local_path, open_folder
from train.tasks import TASKS, spec_of
from train.tasks.spec import TaskSpec

if TYPE_CHECKING:
    from train.tasks.predictor import Predictor

ROWS_AT_ONCE = 1_000  # number of rows in memory at the same time
FLAGS = {  # replacements in error messages about data: this command has flags where train has settings
    "data.path=": "--input ",
    "set data.format to": "give --format",
    "say which is for training: data.train=NAME, or a glob": "name one of them",
}
COLUMNS = [item.name for item in fields(ColumnsConfig)]
SINGULAR = {"probabilities": "probability"}
Row = dict[str, Any]


# ---- the model and the columns -------------------------------------------------------------------------------------


def find(options: argparse.Namespace, s3: S3Config) -> Predictor:
    """Return the model that the flags name, without loading its weights. Raises InputError if it cannot predict."""
    # needs torch, so it is imported after the flags have been checked
    from train.data.shards.cache import (
        cache_dir,
    )
    from train.models.source import located
    from train.tasks.predictor import Predictor

    run = find_run(options.model, s3)
    data = RecordsConfig(path="")
    if run is not None:
        cfg, _ = run
        check(
            bool(spec_of(cfg.task).inputs),
            f"{options.model} is a run of task={cfg.task.kind}: its model has no head for predictions",
        )
        assert isinstance(cfg.data, RecordsConfig)
        data = cfg.data
    columns = {
        name: value or getattr(ColumnsConfig(), name)
        for name, value in columns_given(options).items()
    }
    data = replace(data, columns=replace(data.columns, **columns), cache_dir=options.cache_dir)
    source = located("MODEL", options.model, s3, cache_dir(data), needs="config.json")
    return Predictor(source, data, run=run, seq_len=options.seq_len)


def specs() -> list[TaskSpec]:
    """Return the tasks whose models can make predictions."""
    return [spec for spec in TASKS.values() if spec.inputs]


def inputs() -> dict[str, str]:
    """Return the help text of each input's flag, by the input's name, for all tasks in `specs()`."""
    return {name: text for spec in specs() for name, text in spec.inputs.items()}


def number_options() -> dict[str, str]:
    """Return the help text of each numeric option's flag, by the option's name, for all tasks in `specs()`."""
    return {name: text for spec in specs() for name, text in spec.options.items()}


def columns_given(options: argparse.Namespace) -> dict[str, str]:
    """Return the column names given by flags, by key of ColumnsConfig."""
    return {
        name: value
        for name in COLUMNS
        if (value := getattr(options, f"{name}_column")) is not None
    }


def find_run(location: str, s3: S3Config) -> tuple[TrainConfig, Folder] | None:
    if not is_s3(location) and not local_path(location).is_dir():
        return None
    folder = open_folder(location, s3)
    names = folder.names_here()
    if "config.yaml" not in names or "config.json" in names:
        return None
    from train.run.saved import read_config  # Hydra is slow to import

    return read_config(folder), folder


# ---- input ---------------------------------------------------------------------------------------------------------


def read_rows(options: argparse.Namespace, trained: Predictor, s3: S3Config) -> Iterator[Row]:
    """Return the rows of --input, or one row with the flags' texts. Raises InputError if the model cannot read them."""
    from train.config.data import is_named
    from train.data.records.raw import read_texts

    spec, given = trained.spec, inputs_given(options)
    ok = options.input is not None or fits(spec, given)
    check(ok, f"{options.model} {spec.does}: give {flags(required(spec))}, or --input")
    if trained.run is not None:
        trained_on = trained.run[0].data
        assert isinstance(trained_on, RecordsConfig)
        for name in spec.optional:
            has = (
                getattr(trained.data.columns, name) is not None if options.input else name in given
            )
            was = getattr(trained_on.columns, name) is not None
            flag, value = (f"{name}_column", "NAME") if options.input else (name, "TEXT")
            cure = f"give {flags([flag])} {value}" if was else f"leave out {flags([flag])}"
            check(
                has == was,
                f"{options.model} was trained {'with' if was else 'without'} {name}; {cure}",
            )
    if options.input is None:
        return iter([{"id": "0", **trained.task.row_of(given)}])
    form = options.format or ("auto" if is_named(options.input) else trained.data.format)
    data = replace(trained.data, format=form)
    kind = trained.task.featurizer.kind
    named = [name for name, column in columns_given(options).items() if column]
    unread = set(named) - {"id", *kind.columns}
    check(
        not unread,
        f"{flags(f'{name}_column' for name in sorted(unread))}: {options.model} only {spec.does}",
    )
    return in_words_of_flags(
        read_texts(data, kind, options.input, s3, labels=trained.task.labels, named=named)
    )


def in_words_of_flags(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the same rows. If reading them raises an InputError, its text names flags instead of settings."""
    try:
        yield from rows
    except InputError as error:
        said = re.sub(
            r"data\.columns\.(\w+)(=?)",
            lambda key: flags([f"{key[1]}_column"]) + " " * len(key[2]),
            str(error),
        )
        for setting, flag in FLAGS.items():
            said = said.replace(setting, flag)
        raise InputError(said) from error


def inputs_given(options: argparse.Namespace) -> dict[str, str]:
    """Return the texts given by flags, by input name. Raises InputError if a text is empty or not valid Unicode."""
    from train.data.files.errors import unreadable

    optional = {name for spec in specs() for name in spec.optional}
    given = {name: text for name in inputs() if (text := getattr(options, name)) is not None}
    for name, text in given.items():
        bad = unreadable(text, "utf-8") or (
            None if text.strip() or name in optional else "it is empty"
        )
        check(bad is None, f"{flags([name])}: {bad}")
    return given


def required(spec: TaskSpec) -> list[str]:
    return [name for name in spec.inputs if name not in spec.optional]


def fits(spec: TaskSpec, given: Iterable[str]) -> bool:
    """Return whether a task's models can read exactly these inputs."""
    return set(required(spec)) <= set(given) <= set(spec.inputs)


def flags(names: Iterable[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def in_chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        yield chunk


# ---- output --------------------------------------------------------------------------------------------------------


def check_output(output: str) -> Path:
    """Return the path of the file to write. Raises InputError if no file can be written there."""
    check(
        not is_s3(output),
        f"--output {output}: the file must be on this machine; copy it to S3 afterwards",
    )
    path = local_path(output)
    check(path.parent.is_dir(), f"--output {output}: there is no folder {path.parent}")
    check(not path.is_dir(), f"--output {output} is a folder; name a file in it")
    return path


@contextmanager
def written_whole(path: Path | None) -> Iterator[BinaryIO]:
    """Open a file that will exist only if the block succeeds. Without a path, open standard output."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    # Reading rows raises InputErrors, which pass through.
    with (
        disk_errors("write", path),
        open_whole(path) as file,
    ):
        yield file


def csv_lines(lines: Iterable[Row], columns: Sequence[str]) -> bytes:
    """Return rows as CSV. A JSON object becomes one column per key, for example one per label."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    for line in lines:
        objects = {
            SINGULAR.get(key, key): value for key, value in line.items() if isinstance(value, dict)
        }
        named = {
            f"{key}_{name}": number
            for key, value in objects.items()
            for name, number in value.items()
        }
        lists = {
            key: json.dumps(value, ensure_ascii=False)
            for key, value in line.items()
            if isinstance(value, list)
        }
        writer.writerow({**line, **lists, **named})
    return text.getvalue().encode()


# ---- command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    def act() -> int:
        first = Parser(prog="baretrain predict", add_help=False)
        add_import_flag(first)
        # Import the user's tasks first, because they may add flags.
        first.parse_known_args(arguments)
        options = build_parser().parse_args(arguments)
        return predict(options, s3_of(options))

    return guarded(act)


def build_parser() -> Parser:
    purpose = "Label or rate texts, or answer questions, with a model from a run, a transformers folder or the Hub."
    examples = (
        'RUN --text "so good"',
        "RUN --input a.csv --output b.jsonl",
        'RUN --question "Who?" --context "Ann."',
    )
    exits = {**EXITS, REJECTED: "arguments or input rejected, and no output file written"}
    parser = command_parser("predict", purpose, examples=examples, exits=exits, imports=True)
    parser.add_argument(
        "model", metavar="MODEL", help="run_dir of a run, a transformers folder, or a Hub id"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--input",
        metavar="FILE",
        help="CSV, TSV, JSON lines, Parquet, SQuAD or CoNLL; local or s3://",
    )
    firsts = {next(iter(spec.inputs)) for spec in specs()}
    for name, text in inputs().items():
        (what if name in firsts else parser).add_argument(flags([name]), metavar="TEXT", help=text)
    for name, text in number_options().items():
        parser.add_argument(flags([name]), type=float, metavar="X", help=text)
    parser.add_argument(
        "--output", metavar="FILE", help="a .jsonl or .csv file (default: JSON lines to stdout)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="sequences per batch (default: 32)"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto: CUDA if available (default: auto)"
    )
    parser.add_argument(
        "--precision",
        default="fp32",
        help="fp32, bf16, or auto: bf16 if supported (default: fp32)",
    )
    parser.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help="maximum tokens per sequence (default: as in the run)",
    )
    parser.add_argument(
        "--format",
        help="format, if the name does not show it: csv, jsonl, parquet, squad or conll",
    )
    for name in COLUMNS:
        flag = flags([f"{name}_column"])
        parser.add_argument(
            flag, metavar="NAME", help=f"input column for data.columns.{name}; '' for the default"
        )
    add_s3_flags(parser)
    return parser


def check_flags(options: argparse.Namespace) -> Path | None:
    """Return the path of the file to write, if any. Raises InputError if flags contradict each other or are invalid."""
    check(
        launched().world_size == 1,
        "baretrain predict runs in one process: start it without torchrun",
    )
    check(options.batch_size > 0, f"--batch-size {options.batch_size} must be above 0")
    check(
        options.seq_len is None or options.seq_len > 0,
        f"--seq-len {options.seq_len} must be above 0",
    )
    given = [name for name in inputs() if getattr(options, name) is not None]
    ok = any(fits(spec, given) for spec in specs()) if options.input is None else not given
    ways = [
        " ".join(f"[{flags([n])}]" if n in spec.optional else flags([n]) for n in spec.inputs)
        for spec in specs()
    ]
    check(
        ok,
        f"{flags(given)}: not a valid combination of flags; give {', or '.join(ways)}, or --input alone",
    )
    names = [f"{name}_column" for name in columns_given(options)]
    check(
        options.input is not None or not names,
        f"{flags(names)}: only --input has columns; leave the flags out",
    )
    check(
        options.device != "neuron",
        "--device neuron: baretrain predict runs on the CPU and CUDA devices",
    )
    if options.format is not None:
        check_choice("--format", options.format, ("csv", "jsonl", "parquet", "squad", "conll"))
    if options.output is None:
        return None
    path, source = check_output(options.output), options.input
    check(path.suffix in (".jsonl", ".csv"), f"--output {path} must end in .jsonl or .csv")
    is_input = (
        source is not None and not is_s3(source) and path.resolve() == local_path(source).resolve()
    )
    check(not is_input, f"--output {path} is the input; choose another name")
    return path


def predict(options: argparse.Namespace, s3: S3Config) -> int:
    path = check_flags(options)
    from train.data.text.coverage import unknown_share
    from train.parallel.ddp import DDP
    from train.tasks.finetune import json_lines

    predictor = find(options, s3)
    backend = DDP(BackendConfig(device=options.device, precision=options.precision))
    chunks = in_chunks(read_rows(options, predictor, s3))
    first = next(chunks, None)  # Report wrong columns before the weights are loaded.
    if first is None:
        raise InputError(f"{options.input} has no rows")
    predictor.load(
        {name: getattr(options, name) for name in number_options()},
        backend.device,
        backend.autocast,
    )
    backend.place(predictor.model)
    columns = [*predictor.task.csv_columns, "tokens_cut"]
    is_csv = path is not None and path.suffix == ".csv"
    with (
        tqdm(unit=" sequences", unit_scale=True, disable=None) as bar,
        written_whole(path) as file,
    ):
        if is_csv:
            file.write(csv_lines([{name: name for name in columns}], columns))
        for chunk in chain([first], chunks):
            lines = predictor.predict(chunk, batch_size=options.batch_size, on_batch=bar.update)
            file.write(csv_lines(lines, columns) if is_csv else json_lines(lines))
    notes = predictor.task.featurizer.notes("new")
    unknown, tokens = (notes.get(name, 0) for name in ("unknown_tokens", "text_tokens"))
    remark = unknown_share(
        unknown, tokens, f"the tokenizer of {options.model} reads the texts", most=1
    )
    if remark.startswith("warning"):
        say(remark, file=sys.stderr)
    if cut := predictor.cut_rows():
        say(f"{cut}; tokens_cut has the number for each row", file=sys.stderr)
    if metrics := predictor.metrics():
        say(metrics, file=sys.stderr if path is None else sys.stdout)
    return DONE
