"""Completion in real shells at a terminal: commands, flags, settings, their values, files."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import ROOT

from train.__main__ import COMMANDS
from train.__main__ import main as baretrain

# Of a shell that reads no file of the user's; its prompt and its colours would stand between the words.
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i", "-o", "emacs"],
}
TYPED = {
    "fine": "finetune ",
    "train opti": "train optim",
    "train optim.weight_d": "train optim.weight_decay=",
    "train optim=la": "train optim=lamb ",
    "train backend.precision=bf": "train backend.precision=bf16",
    "train export=t": "train export=true ",
    "finetune rows.c": "finetune rows.csv ",
    "finetune rows.csv --mo": "finetune rows.csv --model ",
    "finetune rows.csv --model=pub": "finetune rows.csv --model=published/",
    "train data.path=rows.c": "train data.path=rows.csv ",
    "launch -- optim.warmup_s": "launch -- optim.warmup_steps=",
    "checkpoints ver": "checkpoints verify ",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        words = [sys.executable, "-m", "train", "--completion", shell]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        (folder / shell).write_text(done.stdout)
    return folder


def answers(shell: list[str], script: Path, folder: Path, typed: list[str]) -> Iterator[str]:
    """Type each line, then the tab key, and yield what the line becomes: what `printf` behind it gets."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.execvpe(shell[0], shell, {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "> "})
    said = b""

    def until(sign: bytes) -> None:
        nonlocal said
        while sign not in said:
            said += os.read(terminal, 4096)

    os.write(terminal, f"source {script}; echo rea''dy\n".encode())
    until(b"ready\r\n")
    for number, line in enumerate(typed):
        # The X shows where the cursor is after the completion.
        given = f"baretrain {line}\tX\x01printf '<%s>' {number} '\x05'; echo en''d{number}\n"
        os.write(terminal, given.encode())
        until(f"end{number}\r\n".encode())
        shown = said.decode().split(f"<{number}>")[-1]
        yield re.findall(r"<baretrain (.*)>", shown)[-1]
    os.write(terminal, b"exit\n")
    os.close(terminal)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_completes(shell, scripts, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "rows.csv").touch()
    (tmp_path / "published").mkdir()
    found = list(answers(SHELLS[shell], scripts / shell, tmp_path, list(TYPED)))
    assert found == [f"{line}X" for line in TYPED.values()]


def test_the_script_starts_no_program_and_has_every_command(scripts):
    for shell in SHELLS:
        text = (scripts / shell).read_text()
        assert [name for name in COMMANDS if f"\n[{name}]='" not in text] == []
        code = text.rpartition("\n)\n")[2]
        assert not re.search(r"python|`|\$\([^(]", code)


def test_another_shell_is_rejected(capsys):
    for words in (["--completion"], ["--completion", "fish"], ["--completion", "bash", "zsh"]):
        assert baretrain(words) == 2
        assert capsys.readouterr().err.endswith("it must be one of bash, zsh\n")
