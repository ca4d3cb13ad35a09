"""What a rank sets on its machine before it joins the others, with a folder for sysfs. Not run on hardware."""

import dataclasses
import os

import pytest
from rejections import rejects

from train.machine import rank_setup
from train.machine.launched import Launched

TWO_MACHINES = Launched(
    world_size=2, is_distributed=True, master_addr="192.0.2.7", master_port=29500
)
GPU = "0000:10:1c.0"


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def environment(user, launch, *, forks=False):
    return rank_setup.rank_environment(user, launch, forks=forks)


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_setup, "SYSFS", tmp_path)
    return tmp_path


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
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
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


def test_a_master_without_an_address_is_rejected_and_what_ends_ranks_is_set_aside(
    monkeypatch, log
):
    monkeypatch.setattr(rank_setup.resource, "setrlimit", lambda *_: None)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    rank_setup.prepare(Launched(), forks=False)
    assert (
        os.environ["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
        and "DETAIL is replaced by INFO" in log.messages[0]
    )
    for name in ("no.such.host.invalid", "a" * 70, "a..b"):
        nowhere = dataclasses.replace(TWO_MACHINES, master_addr=name)
        rejects(f"^MASTER_ADDR={name} has no address", rank_setup.prepare, nowhere, forks=False)


@pytest.mark.parametrize(
    ("online", "local", "allowed", "near"),
    [
        ("0-7", "0-1,4-5", range(8), {0, 1, 4, 5}),
        ("0-7", "0-7", range(8), set()),  # one node
        ("0-7", "0-3", range(4), set()),  # the launcher has chosen: for good, or for another rank
        ("0-7", "0-3", range(4, 8), set()),
        ("0-7", "", range(8), set()),
        ("0", "0", range(1), set()),
    ],
)
def test_a_rank_runs_on_the_node_of_its_device_unless_the_launcher_has_chosen(
    sysfs, online, local, allowed, near
):
    write(sysfs, "devices/system/cpu/online", f"{online}\n")
    write(sysfs, f"bus/pci/devices/{GPU}/local_cpulist", f"{local}\n")
    assert rank_setup.near_cpus(GPU, set(allowed)) == near
    assert rank_setup.near_cpus("0000:99:00.0", set(allowed)) == set()
