"""What users type wrongly: every command answers with exit code 2 and one line that names it, and writes nothing.

Rows are commands that are called in this process; none opens a device. Most rows are made from the settings themselves:
for each of them values that it cannot have.
"""

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import finished_run
import pytest
from rejections import rejects
from running import ROOT

from train import entry
from train.config import InputError, PrepareConfig, TrainConfig
from train.machine import host
from train.run import attempt as run_attempt
from train.run import compose as cli
from train.storage.folders import local_path
from train.tools import checkpoints, doctor, precompile, predict, prepare, records, shards
from train.tools import compare as compare_command
from train.tools import hub as hub_command
from train.tools import report as report_command
from train.tools.bench import command as bench_command

MAINS = {
    "train": entry.main,
    "prepare": prepare.main,
    "records": records.main,
    "report": report_command.main,
    "compare": compare_command.main,
    "doctor": doctor.main,
    "shards": shards.main,
    "checkpoints": checkpoints.main,
    "predict": predict.main,
    "hub": hub_command.main,
    "precompile": precompile.main,
    "bench": bench_command.main,
}
LONG = "x" * 300
TRAIN = "run_dir=new max_steps=6 global_batch_size=8 data.num_workers=0 model=albert_tiny data.path=DATA".split()
PREPARE = [
    "output=new",
    "corpus=text",
    "corpus.path=TEXT",
    "seq_len=32",
    "tokenizer.vocab_size=120",
]
UNQUOTED = "compare.variants={a: 'seed=\"1'}"
SHORT = "run_dir=r data.path=d max_steps=1 micro_batch_size=8"
BENCH = "model=albert_tiny data.path=DATA global_batch_size=8 backend.device=cpu"
RECORDS = [
    "task=classify",
    "data=csv",
    "data.path=CSV",
    "model.tokenizer=DATA/tokenizer",
    "seq_len=32",
]

ELSEWHERE = {  # names in transformers' Trainer, and ours
    "lr": "optim.lr",
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "max_epochs",
    "fp16": "backend.precision",
}

# What is typed after TRAIN, and what the one line holds.
TYPED = [
    ("run_dir=a\nb", "must be one line"),
    # ---- not key=value
    ("=5", "=5 is not key=value"),
    (f"seed={10**400}", "000 must be a finite number below 2^63"),
    ("seed", "seed is not key=value"),
    ("seed =1", "seed =1 is not key=value"),
    ("run_dir=a (1)", "quote a value with special characters"),
    ("optim=adamw optim.lr=1", "is not key=value"),
    ("model@x=albert_tiny", "model@x"),
    ("+new=1", "+new=1 is not key=value"),
    ("~max_steps", "~max_steps is not key=value"),
    # ---- names
    ("max_step=3", "did you mean max_steps?"),
    *((f"export={value}", "export must be true or false") for value in ("3", "maybe")),
    ("checkpoint={best: 3}", "checkpoint.best must be true or false"),
    ("seed=null", "seed=null: seed must be a whole number"),
    ("best={metric: null}", "best.metric must be text"),
    ("optim.lrr=1", "optim.lrr is not a setting; did you mean optim.lr?"),
    *(
        (f"{name}=1", f"{name} is not a setting; did you mean {ours}?")
        for name, ours in ELSEWHERE.items()
    ),
    ("optim.lr.x=1", "optim.lr must be a number"),
    ("model/foo=bar", "model/foo is not a setting"),
    ("model/foo.x=bar", "model/foo.x=bar is not key=value"),
    ("data.label_map={a: b}", "data.label_map is not a setting of the data chosen here"),
    (
        "backend.batches_per_execution=3",
        "not a setting of the backend chosen here; backend=xla has it",
    ),
    # ---- options of groups
    *(
        (f"model={value}", f"model={value}: there is no such model")
        for value in ("5", "", "../x", "/etc/passwd", "[a]")
    ),
    *(
        (f"{group}={value}", f"{group}={value}: there is no such {group}")
        for group in ("task", "data", "model", "optim", "backend", "parallel", "instance")
        for value in ("null", "nosuch")
    ),
    *(
        (f"experiment={value}", f"experiment={value}")
        for value in ("nosuch", "", "../experiment/demo", "[demo]")
    ),
    ("task=mlm_schema", "there is no such task"),
    ("task.kind=classify", "task.kind=classify: task.kind is set by task=..., and not alone"),
    ("optim={name: lamb}", "optim.name is set by optim=..., and not alone"),
    # ---- more than one value, and lookups
    ("max_steps=1,2", "sweeps are not supported"),
    ("run_dir=${a}", "run_dir=${a}: references are not resolved"),
    ("run_dir=TEXT/run", "TEXT/run"),
]

