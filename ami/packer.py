"""Packer: found, asked for its version, run, and asked what it made."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ami.config import IMAGE_ID, REGION
from train.config import Failure, InputError

LEAST = (1, 10)  # with which plugins are installed
STOP_S = 900  # for Packer to remove what it made after a Ctrl-C
HOW_TO = "https://developer.hashicorp.com/packer/install"


def find_packer() -> str:
    """Path of a Packer that can build. InputError if there is none, or what it needs is missing."""
    path = shutil.which("packer")
    if path is None:
        raise InputError(f"packer is not installed: {HOW_TO} ({LEAST[0]}.{LEAST[1]} or newer)")
    version = version_of(path)
    if version < LEAST:
        shown = ".".join(map(str, version))
        raise InputError(f"{path} is Packer {shown}, too old for plugins: {HOW_TO} ({LEAST[0]}.{LEAST[1]} or newer)")
    if shutil.which("session-manager-plugin") is None:
        raise InputError(
            "session-manager-plugin is not installed, without which Packer cannot reach the builder: see "
            "docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
        )
    return path


def version_of(path: str) -> tuple[int, int]:
    done = subprocess.run([path, "version"], capture_output=True, text=True, check=False, timeout=60)
    match = re.search(r"Packer v(\d+)\.(\d+)", done.stdout)
    if match is None:
        raise InputError(f"{path} is not HashiCorp's Packer (another program has that name): {HOW_TO}")
    return int(match[1]), int(match[2])


def run(command: Sequence[str], folder: Path, *, limit_s: float | None = None) -> None:
    """Run Packer in `folder`. Ctrl-C, or the end of the time, lets it remove what it made. Failure if it fails."""
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)  # Ctrl-C reaches it once, from here
    try:
        code = process.wait(limit_s)
    except BaseException as error:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if isinstance(error, subprocess.TimeoutExpired):
            minutes = (limit_s or 0) / 60
            raise Failure(f"the build was stopped after {minutes:.0f} minutes; give a larger max_minutes") from error
        raise
    if code:
        raise Failure(f"{' '.join(command[:2])} failed (exit code {code}), see above; no image was made")


def made_images(manifest: Path) -> dict[str, str]:
    """Ids of the images by region, of Packer's manifest. Failure if it holds anything else."""
    try:
        content: Any = json.loads(manifest.read_bytes())
        pairs = [each.split(":") for each in content["builds"][-1]["artifact_id"].split(",")]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Failure(f"Packer's manifest cannot be read ({error}): python -m ami list shows what was made") from error
    for pair in pairs:
        if len(pair) != 2 or not re.fullmatch(REGION, pair[0]) or not re.fullmatch(IMAGE_ID, pair[1]):
            raise Failure(f"Packer's manifest names {pair!r}, no region:image; python -m ami list shows what was made")
    return dict(pairs)
