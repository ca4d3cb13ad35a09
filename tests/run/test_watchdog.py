"""The watchdog, in real processes that play the ranks of a machine: stuck, stopped, killed and well."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import ROOT, outcome

from train.config import WatchdogConfig
from train.machine import memory
from train.run.watchdog import Watchdog
from train.run_folder.outcome import Outcome
from train.run_folder.run_folder import RunFolder

PATIENCE_S = 90.0  # more than any test needs: a test that fails leaves nothing behind
RANK = f"""
import ctypes, json, os, sys, time
from pathlib import Path
from train.config import WatchdogConfig
from train.run.watchdog import Watchdog
from train.machine.processes import read_process
from train.run_folder.run_folder import RunFolder
from train.run_folder.ownership import LeaseLost
assert "torch" not in sys.modules

def hang():
    time.sleep({PATIENCE_S})

def hold_the_gil():
    ctypes.PyDLL(None).sleep({PATIENCE_S:.0f})

def lose_the_folder():
    raise LeaseLost("another job has it")

def join():
    folder.ownership.follow("")
    dog.joined({{int(rank): process for rank, process in others.items()}})

folder = RunFolder(sys.argv[1])
if os.environ["RANK"] == "0":
    folder.ownership.follow("")  # the other ranks once all have joined
WatchdogConfig.start_s = float(sys.argv[3])
cfg = WatchdogConfig(step_s=float(sys.argv[2]))
with Watchdog(cfg, folder, oom_counter=folder.path / "memory.events") as dog:
    print(read_process(os.getpid()).started, dog.handle, flush=True)
    others = json.loads(input())
