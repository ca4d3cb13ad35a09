"""The store in which ranks find one another.

Ranks poll the store in Python. If torch waited instead, signal handlers would not run, and no message could say
which rank is missing.

torchrun keeps one store across restarts, and each machine counts its restarts separately, so the store may contain
entries of earlier attempts. Rank 0 therefore begins a round with a new number, and every process registers in the
newest round. Once all ranks have registered, rank 0 writes a roster of these processes. They then join, under a key
prefix that no other process uses. A process that is not in the roster waits for the next round. A registration also
names the rank's device. If devices differ, the job is rejected before it begins.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

import train
from train.config import Failure, InputError, check
from train.config.backend import JOIN_TIMEOUT_S
from train.machine.console import without_stdout
from train.machine.launched import Launched, launched

logger = logging.getLogger("train")
# public since PyTorch 2.14
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
REPORT_EVERY_S = 10.0
POLL_S, CONNECT_S = 0.1, 2.0
MOST_NAMED = 8  # at most this many missing ranks are named in a message
ROUNDS = "rounds"  # key of the newest round's number
ROSTER = "roster"
REJECTION = "rejection"  # key of the reason for a rejection; never removed, because torchrun does not restart after it
NUM_INFORMED = "num_informed"  # key of the count of ranks on machines that know of the rejection
KEPT: list[
    dist.Store
] = []  # rank 0's store; if freed, its server would end and forget which ranks are informed
Result = TypeVar("Result")


def join(
    names: str, device: str, *, timeout_s: float, join_timeout_s: float = JOIN_TIMEOUT_S
) -> dist.Store:
    """Wait for the other ranks (see `wait_for_ranks`), then make the default process group with backends `names`."""
    launch, store = launched(), wait_for_ranks(device, join_timeout_s)
    make = partial(
        dist.init_process_group, names, store=store, rank=launch.rank, world_size=launch.world_size
    )
    # PyTorch can change the timeout of gloo and NCCL afterwards, but not that of Neuron's collectives.
    connect(
        make,
        timeout_s=timeout_s,
        connect_timeout_s=timeout_s if "neuron" in names else join_timeout_s,
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def connect(
    make: Callable[..., dist.ProcessGroup | None], *, timeout_s: float, connect_timeout_s: float
) -> dist.ProcessGroup | None:
    """Make a process group. If a rank dies meanwhile, the others wait for it for `connect_timeout_s`."""
    with without_stdout():  # gloo prints how many ranks have connected
        group = make(timeout=timedelta(seconds=min(timeout_s, connect_timeout_s)))
    if connect_timeout_s < timeout_s:
        set_timeout(timedelta(seconds=timeout_s), group)
    return group


def wait_for_ranks(device: str, timeout_s: float) -> dist.Store:
    """Wait until all ranks have arrived. Returns a store that only these processes use.

    `device` names the backend, device and precision. Raises Failure if a rank does not arrive in time, and InputError
    if a rank was rejected or if `device` differs between ranks.
    """
    here = Rendezvous(
        launched(),
        timeout_s,
        f"{device}, torch {torch.__version__}, baretrain {train.__version__}",
    )
    try:
        return here.poll(here.arrive)
    except Absent as absent:
        raise Failure(f"{absent} did not reach {here.where} within {timeout_s:g} s") from None
    except dist.DistError as error:
        raise Failure(
            f"the ranks cannot join at {here.where} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error


def announce(reason: str, timeout_s: float) -> None:
    """Tell other machines that this rank is rejected. On rank 0's machine, waits until all know."""
    here = Rendezvous(launched(), timeout_s)
    with suppress(Absent, dist.DistError):  # without a store no other rank is waiting
        here.poll(partial(here.reject, reason))


class Absent(Exception):
    """The exception of an action that must be repeated later, because other ranks have not arrived."""


