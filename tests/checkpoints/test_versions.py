"""Files of another version of this program: each command rejects them in one line, which names what is unknown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from launched import Launched

from launch.__main__ import main as launch_main
from train.run.command import FAILED, REJECTED
from train.storage.checksums import sealed
from train.tools import predict, shards
from train.tools.checkpoints import main as checkpoints
from train.tools.report import main as report


def future(content: str, key: str | None = None) -> str:
    """The content with a format of tomorrow, and with its own checksum under `key`."""
    values = {name: value for name, value in json.loads(content).items() if name != key} | {
        "format": 99
    }
    return json.dumps(values if key is None else sealed(values, key))


def unknown(content: str) -> str:
    return (
        content.replace("{", '{"future": 1,', 1)
        if content.startswith("{")
        else f"{content}future: 1\n"
    )


MANIFEST = "run/checkpoints/step_00000006/manifest.json"
SEALED = partial(future, key="sha256")
ID = partial(future, key="id")
CASES: list[tuple[str, Callable[[str], str], Callable[[list[str]], int], list[str], int, str]] = [
    (MANIFEST, SEALED, checkpoints, ["run", "verify"], FAILED, "format 99"),
    ("data/manifest.json", ID, shards.main, ["ls", "data"], REJECTED, "format 99"),
    ("run/config.yaml", unknown, predict.main, ["run", "--text", "a"], REJECTED, "future"),
    ("run/samples.json", unknown, report, ["run"], REJECTED, "'future' is not known"),
]


@pytest.fixture
def there(finished: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and its data; the working folder."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(prepared, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "change", "command", "arguments", "code", "said"), CASES, ids=[c[0] for c in CASES]
)
def test_a_file_of_another_version_is_rejected_in_one_line(
    file, change, command, arguments, code, said, there, capsys
):
    path = there / file
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    assert command(arguments) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("...")]
    assert line.startswith("error: ") and said in line


def test_the_job_of_another_version_is_rejected_in_one_line(tmp_path, fake_scheduler, capsys):
    launched = Launched(str(tmp_path / "run"), fake_scheduler).job()
    path = launched.record.local_folder() / "job.json"
    path.write_text(future(path.read_text()))
    assert launch_main(["status", str(tmp_path / "run")]) == REJECTED
    assert "format 99" in capsys.readouterr().err
