"""`python -m train.predict MODEL --text "..." | --question "..." --context "..." | --input FILE [--output FILE]`:
what a trained model says of new texts or questions.

MODEL is a run (its export, or else its best checkpoint), whose config.yaml says which columns to read and how, or a
folder of transformers or Hub id with a head for labels or answers. One row comes out for each that goes in, in order:
JSON lines, or CSV. It is one process on the CPU or a CUDA device; XLA and Trainium devices are for training.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from train import cli
from train.command import EXITS, REFUSED, add_s3_flags, command_parser, run_flags
from train.config import (
    BackendConfig,
    ClassifyConfig,
    ColumnsConfig,
    InputError,
    QAConfig,
    RecordsConfig,
    S3Config,
    TrainConfig,
    check,
    check_choice,
)
from train.launched import launched
from train.storage import Folder, is_s3, local_path, open_folder, telling

if TYPE_CHECKING:
    from train.backend.ddp import DDP
    from train.tasks.predictor import Predictor, Trained

ROWS_AT_ONCE, CHARS_AT_ONCE = 10_000, 2**24  # of the input, held in memory: whichever is less
COLUMNS = [item.name for item in fields(ColumnsConfig)]
Row = dict[str, Any]


# ---- which model, and how its data is read -------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """`run`: its settings and folder; None for a model that is no run of ours."""

    source: str  # folder of transformers, or Hub id
    run: tuple[TrainConfig, Folder] | None
    data: RecordsConfig  # how rows are read


def find(options: argparse.Namespace, s3: S3Config) -> Origin:
    from train.data.cache import cache_dir  # what needs torch comes after the checks of the flags
    from train.models.source import located

    run = find_run(options.model, s3)
    data = RecordsConfig(path="")
    if run is not None:
        cfg, _ = run
        check(cfg.task.kind != "mlm", f"{options.model} is a pretraining: it has no head for labels or answers")
        assert isinstance(cfg.data, RecordsConfig)
        data = cfg.data
    given = {name: getattr(options, f"{name}_column") for name in COLUMNS}
    none = ColumnsConfig()
    given = {name: value or getattr(none, name) for name, value in given.items() if value is not None}
    data = replace(data, columns=replace(data.columns, **given), cache_dir=options.cache_dir)
    source = located("MODEL", options.model, s3, cache_dir(data), needs="config.json")
    return Origin(source, run, data)


def find_run(place: str, s3: S3Config) -> tuple[TrainConfig, Folder] | None:
    if not is_s3(place) and not local_path(place).is_dir():
        return None
    folder = open_folder(place, s3)
    names = folder.names_here()
    if "config.yaml" not in names or "config.json" in names:
        return None
    from train.checkpoints.export import read_config

    return read_config(folder), folder


def precision_of(cfg: TrainConfig, folder: Folder) -> str:
    """What a run computed in, so that answers are those of its evaluation."""
    try:
        used = str(json.loads(folder.read("environment.json"))["precision"])
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
        used = cfg.backend.precision
    return "fp32" if used == "fp32" else "bf16" if used.startswith("bf16") else "auto"


def threshold_of(origin: Origin, given: float | None) -> float | None:
    """Of the odds of no answer: the one given, set, or found by the run's evaluation. None: there is always one."""
    if given is not None or origin.run is None:
        return given
    cfg, folder = origin.run
    assert isinstance(cfg.task, QAConfig)
    if not cfg.task.unanswerable or cfg.task.null_threshold is not None:
        return cfg.task.null_threshold
    try:
        return float(json.loads(folder.read("evaluation.json"))["splits"]["validation"]["threshold"])
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(
            f"{folder.location}/evaluation.json names no threshold for no answer ({type(error).__name__}); give one: "
            "--null-threshold 0"
        ) from error


