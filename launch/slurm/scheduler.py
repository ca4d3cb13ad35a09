"""Slurm as a scheduler: it submits, watches and cancels jobs. Inside a job, launch/slurm/batch.py takes over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch import spec
from launch.config import LaunchConfig
from launch.launched import launched_as
from launch.plan import safe_name
from launch.record import Job, Record
from launch.schedulers import cluster_of
from launch.slurm.client import NoSlurm, Slurm, SlurmJob
from launch.slurm.config import SlurmConfig
from launch.spec import Handle, State
from launch.values import count
from train.config import InputError, check
from train.storage.folders import sha256_bytes

SCRIPT = Path(__file__).with_name("job.sh")


class Scheduler(spec.Scheduler):
    def request(self, job: Job, record: Record) -> list[str]:
        return ["sbatch", *options(job, record), *script(job, record)]

    def preview(self, job: Job, record: Record, cfg: LaunchConfig, hours: float | None) -> str:
        try:
            return Slurm().estimate([*options(job, record), *script(job, record)])
        except NoSlurm as error:
            if cfg.submit:
                raise
            return f"Slurm was not asked: {error}. Not checked: the partition, its limits, and when the job would start"

    def submit(self, job: Job, record: Record) -> Handle:
        slurm = Slurm()
        asked, started = options(job, record), script(job, record)
        there = slurm.job_ids(job_name(job.run_dir))
        if there:  # Slurm's answer to an earlier submission was lost
            raise InputError(
                f"Slurm has job {there[0]} of this run, which is in no record: scancel {there[0]} ends it"
            )
        if not record.is_remote:
            (record.local_folder() / "logs").mkdir(parents=True, exist_ok=True)
        job_id = slurm.submit([*asked, *started])
        if job.kind == "train" or job.parts == 1:
            return {"job_id": job_id}
        merge = [each for each in asked if not each.startswith("--array")]
        merge += [f"--dependency=afterok:{job_id}", "--kill-on-invalid-dep=yes"]
        try:
            merge_id = slurm.submit([*merge, *started, "--merge"])
        except BaseException:
            slurm.cancel(job_id)  # otherwise the parts would run without a record
            raise
        return {"job_id": merge_id, "parts_id": job_id}

    def state(self, record: Record, handle: Handle) -> State:
        # The parts run before their merge, so the first of these jobs that is active or has failed decides.
        state = State(False, "Slurm has no job of this run")
        for name in ("parts_id", "job_id"):
            if name not in handle:
                continue
            jobs = own_jobs(record, handle, name)
            state = state_of(jobs, said(handle, name, jobs))
            if state.is_active or state.outcome:
                break
        return state

    def cancel(self, record: Record, handle: Handle) -> None:
        for name in ("job_id", "parts_id"):
            if name in handle and own_jobs(record, handle, name):
                Slurm().cancel(number(handle, name))


def own_jobs(record: Record, handle: Handle, name: str) -> list[SlurmJob]:
    """Return the tasks of a job in a handle that has the run's name: others may have written the handle."""
    return Slurm().tasks(number(handle, name), job_name(launched_as(record)))


def state_of(jobs: Sequence[SlurmJob], text: str) -> State:
    """Return the state of a job from all of its tasks."""
    if any(not job.is_over for job in jobs):
        return State(True, text, sorted({node for job in jobs for node in job.nodes}))
    failures = {job.state for job in jobs} - {"COMPLETED"}
    if "CANCELLED" in failures:
        return State(False, text, outcome="cancelled")
    return State(False, text, outcome="failed" if failures else "")


def said(handle: Handle, name: str, jobs: Sequence[SlurmJob]) -> str:
    """Return the state of a job in Slurm's terms; for an array, the state of the task that has progressed least."""
    if not jobs:
        return f"Slurm has no job {handle[name]} of this run"
    job = min(jobs, key=lambda job: (job.is_over, job.state == "COMPLETED"))
    text = f"job {handle[name]} {job.state}"
    if name == "parts_id" and job.array_task is not None:
        text = f"job {handle[name]}, part {job.array_task} {job.state}"
    if job.reason:
        return f"{text} ({job.reason})"
    return text


def number(handle: Handle, name: str) -> int:
    found = count(handle, name) or 0
    check(found > 0, f"the record names no Slurm job: {handle.get(name)!r}")
    return found


def job_name(run_dir: str) -> str:
    """Return a run's job name. It is unique to the run folder, so that jobs of the same run exclude each other."""
    return f"{safe_name(run_dir)}-{sha256_bytes(run_dir.encode(errors='surrogatepass'))[:8]}"


def options(job: Job, record: Record) -> list[str]:
    """Return the options of sbatch (man sbatch). They are passed as a list: no shell reads them."""
    cluster = cluster_of(job, SlurmConfig)
    is_array = job.kind == "prepare" and job.parts > 1
    made = [
        f"--job-name={job_name(job.run_dir)}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",  # otherwise a requeued job would begin with an empty log
        f"--output={log_of(record, 'part_%a' if is_array else 'job')}",
    ]
    if job.kind == "train":
        # Two jobs of this name, that is, of this run, never run at the same time.
        made.append("--dependency=singleton")
        made += [f"--nodes={job.nodes}", f"--signal=B:USR1@{cluster.stop_before_s}"]
    else:
        made.append("--nodes=1")
    if is_array:
        made.append(f"--array=1-{job.parts}")
    if cluster.partition is not None:
        made.append(f"--partition={cluster.partition}")
    made.append(f"--chdir={job.folder}")  # the run may be resumed from another folder
    if cluster.time_limit is not None:
        made.append(f"--time={cluster.time_limit}")
    if cluster.exclusive:
        made += ["--exclusive", "--mem=0"]
    return [*made, *cluster.sbatch_args]  # if an option is repeated, sbatch takes the last value


def log_of(record: Record, name: str) -> str:
    """Return the value of sbatch's --output for the log with this name, which may contain a pattern of Slurm."""
    if record.is_remote:
        # Nodes might share no folder with this machine. job.sh writes the output to a private folder on the node, and
        # the job uploads the output when it ends.
        return "/dev/null"
    folder = str(record.local_folder() / "logs")
    check(
        "\\" not in folder,
        f"{folder}: Slurm drops backslashes from the names of logs; choose another folder",
    )
    # A percent sign begins a pattern (man sbatch, "filename pattern").
    return f"{folder.replace('%', '%%')}/{name}.txt"


def script(job: Job, record: Record) -> list[str]:
    """Return the job's script and its arguments. They are not passed through --export, which splits at commas."""
    prologue = "\n".join(cluster_of(job, SlurmConfig).prologue)
    return ["--", str(SCRIPT), job.python, prologue, record.run_dir, *record.flags()]
