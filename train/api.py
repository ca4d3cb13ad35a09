"""The commands as functions, for notebooks and other programs: `from train import api`.

Each call runs the command in a separate process, so that its signals, exits and torch state do not affect the caller.
The command's output is printed as it arrives. A call raises InputError if the command rejects its input, and Failure if
the command fails. The error's text is the reason that the command printed.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from train.config import Failure, InputError, S3Config, check
from train.machine import processes
from train.machine.host import cache_root
from train.machine.torchrun import REJECTION
from train.observe.lines import read_lines
from train.run.command import DONE, REJECTED
from train.run.names import as_typed, quoted
from train.run_folder.outcome import read_outcome
from train.storage.atomic_io import write_atomic
from train.storage.folders import is_s3, local_path, make_folder, open_folder, sha256_bytes
from train.storage.imported import FLAG

KINDS = (
    "give texts, or mappings from column names to values, in a list, a data frame or a data set"
)
FILES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".conll", ".gz")
NO_METRICS = ("kind", "time_unix_s", "attempt")  # keys of a line of metrics.jsonl
# at most this many of the last output lines are kept, to find the reason for a failure
LINES = 1000

__all__ = [
    "Failure",
    "InputError",
    "Result",
    "compare",
    "evaluate",
    "finetune",
    "predict",
    "prepare",
    "report",
    "train",
]


@dataclass(frozen=True)
class Result:
    """A run that ended without a failure."""

    run_dir: str
    outcome: str  # "done" or "stopped"; the same call resumes a stopped run
    step: int
    metrics: list[dict[str, float]]  # one row per evaluation, for pandas.DataFrame(result.metrics)
    # those of the exported weights or, without an export, of the last evaluation
    scores: dict[str, float]
    export: str | None  # a folder for from_pretrained; None if nothing was exported
    # the page that `finetune` and `report` write by default; None if there is none
    report: str | None

    def predict(self, rows: Any, **options: Any) -> list[dict[str, Any]]:
        """Return the model's prediction for each row; see `predict`."""
        return predict(self.run_dir, rows, **options)


def train(settings: Sequence[str], *, ranks: int = 1, imports: Sequence[str] = ()) -> Result:
    """Train or resume a run as `baretrain train` does with these settings, under torchrun if `ranks` is above 1.

    A KeyboardInterrupt makes the run save and stop, and is then raised again. `imports` are files for --import.
    """
    return ended_run("train", [*flags(imports), *values(settings)], ranks)


