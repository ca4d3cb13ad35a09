"""A run and what started it: the launcher's variables, ranks that never come, torchrun's end, a console that fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forks import free_port, launch, run_forked, start_forked
from running import ROOT, command, eventually, run, train_overrides

from train import entry, loop
from train.config import InputError
from train.machine.launched import Launched, launched
from train.run import compose as cli
from train.run.stopping import StoppedEarly, StopRequest

HANG_S = 90.0  # never waited for unless a test fails
TWO = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TWO |= {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}


# ---- the launcher's variables ----------------------------------------------------------------------------------------


TORCHRUN_SAYS = {
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
JOINS = {"is_distributed": True, "master_addr": "head", "master_port": 29500}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "", "WORLD_SIZE": ""}, Launched()),
        (
            {"MASTER_ADDR": "head"},
            Launched(master_addr="head"),
        ),  # a cluster's, for whoever needs it
        ({"WORLD_SIZE": "1"}, Launched()),
        (
            {**TWO, "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""},
            Launched(1, 2, **JOINS),
        ),  # a process per machine
        (
            {**TWO, "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"},
            Launched(2, 3, 0, 2, **JOINS),
        ),  # unlike machines
        (
            TWO | TORCHRUN_SAYS,
            Launched(1, 2, 1, 2, run_id="x", restart_count=3, uses_agent_store=True, **JOINS),
        ),
    ],
)
def test_variables_of_a_launcher(environ: dict[str, str], expected: Launched):
    assert launched(environ) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": None}, "WORLD_SIZE=2 without RANK"),
        ({"RANK": "²"}, "RANK=² must be a whole number"),
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be a whole number from 1 to"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
        ({"MASTER_ADDR": None}, "RANK=1 without MASTER_ADDR"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT=x"),
    ],
)
def test_variables_that_contradict_each_other_are_one_line(
    change: dict[str, str | None], named: str
):
    environ = {name: value for name, value in {**TWO, **change}.items() if value is not None}
    with pytest.raises(InputError, match=f"^.*{named}") as rejected:
        launched(environ)
    assert "\n" not in str(rejected.value) and "start one torchrun per machine" in str(
        rejected.value
    )


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_a_signal_from_before_the_wait_counts_and_a_notice_does_not():
    with StopRequest() as stop:
        stop.ask("a notice")
        with stop.nothing_to_save():  # the loop saves after its first step
            pass
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedEarly), stop.nothing_to_save():
            raise AssertionError("it went on")


IN_TORCH = """
import threading
from datetime import timedelta
import torch.distributed as dist
from train.run import stopping
stopping.GRACE_S = 0.2
with stopping.StopRequest() as stop, stop.nothing_to_save():
    store = dist.HashStore()
    # after the main thread has entered torch
    threading.Timer(0.5, print, ["waiting"], {"flush": True}).start()
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
    assert entry.main(sys.argv[1:]) == cli.STOPPED
    said = (
        "stopped on SIGINT before there was anything to save; the same command starts it again\n"
    )
    assert capsys.readouterr().err == f"starting {tmp_path / 'run'}: 1 rank\n{said}"
    assert not (tmp_path / "run").exists()


