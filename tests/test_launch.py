"""A run and what started it: the launcher's variables, ranks that never come, torchrun's end, a console that fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from forks import TORCHRUN, free_port, launch, run_forked, start_forked
from running import ROOT, command, eventually, lines, run, train_overrides

import train
from train import entry, loop
from train.attempt.preempt import StoppedEarly, StopRequest
from train.backend import rendezvous
from train.backend.rendezvous import join
from train.cli import compose as cli
from train.cli.command import guarded
from train.config import Failure, InputError, XLAConfig
from train.host import torchrun
from train.host.launched import Launched, launched
from train.host.torchrun import die_with_torchrun, is_reported
from train.ranks import World

HANG_S = 90.0  # never waited for unless a test fails
TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TWO |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}


# ---- the launcher's variables ----------------------------------------------------------------------------------------


ALONE = (0, 1, False, False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        ({"RANK": "", "WORLD_SIZE": ""}, ALONE),
        ({"MASTER_ADDR": "head", "MASTER_PORT": "29500"}, ALONE),  # a cluster's, for whoever needs it
        ({"WORLD_SIZE": "1"}, ALONE),
        ({**TWO, "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, (1, 2, True, False)),  # a process per machine
        ({**TWO, "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, (2, 3, True, False)),  # machines unlike each other
    ],
)
def test_variables_of_a_launcher(environ: dict[str, str], expected: tuple[int, int, bool, bool]):
    result = launched(environ)
    assert (result.rank, result.world_size, result.is_distributed, result.is_under_torchrun) == expected


def test_what_torchrun_says_is_read_in_one_go():
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    result = launched({**TWO, **torchrun})
    assert (result.rank, result.world_size, result.local_rank, result.local_world_size) == (1, 2, 1, 2)
    assert (result.torchrun, result.restart_count, result.uses_agent_store) == (["x", "head", "29500"], 3, True)
    assert result.is_distributed and result.is_under_torchrun and result.is_one_machine


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": None}, "WORLD_SIZE=2 without RANK"),
        ({"RANK": "-1"}, "RANK=-1 must be a whole number from 0 to"),
        ({"RANK": "abc"}, "RANK=abc must be a whole number"),
        ({"RANK": "²"}, "RANK=² must be a whole number"),
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be a whole number from 1 to"),
        ({"WORLD_SIZE": None}, "RANK=1 without WORLD_SIZE"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 must be a whole number from 1 to"),
        ({"MASTER_ADDR": None}, "RANK=1 without MASTER_ADDR"),
        ({"MASTER_PORT": None}, "RANK=1 without MASTER_PORT"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT=x"),
    ],
)
def test_variables_that_contradict_each_other_are_one_line(change: dict[str, str | None], named: str):
    environ = {name: value for name, value in {**TWO, **change}.items() if value is not None}
    with pytest.raises(InputError, match=f"^.*{named}") as rejected:
        launched(environ)
    assert "\n" not in str(rejected.value) and "start one torchrun a machine" in str(rejected.value)


def test_a_share_of_the_batch_is_not_trained_alone(monkeypatch, capsys, tmp_path, prepared):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train", *train_overrides(tmp_path / "run", prepared)])
    assert entry.run_command_line() == cli.REJECTED
    assert capsys.readouterr().err.startswith("error: WORLD_SIZE=2 without RANK: ")
    assert not (tmp_path / "run").exists()


# ---- ranks that never come -------------------------------------------------------------------------------------------


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The environment of one rank whose others never come."""

    def be(rank: int, size: int = 3) -> None:
        values = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return be


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def started(store: dist.Store, launch: Launched, device: str = "", timeout_s: float = HANG_S) -> rendezvous.Rendezvous:
    """A rank that has found the store."""
    here = rendezvous.Rendezvous(launch, timeout_s, device)
    here.store = store
    return here


def arrives(here: rendezvous.Rendezvous) -> dist.Store | None:
    try:
        return here.arrive()
    except rendezvous.Absent:
        return None


