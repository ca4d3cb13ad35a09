"""How ranks meet: each leaves its sign in a store, and waits for the others in Python. In torch's own waits no signal
handler comes to its turn, and nobody learns who is missing.
"""

from __future__ import annotations

import logging
import socket
from datetime import timedelta

import torch.distributed as dist
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from train.config import Failure
from train.console import without_stdout
from train.launched import Launched, launched

logger = logging.getLogger("train")
SAY_EVERY_S = 10.0
POLL_S, CONNECT_S = 0.1, 2.0
MOST_NAMED = 8  # ranks that are missing
ALL_HERE = "all_here"  # rank 0's answer once it has seen every rank's sign


def join(names: str, timeout_s: float) -> None:
    """Meet the other ranks and make the default process group. Raises Failure if some do not come in time."""
    launch = launched()
    meeting = Meeting(launch, timeout_s)
    try:
        store = meeting.attend()
    except Absent as absent:
        raise Failure(f"{absent} did not come to {meeting.where} within {timeout_s:g} s (backend.timeout_s)") from None
    except dist.DistError as error:
        raise Failure(f"the ranks cannot meet at {meeting.where} (MASTER_ADDR, MASTER_PORT): {error}") from error
    with without_stdout():  # gloo prints how many ranks each has connected
        dist.init_process_group(
            names,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
        )


def group_of_hosts(timeout: timedelta) -> dist.ProcessGroup:
    """Beside the default group, one that speaks gloo."""
    with without_stdout():
        return dist.new_group(backend="gloo", timeout=timeout)


class Absent(Exception):
    """Ranks that have not come."""


class FirstAbsent(Absent):
    """Rank 0 has not come."""


class Meeting:
    """The ranks' store, which torchrun keeps, or else rank 0."""

    def __init__(self, launch: Launched, timeout_s: float) -> None:
        self.launch, self.timeout_s = launch, timeout_s
        self.where = f"{launch.master_addr}:{launch.master_port}"
        self.store: dist.Store | None = None
        self.next_s = SAY_EVERY_S

    def attend(self) -> dist.Store:
        """Come, and wait until every rank has. Raises Absent for those that have not."""
        retry = Retrying(
            retry=retry_if_exception_type(Absent),
            wait=wait_fixed(POLL_S),
            stop=stop_after_delay(self.timeout_s),
            before_sleep=self.say_who_is_absent,
            reraise=True,
        )
        return retry(self.come)

    def come(self) -> dist.Store:
        if self.store is None:
            self.store = self.connect()
            self.store.set(sign_of(self.launch.rank), "")
        if self.launch.rank == 0:
            self.check_all(self.store)
        elif not self.store.check([ALL_HERE]):  # 512 ranks that look for each other would keep the store busy
            raise (
                Absent("another rank")
                if self.store.check([sign_of(0)])
                else FirstAbsent(f"rank 0 of {self.launch.world_size}")
            )
        return self.store

    def connect(self) -> dist.Store:
        """On one machine each of torchrun's restarts gets a part of the store for itself: torchrun keeps the store, and
        ranks would call the ports of their predecessors. Several machines count restarts each for itself, so there the
        signs of an earlier start remain, and ranks may have to wait for each other in torch.
        """
        launch = self.launch
        keeps_store = launch.rank == 0 and not launch.uses_agent_store
        if not keeps_store:  # torch's own attempts would last as long as the timeout
            try:
                socket.create_connection((launch.master_addr, launch.master_port), CONNECT_S).close()
            except OSError as error:
                raise FirstAbsent(f"rank 0 of {launch.world_size} ({error.strerror or error})") from None
        store: dist.Store = dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=keeps_store,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
        )
        return dist.PrefixStore(f"restart_{launch.restart_count}", store) if launch.is_one_machine else store

    def check_all(self, store: dist.Store) -> None:
        absent = [str(rank) for rank in range(self.launch.world_size) if not store.check([sign_of(rank)])]
        if absent:
            more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
            raise Absent(f"rank {', '.join(absent[:MOST_NAMED])}{more} of {self.launch.world_size}")
        store.set(ALL_HERE, "")

    def say_who_is_absent(self, state: RetryCallState) -> None:
        """Rank 0 does, or the first rank of each machine if rank 0 is absent."""
        assert state.outcome is not None
        waited_s, absent = state.seconds_since_start or 0.0, state.outcome.exception()
        if waited_s < self.next_s:
            return
        self.next_s += SAY_EVERY_S
        text = "waiting for %s at %s, %.0f s of %g s"
        values = (absent, self.where, waited_s, self.timeout_s)
        if self.launch.rank == 0:
            logger.warning(text, *values)
        elif self.launch.local_rank == 0 and isinstance(absent, FirstAbsent):
            logger.error(text, *values)  # a level that the terminal shows of every rank


def sign_of(rank: int) -> str:
    return f"rank_{rank}"
