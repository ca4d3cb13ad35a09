"""Checks of devices, the processes that hold them, ranks and EFA interfaces. Not run on Trainium, GPU or EFA hardware.

Outputs are parsed as the tools document them: `neuron-ls --json-output` (Neuron system tools guide), `nvidia-smi
--query-gpu` and `--query-compute-apps` (nvidia-smi --help-query-gpu), `fi_info` (libfabric's manual).
"""

from __future__ import annotations

import csv
import re

from train.doctor.finding import Finding, bad, ok, skip, warn
from train.doctor.probe import Probe, ToolOutput
from train.host.machine import read_neuron_ls

GPU_QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")
HOLDER_QUERY = ("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
RELOAD = "sudo modprobe -r neuron && sudo modprobe neuron"
OFI_NCCL = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:$LD_LIBRARY_PATH"
WATCHERS = ("neuron-monitor", "neuron-top", "neuron-ls")  # these open the device files but hold no core


def read_csv(text: str) -> list[list[str]]:
    """Parse nvidia-smi's CSV without header and units."""
    return [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) > 1]


# ---- devices -------------------------------------------------------------------------------------------------------


def devices(probe: Probe) -> Finding:
    if probe.is_trainium:
        return neuron_devices(probe, probe.ask("neuron-ls", "-j"))
    if probe.has_gpu:
        return gpu_devices(probe, probe.ask(*GPU_QUERY))
    if probe.instance and probe.num_devices:
        text = f"{probe.instance.name} has {probe.num_devices} devices, this machine shows none"
        return bad(text, cure="set this machine's own --instance (without it, the firmware names the type)")
    return ok(f"no accelerator; {probe.num_cpus} CPU cores")


def neuron_devices(probe: Probe, answer: ToolOutput) -> Finding:
    num_files = len(probe.neuron_devices)
    if not num_files:
        cure = "sudo modprobe neuron; if that fails: sudo apt-get install --reinstall aws-neuronx-dkms, then reboot"
        return bad("no /dev/neuron*: the Neuron driver is not loaded", cure=cure)
    if answer.is_missing:
        cure = "sudo apt-get install aws-neuronx-tools && export PATH=/opt/aws/neuron/bin:$PATH"
        text = f"{num_files} Neuron chips; {answer.fault}: cores, and the processes that hold them, are unknown"
        return warn(text, cure=cure)
    if answer.fault:
        return bad(answer.fault, cure=f"{RELOAD}; if it stays, stop and start the instance")
    try:
        chips = read_neuron_ls(answer.out)
    except ValueError as error:
        cure = "sudo apt-get install --only-upgrade aws-neuronx-tools"
        return bad(f"neuron-ls -j cannot be read ({error})", cure=cure)
    num_cores = sum(chip.num_cores for chip in chips)
    text = f"{num_cores} NeuronCores on {len(chips)} chips"
    if probe.instance and probe.num_devices not in (None, num_cores):
        cure = f"{RELOAD}; if it stays, stop and start the instance (it moves to another host)"
        return bad(f"{text}; {probe.instance.name} has {probe.num_devices} cores", cure=cure)
    return ok(text)


def gpu_devices(probe: Probe, answer: ToolOutput) -> Finding:
    if answer.is_missing:
        cure = "install NVIDIA's driver (sudo ubuntu-drivers install --gpgpu), then reboot"
        return bad("an NVIDIA GPU is on the bus, nvidia-smi is not installed", cure=cure)
    if answer.fault:
        cure = "sudo modprobe nvidia; after a kernel update install the driver again; then reboot (dmesg | grep NVRM)"
        return bad(answer.fault, cure=cure)
    rows = read_csv(answer.out)
    if not rows:
        return bad("nvidia-smi lists no GPU", cure="reboot; look for errors in: dmesg | grep NVRM")
    kinds = sorted({f"{row[1]}, {gib(row[2])}" for row in rows if len(row) > 3})
    text = f"{len(rows)} GPU ({'; '.join(kinds)}), driver {rows[0][-1]}"
    if probe.instance and probe.num_devices not in (None, len(rows)):
        cure = "look for a lost GPU (dmesg | grep -i xid), unset CUDA_VISIBLE_DEVICES, stop and start the instance"
        return bad(f"{text}; {probe.instance.name} has {probe.num_devices}", cure=cure)
    return ok(text)


def gib(mebibytes: str) -> str:
    return f"{int(mebibytes) / 1024:.0f} GiB" if mebibytes.isdigit() else "memory unknown"


def count_devices(probe: Probe) -> int | None:
    """Number of devices for ranks, as the tools count them; None if they name none."""
    answer = probe.ask("neuron-ls", "-j") if probe.is_trainium else probe.ask(*GPU_QUERY)
    if answer.fault or not probe.is_accelerated:
        return None
    try:
        return sum(c.num_cores for c in read_neuron_ls(answer.out)) if probe.is_trainium else len(read_csv(answer.out))
    except ValueError:
        return None  # the check `devices` reports it


# ---- processes that hold them --------------------------------------------------------------------------------------


def holders(probe: Probe) -> Finding:
    if probe.is_trainium:
        return neuron_holders(probe, probe.ask("neuron-ls", "-j"))
    if probe.has_gpu:
        return gpu_holders(probe.ask(*HOLDER_QUERY))
    return skip("no accelerator")


