"""How ranks meet: in a store, where they wait for each other in Python. While torch itself waits, no signal handler
runs and nobody learns which rank is missing.

The store may be older than this attempt, as torchrun keeps one over its restarts, and each machine counts those by
itself. So rank 0 calls all ranks, under a new number, and a rank answers the newest call with the sign of its process.
When all have answered, rank 0 writes down whose answers it has read: those processes join, in a part of the store that
is theirs. A process that finds its predecessor in that roster waits for the next call. An answer also says on what the
rank trains: a job whose ranks differ in that is refused before it begins.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

import train
from train.cli.console import without_stdout
from train.config import Failure, InputError, check
from train.host.launched import Launched, launched

logger = logging.getLogger("train")
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public from PyTorch 2.14 on
REPORT_EVERY_S = 10.0
POLL_S, CONNECT_S = 0.1, 2.0
MOST_NAMED = 8  # ranks that are missing
MOST_TEXT = 100_000  # characters of a value
CALLS = "calls"  # the number of the newest call
REFUSAL = "refusal"  # of a rank; it holds for all later attempts too, since a refusal ends torchrun for good
NUM_INFORMED = "num_informed"  # ranks of the machines that know of the refusal
Result = TypeVar("Result")


def join(names: str, device: str, *, timeout_s: float, join_timeout_s: float) -> dist.Store:
    """Meet the other ranks and make the default process group, of which `timeout_s` is the timeout. See `meet` for
    `device`, for what is raised and for the store.
    """
    launch, store = launched(), meet(device, join_timeout_s)
    make = partial(dist.init_process_group, names, store=store, rank=launch.rank, world_size=launch.world_size)
    # PyTorch can change the timeout of gloo and NCCL afterwards, but not that of Neuron's collectives.
    connect(make, timeout_s=timeout_s, connect_timeout_s=timeout_s if "neuron" in names else join_timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def connect(
    make: Callable[..., dist.ProcessGroup | None], *, timeout_s: float, connect_timeout_s: float
) -> dist.ProcessGroup | None:
    """Make a process group, of which `timeout_s` will be the timeout. A rank that dies after it met the others is
    waited for until `connect_timeout_s`, as one that never came.
    """
    with without_stdout():  # gloo prints how many ranks each has connected
        group = make(timeout=timedelta(seconds=min(timeout_s, connect_timeout_s)))
    if connect_timeout_s < timeout_s:
        set_timeout(timedelta(seconds=timeout_s), group)
    return group


def meet(device: str, timeout_s: float) -> dist.Store:
    """Meet the other ranks. Gives a store that only the processes that have met use. Raises Failure if some do not
    arrive in time, InputError if one is refused on its machine, or trains on something else than the others: `device`
    names backend, device and precision.
    """
    meeting = Meeting(launched(), timeout_s, f"{device}, torch {torch.__version__}, baretrain {train.__version__}")
    try:
        return meeting.attend()
    except Absent as absent:
        raise Failure(
            f"{absent} did not reach {meeting.where} within {timeout_s:g} s (backend.join_timeout_s)"
        ) from None
    except dist.DistError as error:
        raise Failure(f"the ranks cannot meet at {meeting.where} (MASTER_ADDR, MASTER_PORT): {error}") from error


def announce(refusal: str, timeout_s: float) -> None:
    """Let the other machines know that this rank is refused, so that none waits for it. The machine of rank 0 stays
    until all know, as the store in which they read it ends with it.
    """
    meeting = Meeting(launched(), timeout_s)
    # Where the store is out of reach nobody is left who waits.
    with suppress(Absent, dist.DistError):
        meeting.retry(partial(meeting.refuse, refusal))


class Absent(Exception):
    """Ranks that have not arrived."""


class FirstAbsent(Absent):
    """Rank 0 has not arrived."""


class Meeting:
    """The store in which ranks meet. torchrun keeps it, or else rank 0."""

    def __init__(self, launch: Launched, timeout_s: float, device: str = "") -> None:
        self.launch, self.timeout_s, self.device = launch, timeout_s, device
        self.where = f"{launch.master_addr}:{launch.master_port}"
        self.sign = uuid.uuid4().hex  # of this process
        self.call = 0  # the number of the call that this rank has answered
        self.store: dist.Store | None = None
        self.next_report_s = REPORT_EVERY_S

    def attend(self) -> dist.Store:
        """Arrive, and wait until every rank has. Raises Absent for those that have not."""
        return self.retry(self.arrive)

    def retry(self, action: Callable[[], Result]) -> Result:
        """What an action gives as soon as it does not raise Absent."""
        retry = Retrying(
            retry=retry_if_exception_type(Absent),
            wait=wait_fixed(POLL_S),
            stop=stop_after_delay(self.timeout_s),
            before_sleep=self.report_absent,
            reraise=True,
        )
        return retry(action)

    def arrive(self) -> dist.Store:
        if self.store is None:
            self.store = self.connect()
        if self.store.check([REFUSAL]):
            raise InputError(text_of(self.store, REFUSAL))
        call = self.newest_call(self.store)
        ours = dist.PrefixStore(f"call_{call}", self.store)
        if call != self.call:
            ours.set(sign_of(self.launch.rank), "\n".join((self.sign, socket.gethostname(), self.device)))
            self.call = call
        if self.launch.rank == 0:
            self.check_all(ours)
        self.check_roster(ours)
        return ours

    def refuse(self, refusal: str) -> None:
        """Write down that this rank is refused, and that its machine knows. Rank 0's machine raises Absent while others
        do not; torchrun may end the other ranks of a machine before they know.
        """
        launch = self.launch
        if self.store is None:
            try:
                self.store = self.connect()
            except Absent:
                if launch.uses_agent_store:  # it was there before any rank
                    return
                raise
        self.store.compare_set(REFUSAL, "", refusal)
        first_rank = launch.rank - launch.local_rank
        if self.store.add(f"informed_{first_rank}", 1) == 1:  # each machine counts once
            self.store.add(NUM_INFORMED, launch.local_world_size)
        informed = self.store.add(NUM_INFORMED, 0)
        if first_rank == 0 and informed < launch.world_size:
            raise Absent(f"{launch.world_size - informed} ranks that do not know of the refusal")

    def newest_call(self, store: dist.Store) -> int:
        if self.launch.rank == 0:
            return self.call or store.add(CALLS, 1)
        call = store.add(CALLS, 0)
        if call == 0:
            raise FirstAbsent(f"rank 0 of {self.launch.world_size}")
        return call

    def check_all(self, ours: dist.Store) -> None:
        """Rank 0: write the roster if all ranks have answered, else raise Absent. InputError if they differ."""
        signs = [sign_of(rank) for rank in range(self.launch.world_size)]
        absent = [str(rank) for rank, sign in enumerate(signs) if not ours.check([sign])]
        if absent:
            more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
            raise Absent(f"rank {', '.join(absent[:MOST_NAMED])}{more} of {self.launch.world_size}")
        answers = [text_of(ours, sign).partition("\n") for sign in signs]
        for rank, (_, _, rest) in enumerate(answers):
            host, _, device = rest.partition("\n")
            fault = f"rank {rank} on {host} trains by {device}, but rank 0 by {self.device}"
            check(device == self.device, f"{fault}; run python -m train.doctor there")
        ours.set("roster", " ".join(sign for sign, _, _ in answers))

    def check_roster(self, ours: dist.Store) -> None:
        if not ours.check(["roster"]):  # if all 512 ranks looked for each other, the store would be too busy
            raise Absent("another rank")
        if self.sign not in text_of(ours, "roster").split():
            raise FirstAbsent(f"rank 0 of {self.launch.world_size}")

    def connect(self) -> dist.Store:
        launch = self.launch
        keeps_store = launch.rank == 0 and not launch.uses_agent_store
        if not keeps_store:  # torch itself would try until the timeout
            try:
                socket.create_connection((launch.master_addr, launch.master_port), CONNECT_S).close()
            except OSError as error:
                raise FirstAbsent(f"rank 0 of {launch.world_size} ({error.strerror or error})") from None
        store: dist.Store = dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=keeps_store,
            multi_tenant=True,  # a rank that is refused later connects once more
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
        )
        return dist.PrefixStore("meeting", store)

    def report_absent(self, state: RetryCallState) -> None:
        """Log which ranks are absent. Rank 0 does so, or the first rank of each machine if rank 0 is absent."""
        assert state.outcome is not None
        waited_s, absent = state.seconds_since_start or 0.0, state.outcome.exception()
        if waited_s < self.next_report_s:
            return
        self.next_report_s += REPORT_EVERY_S
        text = "waiting for %s at %s, %.0f s of %g s"
        values = (absent, self.where, waited_s, self.timeout_s)
        if self.launch.rank == 0:
            logger.warning(text, *values)
        elif self.launch.local_rank == 0 and isinstance(absent, FirstAbsent):
            logger.error(text, *values)  # the terminal shows errors of every rank


def text_of(store: dist.Store, key: str) -> str:
    """A value that another process wrote, which may be any process."""
    return store.get(key).decode(errors="replace")[:MOST_TEXT]


def sign_of(rank: int) -> str:
    return f"rank_{rank}"
