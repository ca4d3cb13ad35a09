"""What a rank sets on its machine before it joins the others, with a folder for sysfs. Not run on hardware."""

import dataclasses
import os
import resource
import threading

import pytest
from rejections import rejects
from running import ROOT

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


def test_efa_takes_no_huge_pages_where_the_loader_forks(sysfs):
    write(sysfs, "class/infiniband/mlx5_0/device/vendor", "0x15b3\n")
    assert environment({}, Launched(), forks=True) == {}  # another maker's
    write(sysfs, "class/infiniband/rdmap0s27/device/vendor", "0x1d0f\n")
    assert environment({}, Launched(), forks=True) == {"FI_EFA_USE_HUGE_PAGE": "0"}
    assert (
        environment({}, Launched())
        == environment({"FI_EFA_USE_HUGE_PAGE": "1"}, Launched(), forks=True)
        == {}
    )


def test_a_rank_may_open_as_many_files_as_the_hard_limit_allows():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        rank_setup.prepare(Launched(), forks=False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, rank_setup.OPEN_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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


def test_the_kernel_keeps_a_pinned_rank_and_its_threads_there(sysfs):
    all_cpus = os.sched_getaffinity(0)
    if len(all_cpus) < 2:
        pytest.skip("one processor")
    first = min(all_cpus)
    write(sysfs, "devices/system/cpu/online", ",".join(map(str, sorted(all_cpus))))
    write(sysfs, f"bus/pci/devices/{GPU}/local_cpulist", str(first))
    seen = []

    def rank(address):
        rank_setup.pin(address)
        worker = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        worker.start()
        worker.join()

    for address in (GPU, None, "0000:99:00.0"):
        thread = threading.Thread(target=rank, args=(address,))  # the affinity is that of a thread
        thread.start()
        thread.join()
    assert seen == [{first}, all_cpus, all_cpus]


def test_a_ranks_chip_is_that_of_its_core(tmp_path, monkeypatch, log):
    def prints(text, code=0):
        (tmp_path / "answer").write_text(text)
        (tmp_path / "neuron-ls").write_text(
            f"#!/bin/sh\n[ $1 = -j ] && /bin/cat {tmp_path}/answer; exit {code}\n"
        )
        (tmp_path / "neuron-ls").chmod(0o755)

    def address(core, **user):
        return rank_setup.neuron_address({**os.environ, "TORCHELASTIC_RUN_ID": "x", **user}, core)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    prints((ROOT / "tests/recorded/doctor/neuron_ls_trn1_32xlarge.json").read_text())
    assert [address(core) for core in (0, 1, 2, 32)] == [
        "0000:10:1c.0",
        "0000:10:1c.0",
        "0000:10:1d.0",
        None,
    ]
    assert address(31) is not None
    assert (
        address(0, NEURON_RT_VISIBLE_CORES="8") is None
        and address(0, NEURON_RT_NUM_CORES="2") is None
    )
    # a process by itself takes any core that is free
    assert rank_setup.neuron_address(os.environ, 0) is None
    assert address(0, PATH="/nowhere") is None and not log.messages
    for text, code in (("{", 0), ("", 1)):
        prints(text, code)
        assert address(0) is None
    assert len(log.messages) == 2 and all("neuron-ls -j" in text for text in log.messages)
