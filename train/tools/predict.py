"""The command `baretrain predict MODEL`, which prints a model's predictions for new rows.

MODEL is a run, a transformers folder or a Hub id, and must have a head for labels or answers. Each input row becomes
one output row, in the same order: on standard output a prediction as JSON, in a file of JSON lines or CSV the columns
of the input, followed by those of the prediction. The command runs in one process, on the CPU or a CUDA device.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from train.config import InputError, RecordsConfig, TrainConfig, check, plural, shortlist
from train.machine.console import say, speech
from train.machine.launched import launched
from train.run import compose as cli
from train.run.early import check_exists, check_new_rows
from train.storage.atomic_io import open_whole
from train.storage.folders import disk_errors, is_s3, local_path
from train.tasks import TASKS, spec_of
from train.tools.trained import (
    Trained,
    find_trained,
    output_path,
    run_with,
    settings_of,
    task_of,
    typed_keys,
)

if TYPE_CHECKING:
    from train.tasks.finetune import TextTask
    from train.tasks.predictor import Predictor

ROWS_AT_ONCE = 1_000  # number of rows in memory at the same time
BATCH_SIZE = 32  # sequences
ONLY_IN_JSON = ("probabilities", "n_best")  # keys of predictions that are no columns of CSV
NO_FILE = "(texts given by flags)"  # the value of data.path if no rows are read
INPUTS = {name: text for spec in TASKS.values() for name, text in spec.inputs.items()}
USED: tuple[str, ...] = (
    "data.path",
    "data.format",
    "data.columns.text",
    "data.columns.id",
    "task.threshold",
)
USED += ("seq_len", "eval_batch_size", "backend.device", "backend.precision", "s3.endpoint")
DEFAULTS = {
    **dict.fromkeys(("task", "data.columns.text", "task.threshold"), "..."),
    "data": "records",
    "model": "any",
    "eval_batch_size": str(BATCH_SIZE),
    "backend.precision": "fp32",
}
Row = dict[str, Any]
Chunk = list[tuple[Row, Row]]  # what the model reads of each row, and the row itself


# ---- input ---------------------------------------------------------------------------------------------------------


def texts_of(options: Namespace) -> list[dict[str, str]]:
    """Return the rows given by flags. Raises InputError if a text is empty, missing or not valid Unicode."""
    from train.data.files.errors import unreadable

    given = {name: getattr(options, name) for name in INPUTS if getattr(options, name) is not None}
    for name, texts in given.items():
        for text in texts:
            bad = unreadable(text, "utf-8")
            check(bad is None, f"{flag(name)}: {bad}")
            check(name == "text_pair" or bool(text.strip()), f"{flag(name)}: it is empty")
    counts = {name: len(texts) for name, texts in given.items()}
    found = ", ".join(f"{count} {flag(name)}" for name, count in counts.items())
    check(len(set(counts.values())) < 2, f"{found}: give each as often, one for each row")
    return [dict(zip(given, texts, strict=True)) for texts in zip(*given.values(), strict=True)]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_rows(cfg: TrainConfig, task: TextTask, asked: Asked) -> Iterator[tuple[Row, Row]]:
    """Return the rows of data.path, or those of the flags. Raises InputError if the model cannot read them."""
    from train.data.records.raw import read_texts

    assert isinstance(cfg.data, RecordsConfig)
    texts, trained = asked.texts, asked.trained
    if not texts:
        kind, path = task.featurizer.kind, cfg.data.path
        labels, named = task.labels, asked.columns
        return read_texts(cfg.data, kind, path, cfg.s3, labels=labels, named=named)
    spec = spec_of(cfg.task)
    required = [name for name in spec.inputs if name not in spec.optional]
    check(
        set(required) <= set(texts[0]) <= set(spec.inputs),
        f"{trained.location} is a model of task={cfg.task.kind}: give {' and '.join(map(flag, required))}, or "
        "data.path=FILE",
    )
    for name in spec.optional:
        was_read = getattr(cfg.data.columns, name) is not None
        says = f"was trained without {name}: leave out"
        if was_read:
            says = f"was trained with {name}: give"
        is_right = (name in texts[0]) == was_read
        check(trained.run is None or is_right, f"{trained.location} {says} {flag(name)}")
    return (({"id": str(number), **task.row_of(row)}, row) for number, row in enumerate(texts))


def in_chunks(rows: Iterator[tuple[Row, Row]]) -> Iterator[Chunk]:
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        yield chunk


# ---- output --------------------------------------------------------------------------------------------------------


def check_output(output: str | None, source: str) -> Path | None:
    """Return the path of the file to write, if any. Raises InputError if it cannot be written or is the input."""
    if output is None:
        return None
    path = output_path(output)
    check(path.suffix in (".jsonl", ".csv"), f"--output {path} must end in .jsonl or .csv")
    if not is_s3(source):
        is_input = path.resolve() == local_path(source).resolve()
        check(not is_input, f"--output {path} is the input; choose another name")
    return path


@contextmanager
def written_whole(form: Output | None) -> Iterator[BinaryIO]:
    """Open a file that will exist only if the block succeeds. Without a form, open standard output."""
    if form is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    # Reading rows raises InputErrors, which pass through.
    with disk_errors("write", form.path), open_whole(form.path) as file:
        file.write(form.header())
        yield file


@dataclass
class Output:
    """The rows of a file: the columns of the input, then those of a prediction that the input lacks."""

    path: Path
    columns: list[str]  # of a CSV file
    repeated: Collection[str]  # columns that a prediction repeats, where the input has them
    later: set[str] = field(default_factory=set)  # columns of the input that only later rows have

    @property
    def is_csv(self) -> bool:
        return self.path.suffix == ".csv"

    def header(self) -> bytes:
        if not self.is_csv:
            return b""
        return csv_lines([{name: name for name in self.columns}], self.columns)

    def lines(self, chunk: Chunk, answers: Sequence[Row]) -> bytes:
        from train.tasks.finetune import json_lines

        rows = []
        known = set(self.columns)
        for (_, values), answer in zip(chunk, answers, strict=True):
            self.later |= values.keys() - known
            again = values.keys() & set(self.repeated)
            new = {name: value for name, value in answer.items() if name not in again}
            rows.append({**values, **new})
        if not self.is_csv:
            return json_lines(rows)
        return csv_lines(rows, self.columns)


def open_output(path: Path, first: Chunk, task: TextTask) -> Output:
    """Return the form of a file for rows like the `first` ones.

    Raises InputError if the input has a column of a prediction's name, other than those that a prediction repeats.
    """
    kind = task.featurizer.kind
    columns = list(dict.fromkeys(name for _, values in first for name in values))
    repeated = ("id", *kind.columns)
    own = [*task.csv_columns, "tokens_cut"]
    for name in (*own, *ONLY_IN_JSON):
        check(
            name in repeated or name not in columns,
            f"data.path has a column {name}, and so have predictions: rename it, or leave it out",
        )
    if not any(kind.target in example for example, _ in first):
        own = [name for name in own if name != kind.target]
    own = [name for name in own if name not in columns]
    return Output(path, [*columns, *own], repeated)


def csv_lines(lines: Iterable[Row], columns: Sequence[str]) -> bytes:
    """Return rows as CSV. An object that is no column becomes one per key, as probability_good; others are JSON."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    for line in lines:
        cells = {}
        for key, value in line.items():
            cells[key] = value
            if isinstance(value, dict) and key not in columns:
                prefix = {"probabilities": "probability"}.get(key, key)
                cells |= {f"{prefix}_{name}": number for name, number in value.items()}
            elif isinstance(value, list | dict):
                cells[key] = json.dumps(value, ensure_ascii=False, default=str)
        writer.writerow(cells)
    return text.getvalue().encode()


