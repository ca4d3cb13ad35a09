"""Slurm's commands: what is read of their output, whatever stands in it, and what they say on a real cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hostile import quick
from hypothesis import given
from hypothesis import strategies as st
from planning import script
from rejections import rejects
from running import eventually

from launch.slurm.client import Slurm, SlurmJob, read_job
from train.config import Failure, Unreachable
from train.storage.schema import BadContent

JOB = "6|RUNNING|None|n1,n2\n"
SLEEP = "exec sleep 600"

# ---- reading -------------------------------------------------------------------------------------------------------


def expand(hosts: str) -> tuple[str, ...]:
    return tuple(hosts.split(","))


def test_the_line_of_a_job_is_read():
    assert read_job(JOB, 6, expand) == SlurmJob("RUNNING", "", ("n1", "n2"))
    waiting = read_job("6|PENDING|Resources|\n", 6, expand)
    assert waiting == SlurmJob("PENDING", "Resources", ())


@pytest.mark.parametrize(
    "text",
    [f"{JOB}{JOB}", "7|RUNNING|None|n1\n", "6|RUNNING|None\n", "6|run|None|n1\n", "error\n"],
)
def test_a_line_that_is_not_of_the_job_is_rejected(text):
    rejects("job 6 cannot be read", read_job, text, 6, expand, error=BadContent)


texts = st.one_of(
    st.text(),
    st.builds(
        lambda at, text: JOB[:at] + text + JOB[at + 3 :],
        st.integers(0, len(JOB)),
        st.text(max_size=5),
    ),
)


@quick
@given(texts)
def test_damaged_output_is_rejected_or_read_never_a_traceback(text: str):
    try:
        read_job(text, 6, expand)
    except BadContent as error:
        assert "\n" not in str(error)


def test_a_command_that_hangs_is_ended(monkeypatch):
    def hang(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout, stderr=b"sbatch: error: please wait\n")

    monkeypatch.setattr(subprocess, "run", hang)
    said = r"does not answer sbatch; it said: please wait; .*whether the job was submitted"
    rejects(said, Slurm().submit, [], error=Unreachable)


@pytest.mark.parametrize(
    ("printed", "found"),
    [("Welcome to site X\n\n12;main\n", 12), ("12\nYour budget: 3 h\n", None), ("", None)],
)
def test_the_id_of_a_job_is_found_among_what_a_site_prints(monkeypatch, printed, found):
    monkeypatch.setattr(Slurm, "run", lambda *_: (0, printed, ""))
    if found is None:
        rejects("does not end in a job id", Slurm().submit, [], error=Failure)
    else:
        assert Slurm().submit([]) == found


# ---- a real cluster ------------------------------------------------------------------------------------------------


def sleeps(folder: Path, *options: str) -> int:
    return Slurm().submit([*options, "--", script(folder / "job.sh", SLEEP)])


def job_of(job_id):
    assert Slurm().job(job_id, "another") is None  # a forged handle
    return Slurm().job(job_id, "job.sh")


def test_variables_of_the_environment_add_no_options(slurm, tmp_path, monkeypatch):
    for name, value in {
        "SBATCH_ARRAY_INX": "0-9",
        "SBATCH_WAIT": "1",
        "SLURM_TIME_FORMAT": "relative",
    }.items():
        monkeypatch.setenv(name, value)
    assert job_of(sleeps(tmp_path)).state in ("PENDING", "RUNNING")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--partition=nosuch"],
            "invalid partition specified: nosuch; .*`sinfo --summarize` shows",
        ),
        (["--nodelist=n9"], "Invalid node name specified; .*`sinfo --Node"),
        (["--bogus"], "unrecognized option '--bogus'"),
    ],
)
def test_a_rejected_job_says_why_and_what_to_do(slurm, tmp_path, options: list[str], said: str):
    rejects(said, sleeps, tmp_path, *options)


def test_a_configuration_that_is_not_there_is_named(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    monkeypatch.setattr("launch.slurm.client.COMMAND_S", 3)
    rejects("no Slurm configuration: .*/nowhere/slurm.conf.*; start this on", Slurm().job_ids, "x")


def test_while_slurmctld_is_away_commands_say_so_and_jobs_go_on(slurm, tmp_path):
    job_id = sleeps(tmp_path, "-N2")
    eventually(lambda: job_of(job_id).nodes == ("n1", "n2"))
    slurm.stop_controller()
    said = "slurmctld does not answer sbatch; it said: .*; `scontrol ping` shows .*; `squeue --me` shows whether"
    rejects(said, sleeps, tmp_path, error=Unreachable)
    slurm.start_controller()
    assert job_of(job_id).state == "RUNNING"
    slurm.stop_controller()
    slurm.start_controller(forget=True)
    assert Slurm().job(job_id, "job.sh") is None
