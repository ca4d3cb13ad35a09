"""A real S3 server: Ceph's object gateway over one monitor and one store in memory. No root, systemd or container.

The store takes seconds to start, so all processes of a test run share it (`python -m services.s3_server FOLDER PID`
runs it until process PID ends). A gateway takes a fifth of a second: each process has its own, and may kill it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from services.process import START_S, Process, free_port

PACKAGES = ("ceph-mon", "ceph-osd", "ceph-common", "radosgw")
PROGRAMS = (
    "ceph-mon",
    "ceph-osd",
    "ceph",
    "ceph-authtool",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
)
KEY, SECRET = "testkey", "testsecret"

# One copy of everything, and no waiting for the peers and managers that a real cluster has. No cache in the gateway: it
# would be sent every change, and the store would wait half a minute for the answer of one that was killed.
SETTINGS = """
[global]
fsid = {fsid}
keyring = {folder}/keyring
run dir = {folder}
pid file =
admin socket =
crash dir = {folder}
log file = {folder}/$type.log
mon cluster log file = {folder}/cluster.log
mon initial members = a
mon host = {monitor}
mon data = {folder}/mon
mon data avail crit = 1
mon allow pool size one = true
mon max pg per osd = 1000
ms bind msgr2 = false
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
paxos propose interval = 0.01
paxos min wait = 0.01
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4Gi
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd class load list = *
osd class default list = *
rgw data = {folder}/rgw
rgw enable gc threads = false
rgw enable lc threads = false
rgw run sync thread = false
rgw enable usage log = false
rgw cache enabled = false
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


class S3Server:
    """A gateway at a free port, over the store in `folder`, which is started if it is not there."""

    key = KEY
    secret = SECRET

    def __init__(self, folder: Path, *, ends_with_pid: int) -> None:
        self.folder = folder
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.gateway: Process | None = None
        share_store(folder, ends_with_pid)
        self.start_gateway()

    def start_gateway(self) -> None:
        """Back with all its data, if it is not running."""
        if self.gateway is None or not self.gateway.running():
            frontend = f"--rgw-frontends=beast endpoint=127.0.0.1:{self.port} tcp_nodelay=1"
            self.gateway = start(self.folder, "radosgw", "-f", "-n", "client.admin", frontend)
            self.gateway.wait_for_port(self.port)

    def kill(self) -> None:
        """SIGKILL to the gateway: connections break, what it had stored stays."""
        assert self.gateway is not None
        self.gateway.kill()

    def add_user(self) -> tuple[str, str]:
        """Key and secret of another user, who has no right to anybody's buckets."""
        name = uuid.uuid4().hex
        create_user(self.folder, name, f"key-of-{name}", f"secret-of-{name}")
        return f"key-of-{name}", f"secret-of-{name}"


def share_store(folder: Path, ends_with_pid: int) -> None:
    """Start the store of the test run unless another process of it has done so, and wait until it is ready."""
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        folder.mkdir()
        command = [sys.executable, "-m", "services.s3_server", str(folder), str(ends_with_pid)]
        with (folder / "store.out").open("w") as log:
            tests = Path(__file__).resolve().parent.parent
            process = subprocess.Popen(
                command, cwd=tests, stdout=log, stderr=log, start_new_session=True
            )
        deadline_s = time.monotonic() + START_S
        while not (folder / "ready").exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"the store of S3 does not start: {(folder / 'store.out').read_text()[-2000:]}"
                )
            time.sleep(0.02)


def main(folder: Path, pid: int) -> None:
    """Run the store until a process ends."""
    processes: list[Process] = []
    try:
        start_store(folder, processes)
        create_user(folder, "first", KEY, SECRET)
        (folder / "ready").touch()
        select.select([os.pidfd_open(pid)], [], [])
    finally:
        for process in reversed(processes):
            process.kill()


def start_store(folder: Path, processes: list[Process]) -> None:
    fsid = str(uuid.uuid4())
    osd = str(uuid.uuid4())
    port = free_port()
    monitor = f"v1:127.0.0.1:{port}"
    keyring = str(folder / "keyring")
    monmap = str(folder / "monmap")
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    (folder / "ceph.conf").write_text(SETTINGS.format(fsid=fsid, folder=folder, monitor=monitor))
    do(folder, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[{monitor}]", monmap)
    do(
        folder,
        "ceph-authtool",
        "--create-keyring",
        keyring,
        "--gen-key",
        "-n",
        "mon.",
        "--cap",
        "mon",
        "allow *",
    )
    everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
    # without keys an OSD asks before it knows its cluster, and is rejected
    for name in (
        "client.admin",
        "osd.0",
    ):
        do(folder, "ceph-authtool", keyring, "--gen-key", "-n", name, *everything)
    do(folder, "ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    processes.append(start(folder, "ceph-mon", "-f", "-i", "a"))
    processes[-1].wait_for_port(port)
    do(folder, "ceph", "osd", "new", osd)
    do(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    processes.append(start(folder, "ceph-osd", "-f", "-i", "0"))


def create_user(folder: Path, name: str, key: str, secret: str) -> None:
    names = (
        f"--uid={name}",
        f"--display-name={name}",
        f"--access-key={key}",
        f"--secret-key={secret}",
    )
    created = json.loads(do(folder, "radosgw-admin", "user", "create", *names))
    assert created["keys"][0]["access_key"] == key


def start(folder: Path, program: str, *arguments: str) -> Process:
    return Process(
        [program, "-c", str(folder / "ceph.conf"), *arguments], log=folder / f"{program}.out"
    )


def do(folder: Path, program: str, *arguments: str) -> str:
    """What a program that ends by itself prints; RuntimeError if it fails."""
    settings = (
        [] if program in ("monmaptool", "ceph-authtool") else ["-c", str(folder / "ceph.conf")]
    )
    done = subprocess.run(
        [program, *settings, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise RuntimeError(
            f"{program} {' '.join(arguments)} ends with {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
