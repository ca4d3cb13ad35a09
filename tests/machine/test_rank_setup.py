"""What a rank sets on its machine before it joins the others, with a folder for sysfs. Not run on hardware."""

import dataclasses

import pytest
from rejections import rejects

from train.machine import rank_setup
from train.machine.launched import Launched

TWO_MACHINES = Launched(
    world_size=2, is_distributed=True, master_addr="192.0.2.7", master_port=29500
)


def environment(user, launch, *, forks=False):
    return rank_setup.rank_environment(user, launch, forks=forks)


def test_only_ranks_of_several_machines_choose_a_card_and_the_users_stays(monkeypatch, log):
    monkeypatch.setattr(rank_setup, "network_card", lambda master: {"192.0.2.7": "ens5"}[master])
    chosen = {
        "GLOO_SOCKET_IFNAME": "ens5",
        "NCCL_SOCKET_IFNAME": "=ens5",
        "CCOM_SOCKET_IFNAME": "ens5",
    }
    assert environment({"NCCL_SOCKET_IFNAME": ""}, TWO_MACHINES) == chosen
    del chosen["GLOO_SOCKET_IFNAME"]
    assert environment({"GLOO_SOCKET_IFNAME": "eth9"}, TWO_MACHINES) == chosen
    monkeypatch.setattr(rank_setup, "compile_processes", lambda ranks: 30 // ranks)
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    loopback["TORCHINDUCTOR_COMPILE_THREADS"] = "15"
    assert (
        environment({}, Launched(world_size=2, local_world_size=2, is_distributed=True))
        == loopback
    )
    assert environment({}, Launched()) == {}
    monkeypatch.setattr(rank_setup, "network_card", lambda master: None)
    assert environment({}, TWO_MACHINES) == {}
    monkeypatch.setattr(rank_setup.resource, "setrlimit", lambda *_: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    rank_setup.prepare(TWO_MACHINES, forks=False)
    assert [
        text
        for text in log.messages
        if "MASTER_ADDR=192.0.2.7" in text and "set GLOO_SOCKET_IFNAME" in text
    ]


def test_a_master_without_an_address_is_rejected():
    for name in ("no.such.host.invalid", "a" * 70, "a..b"):
        nowhere = dataclasses.replace(TWO_MACHINES, master_addr=name)
        rejects(f"^MASTER_ADDR={name} has no address", rank_setup.prepare, nowhere, forks=False)


@pytest.mark.parametrize(
    ("cpus", "allowed", "ranks", "processes"),
    [(192, 192, 8, 24), (96, 6, 8, 6), (384, 384, 8, 32), (2, 2, 8, 1)],
)
def test_a_rank_compiles_on_its_share_of_the_cpus(cpus, allowed, ranks, processes, monkeypatch):
    monkeypatch.setattr(rank_setup.os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(rank_setup.os, "sched_getaffinity", lambda _: set(range(allowed)))
    assert rank_setup.compile_processes(ranks) == processes
