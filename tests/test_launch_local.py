"""Runs launched on this machine: what is killed goes on, what is stopped resumes, what is refused ends at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from running import ROOT, eventually, run, train_overrides

from launch.__main__ import main
from launch.record import Event, Record
from launch.schedulers import last_submission, scheduler
from launch.supervise import look
from train.cli.command import DONE, REFUSED, STOPPED
from train.config import S3Config
from train.data.shards.format import read_manifest
from train.run_folder.outcome import read_outcome
from train.storage.folders import LocalFolder

LONG = ["max_steps=80", "checkpoint.every=20", "checkpoint.keep=2", "eval_every=40", "log_every=20"]
LONG += ["preempt.poll_s=0.1", "export=false"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run(train_overrides(folder, prepared, *LONG))
    assert done.returncode == DONE, done.stderr
    return losses(folder)


def losses(run_dir: Path) -> list[float]:
    """Of the evaluations; of a step that was done twice the last."""
    written = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return list({line["step"]: line["loss"] for line in written if line["kind"] == "eval"}.values())


def words(run_dir: Path, data: Path, *own: str, of_run: tuple[str, ...] = ()) -> list[str]:
    """The command line of a launch; of a setting that is given twice the last one counts."""
    given = {each.partition("=")[0]: each for each in train_overrides(run_dir, data, *LONG, *of_run)}
    return ["cluster=local", *own, "submit=true", "--", *given.values()]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    """Of a run that no test leaves behind."""
    record = Record(str(tmp_path / "run"), S3Config())
    yield record
    if record.exists():
        main(["cancel", record.run_dir, "--yes"])


def events(record: Record, kind: str) -> list[Event]:
    return [event for event in record.events() if event.kind == kind]


def supervisor(record: Record) -> psutil.Process:
    event = last_submission(record)
    assert event is not None
    return psutil.Process(event.details["handle"]["pid"])


def is_active(record: Record) -> bool:
    event = last_submission(record)
    assert event is not None
    return scheduler("local").state(event.details["handle"]).is_active


def ended(record: Record, number: int = 1) -> dict:
    eventually(lambda: len(events(record, "ended")) >= number and not is_active(record))
    return events(record, "ended")[-1].details


def wait_for_checkpoint(record: Record, *, after: int = 0) -> None:
    eventually(lambda: look(record).checkpoint > after)


def logs(record: Record) -> str:
    top = record.local_folder() / "logs"
    return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted(top.rglob("*.txt")))


def test_a_run_whose_torchrun_is_killed_goes_on(record, hold, prepared, undisturbed):
    hold.before(25)
    assert main(words(Path(record.run_dir), prepared, "detach=true", "processes_per_node=2")) == DONE
    assert is_active(record)  # the command has returned, the run goes on
    wait_for_checkpoint(record)
    below = supervisor(record).children(recursive=True)
    (torchrun,) = [each for each in below if "torch.distributed.run" in each.cmdline()]
    torchrun.kill()
    hold.let_go(25)
    assert ended(record) == {"outcome": "done", "reason": "done"}, logs(record)
    assert len(events(record, "attempt_began")) == 2
    assert losses(Path(record.run_dir)) == pytest.approx(undisturbed, rel=1e-5)


def test_a_run_is_stopped_cancelled_and_resumed(record, hold, prepared, undisturbed, monkeypatch, tmp_path):
    hold.before(25, 45)
    monkeypatch.chdir(prepared.parent)
    assert main(words(Path(record.run_dir), Path(prepared.name), "detach=true")) == DONE
    monkeypatch.chdir(tmp_path)  # where the data have another name
    wait_for_checkpoint(record)
    assert main(["stop", record.run_dir]) == DONE
    assert ended(record)["outcome"] == "stopped", logs(record)
    stopped = read_outcome(record.run)
    assert (stopped["outcome"], stopped["step"]) == ("stopped", stopped["checkpoint"])
    hold.let_go(25)  # a slow machine may have stopped before it
    assert main(["resume", record.run_dir]) == DONE
    wait_for_checkpoint(record, after=stopped["step"])
    below = supervisor(record).children(recursive=True)
    assert len(below) >= 3  # launch.node, torchrun and its rank
    assert main(["cancel", record.run_dir, "--yes"]) == DONE
    gone, alive = psutil.wait_procs(below, timeout=300)
    assert gone and not alive and not is_active(record)
    assert read_outcome(record.run) == {}  # no time was left to write one
    hold.let_go(45)
    assert main(["resume", record.run_dir]) == DONE
    assert ended(record, 2)["outcome"] == "done", logs(record)
    assert losses(Path(record.run_dir)) == pytest.approx(undisturbed, rel=1e-5)


def test_ctrl_c_stops_with_a_checkpoint(record, prepared):
    command = [sys.executable, "-m", "launch", *words(Path(record.run_dir), prepared, of_run=("max_steps=100000",))]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True)
    wait_for_checkpoint(record)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said, _ = process.communicate(timeout=300)
    assert process.returncode == STOPPED, logs(record)
    assert "was asked to stop with a checkpoint" in said
    assert ended(record)["outcome"] == "stopped"
    assert read_outcome(record.run)["outcome"] == "stopped"


def test_what_the_trainer_refuses_ends_the_job_at_once(record, prepared, tmp_path, capfd):
    assert main(words(Path(record.run_dir), tmp_path / "no_data")) == REFUSED
    assert not record.exists()  # nothing was started
    own = words(Path(record.run_dir), prepared, "processes_per_node=2")
    assert main([*own, "backend.device=cuda"]) == REFUSED
    details = ended(record)
    assert details["outcome"] == "refused" and "cuda" in details["reason"], logs(record)
    assert len(events(record, "attempt_began")) == 1
    capfd.readouterr()
    assert main(["logs", record.run_dir]) == DONE
    reason = details["reason"].removeprefix("refused: ")
    assert f"error: {reason}" in capfd.readouterr().out


def test_a_corpus_is_prepared_in_parts_and_merged(tmp_path, corpus, prepared, capfd):
    of_run = ["corpus=text", f"corpus.path={corpus}", f"output={tmp_path}/data", "seq_len=32"]
    of_run += ["tokenizer.vocab_size=120", "validation_fraction=0.25"]
    assert main(["cluster=local", "prepare=true", "parts=2", "submit=true", "--", *of_run]) == DONE
    said = capfd.readouterr().out
    assert all(f"==> {log}." in said for log in ("part_00001", "part_00002", "merge"))
    made, whole = (read_manifest(LocalFolder(path)) for path in (tmp_path / "data", prepared))
    assert abs(made.rows("validation") - whole.rows("validation")) <= 1
    assert abs(made.rows("train") - whole.rows("train")) <= 1  # each part fills its last sequence by itself


ORPHANS = """
import subprocess, sys
from train.host import children
children.adopt_orphans()
for seconds in (1, 600):
    parent = subprocess.run(["sh", "-c", f"(sleep {seconds}; echo {seconds} >> $0) & exec true", sys.argv[1]])
children.end_orphans(3)
"""


def test_orphans_are_waited_for_and_ended_if_they_take_too_long(tmp_path):
    done = tmp_path / "done"
    subprocess.run([sys.executable, "-c", ORPHANS, done], cwd=ROOT, timeout=300, check=True)
    assert done.read_text() == "1\n"
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(done) in (each.info["cmdline"] or [])]