@pytest.mark.parametrize(("rank", "absent"), [(0, "rank 1, 2 of 3"), (2, r"rank 0 of 3 \(Connection refused\)")])
def test_a_rank_that_waits_says_for_whom_and_gives_up_in_time(lonely, monkeypatch, log, rank: int, absent: str):
    lonely(rank)
    monkeypatch.setattr(rendezvous, "REPORT_EVERY_S", 0.0)
    with pytest.raises(Failure, match=f"^{absent} did not reach 127.0.0.1:.* within 3 s \\(backend.join_timeout_s\\)$"):
        join("gloo", "ddp on cpu", timeout_s=HANG_S, join_timeout_s=3.0)  # enough to open the store in
    said = log.messages
    assert said and all(text.startswith(f"waiting for rank {'1' if rank == 0 else '0'}") for text in said)


def test_ranks_are_named_once_by_rank_0(store, monkeypatch, log):
    """Rank 0 has come, rank 2 has not: rank 1 leaves it to rank 0 to say so."""
    monkeypatch.setattr(rendezvous, "REPORT_EVERY_S", 0.0)
    first, second = (started(store, Launched(rank, 3), timeout_s=0.1) for rank in (0, 1))
    assert arrives(first) is None
    with pytest.raises(rendezvous.Absent, match="^another rank$"):
        second.poll(second.arrive)
    assert not log.messages
    with pytest.raises(rendezvous.Absent, match="^rank 2 of 3$"):
        first.poll(first.arrive)
    assert {text.split(" at ")[0] for text in log.messages} == {"waiting for rank 2 of 3"}


def test_a_process_never_joins_those_that_its_predecessor_met(store):
    """torchrun keeps the store over restarts, and rank 0 may be the last to be started again."""
    ranks = [started(store, Launched(rank, 2)) for rank in (0, 1)]
    assert [arrives(rank) is not None for rank in (*ranks, *ranks)] == [False, False, True, True]
    second = started(store, Launched(1, 2))
    assert arrives(second) is arrives(second) is None
    first = started(store, Launched(0, 2))
    assert arrives(first) is None
    second = started(store, Launched(1, 2))  # once more, before the roster is written
    assert arrives(second) is None
    ours, theirs = arrives(first), arrives(second)
    assert ours is not None and theirs is not None
    ours.set("address", "a port")
    assert theirs.get("address") == b"a port"


def test_a_rank_that_dies_once_it_has_met_the_others_is_not_waited_for_longer_than_one_that_never_came(
    lonely, monkeypatch
):
    lonely(0, 2)
    waits = rendezvous.wait_for_ranks
    monkeypatch.setattr(rendezvous, "wait_for_ranks", lambda device, _: waits(device, HANG_S))  # until the other came
    port = int(os.environ["MASTER_PORT"])
    device = f"ddp on cpu, torch {torch.__version__}, baretrain {train.__version__}"
    other = rendezvous.Rendezvous(Launched(1, 2, master_addr="127.0.0.1", master_port=port), HANG_S, device)
    joins = threading.Thread(target=other.poll, args=[other.arrive])
    joins.start()
    with pytest.raises(RuntimeError, match="timeout after 3000ms"):
        join("gloo", "ddp on cpu", timeout_s=HANG_S, join_timeout_s=3.0)
    joins.join(HANG_S)


def test_a_collective_has_its_own_timeout_once_all_have_joined(lonely):
    lonely(0, 1)
    join("gloo", "ddp on cpu", timeout_s=60, join_timeout_s=1)
    try:
        group = dist.distributed_c10d._get_default_group()
        assert group._get_backend(torch.device("cpu")).options._timeout.seconds == 60
    finally:
        dist.destroy_process_group()


