"""Which packages an image gets, and from whom. Nothing here asked PyPI or Neuron's index."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from package_indexes import CUDA, NEURON, write_indexes, write_wheel
from rejections import rejects
from running import ROOT

from ami import packages
from ami.files import image_values, shell_values, write_files
from train.config import Failure
from train.machine.versions import read_versions
from train.storage.folders import sha256_file

BASE = "ami-0123456789abcdef0"


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Makes what Packer would upload."""
    public, of_neuron = write_indexes(monkeypatch, tmp_path)
    ours = write_wheel(
        tmp_path,
        "baretrain",
        read_versions()["baretrain"],
        "boto3",
        'torch-neuronx; extra == "trn1"',
    )

    monkeypatch.setattr("ami.files.write_wheel", lambda folder: Path(shutil.copy(ours, folder)))

    def act(cfg):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return write_files(folder, cfg, BASE, read_versions(), "none")

    act.public = public
    act.of_neuron = of_neuron
    return act


def test_every_package_has_a_hash_and_comes_from_its_own_index_alone(build, monkeypatch):
    """Each index offers the same names and versions as the other, which pip would take with --extra-index-url."""
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", build.of_neuron.as_uri())
    for cfg in (CUDA, NEURON):
        uploaded = build(cfg)
        table = read_versions()
        public, of_neuron = (
            (uploaded / name).read_text() for name in (packages.PUBLIC, packages.OF_NEURON)
        )
        (ours,) = uploaded.glob("*.whl")
        assert public.splitlines()[0] == f"./{ours.name} --hash=sha256:{sha256_file(ours)}"
        for index, text, names in (
            (build.public, public, {"boto3", "setuptools"}),
            (build.of_neuron, of_neuron, {*packages.NEURON} if cfg is NEURON else set()),
        ):
            lines = dict(
                line.split(" --hash=sha256:") for line in text.splitlines() if "==" in line
            )
            assert {line.partition("==")[0] for line in lines} == names
            for line, sha256 in lines.items():
                name, _, version = line.partition("==")
                (wheel,) = (index / name).glob("*.whl")
                assert sha256 == sha256_file(wheel) and version == table.python_packages().get(
                    name, version
                )


def test_what_cannot_be_resolved_is_one_line_and_no_other_index_is_asked(build):
    torch_neuronx = read_versions().python_packages()["torch-neuronx"]
    write_wheel(build.of_neuron, "torch-neuronx", torch_neuronx, "nki")
    write_wheel(build.public, "nki", "1.0")
    rejects("nki is Neuron's, but pip found it on PyPI", build, NEURON)
    (build.of_neuron / "neuronx-cc/index.html").write_text("")
    with pytest.raises(
        Failure,
        match=r"cannot be resolved \(No matching distribution found for neuronx-cc==.*\); nothing",
    ):
        build(NEURON)


def test_an_image_rejects_a_package_of_another_hash(build, tmp_path):
    """The script of the image, in folders of the test."""
    uploaded = build(NEURON)
    home = tmp_path / "opt"
    (home / "dist").mkdir(parents=True)
    for file in (*uploaded.glob("*.txt"), *uploaded.glob("*.whl")):
        file.rename(home / "dist" / file.name)
    values = image_values(NEURON, BASE, read_versions(), "none")
    values["NEURON_INDEX"] = build.of_neuron.as_uri()
    (uploaded / "image.env").write_text(shell_values(values))
    for name in ("provision/baretrain.sh", "provision/functions.sh"):
        text = (ROOT / "ami" / name).read_text().replace("/opt/baretrain", str(home))
        text = text.replace("/etc/profile.d", str(tmp_path))
        text = text.replace("/etc/baretrain", str(uploaded))
        (uploaded / Path(name).name).write_text(text)

    def provision():
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["bash", uploaded / "baretrain.sh"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    ours = next((home / "dist").glob("*.whl"))
    boto3 = next((build.public / "boto3").glob("*.whl"))
    compiler = next((build.of_neuron / "neuronx-cc").glob("*.whl"))
    for path in (compiler, boto3, ours):  # in this order they are installed
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"Name: ", b"name: "))
        code, said = provision()
        assert code == 1, (path, said)
        assert "DO NOT MATCH THE HASHES" in said and "error: pip rejected a package" in said
        assert not (home / "venv/.installed").exists()
        path.write_bytes(whole)
    assert provision() == (0, "")
    (site,) = (home / "venv/lib").glob("python3*/site-packages")
    installed = {path.stem: path.read_text() for path in site.glob("of_*.py")}
    assert set(installed) >= {"of_boto3", "of_neuronx_cc", "of_baretrain"}
    assert not any(installed.values())
