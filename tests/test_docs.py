"""The commands of README and docs, taken from their text: each is run once on small files, or at least read.

What is run is shortened by settings that are added to it, and `s3://bucket` is a folder of this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from forks import launch as torchrun
from forks import run_forked
from running import ROOT, prepare_config, write_corpus

from ami.config import AmiConfig
from launch.config import LaunchConfig
from launch.schedulers import SETTINGS
from train import prepare
from train.bench.config import BenchConfig
from train.cli import compose
from train.compare.__main__ import CompareConfig
from train.config import PrepareConfig, TrainConfig

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"(?:\.venv/bin/)?python -m (?:train|launch|ami)[.\w]* \S|torchrun \S.* -m train[.\w]* \S")
SCHEMAS = {
    "train": TrainConfig,
    "train.prepare": PrepareConfig,
    "train.records": TrainConfig,
    "train.precompile": TrainConfig,
    "train.doctor": TrainConfig,
    "train.bench": BenchConfig,
    "train.compare": CompareConfig,
    "launch": LaunchConfig,
    "ami": AmiConfig,
}
# Commands that are only read here, their settings checked against the schemas and their flags against the help.
ONLY_READ = {
    r"trn1|p5\.|backend=xla": "devices that are not here",
    r"tweets_trainium|albert_pretrain|squad|mnli|wiki_books|train\.hub": "data or models of the Hugging Face hub",
    r"launch (list|status|logs|stop|resume|cancel|clean|quota|iam)\b": "a run that was launched, or AWS",
    r"-m ami": "AWS",
    r"corpus=pydocs|train\.compare": "half a minute: .ci/run and tests/test_compare.py run them",
    r" \.\.\.": "settings of the reader's own",
}
# What stands for things of the reader's own, and what is made for it here.
HERE = {"s3://bucket/": "bucket/", "/shared/": "shared/", "RUN": "runs/tweets", "FOLDER": "data/demo"}
HERE |= {"s3://BUCKET/": "bucket/"}
HERE |= {"=myaccount": "=ec2", "=mysite": "=slurm", "diff 1000 2000": "diff 2 4", "new.csv": "tests/data/tweets.csv"}
# What makes a run short, by module. The demo's model learns in a second.
SHORT = {
    "train": "max_steps=4 max_epochs=null eval_every=2 checkpoint.every=2 log_every=2 data.num_workers=0".split(),
    "train.bench": ["steps=2", "warmup=1", "windows=1"],
    "train.compare": ["max_steps=2", "eval_every=2", "log_every=1"],
    "train.prepare": ["tokenizer.vocab_size=120", "validation_fraction=0.25"],
}
# What a run must have, for commands of which the page says only what is special.
REQUIRED = {"train": "run_dir=runs/any data.path=any model.init_from=any max_steps=2 micro_batch_size=1".split()}
REQUIRED |= dict.fromkeys(("train.precompile", "train.bench", "train.compare", "train.doctor"), REQUIRED["train"])
REQUIRED["train.prepare"] = []


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, in code blocks and in sentences."""
    text = page.read_text()
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.S | re.M)
    sentences = re.split(r"^ *```\w*$", text, flags=re.M)[::2]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = [" ".join(each.split()) for part in sentences for each in re.findall(r"`([^`]+)`", part)]
    values = dict(re.findall(r'\b([A-Z])="([^"]+)"', text))
    for line in [*lines, *inline]:
        line = re.sub(r"\$([A-Z])\b", lambda found: values.get(found[1], values.get("T", "")), line).strip()
        if COMMAND.match(line) and "<" not in line and "|" not in line.partition("#")[0]:
            yield re.sub(r"^\.venv/bin/", "", line)


def words(command: str) -> tuple[str, list[str], int]:
    """A command's module, its arguments and its number of ranks; an ellipsis is left out, and what is optional."""
    for theirs, ours in HERE.items():
        command = command.replace(theirs, ours)
    command = re.sub(r" \[[^=]*\]", "", command).replace("-...", "-0123456789abcdef0")
    given = [each for each in shlex.split(command, comments=True) if each != "..."]
    at = given.index("-m")
    ranks = [int(each.partition("=")[2]) for each in given[:at] if each.startswith("--nproc-per-node=")]
    return given[at + 1], given[at + 2 :], ranks[0] if ranks else 1


