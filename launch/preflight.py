"""The preflight: run baretrain doctor on each machine, choose machines to train on, and run collectives over these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launch.node import PREFLIGHT
from launch.record import Job, Record
from launch.supervise import retry
from train.run.command import printable
from train.storage.schema import BadContent, read_object

MAX_CHARS = 300  # maximum length of a reason

# A function (command, nodes, *, name, group=0) that runs a command of launch.node on machines and returns 0 if all of
# them succeed. The machines join as one group or, if `group` is not 0, in groups of that many neighbours.
Run = Callable[..., int]


def run_preflight(
    record: Record, job: Job, nodes: Sequence[str], run: Run, *, name: str
) -> tuple[list[str], dict[str, str]]:
    """Return the machines to train on and, for each machine that failed, the reason.

    If too few machines pass, fewer machines are returned than the job needs. If collectives over the chosen machines
    fail, they are tried on each machine alone, and then on pairs. Spares replace the machines that fail.
    """
    run("preflight", nodes, name=name)
    failed = failures(record, name, nodes)
    while True:
        passed = [node for node in nodes if node not in failed]
        chosen = passed[: job.nodes]
        if len(chosen) < job.nodes or job.nodes * job.processes_per_node == 1:
            break
        attempt = f"{name}_{len(passed)}"
        if run("collectives", chosen, name=attempt) == 0:
            break
        failed |= suspects(record, chosen, run, name=attempt)
    retry(record.append_event, "gate", passed=chosen, failed=failed)
    return chosen, failed


def suspects(record: Record, nodes: Sequence[str], run: Run, *, name: str) -> dict[str, str]:
    """Return the machines whose collectives fail alone; if there are none, those of failing pairs; else all of them."""
    for group, which in ((1, "alone"), (2, "in pairs")):
        if group < len(nodes):
            attempt = f"{name}_{group}"
            run("collectives", nodes, name=attempt, group=group)
            if failed := failures(record, attempt, nodes):
                return {node: f"collectives {which}: {reason}" for node, reason in failed.items()}
    return dict.fromkeys(
        nodes, f"collectives over {', '.join(nodes)} fail, see logs/{name}"[:MAX_CHARS]
    )


def failures(record: Record, attempt: str, nodes: Sequence[str]) -> dict[str, str]:
    reasons = {node: retry(failure_of, record, PREFLIGHT.format(attempt, node)) for node in nodes}
    return {node: printable(reason)[:MAX_CHARS] for node, reason in reasons.items() if reason}


def failure_of(record: Record, name: str) -> str:
    """Return why the machine that wrote this answer failed the preflight; "" if it passed."""
    try:
        answer = read_object(record.folder.read(name))
    except FileNotFoundError:
        return f"no answer in {record.location}: the machine cannot access that folder, or cannot start the doctor"
    except BadContent as error:  # other programs may have written to the doctor's output
        return f"its answer cannot be read: {error}"
    if answer.get("ok") is True:
        return ""
    red = [
        each
        for each in answer.get("findings", [])
        if isinstance(each, dict) and each.get("state") == "bad"
    ]
    texts = [f"{each.get('name')}: {each.get('text')} ({each.get('cure')})" for each in red]
    return "; ".join(texts) or str(answer.get("fault") or "baretrain doctor reported no findings")


def too_few(nodes: Sequence[str], failed: Mapping[str, str], job: Job) -> str:
    """Return the message that too few machines passed the preflight."""
    counts = f"{len(nodes) - len(failed)} of {len(nodes)} nodes passed the preflight, but {job.nodes} are needed"
    return "; ".join([counts, *(f"{node}: {reason}" for node, reason in failed.items())])


def is_shared(failed: Mapping[str, str], nodes: Sequence[str]) -> bool:
    """Return whether all of several machines failed: their common cause would make other machines fail, too."""
    return 1 < len(failed) == len(nodes)
