"""docs/settings.md: it is what its command prints, and it has every key and option that Hydra composes."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from running import ROOT

from launch.schedulers import SETTINGS
from train.config import flatten
from train.run import compose
from train.run.help import groups
from train.run.names import SELECTORS
from train.tools import settings

PAGE = ROOT / "docs" / "settings.md"
COMMAND = "baretrain settings > docs/settings.md"
# The key, its type, default, values and meaning.
KEY = re.compile(r"^- `([^`]+)` \(([^`]+), default `(.*?)`(?:, (.*?))?\)<br>(.*)$", re.MULTILINE)
OPTION = re.compile(r"^- `([^`]+)`: (.+)$", re.MULTILINE)
# Of a value what it is, "The steps between saves", of a switch what true does, "Save ..."; behind a semicolon what null
# and other special values do, "null uses all". FRAGMENT is what the comments were made of before.
SENTENCE = {
    False: re.compile(r"(The|An?) .*\w.*\."),
    True: re.compile(r"(?!(The|An?) )[A-Z][a-z]+ .*\w.*\."),
}
FRAGMENT = re.compile(
    r"(^|[;.] )(null|true|false|auto|none|\d+|\[\]): |(^|; )the same\b|\b(one|ones|those|here) (above|below)\b"
)
# Tables of the user's own names.
OWN = ("compare.variants", "data.label_map", "data.more_validation")


@pytest.fixture(scope="module", autouse=True)
def schemas() -> None:
    for name, schema in settings.commands().items():
        if name not in ("train", "prepare"):
            of_group = (
                [("cluster", option, kind) for option, kind in SETTINGS.items()]
                if name == "launch"
                else []
            )
            compose.add_schema(schema, name, of_group)


def sections(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """The title of each section, its text and the commands that it is for."""
    for section in text.split("\n### ")[1:]:
        title, _, rest = section.partition("\n")
        used = re.search(r"Used by (.*)\.$", rest, re.MULTILINE)
        assert used is not None, title
        yield title, rest, re.findall(r"\w+", re.sub(r"\(default `[^`]*`\)", "", used[1]))


def test_the_page_is_what_its_command_prints(tmp_path: Path) -> None:
    """Made from the files of the repository alone: a checkout may have options of the user's own in conf/."""
    tracked = subprocess.run(
        ["git", "ls-files", "conf"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for package in ("train", "launch", "ami"):
        (tmp_path / package).symlink_to(ROOT / package)
    words = [sys.executable, "-m", "train", "settings"]
    printed = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed == PAGE.read_text(), f"docs/settings.md is not up to date; run: {COMMAND}"


def choices(command: str) -> list[list[str]]:
    """Overrides that choose, over all lists, an option of each group with each schema that there is for it."""
    of_group = []
    for group, (_, options) in groups(command).items():
        texts = {
            option: (ROOT / "conf" / group / f"{option}.yaml").read_text() for option in options
        }
        schemas = {
            found[0]: option
            for option in options
            if (found := re.findall(r"\w+_schema\b", texts[option]))
        }
        of_group.append([f"{group}={option}" for option in schemas.values()])
    return [[], *([each for each in row if each] for row in itertools.zip_longest(*of_group))]


@pytest.mark.parametrize("command", settings.commands())
def test_every_key_that_a_command_composes_is_on_the_page(command: str) -> None:
    composed: set[str] = set()
    for overrides in choices(command):
        plain = OmegaConf.to_container(
            compose.compose_config(settings.commands()[command], overrides)
        )
        assert isinstance(plain, dict)
        composed |= {key for key, _ in flatten({str(key): value for key, value in plain.items()})}
    listed = {
        row[0]
        for _, rest, users in sections(PAGE.read_text())
        if command in users
        for row in KEY.findall(rest)
    }
    own = {key for key in composed if key.startswith(tuple(f"{table}." for table in OWN))}
    assert len(composed) > 15 and composed - own - listed <= set(SELECTORS.values())
    assert {key for key in listed if "[]" not in key} - composed - {*OWN} == set()


def test_a_row_says_what_the_schema_says() -> None:
    rows = {row[0]: row[1:] for row in KEY.findall(PAGE.read_text())}
    assert rows["optim.lr"][:3] == ("number", "0.001", "above 0")
    assert rows["data.path"][1] == "..." and "s3://" in rows["data.path"][3]
    assert rows["parallel.schedule"][2] == "gpipe | 1f1b | interleaved"
    assert rows["optim.betas"][:2] == ("list of numbers", "[0.9, 0.999]")
    assert rows["data.label_map"][0] == "table of texts"
    assert rows["corpus.datasets[].rows_per_document"][1] == "1"


def test_every_key_and_option_has_its_sentence() -> None:
    text = PAGE.read_text()
    keys, options = text.split("\n## Groups\n")
    rows = [(row[0], row[4], SENTENCE[row[1] == "true or false"]) for row in KEY.findall(keys)]
    assert [
        (key, text)
        for key, text, form in rows
        if FRAGMENT.search(text) or not form.fullmatch(text)
    ] == []
    # A budget: a new key is paid by one that goes, and this number stays or sinks.
    assert len(rows) == len(re.findall(r"^- `", keys, re.MULTILINE)) == 180
    assert [row[0] for row in OPTION.findall(options) if len(row[1]) < 8] == []
