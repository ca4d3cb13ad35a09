"""A real Slurm cluster that lasts as long as a test run: munged, slurmctld, and for each node a slurmd in a machine of
its own, with its own name, address and processes. There is no DNS and no accounting database.

The nodes' network cards are joined by a switch, which has one for the host too: jobs reach the host there, and the
commands of Slurm run on the host. Switch and nodes are namespaces of Linux, and end with the process that holds each;
the host's card ends with the switch. Needs root.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from running import eventually
from services.process import START_S, Process, free_port
from services.relay import relaying

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "mount", "nsenter", "unshare")
ISOLATED = ["unshare", "--net", "--uts", "--mount"]
CPUS = 4  # that each node claims to have
COMMAND_S = 300.0

# A command gives up some seconds before MessageTimeout when slurmctld is away; Slurm's own value is 10 s. The other
# times are the shortest that Slurm takes: a requeued job waits for cred_expire and a second, a silent node is down
# after SlurmdTimeout, and a job has KillWait between SIGTERM and SIGKILL. slurmd loads a plugin for cgroups even where
# nothing uses one: that of v1 wants no systemd.
SETTINGS = """
ClusterName={name}
SlurmctldHost=head({network}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/spool-%n/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=5
SlurmdTimeout=6
KillWait=3
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,bf_interval=1
PartitionName=DEFAULT Nodes=ALL
PartitionName=main Default=YES PriorityTier=1 MaxTime=1-00:00:00
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={name} NodeAddr={address} CPUs={cpus} RealMemory={memory_mib} State=UNKNOWN\n"

SWITCH = """
ip link add switch up type bridge
ip link add uplink master switch up type veth peer name "$1" netns "$2"
exec sleep infinity
"""
NAMED = """
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
"""
BOOT = f"""{NAMED}
ip link add eth0 address "$4" type veth peer name "$5" netns "$6"
nsenter --net --target="$6" ip link set "$5" master switch up
ip link set lo up
ip address add "$3/24" dev eth0
ip link set eth0 up
exec unshare --pid --fork --kill-child --mount-proc sh -c 'slurmd -D -N "$1" -f "$2/slurm.conf" & wait' sh "$1" "$2"
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def fault() -> str | None:
    """Why the kernel permits no such cluster; None if it does."""
    script = 'mount --bind /etc /etc; ip link add type veth peer netns "$1"; unshare --pid --fork --mount-proc true'
    words = [*ISOLATED, "sh", "-ec", script, "sh", str(os.getpid())]
    # the cards end with the program
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


class SlurmCluster:
    """Nodes n1, n2, ...; partitions `main`, the default, and `urgent`, whose jobs preempt those of `main`."""

    def __init__(self, folder: Path, *, num_nodes: int = 2) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self.processes: dict[str, Process] = {}
        self.boots = 0
        try:
            self.network = self.make_network()
            self.write_files()
            self.start_munge()
            self.start_controller()
            for node in self.nodes:
                self.start(node)
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """The host's own, as jobs reach it."""
        return f"{self.network}.1"

    def address_of(self, node: str) -> str:
        return f"{self.network}.{10 + self.nodes.index(node)}"

    # ---- what the tests do with it ---------------------------------------------------------------------------------

    def run(self, *command: str) -> str:
        """What a command of Slurm prints on the host; RuntimeError if it fails."""
        words = {**os.environ, **self.environment}
        done = subprocess.run(
            command, env=words, capture_output=True, text=True, check=False, timeout=COMMAND_S
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ends with {done.returncode}: {done.stderr.strip()}"
            )
        return done.stdout

    def exec(self, node: str, *command: str) -> str:
        """The same for a command inside a node."""
        holder = Path(f"/proc/{self.processes[node].shell.pid}")
        # another one watches over the holder
        children = (holder / f"task/{holder.name}/children").read_text().split()
        (first,) = (
            pid
            for pid in children
            if Path(f"/proc/{pid}/ns/pid").readlink() != (holder / "ns/pid").readlink()
        )
        return self.run(
            "nsenter", f"--target={first}", "--pid", "--uts", "--mount", "--net", "--", *command
        )

    def lose(self, node: str) -> None:
        """A power cut: nothing more is heard from a node, and all that runs on it is gone."""
        holder = self.processes.pop(node)
        self.run(
            "nsenter", "--net", f"--target={holder.shell.pid}", "ip", "link", "set", "eth0", "down"
        )
        holder.kill()

    def start(self, node: str) -> None:
        """Boot a node that is lost. Slurm takes a second or two to notice: see `wait_for_nodes`."""
        self.boots += 1  # its card of an earlier boot may be there for some milliseconds more
        card = f"{node}-{self.boots}"
        switch = str(self.processes["switch"].shell.pid)
        hardware = f"02:00:00:00:00:{self.nodes.index(node):02x}"  # always the same: others remember it by its address
        words = [node, str(self.folder), self.address_of(node), hardware, card, switch]
        self.begin(node, *ISOLATED, "sh", "-ec", BOOT, "sh", *words)

    def stop_controller(self) -> None:
        """End slurmctld in order, or it may forget the last seconds: commands reach nobody, and jobs go on."""
        self.run("scontrol", "shutdown", "slurmctld")
        eventually(lambda: not self.processes["slurmctld"].running(), START_S)
        self.processes.pop("slurmctld").kill()

    def start_controller(self, *, forget: bool = False) -> None:
        """Start slurmctld, with all that it knew of jobs or, `forget`, with nothing."""
        script = f'{NAMED} exec slurmctld -D -f "$2/slurm.conf" $3'
        words = ["head", str(self.folder), "-c" if forget else ""]
        self.begin("slurmctld", "unshare", "--uts", "--mount", "sh", "-ec", script, "sh", *words)
        eventually(lambda: self.answers("slurmctld"), START_S)

    def wait_for_nodes(self) -> None:
        """Until all nodes are idle."""
        idle = (
            "sinfo",
            "--noheader",
            "--Node",
            "--partition=main",
            "--states=idle",
            "--format=%N",
        )
        try:
            eventually(lambda: len(self.run(*idle).split()) == len(self.nodes), START_S)
        except AssertionError as error:
            raise RuntimeError(
                f"the nodes are not idle:\n{self.run('sinfo', '-Nl')}{self.logs()}"
            ) from error

    def restore(self) -> None:
        """All that a test may have changed: jobs, lost or drained nodes, no controller."""
        if "slurmctld" not in self.processes:
            self.start_controller()
        for node in self.nodes:
            if node not in self.processes:
                self.start(node)
        self.run("scancel", "--user=root")
        eventually(lambda: not self.run("squeue", "--noheader"), START_S)
        for line in self.run(
            "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"
        ).splitlines():
            if "drain" in line:
                self.run("scontrol", "update", f"NodeName={line.split()[0]}", "State=RESUME")
        self.wait_for_nodes()

    def reaching(self, port: int) -> AbstractContextManager[str]:
        """The address at which jobs reach a server that listens at 127.0.0.1 on the host."""
        return relaying(socket.create_server((self.address, 0)), port)

    def stop(self) -> None:
        for name in reversed(list(self.processes)):
            self.processes.pop(name).kill()

    # ---- how it starts ---------------------------------------------------------------------------------------------

    def begin(self, name: str, *command: str) -> None:
        self.processes[name] = Process(list(command), log=self.folder / f"{name}.out")

    def make_network(self) -> str:
        """The first three numbers of the addresses of a network that no other cluster of this machine has."""
        for number in random.SystemRandom().sample(range(1, 255), 20):
            card = f"slurm{number}"  # only one cluster can give it this name
            self.begin("switch", *ISOLATED, "sh", "-ec", SWITCH, "sh", card, str(os.getpid()))
            # of the program that it is in the end
            comm = Path(f"/proc/{self.processes['switch'].shell.pid}/comm")
            switch = self.processes["switch"]
            eventually(
                lambda comm=comm, it=switch: comm.read_text() == "sleep\n" or not it.running(),
                START_S,
            )
            if self.processes["switch"].running():
                self.run("ip", "address", "add", f"10.77.{number}.1/24", "dev", card)
                self.run("ip", "link", "set", card, "up")
                return f"10.77.{number}"
            self.processes.pop("switch").kill()
        raise RuntimeError(f"no network for the cluster: {self.logs()}")

    def write_files(self) -> None:
        known = {"localhost": "127.0.0.1", "head": self.address} | {
            each: self.address_of(each) for each in self.nodes
        }
        memory_mib = (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20 // len(self.nodes)
        )
        name = f"test{self.network.rpartition('.')[2]}"
        settings = SETTINGS.format(
            name=name, network=self.network, port=free_port(), folder=self.folder
        )
        for node in self.nodes:
            (self.folder / f"spool-{node}").mkdir()
            settings += NODE.format(
                name=node, address=self.address_of(node), cpus=CPUS, memory_mib=memory_mib
            )
        (self.folder / "state").mkdir()
        (self.folder / "hosts").write_text(
            "".join(f"{address} {name}\n" for name, address in known.items())
        )
        (self.folder / "nsswitch.conf").write_text(
            "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "slurm.conf").write_text(settings)

    def start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [
            f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")
        ]
        self.begin(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            *files,
        )
        munged = self.processes["munged"]
        eventually(
            lambda: (self.folder / "munge.socket").is_socket() or not munged.running(), START_S
        )

    def answers(self, name: str) -> bool:
        if not self.processes[name].running():
            raise RuntimeError(f"{name} has ended:\n{self.logs()}")
        return "is UP" in self.run("sh", "-c", "scontrol ping; true")

    def logs(self) -> str:
        """The end of what each process has said."""
        files = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        ends = {path.name: path.read_text(errors="replace").splitlines()[-10:] for path in files}
        return "\n".join(f"{name}: {line}" for name, lines in ends.items() for line in lines)


@contextmanager
def slurm_cluster(folder: Path, *, num_nodes: int = 2) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, num_nodes=num_nodes)
    try:
        yield cluster
    finally:
        cluster.stop()
