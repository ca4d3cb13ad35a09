"""The code of a job and its record: what is written when it is submitted is what every node reads."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import plan

from launch import code
from launch.record import Job, Record
from train.config import InputError, S3Config
from train.storage.folders import sha256_bytes

ANY = st.text(max_size=40).filter(lambda text: text.isascii() or text.encode(errors="ignore").decode() == text)


def job(**changes):
    return dataclasses.replace(plan(["cluster=local"], ["experiment=demo", "run_dir=runs/mine"])[1], **changes)


def test_the_bundle_runs_the_code_that_was_packed_wherever_the_job_stands(tmp_path):
    content, packed = code.pack()
    assert (content, packed) == code.pack()  # the same files give the same bytes
    top = code.unpack(content, packed.sha256, tmp_path / "cache")
    assert top == code.unpack(content, packed.sha256, tmp_path / "cache")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "train").mkdir(parents=True)
    (elsewhere / "train" / "__init__.py").write_text("raise SystemExit('the code of the working folder')")
    command = [sys.executable, str(top / code.START), "train", "--cfg", "job", "experiment=demo"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "run_dir: runs/demo" in done.stdout
    assert {path.name for path in top.iterdir()} >= {"train", "conf", "launch", code.START}


def archive(name="train/x.py", kind=tarfile.REGTYPE, size=1):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as made:
        entry = tarfile.TarInfo(name)
        entry.type, entry.size, entry.linkname = kind, size, "/etc/passwd"
        made.addfile(entry, io.BytesIO(b"x" * size))
    return packed.getvalue()


@pytest.mark.parametrize(
    "content",
    [archive("../x.py"), archive("/x.py"), archive("train/.x"), archive(kind=tarfile.SYMTYPE, size=0)],
    ids=["outside", "absolute", "hidden", "link"],
)
def test_a_hostile_bundle_leaves_nothing(tmp_path, content):
    with pytest.raises(InputError):
        code.unpack(content, sha256_bytes(content), tmp_path / "cache")
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".py", "passwd", ".x"))]
    with pytest.raises(InputError, match="does not match its checksum"):
        code.unpack(content, "2" * 64, tmp_path)


@settings(deadline=None)  # the first job takes longer
@given(ANY, ANY, st.lists(ANY, max_size=3))
def test_a_job_comes_back_as_it_was(run_dir, python, overrides):
    made = job(run_dir=run_dir, python=python, overrides=overrides, environment={"A": run_dir})
    assert Job.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "changes",
    [
        *({"nodes": "1"}, {"kind": "shell"}, {"overrides": "rm"}, {"id": "../x"}, {"config_sha256": "x"}, {"more": 1}),
        {"format": 2},
    ],
    ids=str,
)
def test_a_damaged_job_is_rejected(tmp_path, changes):
    record = Record(str(tmp_path / "run"), S3Config())
    values = {**json.loads(job().to_json()), **changes}
    record.folder.write("job.json", json.dumps(values).encode())
    with pytest.raises(InputError, match="has format 2, this version reads 1" if "format" in changes else None):
        record.job()


def test_a_record_is_beside_the_run_and_keeps_every_event(tmp_path):
    record = Record(f"{tmp_path}/run/", S3Config())
    assert record.location == f"{tmp_path}/run.launch" == Record(record.location, S3Config()).location
    with pytest.raises(InputError, match="was not launched"):
        record.job()
    for number in range(3):
        record.append_event("gate", number=number, failed={"n1": "x\n$(touch y)"})
    Record(record.run_dir, S3Config()).append_event("ended")
    assert [event.kind for event in record.events()] == ["gate"] * 3 + ["ended"]
    assert record.events()[2].details == {"number": 2, "failed": {"n1": "x\n$(touch y)"}}
    record.folder.write("events/00002.json", b"{}")
    assert [event.kind for event in record.events()] == ["gate", "damaged", "gate", "ended"]
    for name in ("/", ".", "..", ".launch"):
        with pytest.raises(InputError, match="not the name of a run folder"):
            Record(name, S3Config())