def finetune(
    data: Any,
    *,
    model: str,
    run_dir: str,
    ranks: int = 1,
    imports: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Fine-tune a model on labelled rows as `baretrain finetune` does: it finds the task and the columns.

    `data` is a file, a folder, an S3 URL or the Hub id of a data set, or rows: a data frame, a data set, or a list of
    mappings from column names to values. Rows are kept in the cache, under a name made from their content. `settings`
    are those of a run, such as max_epochs=5 or **{"optim.lr": 3e-5}.
    """
    if isinstance(data, str | Path):
        location = str(data)
    else:
        location = str(kept(data))
    given = [f"{key}={as_typed(value)}" for key, value in settings.items()]
    # Flag and value are one argument, since a value may begin with a dash.
    places = [f"--model={model}", f"--output={run_dir}"]
    return ended_run("finetune", [*flags(imports), *values([location, *given]), *places], ranks)


def kept(rows: Any) -> Path:
    """Write rows into the cache, and return the path: as JSON lines or, if a data set names its labels, as Parquet."""
    lines = lines_of(rows)
    check(bool(lines), "data has no rows")
    number = next((n for n, line in enumerate(lines, 1) if isinstance(line, str)), None)
    check(number is None, f"row {number} is a text without a label: {KINDS}")
    suffix = ".jsonl"
    content = json_text(lines)
    if has_label_names(rows):  # JSON would have their numbers alone
        suffix = ".parquet"
        content = parquet_of(rows)
    folder = make_folder(cache_root() / "rows")
    path = folder / f"{sha256_bytes(content)[:16]}{suffix}"
    write_atomic(path, content)
    return path


def has_label_names(rows: Any) -> bool:
    """Return whether rows are a data set of `datasets` that names its labels."""
    features = getattr(rows, "features", None)
    if not isinstance(features, Mapping) or not hasattr(rows, "num_rows"):
        return False
    from train.data.records.formats import class_names  # imports datasets

    return bool(class_names(features))


def parquet_of(rows: Any) -> bytes:
    """Return a data set of `datasets` as a Parquet file, with the names of its labels."""
    import pyarrow.parquet

    file = io.BytesIO()
    table = rows.with_format("arrow")[:]
    # without the fingerprint, which is not that of the content
    pyarrow.parquet.write_table(
        table.replace_schema_metadata(rows.features.arrow_schema.metadata), file
    )
    return file.getvalue()


def report(*runs: str, output: str | None = None, imports: Sequence[str] = ()) -> Path:
    """Write the report on runs, of which the others are compared with the first, and return the path of its page."""
    arguments = [*flags(imports), *values(runs)]
    if output is not None:
        arguments.append(f"--output={output}")
    said = done("report", arguments)
    return Path(said.removeprefix("report: "))


def compare(*runs: str, imports: Sequence[str] = ()) -> Any:
    """Return a pandas.DataFrame with a row for each run: settings in which they differ, scores, speed, time and cost.

    A score is that of the exported weights or, without an export, of the last evaluation. Unknown numbers are NaN, as
    are the scores of a task of your own without its file in `imports`, which is run in this process. Raises InputError
    if one is no run folder.
    """
    from train.observe.report.run import beside, read_run, tell_apart  # imports pandas
    from train.run import own

    for path in imports:
        own.take(path)
    check(bool(runs), "there is nothing to compare: give the run_dir of each run")
    found = [read_run(open_folder(location, S3Config())) for location in values(runs)]
    tell_apart(found)
    return beside(found)


def ended_run(command: str, arguments: list[str], ranks: int) -> Result:
    """Run a command that trains to its end, and return the run."""
    cfg = composed(command, arguments)
    location = str(cfg["run_dir"])
    folder = open_folder(location, S3Config(**cfg["s3"]))
    before = read_outcome(folder)
    code, said = call(command, arguments, ranks=ranks)
    now = read_outcome(folder)
    # torchrun's exit code is the same for a stop and a failure
    ended = now if now != before else {}
    if code != DONE and ended.get("outcome") != "stopped":
        raise Failure(str(ended.get("reason") or said))
    evaluations = []
    for line in read_lines(folder):
        if line["kind"] == "eval":
            metrics = {key: value for key, value in line.items() if key not in NO_METRICS}
            evaluations.append(metrics)
    export = None
    if folder.names("export/"):
        export = f"{location.rstrip('/')}/export"
    scores = {}
    if evaluations:
        from train.observe.report.run import final_scores, read_run  # imports pandas

        scores = final_scores(read_run(folder))
    return Result(
        run_dir=location,
        outcome=str(now["outcome"]),
        step=int(now["step"] or 0),
        metrics=evaluations,
        scores=scores,
        export=export,
        report=report_of(location),
    )


def report_of(location: str) -> str | None:
    """Return the path of the page that a report on this run alone has by default, if it is there."""
    folder = Path(f"{location.rstrip('/').rpartition('/')[2]}-report")
    if not is_s3(location):
        folder = local_path(location) / "report"
    page = folder / "report.html"
    return str(page) if page.is_file() else None


def prepare(settings: Sequence[str]) -> str:
    """Prepare a corpus as `baretrain prepare` does. Returns the location of the shards, for data.path."""
    settings = values(settings)
    done("prepare", settings)
    return str(composed("prepare", settings)["output"])


def predict(
    model: str,
    rows: str | Mapping[str, Any] | Iterable[Any] | Path,
    *,
    options: Sequence[str] = (),
    imports: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return a model's prediction for each row, as `baretrain predict` makes it.

    `model` is a run, a transformers folder or a Hub id. `rows` are texts, or mappings from column names to values: one,
    or a list, generator, array, data frame or data set of them. A Path names a file of rows. `options` are settings of
    the command.
    """
    is_file = isinstance(rows, Path)
    lines = [] if is_file else lines_of(rows)
    if not is_file and not lines:
        return []
    with TemporaryDirectory() as folder:
        output = Path(folder, "answers.jsonl")
        given = [f"data.path={quoted(str(rows))}"]
        if not is_file:
            given = written_rows(lines, Path(folder, "rows.jsonl"))
        arguments = [*values([model]), *given, f"--output={output}", *values(options)]
        try:
            done("predict", [*arguments, *flags(imports)], without=f"{folder}/")
        except (InputError, Failure) as error:
            raise type(error)(str(error).replace(f"{folder}/", "")) from None
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def written_rows(lines: Sequence[str | Mapping[Any, Any]], file: Path) -> list[str]:
    """Write rows to a file, and return the settings that name it. Raises InputError if only some are texts."""
    are_texts = {isinstance(line, str) for line in lines}
    check(len(are_texts) == 1, "some rows are texts and others are not: give rows of one kind")
    file.write_bytes(json_text(lines))
    settings = [f"data.path={file}"]
    if are_texts == {True}:
        settings.append("data.columns.text=text")
    return settings


def evaluate(
    model: str, settings: Sequence[str] = (), *, ranks: int = 1, imports: Sequence[str] = ()
) -> dict[str, float]:
    """Return the metrics of a run or another model on validation data, as `baretrain evaluate` does."""
    with TemporaryDirectory() as folder:
        output = Path(folder, "metrics.json")
        arguments = [*values([model, *listed(settings)]), f"--output={output}", *flags(imports)]
        done("evaluate", arguments, ranks=ranks)
        metrics: dict[str, float] = json.loads(output.read_bytes())["metrics"]
        return metrics


# ---- rows ----------------------------------------------------------------------------------------------------------


def lines_of(rows: Any) -> list[str | Mapping[Any, Any]]:
    """Return rows of any usual kind as texts and mappings. Raises InputError if they are something else."""
    if isinstance(rows, str | Mapping):
        is_file = isinstance(rows, str) and " " not in rows and rows.endswith(FILES)
        check(
            not is_file,
            f"{rows!r:.80} seems to be a file: give it as a Path, or a text as a list, [{rows!r:.80}]",
        )
        rows = [rows]
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # a data frame of pandas
        # pandas has NaN, NaT or NA for a missing value, and numbers beside one are fractions
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    is_ordered = isinstance(rows, Iterable) and not isinstance(rows, set | frozenset)
    check(is_ordered, f"rows are of type {type(rows).__name__}: {KINDS}")
    lines = list(rows)
    for number, line in enumerate(lines, 1):
        check(
            isinstance(line, str | Mapping),
            f"row {number} is of type {type(line).__name__}: {KINDS}",
        )
    return lines


def json_text(rows: Iterable[str | Mapping[Any, Any]]) -> bytes:
    """Return rows as lines of JSON; a text becomes {"text": ...}. Raises InputError if a value cannot be written."""
    lines = []
    for row in rows:
        by_name = {"text": row}
        if isinstance(row, Mapping):
            by_name = {str(key): value for key, value in row.items()}
        try:
            lines.append(json.dumps(by_name, default=plain_value))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"a row cannot be written as JSON: {error}") from None
    return "".join(f"{line}\n" for line in lines).encode()