"""
PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 3\n")
    return tmp_path


def environment(
    run_dir: Path, rank: int = 0, local: int = 1, world: int | None = None
) -> dict[str, str]:
    """As torchrun hands it to a rank of its first machine."""
    return {
        "TORCHELASTIC_RUN_ID": str(run_dir),
        "RANK": str(rank),
        "WORLD_SIZE": str(world or local),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }


@pytest.fixture
def start(run_dir: Path) -> Iterator[Start]:
    """Starts the ranks of a machine, which act once all have come. What a test leaves is killed."""
    started: list[subprocess.Popen] = []

    def start(
        *acts: str,
        local: int | None = None,
        world: int | None = None,
        step_s=0.5,
        start_s=PATIENCE_S,
    ):
        ranks = []
        for rank, act in enumerate(acts):
            code = RANK + "\n".join(f"    {line}" for line in act.splitlines())
            words = [sys.executable, "-c", code, str(run_dir), str(step_s), str(start_s)]
            env = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                **environment(run_dir, rank, local or len(acts), world),
            }
            ranks.append(subprocess.Popen(words, env=env, text=True, **PIPES))
        started.extend(ranks)
        known = {
            number: (rank.pid, *map(int, rank.stdout.readline().split()))
            for number, rank in enumerate(ranks)
        }
        for number, rank in enumerate(ranks):
            others = {other: process for other, process in known.items() if other != number}
            rank.stdin.write(f"{json.dumps(others)}\n")
            rank.stdin.flush()
        return ranks

    yield start
    for rank in started:
        rank.kill()
        rank.communicate()


def codes(ranks: list[subprocess.Popen]) -> list[int]:
    return [rank.wait(PATIENCE_S) for rank in ranks]


def test_a_hang_leaves_stacks_and_an_outcome(start: Start, run_dir: Path):
    (rank,) = start("dog.phase('data', step=7)\nhang()")
    _, errors = rank.communicate(timeout=PATIENCE_S)
    assert rank.returncode == 1
    reason = outcome(run_dir)["reason"]
    assert reason.startswith("stuck: rank 0 has been in 'data' of step 7 for ")
    assert reason.endswith("s (watchdog.step_s=0.5); stacks in log/stacks_rank_*.txt")
    assert f"watchdog: {reason}" in errors
    stacks = (run_dir / "log/stacks_rank_0000.txt").read_text()
    assert "in hang" in stacks and stacks.splitlines()[0].endswith(reason)
    ended = outcome(run_dir)
    assert (ended["outcome"], ended["kind"], ended["step"], ended["goes_on"]) == (
        "failed",
        "stuck",
        7,
        True,
    )


def test_a_hang_that_holds_the_gil_dumps_its_stacks_to_standard_error(start: Start):
    (rank,) = start("dog.phase('data', step=7)\nhold_the_gil()")
    assert "in hold_the_gil" in rank.communicate(timeout=PATIENCE_S)[1] and rank.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behind", "how"),
    [
        ("dog.phase('data', step=7)", "hang()"),
        ("dog.phase('step', step=6)", "hold_the_gil()"),
    ],
    ids=["in its data", "with the GIL held"],
)
def test_the_rank_that_is_least_advanced_is_named(
    start: Start, run_dir: Path, behind: str, how: str
):
    """It has not the oldest heartbeat: the other one has waited for it for longer."""
    waits = "join()\ndog.phase('data', step=7)\ndog.phase('step', step=7)\nhang()"
    ranks = start(waits, f"join()\ntime.sleep(0.2)\n{behind}\n{how}", step_s=2.0)
    assert codes(ranks) == [1, 1]
    reason = outcome(run_dir)["reason"]
    assert reason.startswith("stuck: rank 1 has been in '" + behind.split("'")[1])
    assert "in hang" in (run_dir / "log/stacks_rank_0000.txt").read_text()


def test_of_two_ranks_in_the_same_step_the_one_outside_a_collective_is_named(
    start: Start, run_dir: Path
):
    """It began the step later, as both wait for the same heartbeats."""
    waits = "join()\nhang = eval('lambda: time.sleep(99)', {'__name__': 'torch.autograd.graph', 'time': time})\n"
    ranks = start(
        f"{waits}dog.phase('step', step=7)\nhang()",
        "join()\ntime.sleep(0.2)\ndog.phase('step', step=7)\nhang()",
        step_s=2.0,
    )
    assert codes(ranks) == [1, 1]
    assert outcome(run_dir)["reason"].startswith("stuck: rank 1 has been in 'step' of step 7")


@pytest.mark.parametrize(
    "slow",
    [
        "dog.phase('compile', step=7, is_start=True)\ntime.sleep(2)",
        "dog.phase('step', step=7)\nfor _ in range(20): time.sleep(0.1), dog.heartbeat()",
    ],
    ids=["compiles", "makes progress"],
)
def test_a_rank_may_wait_for_one_that_has_time_left(start: Start, run_dir: Path, slow: str):
    waits = f"join()\ndog.phase('step', step=7)\nwhile not Path({str(run_dir)!r}, 'done').exists(): time.sleep(0.01)"
    slow = f"{slow}\nPath({str(run_dir)!r}, 'done').touch()\ntime.sleep(0.5)"  # until the other one has left
    assert codes(start(waits, slow, step_s=1)) == [0, 0]
    assert not any((run_dir / "log").iterdir())


def test_a_graph_that_appears_late_is_compiled_to_its_end(start: Start, run_dir: Path):
    """Whatever the phase: it was killed, and after the restart again. After it the limit is that of a step."""
    late = "dog.phase('step', step=7)\ncompiled = []\ndog.compiles = lambda: not compiled\ntime.sleep(1.5)"
    (rank,) = start(f"{late}\nprint('compiled', file=sys.stderr)\ncompiled.append(1)\nhang()")
    assert (
        rank.communicate(timeout=PATIENCE_S)[1].startswith("compiled\n") and rank.returncode == 1
    )
    assert outcome(run_dir)["reason"].endswith(
        "s (watchdog.step_s=0.5); stacks in log/stacks_rank_*.txt"
    )


def test_a_step_has_its_whole_time_after_a_compilation(run_dir: Path):
    dog = Watchdog(WatchdogConfig(step_s=60.0), RunFolder(str(run_dir)))
    dog.phase("step", step=7)
    dog.compiles = lambda: True
    dog.own.at_s -= 50.0
    dog.allow_compiling()
    assert dog.own.limit_s == dog.cfg.start_s
    dog.compiles = lambda: False
    dog.own.at_s -= 50.0
    dog.allow_compiling()
    assert dog.own.limit_s == 60.0 and not dog.own.is_late


# ---- a rank that is gone ---------------------------------------------------------------------------------------------

DIES = "os.kill(os.getpid(), 9)"
WAITS = """join()
dog.phase('step', step=7)
while not Path(sys.argv[1], 'outcome.json').exists(): dog.heartbeat()"""
OOM = (
    "(folder.path / 'memory.events').write_text('oom 1\\noom_kill 4\\n')\nos.kill(os.getpid(), 9)"
)


def test_a_rank_that_vanishes_is_reported(start: Start, run_dir: Path):
    assert codes(start(WAITS, DIES, step_s=5)) == [0, -signal.SIGKILL]
    ended = outcome(run_dir)
    assert ended["reason"] == "killed: rank 1 ended without an outcome around 'step' of step 7"
    assert (ended["kind"], ended["step"]) == ("killed", 7)


@pytest.mark.parametrize(
    ("previous", "goes_on"), [("killed", True), ("out_of_host_memory", False)]
)
def test_a_rank_that_the_kernel_killed_for_memory_twice_is_not_started_again(
    start: Start, run_dir, previous, goes_on
):
    assert codes(start(f"folder.previous['kind'] = {previous!r}\n{WAITS}", OOM)) == [
        0,
        -signal.SIGKILL,
    ]
    ended = outcome(run_dir)
    assert (ended["kind"], ended["goes_on"]) == ("out_of_host_memory", goes_on)
    assert ended["reason"].startswith(
        "out of host memory: the kernel killed rank 1 around 'step' of step 7"
    )
    assert ended["reason"].endswith("lower data.num_workers or micro_batch_size")


@pytest.mark.parametrize(("kind", "stays"), [("RuntimeError", False), ("not_finite", True)])
def test_a_lost_peer_is_explained_by_what_became_of_it(
    start: Start, run_dir: Path, kind: str, stays: bool
):
    """The other rank sees its connection break, and leaves before its thread has looked."""
    first = Outcome("failed", kind, "the first", 7, 5, goes_on=True, launch=[])
    (run_dir / "outcome.json").write_text(json.dumps(vars(first)))
    # which waits for two seconds
    ranks = start("join()\nraise RuntimeError('connection closed')", DIES, step_s=5)
    assert codes(ranks) == [1, -signal.SIGKILL]
    assert outcome(run_dir)["kind"] == (kind if stays else "killed")
    assert outcome(run_dir)["checkpoint"] == 5


def test_a_rank_that_closed_its_watchdog_was_not_killed(start: Start, run_dir: Path):
    codes_of = codes(
        start(
            "join()\nraise RuntimeError('connection closed')", "join()\ntime.sleep(0.5)", step_s=5
        )
    )
    assert codes_of == [1, 0]
    assert not (run_dir / "outcome.json").exists()


# ---- what is left ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act", ["check = lose_the_folder", "owner = None"], ids=["lost", "never had"]
)
def test_nothing_of_the_end_goes_into_a_run_folder_of_another_job(
    start: Start, run_dir: Path, act: str
):
    """A rank that has yet to join does not know: it may write beside what others write, and nothing in their place."""
    (rank,) = start(f"folder.ownership.{act}\ndog.phase('data', step=7)\nhang()")
    assert "watchdog: stuck: rank 0" in rank.communicate(timeout=PATIENCE_S)[1]
    assert not (run_dir / "outcome.json").exists()
    assert any((run_dir / "log").iterdir()) == ("lost" not in act and "lose" not in act)


def test_switched_off_it_watches_nothing(run_dir: Path):
    with Watchdog(WatchdogConfig(step_s=0), RunFolder(str(run_dir))) as dog:
        dog.phase("data", step=1)
        dog.heartbeat()
        assert not dog.is_open


@pytest.fixture
def container(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    (tmp_path / "proc/self").mkdir(parents=True)


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/job/step", "cgroup/job/step/memory.events"),
        ("0::/of_the_host", "cgroup/memory.events"),
        ("0::/\udca0\u2028", "cgroup/memory.events"),
        ("5:cpu:/job", "proc/vmstat"),
    ],
)
def test_the_kernels_count_of_kills_is_that_of_the_cgroup_if_there_is_one(
    container, tmp_path, cgroup, counter
):
    for name in {counter, "proc/vmstat"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("oom_kill_disable 0\noom_kill 7\n")
    (tmp_path / "proc/self/cgroup").write_bytes(os.fsencode(cgroup + "\n"))
    path = memory.find_oom_counter()
    assert path == tmp_path / counter and memory.count_oom_kills(path) == 7


@pytest.mark.parametrize(
    ("cgroup", "files", "cpus", "limit"),
    [
        (
            "0::/",
            {"cpu.max": "150000 100000", "memory.max": "3000000"},
            1,
            3_000_000,
        ),  # a container's own root
        (
            "0::/pod/a",
            {
                "pod/cpu.max": "100000 100000",
                "pod/a/cpu.max": "max 100000",
                "pod/memory.max": "5000",
            },
            1,
            5000,
        ),
        ("0::/../../elsewhere", {"cpu.max": "100000 100000", "memory.max": "7000"}, 1, 7000),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, None, None),
    ],
)
def test_memory_and_processors_are_those_of_the_container(
    container, tmp_path, monkeypatch, cgroup, files, cpus, limit
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    assert memory.usable_cpus() == (cpus or 64)
    assert memory.total_memory_bytes() == (
        limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    assert memory.available_bytes() == (limit or 2**40)
    if "memory.max" in files and limit:
        (tmp_path / "cgroup/memory.current").write_text("2500\n")
        (tmp_path / "cgroup/memory.stat").write_text("anon 1000\ninactive_file 1500\n")
        assert memory.available_bytes() == limit - 1000
