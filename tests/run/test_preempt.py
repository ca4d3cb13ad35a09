"""Requests to stop, their sources and reasons, and what must not hurt a run."""

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from forks import launch, start_changed, start_forked
from running import ROOT, eventually, lines, outcome, train_overrides
from services.fake_imds import SPOT, TOKEN, FakeIMDS

from train.config import InputError, Unreachable
from train.machine import metadata
from train.run import stopping
from train.run.stopping import Notices, StopRequest

SPOT_NOTICE = {"action": "terminate", "time": "2026-11-20T08:22:00Z"}


@pytest.fixture(autouse=True)
def polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "POLL_S", 0.02)


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIMDS]:
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"):
        monkeypatch.delenv(name, raising=False)
    with FakeIMDS() as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
        monkeypatch.setattr(metadata, "TIMEOUT_S", 10.0)  # a slow test machine is no fault
        yield service


@pytest.fixture
def warnings(log: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    log.set_level(logging.WARNING, "train")
    return lambda: log.messages


@pytest.fixture
def stop() -> StopRequest:
    return StopRequest()


def watching(
    stop: StopRequest,
    stop_file: Callable[[], bool] = lambda: False,
    max_run_s: float | None = None,
    run_s: float = 0,
) -> Notices:
    cfg = SimpleNamespace(max_run_s=max_run_s)
    return Notices(cfg, stop, stop_file, time.monotonic() - run_s)  # type: ignore[arg-type]


def more_rounds(imds: FakeIMDS) -> None:
    """Until the service was asked for all it has three times more."""
    before = len(imds.seen(SPOT))
    eventually(lambda: len(imds.seen(SPOT)) >= before + 3)


# ---- the request itself --------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that `StopRequest` reads."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(
        stopping, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=time.sleep)
    )
    return clock


@pytest.mark.parametrize("notice", [None, "EC2 spot notice"])
def test_the_second_signal_leaves_at_once_unless_it_is_the_first_one_passed_on(clock, notice):
    """A signal that follows a notice is the first one."""
    with StopRequest() as stop:
        if notice:
            stop.ask(notice)
            clock.now_s += 120
        signal.raise_signal(signal.SIGINT)
        stop.ask("another")
        clock.now_s += stopping.REPEAT_S
        signal.raise_signal(signal.SIGTERM)  # torchrun's, for the same reason
        assert (stop.reason, stop.signal) == (notice or "SIGINT", "SIGINT")
        clock.now_s += 0.1
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(signal.SIGTERM)
        assert left.value.code == 128 + signal.SIGTERM


# ---- EC2's notices -------------------------------------------------------------------------------------------------


def test_a_notice_that_comes_ends_the_run_also_if_the_token_was_forgotten(
    imds, stop, warnings, monkeypatch
):
    """Before it nothing is said, not even in the log."""
    # a link-local address is not for a proxy
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with watching(stop):
        more_rounds(imds)
        assert stop.reason is None
        assert {request.status for request in imds.seen(SPOT)} == {404}
        imds.expire_tokens()
        imds.say(SPOT, SPOT_NOTICE)
        eventually(lambda: stop.reason)
    assert 401 in [request.status for request in imds.seen()]
    assert len(imds.seen(TOKEN, "PUT")) == 2 and warnings() == []


# ---- whether the service is asked ----------------------------------------------------------------------------------


# ---- the file and the ends that are known --------------------------------------------------------------------------


def test_a_run_folder_that_does_not_answer_is_told_once_per_outage(stop, warnings):
    answers = iter(
        [
            OSError("gone"),
            Unreachable("S3 does not answer"),
            False,
            InputError("no such bucket"),
            True,
        ]
    )

    def stop_file() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with watching(stop, stop_file=stop_file):
        eventually(lambda: stop.reason)
    assert stop.reason == "the file STOP in the run folder"
    assert [message.split(";")[0] for message in warnings()] == [
        "stop file: gone",
        "stop file: no such bucket",
    ]


