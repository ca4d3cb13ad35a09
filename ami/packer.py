"""Functions that find Packer, check its version, and run it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from train.config import Failure, InputError

LEAST = (1, 10)  # the first version that installs plugins
STOP_S = 900  # time for Packer to remove its resources after a Ctrl-C
HOW_TO = "https://developer.hashicorp.com/packer/install"


def find_packer() -> str:
    """Return the path of a Packer that can build. Raises InputError if Packer or a program that it needs is missing."""
    path, wanted = shutil.which("packer"), f"{LEAST[0]}.{LEAST[1]} or newer: {HOW_TO}"
    if path is None:
        raise InputError(f"packer is not installed: {wanted}")
    if version_of(path) < LEAST:
        raise InputError(f"{path} is too old for plugins, or not HashiCorp's Packer: {wanted}")
    if shutil.which("session-manager-plugin") is None:
        raise InputError(
            "session-manager-plugin is not installed, and Packer cannot reach the builder without it: see "
            "docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
        )
    return path


def version_of(path: str) -> tuple[int, int]:
    """Return the first two numbers of Packer's version; (0, 0) for another program, such as cracklib's packer."""
    done = subprocess.run(
        [path, "version"], capture_output=True, text=True, check=False, timeout=60
    )
    match = re.search(r"Packer v(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def run(command: Sequence[str], folder: Path, *, limit_s: float | None = None) -> None:
    """Run Packer in `folder`. Raises Failure if it fails. After Ctrl-C or the limit, Packer has STOP_S to clean up."""
    # only the code below interrupts Packer
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except BaseException as error:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()  # in case it is still running
            process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            minutes = (limit_s or 0) / 60
            raise Failure(
                f"the build was stopped after {minutes:.0f} minutes; see above where it hung"
            ) from error
        raise
    if code:
        raise Failure(
            f"{' '.join(command[:2])} failed (exit code {code}), see above; no image was made"
        )
