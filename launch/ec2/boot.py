"""User data of a machine: the fixed script boot.sh, and one line with all that varies, as base64 of JSON."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

from launch.job import Job
from launch.record import Record
from train.config import check

SCRIPT = Path(__file__).with_name("boot.sh")
DEAD_S = 1800  # that the node program may be silent, or without an answer of S3, before its machine ends itself
SPARE_S = 1800  # after max_run_s, to save and to upload logs
MOST_BYTES = 16 * 1024  # of user data (EC2 user guide)


def user_data(job: Job, record: Record, *, request: int, max_run_s: int, dead_s: int = DEAD_S) -> bytes:
    """What EC2 passes to each machine of a request, before it is encoded: the same for all, and no secret."""
    check(record.is_remote, f"run_dir={record.run_dir} must be in S3 (s3://...): machines of EC2 share no other folder")
    flags = replace(record.s3, profile=None).flags()  # a machine has its role
    for name, text in {"run_dir": record.run_dir, "cluster.python": job.python, "s3": "".join(flags)}.items():
        check(text.isprintable(), f"{name}={text!r} holds a control character")  # boot.sh reads them as lines
    given = {
        "run": record.run_dir,
        "s3": flags,
        "python": job.python,
        "bundle": job.code.file,
        "bundle_sha256": job.code.sha256,
        "request": request,
        "max_run_s": max_run_s,
        "end_s": max_run_s + SPARE_S,
        "dead_s": dead_s,
    }
    line = base64.b64encode(json.dumps(given, sort_keys=True).encode())
    content = SCRIPT.read_bytes() + b"main " + line + b"\n"
    check(
        len(content) <= MOST_BYTES,
        f"the user data has {len(content):,} bytes, EC2 takes {MOST_BYTES:,}: choose a shorter run_dir",
    )
    return content