def test_the_run_leaves_before_max_run_s_in_time_to_save(stop):
    notices = watching(stop, max_run_s=7200, run_s=3600)
    notices.look_at_clock()
    assert stop.reason is None
    stop.save_s = 3600
    notices.look_at_clock()
    assert (stop.reason, stop.kind) == ("max_run_s=7200 has passed", "max_run_s")


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_asks_to_stop_unless_nohup_says_otherwise(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == (None if ignored else "SIGHUP")
    finally:
        signal.signal(signal.SIGHUP, before)


STUCK = """
import ctypes
from contextlib import nullcontext, suppress
from train.run import stopping
stopping.REPEAT_S, stopping.GRACE_S = 0.1, 0.1
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with stopping.StopRequest() as stop, {context}:
    while True:
        with suppress(stopping.StoppedEarly):  # raised if the signal comes between two calls
            print("here", flush=True)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # for ever, as a collective whose peer is gone; signals do not interrupt it
"""


def stuck(context: str) -> subprocess.Popen:
    words = [sys.executable, "-c", STUCK.format(context=context)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"here\n"
    return process


def test_a_second_signal_ends_a_process_that_waits_in_a_call():
    """Its main thread runs no handler of Python's."""
    process = stuck("nullcontext()")
    # the first ones are one request
    eventually(lambda: process.terminate() or process.poll() is not None)
    assert process.returncode == 128 + signal.SIGTERM


def test_the_first_signal_ends_a_process_that_waits_in_a_call_and_has_nothing_to_save():
    process = stuck("stop.nothing_to_save()")
    process.terminate()
    try:
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()


IMPORTING = """
import signal, sys

class Finder:
    def find_spec(name, *_):
        if name == "train.loop":
            signal.raise_signal(signal.SIGTERM)

sys.meta_path.insert(0, Finder)
from train.__main__ import main
sys.exit(main())
"""


def test_a_signal_while_torch_is_imported_is_a_request_as_later_ones_are(prepared, tmp_path):
    words = [sys.executable, "-c", IMPORTING, *train_overrides(tmp_path / "run", prepared)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    said = "stopped on SIGTERM before there was anything to save; the same command starts it again"
    assert (ended.returncode, ended.stderr.splitlines()[1:]) == (75, [said]), ended.stderr
    assert not (tmp_path / "run").exists()


def test_sigterm_to_torchrun_stops_all_ranks_with_a_checkpoint(prepared, tmp_path):
    arguments = train_overrides(
        tmp_path / "run",
        prepared,
        "max_steps=100000",
        "max_epochs=null",
        "eval_every=null",
        "data.num_workers=1",
    )
    process = start_forked(launch("train", arguments, ranks=2), os.environ)
    eventually((tmp_path / "run/metrics.jsonl").is_file)
    process.terminate()
    process.join()
    saved = lines(tmp_path / "run", "checkpoint")[-1]["step"]
    ended = outcome(tmp_path / "run")
    assert (ended["kind"], ended["step"], ended["checkpoint"]) == ("SIGTERM", saved, saved)


def test_a_notice_to_one_rank_stops_all_with_a_checkpoint_and_torchrun_starts_none_again(
    imds, tmp_path, prepared
):
    """For torchrun an exit code of 75 is a failure, to be tried again. Until the notice one rank holds the other up."""
    run_dir = tmp_path / "run"
    metrics = run_dir / "metrics.jsonl"
    endless = "max_steps=100000 max_epochs=null eval_every=null checkpoint.every=100000".split()
    arguments = train_overrides(run_dir, prepared, *endless, "export=false")
    slow = "time.sleep(0.05 * int(os.environ['RANK']))"
    process = start_changed(tmp_path, slow, arguments, restarts=3)

    def trains():
        return metrics.exists() and len(lines(run_dir, "train")) > 5

    try:
        eventually(lambda: trains() or not process.is_alive())
        imds.say(SPOT, SPOT_NOTICE)
        process.join(90)
    finally:
        process.terminate()
    stderr = (tmp_path / "err").read_text()
    ended = outcome(run_dir)
    notice = "EC2 spot notice: terminate at 2026-11-20T08:22:00Z"
    assert (ended["outcome"], ended["kind"], ended["goes_on"]) == ("stopped", "spot_notice", True)
    assert ended["reason"] == f"{notice}, at rank 0 on {platform.node()}"
    assert ended["checkpoint"] == ended["step"] == lines(run_dir, "checkpoint")[-1]["step"], stderr
    assert len(imds.seen(TOKEN, "PUT")) == 1  # one process of a machine asks
    for said in (
        "torchrun reports exit code 75 as a failure, but the run only stopped as requested",
        "not started again: outcome stopped",
    ):
        assert stderr.count(said) == 1
    assert json.loads((run_dir / "lease/00000001.json").read_text())["released"]
    assert all(line["slowest_ratio"] >= 1 for line in lines(run_dir, "train"))