WSD = ["optim.schedule=wsd", "optim.warmup_steps=4"]
VALUES = [
    # ---- beyond a limit
    ("task.mask_rate=1.5", "task.mask_rate=1.5 must be below 1"),
    ("checkpoint.keep=1", "checkpoint.keep=1 must be 0 (all) or at least 2"),
    (
        ["backend=xla", "backend.precision=fp16"],
        "fp16 is not known; choose one of: auto, fp32, bf16",
    ),
    # ---- values that only other values rule out
    ("max_steps=null", "the run has no length"),
    ("global_batch_size=null", "the batch has no size"),
    (["global_batch_size=7", "micro_batch_size=2"], "micro_batch_size=2"),
    (
        ["backend=xla", "micro_batch_size=2", "backend.batches_per_execution=3"],
        "execution=3 does not divide",
    ),
    (["backend=xla", "backend.grad_compression=bf16"], "leave it out with backend=xla"),
    ("global_batch_size=1000000", "fewer than one batch of 1000000"),
    ("optim.warmup_steps=7", "optim.warmup_steps=7"),
    ("task=classify", "task=classify learns from records"),
    ("optim.head_lr=1", "optim.head_lr=1"),
    ("optim.schedule=wsd", "optim.schedule=wsd needs optim.warmup_steps"),
    ("optim.decay_fraction=0.2", "optim.decay_fraction=0.2 needs optim.schedule=wsd"),
    ([*WSD, "optim.decay_fraction=0.5"], "optim.warmup_steps=4 lasts beyond step 3 of 6"),
    ("best.metric=f2", "best.metric=f2"),
    ("seq_len=64", "seq_len=64"),
    ("task.mask_rate=0.99", "task.mask_rate=0.99 leaves no tokens to read in sequences of"),
    ("hub.push_to=a/b/c", "hub.push_to=a/b/c"),
    ("model.num_heads=3", "model.num_heads=3"),
    # ---- trackers
    (
        "telemetry.trackers=[neptune]",
        "neptune is not known; choose one of: tensorboard, mlflow, wandb",
    ),
    ("telemetry.trackers=[mlflow]", "set MLFLOW_TRACKING_URI"),
    # ---- models
    ("model.hidden_size=4611686018427387904", "hidden_size 4611686018427387904"),
    ("model.hidden_size=1000000", "weights alone take about"),
    ("model.vocab_size=4", "model.vocab_size=4 is smaller than the tokenizer's"),
    ("model.max_positions=8", "longer than the model's 8 positions"),
    (
        ["model=any", "model.architecture=bert", "model.num_layers=1000000000"],
        "num_layers 1000000000",
    ),
    ("model.architecture=nosuch", "model.architecture=nosuch"),
    (["model=any", "model.architecture=clip"], "clip"),
    (["model=any", "model.architecture=bert", "model.embedding_size=8"], "model.embedding_size=8"),
    (
        ["model=any", "model.architecture=longformer", "model.attention=sdpa"],
        "transformers has eager for longformer",
    ),
    ("model.attention=flash_attention_2", "model.attention=flash_attention_2 needs a CUDA device"),
    ("model.pretrained=EMPTY", "that folder is empty"),
    ("model.pretrained=DATA", "neither a run"),
    (
        ["model.pretrained=/", "model.initializer_range=0.1"],
        "initializer_range=0.1 is for a new model",
    ),
    # ---- places
    (f"run_dir={LONG}", "File name too long"),
    ('run_dir="a\nb"', "run_dir='a\\nb' must be one line"),
    ('data.path="a\x1b[31mb"', "data.path='a\\x1b[31mb'"),
    ('model.pretrained="a\udce9b"', "model.pretrained='a\\udce9b'"),  # a byte that is not UTF-8
    ("run_dir=http://x/y", "http://x/y"),
    ("data.path=nosuch", "nosuch"),
    ("s3.endpoint=http://", "s3.endpoint=http:// must be a server's address"),
]

