"""Slurm's commands: what is read of their output, whatever stands in it, and what they do on a real cluster."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hostile import quick
from hypothesis import given
from hypothesis import strategies as st
from planning import script
from running import eventually
from services.slurm_cluster import SlurmCluster

from launch.slurm.client import Slurm, job_name, read_jobs
from launch.slurm.config import time_limit_s
from train.config import InputError, Unreachable
from train.storage.schema import BadContent

ARRAY = "3|3_[2-9%2]|PENDING|JobArrayTaskLimit|\n5|3_1|RUNNING|None|n1\n"
TWO = {"n[1-2]": ("n1", "n2"), "n1": ("n1",)}
SLEEP = "exec sleep 600"


# ---- reading -------------------------------------------------------------------------------------------------------


def test_a_job_is_read_from_its_columns():
    (job,) = read_jobs("6|6|RUNNING|None|n[1-2]\n", 6, TWO.__getitem__)
    assert (job.job_id, job.state, job.is_over, job.reason, job.nodes) == (6, "RUNNING", False, "", ("n1", "n2"))
    (job,) = read_jobs("6|6|PENDING|ReqNodeNotAvail, UnavailableNodes:n1|\n", 6, TWO.__getitem__)
    assert (job.reason, job.nodes, job.is_over) == ("ReqNodeNotAvail, UnavailableNodes:n1", (), False)


def test_the_tasks_of_an_array_are_read():
    tasks = read_jobs(ARRAY, 3, TWO.__getitem__)
    assert [(task.job_id, task.array_task, task.state) for task in tasks] == [
        (3, "2-9", "PENDING"),
        (5, "1", "RUNNING"),
    ]


@pytest.mark.parametrize(
    "line", ["7|7|RUNNING|None|n1", "6|6|RUNNING|None", "6|6|run|None|n1", "slurm_load_jobs error"]
)
def test_a_line_that_is_not_of_the_job_is_rejected(line):
    with pytest.raises(BadContent, match="job 6 cannot be read"):
        read_jobs(f"6|6|RUNNING|None|n1\n{line}\n", 6, TWO.__getitem__)


texts = st.one_of(
    st.text(),
    st.builds(lambda at, text: ARRAY[:at] + text + ARRAY[at + 3 :], st.integers(0, len(ARRAY)), st.text(max_size=5)),
)


@quick
@given(texts)
def test_damaged_output_is_rejected_or_read_never_a_traceback(text: str):
    def expand(hosts: str) -> tuple[str, ...]:
        return tuple(hosts.split(","))

    try:
        read_jobs(text, 3, expand)
    except BadContent as error:
        assert "\n" not in str(error)


def test_durations_are_read():
    expected = {"0-00:00:59": 59, "0-01:30:00": 5400, "1-00:00:00": 86400, "05:00": 300, "UNLIMITED": None}
    assert {text: time_limit_s(text) for text in expected} == expected


def test_job_names_say_which_run():
    assert re.fullmatch("_-[0-9a-f]{8}", job_name("/\u2028"))
    assert re.fullmatch("[x_]{55}-[0-9a-f]{8}", job_name("s3://bucket/" + "x " * 60))
    assert re.fullmatch("albert_v1-[0-9a-f]{8}", job_name("s3://bucket/runs/albert v1/"))
    assert job_name("a/run/") == job_name("a/run") != job_name("b/run")


# ---- a machine without Slurm ---------------------------------------------------------------------------------------


def test_a_machine_without_slurm_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="squeue is not on the PATH; start this on a login node"):
        Slurm().tasks(1)


def test_a_command_that_hangs_is_ended(monkeypatch, tmp_path):
    def hang(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout, stderr=b"sbatch: error: please wait\n")

    monkeypatch.setattr(subprocess, "run", hang)
    said = r"does not answer sbatch; it said: please wait; .*whether the job was submitted"
    with pytest.raises(Unreachable, match=said):
        Slurm().submit([], tmp_path / "x")


# ---- a real cluster: jobs are submitted and looked at with Slurm's commands, not with tested code --------------------


def submit(cluster: SlurmCluster, folder: Path, body: str, *options: str) -> int:
    """Submit a script, whose output goes to job-ID.out in the folder."""
    output = f"--output={folder}/job-%j.out"
    return int(cluster.run("sbatch", "--parsable", output, *options, script(folder / "job.sh", body)))


def wait_for_state(cluster: SlurmCluster, job_id: int, state: str) -> None:
    eventually(lambda: f"JobState={state} " in cluster.run("scontrol", "show", "job", str(job_id)))


def job_of(job_id):
    (job,) = Slurm().tasks(job_id)
    return job


def test_the_states_of_jobs(slurm, tmp_path):
    done, failed = submit(slurm, tmp_path, "srun hostname", "-N2"), submit(slurm, tmp_path, "exit 7")
    killed, runs = submit(slurm, tmp_path, "kill -KILL $$"), submit(slurm, tmp_path, SLEEP, "-N2", "--time=5")
    waits = submit(slurm, tmp_path, SLEEP, f"--dependency=afterok:{runs}")
    for job_id, state in ((done, "COMPLETED"), (failed, "FAILED"), (killed, "FAILED"), (runs, "RUNNING")):
        wait_for_state(slurm, job_id, state)
        assert job_of(job_id).state == state
    assert job_of(runs).nodes == ("n1", "n2")
    assert (job_of(waits).state, job_of(waits).reason) == ("PENDING", "Dependency")
    Slurm().cancel(runs)
    wait_for_state(slurm, runs, "CANCELLED")
    assert job_of(runs).is_over
    assert sorted((tmp_path / f"job-{done}.out").read_text().split()) == ["n1", "n2"]


def test_variables_of_the_environment_add_no_options(slurm, tmp_path, monkeypatch):
    for name, value in {"SBATCH_ARRAY_INX": "0-9", "SBATCH_WAIT": "1", "SLURM_TIME_FORMAT": "relative"}.items():
        monkeypatch.setenv(name, value)
    job = job_of(Slurm().submit([], Path(script(tmp_path / "s", SLEEP))))
    assert job.array_task is None


def test_an_estimate_submits_nothing(slurm, tmp_path):
    said = Slurm().estimate(["--nodes=2"], Path(script(tmp_path / "s", "true")))
    assert said.startswith("to start at 20") and "on nodes n[1-2] in partition main" in said
    assert Slurm().job_ids("s") == []
    with pytest.raises(InputError, match="node configuration is not available; `sinfo --Node .* ask for fewer"):
        Slurm().estimate(["--nodes=9"], tmp_path / "s")  # which sbatch would accept, and the job would wait for ever


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition=nosuch"], "invalid partition specified: nosuch; .*`sinfo --summarize` shows"),
        (["--constraint=fast"], "Invalid feature specification; `sinfo --format='%N %f'`"),
        (["--reservation=x"], "Requested reservation is invalid; `scontrol show reservations`"),
        (["--nodelist=n9"], "Invalid node name specified; `sinfo --Node"),
        (["--gres=gpu:1"], "Invalid generic resource .gres. specification; `sinfo --format='%N %G'`"),
        (["--bogus"], "unrecognized option '--bogus'"),
    ],
)
def test_a_rejected_job_says_why_and_what_to_do(slurm, tmp_path, options: list[str], said: str):
    with pytest.raises(InputError, match=said) as rejected:
        Slurm().submit(options, Path(script(tmp_path / "s", "true")))
    assert "\n" not in str(rejected.value)


def test_a_time_limit_with_which_a_job_would_wait_for_ever_is_rejected(slurm):
    Slurm().check_time_limit("1-00:00:00", None)
    Slurm().check_time_limit("9-00:00:00", "urgent")
    for partition in (None, "main"):
        with pytest.raises(InputError, match="time_limit=24:00:01 is more than the 1-00:00:00 of partition main"):
            Slurm().check_time_limit("24:00:01", partition)


def test_a_drained_node_takes_no_jobs(slurm, tmp_path):
    Slurm().drain("n1", "failed\nthe $(health) check")
    shown = slurm.run("scontrol", "show", "node", "n1")
    assert "DRAIN" in shown and "Reason=failed the $(health) check [" in shown
    job_id = submit(slurm, tmp_path, SLEEP, "-N3")
    eventually(lambda: "UnavailableNodes:n1" in job_of(job_id).reason)
    with pytest.raises(BadContent, match="is not the name of a host"):
        Slurm().drain("n1 State=UP", "x")


def test_a_configuration_that_is_not_there_is_named(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    with pytest.raises(InputError, match="no configuration of Slurm .SLURM_CONF=/nowhere/slurm.conf.; start this on"):
        Slurm(timeout_s=3).job_ids("x")


def test_while_slurmctld_is_away_commands_say_so_and_jobs_go_on(slurm, tmp_path):
    job_id = submit(slurm, tmp_path, SLEEP)
    wait_for_state(slurm, job_id, "RUNNING")
    slurm.stop_controller()
    said = "slurmctld does not answer sbatch; it said: .*; `scontrol ping` shows .*; `squeue --me` shows whether"
    with pytest.raises(Unreachable, match=said):
        Slurm().submit([], Path(script(tmp_path / "s", "true")))
    slurm.start_controller()
    assert job_of(job_id).state == "RUNNING"
    slurm.stop_controller()
    slurm.start_controller(forget=True)
    assert Slurm().tasks(job_id) == []
