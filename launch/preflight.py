"""The preflight: it tests each machine with train.doctor, chooses those to train on, and runs collectives over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launch.node import PREFLIGHT
from launch.record import Job, Record
from launch.supervise import retry
from train.run.command import printable
from train.system.schema import BadContent, read_object

MAX_CHARS = 300  # length of a reason

# A function (command, nodes, *, name, group=0) that runs a command of launch.node on machines and returns 0 if all of
# them succeed. All machines join together or, with `group`, that number of neighbours at a time.
Run = Callable[..., int]


def run_preflight(
    record: Record, job: Job, nodes: Sequence[str], run: Run, *, name: str
) -> tuple[list[str], dict[str, str]]:
    """Return the machines to train on, and a dict with the reason for each machine that failed.

    If too few machines are fit, fewer than the job needs are returned. If collectives over the chosen machines fail,
    the machines are tested alone and then in pairs. Those that fail are left out, and spares take their ranks.
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
    """Return the machines whose collectives fail alone, else the machines of failing pairs, else all machines."""
    for group, which in ((1, "alone"), (2, "in pairs")):
        if group < len(nodes):
            attempt = f"{name}_{group}"
            run("collectives", nodes, name=attempt, group=group)
            if failed := failures(record, attempt, nodes):
                return {node: f"collectives {which}: {reason}" for node, reason in failed.items()}
    return dict.fromkeys(nodes, f"collectives over {', '.join(nodes)} fail, see logs/{name}"[:MAX_CHARS])


def failures(record: Record, attempt: str, nodes: Sequence[str]) -> dict[str, str]:
    reasons = {node: retry(failure_of, record, PREFLIGHT.format(attempt, node)) for node in nodes}
    return {node: printable(reason)[:MAX_CHARS] for node, reason in reasons.items() if reason}


def failure_of(record: Record, name: str) -> str:
    """Return why the machine that wrote this answer is not fit; "" if it is fit."""
    try:
        answer = read_object(record.folder.read(name))
    except FileNotFoundError:
        return f"no answer in {record.location}: the machine does not see that folder, or cannot start train.doctor"
    except BadContent as error:  # the doctor's output, which other programs may write to, too
        return f"its answer cannot be read: {error}"
    if answer.get("ok") is True:
        return ""
    red = [each for each in answer.get("findings", []) if isinstance(each, dict) and each.get("state") == "bad"]
    texts = [f"{each.get('name')}: {each.get('text')} ({each.get('cure')})" for each in red]
    return "; ".join(texts) or str(answer.get("fault") or "train.doctor has no findings")


def too_few(nodes: Sequence[str], failed: Mapping[str, str], job: Job) -> str:
    """Return the message for too few fit machines."""
    counts = f"{len(nodes) - len(failed)} of {len(nodes)} nodes passed the preflight, but {job.nodes} are needed"
    return "; ".join([counts, *(f"{node}: {reason}" for node, reason in failed.items())])


def is_shared(failed: Mapping[str, str], nodes: Sequence[str]) -> bool:
    """Return whether all of several machines failed. The cause is then shared, and other machines would fail, too."""
    return 1 < len(failed) == len(nodes)
