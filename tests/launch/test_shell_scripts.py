"""The scripts of jobs, machines and images, read by shellcheck."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from running import ROOT


@pytest.mark.services
def test_shell_scripts_are_clean(request):
    if shutil.which("shellcheck") is None:
        reason = "no shellcheck to test with: apt-get install shellcheck"
        pytest.fail(reason) if request.config.getoption("--require-services") else pytest.skip(
            reason
        )
    scripts = [path for folder in ("launch", "ami") for path in (ROOT / folder).rglob("*.sh")]
    done = subprocess.run(
        ["shellcheck", "-x", *scripts], capture_output=True, text=True, check=False
    )
    assert len(scripts) > 2 and done.returncode == 0, done.stdout
