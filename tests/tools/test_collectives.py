"""`baretrain doctor --collectives`: the pairs that are measured, the verdict, and real runs of several ranks."""

from __future__ import annotations

import json
import os
import re
import socket
from collections import Counter
from itertools import combinations

import pytest
from forks import ROOT, free_port, launch, run_forked, start_forked
from running import run

from train.config import InstanceConfig
from train.run.rejection import INFORM_S
from train.tools.doctor import command
from train.tools.doctor.collectives import (
    MIB,
    AllReduce,
    Measured,
    bus_bandwidth,
    compare,
    links_finding,
    rounds,
)

P5 = InstanceConfig(name="p5", network_gbit_per_s=3200, device_link_gbyte_per_s=450)
HOST = socket.gethostname()


@pytest.mark.parametrize("members", [range(2), range(9), (0, 8, 16, 24)])
def test_every_pair_is_measured_once_and_no_rank_twice_at_the_same_time(members):
    schedule = rounds(members)
    assert Counter(pair for pairs in schedule for pair in pairs) == Counter(
        combinations(members, 2)
    )
    # one more, for an even number, than the fewest that there can be
    assert len(schedule) == len(members)
    for pairs in schedule:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_a_ring_on_links_of_a_speed_has_that_bus_bandwidth(num_ranks):
    link_bytes_per_s, num_bytes = 1e9, 10**8
    # of a reduce-scatter and an all-gather; each moves one part of the tensor a rank
    hops = 2 * (num_ranks - 1)
    took_s = hops * num_bytes / num_ranks / link_bytes_per_s
    assert bus_bandwidth(num_bytes, took_s, num_ranks=num_ranks) == pytest.approx(link_bytes_per_s)


@pytest.mark.parametrize(
    ("slowest", "should_be", "state"),
    [
        (0.5, None, "ok"),
        (0.49, None, "warn"),  # half of the median
        (0.24, None, "bad"),
        (0.9, 2.0, "warn"),  # the median is slow as well
        (0.9, 4.0, "bad"),
    ],
)
def test_the_slowest_link_is_named_and_judged_by_the_others_and_by_the_network(
    slowest, should_be, state
):
    links = {"a - b": 1e9, "a - c": 1.1e9, "b - c": slowest * 1e9, "c - d": 1e9}
    finding = links_finding(links, should_be and should_be * 1e9, "p5")
    assert (
        finding.state == state
        and f"slowest of 4: b - c, {slowest:g} GB/s; median 1 GB/s" in finding.text
    )


GIGABIT, LINKED = (
    InstanceConfig(name="slow", network_gbit_per_s=1),
    InstanceConfig(device_link_gbyte_per_s=300),
)


@pytest.mark.parametrize(
    ("instance", "machines", "is_cpu", "gbyte_per_s", "state", "should_be", "link_should_be"),
    [
        (P5, 1, False, 230, "ok", 450, None),
        (P5, 1, False, 110, "bad", 450, None),
        (P5, 1, True, 1, "ok", None, None),
        (
            P5,
            2,
            False,
            1,
            "warn",
            400,
            0.625,
        ),  # all network cards; one TCP connection. What is normal is not known
        (P5, 2, True, 1, "ok", 0.625, 0.625),
        (GIGABIT, 2, False, 0.1, "ok", 0.125, 0.125),
        (LINKED, 2, False, 1, "ok", None, None),  # the network is unknown
    ],
)
def test_devices_and_links_are_compared_with_the_instance(
    instance, machines, is_cpu, gbyte_per_s, state, should_be, link_should_be
):
    reduced = AllReduce(
        latency_s=1e-5, num_bytes=256 * MIB, bus_bytes_per_s=gbyte_per_s * 1e9, wrong_ranks=[]
    )
    hosts = AllReduce(latency_s=1e-3, num_bytes=64 * MIB, bus_bytes_per_s=1e6, wrong_ranks=[])
    names, links = ["a (rank 0)", "a (rank 1)"], {"a - a": 1e9}
    findings = compare(
        Measured("ddp on H100", names, machines, is_cpu, reduced, hosts, links), instance
    )

    def figure(value):
        return (
            f"not compared: no figure for {instance.name}"
            if value is None
            else f"should reach {value:g} GB/s"
        )

    assert findings["devices"].state == state
    assert figure(should_be) in findings["devices"].text
    assert figure(link_should_be) in findings["links"].text
    assert "figure" not in findings["hosts"].text
    assert findings["hosts"].state == findings["links"].state == "ok"