def make_predictor(trained: Trained, origin: Origin, backend: DDP, options: argparse.Namespace) -> Predictor:
    from train.tasks.predictor import AnswerPredictor, LabelPredictor

    if isinstance(trained.task, ClassifyConfig):
        return LabelPredictor(trained, backend)
    threshold = threshold_of(origin, options.null_threshold)
    return AnswerPredictor(trained, backend, lengths=origin.data.lengths, threshold=threshold)


# ---- rows in -------------------------------------------------------------------------------------------------------


def read_rows(options: argparse.Namespace, origin: Origin, trained: Trained, s3: S3Config) -> Iterator[Row]:
    """Rows as read_texts gives them. InputError if they are not of the kind that the model is for."""
    from train.data.raw import read_texts
    from train.data.raw_files import is_named

    kind, columns = trained.task.kind, origin.data.columns
    wanted = {"classify": "--text or --input", "qa": "--question and --context, or --input"}[kind]
    flag = "text" if kind == "classify" else "question"
    ok = options.input is not None or getattr(options, flag) is not None
    check(ok, f"{options.model} {'labels texts' if kind == 'classify' else 'answers questions'}: give {wanted}")
    if origin.run is not None and kind == "classify":
        learnt = origin.run[0].data
        assert isinstance(learnt, RecordsConfig)
        has_pair = (columns.text_pair if options.input else options.text_pair) is not None
        was = "pairs of texts" if learnt.columns.text_pair else "single texts"
        given = "--text-pair-column" if options.input else "--text-pair"
        check(has_pair == (learnt.columns.text_pair is not None), f"{options.model} learnt {was}: see {given}")
    if options.input is None:
        return iter([typed(options)])
    form = options.format or ("auto" if is_named(options.input) else origin.data.format)
    return read_texts(replace(origin.data, format=form), kind, options.input, s3, labels=trained.labels)


def typed(options: argparse.Namespace) -> Row:
    """The row that the flags hold."""
    from train.data.raw_files import unreadable

    names = ("text", "text_pair", "question", "context")
    row = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name, text in row.items():
        bad = unreadable(text, "utf-8") or (None if text.strip() or name == "text_pair" else "it is empty")
        check(bad is None, f"--{name.replace('_', '-')}: {bad}")
    return {"id": "0", **row}


def in_chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    chars = 0
    for row in rows:
        chunk.append(row)
        chars += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(chunk) == ROWS_AT_ONCE or chars >= CHARS_AT_ONCE:
            yield chunk
            chunk, chars = [], 0
    if chunk:
        yield chunk


# ---- predictions out -----------------------------------------------------------------------------------------------


def check_output(output: str, source: str | None) -> Path:
    """The file to write. InputError if it cannot be there."""
    check(not is_s3(output), f"--output {output}: predictions are written to this machine; copy them from here")
    path = local_path(output)
    check(path.suffix in (".jsonl", ".csv"), f"--output {output} must end in .jsonl or .csv")
    check(path.parent.is_dir(), f"--output {output}: there is no folder {path.parent}")
    check(os.access(path.parent, os.W_OK), f"--output {output}: {path.parent} cannot be written to")
    check(not path.is_dir(), f"--output {output} is a folder; name a file in it")
    is_input = (
        source is not None and path.exists() and not is_s3(source) and path.resolve() == local_path(source).resolve()
    )
    check(not is_input, f"--output {output} is the input; choose another name")
    return path


@contextmanager
def written_whole(path: Path | None) -> Iterator[BinaryIO]:
    """A file that is there when all is well in the end; without a path standard output, which has what there was."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        with telling("write", path):  # all that is done meanwhile names its own errors
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def csv_lines(lines: Iterable[Row], columns: Sequence[str]) -> bytes:
    """Rows without what a table cannot hold; a column for the probability of each label."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    for line in lines:
        shares = line.get("probabilities", {})
        writer.writerow({**line, **{f"probability_{label}": share for label, share in shares.items()}})
    return text.getvalue().encode()