class Rendezvous:
    """The store in which ranks wait for one another, hosted by torchrun or by rank 0."""

    def __init__(self, launch: Launched, timeout_s: float, device: str = "") -> None:
        self.launch, self.timeout_s, self.device = launch, timeout_s, device
        self.where = f"{launch.master_addr}:{launch.master_port}"
        self.process_id = uuid.uuid4().hex
        self.round = 0  # the round in which this rank has registered
        self.store: dist.Store | None = None

    def poll(self, action: Callable[[], Result]) -> Result:
        """Repeat an action while it raises Absent, until the timeout. Rank 0 logs which ranks are absent.

        If rank 0 itself is absent, the first rank of each machine logs that.
        """
        began_s, next_report_s = time.monotonic(), REPORT_EVERY_S
        while True:
            try:
                return action()
            except Absent as absent:
                waited_s = time.monotonic() - began_s
                if waited_s >= self.timeout_s:
                    raise
                if waited_s >= next_report_s:
                    next_report_s += REPORT_EVERY_S
                    is_first = self.launch.rank == 0
                    if is_first or (
                        self.launch.local_rank == 0 and str(absent).startswith("rank 0 ")
                    ):
                        text = f"waiting for {absent} at {self.where}, {waited_s:.0f} s of {self.timeout_s:g} s"
                        # The terminal shows the errors of every rank, but only rank 0's warnings.
                        logger.log(logging.WARNING if is_first else logging.ERROR, text)
            time.sleep(POLL_S)

    def arrive(self) -> dist.Store:
        """Register in the newest round. Raises Absent until all ranks have, InputError if one was rejected."""
        self.store = store = self.store or self.open_store()
        is_first, size = self.launch.rank == 0, self.launch.world_size
        if store.check([REJECTION]):
            raise InputError(store.get(REJECTION).decode())
        newest = self.round if is_first and self.round else store.add(ROUNDS, int(is_first))
        if newest == 0:
            raise Absent(f"rank 0 of {size}")
        ours = dist.PrefixStore(f"round_{newest}", store)
        if newest != self.round:
            ours.set(
                f"rank_{self.launch.rank}",
                "\n".join((self.process_id, socket.gethostname(), self.device)),
            )
            self.round = newest
        if is_first:
            self.write_roster(ours)
        # only rank 0 looks for all ranks: 512 ranks doing so would overload the store
        if not ours.check([ROSTER]):
            raise Absent("another rank")
        if self.process_id not in ours.get(ROSTER).decode().split():
            raise Absent(f"rank 0 of {size}")
        return ours

    def write_roster(self, ours: dist.Store) -> None:
        """Write the roster, on rank 0. Raises Absent unless all have registered, and InputError if devices differ."""
        keys = [f"rank_{rank}" for rank in range(self.launch.world_size)]
        absent = [key.removeprefix("rank_") for key in keys if not ours.check([key])]
        if absent:
            more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
            raise Absent(
                f"rank {', '.join(absent[:MOST_NAMED])}{more} of {self.launch.world_size}"
            )
        roster = []
        for rank, key in enumerate(keys):
            process_id, _, rest = ours.get(key).decode().partition("\n")
            host, _, device = rest.partition("\n")
            fault = f"rank {rank} on {host} trains with {device}, but rank 0 with {self.device}"
            check(device == self.device, f"{fault}; run baretrain doctor there")
            roster.append(process_id)
        ours.set(ROSTER, " ".join(roster))

    def reject(self, reason: str) -> None:
        """Record that this rank is rejected, and that its machine knows this.

        On rank 0's machine, raises Absent until all other machines know. The first rank that calls this counts for its
        whole machine, because torchrun may end the machine's other ranks before they call it.
        """
        launch = self.launch
        try:
            self.store = store = self.store or self.open_store()
        except Absent:
            # torchrun started the store before any rank, so the store has ended
            if launch.uses_agent_store:
                return
            raise
        store.compare_set(REJECTION, "", reason)
        first_rank = launch.rank - launch.local_rank
        if store.add(f"informed_{first_rank}", 1) == 1:  # each machine counts once
            store.add(NUM_INFORMED, launch.local_world_size)
        uninformed = launch.world_size - store.add(NUM_INFORMED, 0)
        if first_rank == 0 and uninformed > 0:
            raise Absent(f"{uninformed} ranks that do not know of the rejection")

    def open_store(self) -> dist.Store:
        launch = self.launch
        keeps_store = launch.rank == 0 and not launch.uses_agent_store
        if not keeps_store:  # fail fast: torch would retry until the timeout
            try:
                socket.create_connection(
                    (launch.master_addr, launch.master_port), CONNECT_S
                ).close()
            except OSError as error:
                raise Absent(
                    f"rank 0 of {launch.world_size} ({error.strerror or error})"
                ) from None
        store: dist.Store = dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=keeps_store,
            multi_tenant=True,  # a rank that is rejected later connects a second time
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener(launch) if keeps_store else None,
        )
        if keeps_store:
            KEPT.append(store)
        return dist.PrefixStore("rendezvous", store)


def listener(launch: Launched) -> int | None:
    """Return the descriptor of a socket that listens only on MASTER_ADDR; None if there are several machines.

    Also None if the port is taken: either this process has the store already, or torch will report the error.
    """
    with suppress(OSError):
        if launch.is_one_machine:
            return socket.create_server((launch.master_addr, launch.master_port)).detach()
    return None