FLAGS = [
    ("train", "--max_steps=5", "--max_steps=5 is not a flag; see --help. Settings have no dashes"),
    ("train", "--frob", "--frob is not a flag"),
    *(
        ("train", f"{SHORT} {given} --cfg job", given)
        for given in ("seed=${a}", "optim.lr=-1", "-m")
    ),
    ("train", "", "is not set"),
    ("train", "run_dir=r", "data.path is not set"),
    ("prepare", "", "output is not set"),
    (
        "prepare",
        "output=new corpus=text corpus.path=TEXT tokenizer.pretrained=/nosuch",
        "tokenizer /nosuch",
    ),
    ("train", "experiment=demo data.path=DATA 'run_dir=$HOME/x'", "$HOME is not expanded here"),
    (
        "prepare",
        "corpus=text corpus.path=TEXT 'output=s3://b/$NAME'",
        "$NAME is not expanded here",
    ),
    ("records", "data.path=DATA", "baretrain shards"),
    (
        "records",
        "task=classify data=csv data.path=nosuch.csv model.tokenizer=DATA/tokenizer",
        "nosuch.csv",
    ),
    ("records", "task=classify data=csv data.path=CSV", "model.tokenizer is not set"),
    (
        "records",
        "task=classify data=csv data.path=CSV model.tokenizer=/nosuch",
        "model.tokenizer=/nosuch",
    ),
    ("report", "nosuch", "nosuch is not a folder"),
    ("report", "EMPTY", "has no metrics.jsonl"),
    ("report", "RUN --output TEXT/x", "TEXT/x"),
    (
        "predict",
        "RUN --output=a.csv --output=b.csv",
        "--output: it is given twice, the second time with b.csv",
    ),
    ("compare", "", "run_dir is not set"),
    ("compare", "RUN seed=1", "RUN is not key=value"),
    ("compare", "seed=1 --tolerance", "--tolerance is not a flag"),
    ("compare", "experiment=demo compare.variants=none", "compare.variants must be a table"),
    ("compare", "experiment=demo 'compare.variants={a: seed=1}'", "only one variant"),
    (
        "compare",
        "experiment=demo 'compare.variants={a: nosuch=1}'",
        "variant a: nosuch is not a setting",
    ),
    (
        "compare",
        "experiment=demo 'compare.variants={../a: seed=1}'",
        "is not the name of a file",
    ),
    (
        "compare",
        "experiment=demo 'compare.variants={a: run_dir=x}'",
        "must be a key=value setting, and not run_dir",
    ),
    (
        "compare",
        "experiment=demo 'compare.variants={a: nosuch}'",
        "nosuch must be a key=value setting",
    ),
    ("train", "optim=adamw optim=lamb", "optim=adamw and optim=lamb choose the same thing"),
    (
        "compare",
        "experiment=demo 'compare.variants={a: optim=adamw optim=lamb}'",
        "optim=adamw and optim=lamb choose",
    ),
    ("compare", f"experiment=demo {shlex.quote(UNQUOTED)}", "No closing quotation"),
    ("train", "compare.variants={a: seed=1}", "compare.variants"),
    ("bench", f"{BENCH} stepz=3", "stepz is not a setting; did you mean steps?"),
    ("bench", f"{BENCH} output=/nowhere/a.json", "/nowhere is not a writable folder"),
    ("doctor", "--instance trn9", "trn9"),
    ("shards", "ls nosuch", "nosuch"),
    ("shards", "verify TEXT", "TEXT"),
    ("shards", "head DATA -n 0", "-n 0"),
    ("shards", "head DATA --split test", "'test'"),
    ("checkpoints", "nosuch", "nosuch is not a run folder"),
    ("checkpoints", "RUN export", "FOLDER"),
    ("checkpoints", "RUN export TEXT", "is a file; choose another folder"),
    ("checkpoints", "RUN export DATA", "is not empty; choose another folder"),
    ("predict", "RUN", "--text"),
    ("predict", "RUN --text a data.path=b", "give data.path=FILE, or texts with --text"),
    ("predict", "RUN --text a --output x.txt", "x.txt"),
    ("predict", "RUN --text a --output s3://b/x.csv", "s3://b/x.csv"),
    ("predict", "/nosuch --text a", "/nosuch"),
    ("hub", "RUN --to a/b/c", "--to a/b/c"),
    ("hub", "RUN --to 'a/b\nc'", "--to"),
    ("hub", "RUN --to a/b --public --private", "--private"),
    ("hub", "RUN --to a/b", "no exported model"),
    ("precompile", "experiment=demo", "give the command of the run"),
]

