"""Checks of devices, of processes that use them, of ranks and of EFA interfaces. Not tested on Trainium or with EFA.

The outputs of tools are parsed as documented: `neuron-ls --json-output` in the Neuron system tools guide, `nvidia-smi
--query-gpu` and `--query-compute-apps` in `nvidia-smi --help-query-gpu`, `fi_info` in libfabric's manual.
"""

from __future__ import annotations

import csv
import re

from train.config import InputError, InstanceConfig, plural
from train.machine.launched import Launched, check_launch
from train.machine.neuron import Chip, read_neuron_ls
from train.tools.doctor.probe import Finding, Probe, ToolOutput, bad, ok, skip, warn

CHIP_QUERY = ("neuron-ls", "-j")
GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)
HOLDER_QUERY = (
    "nvidia-smi",
    "--query-compute-apps=pid,process_name,used_memory",
    "--format=csv,noheader,nounits",
)
RELOAD = "sudo modprobe -r neuron && sudo modprobe neuron"
OFI_NCCL = "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu:$LD_LIBRARY_PATH"
# programs that open the device files but hold no core
WATCHERS = (
    "neuron-monitor",
    "neuron-top",
    "neuron-ls",
)


def neuron_chips(probe: Probe) -> list[Chip]:
    """Return the chips that neuron-ls lists; [] if it fails, which `devices` reports."""
    try:
        return read_neuron_ls(probe.ask(*CHIP_QUERY).out)
    except ValueError:  # The output is empty or not as documented.
        return []


def read_csv(answer: ToolOutput) -> list[list[str]]:
    """Parse nvidia-smi's CSV without header and units; return [] if nvidia-smi failed."""
    lines = [] if answer.fault else answer.out.splitlines()
    return [row for row in csv.reader(lines, skipinitialspace=True) if len(row) > 1]


# ---- devices -------------------------------------------------------------------------------------------------------


def devices(probe: Probe) -> Finding:
    if probe.is_trainium:
        return neuron_devices(probe, probe.ask(*CHIP_QUERY))
    if probe.has_gpu:
        return gpu_devices(probe, probe.ask(*GPU_QUERY))
    if probe.instance and probe.num_devices:
        text = f"{probe.instance.name} has {plural(probe.num_devices, 'device')}, but this machine has none"
        return bad(
            text,
            cure="set --instance to this machine's type (without the flag, the firmware names it)",
        )
    return ok(f"no accelerator; {probe.num_cpus} CPU cores")


def neuron_devices(probe: Probe, answer: ToolOutput) -> Finding:
    num_files = len(probe.neuron_devices)
    if not num_files:
        cure = "sudo modprobe neuron; if that fails: sudo apt-get install --reinstall aws-neuronx-dkms, then reboot"
        return bad("no /dev/neuron*: the Neuron driver is not loaded", cure=cure)
    if answer.is_missing:
        cure = "sudo apt-get install aws-neuronx-tools && export PATH=/opt/aws/neuron/bin:$PATH"
        text = f"{num_files} Neuron chips; {answer.fault}: the cores and the processes that hold them are unknown"
        return warn(text, cure=cure)
    if answer.fault:
        return bad(
            answer.fault, cure=f"{RELOAD}; if that does not help, stop and start the instance"
        )
    try:
        chips = read_neuron_ls(answer.out)
    except ValueError as error:
        cure = "sudo apt-get install --only-upgrade aws-neuronx-tools"
        return bad(f"the output of neuron-ls -j cannot be read ({error})", cure=cure)
    num_cores = sum(chip.num_cores for chip in chips)
    cure = (
        f"{RELOAD}; if that does not help, stop and start the instance (it moves to another host)"
    )
    return counted(
        probe, num_cores, f"{num_cores} NeuronCores on {len(chips)} chips", " cores", cure
    )


def gpu_devices(probe: Probe, answer: ToolOutput) -> Finding:
    if answer.is_missing:
        cure = "install NVIDIA's driver (sudo ubuntu-drivers install --gpgpu), then reboot"
        return bad("an NVIDIA GPU is on the PCI bus, but nvidia-smi is not installed", cure=cure)
    if answer.fault:
        cure = "sudo modprobe nvidia; after a kernel update install the driver again; then reboot (dmesg | grep NVRM)"
        return bad(answer.fault, cure=cure)
    rows = read_csv(answer)
    if not rows:
        return bad("nvidia-smi lists no GPU", cure="reboot; look for errors in: dmesg | grep NVRM")
    kinds = sorted({f"{row[1]}, {gib(row[2])}" for row in rows if len(row) > 3})
    text = f"{len(rows)} GPU ({'; '.join(kinds)}), driver {rows[0][-1]}"
    cure = "look for a lost GPU (dmesg | grep -i xid), unset CUDA_VISIBLE_DEVICES, stop and start the instance"
    return counted(probe, len(rows), text, "", cure)


def counted(probe: Probe, number: int, text: str, unit: str, cure: str) -> Finding:
    """Return a finding on `number` devices, which is an error if the instance type has a different number."""
    if probe.instance and probe.num_devices not in (None, number):
        return bad(f"{text}; {probe.instance.name} has {probe.num_devices}{unit}", cure=cure)
    return ok(text)


def gib(mebibytes: str) -> str:
    return f"{int(mebibytes) / 1024:.0f} GiB" if mebibytes.isdigit() else "memory unknown"


# ---- processes that use the devices --------------------------------------------------------------------------------


