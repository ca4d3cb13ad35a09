"""All-reduces over the devices and over the hosts, whose sums are compared and whose speed is measured.

All ranks under torchrun must call `measure`, and get the same result.
"""

from __future__ import annotations

import socket
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.config import BackendConfig, Failure, InstanceConfig, plural, shortlist
from train.machine.console import printable
from train.parallel.backends import Backend, open_backend
from train.tools.probe import Finding, bad, ok

REPEATS = 5
MIB = 2**20
SIZE = 64 * MIB
AddUp = Callable[[list[Tensor]], None]


def measure(
    cfg: BackendConfig, instance: InstanceConfig
) -> tuple[dict[str, Finding], dict[str, Any]]:
    """Join the ranks, and add up tensors. Returns the findings and the figures. Raises Failure if a sum fails."""
    backend = open_backend(cfg, instance)
    world = backend.world
    hosts = world.all_gather_object(printable(socket.gethostname()))
    names = [f"{host} (rank {rank})" for rank, host in enumerate(hosts)]

    def over_devices(tensors: list[Tensor]) -> None:
        backend.all_reduce(tensors)
        backend.mark_step()
        backend.to_host(tensors[-1:])  # waits for the device

    def over_hosts(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=world.group)

    text = f"{world.size} on {plural(world.num_machines, 'machine')}, {backend.name} on {backend.device_name}"
    findings = {"ranks": ok(text)}
    measured: dict[str, Any] = {"where": text}
    ways: dict[str, tuple[AddUp, torch.device]] = {
        "devices": (over_devices, backend.device),
        "hosts": (over_hosts, torch.device("cpu")),
    }
    for name, (add_up, device) in ways.items():
        try:
            figures = all_reduce(backend, add_up, device)
        except RuntimeError as error:
            raise Failure(f"the all-reduce over the {name}: {error}") from error
        measured[name] = figures
        findings[name] = finding_of(figures, names)
    backend.close()
    return findings, measured


def all_reduce(backend: Backend, add_up: AddUp, device: torch.device) -> dict[str, Any]:
    """Return the latency, the bus bandwidth, and the ranks that got a wrong sum."""
    world = backend.world
    large = torch.full((SIZE // 4,), world.rank + 1.0).to(device)
    small = torch.ones(1).to(device)
    add_up([large, small])  # the first call connects the ranks, and may compile
    wanted = world.size * (world.size + 1) / 2
    is_right = bool((backend.to_host([large])[0] == wanted).all())

    def median_s(tensors: list[Tensor]) -> float:
        """Return the median over ranks of the median time in seconds."""
        own = timeit.repeat(lambda: add_up(tensors), number=1, repeat=REPEATS)
        return statistics.median(world.all_gather_object(statistics.median(own)))

    latency_s = median_s([small])
    took_s = median_s([large, small])
    answers = world.all_gather_object(is_right)
    return {
        "latency_s": latency_s,
        "num_bytes": SIZE,
        # As in nccl-tests (doc/PERFORMANCE.md).
        "bus_bytes_per_s": 2 * (world.size - 1) / world.size * SIZE / took_s,
        "wrong_ranks": [rank for rank, right in enumerate(answers) if not right],
    }


def finding_of(figures: dict[str, Any], names: list[str]) -> Finding:
    speed = f"{figures['bus_bytes_per_s'] / 1e9:.3g} GB/s"
    text = f"{speed} for {SIZE // MIB} MiB, {figures['latency_s'] * 1e3:.2g} ms for 4 bytes"
    wrong = figures["wrong_ranks"]
    if not wrong:
        return ok(text)
    where = shortlist([names[rank] for rank in wrong])
    return bad(
        f"wrong sum on {plural(len(wrong), 'rank')}: {where}; {text}",
        cure="replace that machine; compare the versions that baretrain doctor shows on all machines",
    )