def test_ranks_that_train_by_something_else_than_rank_0_are_rejected_before_they_join(store):
    """One machine of four whose driver has failed, or whose torch is another one."""
    devices = ["ddp on cuda, bf16, torch 2.9.1", "ddp on cuda, bf16, torch 2.9.1", "ddp on cpu, fp32, torch 2.9.1"]
    ranks = [started(store, Launched(rank, 3), device) for rank, device in enumerate(devices)]
    assert [arrives(here) for here in ranks] == [None] * 3
    with pytest.raises(InputError, match=f"^rank 2 on .* trains by {devices[2]}, but rank 0 by {devices[0]}; run"):
        ranks[0].arrive()


def test_the_machine_of_rank_0_stays_until_each_other_machine_knows_of_a_rejection(store):
    def rejects(rank: int, local_rank: int) -> bool:
        """Whether the rank may leave."""
        here = started(store, Launched(rank, 4, local_rank, 2, master_addr="h", uses_agent_store=True))
        for _ in range(3):  # as often as it waits, its machine counts once
            try:
                here.reject("rank 1 on h was rejected: no data")
            except rendezvous.Absent:
                continue
            return True
        with pytest.raises(InputError, match="^rank 1 on h was rejected: no data$"):
            here.arrive()
        return False

    assert not rejects(1, 1) and not rejects(0, 0)
    assert rejects(3, 1) and rejects(2, 0) and rejects(0, 0)


def test_ranks_on_trainium_join_where_they_have_met(lonely, monkeypatch):
    """PyTorch/XLA's own way to a store, with one rank on the CPU; not run on hardware."""
    from train.backend import xla

    lonely(0, 1)
    monkeypatch.setattr(xla.xla_rendezvous, "_store", None)
    backend, stores = object.__new__(xla.XLA), []
    backend.cfg, backend.world, backend.precision = XLAConfig(timeout_s=HANG_S), World(), "bf16"
    backend.is_neuron, backend.reduces_on_host = True, False

    def init(_: str, init_method: str, timeout: object) -> None:
        stores.append(next(xla.xla_rendezvous.pjrt_rendezvous_handler(init_method))[0])

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    backend._join()
    assert isinstance(stores[0], dist.PrefixStore) and stores[0].check(["roster"])


def test_one_signal_ends_the_wait_for_other_ranks(lonely):
    lonely(0)
    with StopRequest() as stop:
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
        with pytest.raises(StoppedEarly, match="SIGTERM"), stop.nothing_to_save():
            join("gloo", "ddp on cpu", timeout_s=HANG_S, join_timeout_s=HANG_S)


def test_a_signal_from_before_the_wait_counts_and_a_notice_does_not():
    with StopRequest() as stop:
        stop.ask("a notice")
        with stop.nothing_to_save():  # the loop saves after its first step
            pass
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedEarly), stop.nothing_to_save():
            raise AssertionError("it went on")


IN_TORCH = """
from datetime import timedelta
import torch.distributed as dist
from train.attempt import preempt
preempt.GRACE_S = 0.2
with preempt.StopRequest() as stop, stop.nothing_to_save():
    store = dist.HashStore()
    print("waiting", flush=True)
    store.wait(["never"], timedelta(seconds=600))
"""


def test_one_signal_ends_a_wait_in_torch_itself(tmp_path: Path):
    out = tmp_path / "out"
    process = start_forked(["-c", IN_TORCH], os.environ, out=out)
    eventually(lambda: out.exists() and out.read_text() == "waiting\n", HANG_S)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(HANG_S)
    assert process.exitcode == 128 + signal.SIGTERM