# ---- the command ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = cli.settings_parser(
        "predict",
        TrainConfig,
        "Label or rate texts, or answer questions, with a model from a run, a transformers folder or the Hub.",
        examples=(
            'RUN --text "so good" --text "so bad"',
            "RUN data.path=new.csv --output answers.csv",
            'RUN --question "Who?" --context "Ann."',
        ),
        keys=USED,
        own=DEFAULTS,
        first=("model", "run_dir of a run, a transformers folder, or a Hub id"),
    )
    for name, text in INPUTS.items():
        parser.add_argument(
            flag(name), metavar="TEXT", action="append", help=f"{text}, once a row"
        )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="a .csv or .jsonl file, which gets the columns of the input and those of the predictions (default: "
        "predictions alone, as JSON lines on standard output)",
    )
    return run_with(find, predict, parser, arguments)


@dataclass(frozen=True)
class Asked:
    """A request by flags: the model, texts, the keys of data.columns that were typed, and the file to write."""

    trained: Trained
    texts: list[dict[str, str]]
    columns: list[str]
    output: Path | None


def find(options: Namespace) -> tuple[Asked, cli.Given]:
    """Return what the flags name, and the settings with which to predict."""
    check(launched().world_size == 1, "predict runs in one process: start it without torchrun")
    typed = typed_keys(options.settings)
    output = check_output(options.output, typed.get("data.path", NO_FILE))
    texts = texts_of(options)
    check(
        ("data.path" in typed) != bool(texts),
        f"give data.path=FILE, or texts with {', '.join(map(flag, INPUTS))}",
    )
    if "data.path" in typed:
        check_exists(typed["data.path"].strip("\"'"))
    columns = columns_in(typed)
    trained = find_trained(
        options.model, options.settings, lambda cfg: check_new_rows(cfg, columns)
    )
    task = task_of(trained, typed)
    check(
        bool(TASKS[task].inputs),
        f"{options.model} is a model of task={task}, which has no head for predictions",
    )
    values = {
        "data.path": NO_FILE,
        "eval_batch_size": BATCH_SIZE,
        "backend.precision": "fp32",
    }
    asked = Asked(trained, texts, columns, output)
    return asked, settings_of(trained, typed, values, backend="ddp")


