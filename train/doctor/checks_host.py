"""Limits, ports, cache, disk, memory, clock, environment and names. Neuron and EFA parts: not run on hardware."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from train import machine
from train.doctor.finding import Finding, bad, ok, skip, warn
from train.doctor.probe import Probe, nearest

GIB = 2**30
# A checkpoint of the largest ALBERT (223 M parameters, 12 bytes each with AdamW's state) is 2.7 GB. Below 4 GiB the
# next one may not fit; 20 GiB hold the few that are kept, the one being written, and some compiled graphs.
LEAST_DISK, WANTED_DISK = 4 * GIB, 20 * GIB
LEAST_SHM = GIB  # containers have 64 MiB by default; a worker keeps two batches of some MB there, and there are many
LEAST_MEMORY = GIB
RANK_MEMORY = GIB  # measured: torch and transformers imported take 0.65 GiB in each process
COMPILER_MEMORY = 8 * GIB  # neuronx-cc is killed (exit code -9) where memory is short; a guess, not run on hardware
OLD_LOCK_S = 3600.0  # the longest compilations take some 45 minutes
WANTED_CLOCK_S, LEAST_CLOCK_S = 1.0, 60.0


# ---- limits and ports ----------------------------------------------------------------------------------------------


def open_files(probe: Probe) -> Finding:
    """Ranks, loader workers and EFA open many; a laptop's run does not."""
    soft, hard = probe.limits.get("nofile", (math.nan, math.nan))
    if math.isnan(soft):
        return skip("open files", "limit unknown")
    least, wanted = (4096, 65535) if probe.is_accelerated else (256, 1024)
    if soft >= wanted:
        return ok("open files", number(soft))
    cure = f"ulimit -n {wanted}"
    if hard < wanted:
        cure = f"add '* - nofile {wanted}' to /etc/security/limits.conf and log in again"
    return (bad if soft < least else warn)("open files", f"{number(soft)}, {wanted:,} wanted", cure=cure)


def locked_memory(probe: Probe) -> Finding:
    soft, _ = probe.limits.get("memlock", (math.nan, math.nan))
    if not probe.efa_devices:
        return skip("locked memory", "only EFA needs it")
    if soft == math.inf:
        return ok("locked memory", "unlimited")
    text = f"{soft / 1024:,.0f} KiB: EFA registers more" if not math.isnan(soft) else "limit unknown"
    return bad("locked memory", text, cure="add '* - memlock unlimited' to /etc/security/limits.conf and log in again")


def processes(probe: Probe) -> Finding:
    soft, hard = probe.limits.get("nproc", (math.nan, math.nan))
    if math.isnan(soft):
        return skip("processes", "limit unknown")
    wanted = 4096 if probe.is_accelerated else 512  # threads count too: 32 ranks of 30 to 60 threads, and workers
    if soft >= wanted:
        return ok("processes", number(soft))
    cure = f"ulimit -u {wanted}" if hard >= wanted else f"add '* - nproc {wanted}' to /etc/security/limits.conf"
    return warn("processes", f"{number(soft)}, {wanted:,} wanted", cure=cure)


def number(value: float) -> str:
    return "unlimited" if value == math.inf else f"{value:,.0f}"


def read_ports(text: str) -> list[range]:
    """Ports of ip_local_reserved_ports: "8080,48600-48700"."""
    pairs = (part.partition("-") for part in re.findall(r"\d+(?:-\d+)?", text))
    return [range(int(low), int(high or low) + 1) for low, _, high in pairs]