def test_one_signal_ends_the_preparation_of_data(monkeypatch, capsys, tmp_path, prepared):
    def prepare(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(loop, "build_task", prepare)
    monkeypatch.setattr(sys, "argv", ["train", *train_overrides(tmp_path / "run", prepared)])
    assert entry.run_command_line() == cli.STOPPED
    said = "stopped on SIGINT before there was anything to save; the same command starts it again\n"
    assert capsys.readouterr().err == f"starting {tmp_path / 'run'}: 1 rank\n{said}"
    assert not (tmp_path / "run").exists()


# ---- torchrun's end --------------------------------------------------------------------------------------------------

CHILD = """
import signal, time
from train.host.torchrun import die_with_torchrun
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop", flush=True), exit()))
die_with_torchrun()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$0" "$@"; exit']], ids=["", "in a shell script"])
def test_a_rank_is_asked_to_stop_when_its_launcher_is_killed(wrapper: list[str]):
    words = [*wrapper, sys.executable, "-c", CHILD]
    start = f"import subprocess; subprocess.run({words!r})"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "x"}
    torchrun = subprocess.Popen([sys.executable, "-c", start], env=environ, text=True, stdout=subprocess.PIPE)
    assert torchrun.stdout is not None and torchrun.stdout.readline() == "ready\n"
    shells = psutil.Process(torchrun.pid).children() if wrapper else []
    for process in [torchrun, *shells]:
        process.kill()
    assert torchrun.communicate(timeout=HANG_S)[0] == "asked to stop\n"


ORPHAN = """
import os, sys
from train.host.torchrun import die_with_torchrun
while os.getppid() == int(sys.argv[1]):
    pass
die_with_torchrun()
print("started")
"""


def test_a_rank_whose_launcher_ended_before_it_started_ends_with_a_line():
    """The shell ends and leaves the rank to process 1; the pipes are closed when the rank has ended."""
    words = ["sh", "-c", '"$0" -c "$1" $$ &', sys.executable, ORPHAN]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "x"}
    ended = subprocess.run(words, env=environ, text=True, capture_output=True, timeout=HANG_S, check=True)
    assert ended.stdout == "" and "torchrun" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_launcher_that_has_ended_meanwhile_is_noticed():
    code = "from train.host.processes import end_with_parent; end_with_parent(0)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == -signal.SIGTERM


def test_without_a_launcher_nothing_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(torchrun, "end_with_parent", None)
    die_with_torchrun()


def runs(process: psutil.Process) -> bool:
    """Not if it only waits for process 1 to take note of its end."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_rank_outlives_a_torchrun_that_is_killed_while_they_start(tmp_path, prepared):
    """As soon as there are ranks, and once the run folder is taken. A new start is not rejected. A real torchrun: ranks
    that it forks get a signal at its end from torch.
    """
    run_dir = tmp_path / "run"
    arguments = train_overrides(run_dir, prepared, "max_steps=100000", "max_epochs=99999")
    moments: list[Callable[[psutil.Process], object]] = [
        lambda torchrun: len(torchrun.children()) >= 2,
        lambda _: (run_dir / "lease").exists(),
    ]
    for moment in moments:
        torchrun = psutil.Popen(command(arguments, ranks=2), cwd=ROOT, stderr=subprocess.DEVNULL)
        eventually(lambda moment=moment, torchrun=torchrun: moment(torchrun), HANG_S)
        family = torchrun.children(recursive=True)
        torchrun.kill()
        torchrun.wait()
        eventually(lambda family=family: not any(map(runs, family)), HANG_S)
    result = run(train_overrides(run_dir, prepared), ranks=2)
    assert result.returncode == 0, result.stderr
    assert "[Gloo]" not in result.stdout + result.stderr


# ---- what ends for good ----------------------------------------------------------------------------------------------


def test_one_rank_of_a_machine_reports(monkeypatch, capsys, tmp_path):
    """torchrun makes the folders."""
    monkeypatch.setattr(torchrun, "print_after_torchrun", lambda line: None)
    said = []
    for rank in (1, 0):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}/error.json"))
        assert guarded(reject) == cli.REJECTED
        said.append(capsys.readouterr().err)
    assert said == ["error: no data\n", ""]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # as under a torchrun without logs
    assert not is_reported() and not is_reported()


def reject() -> int:
    raise InputError("no data")