PATHS = [
    ("report", "{}"),
    ("shards", "ls {}"),
    ("checkpoints", "{}"),
    ("checkpoints", "RUN export {}"),
    ("predict", "{} --text a"),
]
NO_PATHS = {"'a\nb'": "must be one line", "''": "a path is empty", LONG: "File name too long"}
NO_PATHS |= {
    url: f"{url} is neither a URL"
    for url in ("s3:/b/x", "s3:b/x", "S3:/b", "gs:b", "file:x", "a+b:/x")
}
FLAGS += [
    (command, words.format(path), says)
    for command, words in PATHS
    for path, says in NO_PATHS.items()
]

PREPARATIONS = [
    ("corpus=nosuch", "corpus=nosuch"),
    ("corpus=files_schema", "corpus=files_schema"),
    ("corpus.kind=hf", "corpus.kind=hf: corpus.kind is set by corpus=..., and not alone"),
    ("corpus.errors=ignore", "corpus.errors=ignore"),
    ("corpus.encoding=nosuch", "nosuch"),
    ("corpus.separator='('", "("),
    ("seq_len=65536", "seq_len=65536"),
    ("validation_fraction=1", "validation_fraction=1"),
    ("merge=true", "no parts to merge"),
    (["merge=true", "processes=2"], "merge=true prepares nothing"),
    *((f"part={part}", f"part={part}") for part in ("0/3", "4/3", "1.5/3", "1/2/3")),
    (f"output={LONG}", "File name too long"),
    ("output=DATA", "DATA"),
    ("output=http://x/y", "http://x/y"),
    ("output=s3:/bucket/x", "s3:/bucket/x is neither a URL"),
    # ---- what is known only once the text is read
    ("corpus.path=BLANK", "holds no text"),
    (["output=new/deeper", "corpus.path=BROKEN", "corpus.encoding=utf-16"], "UTF-16"),
    ("tokenizer.vocab_size=50000", "Vocabulary size too high"),
]

TABLES = [
    ("data.format=xml", "data.format=xml"),
    ("data.delimiter=ab", "data.delimiter=ab"),
    ("data.columns.text=nosuch", "nosuch"),
    ("data.labels=[0,0]", "twice"),
    ("data.labels=[a,b]", "the labels are a, b"),
    ("data.lengths=[32,16]", "data.lengths=[32, 16]"),
    ("data.lengths=[64]", "data.lengths has 64"),
    (
        f"data.lengths={[*range(2, 301)]}".replace(" ", ""),
        "data.lengths has 299 lengths, but at most 255",
    ),
    ("data.more_validation={train: a.csv}", "data.more_validation"),
    ("data.label_map=negative", "data.label_map must be a table"),
    ("data.labels=(", "data.labels=(: data.labels must be a list"),
    ("data.path=BROKEN", "BROKEN cannot be read as Parquet"),
    ("seq_len=1", "seq_len=1"),
    ("seq_len=100000", "seq_len=100000"),
    ("task.class_weights=[1,-1]", "task.class_weights"),
    ("model.tokenizer=EMPTY", "that folder is empty"),
    ("task=qa", "no column question"),
]


def test_a_control_character_in_the_environment_is_rejected_too(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "instance_stores", list)
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/a\nb")
    rejects("XDG_CACHE_HOME='/tmp/a", host.cache_root)
    # So is one in the name of the folder that a relative path begins in.
    (tmp_path / "a\nb").mkdir()
    monkeypatch.chdir(tmp_path / "a\nb")
    rejects("must be one line", local_path, "rr")


# ---- values made from the settings themselves ----------------------------------------------------------------------

