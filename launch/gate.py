"""Which machines may train: what each one's doctor has written into the record."""

from __future__ import annotations

from collections.abc import Sequence

from launch.node import GATE
from launch.record import Record
from train.cli.command import printable
from train.storage.folders import wait_for_file
from train.storage.untrusted import BadContent, read_object

NO_ANSWER = "no answer"
SHOWN = 300  # characters of a reason


def answers(record: Record, attempt: str, nodes: Sequence[str]) -> dict[str, str]:
    """The machines that failed, each with the reason."""
    reasons = {node: reason_of(record, GATE.format(attempt, node)) for node in nodes}
    return {node: printable(reason)[:SHOWN] for node, reason in reasons.items() if reason}


def reason_of(record: Record, name: str) -> str:
    try:
        content = wait_for_file(record.folder, name, record.folder.read)
    except FileNotFoundError:
        return f"{NO_ANSWER} in {record.location}: the machine does not see that folder, or cannot start train.doctor"
    try:
        answer = read_object(content)
    except BadContent as error:
        return f"its answer cannot be read: {error}"
    if answer.get("ok") is True:
        return ""
    red = [each for each in answer.get("findings", []) if isinstance(each, dict) and each.get("state") == "bad"]
    texts = [f"{each.get('name')}: {each.get('text')} ({each.get('cure')})" for each in red]
    return "; ".join(texts) or str(answer.get("fault") or "train.doctor has no findings")