ONE_RANK = """
import os, sys
from train import loop
from train.config import InputError
if os.environ["RANK"] == "1":
    def reject(*_):
        raise InputError("this rank has no data")
    loop.run = reject
from train.__main__ import main
sys.exit(main())
"""
LOST = """
import sys
from train import loop
from train.run_folder.lease import LeaseLost
def lose(*_):
    raise LeaseLost("another job has it")
loop.fit = lose
from train.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("script", "more", "said"),
    [
        (None, "seed=-1", "error: seed=-1"),  # before the run folder is taken
        (None, "backend.device=cuda", "error: backend.device=cuda, but this machine shows no"),  # after it
        (ONE_RANK, "seed=1", "error: this rank has no data"),
        (LOST, "seed=1", "failed: another job has it"),
    ],
    ids=["settings", "device", "one rank", "lease lost"],
)
def test_what_ends_for_good_ends_torchrun_too(tmp_path, prepared, script: str | None, more: str, said: str):
    (tmp_path / "script.py").write_text(script or "")
    program = str(tmp_path / "script.py") if script else "train"
    words = launch(program, train_overrides(tmp_path / "run", prepared, more), ranks=2, restarts=3)
    result = run_forked(words, os.environ)
    assert result.returncode == 1
    spoken = [line for line in result.stderr.splitlines() if line.startswith(said)]
    assert len(spoken) == 1 or (spoken and script == LOST), result.stderr  # if it is lost, both may come to say so
    assert "not started again" not in result.stderr


@pytest.mark.parametrize(("module", "restarts"), [("train", 3), ("train.compare", 0), ("train.precompile", 0)])
def test_the_last_line_under_torchrun_is_ours(module, restarts):
    words = command(["stepz=1"], ranks=2, module=module)
    words.insert(words.index(TORCHRUN) + 1, f"--max-restarts={restarts}")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" in done.stderr  # torchrun's
    assert ("stepz is not" if module != "train.precompile" else "without torchrun") in done.stderr.splitlines()[-1]


# ---- a console that fails --------------------------------------------------------------------------------------------

SPEAKS = """
import sys
from train.cli.console import use_console
use_console("stdout", "stderr")
print("x" * 100_000)
print("y", file=sys.stderr)
is_safe = open("/dev/null").fileno() > 2  # no file gets the number of a stream that was closed
sys.exit(75 if is_safe else 1)
"""


@pytest.mark.parametrize("kind", ["full", "closed pipe", "closed", "good"])
def test_what_is_printed_changes_no_exit_code(tmp_path: Path, kind: str):
    read, write = os.pipe()
    os.close(read)
    folder = "/dev/full" if kind == "full" else str(tmp_path / "out")
    redirection = {"closed pipe": "2>&1", "closed": ">&- 2>&-"}.get(kind, f">{folder} 2>&1")
    words = ["sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, SPEAKS]
    assert subprocess.run(words, cwd=ROOT, stdout=write, check=False).returncode == 75
    os.close(write)
    if kind == "good":
        assert sorted((tmp_path / "out").read_text()) == ["\n", "\n", *"x" * 100_000, "y"]


def test_a_run_goes_on_although_nobody_hears_it(tmp_path, prepared):
    full = Path("/dev/full")
    process = start_forked(["train", *train_overrides(tmp_path / "run", prepared)], os.environ, out=full, err=full)
    process.join(HANG_S)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "run/outcome.json").read_text())["outcome"] == "done"
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 6]


# ---- processes that are left -----------------------------------------------------------------------------------------

LOSES_DATA = """
import sys
from pathlib import Path
from train import evaluation
before = evaluation.measure
def measure(attempt, *more, **named):
    for path in Path(attempt.cfg.data.path).glob("validation-*"):
        path.unlink()
    return before(attempt, *more, **named)
evaluation.measure = measure
from train.__main__ import main
sys.exit(main())
"""


def test_a_run_with_loader_processes_ends_after_an_unexpected_error(tmp_path, prepared):
    """A process of its own: forks leave without what Python does at exit."""
    data = shutil.copytree(prepared, tmp_path / "data")
    words = train_overrides(tmp_path / "run", data, "data.num_workers=1")
    result = subprocess.run(
        [sys.executable, "-c", LOSES_DATA, *words],
        cwd=ROOT,
        timeout=HANG_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "FileNotFoundError" in result.stderr and "step 3/6" in result.stderr