NO_NUMBER = ("text", "[]", "{a: 1}", "''", "nan", "inf", "-inf", "1e300", "-1")
BAD: dict[object, tuple[str, ...]] = {
    int: (*NO_NUMBER, "1.5", "true", "9223372036854775808", "-9223372036854775809"),
    float: NO_NUMBER,
    bool: ("text", "[]", "{a: 1}", "''", "1.5"),
    str: ("[]", "[a]", "{a: 1}", "''"),
    Any: ("text", "1", "''", "{a: 1}", "[a]", "[2,1]", "null"),  # data.lengths
    list: ("text", "1", "''", "{a: 1}"),
    tuple: ("text", "1", "''", "{a: 1}", "[1]", "[a,b]", "[nan,nan]"),
    dict: ("text", "1", "[]", "[a]"),
    type: ("text", "1", "null", "[]", "{nosuch: 1}"),  # a section
}
ANY_NUMBER = ("task.null_threshold",)  # may be negative
VARIANTS = {
    "train": [
        TRAIN,
        [*TRAIN, "backend=xla"],
        [*TRAIN, *RECORDS],
        [*TRAIN, *RECORDS[1:], "task=qa"],
    ],
    "prepare": [PREPARE],
}


RIGHT = {  # of the values that BAD has for settings of several types
    "corpus.path": ("text", "1", "[a]", "[2,1]"),
    "corpus.validation": ("text", "1", "[a]", "[2,1]", "null"),
    "corpus.weights": ("[2,1]", "null"),
    "data.columns.label": ("text", "1", "[a]", "[2,1]"),
    "task.class_weights": ("[2,1]", "null"),
    "task.positive_weights": ("[2,1]", "null"),
    "task.threshold": (),
}


def settings_of(config: Any, prefix: str = "") -> Iterator[tuple[str, object, bool]]:
    """Each setting and section: its name, its type, and whether it may be null."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        key = f"{prefix}{item.name}"
        value = getattr(config, item.name)
        hint = hints[item.name]
        if dataclasses.is_dataclass(value):
            if item.name not in GROUPS:
                yield key, type, False
            yield from settings_of(value, f"{key}.")
            continue
        options = [each for each in typing.get_args(hint) if each is not type(None)]
        optional = type(None) in typing.get_args(hint)
        plain = options[0] if optional else hint
        yield key, typing.get_origin(plain) or plain, optional


GROUPS = ("task", "data", "model", "optim", "backend", "parallel", "instance", "corpus")


def made_rows(command: str, given: list[str], known: set[tuple[str, object]]) -> Iterator[str]:
    config = cli.load_config(TrainConfig if command == "train" else PrepareConfig, given)
    for key, kind, optional in settings_of(config):
        if (key, kind) not in known:
            known.add((key, kind))
            bad = [*BAD[kind], *([] if optional or kind is type else ["null"])]
            right = RIGHT.get(key, ()) if kind is Any else ("-1",) if key in ANY_NUMBER else ()
            yield from (f"{key}={value}" for value in bad if value not in right)


# ---- running them --------------------------------------------------------------------------------------------------


@pytest.fixture
def places(
    prepared: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """What the capital words of the rows stand for. The current folder is an empty one."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.csv").write_text(
        "text,label\n" + "".join(f"ba be bo {n},{n % 2}\n" for n in range(40))
    )
    (tmp_path / "blank.txt").write_text("\n\n   \n")
    (tmp_path / "broken.parquet").write_text("PAR1garbagePAR1")
    finished_run.write(tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(run_attempt, "open_backend", opened_a_device)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "cache"))
    names = {
        "BLANK": "blank.txt",
        "EMPTY": "empty",
        "CSV": "table.csv",
        "BROKEN": "broken.parquet",
        "RUN": "run",
    }
    return {"DATA": str(prepared), "TEXT": str(corpus)} | {
        word: str(tmp_path / name) for word, name in names.items()
    }


def opened_a_device(*_: object, **__: object) -> None:
    raise AssertionError("a device was opened")


def filled(text: str, places: dict[str, str]) -> str:
    return re.sub(
        r"\b(DATA|TEXT|BLANK|EMPTY|CSV|BROKEN|RUN)\b", lambda result: places[result[0]], text
    )


# lines before the one that counts
NOTICES = ("[transformers]", "... ", "starting ", "from the weights of ")


