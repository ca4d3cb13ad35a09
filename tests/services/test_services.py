"""The S3 server and the proxy themselves: a fault that does not happen would let every test of it pass."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import eventually
from services.fault_proxy import Fault

from train.machine.processes import ENDED_STATES, read_process

CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def get(bucket):
    """What a plain client gets for the object `a`; an exception if the connection breaks."""
    bucket.put("a", CONTENT)
    client = bucket.service.client(endpoint=bucket.service.endpoint, tries=1)
    return lambda: client.get_object(Bucket=bucket.name, Key="a")["Body"].read()


def test_faults_do_what_they_say_and_nothing_else_does(bucket, get):
    assert get() == CONTENT
    (seen,) = bucket.proxy.requests()
    assert (seen.method, seen.path, seen.status, seen.fault) == (
        "GET",
        f"/{bucket.name}/a",
        200,
        None,
    )
    assert bucket.proxy.requests("HEAD") == []

    bucket.proxy.set(Fault("flip", after=700_000))
    got = get()
    assert [at for at in range(len(CONTENT)) if got[at] != CONTENT[at]] == [700_000] and len(
        got
    ) == len(CONTENT)

    bucket.proxy.set(Fault("reset", after=300_000))
    with pytest.raises(Exception, match="reset by peer"):
        get()

    for fault in (Fault("delay", seconds=0.5), Fault("stall", after=1000, seconds=0.5)):
        bucket.proxy.set(fault)
        began_s = time.monotonic()
        assert get() == CONTENT and time.monotonic() - began_s > 0.4, fault


def test_skip_times_match_and_share_choose_the_requests(bucket, get):
    bucket.proxy.set(
        Fault("flip", match="^GET .*/a$", skip=1, times=2), Fault("flip", match="^GET", skip=3)
    )
    assert [get() == CONTENT for _ in range(5)] == [True, False, False, True, True]
    bucket.proxy.set(Fault("flip", match="^GET .*/other"))
    assert get() == CONTENT

    def draw(seed):
        bucket.proxy.set(Fault("flip", share=0.3, seed=seed))
        return [get() == CONTENT for _ in range(20)]

    assert {True, False} == {*draw(1)} and draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("do", ["flip", "status", "reset", "lose"])
def test_a_rule_for_one_request_acts_on_the_first_and_on_no_other(bucket, get, do):
    def comes_whole():
        try:
            return get() == CONTENT
        except Exception:
            return False

    bucket.proxy.set(Fault(do, times=1))
    assert [comes_whole() for _ in range(3)] == [False, True, True]
    assert [request.fault for request in bucket.proxy.requests()] == [do, None, None]


def test_a_process_does_not_outlive_the_tests(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from services.process import Process\n"
        "print(Process(['sleep', '600'], log=Path(sys.argv[1])).shell.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "log")]
    done = subprocess.run(
        words, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    eventually(
        lambda: (seen := read_process(int(done.stdout))) is None or seen.state in ENDED_STATES, 30
    )