def columns_in(typed: Mapping[str, str]) -> list[str]:
    """Return the keys of data.columns that the user typed; the data must have these columns."""
    prefix = "data.columns."
    return [key.removeprefix(prefix) for key in typed if key.startswith(prefix)]


def predict(cfg: TrainConfig, asked: Asked) -> int:
    assert isinstance(cfg.data, RecordsConfig)
    is_here = cfg.backend.name in ("auto", "ddp")
    check(is_here, f"backend={cfg.backend.name}: predict runs on the CPU and CUDA devices")
    # Torch takes seconds to import, so the flags are checked first.
    from train.parallel.ddp import DDP
    from train.tasks.predictor import Predictor, trained_task

    task = trained_task(asked.trained.source, cfg.seq_len, cfg.task)
    chunks = in_chunks(read_rows(cfg, task, asked))
    first = next(chunks, None)  # Report wrong columns before the weights are loaded.
    if first is None:
        raise InputError(f"{cfg.data.path} has no rows")
    form = None
    if asked.output is not None:
        form = open_output(asked.output, first, task)
    backend = DDP(cfg.backend)
    predictor = Predictor(task, cfg.data.lengths, device=backend.device, autocast=backend.autocast)
    backend.place(predictor.model)
    batch_size = cfg.eval_batch_size or BATCH_SIZE
    num_rows, num_cut = write_rows(chain([first], chunks), predictor, form, batch_size=batch_size)
    warn(task, asked.trained, num_rows, num_cut)
    if form is not None:
        say_written(form, num_rows)
    return cli.DONE


def write_rows(
    chunks: Iterable[Chunk], predictor: Predictor, form: Output | None, *, batch_size: int
) -> tuple[int, int]:
    """Write a prediction for each row. Returns the number of rows, and of those that were cut."""
    from train.tasks.finetune import json_lines

    num_rows = num_cut = 0
    with (
        tqdm(unit=" sequences", unit_scale=True, disable=speech.is_quiet or None) as bar,
        written_whole(form) as file,
    ):
        for chunk in chunks:
            examples = [example for example, _ in chunk]
            answers = predictor.predict(examples, batch_size=batch_size, on_batch=bar.update)
            if form is None:
                file.write(json_lines(answers))
            else:
                file.write(form.lines(chunk, answers))
            num_rows += len(answers)
            num_cut += sum("tokens_cut" in answer for answer in answers)
    return num_rows, num_cut


def say_written(form: Output, num_rows: int) -> None:
    if form.later and form.is_csv:
        say(
            f"warning: {form.path} lacks {shortlist(sorted(form.later))}, which only rows after the first "
            f"{ROWS_AT_ONCE:,} have; a .jsonl file would have it",
            file=sys.stderr,
        )
    say(f"predictions: {form.path} ({plural(num_rows, 'row')})")


def warn(task: TextTask, trained: Trained, num_rows: int, num_cut: int) -> None:
    """Say on standard error what the model could not read."""
    from train.data.text.coverage import unknown_share

    notes: Mapping[str, float] = task.featurizer.notes("new")
    unknown, tokens = notes.get("unknown_tokens", 0), notes.get("text_tokens", 0)
    reads = f"the tokenizer of {trained.location} reads the texts"
    remark = unknown_share(unknown, tokens, reads, most=1)
    if remark.startswith("warning"):
        say(remark, file=sys.stderr)
    if num_cut:
        say(
            f"{num_cut:,} of {num_rows:,} rows are cut at {task.sizes.seq_len} tokens; tokens_cut has the number of "
            "tokens that each lost",
            file=sys.stderr,
        )