FOUND = {command: page.stem for page in PAGES for command in commands(page)}
READ = [command for command in FOUND if any(re.search(each, command) for each in ONLY_READ)]
RUN: dict[str, list[str]] = {}
for command, page in FOUND.items():
    if command not in READ:
        RUN.setdefault(page, []).append(command)


@pytest.fixture(scope="module", autouse=True)
def schemas() -> None:
    compose.add_schema(BenchConfig, "bench", [])
    compose.add_schema(CompareConfig, "compare", [])
    compose.add_schema(LaunchConfig, "launch", [("cluster", name, kind) for name, kind in SETTINGS.items()])
    compose.add_schema(AmiConfig, "ami", [])


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, made short."""
    module, arguments, ranks = words(command)
    arguments = [*arguments, *SHORT.get(module, [])] if "launch" not in module else arguments
    given = [module, *arguments] if ranks == 1 else torchrun(module, arguments, ranks=ranks)
    return run_forked(given, {**os.environ, "PYTHONPATH": str(ROOT)}, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages speak of: texts, tables, the demo's data and run, and runs that others made."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "texts").mkdir()
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "docs").symlink_to(ROOT / "docs")
    corpus = write_corpus(folder / "texts" / "a.txt")
    prepare.prepare(prepare_config(folder / "data" / "demo", corpus))
    reviews = [f"{word} {times} times,{stars}" for times in range(40) for word, stars in (("fine", 5), ("bad", 1))]
    (folder / "reviews.csv").write_text("\n".join(["body,stars", *reviews]))
    tweets = "experiment=demo_tweets data.path=tests/data/tweets.csv model.init_from=runs/demo run_dir=runs/tweets"
    for made in ("experiment=demo run_dir=runs/demo", tweets):
        ended = run(folder, f"python -m train {made}")
        assert ended.returncode == 0, ended.stderr
    for copied in ("runs/native", "runs/compiled", "bucket/runs/one"):
        shutil.copytree(folder / "runs" / "demo", folder / copied)
    return folder


def test_what_is_said_to_be_only_read_is_there() -> None:
    assert [each for each in ONLY_READ if not any(re.search(each, command) for command in READ)] == []
    assert sum(map(len, RUN.values())) > 20


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(folder: Path, page: str) -> None:
    for command in RUN[page]:
        ended = run(folder, command)
        finds_faults = "train.doctor" in command  # of this machine
        assert ended.returncode in ((0, 1) if finds_faults else (0,)), f"{command}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.parametrize("command", READ)
def test_the_settings_and_flags_of_a_command_exist(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, arguments, _ = words(command)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, of_run = arguments[:at], arguments[at + 1 :]
    flags = [each for each in own if each.startswith("-")]
    settings = ["sweep=true" if each == "--sweep" else each for each in own if "=" in each or each == "--sweep"]
    if settings:
        compose.load_config(SCHEMAS[module], [*REQUIRED.get(module, []), *settings])
    if of_run:
        schema = "train.prepare" if "prepare=true" in own else "train"
        compose.load_config(SCHEMAS[schema], [*REQUIRED[schema], *of_run])
    if flags or not settings:
        package = find_spec(module).submodule_search_locations
        subcommand = own[:1] if module in ("launch", "ami") and flags + own[1:] else []
        monkeypatch.setattr(sys, "argv", [module, *subcommand, "--help"])
        with pytest.raises(SystemExit) as ended:
            import_module(f"{module}.__main__" if package else module).main()
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert [each for each in flags if each not in said] == []


def test_the_list_of_versions_is_what_its_command_prints() -> None:
    (command,) = re.findall(r"^(python -c .*) > constraints-trn1.txt$", (ROOT / "docs" / "images.md").read_text(), re.M)
    words = [sys.executable, *shlex.split(command)[1:]]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert printed.stdout == (ROOT / "constraints-trn1.txt").read_text()
