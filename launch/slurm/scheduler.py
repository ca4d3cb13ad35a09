"""Jobs of Slurm: what is asked of it, and what it says. Within a job launch/slurm/batch.py takes over."""

from __future__ import annotations

from pathlib import Path

from launch.job import Job
from launch.record import Record
from launch.schedulers import Handle, State, cluster_of
from launch.slurm.commands import Slurm, check_request, job_name
from launch.slurm.config import SlurmConfig, time_limit_s
from launch.slurm.records import Job as SlurmJob
from train.config import InputError, check

SCRIPT = Path(__file__).with_name("job.sh")
AT_NODES = ("partition", "account", "qos", "constraint", "reservation", "gres", "exclude", "chdir")


class Scheduler:
    def request(self, job: Job, record: Record) -> list[str]:
        return ["sbatch", *options(job, record), str(SCRIPT), *arguments(job, record)]

    def preview(self, job: Job, record: Record) -> str:
        slurm, cluster = Slurm(), settings(job)
        partition, others = slurm.partition(cluster.partition), slurm.partitions()
        limit_s = partition.max_time_s if cluster.time_limit is None else time_limit_s(cluster.time_limit)
        check_request(partition, nodes=job.nodes + job.spares, time_limit_s=limit_s, others=others)
        return slurm.estimate(options(job, record), SCRIPT, arguments(job, record))

    def submit(self, job: Job, record: Record) -> Handle:
        (record.local_folder() / "logs").mkdir(parents=True, exist_ok=True)
        number = Slurm().submit(options(job, record), SCRIPT, arguments(job, record))
        if job.kind == "train" or job.parts == 1:
            return {"job_id": number}
        merge = [*(each for each in options(job, record) if not each.startswith("--array")), *after(number)]
        return {"job_id": Slurm().submit(merge, SCRIPT, [*arguments(job, record), "--merge"]), "parts_id": number}

    def state(self, handle: Handle) -> State:
        """The state of the first of its jobs that is not over: the merge of parts waits for all of them."""
        text = ""
        for name in ("parts_id", "job_id"):
            if name in handle:
                job_id = number(handle, name)
                jobs = Slurm().tasks(job_id)
                waiting = next((job for job in jobs if not job.is_over), None)
                shown = waiting or (jobs[-1] if jobs else None)
                text = (
                    f"job {job_id} is not known to Slurm any more" if shown is None else f"job {job_id} {said(shown)}"
                )
                if waiting is not None:
                    return State(True, text, sorted({node for job in jobs for node in job.nodes}))
        return State(False, text)

    def cancel(self, handle: Handle) -> None:
        for name in ("job_id", "parts_id"):
            if name in handle:
                Slurm().cancel(number(handle, name))


def said(job: SlurmJob) -> str:
    code = f", exit code {job.exit_code}" if job.is_over and job.exit_code else ""
    return f"{job.state}{f' ({job.reason})' if job.reason else ''}{code}"


def number(handle: Handle, name: str) -> int:
    value = handle.get(name)
    if not isinstance(value, int) or value < 1:
        raise InputError(f"the record names no job of Slurm: {value!r}")
    return value


def settings(job: Job) -> SlurmConfig:
    cluster = cluster_of(job)
    assert isinstance(cluster, SlurmConfig)
    return cluster


def options(job: Job, record: Record) -> list[str]:
    """The options of sbatch (man sbatch). They are passed as a list: no shell reads them."""
    cluster = settings(job)
    logs = file_pattern(record.local_folder() / "logs")
    name = job_name(record.run_dir)
    given = [f"--{key}={value}" for key in AT_NODES if (value := getattr(cluster, key)) is not None]
    given += [f"--time={cluster.time_limit}"] if cluster.time_limit is not None else []
    given += ["--exclusive", "--mem=0"] if cluster.exclusive else []
    if job.kind == "prepare":
        tasks = [f"--array=1-{job.parts}{at_once(job)}"] if job.parts > 1 else []
        log = f"--output={logs}/part_%a.txt" if tasks else f"--output={logs}/job.txt"
        return [
            f"--job-name={name}",
            "--nodes=1",
            "--ntasks-per-node=1",
            "--requeue",
            "--open-mode=append",
            log,
            *tasks,
            *given,
        ]
    return [
        f"--job-name={name}",
        "--dependency=singleton",  # two jobs of this name, and so of this run, never run at the same time
        f"--nodes={job.nodes + job.spares}",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",  # or a requeued job would begin with an empty log
        f"--output={logs}/job.txt",
        f"--signal=B:USR1@{cluster.stop_before_s}",
        *given,
    ]


def file_pattern(path: Path) -> str:
    """A path as sbatch's --output reads it (man sbatch, "filename pattern")."""
    check("\\" not in str(path), f"{path}: Slurm drops backslashes from the names of logs; choose a folder without one")
    return str(path).replace("%", "%%")


def at_once(job: Job) -> str:
    return f"%{job.parts_at_once}" if job.parts_at_once else ""


def after(number: int) -> list[str]:
    return [f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes"]


def arguments(job: Job, record: Record) -> list[str]:
    return [job.python, record.run_dir, *record.s3.flags()]
