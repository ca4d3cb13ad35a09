"""An all-reduce over the devices of all ranks, whose sums are compared and whose speed is measured.

All ranks under torchrun must call `measure`, and get the same result.
"""

from __future__ import annotations

import socket
import statistics
import timeit
from typing import Any

import torch

from train.config import BackendConfig, Failure, InstanceConfig, plural, shortlist
from train.machine.console import printable
from train.parallel.backends import Backend, open_backend
from train.tools.probe import Finding, bad, ok

REPEATS = 5
MIB = 2**20
SIZE = 64 * MIB


def measure(
    cfg: BackendConfig, instance: InstanceConfig
) -> tuple[dict[str, Finding], dict[str, Any]]:
    """Join the ranks, and add up tensors. Returns the findings and the figures. Raises Failure if a sum fails."""
    backend = open_backend(cfg, instance)
    world = backend.world
    where = f"{world.size} on {plural(world.num_machines, 'machine')}, {backend.name} on {backend.device_name}"
    hosts = world.all_gather_object(printable(socket.gethostname()))
    names = [f"{host} (rank {rank})" for rank, host in enumerate(hosts)]
    try:
        wrong, bytes_per_s = all_reduce(backend)
    except RuntimeError as error:
        raise Failure(f"the all-reduce over the devices: {error}") from error
    backend.close()
    text = f"{bytes_per_s / 1e9:.3g} GB/s for {SIZE // MIB} MiB"
    finding = ok(text)
    if wrong:
        which = shortlist([names[rank] for rank in wrong])
        finding = bad(
            f"wrong sum on {plural(len(wrong), 'rank')}: {which}; {text}",
            cure="replace that machine; compare the versions that baretrain doctor shows on all machines",
        )
    figures = {"where": where, "bus_bytes_per_s": bytes_per_s, "wrong_ranks": wrong}
    return {"ranks": ok(where), "devices": finding}, figures


def all_reduce(backend: Backend) -> tuple[list[int], float]:
    """Return the ranks that got a wrong sum, and the bus bandwidth in bytes per second."""
    world = backend.world
    tensor = torch.full((SIZE // 4,), world.rank + 1.0).to(backend.device)

    def add_up() -> None:
        backend.all_reduce([tensor])
        backend.mark_step()
        backend.to_host([tensor[:1]])  # waits for the device

    add_up()  # the first call connects the ranks, and may compile
    wanted = world.size * (world.size + 1) / 2
    is_right = bool((backend.to_host([tensor])[0] == wanted).all())
    answers = world.all_gather_object(is_right)
    own_s = statistics.median(timeit.repeat(add_up, number=1, repeat=REPEATS))
    took_s = statistics.median(world.all_gather_object(own_s))
    wrong = [rank for rank, right in enumerate(answers) if not right]
    # As in nccl-tests (doc/PERFORMANCE.md).
    return wrong, 2 * (world.size - 1) / world.size * SIZE / took_s
