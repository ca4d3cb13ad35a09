"""The machines of services/machines.py as instances of EC2: each has a metadata service, a cloud-init that runs its
user data, a disk of its own, and a `shutdown` that ends all that runs on it. EC2 itself is the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.fake_imds import FakeIMDS
from services.machines import ADDRESSES, Machines, inside, made_inside
from services.process import Process

IMDS = ("169.254.169.254", 80)
USER_DATA = "/var/lib/cloud/instance/scripts/part-001"  # where cloud-init leaves it
CATEGORIES = "/latest/meta-data/"
SHUTDOWN = """#!/bin/bash
echo "$@" >>/var/lib/shutdown.txt
if [[ " $* " != *" now "* ]]; then exit; fi
own=$(readlink /proc/self/ns/net)
for process in /proc/[0-9]*; do
    pid=${process#/proc/}
    if [[ $pid == "$HOLDER" || $pid == "$$" || $(readlink "$process/ns/net") != "$own" ]]; then continue; fi
    kill -KILL "$pid"
done 2>/dev/null
"""
HURRIES = "/var/lib/hurries"  # a file: time passes at once for scripts
SLEEP = f"""#!/bin/sh
if [ -e {HURRIES} ]; then exec /bin/sleep 0.01; fi
exec /bin/sleep "$@"
"""


class Ec2Machines:
    def __init__(self, machines: Machines, folder: Path, stack: ExitStack) -> None:
        self.machines = machines
        self.folder = folder
        self.stack = stack
        self.services: list[FakeIMDS] = []
        self.programs = folder / "programs"  # first in PATH
        self.programs.mkdir()
        for name, text in (("shutdown", SHUTDOWN), ("sleep", SLEEP)):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        for pid in machines.pids:
            inside(pid, "ip", "address", "replace", IMDS[0], "dev", "lo")
            self.services.append(stack.enter_context(made_inside(pid, lambda: FakeIMDS(IMDS))))

    def path(self, number: int, name: str) -> Path:
        """A file as a machine sees it."""
        return Path(f"/proc/{self.machines.pids[number]}/root{name}")

    def run_instances(
        self, number: int, instance: str, user_data: bytes, *, launch_index: int = 0
    ) -> None:
        """A new machine, with an empty disk."""
        pid = self.machines.pids[number]
        for folder in ("/run", "/var/lib", "/mnt"):
            inside(pid, "sh", "-c", f"umount {folder} 2>/dev/null; mount -t tmpfs tmpfs {folder}")
        script = self.path(number, USER_DATA)
        script.parent.mkdir(parents=True)
        script.write_bytes(user_data)
        (self.path(number, "/var/lib/cloud/data")).mkdir()
        self.path(number, "/var/lib/cloud/data/instance-id").write_text(f"{instance}\n")
        service = self.services[number]
        service.said = {
            f"{CATEGORIES}instance-id": instance,
            f"{CATEGORIES}local-ipv4": ADDRESSES[number],
            f"{CATEGORIES}ami-launch-index": str(launch_index),
            f"{CATEGORIES}placement/availability-zone": "us-east-1a",
        }
        self.boot(number, f"bash {USER_DATA}")

    def boot(self, number: int, script: str) -> None:
        pid = self.machines.pids[number]
        environment = {
            name: value for name, value in os.environ.items() if name.startswith("AWS_")
        }
        environment |= {"PATH": f"{self.programs}:{os.environ['PATH']}", "HOLDER": str(pid)}
        environment |= {
            "XDG_CACHE_HOME": "/var/lib/cache",
            "NO_PROXY": "*",
            "no_proxy": "*",
            "OMP_NUM_THREADS": "1",
        }
        words = ["nsenter", "--net", "--uts", "--mount", f"--target={pid}", "--", "env", "-i"]
        words += [f"{name}={value}" for name, value in environment.items()]
        process = Process(
            [*words, "bash", "-c", script], log=self.folder / f"console.{number}", cwd=Path("/")
        )
        self.stack.callback(process.kill)

    def boot_again(self, number: int) -> None:
        """What cloud-init does at every later boot of a machine on which nothing runs."""
        pid = self.machines.pids[number]
        scripts = "/var/lib/cloud/scripts/per-boot"
        inside(pid, "sh", "-c", "umount /run; mount -t tmpfs tmpfs /run")
        self.boot(number, f'for each in {scripts}/*; do bash "$each"; done')

    def shutdowns(self, number: int) -> list[str]:
        """The arguments of each call of `shutdown`."""
        file = self.path(number, "/var/lib/shutdown.txt")
        return file.read_text().splitlines() if file.is_file() else []

    def console(self, number: int) -> str:
        log = self.path(number, "/run/baretrain/machine.txt")
        said = self.folder / f"console.{number}"
        return "\n".join(
            file.read_text(errors="replace") for file in (said, log) if file.is_file()
        )


@contextmanager
def ec2_machines(machines: Machines, folder: Path) -> Iterator[Ec2Machines]:
    with ExitStack() as stack:
        made = Ec2Machines(machines, folder, stack)
        yield made
        for number in range(len(machines.pids)):
            machines.kill_all(number)
