"""The choice of machines that may train, by each one's doctor, and by collectives over those chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launch.node import PREFLIGHT
from launch.record import Job, Record
from launch.supervise import retry
from train.run.command import printable
from train.system.schema import BadContent, read_object

NO_ANSWER, COLLECTIVES = "no answer", "collectives"  # beginnings of reasons
MAX_CHARS = 300  # of a reason


# Runs a command of launch.node on machines: (command, nodes, *, name, group=0), all of them or groups of that number of
# neighbours; 0 if all succeeded.
Run = Callable[..., int]


def run_preflight(
    record: Record, job: Job, nodes: Sequence[str], run: Run, *, name: str
) -> tuple[list[str], dict[str, str]]:
    """Return the machines to train on, fewer than the job needs if too few are fit; and failed ones, with reasons.

    If collectives fail over the machines chosen, each is tried alone and then in pairs: those that fail are left out,
    and spares take their ranks.
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
    """Return the machines whose collectives fail alone; if none, those of the pairs that fail; if none, all."""
    for group, which in ((1, "alone"), (2, "in pairs")):
        if group < len(nodes):
            attempt = f"{name}_{group}"
            run("collectives", nodes, name=attempt, group=group)
            if failed := failures(record, attempt, nodes):
                return {node: f"{COLLECTIVES} {which}: {reason}" for node, reason in failed.items()}
    return dict.fromkeys(nodes, f"{COLLECTIVES} over {', '.join(nodes)} fail, see logs/{name}"[:MAX_CHARS])


def failures(record: Record, attempt: str, nodes: Sequence[str]) -> dict[str, str]:
    reasons = {node: retry(failure_of, record, PREFLIGHT.format(attempt, node)) for node in nodes}
    return {node: printable(reason)[:MAX_CHARS] for node, reason in reasons.items() if reason}


def failure_of(record: Record, name: str) -> str:
    """Return why the machine with this answer is not fit; "" if it is."""
    try:
        answer = read_object(record.folder.read(name))
    except FileNotFoundError:
        return f"{NO_ANSWER} in {record.location}: the machine does not see that folder, or cannot start train.doctor"
    except BadContent as error:
        return f"its answer cannot be read: {error}"
    if answer.get("ok") is True:
        return ""
    red = [each for each in answer.get("findings", []) if isinstance(each, dict) and each.get("state") == "bad"]
    texts = [f"{each.get('name')}: {each.get('text')} ({each.get('cure')})" for each in red]
    return "; ".join(texts) or str(answer.get("fault") or "train.doctor has no findings")


def too_few(nodes: Sequence[str], failed: Mapping[str, str], job: Job) -> str:
    """Return a message if fewer machines are fit than the job needs."""
    counts = f"{len(nodes) - len(failed)} of {len(nodes)} nodes passed the preflight, {job.nodes} are needed"
    return "; ".join([counts, *(f"{node}: {reason}" for node, reason in failed.items())])


def is_shared(failed: Mapping[str, str], nodes: Sequence[str]) -> bool:
    """Return whether all failed, so that the cause is shared, and other machines would fail too."""
    return 1 < len(failed) == len(nodes)
