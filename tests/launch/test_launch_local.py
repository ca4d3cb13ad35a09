"""Runs launched on this machine: what is killed goes on, what is stopped resumes, what is rejected ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import LaunchedRun, settings_of_run
from running import ROOT

from launch import local
from launch.__main__ import main
from train.config import S3Config
from train.run.command import DONE, REJECTED, STOPPED
from train.run_folder.outcome import read_outcome


def words(run: LaunchedRun, data: Path, *own: str, of_run: tuple[str, ...] = ()) -> list[str]:
    """The command line of a launch."""
    return [
        "cluster=local",
        *own,
        "submit=true",
        "--",
        *settings_of_run(run.run_dir, data, *of_run),
    ]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[LaunchedRun]:
    """A run that no test leaves behind."""
    run = LaunchedRun(str(tmp_path / "run"), S3Config())
    yield run
    if run.exists():
        main(["cancel", run.run_dir, "--yes"])


def below(run: LaunchedRun) -> list[psutil.Process]:
    return psutil.Process(run.handle["pid"]).children(recursive=True)


@pytest.mark.slow
def test_a_run_is_killed_stopped_cancelled_and_resumed(
    launched, hold, prepared, undisturbed_losses, monkeypatch, tmp_path, capsys
):
    hold.before(25, 45, 65)
    monkeypatch.chdir(prepared.parent)
    with monkeypatch.context() as patch:  # the command is killed as soon as it has submitted
        patch.setattr(local.Scheduler, "attend", lambda *_, **__: DONE)
        assert main(words(launched, Path(prepared.name), "processes_per_node=2")) == DONE
    assert launched.state.is_active  # the command has gone, the run continues
    monkeypatch.chdir(tmp_path)  # where the data have another name
    step = launched.wait_for_checkpoint()
    (torchrun,) = [each for each in below(launched) if "local_torchrun.py" in str(each.cmdline())]
    assert main(words(launched, prepared)) == REJECTED
    assert f"{launched.run_dir} has a job: " in capsys.readouterr().err
    torchrun.kill()
    launched.wait_for(2)
    hold.let_go(25)  # a slow machine may have stopped before it
    launched.wait_for_checkpoint(after=max(20, step))
    assert main(["stop", launched.run_dir]) == DONE
    assert launched.ended().outcome == "stopped", launched.logs()
    stopped = read_outcome(launched.run)
    assert (stopped["outcome"], stopped["step"]) == ("stopped", stopped["checkpoint"])
    hold.let_go(45)
    assert main(["resume", launched.run_dir]) == DONE
    launched.wait_for_checkpoint(after=stopped["step"])
    processes = below(launched)
    assert len(processes) >= 4  # launch.node, torchrun and its ranks
    assert main(["cancel", launched.run_dir, "--yes"]) == DONE
    gone, alive = psutil.wait_procs(processes, timeout=90)
    assert gone and not alive and not launched.state.is_active
    assert read_outcome(launched.run) == {}  # no time was left to write one
    hold.let_go(65)
    assert main(["resume", launched.run_dir]) == DONE
    assert launched.ended().outcome == "done", launched.logs()
    assert [attempt.number for attempt in launched.attempts if attempt.is_training] == [1, 2, 3, 4]
    assert launched.losses == pytest.approx(undisturbed_losses, rel=1e-5)


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint(launched, prepared):
    command = [
        sys.executable,
        "-m",
        "launch",
        *words(launched, prepared, of_run=("max_steps=100000",)),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    launched.wait_for_checkpoint()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate(timeout=300)
    assert process.returncode == STOPPED, launched.logs()
    assert "was asked to save a checkpoint" in said
    assert launched.ended().outcome == "stopped"
    assert read_outcome(launched.run)["outcome"] == "stopped"


@pytest.mark.slow
def test_what_the_trainer_rejects_ends_the_job_at_once(launched, prepared, tmp_path, capfd):
    assert main(words(launched, tmp_path / "no_data")) == REJECTED
    assert not launched.exists()  # nothing was started
    assert (
        main([*words(launched, prepared, "processes_per_node=2"), "backend.device=cuda"])
        == REJECTED
    )
    ended = launched.ended()
    assert ended.outcome == "refused" and "cuda" in ended.reason, launched.logs()
    assert ended.number == 1
    capfd.readouterr()
    assert main(["logs", launched.run_dir]) == DONE
    assert ended.reason.removeprefix("rejected: ") in capfd.readouterr().out


ORPHANS = """
import subprocess, sys
from train.machine import processes
processes.adopt_orphans()
for seconds, limit_s in ((0.1, 90), (600, 0)):
    parent = subprocess.run(["sh", "-c", f"(sleep {seconds}; echo {seconds} >> $0) & exec true", sys.argv[1]])
    processes.end_orphans(limit_s)
"""


def test_orphans_are_waited_for_and_ended_if_they_take_too_long(tmp_path):
    done = tmp_path / "done"
    subprocess.run([sys.executable, "-c", ORPHANS, done], cwd=ROOT, timeout=300, check=True)
    assert done.read_text() == "0.1\n"
    assert not [
        each
        for each in psutil.process_iter(["cmdline"])
        if str(done) in (each.info["cmdline"] or [])
    ]
