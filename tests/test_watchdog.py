"""The watchdog against real processes that play the ranks: stuck, stopped, killed and well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from train import watchdog, watchdog_process
from train.config import InputError, WatchdogConfig
from train.lease import Lease
from train.outcome import Outcome
from train.run_folder import RunFolder
from train.storage import LocalFolder
from train.watchdog import LEFT, Orders, Watchdog, open_slots, private_folder, read_process
from train.watchdog_process import WatchdogProcess, count_oom_kills, find_oom_counter

ROOT = Path(__file__).parent.parent
LIVES = 60.0  # seconds, more than any test needs: a test that fails leaves nothing behind
RANK = """
import ctypes, os, sys, time
from pathlib import Path
from train.config import WatchdogConfig
from train.watchdog import Watchdog
assert "torch" not in sys.modules

def hang_in_data():
    time.sleep({lives})

def hold_the_gil():
    while True:  # a signal ends C's sleep
        ctypes.PyDLL(None).sleep({lives:.0f})

local_rank = {local_rank}
cfg = WatchdogConfig(step_s={step_s}, start_s={start_s})
with Watchdog(cfg, Path({log!r}), rank={rank}, local_rank=local_rank, local_world_size={num_ranks}) as dog:
    print(dog.process and dog.process.pid, flush=True)
{act}
print("left", flush=True)
"""

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    return tmp_path / "log"


@pytest.fixture
def start(log: Path) -> Iterator[Start]:
    """Starts a rank; all of a test belong to one run. What a test leaves is killed."""
    ranks: list[subprocess.Popen] = []

    def start(act: str, *, local_rank: int = 0, num_ranks: int = 1, first: int = 0, step_s=0.5, start_s=LIVES):
        lines = "\n".join(f"    {line}" for line in act.strip().splitlines())
        numbers = {"local_rank": local_rank, "rank": first + local_rank, "num_ranks": num_ranks}
        code = RANK.format(lives=LIVES, step_s=step_s, start_s=start_s, log=str(log), act=lines, **numbers)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": str(log)}
        rank = subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **PIPES)
        ranks.append(rank)
        return rank

    yield start
    for rank in ranks:
        rank.kill()
        rank.wait()
        for pipe in (rank.stdin, rank.stdout, rank.stderr):
            with suppress(BrokenPipeError):  # a line that it did not read
                pipe.close()


@pytest.fixture
def torchrun(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process work out the same folder as the ranks."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(log))


def word(log: Path, rank: int) -> dict:
    return json.loads((log / f"exit_rank_{rank:04d}.json").read_text())


def wait_until(ready: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIVES
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def ended(pid: int) -> bool:
    process = read_process(pid)
    return process is None or process.state == "Z"


def watching(rank: subprocess.Popen) -> int:
    """The process that the rank has started; also says that the rank has entered."""
    return int(rank.stdout.readline())


def go_on(rank: subprocess.Popen) -> None:
    rank.stdin.write("go on\n")
    rank.stdin.flush()


def ignores(pid: int, number: int) -> bool:
    mask = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("where", ["hang_in_data", "hold_the_gil"])
def test_a_stuck_rank_is_killed_and_says_where_it_hung(start: Start, log: Path, where: str):
    rank = start(f"dog.phase('data', step=7)\n{where}()", first=3)
    watcher = watching(rank)
    _, errors = rank.communicate(timeout=LIVES)
    assert rank.returncode == -signal.SIGKILL
    reason = word(log, 3)["reason"]
    assert reason.startswith("stuck: rank 3 has been in 'data' of step 7 for ")
    assert reason.endswith("s (watchdog.step_s=0.5); stacks in log/stacks_rank_*.txt")
    stacks = (log / "stacks_rank_0003.txt").read_text()
    assert f"in {where}" in stacks and stacks.splitlines()[0].endswith(reason)
    assert f"watchdog: {reason}" in errors
    wait_until(lambda: ended(watcher))


def test_an_exit_file_is_like_that_of_a_run_folder(start: Start, log: Path, monkeypatch: pytest.MonkeyPatch):
    start("dog.phase('data', step=7)\nhang_in_data()").communicate(timeout=LIVES)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    RunFolder(str(log.parent)).exit_file("done", 7)
    ours, own = word(log, 0), word(log, 1)
    assert ours.keys() == own.keys() and ours["step"] == own["step"]


def test_a_stopped_rank_is_killed_although_it_has_no_stacks_to_give(start: Start, log: Path):
    rank = start("dog.phase('step', step=2)\nos.kill(os.getpid(), 19)")
    rank.communicate(timeout=LIVES)
    assert rank.returncode == -signal.SIGKILL
    assert word(log, 0)["reason"].startswith("stuck: rank 0 has been in 'step' of step 2")
    assert "no stacks: the process did not answer (state T)" in (log / "stacks_rank_0000.txt").read_text()


@pytest.mark.parametrize("behind", ["dog.phase('data', step=7)", "dog.phase('step', step=6)", "dog.phase('load')"])
def test_of_several_ranks_the_one_that_came_least_far_is_named(start: Start, log: Path, behind: str):
    """It is not the one with the oldest heartbeat: the other one has waited for longer."""
    ahead = "input()\ndog.phase('data', step=7)\ndog.phase('step', step=7)\nprint()\nhang_in_data()"
    first = start(ahead, num_ranks=2)
    watching(first)
    second = start(f"input()\n{behind}\nhang_in_data()", local_rank=1, num_ranks=2, start_s=0.5)
    second.stdout.readline()
    go_on(first)  # it gives no watchdog a reason before the second is there: so far it may take long
    first.stdout.readline()
    go_on(second)
    for rank in (first, second):
        rank.communicate(timeout=LIVES)
        assert rank.returncode == -signal.SIGKILL
    assert word(log, 0)["reason"] == word(log, 1)["reason"]
    assert word(log, 0)["reason"].startswith("stuck: rank 1 has been in '" + behind.split("'")[1])
    text = (log / "stacks_rank_0000.txt").read_text()
    assert "rank 0 (pid" in text and "rank 1 (pid" in text


# ---- how it ends -----------------------------------------------------------------------------------------------------


def test_ranks_that_leave_in_order_leave_nothing_behind(start: Start, log: Path, torchrun: None):
    ranks = [start("input()", num_ranks=2)]
    watcher = watching(ranks[0])
    ranks += [start("input()", local_rank=1, num_ranks=2)]
    ranks[1].stdout.readline()
    folder = private_folder(log, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["heartbeats", "stacks_0", "stacks_1"]
    go_on(ranks[0])
    assert ranks[0].wait(LIVES) == 0
    assert not ended(watcher)  # it watches the other one
    go_on(ranks[1])
    assert ranks[1].wait(LIVES) == 0
    wait_until(lambda: ended(watcher))
    assert not folder.exists() and not list(log.iterdir())


def test_a_rank_alone_ends_after_its_watchdog(start: Start):
    rank = start("print('in', flush=True)\ninput()\ndog.__exit__()\nprint('out', flush=True)\ninput()")
    watcher = watching(rank)
    go_on(rank)
    assert [rank.stdout.readline(), rank.stdout.readline()] == ["in\n", "out\n"]
    wait_until(lambda: read_process(watcher) is None)  # waited for by the rank, which is alive: not even a zombie
    assert rank.poll() is None


def test_no_watchdog_outlives_killed_ranks(start: Start, log: Path, torchrun: None):
    rank = start("dog.phase('step', step=4)\nprint(flush=True)\nhang_in_data()", step_s=LIVES)
    watcher = watching(rank)
    rank.stdout.readline()
    folder = private_folder(log, 1)
    rank.kill()
    wait_until(lambda: ended(watcher))
    assert not folder.exists()
    assert word(log, 0)["reason"].startswith("killed: rank 0 is gone without a word in 'step' of step 4; peak")


def test_signals_to_all_processes_of_a_job_do_not_end_the_watchdog(start: Start, log: Path):
    rank = start("input()\ndog.phase('data', step=1)\nhang_in_data()")
    watcher = watching(rank)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        wait_until(lambda number=number: ignores(watcher, number))
        os.kill(watcher, number)
    rank.communicate("go on\n", timeout=LIVES)
    assert word(log, 0)["reason"].startswith("stuck: rank 0 has been in 'data'")


def test_switched_off_it_starts_nothing(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "MEMORY", tmp_path)
    before = sorted(tmp_path.iterdir())
    with Watchdog(WatchdogConfig(enabled=False), log, rank=0, local_rank=0, local_world_size=1) as dog:
        dog.phase("data", step=1)
        dog.beat()
        assert dog.process is None and sorted(tmp_path.iterdir()) == before


def test_every_life_of_every_run_has_a_folder_of_its_own(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "MEMORY", tmp_path)
    alone = private_folder(log, 2)
    assert alone == private_folder(log, 2)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # without a launcher every rank is a run
    found = {alone, private_folder(log, 2)}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in (("TORCHELASTIC_RESTART_COUNT", "0"), ("TORCHELASTIC_RESTART_COUNT", "1"), ("MASTER_PORT", "2")):
        monkeypatch.setenv(name, value)
        found.add(private_folder(log, 2))
    found.add(private_folder(log.parent, 2))
    assert len(found) == 6
    monkeypatch.setattr(os, "getpid", lambda: 2)
    assert private_folder(log.parent, 2) in found  # all ranks of a launcher find each other


def test_a_folder_that_others_may_use_is_refused(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "MEMORY", tmp_path)
    private_folder(log, 1).chmod(0o755)
    with pytest.raises(InputError, match="only this user"):
        private_folder(log, 1)


def test_folders_that_nobody_removed_are_swept_unless_somebody_may_use_them(tmp_path: Path):
    names = ("dead", "alive", "young", "nobody", "open", "empty")
    folders = {name: tmp_path / f"baretrain-{os.geteuid()}-{name}" for name in names}
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name, folder in folders.items():
        folder.mkdir(0o755 if name == "open" else 0o700)
        open_slots(folder, 2)[1].pid = {"alive": os.getpid(), "nobody": 0}.get(name, ended.pid)
        if name == "empty":
            os.truncate(folder / "heartbeats", 0)
        os.utime(folder, (0, 0) if name != "young" else None)
    watchdog.remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {folders[name] for name in ("alive", "young", "open")}


# ---- look by look: the watchdog is in the test, and so is its clock --------------------------------------------------


@pytest.fixture
def watch(log: Path, torchrun: None) -> Iterator[Callable[..., WatchdogProcess]]:
    """A watchdog of three ranks with limits of 100 s and 1000 s. There is no local rank 0: it would start another."""
    counter = log.parent / "memory.events"
    counter.write_text("oom 0\noom_kill 3\n")

    lease = Lease(LocalFolder(log.parent), LIVES)
    lease.take()

    def watch(
        *, has_other_machines: bool = False, previous: str = "", owner: str = lease.claim["owner"]
    ) -> WatchdogProcess:
        started = read_process(os.getpid()).started
        places = str(private_folder(log, 3)), str(log)
        orders = Orders(
            *places, 3, started, has_other_machines, True, str(log.parent), {}, previous, step_s=100, start_s=1000
        )
        watcher = WatchdogProcess(orders, oom_counter=counter)
        watcher.slots[0].owner = owner.encode()
        return watcher

    yield watch
    lease.release()
    for path in private_folder(log, 3).iterdir():
        path.unlink()
    private_folder(log, 3).rmdir()


def pair(start: Start, first: str, second: str) -> list[subprocess.Popen]:
    """Local ranks 1 and 2 of a run; both have done this and now wait for a line."""
    acts = [f"{act}\nprint(flush=True)\ninput()\ndog.beat()\nprint(flush=True)\ninput()" for act in (first, second)]
    ranks = [start(act, local_rank=number, num_ranks=3) for number, act in enumerate(acts, start=1)]
    for rank in ranks:
        rank.stdout.readline(), rank.stdout.readline()
    return ranks


def look_later(watcher: WatchdogProcess, later_s: float) -> bool:
    """Whether there is still somebody to watch; it takes two looks to be sure."""
    watcher.now_s += later_s
    return watcher.look() and watcher.look()


def test_while_one_rank_compiles_the_others_may_wait(start: Start, log: Path, watch):
    ranks = pair(start, "dog.phase('step', step=7)", "dog.phase('compile', step=7, is_start=True)")
    watcher = watch()
    assert watcher.look()
    assert look_later(watcher, 990)
    watcher.now_s += 20
    assert watcher.look() and not watcher.look()  # a first look may come while a rank writes
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    assert (log / "exit_rank_0002.json").is_file() and "local rank 0 has not come so far" in word(log, 1)["reason"]


def test_who_beats_is_not_stuck_and_who_is_ahead_of_it_waits(start: Start, watch):
    ranks = pair(start, "dog.phase('data', step=7)", "dog.phase('data', step=8)")
    watcher = watch()
    assert watcher.look() and look_later(watcher, 90)
    go_on(ranks[0])
    ranks[0].stdout.readline()
    assert look_later(watcher, 20)
    assert not look_later(watcher, 110)


def test_ranks_whose_torchrun_is_gone_have_little_time(start: Start, log: Path, watch):
    """Its SIGTERM does not get through to a rank that joins, or waits in a collective for another that is gone."""
    pair(start, "dog.phase('join', is_start=True)", "dog.phase('join', is_start=True)")
    watcher = watch()
    assert watcher.look() and look_later(watcher, 200)
    for rank in watcher.alive.values():
        rank.launcher += 1
    assert not look_later(watcher, 1)
    assert "(torchrun is gone)" in word(log, 1)["reason"]
    outcome = json.loads((log.parent / "outcome.json").read_text())
    assert (outcome["outcome"], outcome["kind"], outcome["goes_on"]) == ("failed", "stuck", True)


def test_a_lost_peer_is_explained_by_what_became_of_it(start: Start, log: Path, watch):
    """The words of the rank that only saw its connection break come first."""
    path = log.parent / "outcome.json"
    for kind, stays in (("RuntimeError", False), ("not_finite", True)):
        first = Outcome("failed", kind, "the first", 7, 5, goes_on=True, launch=[])
        path.write_text(json.dumps(vars(first)))
        watch().write_outcome("killed", "killed: rank 1", SimpleNamespace(step=7))
        assert json.loads(path.read_text())["reason"] == ("the first" if stays else "killed: rank 1")
        assert json.loads(path.read_text())["checkpoint"] == 5


@pytest.mark.parametrize("owner", ["that of another job", ""], ids=["lost", "never had"])
def test_a_watchdog_writes_nothing_of_the_end_to_a_run_folder_of_another_job(start: Start, log: Path, watch, owner):
    """Of a job that has yet to join nobody knows: it may write beside what others write, and nothing in their place."""
    pair(start, "dog.phase('data', step=7)", "dog.phase('data', step=7)")
    watcher = watch(owner=owner)
    before = {path for path in log.parent.rglob("*") if path.parent.name != "lease"}
    assert watcher.look() and not look_later(watcher, 200)
    written = {path.name for path in log.parent.rglob("*") if path.parent.name != "lease"} - {
        each.name for each in before
    }
    assert "outcome.json" not in written and bool(written) == (owner == "")


@pytest.mark.parametrize(("previous", "goes_on"), [("", True), ("killed", True), ("out_of_host_memory", False)])
def test_what_ran_out_of_memory_twice_is_not_started_again(start: Start, log: Path, watch, previous, goes_on):
    watch(previous=previous).write_outcome("out_of_host_memory", "the kernel", SimpleNamespace(step=7))
    assert json.loads((log.parent / "outcome.json").read_text())["goes_on"] is goes_on


def test_time_in_which_the_watchdog_did_not_run_does_not_count(start: Start, watch):
    """Whoever suspended it, Slurm or a hypervisor, suspended the ranks as well."""
    pair(start, "dog.phase('data', step=7)", "dog.phase('data', step=7)")
    watcher = watch()
    assert watcher.look()
    watcher.looked_s -= 1000
    assert look_later(watcher, 0)


def test_ranks_that_all_wait_alike_may_wait_for_another_machine(start: Start, log: Path, watch):
    zero = open_slots(private_folder(log, 3), 3)[0]
    zero.state = LEFT
    pair(start, "dog.phase('step', step=7)", "dog.phase('step', step=7)")
    watcher = watch(has_other_machines=True)
    assert watcher.look() and not look_later(watcher, 110)
    assert "all ranks of this machine wait alike, perhaps for a rank of another machine" in word(log, 1)["reason"]


def test_a_rank_that_vanishes_gets_an_exit_file_with_its_peak_memory(start: Start, log: Path, watch):
    first, _ = pair(
        start, "dog.phase('step', step=7)\nheld = b'x' * 400_000_000\ndel held", "dog.phase('step', step=7)"
    )
    watcher = watch()
    assert watcher.look()
    first.kill()
    first.wait()
    assert watcher.look()  # the other one
    assert (
        word(log, 1)["reason"] == "killed: rank 1 is gone without a word in 'step' of step 7; peak host memory 0.4 GB"
    )
    assert word(log, 1)["step"] == 7 and not (log / "exit_rank_0002.json").exists()


def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_others(start: Start, log: Path, watch):
    first, _ = pair(start, "dog.phase('step', step=7)", "dog.phase('step', step=7)")
    watcher = watch()
    assert watcher.look()
    watcher.oom_counter.write_text("oom 1\noom_kill 4\n")
    first.kill()
    first.wait()
    assert watcher.look()
    reason = word(log, 1)["reason"]
    assert reason.startswith(
        "out of host memory: the kernel killed rank 1 in 'step' of step 7; peak host memory 0.0 GB;"
    )
    assert reason.endswith("lower data.num_workers, data.prefetch or micro_batch_size")


def test_the_word_of_a_rank_itself_stays(start: Start, log: Path, watch):
    first, _ = pair(start, "dog.phase('step', step=7)", "dog.phase('step', step=7)")
    watcher = watch()
    (log / "exit_rank_0001.json").write_text('{"reason": "failed: of its own"}')
    first.kill()
    first.wait()
    assert watcher.look()
    assert word(log, 1)["reason"] == "failed: of its own"


def test_a_process_that_got_the_number_of_a_rank_is_left_alone(start: Start, log: Path, watch):
    ranks = pair(start, "dog.phase('step', step=7)", "dog.phase('step', step=7)")
    watcher = watch()
    assert watcher.look()
    watcher.slots[1].started -= 1
    assert not look_later(watcher, 110)
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].poll() is None


def test_what_an_earlier_life_left_is_not_taken_for_a_rank(start: Start, log: Path, watch):
    ranks = pair(start, "dog.phase('step', step=7)", "dog.phase('step', step=7)")
    ranks[0].kill()
    ranks[0].wait()
    watcher = watch()
    watcher.slots[1].started = watcher.orders.first_started - 1
    assert watcher.look()
    assert not list(log.iterdir())


def test_a_log_that_hangs_does_not_save_a_stuck_rank(start: Start, watch, monkeypatch: pytest.MonkeyPatch):
    ranks = pair(start, "dog.phase('step', step=7)", "dog.phase('step', step=7)")
    watcher, hangs = watch(), threading.Event()
    monkeypatch.setattr(watchdog_process, "WORD_S", 0.1)
    monkeypatch.setattr(watcher, "save_stacks", lambda _: hangs.wait(LIVES))
    assert watcher.look() and not look_later(watcher, 110)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    hangs.set()


@pytest.mark.parametrize(
    ("cgroup", "place"),
    [
        ("0::/job/step", "cgroup/job/step/memory.events"),
        ("0::/of_the_host", "cgroup/memory.events"),
        ("5:cpu,memory:/job\n0::/", "cgroup/memory/job/memory.oom_control"),
        ("5:cpu:/job", "proc/vmstat"),
    ],
)
def test_the_kernels_count_of_kills_is_that_of_the_cgroup_if_there_is_one(tmp_path: Path, cgroup: str, place: str):
    for name in {place, "proc/vmstat"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("oom_kill_disable 0\noom_kill 7\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
    found = find_oom_counter(cgroups=tmp_path / "cgroup", proc=tmp_path / "proc")
    assert found == tmp_path / place and count_oom_kills(found) == 7