# ---- command line --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    purpose = "Label texts, or answer questions, by a run, a folder of transformers or a model of the Hub."
    examples = ('RUN --text "hello"', "RUN --input a.csv --output b.jsonl", 'RUN --question "Who?" --context "Ann."')
    exits = {**EXITS, REFUSED: "arguments or input refused; then there is no output file"}
    parser = command_parser("train.predict", purpose, examples=examples, exits=exits)
    parser.add_argument("model", metavar="MODEL", help="run_dir of a run, a folder of transformers, or a Hub id")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="to label")
    what.add_argument("--question", help="to answer from --context")
    what.add_argument("--input", metavar="FILE", help="CSV, TSV, JSON lines, Parquet or SQuAD, s3:// too")
    parser.add_argument("--text-pair", metavar="TEXT", help="the second text, for a model of pairs")
    parser.add_argument("--context", metavar="TEXT", help="in which the answer is")
    parser.add_argument("--output", metavar="FILE", help="to write: .jsonl or .csv; default: JSON lines to stdout")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="sequences at once (32)")
    parser.add_argument("--device", default="auto", help="auto (CUDA if there is any), cpu or cuda")
    parser.add_argument("--precision", help="fp32, bf16 or auto (the run's, or auto: bf16 where the hardware has it)")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of the longest sequence (the run's, or all)")
    parser.add_argument("--null-threshold", type=float, metavar="X", help="odds above which there is no answer")
    parser.add_argument("--format", help="of an input whose name does not tell: csv, jsonl, parquet, squad")
    for name in COLUMNS:
        flag = f"--{name.replace('_', '-')}-column"
        parser.add_argument(flag, metavar="NAME", help=f"of the input, for data.columns.{name}; empty: the default")
    add_s3_flags(parser)
    return run_flags(parser, arguments, predict)


def check_flags(options: argparse.Namespace) -> Path | None:
    """Where to write to. InputError for flags that do not go together or mean nothing."""
    check(launched().world_size == 1, "train.predict is one process: start it without torchrun")
    check(options.batch_size > 0, f"--batch-size {options.batch_size} must be above 0")
    check(options.seq_len is None or options.seq_len > 0, f"--seq-len {options.seq_len} must be above 0")
    check(options.text_pair is None or options.text is not None, "--text-pair goes with --text")
    check((options.question is None) == (options.context is None), "--question and --context go together")
    check(options.device != "neuron", "--device neuron: train.predict runs on the CPU and CUDA devices")
    if options.format is not None:
        check_choice("--format", options.format, ("csv", "jsonl", "parquet", "squad"))
    return None if options.output is None else check_output(options.output, options.input)


def predict(options: argparse.Namespace, s3: S3Config) -> int:
    path = check_flags(options)
    from train.backend.ddp import DDP
    from train.tasks.finetune import json_lines
    from train.tasks.predictor import Trained

    origin = find(options, s3)
    precision = options.precision or (precision_of(*origin.run) if origin.run else "auto")
    backend = DDP(BackendConfig(device=options.device, precision=precision))
    task, seq_len = (origin.run[0].task, origin.run[0].seq_len) if origin.run else (None, None)
    trained = Trained.of(origin.source, task, options.seq_len or seq_len)
    chunks = in_chunks(read_rows(options, origin, trained, s3))
    first = next(chunks, None)  # what is wrong with the columns shows before weights are read
    if first is None:
        raise InputError(f"{options.input} holds no row")
    predictor = make_predictor(trained, origin, backend, options)
    is_csv = path is not None and path.suffix == ".csv"
    with tqdm(unit=" sequences", unit_scale=True, disable=None) as bar, written_whole(path) as file:
        if is_csv:
            file.write(csv_lines([{name: name for name in predictor.csv_columns}], predictor.csv_columns))
        for chunk in chain([first], chunks):
            lines = predictor.predict(chunk, backend, batch_size=options.batch_size, on_batch=bar.update)
            file.write(csv_lines(lines, predictor.csv_columns) if is_csv else json_lines(lines))
    if metrics := predictor.metrics():
        print(metrics, file=sys.stderr if path is None else sys.stdout)
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
