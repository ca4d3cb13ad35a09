"""The code of a job and its record: what is written when it is submitted is what every node reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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


def test_a_bundle_that_was_changed_is_not_unpacked(tmp_path):
    rejects("does not match its checksum", code.unpack, code.pack()[0], "2" * 64, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": "1"},
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
    rejects("has format 1; this version reads 4" if "format" in changes else "job", record.job)


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


@pytest.mark.parametrize(("host", "is_own"), [("n1:1", False), (None, True)])
def test_of_two_supervisors_one_begins_and_a_repeated_request_is_its_own(
    tmp_path, monkeypatch, host, is_own
):
    record = Record(f"{tmp_path}/run", S3Config())
    monkeypatch.setattr("launch.record.now_unix_s", lambda: 1.0)
    create = record.folder.create

    def repeated(name: str, content: bytes) -> bool:
        if host is not None:
            content = json.dumps({**json.loads(content), "host": host}).encode()
        create(name, content)
        return False

    monkeypatch.setattr(record.folder, "create", repeated)
    assert (record.begin(["n1"], 0) is not None) == is_own