def reserved_ports(probe: Probe) -> Finding:
    name, port = "reserved port", machine.ROOT_COMM_PORT
    if not probe.is_trainium:
        return skip(name, "no Trainium")
    reserved = probe.text("/proc/sys/net/ipv4/ip_local_reserved_ports")
    if reserved is None:
        return skip(name, "not Linux, or /proc cannot be read")
    if any(port in ports for ports in read_ports(reserved)):
        return ok(name, f"{port} is kept for Neuron's collectives")
    low, high = map(int, (probe.text("/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split())
    if not low <= port <= high:
        return ok(name, f"{port} is outside the ports that are given out ({low} to {high})")
    value = ",".join(filter(None, [reserved, str(port)]))
    text = f"{port} may be given to any connection; Neuron's collectives then hang at their start"
    return warn(name, text, cure=f"sudo sysctl -w net.ipv4.ip_local_reserved_ports={value}")


def fork_safety(probe: Probe) -> Finding:
    name, efa = "fork safety", probe.efa_devices
    if not efa:
        return skip(name, "no EFA")
    if probe.is_old_kernel and probe.environ.get("FI_EFA_FORK_SAFE", "0") == "0":
        text = f"Linux {probe.kernel} with EFA: a loader worker that forks breaks what EFA sends"
        return bad(name, text, cure="export FI_EFA_FORK_SAFE=1")
    huge = re.search(r"^HugePages_Total:\s*(\d+)", probe.text("/proc/meminfo") or "", re.MULTILINE)
    if huge and int(huge[1]) and probe.environ.get("FI_EFA_USE_HUGE_PAGE") != "0":
        text = f"EFA takes from {int(huge[1]):,} huge pages; a fork may fail with 'Cannot allocate memory'"
        return warn(name, text, cure="export FI_EFA_USE_HUGE_PAGE=0")
    return ok(name, f"Linux {probe.kernel}" + (", FI_EFA_FORK_SAFE=1" if probe.is_old_kernel else ""))


# ---- cache, disk, memory -------------------------------------------------------------------------------------------


def cache(probe: Probe) -> Finding:
    """The compile cache: on this machine's own disk or S3, writable, without locks that nobody holds any more."""
    name, place = "compile cache", machine.cache_location(probe.environ)
    if not probe.is_trainium:
        return skip(name, "no Trainium")
    fault = machine.cache_fault(probe.environ)
    if fault:
        what, _, cure = fault.partition("; ")
        cure = cure or f"export NEURON_COMPILE_CACHE_URL={machine.DEFAULT_CACHE}"
        return bad(name, what, cure=cure)
    if "://" in place:
        return ok(name, place)
    folder = nearest(Path(place).expanduser())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        cure = (
            f"sudo mkdir -p {place} && sudo chown $USER {place}, or export NEURON_COMPILE_CACHE_URL=$HOME/neuron-cache"
        )
        return bad(name, f"{place} cannot be written to", cure=cure)
    locks = [file for file in Path(place).expanduser().rglob("*.lock") if is_old(file, probe.now_s)]
    if locks:
        text = f"{len(locks)} locks in {place} are older than an hour: compilations wait for them"
        return warn(name, text, cure="if nothing compiles: neuron_parallel_compile --command clear-locks")
    return ok(name, f"{place} ({machine.filesystem(place) or 'file system unknown'})")


def is_old(file: Path, now_s: float) -> bool:
    try:
        return now_s - file.stat().st_mtime > OLD_LOCK_S
    except (FileNotFoundError, PermissionError):  # taken away meanwhile, or another user's
        return False


def disk(probe: Probe) -> Finding:
    places = {"this folder": probe.cwd, "/tmp": Path(probe.environ.get("TMPDIR", "/tmp"))}
    cache_place = machine.cache_location(probe.environ)
    if probe.is_trainium and "://" not in cache_place:
        places["the compile cache"] = Path(cache_place).expanduser()
    free = {name: probe.free_bytes(nearest(path)) for name, path in places.items()}
    known = {name: value for name, value in free.items() if value is not None}
    if not known:
        return skip("disk", "free space unknown")
    least = min(known, key=lambda name: known[name])
    text = ", ".join(f"{value / GIB:,.0f} GiB free in {name}" for name, value in known.items())
    if known[least] >= WANTED_DISK:
        return ok("disk", text)
    setting = {"this folder": "run_dir=", "/tmp": "export TMPDIR="}.get(least, "export NEURON_COMPILE_CACHE_URL=")
    cure = f"make room in {places[least]}, or point {setting} to a larger disk; 20 GiB hold a few large checkpoints"
    return (bad if known[least] < LEAST_DISK else warn)("disk", text, cure=cure)


def memory(probe: Probe) -> Finding:
    free, total = probe.memory_bytes
    text = f"{free / GIB:,.0f} of {total / GIB:,.0f} GiB free"
    full = (probe.instance.devices if probe.instance else None) or 1
    num_ranks = probe.num_ranks or full
    wanted = num_ranks * RANK_MEMORY + (COMPILER_MEMORY if probe.is_trainium else 0)
    if free >= wanted:
        return ok("memory", text)
    cure = "end other programs (ps aux --sort=-rss | head)"
    cure += "; NEURON_PARALLEL_COMPILE_MAX_RETRIES=1 where the compiler is killed" if probe.is_trainium else ""
    text += f", some {wanted / GIB:,.0f} wanted for {num_ranks} ranks" + (" and the compiler" * probe.is_trainium)
    return (bad if free < LEAST_MEMORY else warn)("memory", text, cure=cure)


def shared_memory(probe: Probe) -> Finding:
    free = probe.free_bytes(Path("/dev/shm")) if probe.system == "Linux" else None
    if free is None:
        return skip("shared memory", "no /dev/shm")
    if free >= LEAST_SHM:
        return ok("shared memory", f"{free / GIB:,.0f} GiB free in /dev/shm")
    text = f"{free / 2**20:,.0f} MiB free in /dev/shm: loader workers die of a bus error"
    return warn("shared memory", text, cure="docker run --shm-size=8g, or sudo mount -o remount,size=8G /dev/shm")


# ---- clock, environment, names -------------------------------------------------------------------------------------


def read_chrony(text: str) -> tuple[float, str]:
    """Offset in seconds and leap status of `chronyc tracking`; (nan, "") if it does not say."""
    offset = re.search(r"^System time\s*:\s*([\d.]+) seconds", text, re.MULTILINE)
    leap = re.search(r"^Leap status\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return (float(offset[1]) if offset else math.nan), (leap[1] if leap else "")


def clock(probe: Probe) -> Finding:
    """Whether somebody keeps the clock: signatures for S3 are refused from 15 minutes on, logs compare by seconds."""
    restart = "sudo systemctl enable --now chrony && sudo chronyc makestep"
    answer = probe.ask("chronyc", "tracking")
    if not answer.fault:
        offset_s, leap = read_chrony(answer.out)
        if leap != "Normal":
            return warn("clock", f"chrony does not follow a server ({leap or 'status unknown'})", cure=restart)
        text = f"{offset_s:.6f} s off, chrony keeps it"
        if offset_s <= WANTED_CLOCK_S:
            return ok("clock", text)
        return (bad if offset_s > LEAST_CLOCK_S else warn)("clock", text, cure="sudo chronyc makestep")
    answer = probe.ask("timedatectl", "show", "-p", "NTPSynchronized")
    if answer.fault or "NTPSynchronized=" not in answer.out:
        return skip("clock", "neither chronyc nor timedatectl says; --bucket compares it with S3's")
    if "NTPSynchronized=yes" in answer.out:
        return ok("clock", "follows a time server")
    return warn("clock", "follows no time server", cure="sudo timedatectl set-ntp true")


def knobs(probe: Probe) -> Finding:
    found = machine.bad_knobs(probe.environ)
    if probe.is_old_kernel:
        found = [knob for knob in found if knob.name != "FI_EFA_FORK_SAFE"]
    if not found:
        return ok("variables", "none set that is dead or changes results")
    text = "; ".join(f"{knob.name} {knob.why}" for knob in found)
    state = bad if any(knob.is_dangerous for knob in found) else warn
    return state("variables", text, cure=f"unset {' '.join(knob.name for knob in found)}")


def malloc(probe: Probe) -> Finding:
    value = probe.environ.get("MALLOC_ARENA_MAX")
    if not probe.is_trainium:
        return skip("malloc arenas", "no Trainium")
    if value:
        return ok("malloc arenas", value)
    text = "MALLOC_ARENA_MAX unset: host memory grows with every thread until ranks are killed"
    return warn("malloc arenas", text, cure="export MALLOC_ARENA_MAX=64")


def hostname(probe: Probe) -> Finding:
    name = probe.hostname
    if len(name) > 63:
        return bad(
            "host name", f"{len(name)} characters: bootstrap takes 63", cure="sudo hostnamectl set-hostname NAME"
        )
    loop = next((line for line in (probe.text("/etc/hosts") or "").splitlines() if is_loop(line, name)), None)
    if loop and (probe.num_machines > 1 or probe.efa_devices):
        text = f"/etc/hosts maps {name} to {loop.split()[0]}: other machines are sent to themselves"
        cure = f"in /etc/hosts put the address that `hostname -I` prints first before {name}"
        return (bad if probe.num_machines > 1 else warn)("host name", text, cure=cure)
    return ok("host name", name)


def is_loop(line: str, name: str) -> bool:
    """Whether a line of /etc/hosts maps a name to this machine itself."""
    address, *names = line.partition("#")[0].split() or [""]
    return name != "localhost" and name in names and (address.startswith("127.") or address == "::1")
