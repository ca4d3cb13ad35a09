"""Slurm as a scheduler: it submits, watches and cancels jobs. Inside a job, launch/slurm/batch.py takes over."""

from __future__ import annotations

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
OUTCOMES = {"COMPLETED": "", "CANCELLED": "cancelled"}  # of jobs that are over; all others failed
STOP_BEFORE_S = 300  # time for a step and a save before the time limit


class Scheduler(spec.Scheduler):
    def request(self, job: Job, record: Record) -> list[str]:
        return ["sbatch", *options(job, record), *script(job, record)]

    def preview(self, job: Job, record: Record, cfg: LaunchConfig, hours: float | None) -> str:
        try:
            return Slurm().estimate([*options(job, record), *script(job, record)])
        except NoSlurm as error:
            if cfg.submit:
                raise
            return f"Slurm was not asked: {error}. Not checked: its partition, its limits, and when the job would start"

    def submit(self, job: Job, record: Record) -> Handle:
        slurm = Slurm()
        asked = options(job, record)
        started = script(job, record)
        there = slurm.job_ids(job_name(job.run_dir))
        if there:  # Slurm's answer to an earlier submission was lost
            raise InputError(
                f"Slurm has job {there[0]} of this run, which is in no record: scancel {there[0]} ends it"
            )
        if not record.is_remote:
            (record.local_folder() / "logs").mkdir(parents=True, exist_ok=True)
        return {"job_id": slurm.submit([*asked, *started])}

    def state(self, record: Record, handle: Handle) -> State:
        job_id = number(handle)
        job = own_job(record, job_id)
        if job is None:
            return State(False, f"Slurm has no job {job_id} of this run")
        text = f"job {job_id} {job.state}"
        if job.reason:
            text += f" ({job.reason})"
        if not job.is_over:
            return State(True, text, list(job.nodes))
        outcome = OUTCOMES.get(job.state, "failed")
        return State(False, text, outcome=outcome)

    def cancel(self, record: Record, handle: Handle) -> None:
        job_id = number(handle)
        if own_job(record, job_id) is not None:
            Slurm().cancel(job_id)


def own_job(record: Record, job_id: int) -> SlurmJob | None:
    """Return the job in a handle if it has the run's name: others may have written the handle."""
    return Slurm().job(job_id, job_name(launched_as(record)))


def number(handle: Handle) -> int:
    found = count(handle, "job_id") or 0
    check(found > 0, f"the record names no Slurm job: {handle.get('job_id')!r}")
    return found


def job_name(run_dir: str) -> str:
    """Return a run's job name. It is unique to the run folder, so that jobs of the same run exclude each other."""
    return f"{safe_name(run_dir)}-{sha256_bytes(run_dir.encode(errors='surrogatepass'))[:8]}"


def options(job: Job, record: Record) -> list[str]:
    """Return the options of sbatch (man sbatch). They are passed as a list: no shell reads them."""
    return [
        f"--job-name={job_name(job.run_dir)}",
        # Two jobs of this name, that is, of this run, never run at the same time.
        "--dependency=singleton",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",  # otherwise a requeued job would begin with an empty log
        f"--output={log_of(record)}",
        f"--chdir={job.folder}",  # the run may be resumed from another folder
        f"--signal=B:USR1@{STOP_BEFORE_S}",
        "--exclusive",
        "--mem=0",
        # If an option is repeated, sbatch takes the last value.
        *cluster_of(job, SlurmConfig).sbatch_args,
    ]


def log_of(record: Record) -> str:
    """Return the value of sbatch's --output."""
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
    return f"{folder.replace('%', '%%')}/job.txt"


def script(job: Job, record: Record) -> list[str]:
    """Return the job's script and its arguments. They are not passed through --export, which splits at commas."""
    return ["--", str(SCRIPT), job.python, record.run_dir, *record.flags()]
