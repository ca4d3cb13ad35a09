"""The doctor on machines made of a few files and answers, once on this very machine, and on several ranks."""

import json
import os
import subprocess
import sys

import pytest
from forks import launch, run_forked
from running import ROOT, run

from train.run import compose as cli
from train.tools import doctor
from train.tools.probe import Answer, Probe, ask_tool, read_instance

GIB = 2**30
VERSIONS = {"torch": "2.9.1", "transformers": "5.23.0"}
SDK = {
    "torch": "2.9.1",
    "torch-xla": "2.9.0",
    "torch-neuronx": "2.9.0.2.15.32035",
    "neuronx-cc": "2.26.6360.0+1a2b3c4d",
}
CHIPS = json.dumps([{"neuron_device": number, "nc_count": 2} for number in range(16)])
GPUS = "NVIDIA A100-SXM4-40GB, 570.133.20\n" * 8


def machine(root, *, says=None, files=(), **facts):
    """A machine with these files, on which every tool has the same answer."""
    for path, text in dict(files).items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    answer = says if isinstance(says, Answer) else Answer(says or "")
    usual = {"versions": VERSIONS, "free_memory": 500 * GIB, "free_disk": {"/tmp": 100 * GIB}}
    return Probe(ask=lambda *_: answer, root=root, cpus=8, **{**usual, **facts})


def trn1(root, says=CHIPS, **facts):
    efa = {f"sys/class/infiniband/rdmap{number}/device/vendor": "0x1d0f\n" for number in range(8)}
    usual = {"versions": SDK, "instance": read_instance("trn1.32xlarge")}
    usual |= {"files": {"dev/neuron0": "", **efa}}
    return machine(root, says=says, **{**usual, **facts})


def p4d(root, says=GPUS, **facts):
    efa = {f"sys/class/infiniband/efa_{number}/device/vendor": "0x1d0f\n" for number in range(4)}
    usual = {"instance": read_instance("p4d.24xlarge"), "files": {"dev/nvidia0": "", **efa}}
    return machine(root, says=says, **{**usual, **facts})


def pci(vendor, device, kind):
    texts = {"vendor": vendor, "device": device, "class": kind}
    return {
        f"sys/bus/pci/devices/0000:00:1e.0/{name}": f"{text}\n" for name, text in texts.items()
    }


@pytest.mark.parametrize("make", [machine, trn1, p4d])
def test_a_healthy_machine_has_nothing_to_fix(tmp_path, make):
    findings = {name: look(make(tmp_path)) for name, look in doctor.CHECKS.items()}
    assert {finding.state for finding in findings.values()} == {"ok"}, findings


CASES = [
    (
        "devices",
        "bad",
        "30 NeuronCores on 15 chips",
        trn1,
        {"says": json.dumps(json.loads(CHIPS)[1:])},
    ),
    ("devices", "bad", "gave no answer", trn1, {"says": Answer(fault="neuron-ls gave no answer")}),
    ("devices", "bad", "driver is not loaded", trn1, {"files": {}}),
    (
        "devices",
        "bad",
        "driver is not loaded",
        machine,
        {"files": pci("0x1d0f", "0x7164", "0x088000")},
    ),
    (
        "devices",
        "bad",
        "2 GPU",
        p4d,
        {"says": GPUS[: len(GPUS) // 4], "files": {"dev/nvidia0": ""}},
    ),
    ("devices", "bad", "lists no GPU", p4d, {"says": ""}),
    ("devices", "bad", "has 8 devices, but this machine has none", p4d, {"files": {}}),
    ("EFA", "warn", "0 of 8 interfaces", trn1, {"files": {"dev/neuron0": ""}}),
    ("packages", "bad", "torch is not installed", machine, {"versions": {}}),
    (
        "packages",
        "bad",
        "built without CUDA",
        p4d,
        {"versions": {"torch": "2.9.1+cpu"}},
    ),
    ("packages", "bad", "torch-xla missing", trn1, {"versions": {**SDK, "torch-xla": None}}),
    ("memory", "warn", "32 ranks need about 32", trn1, {"free_memory": 30 * GIB}),
    (
        "disk",
        "warn",
        "10 GiB free in /tmp",
        machine,
        {"free_disk": {"/tmp": 10 * GIB, "/": 99 * GIB}},
    ),
    ("disk", "bad", "3 GiB free in /tmp", machine, {"free_disk": {"/tmp": 3 * GIB}}),
    ("clock", "warn", "follows no time server", machine, {"says": "NTPSynchronized=no\n"}),
]


@pytest.mark.parametrize(("check", "state", "said", "make", "changes"), CASES)
def test_what_a_check_finds(tmp_path, check, state, said, make, changes):
    if "versions" in changes:
        named = {name: version for name, version in changes["versions"].items() if version}
        changes = {**changes, "versions": named}
    finding = doctor.CHECKS[check](make(tmp_path, **changes))
    assert finding.state == state and said in f"{finding.text} -> {finding.cure}", finding
    assert bool(finding.cure) == (state != "ok")


def test_tools_that_fail_are_missing_or_hang_are_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    scripts = {
        "fine": "echo $1 $LC_ALL",
        "wrong": "echo no chip >&2; exit 3",
        # A child keeps the pipe open after the kill.
        "hangs": "sleep 60 & wait",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    assert ask_tool("fine", "a").out == "a C\n"
    assert ask_tool("wrong").fault == "wrong failed (3): no chip"
    assert ask_tool("no-such-tool").fault == "no-such-tool is not installed"
    assert ask_tool("hangs", timeout_s=0.2).fault == "hangs gave no answer in 0.2 s"


def test_the_command_runs_here_without_torch():
    """In a process of its own, from which torch and all device libraries are out of reach."""
    blocked = ("torch", "torch_xla", "torch_neuronx", "transformers", "libneuronxla")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); "
    code += "from train.tools.doctor import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, "--json"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert [finding["name"] for finding in result["findings"]] == list(doctor.CHECKS)
    reds = [finding for finding in result["findings"] if finding["state"] == "bad"]
    assert (done.returncode, result["ok"]) == (int(bool(reds)), not reds)


# ---- sums over ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "there is only 1; start several: torchrun --standalone --nproc-per-node=2 -m"),
        ("instance=p6", "there is no such instance"),
        ("--instance local", "leave out --instance"),
    ],
)
def test_what_is_rejected(arguments, said, capsys):
    assert doctor.main(["--collectives", *arguments.split()]) == cli.REJECTED
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_on_xla():
    arguments = ["--collectives", "backend=xla", "backend.device=cpu", "--json"]
    done = run(arguments, ranks=2, module="doctor")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] and said["measured"]["wrong_ranks"] == []
    assert [finding["name"] for finding in said["findings"]] == ["ranks", "devices"]


DISTURBED = """
import os, sys
from train.parallel.ddp import DDP

all_reduce = DDP.all_reduce

def adds_wrongly(self, tensors):
    all_reduce(self, tensors)
    if self.world.rank == 1:
        tensors[0][-1] += 1

DDP.all_reduce = adds_wrongly
from train.tools.doctor import main
sys.exit(main(sys.argv[1:]))
"""


def test_ranks_with_a_wrong_sum_are_named(tmp_path):
    (tmp_path / "script.py").write_text(DISTURBED)
    settings = ["--collectives", "backend.device=cpu"]
    done = run_forked(launch(str(tmp_path / "script.py"), settings, ranks=2), os.environ)
    assert done.returncode == 1
    assert "wrong sum on 1 rank: " in done.stdout and "(rank 1);" in done.stdout