LISTENING = """
import psutil
import torch.distributed as dist
from train.parallel.rendezvous import join
from train.machine import rank_setup
from train.machine.launched import launched

rank_setup.prepare(launched(), forks=False)
join("gloo", timeout_s=60, join_timeout_s=60)
for process in (psutil.Process(), psutil.Process().parent()):
    for each in process.net_connections("inet"):
        if each.status == psutil.CONN_LISTEN:
            print(each.laddr.ip)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("store", ["torchrun's", "rank 0's"])
def test_ranks_of_one_machine_and_their_torchrun_listen_on_loopback_only(tmp_path, store):
    """Whoever reaches these ports decides what the ranks unpickle."""
    (tmp_path / "rank.py").write_text(LISTENING)
    words = ["-c", LISTENING]
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = str(free_port())
    if store == "torchrun's":
        forked = ["--nproc-per-node=1", "--start-method=fork", "--run-path"]
        words = ["train.machine.local_torchrun", *forked, str(tmp_path / "rank.py")]
        environ = {}
    kubeflows = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "nowhere:1", "PET_NPROC_PER_NODE": "4"}
    done = run_forked(words, {**os.environ, **environ, **kubeflows})
    assert done.returncode == 0, done.stderr
    heard = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert len(heard) >= 2 and set(heard) == {"127.0.0.1"}


# ---- torchrun's end --------------------------------------------------------------------------------------------------

CHILD = """
import signal, time
from train.machine.torchrun import die_with_torchrun
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop", flush=True), exit()))
die_with_torchrun()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "wrapper", [[], ["sh", "-c", '"$0" "$@"; exit']], ids=["", "in a shell script"]
)
def test_a_rank_is_asked_to_stop_when_its_launcher_is_killed(wrapper: list[str]):
    words = [*wrapper, sys.executable, "-c", CHILD]
    start = f"import subprocess; subprocess.run({words!r})"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "x"}
    torchrun = subprocess.Popen(
        [sys.executable, "-c", start], env=environ, text=True, stdout=subprocess.PIPE
    )
    assert torchrun.stdout is not None and torchrun.stdout.readline() == "ready\n"
    shells = psutil.Process(torchrun.pid).children() if wrapper else []
    for process in [torchrun, *shells]:
        process.kill()
    assert torchrun.communicate(timeout=HANG_S)[0] == "asked to stop\n"


def runs(process: psutil.Process) -> bool:
    """Not if it only waits for process 1 to take note of its end."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
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


ONE_RANK = """
import os, sys
from train import loop
from train.config import InputError
if os.environ["RANK"] == "1":
    def reject(*_, **__):
        raise InputError("this rank has no data")
    loop.run = reject
from train.__main__ import main
sys.exit(main())
"""
LOST = """
import sys
from train import loop
from train.run_folder.ownership import LeaseLost
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
        (
            None,
            "backend.device=cuda",
            "error: backend.device=cuda, but PyTorch sees no CUDA device",
        ),  # after it
        (ONE_RANK, "seed=1", "error: this rank has no data"),
        (LOST, "seed=1", "failed: another job has it"),
    ],
    ids=["settings", "device", "one rank", "lease lost"],
)
def test_what_ends_for_good_ends_torchrun_too(
    tmp_path, prepared, script: str | None, more: str, said: str
):
    (tmp_path / "script.py").write_text(script or "")
    program = str(tmp_path / "script.py") if script else "train"
    words = launch(program, train_overrides(tmp_path / "run", prepared, more), ranks=2, restarts=3)
    result = run_forked(words, os.environ)
    assert result.returncode == 1
    spoken = [line for line in result.stderr.splitlines() if line.startswith(said)]
    # if it is lost, both may come to say so
    assert len(spoken) == 1 or (spoken and script == LOST), result.stderr
    assert "not started again" not in result.stderr


# ---- a console that fails --------------------------------------------------------------------------------------------

SPEAKS = """
import sys
from train.machine.console import use_console
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


# ---- processes that are left -----------------------------------------------------------------------------------------

LOSES_DATA = """
import sys
from pathlib import Path
from train.run import evaluation
def measure(attempt, *more, before=evaluation.measure, **named):
    for path in [] if named["is_trial"] else Path(attempt.cfg.data.path).glob("validation-*"):
        path.unlink()
    return before(attempt, *more, **named)
evaluation.measure = measure
from train.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_run_with_loader_processes_ends_after_an_unexpected_error(tmp_path, prepared):
    """A process of its own: forks leave without what Python does at exit."""
    data = shutil.copytree(prepared, tmp_path / "data")
    words = [
        sys.executable,
        "-c",
        LOSES_DATA,
        *train_overrides(tmp_path / "run", data, "data.num_workers=1"),
    ]
    result = subprocess.run(
        words, cwd=ROOT, timeout=HANG_S, check=False, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "FileNotFoundError" in result.stderr and "step 3/6" in result.stderr
