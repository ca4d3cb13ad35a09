"""The meaning of an error text, from the table causes.yaml in this folder; docs/troubleshooting.md is made from it."""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import yaml

CAUSES: list[dict[str, str]] = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text(encoding="utf-8"))
PATTERNS = [re.compile(cause["pattern"], re.IGNORECASE) for cause in CAUSES]
MAX_LINES, MAX_CHARS = 2_000, 1_000  # of a log that are read: its last lines, and the beginning of each
ISSUE = r"[\w.-]+/[\w.-]+#\d+"
INTRODUCTION = """# Troubleshooting

What the commonest errors of PyTorch, NCCL, gloo, Neuron, S3 and Slurm mean, and what helps. The same table explains a
message, or with `-` a log on standard input:

```bash
python -m train.doctor explain "OSError: [Errno 28] No space left on device"
```

This page is generated: it is what `python -m train.doctor causes` prints, from `train/tools/doctor/causes.yaml`.
Messages are quoted from the reports that are named, shortened and with other addresses. The cures of the Trainium rows
were not run on hardware."""


def explain(lines: Iterable[str]) -> list[dict[str, str]]:
    """Return the rows of causes.yaml that explain these lines, in the order of the table; per line the first match."""
    found = set()
    for line in lines:
        text = line[:MAX_CHARS].strip()
        found.add(next((number for number, pattern in enumerate(PATTERNS) if pattern.search(text)), -1))
    return [cause for number, cause in enumerate(CAUSES) if number in found]


def read_log(stream: TextIO) -> Iterable[str]:
    """Return the last lines of a log. A longer line than MAX_CHARS is cut, so that any file fits in memory."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # of other encodings
    return deque(iter(lambda: stream.readline(MAX_CHARS), ""), maxlen=MAX_LINES)


def page() -> str:
    lines = INTRODUCTION.splitlines()
    for about in dict.fromkeys(cause["about"] for cause in CAUSES):
        lines += ["", f"## {about}"]
        for cause in (each for each in CAUSES if each["about"] == about):
            name, source = cause["name"], cause["source"]
            if re.fullmatch(ISSUE, source):
                source = f"[{source}](https://github.com/{source.replace('#', '/issues/')})"
            lines += ["", f"### {name[0].upper()}{name[1:]}", "", "```text", cause["message"], "```", ""]
            lines += [f"- Cause: {cause['cause']}", f"- Cure: {cause['cure']}", f"- Reported in: {source}"]
    return "\n".join(lines) + "\n"
