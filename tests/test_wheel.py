"""The wheel holds all that an installed baretrain needs, and nothing else."""

import subprocess
import sys
import zipfile

import pytest
from running import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_every_tracked_file_of_the_packages_is_in_it(installed):
    tracked = subprocess.run(
        ["git", "ls-files", "train", "conf", "launch", "ami"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    missing = [name for name in tracked if (ROOT / name).exists() and not (installed / name).is_file()]
    assert not missing
    assert {path.name for path in installed.iterdir() if path.is_dir() and path.suffix == ""} == {
        *("train", "conf", "launch", "ami"),
    }


def test_it_runs_from_another_folder(installed, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); import train; print(train.__file__); "
    code += "from train.cli import compose as cli; from train.config import TrainConfig; "
    code += "print(cli.load_config(TrainConfig, ['experiment=demo']).max_steps)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    origin, steps = result.stdout.split()
    assert origin.startswith(str(installed))
    assert int(steps) > 0
