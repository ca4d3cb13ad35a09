"""The blocks of README and docs, taken from their text: each is run on small files, or says what it needs and is read.

`bash` and `python` blocks are run, a page from top to bottom, in a folder that holds what `make demo` leaves. The line
`<!-- needs: gpu -->` above a block (of `NEEDS`) says why it is not: then its settings are checked against the schemas
and its flags against the help, as those of commands in sentences are. What is run is shortened by settings that are
added to it, and `s3://BUCKET` is a folder.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from forks import Forked, free_port, run_forked, start_forked
from forks import launch as torchrun
from running import ROOT, prepare_config, write_corpus

from ami.config import AmiConfig
from launch.config import LaunchConfig
from launch.schedulers import SETTINGS
from train.__main__ import COMMANDS
from train.config import PrepareConfig, TrainConfig
from train.machine import processes
from train.run import compose
from train.tools import prepare
from train.tools.bench.config import BenchConfig
from train.tools.compare import CompareConfig

PAGES = {
    page.stem: page.read_text()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
NEEDS = {
    "gpu": "NVIDIA's",
    "trainium": "trn1, trn2 or trn3",
    "aws": "an account",
    "cluster": "Slurm, pcluster or sky",
    "machines": "several, started by hand",
    "hub": "models or data of the Hugging Face Hub",
    "internet": "packages, a clone",
    "root": "an administrator",
    "job": "a run that was launched, or is in progress",
    "minutes": ".ci/run or another test runs it",
}
WIDTH = 76  # columns
COMPOSED = (
    "train",
    "prepare",
    "compare",
    "bench",
    "launch",
)  # commands whose settings need no data
LANGUAGES = {"bash", "python", "text", "yaml", "json", "csv"}
PLACEHOLDERS = re.compile(r"\b(RUN|DATA|MODEL|FOLDER|ADDRESS)\b|\.\.\.")
FENCE = re.compile(r"^(?: *<!-- needs: ([^\n]*) -->\n)? *```([^\n]*)\n(.*?)^ *```$", re.S | re.M)
COMMAND = re.compile(r"(?:[A-Z_]+=\S* )*(?:baretrain [a-z]+ \S|torchrun \S.* -m train \S)")
SCHEMAS: dict[str, type] = dict.fromkeys(
    ("train", "finetune", "records", "doctor", "evaluate", "predict"), TrainConfig
)
SCHEMAS |= {
    "prepare": PrepareConfig,
    "bench": BenchConfig,
    "compare": CompareConfig,
}
SCHEMAS |= {"launch": LaunchConfig, "ami": AmiConfig}
# What stands for things of the reader's own.
HERE = {
    "s3://BUCKET/": "bucket/",
    "=myaccount": "=ec2",
    "=mysite": "=slurm",
    "29500": str(free_port()),
}
# What needs no process of its own.
HERE_TOO = "prepare records report shards checkpoints evaluate predict doctor settings".split()
# What makes a run short, by module. The demo's model learns in a second.
SHORT = {
    "train": "max_steps=4 max_epochs=null eval_every=2 checkpoint.every=2 log_every=2 data.num_workers=0".split(),
    "bench": ["steps=2", "warmup=1"],
    "compare": ["max_steps=2", "eval_every=2", "log_every=1"],
    "prepare": ["tokenizer.vocab_size=120", "validation_fraction=0.25"],
}
# What a run must have, for commands of which the page says only what is special.
REQUIRED = {
    "train": "run_dir=runs/any data.path=any model.pretrained=any max_steps=2 micro_batch_size=1".split()
}
REQUIRED |= dict.fromkeys(
    ("finetune", "bench", "compare", "doctor", "evaluate", "predict"),
    REQUIRED["train"],
)
REQUIRED["prepare"] = []
SHORT["finetune"] = SHORT["train"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


class Block(NamedTuple):
    needs: list[str]
    language: str
    text: str


class Program(NamedTuple):
    """What a command starts: `torchrun` holds its options, or is None."""

    env: dict[str, str]
    torchrun: list[str] | None
    command: str
    arguments: list[str]


BLOCKS = {
    page: [
        Block(re.findall(r"\w+", needs), language, block)
        for needs, language, block in FENCE.findall(text)
    ]
    for page, text in PAGES.items()
}


def lines(block: Block) -> list[str]:
    """The commands of a bash block, each in one line."""
    stripped = [line.strip() for line in block.text.replace("\\\n", " ").splitlines()]
    return [line for line in stripped if line and not line.startswith("#")]


def only_read(page: str) -> Iterator[str]:
    """The commands of a page that are not run: of blocks that need something, and in sentences."""
    text = PAGES[page]
    marked = [each for each in BLOCKS[page] if each.language == "bash" and each.needs]
    inline = [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    for line in [*(line for block in marked for line in lines(block)), *inline]:
        line = with_variables(line, text)
        if COMMAND.match(line) and "<" not in line and "|" not in line.partition("#")[0]:
            yield line


def with_variables(line: str, text: str) -> str:
    """The line with the values of its variables, which the page sets."""
    values = dict(re.findall(r'\b([A-Z])="([^"]+)"', text))
    return re.sub(r"\$([A-Z])\b", lambda found: values.get(found[1], values.get("T", "")), line)


def parse(command: str) -> Program:
    """An ellipsis is left out, and what is optional."""
    for theirs, ours in HERE.items():
        command = command.replace(theirs, ours)
    command = re.sub(r" \[[^=]*\]", "", command).replace("-...", "-0123456789abcdef0")
    given = [each for each in shlex.split(command, comments=True) if each not in ("...", "&")]
    program = next(i for i, each in enumerate(given) if "=" not in each)
    env = dict(each.split("=", 1) for each in given[:program])
    options, words = None, given[program + 1 :]
    if given[program] == "torchrun":
        at = words.index("train")  # after -m
        options, words = words[: at - 1], words[at + 1 :]
    if words[0] == "precompile":  # before the command of a run
        words = words[words.index("train") + 1 :]
    if words[0] not in COMMANDS:
        words = ["train", *words]
    return Program(env, options, words[0], words[1:])


def unquoted(command: str) -> str:
    return re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command)


RUN = [page for page, blocks in BLOCKS.items() if any(not each.needs for each in blocks)]


@pytest.fixture(scope="module", autouse=True)
def schemas() -> None:
    compose.add_schema(BenchConfig, "bench", [])
    compose.add_schema(CompareConfig, "compare", [])
    compose.add_schema(
        LaunchConfig, "launch", [("cluster", name, kind) for name, kind in SETTINGS.items()]
    )
    compose.add_schema(AmiConfig, "ami", [])


def forked(command: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command that is made short, for a fork, and its environment."""
    given = parse(command)
    is_run = given.command == "launch" and "--" in given.arguments
    short = SHORT["train"] if is_run else SHORT.get(given.command, [])
    keys = {word.partition("=")[0] for word in given.arguments}
    short = [
        word
        for word in short
        if not (word.startswith("tokenizer.") and "tokenizer.pretrained" in keys)
    ]
    sets_warmup = "optim.warmup_steps" in keys or "experiment=albert_pretrain" in given.arguments
    short += ["optim.warmup_steps=2"] if sets_warmup else []
    words = ["train", given.command, *given.arguments, *short]
    if given.torchrun is not None:
        words = torchrun("train", words[1:], ranks=1)
        words[4:4] = given.torchrun  # of two values the last counts
    return words, ENVIRONMENT | given.env


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, made short if it is of this project and alone; a shell runs others."""
    if COMMAND.match(command) and not re.search(r"[|>]", unquoted(command)):
        words, env = forked(command)
        if words[1] in HERE_TOO:
            return run_here(words[1:], folder)
        return run_forked(words, env, folder)
    for theirs, ours in HERE.items():
        command = command.replace(theirs, ours)
    shell = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(shell, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


def run_here(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """In this process, which has imported what others would take seconds for."""
    # predictions are written to its buffer
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8"),
        io.StringIO(),
    )
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        code = run_command(words[0], words[1:])
    out.seek(0)
    return subprocess.CompletedProcess(words, code, out.read(), err.getvalue())


def run_command(name: str, arguments: list[str]) -> int:
    return import_module(COMMANDS[name][0]).main(arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone holds and `make demo` leaves there."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("docs", "tests", "conf"):
        (folder / name).symlink_to(ROOT / name)
    prepare.prepare(prepare_config(folder / "data" / "demo", write_corpus(folder / "corpus.txt")))
    ended = run(folder, "baretrain train experiment=demo run_dir=runs/demo")
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize("page", sorted(PAGES))
def test_blocks_say_what_they_are(page: str) -> None:
    assert PAGES[page].count("```") == 2 * len(BLOCKS[page])
    assert {each.language for each in BLOCKS[page]} <= LANGUAGES
    assert {need for each in BLOCKS[page] for need in each.needs} <= NEEDS.keys()
    code = [each for each in BLOCKS[page] if each.language in ("bash", "python")]
    assert code[0].needs in ([], ["minutes"]), "the first block does not run on this machine"
    for block in code:
        if not block.needs:
            assert PLACEHOLDERS.findall(block.text) == []
        if block.language == "bash":
            assert [
                line for line in lines(block) if re.search(r"[\[\]{}*?]", unquoted(line))
            ] == [], "to be quoted"
        else:
            compile(block.text, page, "exec")


def test_what_takes_minutes_is_run_elsewhere() -> None:
    elsewhere = (ROOT / ".ci" / "run").read_text() + (ROOT / "Makefile").read_text()
    marked = [
        line
        for blocks in BLOCKS.values()
        for each in blocks
        if "minutes" in each.needs
        for line in lines(each)
    ]
    made = {line.partition(" #")[0].strip() for line in marked if line.startswith("make ")}
    assert {"make demo", "make setup"} <= made
    assert [each for each in made if each not in elsewhere] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(folder: Path, page: str) -> None:
    for block in BLOCKS[page]:
        if block.needs or block.language not in ("bash", "python"):
            continue
        if block.language == "python":
            ended = run_forked(["-c", block.text], ENVIRONMENT, folder)
            assert ended.returncode == 0, f"{block.text}\n{ended.stderr}"
        else:
            run_lines(folder, lines(block))


@pytest.mark.slow
def test_the_search_of_the_notebook_page_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "optuna", reason="optuna, a development package, is not installed: make setup"
    )
    search = next(each.text for each in BLOCKS["notebook"] if "optuna" in each.text)
    short = search.replace("n_trials=3", "n_trials=2").replace("max_epochs=2", "max_steps=2")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(processes, "start", Forked)
    exec(short, {})
    assert (
        "{'lr': " in capsys.readouterr().out
        and (folder / "runs/search/1/export/model.safetensors").is_file()
    )


def run_lines(folder: Path, commands: list[str]) -> None:
    """Run commands one after the other, beside those that `&` sends to the background."""
    beside = {
        command: start_forked(*forked(command), cwd=folder, err=folder / "err")
        for command in commands
        if command.endswith(" &")
    }
    try:
        for command in commands:
            if command not in beside:
                ended = run(folder, command)
                # it finds faults of this machine
                good = (0, 1) if "baretrain doctor" in command else (0,)
                assert ended.returncode in good, f"{command}\n{ended.stdout}\n{ended.stderr}"
        for command, process in beside.items():
            process.join()
            assert process.exitcode == 0, f"{command}\n{(folder / 'err').read_text()}"
    finally:
        for process in beside.values():
            process.terminate()  # one that waits for what failed


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_settings_and_flags_of_what_is_only_read_exist(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in sorted(set(only_read(page))):
        _, _, module, arguments = parse(command)
        at = arguments.index("--") if "--" in arguments else len(arguments)
        own, of_run = arguments[:at], arguments[at + 1 :]
        flags = [each for each in own if each.startswith("-")]
        settings = [each for each in own if "=" in each]
        compose_settings(module, settings)
        compose_settings("train", of_run)
        if flags or not settings:
            before = own[: own.index(flags[0])] if flags else own[:1]
            words = [*(each for each in before if "=" not in each), "--help"]
            with pytest.raises(SystemExit, match="^0$"):
                run_command(module, words)
            said = capsys.readouterr().out
            assert [each for each in flags if each not in said] == [], command


def compose_settings(module: str, settings: list[str]) -> None:
    if settings:
        compose.load_config(SCHEMAS[module], [*REQUIRED.get(module, []), *settings])


# A file, perhaps with a function, a class or a method: train/loop.py:fit.
FILE = r"(?:train|launch|ami|tests|benchmarks)/[\w/]+\.(?:py|sh|yaml)"
NAMED = re.compile(rf"(?<![\w/.-])({FILE})(?::([A-Za-z_][\w.]*\w))?")


@cache
def defined_in(path: str) -> set[str]:
    text = (ROOT / path).read_text()
    if path.endswith(".sh"):
        return set(re.findall(r"^(\w+)\(\) \{", text, re.M))
    kinds = (ast.ClassDef, ast.FunctionDef)
    tops = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    inner = {
        f"{top.name}.{node.name}" for top in tops for node in top.body if isinstance(node, kinds)
    }
    return inner | {top.name for top in tops}


def test_files_and_functions_that_pages_and_comments_name_exist() -> None:
    pages = ["CONTRIBUTING.md", "benchmarks/README.md", "tests/recorded/README.md"]
    texts = PAGES | {page: (ROOT / page).read_text() for page in pages}
    for path in (
        path
        for top in ("train", "launch", "ami", "benchmarks")
        for path in (ROOT / top).rglob("*")
    ):
        if path.suffix in (".py", ".sh", ".yaml"):
            texts[str(path.relative_to(ROOT))] = path.read_text()
    named = {(page, *each) for page, text in texts.items() for each in NAMED.findall(text)}
    assert [each for each in named if not (ROOT / each[1]).is_file()] == []
    assert [each for each in named if each[2] and each[2] not in defined_in(each[1])] == []


def test_commands_of_blocks_are_at_most_76_columns_wide() -> None:
    """So wide is a block of the site. A setting may be wider, and results that stand beside commands."""
    wide = [
        (page, line)
        for page, blocks in BLOCKS.items()
        for block in blocks
        if block.language in ("bash", "python")
        for line in block.text.splitlines()
        if len(line) > WIDTH and len(shlex.split(line.rstrip("\\"))) > 1
    ]
    assert wide == []


HUB = [
    (page, block) for page, blocks in BLOCKS.items() for block in blocks if "hub" in block.needs
]


@pytest.mark.parametrize(("page", "block"), HUB)
def test_what_needs_the_hub_is_composed(page: str, block: Block, capsys) -> None:
    """All that a run needs is there: nothing of REQUIRED is added."""
    commands = [line for line in lines(block) if COMMAND.match(line)]
    for line in commands if block.language == "bash" else ():
        _, _, name, arguments = parse(with_variables(line, PAGES[page]))
        at = arguments.index("--") if "--" in arguments else len(arguments)
        for command, words in ((name, arguments[:at]), ("train", arguments[at + 1 :])):
            if command in COMPOSED and any("=" in each for each in words):
                assert run_command(command, [*words, "--cfg", "job"]) == 0, line
                assert capsys.readouterr().out


def test_the_readme_lists_the_pages_in_the_order_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    of_site = re.findall(r"(docs/[\w-]+\.md|CHANGELOG\.md|CONTRIBUTING\.md)$", nav, re.M)
    listed = PAGES["README"].split("\n## Documentation\n")[1]
    assert re.findall(r"\]\(([\w/-]+\.md)\)", listed) == of_site


def test_how_it_works_is_short_and_has_every_way_of_gradients() -> None:
    page = PAGES["how-it-works"]
    assert len(page.split()) <= 900
    for path in (ROOT / "train/parallel").glob("*.py"):
        for name in re.findall(r"^class (\w+)\(GradSync\)", path.read_text(), re.M):
            assert f"| `{path.relative_to(ROOT)}:{name}` |" in page
