"""Measurements of communication: all-reduces over the devices and over the hosts, and each link between two machines.

All ranks under torchrun must call `measure`, and get the same result.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from train.config import BackendConfig, Failure, InstanceConfig, plural, shortlist
from train.config.backend import DEFAULT_TIMEOUT_S, JOIN_TIMEOUT_S
from train.machine.console import printable, say
from train.machine.torchrun import first_to
from train.parallel.backends import Backend, open_backend
from train.parallel.ranks import World
from train.run.command import FAILED
from train.tools.doctor.probe import Finding, State, bad, ok

REPEATS = 5
MIB = 2**20
# Collectives of accelerators reach their peak only with larger tensors: a ring of n ranks sends 1/n of the tensor in a
# step, so with many ranks a small tensor measures only latency. Both sizes were chosen without measurements.
HOST_MIB, DEVICE_MIB = 64, 512
GRACE_S = 10.0  # seconds after the timeout, in which the backend can raise a more detailed error
# "Single-flow traffic is limited to 5 Gbps when instances are not in the same cluster placement group" (Amazon EC2 User
# Guide, instance network bandwidth), and gloo uses one TCP connection per pair of ranks.
FLOW_GBIT_PER_S = 5.0
WARN_BELOW, BAD_BELOW = 1 / 2, 1 / 4  # fractions of the expected speed


@dataclass(frozen=True)
class AllReduce:
    latency_s: float  # seconds for 4 bytes
    num_bytes: int
    bus_bytes_per_s: float
    wrong_ranks: list[int]  # ranks that got a wrong sum


@dataclass(frozen=True)
class Measured:
    where: str  # backend and device
    names: list[str]  # host name and rank, by rank
    num_machines: int
    is_cpu: bool
    device: AllReduce
    hosts: AllReduce
    # keys "a - b"; bytes/s in each direction, measured in both at the same time
    links: dict[str, float]


def measure(cfg: BackendConfig, instance: InstanceConfig, *, mib: int | None = None) -> Measured:
    """Join the ranks and measure. All ranks must call this. Tensors of `mib` MiB are exchanged; None uses the default.

    Raises Failure, which names the operation that failed.
    """
    timeout_s = cfg.timeout_s or DEFAULT_TIMEOUT_S
    with deadline("joining the ranks", JOIN_TIMEOUT_S + timeout_s):
        backend = open_backend(replace(cfg, timeout_s=timeout_s), instance)
        world = backend.world
        seen = world.all_gather_object((printable(socket.gethostname()), world.local_rank))
    names = [f"{host} (rank {rank})" for rank, (host, _) in enumerate(seen)]
    firsts = [rank for rank, (_, local_rank) in enumerate(seen) if local_rank == 0]
    is_cpu = backend.monitor_kind == "cpu"

    def add_up_on_device(tensors: list[Tensor]) -> None:
        backend.all_reduce(tensors)
        backend.mark_step()
        backend.to_host(tensors[-1:])  # This call waits for the device.

    def add_up_on_hosts(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            world.all_reduce(tensor)

    host_bytes = MIB * (mib or HOST_MIB)
    device_bytes = MIB * (mib or (HOST_MIB if is_cpu else DEVICE_MIB))
    with deadline("the all-reduce over the devices", timeout_s):
        of_devices = all_reduce(backend, add_up_on_device, device_bytes, backend.device)
    with deadline("the all-reduce over the hosts", timeout_s):
        of_hosts = all_reduce(backend, add_up_on_hosts, host_bytes, torch.device("cpu"))
    measured = Measured(
        where=f"{backend.name} on {backend.device_name}",
        names=names,
        num_machines=len(firsts),
        is_cpu=is_cpu,
        device=of_devices,
        hosts=of_hosts,
        links=measure_links(world, names, firsts, host_bytes, timeout_s),
    )
    with deadline("leaving the group", timeout_s):
        backend.close()
    return measured


@contextmanager
def deadline(operation: str, timeout_s: float) -> Iterator[None]:
    """Turn a RuntimeError into a Failure that names the operation.

    If the operation hangs, end the process, because not every backend raises after its timeout.
    """

    def end() -> None:
        with first_to("report") as is_first:
            if is_first:
                line = f"error: {operation} took more than {timeout_s:g} s (backend.timeout_s)"
                say(line, file=sys.stderr)
        os._exit(FAILED)

    timer = threading.Timer(timeout_s + GRACE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Failure:
        raise
    except RuntimeError as error:
        raise Failure(f"{operation}: {error}") from error
    finally:
        timer.cancel()


# ---- measurements ----------------------------------------------------------------------------------------------------


def all_reduce(
    backend: Backend, add_up: Callable[[list[Tensor]], None], num_bytes: int, device: torch.device
) -> AllReduce:
    world = backend.world
    large = torch.full((num_bytes // 4,), world.rank + 1.0).to(device)
    small = torch.ones(1).to(device)
    add_up([large, small])  # The first call connects the ranks, and may compile.
    is_right = bool((backend.to_host([large])[0] == world.size * (world.size + 1) / 2).all())

    def median_s(tensors: list[Tensor]) -> float:
        """Return the median time in seconds over repeats and ranks."""
        of_ranks = world.all_gather_object(
            timeit.repeat(lambda: add_up(tensors), number=1, repeat=REPEATS)
        )
        return statistics.median(took_s for durations in of_ranks for took_s in durations)

    latency_s, took_s = median_s([small]), median_s([large, small])
    wrong = [rank for rank, each in enumerate(world.all_gather_object(is_right)) if not each]
    return AllReduce(
        latency_s, num_bytes, bus_bandwidth(num_bytes, took_s, num_ranks=world.size), wrong
    )


def bus_bandwidth(num_bytes: int, took_s: float, *, num_ranks: int) -> float:
    """Return an all-reduce's bus bandwidth in bytes/s, by the formula of nccl-tests (doc/PERFORMANCE.md)."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / took_s


