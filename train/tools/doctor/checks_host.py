"""Checks of limits, compile cache, disk, memory, clock, variables and host name. Not tested on Trainium or with EFA."""

from __future__ import annotations

import math
import re
from pathlib import Path

from train.config import plural
from train.machine import host, neuron
from train.machine.rank_setup import OPEN_FILES
from train.tools.doctor.probe import Finding, Probe, bad, nearest, ok, skip, warn

GIB = 2**30
# A checkpoint of the largest ALBERT takes 2.7 GB (223 M parameters at 12 bytes each, including AdamW's state), so 4 GiB
# hold only one. 20 GiB are enough for the kept checkpoints, a new one, and some compiled graphs.
# bytes; below the first an error, below the second a warning
LEAST_DISK, WANTED_DISK = (
    4 * GIB,
    20 * GIB,
)
LEAST_MEMORY = GIB
RANK_MEMORY = GIB  # 0.65 GiB were measured in a process that had imported torch and transformers.
COMPILER_MEMORY = 8 * GIB  # an estimate; neuronx-cc is killed (exit code -9) if memory is short
OLD_LOCK_S = 3600.0  # The longest compilations take about 45 minutes.
# seconds off; above the first a warning, above the second an error
WANTED_CLOCK_S, LEAST_CLOCK_S = (
    1.0,
    60.0,
)
LOOPBACK = ("127.", "::1")


# ---- limits --------------------------------------------------------------------------------------------------------


def open_files(probe: Probe) -> Finding:
    """Check the limit on open files. With accelerators, the ranks, loader workers and EFA open many files."""
    least, wanted = (4096, OPEN_FILES) if probe.is_accelerated else (256, 1024)
    soft, hard = probe.limits["nofile"]
    if probe.system == "Linux" and hard >= wanted:
        return ok(f"a run raises its limit to {min(hard, OPEN_FILES):,.0f}")
    if soft >= wanted:
        return ok("unlimited" if soft == math.inf else f"{soft:,.0f}")
    cure = f"add '* - nofile {wanted}' to /etc/security/limits.conf and log in again"
    if hard >= wanted:
        cure = f"ulimit -n {wanted}"
    return (bad if soft < least else warn)(f"{soft:,.0f}, but a run needs {wanted:,}", cure=cure)


def locked_memory(probe: Probe) -> Finding:
    soft, _ = probe.limits["memlock"]
    if not probe.efa_devices:
        return skip("only EFA needs it")
    if soft == math.inf:
        return ok("unlimited")
    text = f"{soft / 1024:,.0f} KiB, but EFA must lock more"
    return bad(
        text, cure="add '* - memlock unlimited' to /etc/security/limits.conf and log in again"
    )


def fork_safety(probe: Probe) -> Finding:
    if not probe.efa_devices:
        return skip("no EFA")
    if probe.is_old_kernel and probe.environ.get("FI_EFA_FORK_SAFE", "0") == "0":
        text = f"Linux {probe.kernel} with EFA: forking loader workers corrupts the data that EFA sends"
        return bad(text, cure="export FI_EFA_FORK_SAFE=1")
    return ok(f"Linux {probe.kernel}" + (", FI_EFA_FORK_SAFE=1" if probe.is_old_kernel else ""))


# ---- cache, disk, memory -------------------------------------------------------------------------------------------


def cache(probe: Probe) -> Finding:
    """Check that the compile cache is on a local disk or in S3, and has no locks left by dead processes."""
    if not probe.is_trainium:
        return skip("no Trainium")
    name, location = cache_of(probe)
    if probe.is_native:  # This cache may be on NFS, because its files are written atomically.
        if "://" in location:
            return bad(f"{location} is not a folder", cure=f"unset {name}")
    else:
        if fault := neuron.cache_fault(probe.environ):
            what, _, cure = fault.partition("; ")
            return bad(what, cure=cure or f"unset {name}")
    if "://" in location:
        return ok(location)
    locks = [
        file for file in Path(location).expanduser().rglob("*.lock") if is_old(file, probe.now_s)
    ]
    if locks:
        text = f"{len(locks)} locks in {location} are older than an hour, and compilations wait for them"
        return warn(
            text, cure="if no compiler is running: neuron_parallel_compile --command clear-locks"
        )
    return ok(f"{location} ({host.filesystem(location) or 'file system unknown'})")


def cache_of(probe: Probe) -> tuple[str, str]:
    """Return the name of the variable that sets the compile cache's location, and the location."""
    if probe.is_native:
        return neuron.NATIVE_CACHE, neuron.native_cache(probe.environ)
    return "NEURON_COMPILE_CACHE_URL", neuron.cache_location(probe.environ)


def is_old(file: Path, now_s: float) -> bool:
    try:
        return now_s - file.stat().st_mtime > OLD_LOCK_S
    # The file was removed meanwhile, or belongs to another user.
    except (
        FileNotFoundError,
        PermissionError,
    ):
        return False


