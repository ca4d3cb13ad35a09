"""One table of versions: constraints, the package and Packer's plugin agree with ami/versions.yaml."""

import re
from dataclasses import astuple

import pytest
from running import ROOT

import train
from ami.config import AmiConfig
from ami.files import image_values, neuron_constraints, shell_values
from ami.manifest import check_installed
from train.config import InputError, InstanceConfig
from train.machine.versions import read_versions


def pinned(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(
        re.match(r"([\w-]+)==([^;\s]+)", line).groups()
        for line in lines
        if line and not line.startswith("#")
    )


def test_constraints_and_the_package_are_those_of_the_table_and_every_pin_has_a_source_and_a_date():
    versions = read_versions()
    assert (ROOT / "constraints-trn1.txt").read_text() == neuron_constraints(versions)
    assert versions["baretrain"] == train.__version__
    plugins = (ROOT / "ami/plugins.pkr.hcl").read_text()
    assert f'version = "= {versions["packer-amazon"]}"' in plugins
    ours = pinned("constraints.txt")
    assert (ours["torch"], ours["torch-xla"]) == (versions["torch"], versions["torch-xla"])
    for pin in (*versions.pins.values(), *versions.keys.values(), *versions.bases.values()):
        assert pin.version and pin.source and re.fullmatch(r"20\d\d-\d\d-\d\d", pin.date)
    assert all(re.fullmatch("[0-9A-F]{40}", key.version) for key in versions.keys.values())
    assert all(astuple(versions.sdk)) and versions.sdk.name == versions["neuron-sdk"]


def test_the_shell_gets_values_and_nothing_else():
    cfg = AmiConfig(instance=InstanceConfig(name="trn1.2xlarge", device="neuron"))
    values = image_values(cfg, "ami-0123456789abcdef0", read_versions(), "1a2b3c4+")
    lines = shell_values(values).splitlines()
    assert "NEURON_DKMS='2.29.0'" in lines and "COMMIT='1a2b3c4+'" in lines
    for evil in ("a'b", "$(id)", "a\nb", "`id`", "a b", "é"):
        with pytest.raises(InputError, match="COMMIT=.* has characters"):
            shell_values({"COMMIT": evil})


def manifest(image, system_packages=(), **packages):
    return {"image": image, "system_packages": dict(system_packages), "packages": packages}


def test_an_image_with_other_versions_fails_its_smoke_test():
    versions = read_versions()
    system = {name: f"{version}.0-abc" for name, version in versions.system_packages().items()}
    whole = manifest("neuron", system, **versions.python_packages())
    check_installed(whole, versions)
    check_installed(manifest("cuda", torch="2.9.1+cu128"), versions)
    with pytest.raises(InputError, match=r"torch 2\.8\.0, not 2\.9\.1; build it again"):
        check_installed(manifest("cuda", torch="2.8.0"), versions)
    other = manifest(
        "neuron", {**system, "aws-neuronx-dkms": "2.29.01.0"}, **versions.python_packages()
    )
    with pytest.raises(InputError, match=r"aws-neuronx-dkms 2\.29\.01\.0, not 2\.29\.0"):
        check_installed(other, versions)
    del other["packages"]["neuronx-cc"]
    with pytest.raises(InputError, match="neuronx-cc is missing, not 2.26"):
        check_installed(other, versions)
