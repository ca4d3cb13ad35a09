"""A real S3 server: Ceph's object gateway over one monitor and one store in memory. No root, systemd or container."""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from pathlib import Path

from services.process import Process, free_port

PACKAGES = ("ceph-mon", "ceph-osd", "ceph-common", "radosgw")
PROGRAMS = ("ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool", "radosgw", "radosgw-admin")
KEY, SECRET = "testkey", "testsecret"

# One copy of everything, and no waiting for the peers and managers that a real cluster has. No cache in the gateway: it
# would be told of every change, and the store would wait half a minute for the answer of one that was killed.
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
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable gc threads = false
rgw enable lc threads = false
rgw run sync thread = false
rgw enable usage log = false
rgw cache enabled = false
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


class S3Server:
    """Starts on free ports, with all its state in `folder`. `stop` ends it; so does the end of this interpreter."""

    key, secret = KEY, SECRET

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.processes: list[Process] = []
        self.gateway: Process | None = None
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir(parents=True)
        try:
            self.start_store()
            self.create_user("first", KEY, SECRET)
            self.start_gateway()
        except BaseException:
            self.stop()
            raise

    def start_store(self) -> None:
        fsid, osd, port = str(uuid.uuid4()), str(uuid.uuid4()), free_port()
        monitor, keyring, monmap = f"v1:127.0.0.1:{port}", str(self.folder / "keyring"), str(self.folder / "monmap")
        settings = SETTINGS.format(fsid=fsid, folder=self.folder, monitor=monitor, port=self.port)
        (self.folder / "ceph.conf").write_text(settings)
        self.do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[{monitor}]", monmap)
        self.do("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
        for name in ("client.admin", "osd.0"):  # without keys an OSD asks before it knows its cluster, and is refused
            self.do("ceph-authtool", keyring, "--gen-key", "-n", name, *everything)
        self.do("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self.start("ceph-mon", "-f", "-i", "a").wait_for_port(port)
        self.do("ceph", "osd", "new", osd)
        self.do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self.start("ceph-osd", "-f", "-i", "0")

    def start_gateway(self) -> None:
        """Back with all its data, if it is not running."""
        if self.gateway is None or not self.gateway.running():
            self.gateway = self.start("radosgw", "-f", "-n", "client.admin")
            self.gateway.wait_for_port(self.port)

    def kill(self) -> None:
        """SIGKILL to the gateway: connections break, what it had stored stays."""
        assert self.gateway is not None
        self.gateway.kill()

    def add_user(self, name: str) -> tuple[str, str]:
        """Key and secret of another user, who has no right to anybody's buckets."""
        self.create_user(name, f"key-of-{name}", f"secret-of-{name}")
        return f"key-of-{name}", f"secret-of-{name}"

    def create_user(self, name: str, key: str, secret: str) -> None:
        names = (f"--uid={name}", f"--display-name={name}", f"--access-key={key}", f"--secret-key={secret}")
        created = json.loads(self.do("radosgw-admin", "user", "create", *names))
        assert created["keys"][0]["access_key"] == key

    def start(self, program: str, *arguments: str) -> Process:
        log = self.folder / f"{program}.out"
        process = Process([program, "-c", str(self.folder / "ceph.conf"), *arguments], log=log)
        self.processes.append(process)
        return process

    def do(self, program: str, *arguments: str) -> str:
        """What a program that ends by itself prints; RuntimeError if it fails."""
        settings = [] if program in ("monmaptool", "ceph-authtool") else ["-c", str(self.folder / "ceph.conf")]
        done = subprocess.run([program, *settings, *arguments], capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)} ends with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
        self.processes.clear()