def fault(
    command: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> str | None:
    """What is wrong with the answer to a bad command line; None if nothing is."""
    capsys.readouterr()
    code = MAINS[command](arguments)
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith(NOTICES)]
    ok = code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and says in lines[0]
    ok = ok and ("_schema" not in lines[0] or "_schema" in arguments[-1])
    # The claim of a preparation stays, so that the same command can continue it.
    left = {path.name for path in Path.cwd().rglob("*") if path.is_file()}
    ok = ok and left <= {"source.json"}
    for left in Path.cwd().iterdir():
        shutil.rmtree(left)
    return (
        None
        if ok
        else f"{command} {arguments}: {code}, not a line with {says!r}: {captured.err or captured.out}"
    )


def check_rows(
    rows: Iterable[tuple[str, list[str], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [wrong for row in rows if (wrong := fault(*row, capsys)) is not None]
    assert not faults, f"{len(faults)} of them:\n" + "\n".join(faults)


def with_settings(rows, command, given, places):
    """Command lines of `given` and what is typed after it."""
    for typed, says in rows:
        own = [typed] if isinstance(typed, str) else typed
        groups = tuple(
            f"{name}="
            for name in ("model", "task")
            if any(each.startswith(f"{name}=") for each in own)
        )
        # a group is typed once
        words = [
            *(each for each in given if not (groups and each.startswith(groups))),
            *own,
        ]
        yield command, [filled(word, places) for word in words], filled(says, places)


def test_what_is_no_setting_is_rejected_in_one_line(places, capsys):
    check_rows(with_settings(TYPED, "train", TRAIN, places), capsys)


@pytest.mark.parametrize(
    ("command", "given", "rows"),
    [("train", TRAIN, VALUES), ("records", RECORDS, TABLES), ("prepare", PREPARE, PREPARATIONS)],
    ids=["train", "records", "prepare"],
)
def test_a_wrong_setting_is_rejected_in_one_line(command, given, rows, places, capsys):
    check_rows(with_settings(rows, command, given, places), capsys)


@pytest.mark.parametrize("command", MAINS)
def test_wrong_arguments_are_rejected_in_one_line(command, places, capsys):
    rows = [
        (name, shlex.split(filled(typed, places)), filled(says, places))
        for name, typed, says in FLAGS
    ]
    assert {name for name, _, _ in rows} == set(MAINS)
    check_rows([row for row in rows if row[0] == command], capsys)


@pytest.mark.parametrize("command", VARIANTS)
def test_no_setting_takes_what_its_type_rules_out(command, places):
    """Every setting of every section: another type, negative, not finite, too large for 64 bits, null, empty."""
    schema = TrainConfig if command == "train" else PrepareConfig
    known: set[tuple[str, object]] = set()
    wrong = []
    count = 0
    for given in VARIANTS[command]:
        for row in made_rows(command, given, known):
            count += 1
            said = rejection(schema, [*given, row])
            if row.partition("=")[0] not in said or "\n" in said or "Config" in said:
                wrong.append(f"{row}: {said}")
    assert not wrong, "\n".join(wrong)
    assert count > {"train": 800, "prepare": 100}[command]


def rejection(schema: type, words: list[str]) -> str:
    try:
        cli.load_config(schema, words)
    except InputError as error:
        return str(error)
    return "it is taken"


WITHOUT_TORCH = [
    "train experiment=demo data.path=nosuch run_dir=new",
    "train experiment=demo data.path=DATA run_dir=new global_batch_size=32 micro_batch_size=3",
    "train task=classify data=csv data.path=CSV model.tokenizer=/nosuch run_dir=new max_steps=1 micro_batch_size=1",
    "train task=classify data=csv data.path=CSV data.columns.label=nosuch run_dir=new max_steps=1 micro_batch_size=1",
    "records task=classify data=csv data.path=nosuch.csv model.tokenizer=DATA/tokenizer",
    "evaluate ./nosuch",
    "evaluate RUN data.path=nosuch.csv",
    "predict ./nosuch --text=a",
    "predict RUN data.path=nosuch.csv",
]
PROGRAM = """
import shlex, sys
from train.__main__ import main
for line in sys.stdin.read().splitlines():
    code = main(shlex.split(line))
    print(code, "torch" in sys.modules, line)
"""


def test_what_needs_no_torch_is_rejected_before_its_import(places, tmp_path):
    lines = "\n".join(filled(line, places) for line in WITHOUT_TORCH)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=lines,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = ended.stdout.splitlines()
    assert len(told) == len(WITHOUT_TORCH)
    assert [line for line in told if not line.startswith("2 False ")] == []
