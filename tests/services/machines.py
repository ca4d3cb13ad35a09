"""Three machines for tests of launchers: network namespaces with a name, an address and a bridge that joins them. As on
Ubuntu each knows itself by 127.0.1.1; and each has a second network card, by which it does not reach the others.

They are Linux's own, and last as long as a process of each does. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TypeVar

from forks import TORCHRUN, free_port, start_forked
from running import eventually
from services.process import Process
from services.relay import relaying

T = TypeVar("T")
PACKAGES = ("iproute2", "util-linux")
# a skip that --require-services accepts
NOT_PERMITTED = "the kernel permits no network namespaces here"
KINDS = ("net", "uts", "mnt")  # namespaces: a network, a host name, and the files that look it up
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
ALL = "10.77.0.0/25"  # more specific than the network of the cards, so its route goes first
NAME, LINK = "machine{}", "eth0"
ENTER = """
import ctypes, os, runpy, sys
pid, module, folder = sys.argv.pop(1), sys.argv.pop(1), os.getcwd()
libc = ctypes.CDLL(None, use_errno=True)
for kind in ("net", "uts", "mnt"):
    if libc.setns(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0):
        raise OSError(ctypes.get_errno(), kind)
os.chdir(folder)  # it is that of the other machine by now
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
SET_UP = f"""
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/$1.hosts" /etc/hosts
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
ip link set lo up
ip address add "$3/24" dev {LINK}
ip link set {LINK} up
ip route add default dev {LINK}
ip link add aside type veth peer name nowhere
ip address add 10.88.0.1/24 dev aside
ip link set nowhere up
ip link set aside up
"""


def missing_programs() -> list[str]:
    return [name for name in ("ip", "mount", "nsenter", "unshare") if shutil.which(name) is None]


def fault() -> str | None:
    """Why the kernel permits no such machines; None if it does."""
    done = subprocess.run(
        [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "sh",
            "-c",
            "ip link add eth0 type bridge && mount --bind /etc /etc",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else done.stderr.strip()


class Machines:
    def __init__(self, pids: list[int]) -> None:
        self.pids = pids  # a process on each

    def torchrun(
        self,
        script: Path,
        arguments: list[str],
        *,
        env: Mapping[str, str],
        log: Path,
        rendezvous: str = "static",
        restarts: int = 0,
        changes: Mapping[int, list[str]] | None = None,
        count: int = 2,
    ) -> list[ForkServerProcess]:
        """Start a torchrun with a rank on each machine, or on the first `count`. What they print goes to
        log.0, log.1, ...; `changes` are arguments for one machine alone.
        """
        port = free_port()
        started = []
        for number in range(count):
            options = [f"--nnodes={count}", "--nproc-per-node=1", f"--max-restarts={restarts}"]
            options.append(f"--local-addr={ADDRESSES[number]}")
            if rendezvous == "static":
                options += [f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}"]
                options.append(f"--master-port={port}")
            else:
                options += ["--rdzv-backend=c10d", "--rdzv-id=test"]
                options.append(f"--rdzv-endpoint={ADDRESSES[0]}:{port}")
                options.append(f"--rdzv-conf=is_host={int(number == 0)}")
            own = (changes or {}).get(number, [])
            words = ["-c", ENTER, str(self.pids[number]), TORCHRUN, *options]
            words += ["--start-method=fork", "--run-path", str(script), *arguments, *own]
            out = log.with_suffix(f".{number}")
            # each machine has one of its own
            disk = {"XDG_CACHE_HOME": str(log.parent / f"cache{number}")}
            started.append(start_forked(words, {**os.environ, **env, **disk}, out, out))
        return started

    @contextmanager
    def dead(self, number: int) -> Iterator[None]:
        """All that runs on one machine ends, and inside it says nothing to the others: no connection is closed."""
        holder = self.pids[number]
        way = ("blackhole", ALL)
        inside(holder, "ip", "route", "add", *way)
        self.kill_all(number)
        try:
            yield
        finally:
            inside(holder, "ip", "route", "del", *way)

    def kill_all(self, number: int) -> None:
        """All that runs on one machine ends, and its connections are closed."""
        for pid in self.running(number):
            with suppress(ProcessLookupError):  # it has ended by now
                os.kill(pid, signal.SIGKILL)

    def running(self, number: int) -> list[int]:
        """What runs on a machine, without what holds it."""
        holder = self.pids[number]
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended by now
                if int(process.name) != holder and is_inside(process, holder):
                    pids.append(int(process.name))
        return pids

    @contextmanager
    def reaching(self, port: int) -> Iterator[str]:
        """The address at which the machines reach a server that listens at 127.0.0.1 outside them."""
        listener = made_inside(self.pids[0], lambda: socket.create_server((ADDRESSES[0], 0)))
        with relaying(listener, port) as address:
            yield address


@contextmanager
def three_machines(folder: Path) -> Iterator[Machines]:
    for number in range(len(ADDRESSES)):
        known = zip(map(NAME.format, range(len(ADDRESSES))), ADDRESSES, strict=True)
        lines = [
            f"{'127.0.1.1' if i == number else at} {name}\n" for i, (name, at) in enumerate(known)
        ]
        (folder / f"{NAME.format(number)}.hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(lines)
        )
    # there is no DNS to wait for
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    with ExitStack() as stack:
        pids = []
        for _ in ADDRESSES:
            words = ["unshare", "--net", "--uts", "--mount", "sleep", "infinity"]
            process = Process(words, log=folder / "log")
            stack.callback(process.kill)
            pids.append(process.shell.pid)
            eventually(lambda pid=process.shell.pid: has_own(pid))
        # the first machine's card is the switch as well
        inside(pids[0], "ip", "link", "add", LINK, "type", "bridge")
        for pid in pids[1:]:
            port = ("link", "add", f"port{pid}", "master", LINK, "up", "type", "veth")
            inside(pids[0], "ip", *port, "peer", "name", LINK, "netns", str(pid))
        for number, (pid, address) in enumerate(zip(pids, ADDRESSES, strict=True)):
            inside(pid, "sh", "-ec", SET_UP, "sh", NAME.format(number), str(folder), address)
        yield Machines(pids)


def made_inside(pid: int, make: Callable[[], T]) -> T:
    """What a function makes in a network. Namespaces are those of a thread, and its sockets stay where it made them."""

    def act() -> T:
        with Path(f"/proc/{pid}/ns/net").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(act).result()


def is_inside(process: Path, holder: int) -> bool:
    return (process / "ns/net").readlink() == Path(f"/proc/{holder}/ns/net").readlink()


def has_own(pid: int) -> bool:
    """Whether a process has left this one's namespaces, and has become what it is to be there."""
    theirs = Path(f"/proc/{pid}/ns")
    own = Path("/proc/self/ns")
    apart = all((theirs / kind).readlink() != (own / kind).readlink() for kind in KINDS)
    return apart and Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def inside(pid: int, *command: str) -> None:
    subprocess.run(
        ["nsenter", "--net", "--uts", "--mount", f"--target={pid}", "--", *command], check=True
    )
