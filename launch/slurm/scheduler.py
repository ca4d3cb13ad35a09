"""Jobs of Slurm: what is asked of it, and what it says. Within a job launch/slurm/batch.py takes over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch import spec
from launch.config import LaunchConfig
from launch.job import Job
from launch.record import Record
from launch.schedulers import cluster_of
from launch.slurm.client import NoSlurm, Slurm, SlurmJob, check_request, job_name
from launch.slurm.config import SlurmConfig
from launch.spec import Handle, State
from train.config import InputError, check

SCRIPT = Path(__file__).with_name("job.sh")
HINTS = {"JobLaunchFailure": "perhaps its first node does not see the folder of the logs"}
AT_NODES = ("partition", "account", "qos", "constraint", "reservation", "gres", "exclude", "chdir")


class Scheduler(spec.Scheduler):
    def request(self, job: Job, record: Record) -> list[str]:
        return ["sbatch", *options(job, record), str(SCRIPT), *arguments(job, record)]

    def preview(self, job: Job, record: Record, cfg: LaunchConfig) -> str:
        slurm, cluster = Slurm(), cluster_of(job, SlurmConfig)
        try:
            partition = slurm.partition(cluster.partition)
        except NoSlurm as error:
            if cfg.submit:
                raise
            return f"Slurm was not asked: {error}. Not checked: partition, its limits, when the job would start"
        check_request(partition, nodes=job.nodes + job.spares, time_limit=cluster.time_limit)
        return slurm.estimate(options(job, record), SCRIPT, arguments(job, record))

    def submit(self, job: Job, record: Record) -> Handle:
        slurm = Slurm()
        if there := slurm.job_ids(job_name(record.run_dir)):  # of a submission whose answer was lost
            raise InputError(f"Slurm has job {there[0]} of this run, which no record knows: scancel {there[0]} ends it")
        if not record.is_remote:
            (record.local_folder() / "logs").mkdir(parents=True, exist_ok=True)
        number = slurm.submit(options(job, record), SCRIPT, arguments(job, record))
        if job.kind == "train" or job.parts == 1:
            return {"job_id": number}
        waits = [f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes"]
        merge = [*(each for each in options(job, record) if not each.startswith("--array")), *waits]
        try:
            return {"job_id": slurm.submit(merge, SCRIPT, [*arguments(job, record), "--merge"]), "parts_id": number}
        except BaseException:
            slurm.cancel(number)  # or the parts would run with nobody to know of them
            raise

    def state(self, record: Record, handle: Handle) -> State:
        """The state of the first of its jobs that is not over, or that failed: the merge of parts waits for all."""
        for name in ("parts_id", "job_id"):
            jobs = Slurm().tasks(number(handle, name)) if name in handle else []
            if any(not job.is_over for job in jobs):
                return State(True, said(handle, name, jobs), sorted({node for job in jobs for node in job.nodes}))
            if name == "parts_id" and any(job.state != "COMPLETED" for job in jobs):
                jobs = [job for job in jobs if job.state != "COMPLETED"]
                return State(False, said(handle, name, jobs), outcome=outcome(jobs))
        return State(False, said(handle, "job_id", jobs), outcome=outcome(jobs))

    def cancel(self, record: Record, handle: Handle) -> None:
        for name in ("job_id", "parts_id"):
            if name in handle:
                Slurm().cancel(number(handle, name))


def said(handle: Handle, name: str, jobs: Sequence[SlurmJob]) -> str:
    """The jobs of one id in Slurm's terms; of several tasks of an array the one that is furthest from its end."""
    if not jobs:
        return f"job {handle[name]} is not known to Slurm any more"
    job = min(jobs, key=lambda job: job.is_over)
    tasks = f", part {', '.join(str(each.array_task) for each in jobs[:8])}" if name == "parts_id" else ""
    reason = f" ({job.reason}{f', {HINTS[job.reason]}' if job.reason in HINTS else ''})" if job.reason else ""
    return f"job {handle[name]}{tasks} {job.state}{reason}"


def outcome(jobs: Sequence[SlurmJob]) -> str:
    """How Slurm says that a job ended; empty if it has completed, or is not known any more."""
    states = {job.state for job in jobs} - {"COMPLETED"}
    return "cancelled" if "CANCELLED" in states else "failed" if states else ""


def number(handle: Handle, name: str) -> int:
    value = handle.get(name)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"the record names no job of Slurm: {value!r}")
    return value


def options(job: Job, record: Record) -> list[str]:
    """Return the options of sbatch (man sbatch). They are passed as a list: no shell reads them."""
    cluster, name, folder = cluster_of(job, SlurmConfig), job_name(record.run_dir), record.local_folder() / "logs"
    check("\\" not in str(folder), f"{folder}: Slurm drops backslashes from the names of logs; choose another folder")
    # Nodes need not share a folder with this machine if the record is in S3: the job puts its output there at its end.
    # In another name a percent sign begins a pattern (man sbatch, "filename pattern").
    logs = f"/tmp/{name}-%j-" if record.is_remote else f"{str(folder).replace('%', '%%')}/"
    is_array = job.kind == "prepare" and job.parts > 1
    made = [f"--job-name={name}", "--ntasks-per-node=1", "--requeue"]
    made += ["--open-mode=append"]  # or a requeued job would begin with an empty log
    made += [f"--output={logs}{'part_%a' if is_array else 'job'}.txt"]
    if job.kind == "train":
        made += ["--dependency=singleton"]  # two jobs of this name, and so of this run, never run at the same time
        made += [f"--nodes={job.nodes + job.spares}", f"--signal=B:USR1@{cluster.stop_before_s}"]
    else:
        at_once = f"%{job.parts_at_once}" if job.parts_at_once else ""
        made += ["--nodes=1", *([f"--array=1-{job.parts}{at_once}"] if is_array else [])]
    made += [f"--{key}={value}" for key in AT_NODES if (value := getattr(cluster, key)) is not None]
    made += [f"--chdir={job.folder}"] if cluster.chdir is None else []  # a resume comes from another one perhaps
    made += [f"--time={cluster.time_limit}"] if cluster.time_limit is not None else []
    return [*made, *(["--exclusive", "--mem=0"] if cluster.exclusive else [])]


def arguments(job: Job, record: Record) -> list[str]:
    return [job.python, "\n".join(cluster_of(job, SlurmConfig).prologue), record.run_dir, *record.s3.flags()]
