"""The command `baretrain doctor`, which says whether this machine can train, with a cure for each fault.

The checks of the machine open no device and do not need torch. With `--collectives`, under torchrun, the ranks add up
tensors and compare the sums. Nothing here has run on Trainium or with EFA.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from train.config import check, plural
from train.machine import host, neuron, rank_setup
from train.machine.console import say
from train.machine.launched import check_launch, launched
from train.machine.memory import usable_cpus
from train.machine.versions import read_versions
from train.run.command import DONE, FAILED, REJECTED, command_parser, guarded
from train.storage.atomic_io import free_bytes
from train.tools.probe import Finding, Probe, bad, ok, read_instance, warn

GIB = 2**30
# A checkpoint of the largest ALBERT takes 2.7 GB (223 M parameters at 12 bytes each, including AdamW's state), so 4 GiB
# hold only one. 20 GiB are enough for the kept checkpoints, a new one, and some compiled graphs.
LEAST_DISK = 4 * GIB  # less is an error
WANTED_DISK = 20 * GIB  # less is a warning
RANK_MEMORY = GIB  # 0.65 GiB were measured in a process that had imported torch and transformers
PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers")
NEURON = ("torch-neuronx", "neuronx-cc", "torch-xla")
RELOAD = "sudo modprobe -r neuron && sudo modprobe neuron; if that does not help, stop and start the instance"
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


# ---- the checks ------------------------------------------------------------------------------------------------------


def devices(probe: Probe) -> Finding:
    if probe.is_trainium:
        return trainium_cores(probe)
    if probe.has_gpu:
        return gpus(probe)
    if probe.instance.devices:
        return bad(
            f"{probe.instance.name} has {plural(probe.instance.devices, 'device')}, but this machine has none",
            cure="set --instance to this machine's type (without the flag, the firmware names it)",
        )
    return ok(f"no accelerator; {plural(probe.cpus, 'CPU core')}")


def trainium_cores(probe: Probe) -> Finding:
    if not any(probe.root.glob("dev/neuron[0-9]*")):
        return bad(
            "no /dev/neuron*: the Neuron driver is not loaded",
            cure="sudo modprobe neuron; if that fails: sudo apt-get install --reinstall aws-neuronx-dkms, then reboot",
        )
    answer = probe.ask("neuron-ls", "-j")
    if answer.fault:
        return bad(answer.fault, cure=f"sudo apt-get install aws-neuronx-tools; {RELOAD}")
    try:
        chips = neuron.cores_of_chips(answer.out)
    except ValueError as error:
        return bad(
            f"the output of neuron-ls -j cannot be read ({error})",
            cure="sudo apt-get install --only-upgrade aws-neuronx-tools",
        )
    number = sum(chips)
    text = f"{number} NeuronCores on {plural(len(chips), 'chip')}"
    return counted(probe, number, text, cure=RELOAD)


def gpus(probe: Probe) -> Finding:
    answer = probe.ask(*GPU_QUERY)
    lines = answer.out.splitlines()
    if answer.fault or not lines:
        return bad(
            answer.fault or "nvidia-smi lists no GPU",
            cure="install NVIDIA's driver (after a kernel update, again), then reboot; dmesg | grep NVRM",
        )
    text = f"{len(lines)} GPU ({lines[0]})"
    cure = "dmesg | grep -i xid; unset CUDA_VISIBLE_DEVICES; stop and start the instance"
    return counted(probe, len(lines), text, cure=cure)


def counted(probe: Probe, number: int, text: str, *, cure: str) -> Finding:
    wanted = probe.instance.devices
    if wanted not in (None, number):
        return bad(f"{text}; {probe.instance.name} has {wanted}", cure=cure)
    return ok(text)


def efa(probe: Probe) -> Finding:
    wanted = probe.instance.efa_interfaces or 0
    text = f"{probe.num_efa} of {plural(wanted, 'interface')}"
    # Machines with one network card also reach each other by TCP.
    if wanted > 1 and probe.num_efa < wanted:
        return warn(
            f"{text}; a run on several machines is slow without them",
            cure="launch again with InterfaceType=efa on every network card; if all were requested, run the EFA "
            "installer: sudo ./efa_installer.sh -y",
        )
    return ok(text)


def packages(probe: Probe) -> Finding:
    versions = probe.versions
    text = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
    torch = versions.get("torch")
    if torch is None:
        return bad("torch is not installed", cure="pip install .")
    faults = neuron.package_faults(versions)
    if faults:
        whats, _, cures = zip(*(fault.partition("; ") for fault in faults), strict=True)
        return bad("; ".join(whats), cure="; ".join(cures))
    missing = [name for name in NEURON if name not in versions]
    if probe.is_trainium and missing:
        return bad(f"{', '.join(missing)} missing ({text})", cure=read_versions().sdk.install)
    if probe.has_gpu and "+cpu" in torch:
        return bad(
            f"torch {torch} is built without CUDA",
            cure="pip install --force-reinstall 'torch>=2.9'",
        )
    return ok(text)


def memory(probe: Probe) -> Finding:
    ranks = probe.instance.devices or 1
    wanted = ranks * RANK_MEMORY
    text = f"{probe.free_memory / GIB:,.0f} GiB free"
    if probe.free_memory < wanted:
        text += f", but {plural(ranks, 'rank')} need about {wanted / GIB:,.0f}"
        return warn(text, cure="end other programs (ps aux --sort=-rss | head)")
    return ok(text)


def disk(probe: Probe) -> Finding:
    text = ", ".join(
        f"{free / GIB:,.0f} GiB free in {place}" for place, free in probe.free_disk.items()
    )
    least = min(probe.free_disk.values())
    if least >= WANTED_DISK:
        return ok(text)
    cure = "free some space, or set run_dir=, TMPDIR and XDG_CACHE_HOME to a larger disk"
    if least >= LEAST_DISK:
        return warn(text, cure=cure)
    return bad(text, cure=cure)


def clock(probe: Probe) -> Finding:
    """Check that a time server corrects the clock. S3 rejects requests if the clock is off by more than 15 minutes."""
    answer = probe.ask("timedatectl", "show", "-p", "NTPSynchronized")
    if "NTPSynchronized=no" in answer.out:
        return warn("follows no time server", cure="sudo timedatectl set-ntp true")
    if "NTPSynchronized=yes" in answer.out:
        return ok("follows a time server")
    return ok("unknown: timedatectl does not answer")


CHECKS: dict[str, Callable[[Probe], Finding]] = {
    "devices": devices,
    "EFA": efa,
    "packages": packages,
    "memory": memory,
    "disk": disk,
    "clock": clock,
}


def here(options: argparse.Namespace) -> Probe:
    """Probe this machine. Without --instance, its type is the one that the firmware names, if conf/instance has it."""
    name = options.instance or host.instance_type()
    if name not in host.instance_names():
        name = "local"
    places = [Path.cwd(), Path(tempfile.gettempdir()), host.compile_root().parent]
    return Probe(
        versions=host.installed_versions(*PACKAGES),
        cpus=usable_cpus(),
        free_memory=psutil.virtual_memory().available,
        free_disk={str(place): free_bytes(place) for place in places if place.is_dir()},
        instance=read_instance(name),
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    return guarded(lambda: examine(read_arguments(arguments)))


def examine(options: argparse.Namespace) -> int:
    if options.collectives:
        return examine_collectives(options)
    probe = here(options)
    return show({name: look(probe) for name, look in CHECKS.items()}, as_json=options.json)


def examine_collectives(options: argparse.Namespace) -> int:
    check(
        options.instance is None,
        "--collectives reads settings, such as instance=p5.48xlarge; leave out --instance",
    )
    from train.run.compose import load_backend  # late: only --collectives needs Hydra and torch

    cfg, instance = load_backend(options.settings)
    launch = launched()
    check_launch(instance, launch)
    check(
        launch.world_size > 1,
        f"--collectives adds up over ranks, but there is only {launch.world_size}; start several: torchrun "
        f"--standalone --nproc-per-node={instance.devices or 2} -m train doctor --collectives",
    )
    # As in a run whose loader forks, before torch is imported.
    rank_setup.prepare(launch, forks=True)
    from train.tools import collectives

    findings, measured = collectives.measure(cfg, instance)
    if launch.rank > 0:  # all ranks have the same findings; rank 0 prints them
        return code_of(findings)
    return show(findings, as_json=options.json, measured=measured)


def show(findings: Mapping[str, Finding], *, as_json: bool, **more: Any) -> int:
    code = code_of(findings)
    if as_json:
        listed = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        answer = {"ok": code == DONE, "findings": listed, **more}
        say(*json.dumps(answer, indent=1).splitlines())
        return code
    for name, finding in findings.items():
        say(f"{finding.state:6}{name:10}{finding.text}")
        if finding.cure:
            say(f"{'':16}-> {finding.cure}")
    return code


def code_of(findings: Mapping[str, Finding]) -> int:
    if any(finding.state == "bad" for finding in findings.values()):
        return FAILED
    return DONE


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser(
        "doctor",
        "Say whether this machine can train, with a cure for each fault.",
        examples=(
            "",
            "--instance trn1.32xlarge --json",
            "torchrun --standalone --nproc-per-node=8 -m train doctor --collectives backend=ddp instance=p5.48xlarge",
        ),
        exits={
            DONE: "there is nothing to fix",
            FAILED: "there is something to fix",
            REJECTED: "arguments rejected",
        },
    )
    parser.add_argument(
        "--instance",
        choices=host.instance_names(),
        help="instance type (default: as the firmware says)",
    )
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="under torchrun, with settings of the run (key=value): compare sums over the ranks",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text"
    )
    if "--collectives" not in arguments:
        return parser.parse_args(arguments)
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings, see baretrain train --help"
    )
    return parser.parse_intermixed_args(arguments)
