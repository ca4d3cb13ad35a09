"""The preflight: the doctor on each machine, then collectives over all of them. It names the machines that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launch.node import PREFLIGHT
from launch.record import Job, Record
from launch.supervise import retry
from train.run.command import printable
from train.storage.schema import BadContent, read_object

MAX_CHARS = 300  # maximum length of a reason

# A function (command, name) that runs a command of launch.node on all machines of the job at the same time, and returns
# 0 if all of them succeed. `name` is that of the step, for logs and answers.
Run = Callable[[str, str], int]


def run_preflight(record: Record, job: Job, nodes: Sequence[str], run: Run, *, name: str) -> str:
    """Return why the machines cannot train; "" if they can."""
    run("preflight", name)
    failed = []
    for node in nodes:
        reason = retry(failure_of, record, PREFLIGHT.format(name, node))
        if reason:
            failed.append(f"{node}: {printable(reason)[:MAX_CHARS]}")
    if failed:
        count = f"{len(failed)} of {len(nodes)} machines failed the preflight"
        return "; ".join([count, *failed])
    is_alone = len(nodes) * job.processes_per_node == 1
    if not is_alone and run("collectives", name) != 0:
        return f"collectives over {', '.join(nodes)} fail: see {record.location}/logs/{name}"
    return ""


def failure_of(record: Record, name: str) -> str:
    """Return why the machine that wrote this answer failed the preflight; "" if it passed."""
    try:
        answer = read_object(record.folder.read(name))
    except FileNotFoundError:
        return f"no answer in {record.location}: the machine cannot access that folder or start baretrain doctor"
    except BadContent as error:  # other programs may have written to the doctor's output
        return f"its answer cannot be read: {error}"
    if answer.get("ok") is True:
        return ""
    texts = []
    for finding in answer.get("findings", []):
        if isinstance(finding, dict) and finding.get("state") == "bad":
            texts.append(f"{finding.get('name')}: {finding.get('text')} ({finding.get('cure')})")
    return "; ".join(texts) or str(answer.get("fault") or "baretrain doctor reported no findings")