SIXTEEN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "16"}
SIXTEEN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (
            "--collectives",
            {},
            "there is only 1; start several: torchrun --standalone --nproc-per-node=2 -m",
        ),
        ("--collectives instance=p5.48xlarge", {}, "--nproc-per-node=8"),
        ("--collectives instance=p6", {}, "there is no such instance"),
        ("--collectives backend.timeout_s=0", {}, "backend.timeout_s"),
        ("--collectives --machines 1", {}, "instance=p5.48xlarge; leave out --instance"),
        ("--collectives instance=trn1.32xlarge", SIXTEEN, "16 ranks on one machine"),
        ("--mib 4", {}, "--mib needs --collectives"),
    ],
)
def test_what_is_rejected(arguments, environ, said, monkeypatch, capsys):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert command.main(arguments.split()) == 2
    assert said in capsys.readouterr().err


def on_machines(folder, *programs, **env):
    """Run each program as the rank of a machine of its own. Returns the exit codes and what was printed."""
    names = {
        "WORLD_SIZE": str(len(programs)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    names |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", **env}
    said = [folder / str(rank) for rank in range(len(programs))]
    ranks = [
        start_forked(words, os.environ | names | {"RANK": str(rank)}, said[rank], said[rank])
        for rank, words in enumerate(programs)
    ]
    for rank in ranks:
        rank.join(INFORM_S - 10)
    return [rank.exitcode for rank in ranks], [log.read_text() for log in said]


def test_a_machine_that_is_rejected_ends_the_other_one(tmp_path):
    words = ["train", "doctor", "--collectives", "backend.device=cpu"]
    codes, said = on_machines(tmp_path, words, [*words, "instance=p6"])
    assert codes == [2, 2], said  # once the other one knows, nobody waits for it
    assert "error: instance=p6: there is no such" in said[1]
    assert f"error: rank 1 on {HOST} was rejected: instance=p6: there is no such" in said[0]


def test_two_ranks_on_xla():
    arguments = ["--collectives", "backend=xla", "backend.device=cpu", "--mib", "1", "--json"]
    done = run(arguments, ranks=2, module="doctor")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"]
    assert said["measured"]["where"] == "xla on cpu through XLA"
    assert [finding["state"] for finding in said["findings"]] == ["ok"] * 3


DISTURBED = """
import os, sys, time
from train.parallel.ranks import World

all_reduce, sendrecv = World.all_reduce, World.sendrecv

def adds_wrongly(world, tensor):
    all_reduce(world, tensor)
    if world.rank == 1:
        tensor[-1] += 1

def exchanges_slowly(world, peer, *tensors):
    if (world.rank, peer) == (3, 2):
        time.sleep(0.5)
    sendrecv(world, peer, *tensors)

def hangs(world, peer, *tensors):
    if world.rank == 1:
        time.sleep(600)
    sendrecv(world, peer, *tensors)

if os.environ["DISTURBED"] == "hang":
    World.sendrecv = hangs
else:
    World.all_reduce, World.sendrecv = adds_wrongly, exchanges_slowly
from train.tools.doctor.command import main
sys.exit(main())
"""


def disturbed(tmp_path, how, *arguments, machines):
    settings = ["--collectives", "backend.device=cpu", "--mib", "1", *arguments]
    return on_machines(
        tmp_path, *[["-c", DISTURBED, *settings]] * machines, DISTURBED=how, COLUMNS="120"
    )


def test_a_wrong_sum_and_a_slow_link_are_named(tmp_path):
    codes, (said, *_) = disturbed(tmp_path, "wrong and slow", "--json", machines=4)
    assert codes == [1] * 4
    found = {
        finding["name"]: finding for finding in json.loads(said[said.index("{") :])["findings"]
    }
    states = {name: finding["state"] for name, finding in found.items()}
    assert states == {"ranks": "ok", "devices": "ok", "hosts": "bad", "links": "bad"}
    assert f"wrong sum on 1 rank: {HOST} (rank 1);" in found["hosts"]["text"]
    assert f"slowest of 6: {HOST} (rank 2) - {HOST} (rank 3)," in found["links"]["text"]


def test_an_exchange_that_hangs_is_named(tmp_path):
    codes, said = disturbed(tmp_path, "hang", "backend.timeout_s=3", machines=2)
    assert codes[0] == 1 and f"error: the exchange {HOST} (rank 0) - {HOST} (rank 1): " in said[0]


HANGS = """
import os, time
from train.tools.doctor import collectives

collectives.GRACE_S = 3
with collectives.deadline(f"an exchange of rank {os.environ['RANK']}", 0.1):
    time.sleep(600)
"""


def test_of_ranks_that_hang_without_an_error_one_names_it(tmp_path):
    (tmp_path / "script.py").write_text(HANGS)
    done = run_forked(
        launch(str(tmp_path / "script.py"), [], ranks=2), os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    named = re.findall(
        r"error: an exchange of rank . took more than 0.1 s \(backend.timeout_s\)\n", done.stderr
    )
    assert len(named) == 1
