"""The command `baretrain predict MODEL`, which prints a model's predictions for new rows.

MODEL is a run, a transformers folder or a Hub id, and must have a head for labels or answers. Each input row becomes
one output row, in the same order, as JSON lines or CSV. The command runs in one process, on the CPU or a CUDA device.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from train.config import InputError, RecordsConfig, TrainConfig, check
from train.machine.console import say
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
    settings_of,
    task_of,
    typed_keys,
)

if TYPE_CHECKING:
    from train.tasks.finetune import TextTask

ROWS_AT_ONCE = 1_000  # number of rows in memory at the same time
BATCH_SIZE = 32  # sequences
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
Row = dict[str, Any]


# ---- input ---------------------------------------------------------------------------------------------------------


def texts_of(options: Namespace) -> dict[str, str]:
    """Return the texts given by flags, by input. Raises InputError if a text is empty or not valid Unicode."""
    from train.data.files.errors import unreadable

    given = {name: getattr(options, name) for name in INPUTS if getattr(options, name) is not None}
    for name, text in given.items():
        bad = unreadable(text, "utf-8")
        check(bad is None, f"{flag(name)}: {bad}")
        check(name == "text_pair" or bool(text.strip()), f"{flag(name)}: it is empty")
    return given


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_rows(
    cfg: TrainConfig, task: TextTask, trained: Trained, texts: dict[str, str], named: Sequence[str]
) -> Iterator[Row]:
    """Return the rows of data.path, or one row with the flags' texts. Raises InputError if the model cannot read them.

    `named` has the keys of data.columns that the user typed; the data must have these columns.
    """
    from train.data.records.raw import read_texts

    assert isinstance(cfg.data, RecordsConfig)
    if not texts:
        kind, path = task.featurizer.kind, cfg.data.path
        return read_texts(cfg.data, kind, path, cfg.s3, labels=task.labels, named=named)
    spec = spec_of(cfg.task)
    required = [name for name in spec.inputs if name not in spec.optional]
    check(
        set(required) <= set(texts) <= set(spec.inputs),
        f"{trained.location} is a model of task={cfg.task.kind}: give {' and '.join(map(flag, required))}, or "
        "data.path=FILE",
    )
    for name in spec.optional:
        was_read = getattr(cfg.data.columns, name) is not None
        check(
            trained.run is None or (name in texts) == was_read,
            f"{trained.location} was trained {'with' if was_read else 'without'} {name}: "
            f"{'give' if was_read else 'leave out'} {flag(name)}",
        )
    return iter([{"id": "0", **task.row_of(texts)}])


def in_chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
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
def written_whole(path: Path | None) -> Iterator[BinaryIO]:
    """Open a file that will exist only if the block succeeds. Without a path, open standard output."""
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    # Reading rows raises InputErrors, which pass through.
    with disk_errors("write", path), open_whole(path) as file:
        yield file


def csv_lines(lines: Iterable[Row], columns: Sequence[str]) -> bytes:
    """Return rows as CSV. An object becomes one column per key, such as probability_good, and a list becomes JSON."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    for line in lines:
        cells = {}
        for key, value in line.items():
            cells[key] = value
            if isinstance(value, list):
                cells[key] = json.dumps(value, ensure_ascii=False)
            elif isinstance(value, dict):
                prefix = {"probabilities": "probability"}.get(key, key)
                cells |= {f"{prefix}_{name}": number for name, number in value.items()}
        writer.writerow(cells)
    return text.getvalue().encode()


# ---- the command ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = cli.settings_parser(
        "predict",
        TrainConfig,
        "Label or rate texts, or answer questions, with a model from a run, a transformers folder or the Hub.",
        examples=(
            'RUN --text "so good"',
            "RUN data.path=new.csv --output answers.jsonl",
            'RUN --question "Who?" --context "Ann."',
        ),
        keys=USED,
        first=("model", "run_dir of a run, a transformers folder, or a Hub id"),
    )
    for name, text in INPUTS.items():
        parser.add_argument(flag(name), metavar="TEXT", help=text)
    parser.add_argument(
        "--output", metavar="FILE", help="a .jsonl or .csv file (default: JSON lines to stdout)"
    )
    found: list[tuple[Namespace, Trained, Path | None]] = []

    def given(options: Namespace) -> cli.Given:
        trained, output, settings = find(options)
        found.append((options, trained, output))
        return settings

    def act(cfg: TrainConfig) -> int:
        return predict(cfg, *found[0])

    return cli.run(TrainConfig, act, parser, arguments=arguments, given=given)


def find(options: Namespace) -> tuple[Trained, Path | None, cli.Given]:
    """Return the model that the flags name, the file to write, and the settings with which to predict."""
    check(launched().world_size == 1, "predict runs in one process: start it without torchrun")
    typed = typed_keys(options.settings)
    output = check_output(options.output, typed.get("data.path", NO_FILE))
    check(
        ("data.path" in typed) != bool(texts_of(options)),
        f"give data.path=FILE, or texts with {', '.join(map(flag, INPUTS))}",
    )
    if "data.path" in typed:
        check_exists(typed["data.path"].strip("\"'"))
    trained = find_trained(
        options.model, options.settings, lambda cfg: check_new_rows(cfg, columns_in(typed))
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
    return trained, output, settings_of(trained, typed, values, backend="ddp")


def columns_in(typed: Mapping[str, str]) -> list[str]:
    """Return the keys of data.columns that the user typed; the data must have these columns."""
    prefix = "data.columns."
    return [key.removeprefix(prefix) for key in typed if key.startswith(prefix)]


def predict(cfg: TrainConfig, options: Namespace, trained: Trained, output: Path | None) -> int:
    assert isinstance(cfg.data, RecordsConfig)
    is_here = cfg.backend.name in ("auto", "ddp")
    check(is_here, f"backend={cfg.backend.name}: predict runs on the CPU and CUDA devices")
    # Torch takes seconds to import, so the flags are checked first.
    from train.parallel.ddp import DDP
    from train.tasks.finetune import json_lines
    from train.tasks.predictor import Predictor, trained_task

    task = trained_task(trained.source, cfg.seq_len, cfg.task)
    named = columns_in(typed_keys(options.settings))
    chunks = in_chunks(read_rows(cfg, task, trained, texts_of(options), named))
    first = next(chunks, None)  # Report wrong columns before the weights are loaded.
    if first is None:
        raise InputError(f"{cfg.data.path} has no rows")
    backend = DDP(cfg.backend)
    predictor = Predictor(task, cfg.data.lengths, device=backend.device, autocast=backend.autocast)
    backend.place(predictor.model)
    columns = [*task.csv_columns, "tokens_cut"]
    is_csv = output is not None and output.suffix == ".csv"
    num_rows = num_cut = 0
    with (
        tqdm(unit=" sequences", unit_scale=True, disable=None) as bar,
        written_whole(output) as file,
    ):
        if is_csv:
            file.write(csv_lines([{name: name for name in columns}], columns))
        for chunk in chain([first], chunks):
            lines = predictor.predict(
                chunk, batch_size=cfg.eval_batch_size or BATCH_SIZE, on_batch=bar.update
            )
            file.write(csv_lines(lines, columns) if is_csv else json_lines(lines))
            num_rows += len(lines)
            num_cut += sum("tokens_cut" in line for line in lines)
    warn(task, trained, num_rows, num_cut)
    return cli.DONE


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
        cut = f"{num_cut:,} of {num_rows:,} rows are cut at {task.sizes.seq_len} tokens"
        say(f"{cut}; tokens_cut has the number of tokens that each lost", file=sys.stderr)