def measure_links(
    world: World, names: list[str], members: Sequence[int], num_bytes: int, timeout_s: float
) -> dict[str, float]:
    """Return the bytes/s of the link between each pair of the ranks `members`, by the names of the pair."""
    sent, received = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    mine: dict[
        str, float
    ] = {}  # seconds of each of this rank's exchanges, by the names of the two ranks
    for number, pairs in enumerate(rounds(members), start=1):
        with deadline(f"waiting for the other links before round {number}", timeout_s):
            world.barrier()
        for pair in pairs:
            if world.rank in pair:
                name = " - ".join(names[rank] for rank in pair)
                exchange = partial(world.sendrecv, sum(pair) - world.rank, sent, received)
                with deadline(f"the exchange {name}", timeout_s):
                    # Other work on the machines can only slow an exchange down, so the fastest one counts.
                    mine[name] = min(timeit.repeat(exchange, number=1, repeat=REPEATS))
    durations: dict[str, float] = {}
    with deadline("gathering the links", timeout_s):
        for of_rank in world.all_gather_object(mine):
            durations |= {
                name: max(took_s, durations.get(name, 0)) for name, took_s in of_rank.items()
            }
    return {name: num_bytes / took_s for name, took_s in durations.items()}


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return all pairs of members in rounds, such that no member occurs twice in a round.

    In round r the pairs are the indices a < b with (a + b) % n == r, for n members.
    """
    number = len(members)
    places = [
        [(first, (total - first) % number) for first in range(number)] for total in range(number)
    ]
    return [[(members[a], members[b]) for a, b in pairs if a < b] for pairs in places]


# ---- the findings ----------------------------------------------------------------------------------------------------


def compare(measured: Measured, instance: InstanceConfig) -> dict[str, Finding]:
    """Return the findings, by the names under which they are printed."""
    wanted_device, wanted_link = wanted(instance, measured.num_machines, is_cpu=measured.is_cpu)
    figure = figure_text(wanted_device, instance.name)
    # Devices can use an unknown share of the bandwidth between machines, so a low speed there is only a warning.
    can_fail = measured.num_machines == 1
    findings = {
        "ranks": ok(
            f"{len(measured.names)} on {plural(measured.num_machines, 'machine')}, {measured.where}"
        ),
        "devices": all_reduce_finding(
            measured.device, measured.names, wanted_device, figure, can_fail=can_fail
        ),
        "hosts": all_reduce_finding(measured.hosts, measured.names),
    }
    if measured.links:
        findings["links"] = links_finding(measured.links, wanted_link, instance.name)
    return findings


def wanted(
    instance: InstanceConfig, num_machines: int, *, is_cpu: bool
) -> tuple[float | None, float | None]:
    """Return the bytes/s that the devices' all-reduce and a link between machines should reach; None if unknown."""
    network = instance.network_gbit_per_s and instance.network_gbit_per_s * 1e9 / 8
    flow = network and min(network, FLOW_GBIT_PER_S * 1e9 / 8)
    inside = instance.device_link_gbyte_per_s and instance.device_link_gbyte_per_s * 1e9
    if num_machines == 1:
        return (None if is_cpu else inside), None
    if is_cpu:
        return flow, flow
    return network and min(network, inside or network), flow


def figure_text(should_be: float | None, instance: str) -> str:
    return (
        f"; not compared: no figure for {instance}"
        if should_be is None
        else f"; should reach {shown(should_be)}"
    )


def all_reduce_finding(
    seen: AllReduce,
    names: list[str],
    should_be: float | None = None,
    figure: str = "",
    *,
    can_fail: bool = True,
) -> Finding:
    size, latency_ms = f"{seen.num_bytes / MIB:g} MiB", seen.latency_s * 1e3
    text = f"{shown(seen.bus_bytes_per_s)} for {size}, {latency_ms:.2g} ms for 4 bytes{figure}"
    if seen.wrong_ranks:
        where = shortlist([names[rank] for rank in seen.wrong_ranks])
        return bad(
            f"wrong sum on {plural(len(seen.wrong_ranks), 'rank')}: {where}; {text}",
            cure="replace that machine; compare the versions that baretrain doctor shows on all machines",
        )
    if should_be is None:
        return ok(text)
    cure = "to check EFA, run baretrain doctor --machines N on each machine; NCCL_DEBUG=INFO shows NCCL's network"
    return graded(text, seen.bus_bytes_per_s / should_be, cure, can_fail=can_fail)


def links_finding(links: Mapping[str, float], should_be: float | None, instance: str) -> Finding:
    """Return the finding on the slowest link, compared with the median link and with the expected bandwidth."""
    slowest = min(links, key=lambda name: links[name])
    median = statistics.median(links.values())
    text = f"slowest of {len(links)}: {slowest}, {shown(links[slowest])}; median {shown(median)}"
    text += figure_text(should_be, instance)
    share = links[slowest] / max(median, should_be or 0)
    cure = "run baretrain doctor on both machines; replace the one whose links to other machines are also slow"
    return graded(text, share, cure)


def graded(text: str, share: float, cure: str, *, can_fail: bool = True) -> Finding:
    """Return the finding on a speed that is `share` of the expected one; at most a warning unless `can_fail`."""
    state: State = (
        "ok" if share >= WARN_BELOW else "bad" if can_fail and share < BAD_BELOW else "warn"
    )
    return Finding(state, text, "" if state == "ok" else cure)


def shown(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
