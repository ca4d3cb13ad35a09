"""Checks of the versions of Python, of packages and of Neuron's system packages against a table of versions that work.

The checks for Trainium have not been tested on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping

from train.machine.neuron import package_faults
from train.machine.versions import Native, Sdk, read_versions, release
from train.tools.doctor.probe import Finding, Probe, bad, numbers, ok, skip, warn

PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers")
SYSTEM_PACKAGES = (
    "aws-neuronx-dkms",
    "aws-neuronx-runtime-lib",
    "aws-neuronx-collectives",
    "aws-neuronx-tools",
)
# torch-neuronx 2.9's wheel needs it; Ubuntu 22.04 and 24.04 have it, Amazon Linux 2023 does not
NEEDED_GLIBC = (
    2,
    35,
)


def python(probe: Probe) -> Finding:
    """Check the versions of Python and glibc. Neuron's wheels need certain versions of both."""
    text = ".".join(map(str, probe.python)) + (
        f", glibc {probe.glibc}" if probe.glibc else f", {probe.system}"
    )
    if probe.python[:2] < (3, 11):
        return bad(f"{text}: too old", cure="python3.11 -m venv .venv (3.11 or newer)")
    if not probe.is_trainium:
        return ok(text)
    sdk = read_versions().native if probe.is_native else read_versions().sdk
    low, high = (numbers(each, 2) for each in sdk.pythons.split("-"))
    if not low <= probe.python[:2] <= high:
        text = f"{text}: Neuron SDK {sdk.name} has wheels for Python {sdk.pythons.replace('-', ' to ')}"
        return bad(text, cure=f"python{'.'.join(map(str, high))} -m venv .venv")
    if not probe.is_native and probe.glibc and numbers(probe.glibc, 2) < NEEDED_GLIBC:
        text = f"{text}: torch-neuronx 2.9 needs glibc 2.35, which Amazon Linux 2023 does not have"
        return bad(
            text, cure="launch from an Ubuntu 24.04 image (Neuron's pytorch-2.9/ubuntu-24.04)"
        )
    wanted, here = f"Ubuntu {read_versions().native.ubuntu}", os_name(probe)
    if probe.is_native and "torch-neuronx" not in probe.versions and here not in ("", wanted):
        text = f"{text}, {here}: native PyTorch has wheels for {wanted} only"
        return warn(
            text,
            cure=f"use an image of {wanted}, or Neuron's DLAMI for torch-neuronx; or build from source",
        )
    return ok(text)


def os_name(probe: Probe) -> str:
    """Return the distribution's name and version from os-release(5), such as "Ubuntu 26.04"; "" if unknown."""
    lines = (line.partition("=") for line in (probe.text("/etc/os-release") or "").splitlines())
    values = {key: value.strip("'\"") for key, _, value in lines}
    return f"{values.get('NAME', '')} {values.get('VERSION_ID', '')}".strip()


def packages(probe: Probe) -> Finding:
    versions = probe.versions
    text = ", ".join(
        f"{package} {versions[package]}" for package in PACKAGES if package in versions
    )
    torch, neuronx = versions.get("torch", ""), versions.get("torch-neuronx", "")
    if not torch:
        return bad("torch is not installed", cure="pip install .")
    native = read_versions().native if probe.is_native and release(neuronx) != (2, 9) else None
    found = native.faults(versions) if native else package_faults(versions)
    faults = [fault.partition("; ") for fault in found]
    if faults:
        return bad(
            "; ".join(what for what, _, _ in faults), cure="; ".join(cure for _, _, cure in faults)
        )
    if probe.has_gpu and not probe.is_trainium and "+cpu" in torch:
        return bad(
            f"torch {torch} is built without CUDA",
            cure="pip install --force-reinstall 'torch>=2.6'",
        )
    if native:
        compiler = versions.get("neuronx-cc", "").partition("+")[0]
        if compiler != native.neuronx_cc:
            text += f": SDK {native.name} ships neuronx-cc {native.neuronx_cc}"
            return warn(text, cure=native.install)
        return ok(f"{text}: native PyTorch of SDK {native.name}")
    if probe.is_trainium or neuronx:
        return neuron_packages(text, versions)
    return ok(text)


def neuron_packages(text: str, versions: Mapping[str, str]) -> Finding:
    """Check that trn1's Python packages are all installed, in versions that one SDK ships together."""
    table = read_versions()
    missing = [
        package
        for package in ("torch-neuronx", "neuronx-cc", "torch-xla")
        if package not in versions
    ]
    if missing:
        return bad(f"{', '.join(missing)} missing ({text})", cure=table.sdk.install)
    neuronx, compiler, library = (
        versions.get(package, "").partition("+")[0]
        for package in ("torch-neuronx", "neuronx-cc", "libneuronxla")
    )
    for sdk in table.sdks:
        is_same = (sdk.torch_neuronx, sdk.neuronx_cc) == (neuronx.split(".", 3)[-1], compiler)
        if is_same and (not library or sdk.libneuronxla in ("", library)):
            return ok(f"{text}: SDK {sdk.name}")
    return warn(f"{text}: no known SDK ships these versions together", cure=table.sdk.install)


def driver(probe: Probe) -> Finding:
    """Check Neuron's driver, runtime and collectives. The driver that is loaded counts, not the one installed."""
    if not probe.is_trainium:
        return skip("no Trainium")
    answer = probe.ask("dpkg-query", "-W", "-f=${Package} ${Version}\\n", *SYSTEM_PACKAGES)
    if answer.is_missing:
        return skip(f"{answer.fault}: versions unknown")
    # A removed package has a name but no version. An unknown package makes the exit code 1, so the code is ignored.
    rows = (line.split() for line in answer.out.splitlines())
    installed = {row[0]: row[1] for row in rows if len(row) == 2}
    missing = [
        p for p in ("aws-neuronx-runtime-lib", "aws-neuronx-collectives") if p not in installed
    ]
    if missing:
        return bad(
            f"{', '.join(missing)} not installed", cure=f"sudo apt-get install {' '.join(missing)}"
        )
    loaded = (
        probe.text("/sys/module/neuron/version")
        or probe.ask("modinfo", "-F", "version", "neuron").out.strip()
    )
    dkms, runtime = (
        loaded or installed.get("aws-neuronx-dkms", ""),
        installed["aws-neuronx-runtime-lib"],
    )
    table, text = read_versions(), f"driver {dkms or 'unknown'}, runtime {runtime}"
    wanted = table.native if probe.is_native else table.sdk
    if not dkms:
        return bad(
            f"{text}: no driver is installed",
            cure=f"sudo apt-get install aws-neuronx-dkms={wanted.dkms}*",
        )
    if numbers(dkms, 2) >= (2, 29) and numbers(runtime, 2) < (2, 33):
        cure = f"sudo apt-get install aws-neuronx-runtime-lib={wanted.runtime}* (or newer)"
        return bad(f"{text}: driver 2.29 and newer need runtime 2.33", cure=cure)
    both = numbers(dkms), numbers(runtime)
    known: list[Sdk | Native] = [table.native] if probe.is_native else [*table.sdks]
    sdk = next(
        (each for each in known if (numbers(each.dkms), numbers(each.runtime)) == both), None
    )
    if sdk is None:
        cure = f"sudo apt-get install aws-neuronx-dkms={wanted.dkms}* aws-neuronx-runtime-lib={wanted.runtime}*"
        return warn(f"{text}: no known SDK ships these versions together", cure=cure)
    return ok(f"{text}: SDK {sdk.name}")
