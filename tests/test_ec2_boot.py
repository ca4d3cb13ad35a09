"""User data: a fixed script and one line, whatever the run is called."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import subprocess

from ec2_launching import OWN, RUN
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import plan
from test_launch_golden import check_golden

from launch.ec2.request import MOST_BYTES, SCRIPT, user_data
from launch.record import Record
from train.config import InputError, S3Config

NASTY = [*"'\"\\;&|*? #!=\u00e9\u2028", "`id`", "$(touch /tmp/x)", "${HOME}"]


def made(run_dir: str, s3: S3Config, python: str = "/opt/baretrain/venv/bin/python") -> bytes:
    _, job = plan(OWN, RUN)
    job = dataclasses.replace(job, run_dir=run_dir, python=python)
    return user_data(job, Record(run_dir, s3), request=3, max_run_s=86400)


def test_user_data_is_what_it_was(tmp_path, monkeypatch):
    (tmp_path / "config").write_text("[profile mine]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    content = made("s3://bucket/runs/mine", S3Config(region="us-east-1", profile="mine"))
    script, line = content[: len(SCRIPT.read_bytes())], content[len(SCRIPT.read_bytes()) :].decode()
    assert script == SCRIPT.read_bytes() and len(content) <= MOST_BYTES
    check_golden("ec2_user_data.txt", line)
    assert json.loads(base64.b64decode(line.split()[1]))["s3"] == ["--region=us-east-1"]  # profiles stay here


@settings(max_examples=12, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=5)), min_size=1).map("".join), st.booleans())
def test_no_name_comes_into_a_shell(name: str, is_python: bool):
    python = f"/opt/{name}/python" if is_python else "/opt/python"
    run_dir = "s3://bucket/runs/mine" if is_python else f"s3://bucket/a{name}/mine"
    try:
        content = made(run_dir, S3Config(endpoint="http://10.0.0.1:9000", path_style=True), python)
    except (InputError, UnicodeEncodeError):
        assert not name.isprintable()
        return
    line = content.removeprefix(SCRIPT.read_bytes()).decode()
    assert re.fullmatch(r"main [A-Za-z0-9+/]+=*\n", line)
    code = f'source "$1"; read_given "{line.split()[1]}"'
    done = subprocess.run(["bash", "-c", code, "bash", str(SCRIPT)], check=True, capture_output=True)
    s3 = ["--endpoint=http://10.0.0.1:9000", "--path-style"]
    assert done.stdout.decode().split("\n") == [python, "88200", "1800", "3", "86400", run_dir, *s3, ""]
