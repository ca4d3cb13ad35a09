"""The rank and the launcher (torchrun, Slurm or neither) of this process, read from environment variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from train.config import InputError, InstanceConfig, check, plural

FIX = (
    "start one torchrun per machine, or unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_PORT for a "
    "single process"
)
# The numbers of processes that a launcher started: Open MPI, MPICH and others with PMI, MVAPICH, jsrun and srun.
# SLURM_NTASKS is not one of them, since sbatch and salloc also set it for a single process.
TASKS = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "SLURM_STEP_NUM_TASKS",
)


@dataclass(frozen=True)
class Launched:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1  # number of ranks on this machine
    # whether ranks must connect; under torchrun, even a single rank must
    is_distributed: bool = False
    master_addr: str = ""  # the host to which all ranks connect
    master_port: int = 0
    run_id: str | None = None  # torchrun's run id; None: not started by torchrun
    restart_count: int = 0  # number of restarts by torchrun
    # whether torchrun, not rank 0, hosts the store through which ranks connect
    uses_agent_store: bool = False
    tasks: str = ""  # NAME=COUNT of a variable with which srun or mpirun says that it started several processes

    @property
    def is_under_torchrun(self) -> bool:
        return self.run_id is not None

    @property
    def is_one_machine(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def torchrun(self) -> list[str]:
        """Values that identify this torchrun, and that do not change when it restarts the ranks."""
        return [self.run_id or "", self.master_addr, str(self.master_port or "")]


def launched(environ: Mapping[str, str] = os.environ) -> Launched:
    """Read from the environment how this process was started. An empty variable counts as unset.

    Raises InputError if variables contradict each other: ranks could train separately, or wait forever.
    """
    given = {name: value for name, value in environ.items() if value}
    is_distributed = "RANK" in given
    rank = whole(given, "RANK", 0)
    world_size = whole(given, "WORLD_SIZE", 1, least=1)
    local_rank = whole(given, "LOCAL_RANK", 0)
    local_world_size = whole(given, "LOCAL_WORLD_SIZE", 1, least=1)
    check(
        is_distributed or world_size == 1,
        f"WORLD_SIZE={world_size} without RANK: this process would train alone, on a part of each batch; {FIX}",
    )
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in given]
    check(not (is_distributed and missing), f"RANK={rank} without {', '.join(missing)}: {FIX}")
    check_below("RANK", rank, "WORLD_SIZE", world_size)
    check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    several = (f"{name}={given[name]}" for name in TASKS if given.get(name, "1") not in ("0", "1"))
    return Launched(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        is_distributed=is_distributed,
        master_addr=given.get("MASTER_ADDR", ""),
        master_port=whole(given, "MASTER_PORT", 0, least=int(is_distributed), most=2**16 - 1),
        run_id=given.get("TORCHELASTIC_RUN_ID"),
        restart_count=whole(given, "TORCHELASTIC_RESTART_COUNT", 0),
        uses_agent_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        tasks=next(several, ""),
    )


def check_below(name: str, rank: int, of: str, size: int) -> None:
    says = f"{name}={rank} must be below {of}={size}, since ranks are numbered from 0; {FIX}"
    check(rank < size, says)


def is_first() -> bool:
    """Return whether this is rank 0, or a process without a launcher. Only the variable RANK is read."""
    return os.environ.get("RANK", "") in ("", "0")


def whole(
    given: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = 2**31
) -> int:
    """Return the integer in a variable. Raises InputError unless it is an integer from `least` to `most`."""
    text = given.get(name, str(default))
    ok = text.isascii() and text.isdigit() and least <= int(text) <= most
    check(ok, f"{name}={text} must be a whole number from {least} to {most}; {FIX}")
    return int(text)


def check_master(launch: Launched) -> None:
    """Raise InputError if this machine knows no address of MASTER_ADDR: torch would ask again until the timeout."""
    try:
        if launch.is_distributed:
            socket.getaddrinfo(launch.master_addr, launch.master_port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(
            f"MASTER_ADDR={launch.master_addr} has no address on this machine ({why}): give the name or address of "
            "rank 0's machine, with torchrun as --master-addr or --rdzv-endpoint"
        ) from error


def check_launch(instance: InstanceConfig, launch: Launched) -> None:
    """Raise InputError if the instance cannot run this many ranks, or if several processes started without torchrun.

    The valid numbers of ranks on trn1 are from the Neuron SDK guide "torch-neuron-envvars". With other numbers, ranks
    hang or are rejected by the runtime.
    """
    world = launch.world_size
    local = launch.local_world_size
    check(
        launch.is_distributed or not launch.tasks,
        f"several processes were started without torchrun ({launch.tasks}): each would train alone; start one torchrun "
        "per machine",
    )
    if instance.rank_counts is None:
        return
    valid = instance.rank_counts
    check(
        local in valid,
        f"{plural(local, 'rank')} on one machine: {instance.name} runs {' or '.join(map(str, valid))}; "
        f"start torchrun with --nproc-per-node={max(valid)}",
    )
    check(
        world == local or local == max(valid),
        f"{plural(local, 'rank')} on each of {world // local} machines: several {instance.name} work together only "
        f"with {max(valid)} ranks each; start torchrun with --nproc-per-node={max(valid)}",
    )