def plain_value(value: Any) -> Any:
    """Return a value of numpy, pandas or the standard library as JSON has it. Raises TypeError if it is none."""
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, Decimal | Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is neither text nor number")


# ---- processes -----------------------------------------------------------------------------------------------------


def flags(imports: Sequence[str]) -> list[str]:
    return [f"{FLAG}={path}" for path in listed(imports)]


def listed(values: Iterable[str]) -> list[str]:
    """Return the values, which a generator yields once. Raises InputError if they are not a list of texts."""
    # The characters of a string, or the keys of a dict, would become values.
    is_list = not isinstance(values, str | Mapping)
    given = list(values) if is_list else []
    are_texts = all(isinstance(each, str) for each in given)
    check(
        is_list and are_texts,
        f"{values!r:.80} must be a list of texts, such as ['key=value']",
    )
    return given


def values(given: Iterable[str]) -> list[str]:
    """Return values for a command line. Raises InputError if one would be read as a flag, such as --import=FILE."""
    texts = listed(given)
    wrong = next((text for text in texts if text.startswith("-")), None)
    check(
        wrong is None, f"{wrong!r} begins with '-': a flag cannot stand here; begin a path with ./"
    )
    return texts


def composed(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the complete settings that a command composes from these arguments. Raises Failure if it fails."""
    words = [sys.executable, "-m", "train", command, *arguments, "--cfg=job"]
    env = processes.with_this_code(os.environ)
    ended = subprocess.run(
        words,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    said = judged(ended.returncode, ended.stderr)
    if ended.returncode != DONE:
        raise Failure(said)
    settings: dict[str, Any] = yaml.safe_load(ended.stdout)
    return settings


def done(command: str, arguments: Sequence[str], *, ranks: int = 1, without: str = "") -> str:
    """Run a command to its end, and return its last line. Raises Failure if it fails.

    Lines `without` this folder, which the user does not know, are printed; all are if it is empty.
    """
    code, said = call(
        command,
        arguments,
        ranks=ranks,
        without=without,
    )
    if code != DONE:
        raise Failure(said)
    return said


def call(
    command: str, arguments: Sequence[str], *, ranks: int, without: str = ""
) -> tuple[int, str]:
    """Run a command and print its output. Returns its exit code and its last error line."""
    with TemporaryDirectory() as logs:
        torchrun = [
            "-m",
            "train.machine.local_torchrun",
            f"--nproc-per-node={ranks}",
            f"--log-dir={logs}",
        ]
        words = [*(torchrun if ranks > 1 else []), "-m", "train", command, *arguments]
        env = {**processes.with_this_code(os.environ), "PYTHONUNBUFFERED": "1"}
        process = processes.start([sys.executable, *words], env=env, output=subprocess.PIPE)
        said = deque[str](maxlen=LINES)
        try:
            show(process, said, without)
        except KeyboardInterrupt:
            # a notebook's interrupt signals only its kernel, not the command
            process.send_signal(signal.SIGINT)
            show(process, said, without)
            raise
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
        for path in Path(logs).rglob(REJECTION):  # torchrun returns 1 for every failure
            judged(REJECTED, path.read_text(errors="replace"))
        return process.returncode, judged(process.returncode, "".join(said))


def show(process: subprocess.Popen[bytes], said: deque[str], without: str) -> None:
    """Print the lines of a process `without` a folder until it ends, and append all to `said`."""
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line.decode(errors="replace"))
        if not without or without not in said[-1]:
            sys.stdout.write(said[-1])  # the command has made it visible
            sys.stdout.flush()


def judged(code: int, said: str) -> str:
    """Return the last error line of a command's output. Raises InputError with this line if `code` is REJECTED."""
    errors = re.findall(r"^error: (.*)$", said, re.M)
    reason = (errors or said.strip().splitlines() or [f"exit code {code}"])[-1]
    if code == REJECTED:
        raise InputError(reason)
    return reason
