"""The joining of ranks: they find one another through a store, form a process group, and compare what they train with.

torchrun hosts the store, or rank 0 does. On one machine the store listens on the loopback address only, because whoever
reaches it decides what the ranks unpickle.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

import train
from train.config import Failure, check, shortlist
from train.config.backend import JOIN_TIMEOUT_S
from train.machine.console import without_stdout
from train.machine.launched import Launched, launched
from train.parallel.ranks import World

logger = logging.getLogger("train")
REPORT_EVERY = 100  # looks for missing ranks between two lines of the log
POLL_S = 0.1
JOINS = itertools.count()  # numbers the times that this process joins
ALL_HERE = "all_here"  # key that rank 0 sets once every rank has reached the store


def join(backends: str, *, timeout_s: float, join_timeout_s: float = JOIN_TIMEOUT_S) -> None:
    """Wait for the other ranks, then make the default process group."""
    launch = launched()
    store = await_ranks(launch, join_timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    with without_stdout():  # gloo prints how many ranks have connected
        dist.init_process_group(
            backends,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
        )


def await_ranks(launch: Launched, timeout_s: float) -> dist.Store:
    """Open the store and wait until every rank has. Raises Failure, which names the ranks that did not come."""
    where = f"{launch.master_addr}:{launch.master_port} (MASTER_ADDR, MASTER_PORT)"
    try:
        store = open_store(launch, timeout_s)
    except dist.DistError as error:
        raise Failure(
            f"rank 0 of {launch.world_size} did not answer at {where} within {timeout_s:g} s: {error}"
        ) from error
    try:
        store.set(key_of(launch.rank), "")
        if launch.rank == 0:
            wait_for_others(store, launch, where, timeout_s)
            store.set(ALL_HERE, "")
        store.wait([ALL_HERE], timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise Failure(
            f"not all of {launch.world_size} ranks came to {where} within {timeout_s:g} s; rank 0 names those that are "
            "missing"
        ) from error
    return store


def key_of(rank: int) -> str:
    return f"rank_{rank}"


def wait_for_others(store: dist.Store, launch: Launched, where: str, timeout_s: float) -> None:
    """Wait on rank 0 until every rank has set its key. The log names those that are missing."""
    end_s = time.monotonic() + timeout_s
    missing = list(range(1, launch.world_size))
    for attempt in itertools.count(1):
        missing = [rank for rank in missing if not store.check([key_of(rank)])]
        if not missing:
            return
        named = f"rank {shortlist(missing)} of {launch.world_size}"
        if time.monotonic() >= end_s:
            raise Failure(f"{named} did not come to {where} within {timeout_s:g} s")
        if attempt % REPORT_EVERY == 0:
            logger.warning("waiting for %s at %s, up to %g s", named, where, timeout_s)
        time.sleep(POLL_S)


def open_store(launch: Launched, timeout_s: float) -> dist.Store:
    """Connect to the store. torchrun keeps it over restarts, so the ranks use other keys each time they join."""
    is_host = launch.rank == 0 and not launch.uses_agent_store
    store = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        is_master=is_host,
        multi_tenant=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener(launch) if is_host else None,
    )
    return dist.PrefixStore(f"start_{launch.restart_count}_{next(JOINS)}", store)


def listener(launch: Launched) -> int | None:
    """Return the descriptor of a socket that listens only on MASTER_ADDR; None if there are several machines.

    Also None if the port is taken: either this process has the store already, or torch will report the error.
    """
    with suppress(OSError):
        if launch.is_one_machine:
            return socket.create_server((launch.master_addr, launch.master_port)).detach()
    return None


def check_alike(world: World, device: str) -> None:
    """Raise InputError on all ranks if one trains with another device or version than rank 0.

    `device` names the backend, device and precision.
    """
    own = f"{device}, torch {torch.__version__}, baretrain {train.__version__}"
    everyone = world.all_gather_object((socket.gethostname(), own))
    _, wanted = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        check(
            other == wanted,
            f"rank {rank} on {host} trains with {other}, but rank 0 with {wanted}; run baretrain doctor there",
        )
