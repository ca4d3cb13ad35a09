"""Package indexes in folders, with wheels that hold nothing but their name."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from ami import packages
from ami.config import AmiConfig
from ami.files import image_constraints
from train.config import InstanceConfig
from train.machine.versions import Pin, read_versions

CUDA = AmiConfig(image="cuda", instance=InstanceConfig(name="g5.xlarge", device="cuda"))
NEURON = AmiConfig(instance=InstanceConfig(name="trn1.2xlarge", device="neuron"))


def write_wheel(folder: Path, name: str, version: str, *needs: str, content: str = "") -> Path:
    """An index's folder of this name, with one wheel."""
    plain = re.sub(r"\W+", "_", name)
    at = folder / name
    at.mkdir(parents=True, exist_ok=True)
    path = at / f"{plain}-{version}-py3-none-any.whl"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"of_{plain}.py": content,
        f"{plain}-{version}.dist-info/METADATA": about
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{plain}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{plain}-{version}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in files.items():
            wheel.writestr(inside, text)
    (at / "index.html").write_text(f'<a href="{path.name}">{path.name}</a>')
    return path


def write_indexes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Path, Path]:
    """PyPI and Neuron's index as pip finds them here, and the image's Python is the one of the tests. Each index also
    has the packages of the other, which nobody should take.
    """
    public = folder / "pypi"
    of_neuron = folder / "neuron"
    table = read_versions()
    lines = [
        line.partition(";")[0].strip()
        for line in image_constraints("cuda", table).splitlines()
        if line[0] != "#"
    ]
    pins = {
        **dict(line.split("==") for line in lines),
        **table.python_packages(),
        "setuptools": "80.0.0",
    }
    for name, version in pins.items():
        for index in (public, of_neuron):
            is_right = (index == of_neuron) == (name in packages.NEURON)
            write_wheel(
                index, name, version, content="" if is_right else "raise SystemExit('planted')"
            )
    monkeypatch.setitem(table.pins, "python", Pin(*(packages.this_python(),) * 3))
    monkeypatch.setattr(packages, "INDEX", of_neuron.as_uri())
    monkeypatch.setenv("PIP_INDEX_URL", public.as_uri())
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return public, of_neuron