def holders(probe: Probe) -> Finding:
    if probe.is_trainium:
        return neuron_holders(probe, neuron_chips(probe))
    if probe.has_gpu:
        return gpu_holders(probe.ask(*HOLDER_QUERY))
    return skip("no accelerator")


def neuron_holders(probe: Probe, chips: list[Chip]) -> Finding:
    if not chips:
        return skip("neuron-ls lists no chips")
    numbers: set[int] = set()
    commands: dict[int, str] = {}
    for chip in chips:
        for pid, command in chip.holders:
            command = (
                command or (probe.text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
            )
            if not any(watcher in command.split(" ")[0] for watcher in WATCHERS):
                numbers.add(chip.number)
                commands[pid] = command[:60] or "?"
    if not commands:
        return ok("no process: every core is free")
    text, cure = held_by(commands)
    return bad(f"{text} on {len(numbers)} of {len(chips)} chips", cure=cure)


def gpu_holders(answer: ToolOutput) -> Finding:
    rows = [row for row in read_csv(answer) if row[0].isdigit()]
    if answer.fault:
        return skip(answer.fault)
    if not rows:
        return ok("no process computes on a GPU")
    text, cure = held_by(
        {int(row[0]): ", ".join([row[1][:60], *map(gib, row[2:3])]) for row in rows}
    )
    return warn(text, cure=cure)


def held_by(names: dict[int, str]) -> tuple[str, str]:
    """Return a text that names the first of these processes (commands by id), and a command that ends all of them."""
    first, more = min(names), f" and {len(names) - 1} more" if len(names) > 1 else ""
    cure = f"kill {' '.join(map(str, sorted(names)))} (unless you need that run); if that does not help, kill -9"
    return f"process {first} ({names[first]}){more}", cure


# ---- ranks ---------------------------------------------------------------------------------------------------------


def ranks(probe: Probe) -> Finding:
    wanted, full = probe.num_ranks, probe.num_devices
    if wanted is None:
        return skip("needs --ranks-per-machine")
    if full is None:
        chips = neuron_chips(probe) if probe.is_trainium else []
        full = sum(chip.num_cores for chip in chips) or len(read_csv(probe.ask(*GPU_QUERY)))
    if full and wanted > full:
        text = f"{wanted} ranks for {plural(full, 'device')}"
        return bad(text, cure=f"torchrun --standalone --nproc-per-node={full}")
    world = Launched(
        world_size=wanted * probe.num_machines, local_world_size=wanted, is_distributed=True
    )
    try:
        check_launch(probe.instance or InstanceConfig(), world)
    except InputError as error:
        text, _, cure = str(error).partition("; ")
        return bad(text, cure=cure)
    return ok(f"{wanted} per machine" + (f", which has {plural(full, 'device')}" if full else ""))


# ---- EFA -----------------------------------------------------------------------------------------------------------


def efa(probe: Probe) -> Finding:
    num_seen = len(probe.efa_devices)
    wanted = probe.instance.efa_interfaces if probe.instance else None
    # A single machine does not need EFA, nor do machines with one network card, which also carries TCP.
    fault = warn if probe.num_machines == 1 or wanted == 1 else bad
    alone = "" if probe.num_machines > 1 else " (a single machine trains without EFA)"
    if not num_seen and not wanted:
        return skip("this instance has none" if wanted == 0 else "none seen, none expected")
    if wanted and num_seen < wanted and probe.instance:
        text = f"{num_seen} of {probe.instance.name}'s {wanted} interfaces{alone}"
        cure = "launch again with InterfaceType=efa on every network card: interfaces cannot be added later; "
        return fault(
            text,
            cure=cure + "if all were requested, run the EFA installer: sudo ./efa_installer.sh -y",
        )
    seen, answer = plural(num_seen, "interface"), probe.ask("fi_info", "-p", "efa")
    # fi_info lists each device once per endpoint type ("rdmap16s27-rdm", "rdmap16s27-dgrm").
    usable = len(
        set(re.findall(r"^\s*domain:\s*(\S+?)(?:-rdm|-dgrm)?$", answer.out, re.MULTILINE))
    )
    if usable < num_seen:
        why = f" ({answer.fault})" if answer.fault else ""
        text = f"{seen}, of which libfabric sees {usable}{why}{alone}"
        cure = "install EFA's libfabric: sudo ./efa_installer.sh -y, then export PATH=/opt/amazon/efa/bin:$PATH"
        return fault(text, cure=cure)
    if probe.has_gpu and not has_nccl_plugin(probe):
        cure = f"install aws-ofi-nccl (sudo ./efa_installer.sh -y), then export LD_LIBRARY_PATH={OFI_NCCL}"
        return fault(f"{seen}; NCCL has no libnccl-net*.so and would use TCP{alone}", cure=cure)
    return ok(seen + (f" of {wanted}" if wanted else "") + ", libfabric sees all")


def has_nccl_plugin(probe: Probe) -> bool:
    """Return whether the dynamic linker, ld.so(8), would find a network plugin for NCCL such as aws-ofi-nccl."""
    folders = filter(None, probe.environ.get("LD_LIBRARY_PATH", "").split(":"))
    is_given = any(probe.files(f"{folder}/libnccl-net*.so") for folder in folders)
    return (
        is_given
        or re.search(r"^\s*libnccl-net\S*\.so", probe.ask("ldconfig", "-p").out, re.MULTILINE)
        is not None
    )