def disk(probe: Probe) -> Finding:
    variable, location = cache_of(probe)
    places = {
        "this folder": (probe.cwd, "run_dir="),
        "/tmp": (Path(probe.environ.get("TMPDIR", "/tmp")), "export TMPDIR="),
    }
    if probe.is_trainium and "://" not in location:
        places["the compile cache"] = (Path(location).expanduser(), f"export {variable}=")
    free = {name: probe.free_bytes(nearest(path)) for name, (path, _) in places.items()}
    least = min(free, key=lambda name: free[name])
    known = {name: f"{value / GIB:,.0f} GiB" for name, value in free.items() if value < math.inf}
    text = ", ".join(f"{known.get(name, 'unknown space')} free in {name}" for name in free)
    if free[least] >= WANTED_DISK:
        return ok(text)
    path, setting = places[least]
    cure = f"free some space in {path}, or point {setting} to a larger disk; 20 GiB hold a few large checkpoints"
    return (bad if free[least] < LEAST_DISK else warn)(text, cure=cure)


def memory(probe: Probe) -> Finding:
    free, total = probe.memory_bytes
    text = f"{free / GIB:,.0f} of {total / GIB:,.0f} GiB free"
    num_ranks = probe.num_ranks or probe.num_devices or 1
    wanted = num_ranks * RANK_MEMORY + (COMPILER_MEMORY if probe.is_trainium else 0)
    if free >= wanted:
        return ok(text)
    cure = "end other programs (ps aux --sort=-rss | head)"
    text += f", but about {wanted / GIB:,.0f} are needed for {plural(num_ranks, 'rank')}"
    if probe.is_trainium:
        cure += "; export NEURON_PARALLEL_COMPILE_MAX_RETRIES=1 if the compiler is killed"
        text += " and the compiler"
    return (bad if free < LEAST_MEMORY else warn)(text, cure=cure)


# ---- clock, environment, names -------------------------------------------------------------------------------------


def clock(probe: Probe) -> Finding:
    """Check that a time server corrects the clock. S3 rejects requests if the clock is off by more than 15 minutes."""
    restart = "sudo systemctl enable --now chrony && sudo chronyc makestep"
    answer = probe.ask("chronyc", "tracking")
    if not answer.fault:
        offset = re.search(r"^System time\s*:\s*([\d.]+) seconds", answer.out, re.MULTILINE)
        leap = re.search(r"^Leap status\s*:\s*(.+?)\s*$", answer.out, re.MULTILINE)
        if offset is None or leap is None or leap[1] != "Normal":
            return warn(
                f"chrony does not follow a time server ({leap[1] if leap else 'status unknown'})",
                cure=restart,
            )
        offset_s = float(offset[1])
        text = f"{offset_s:.6f} s off, corrected by chrony"
        if offset_s <= WANTED_CLOCK_S:
            return ok(text)
        return (bad if offset_s > LEAST_CLOCK_S else warn)(text, cure="sudo chronyc makestep")
    answer = probe.ask("timedatectl", "show", "-p", "NTPSynchronized")
    if answer.fault or "NTPSynchronized=" not in answer.out:
        return skip("neither chronyc nor timedatectl answers")
    if "NTPSynchronized=yes" in answer.out:
        return ok("follows a time server")
    return warn("follows no time server", cure="sudo timedatectl set-ntp true")


def knobs(probe: Probe) -> Finding:
    wrong = neuron.bad_knobs(probe.environ)
    if probe.is_old_kernel:
        wrong = [knob for knob in wrong if knob.name != "FI_EFA_FORK_SAFE"]
    if not wrong:
        return ok("none that is obsolete or that changes results")
    text = "; ".join(f"{knob.name} {knob.why}" for knob in wrong)
    state = bad if any(knob.is_dangerous for knob in wrong) else warn
    return state(text, cure=f"unset {' '.join(knob.name for knob in wrong)}")


def malloc(probe: Probe) -> Finding:
    if not probe.is_trainium:
        return skip("no Trainium")
    if value := probe.environ.get("MALLOC_ARENA_MAX"):
        return ok(value)
    text = (
        "MALLOC_ARENA_MAX is not set: host memory grows with every thread until ranks are killed"
    )
    return warn(text, cure="export MALLOC_ARENA_MAX=64")


def hostname(probe: Probe) -> Finding:
    name = probe.hostname
    if len(name) > 63:
        text = f"{len(name)} characters: Neuron's bootstrap accepts at most 63"
        return bad(text, cure="sudo hostnamectl set-hostname NAME")
    hosts = [
        line.partition("#")[0].split() for line in (probe.text("/etc/hosts") or "").splitlines()
    ]
    loops = [
        address
        for address, *names in filter(None, hosts)
        if name in names and address.startswith(LOOPBACK)
    ]
    if loops and name != "localhost" and (probe.num_machines > 1 or probe.efa_devices):
        text = f"/etc/hosts maps {name} to {loops[0]}: other machines would connect to themselves"
        cure = f"in /etc/hosts, map {name} to the first address that `hostname -I` prints"
        return (bad if probe.num_machines > 1 else warn)(text, cure=cure)
    return ok(name)
