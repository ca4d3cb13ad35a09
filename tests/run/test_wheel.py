"""The wheel holds all that an installed baretrain needs, and nothing else."""

import json
import subprocess
import sys
import venv
import zipfile
from importlib import import_module
from site import getsitepackages as site_packages

import pytest
from running import ROOT, TINY, outcome, write_corpus

import train
from train.__main__ import COMMANDS, main


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_every_tracked_file_of_the_packages_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "train", "conf", "launch", "ami"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not [name for name in tracked if (ROOT / name).exists() and name not in names]
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "train",
        "conf",
        "launch",
        "ami",
    }


@pytest.fixture(scope="module")
def folder(wheel, tmp_path_factory):
    """An empty folder but for a `train.py` of somebody else, and a text."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "train.py").write_text("raise SystemExit('not ours')")
    write_corpus(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def scripts(wheel, tmp_path_factory):
    """The programs of a new environment with the wheel; its other packages are those of this one."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, symlinks=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "rest.pth").write_text("\n".join(site_packages()))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(place / "bin/python"),
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run([*pip, "--no-index", str(wheel)], check=True)
    return place / "bin"


@pytest.mark.services
def test_the_installed_command_trains_from_an_empty_folder(scripts, folder):
    def run(*words: str, ranks: int = 1) -> str:
        torchrun = [
            scripts / "python",
            *"-m torch.distributed.run --standalone --no-python".split(),
        ]
        launcher = [*torchrun, f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [*launcher, scripts / "baretrain", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"baretrain {train.__version__}" in run("--version")
    prepared = [
        "corpus=text",
        "corpus.path=text.txt",
        "output=data",
        "seq_len=32",
        "tokenizer.vocab_size=120",
    ]
    run("prepare", *prepared, "validation_fraction=0.25")
    short = [*TINY, "data.path=data", "global_batch_size=8", "max_steps=2", "watchdog.step_s=0"]
    run("train", *short, "run_dir=runs/one")
    run("train", *short, "run_dir=runs/two", ranks=2)
    run(
        "launch",
        "cluster=local",
        "cluster.gate=false",
        "submit=true",
        "--",
        *short,
        "run_dir=runs/three",
    )
    assert "runs/report/report.html" in run("report", "runs/one", "runs/two")
    for name in ("one", "two", "three"):
        assert outcome(folder / "runs" / name)["outcome"] == "done"
        environment = json.loads((folder / "runs" / name / "environment.json").read_text())
        assert not any(str(ROOT) in each for each in environment["code"])


@pytest.mark.parametrize(
    ("words", "code", "says"), [(["--help"], 0, "precompile"), (["trian"], 2, "no command trian")]
)
def test_the_commands_are_listed(words, code, says, capsys):
    assert main(words) == code
    said = capsys.readouterr()
    assert says in said.out + said.err


def test_every_command_is_there():
    for module, _ in COMMANDS.values():
        assert callable(import_module(module).main)
