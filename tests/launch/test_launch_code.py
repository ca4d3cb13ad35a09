"""The code of a job and its record: what is written when it is submitted is what every node reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planning import plan
from rejections import rejects

from launch import code
from launch.record import Record
from train.config import S3Config
from train.storage import imported


def test_the_bundle_runs_the_code_that_was_packed_wherever_the_job_stands(tmp_path):
    content, packed = code.pack()
    assert (content, packed) == code.pack()  # the same files give the same bytes
    top = code.unpack(content, packed.sha256, tmp_path / "cache")
    assert top == code.unpack(content, packed.sha256, tmp_path / "cache")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "train").mkdir(parents=True)
    (elsewhere / "train" / "__init__.py").write_text(
        "raise SystemExit('the code of the working folder')"
    )
    command = [sys.executable, top / code.START, "train", "--cfg", "job", "experiment=demo"]
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        command, cwd=elsewhere, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "run_dir: runs/demo" in done.stdout
    assert {path.name for path in top.iterdir()} >= {"train", "conf", "launch", code.START}


def test_files_of_the_users_own_code_come_along(tmp_path, monkeypatch):
    monkeypatch.setattr(imported, "IMPORTED", {})
    (tmp_path / "mine.py").write_text("SCHEDULES = {'mine': lambda left, cfg: left}")
    imported.load(str(tmp_path / "mine.py"))
    content, packed = code.pack()
    top = code.unpack(content, packed.sha256, tmp_path / "cache")
    (tmp_path / "mine.py").unlink()
    command = [
        sys.executable,
        top / code.START,
        "train",
        "--cfg",
        "job",
        "experiment=demo",
        "optim.schedule=mine",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_code_that_no_node_would_unpack_is_rejected_before_it_is_sent(monkeypatch):
    assert len(code.pack()[0]) < code.MOST_BYTES
    monkeypatch.setattr(code, "MOST_BYTES", 10**6)
    parts = (
        path
        for package in code.PACKAGES
        for path in (Path(code.__file__).parents[1] / package).rglob("*")
        if path.is_file()
    )
    largest = max(
        (path for path in parts if path.suffix != ".pyc"), key=lambda path: path.stat().st_size
    )
    rejects(
        rf"the code has \d+ MB, but a job may have at most 1 MB; the largest file is {largest} ",
        code.pack,
    )


def test_a_bundle_that_was_changed_is_not_unpacked(tmp_path):
    rejects("does not match its checksum", code.unpack, code.pack()[0], "2" * 64, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": "1"},
        {"kind": "shell"},
        {"overrides": "rm"},
        {"id": "../x"},
        {"config_sha256": "x"},
        {"format": 1},
    ],
    ids=str,
)
def test_a_damaged_job_is_rejected(tmp_path, changes):
    record = Record(str(tmp_path / "run"), S3Config())
    job = plan(["cluster=local"], ["experiment=demo", "run_dir=runs/mine"])[1]
    values = {**json.loads(job.to_json()), **changes}
    record.folder.write("job.json", json.dumps(values).encode())
    rejects("has format 1; this version reads 3" if "format" in changes else "job", record.job)


def test_a_record_is_beside_the_run_and_skips_what_is_damaged(tmp_path):
    record = Record(f"{tmp_path}/run/", S3Config())
    assert record.location == f"{tmp_path}/run.launch"
    assert Record(record.location, S3Config()).location == record.location
    rejects("was not launched", record.job)
    for _ in range(3):
        record.begin(["n1"], 0)
    record.folder.write("attempts/0002.json", b"{}")
    record.reject("attempt_0003", "x\n$(touch y)")
    assert [attempt.number for attempt in record.history().attempts] == [1, 3]
    assert record.rejection(3) == "x $(touch y)"
    rejects("is not the name of a file", record.reject, "../../job", "")
    for name in ("/", ".", "..", ".launch"):
        rejects("not the name of a run folder", Record, name, S3Config())


def test_of_two_supervisors_one_begins(tmp_path, monkeypatch):
    record = Record(f"{tmp_path}/run", S3Config())
    numbers = {"attempts": {}, "submissions": {}}
    monkeypatch.setattr(record, "numbered", numbers.__getitem__)
    assert record.begin(["n1"], 0) is not None and record.begin(["n1"], 0) is None
