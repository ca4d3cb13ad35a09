"""What leaves a program as text: lines that nobody else can forge, without secrets."""

import json
import subprocess
import sys

import pytest
from running import ROOT

from train.machine.console import secrets, visible
from train.tasks.finetune import json_lines

HOSTILE = [
    *map(
        chr,
        [
            *range(32),
            127,
            0x85,
            0xA0,
            0x61C,
            0x200B,
            0x200E,
            0x200F,
            0x2028,
            0x2029,
            0x202E,
            0x2066,
        ],
    )
]
HOSTILE += ["\ufeff", "\ud800", "\U000e0041", "\U000f0000"]
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


PROGRAM = """
import logging, sys, warnings
import train
train.begin()
from pathlib import Path
from train.machine.console import say
from train.run_folder.run_folder import set_up_logging
set_up_logging(Path(sys.argv[1]))
for foreign in eval(sys.argv[2]):
    say(foreign, file=sys.stderr)
    logging.getLogger("train").warning("%s", foreign)
    logging.getLogger("a.library").error(foreign)
    warnings.warn_explicit(foreign, UserWarning, "a.py", 1)
    try:
        raise ValueError(foreign)
    except ValueError:
        logging.getLogger("train").exception("failed")
raise ValueError(foreign)
"""


def test_no_foreign_text_moves_or_begins_a_line(tmp_path):
    texts = [f"a{char}2026-01-01 INFO done at step 100" for char in HOSTILE]
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), ascii(texts)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, errors="strict")
    assert done.returncode == 1
    for shown, times in ((done.stderr, 5), ((tmp_path / "log").read_text(), 2)):
        assert all(line.isprintable() for line in shown.split("\n")), ascii(shown)
        assert not any(line.startswith("2026-01-01") for line in shown.split("\n"))
        for char in HOSTILE:
            last = char == HOSTILE[-1] and times == 5  # the end of the program
            sign = (
                "a\n    2026"
                if char == "\n"
                else f"a{char.encode('unicode_escape', 'surrogatepass').decode()}2026"
            )
            assert shown.count(sign) >= (1 if char == "\n" else times + last), ascii(char)


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "X_PASSWORD"],
)
def test_no_form_of_a_secret_is_shown(name, monkeypatch):
    monkeypatch.setenv(name, f"{SECRET}\n1")
    secrets.cache_clear()
    said = [
        f"{SECRET}\n1",
        repr(f"{SECRET}\n1".encode()),
        "https://h/?t=wJalrXUtnFEMI%2FK7MDENG%2BbPxRfiCYEXAMPLEKEY%0A1",
    ]
    for text in said:
        assert "wJalr" not in visible(text) and f"[{name}]" in visible(text)
    monkeypatch.setenv(name, "short")
    secrets.cache_clear()
    assert visible("a short text") == "a short text"


def test_lines_of_predictions_move_no_cursor():
    rows = [{f"label {char}": [f"a{char}b"]} for char in ["\u4e2d", *HOSTILE]]
    *lines, end = json_lines(rows).decode().split("\n")
    assert end == "" and all(map(str.isprintable, lines)) and "\u4e2d" in lines[0]
    assert [json.loads(line) for line in lines] == rows