def neuron_holders(probe: Probe, answer: ToolOutput) -> Finding:
    try:
        chips = read_neuron_ls(answer.out)  # ValueError too if it printed nothing
    except ValueError:
        chips = []
    if not chips:
        return skip("neuron-ls does not say")
    held: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for chip in chips:
        for pid, command in chip.holders:
            command = command or (probe.text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
            if not any(watcher in command.split(" ")[0] for watcher in WATCHERS):
                held.setdefault(pid, []).append(chip.number)
                commands[pid] = command or "?"
    if not held:
        return ok("no process: every core is free")
    first = min(held)
    num_chips = len({number for numbers in held.values() for number in numbers})
    text = f"process {first} ({commands[first][:60]}){more(len(held))} on {num_chips} of {len(chips)} chips"
    return bad(text, cure=kill(sorted(held)))


def gpu_holders(answer: ToolOutput) -> Finding:
    if answer.fault:
        return skip(answer.fault)
    rows = read_csv(answer.out)
    if not rows:
        return ok("no process computes on a GPU")
    used = f", {gib(rows[0][2])}" if len(rows[0]) > 2 and rows[0][2].isdigit() else ""
    text = f"process {rows[0][0]} ({rows[0][1][:60]}{used}){more(len(rows))}"
    return warn(text, cure=kill(sorted({int(row[0]) for row in rows if row[0].isdigit()})))


def more(count: int) -> str:
    return f" and {count - 1} more" if count > 1 else ""


def kill(pids: list[int]) -> str:
    return f"kill {' '.join(map(str, pids))} (unless it is a run that you need; after a minute kill -9)"


# ---- ranks ---------------------------------------------------------------------------------------------------------


def ranks(probe: Probe) -> Finding:
    instance, wanted = probe.instance, probe.num_ranks
    counts = ", ".join(map(str, (instance and instance.rank_counts) or []))
    if wanted is None:
        return skip(f"--ranks-per-machine checks a number{f'; here: {counts}' if counts else ''}")
    full = probe.num_devices or count_devices(probe)
    if instance and instance.rank_counts and wanted not in instance.rank_counts:
        best = max((count for count in instance.rank_counts if count <= wanted), default=min(instance.rank_counts))
        text = f"{wanted} ranks on {instance.name}: the runtime takes {counts}"
        return bad(text, cure=f"torchrun --nproc-per-node={best}")
    if full and wanted > full:
        return bad(f"{wanted} ranks for {full} devices", cure=f"torchrun --nproc-per-node={full}")
    if full and probe.is_trainium and probe.num_machines > 1 and wanted != full:
        text = f"{wanted} ranks a machine: collectives between Trainium machines need all {full} cores of each"
        return bad(text, cure=f"torchrun --nproc-per-node={full}")
    return ok(f"{wanted} a machine" + (f" of {full} devices" if full else ""))


# ---- EFA -----------------------------------------------------------------------------------------------------------


def read_fi_info(text: str) -> set[str]:
    """Devices in `fi_info -p efa`, where each has a domain for each endpoint type ("rdmap16s27-rdm", "-dgrm")."""
    return {re.sub(r"-(rdm|dgrm)$", "", domain) for domain in re.findall(r"^\s*domain:\s*(\S+)", text, re.MULTILINE)}


def efa(probe: Probe) -> Finding:
    num_seen = len(probe.efa_devices)
    wanted = probe.instance.efa_interfaces if probe.instance else None
    # A single machine trains without EFA, and one network card serves TCP as well.
    fault = warn if probe.num_machines == 1 or wanted == 1 else bad
    alone = "" if probe.num_machines > 1 else " (a single machine trains without)"
    if not num_seen and not wanted:
        return skip("this instance has none" if wanted == 0 else "none seen, none expected")
    if wanted and num_seen < wanted and probe.instance:
        text = f"{num_seen} of {probe.instance.name}'s {wanted} interfaces{alone}"
        cure = "they are attached at launch only: launch again with InterfaceType=efa on every network card; "
        return fault(text, cure=cure + "if they are: the EFA installer, sudo ./efa_installer.sh -y")
    answer = probe.ask("fi_info", "-p", "efa")
    usable = 0 if answer.fault else len(read_fi_info(answer.out))
    if usable < num_seen:
        text = (
            f"{num_seen} interfaces, libfabric sees {usable}" + (f" ({answer.fault})" if answer.fault else "") + alone
        )
        cure = "install EFA's libfabric: sudo ./efa_installer.sh -y, then export PATH=/opt/amazon/efa/bin:$PATH"
        return fault(text, cure=cure)
    if probe.has_gpu and not nccl_plugins(probe):
        cure = f"install aws-ofi-nccl (sudo ./efa_installer.sh -y), then export LD_LIBRARY_PATH={OFI_NCCL}"
        return fault(f"{num_seen} interfaces; NCCL has no libnccl-net*.so and would use TCP{alone}", cure=cure)
    return ok(f"{num_seen} interfaces" + (f" of {wanted}" if wanted else "") + ", libfabric sees all")


def nccl_plugins(probe: Probe) -> list[str]:
    """The network plugins of NCCL (aws-ofi-nccl's for EFA) that the dynamic linker finds, in ld.so(8)'s places."""
    folders = filter(None, probe.environ.get("LD_LIBRARY_PATH", "").split(":"))
    given = [str(file) for folder in folders for file in probe.files(f"{folder}/libnccl-net*.so")]
    return given + re.findall(r"^\s*(libnccl-net\S*\.so)", probe.ask("ldconfig", "-p").out, re.MULTILINE)
