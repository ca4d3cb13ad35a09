"""One job owns a run folder, on disk and in S3: which is rejected, waits or takes over, and how the owner learns it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
from rejections import rejects
from running import eventually
from services.fault_proxy import Fault

from train.config import InputError, S3Config
from train.machine import processes
from train.run_folder import ownership
from train.run_folder.ownership import Lease, LeaseLost, Ownership, lease_name
from train.storage.folders import LocalFolder, canonical_json, open_folder

DISK_AND_S3 = pytest.mark.parametrize("kind", ["disk", "s3"])
S3 = pytest.mark.parametrize("kind", ["s3"])
LONG_S = 6000.0  # a test that waits for this has failed
ELSEWHERE = {"host": "node-2", "boot_id": "another boot"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch, pauses):
    for name in (
        "SLURM_JOB_ID",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kind():
    """Where the folder is, if a test does not say otherwise: what a lease asks of it is the same in S3."""
    return "disk"


@pytest.fixture
def folder(request, kind, tmp_path):
    if kind == "disk":
        return open_folder(str(tmp_path / "run"), S3Config())
    return request.getfixturevalue("bucket").folder()


@pytest.fixture
def new(folder):
    """Makes leases of the folder, whose threads end with the test. Waiting is a failure unless the test allows it."""
    made = []

    def make(ttl_s=LONG_S, *, on_wait=pytest.fail, of=folder):
        made.append(Ownership(of, ttl_s, on_wait=on_wait))
        return made[-1]

    yield make
    for each in made:
        fall_silent(each)


def fall_silent(owner):
    """As if its process hung or its machine were cut off."""
    owner.stop.set()
    if owner.thread.ident is not None:
        owner.thread.join()


@pytest.fixture(scope="module")
def dead_process():
    """Process id and start of one that has ended, and is still in the table of processes."""
    process = subprocess.Popen(["sleep", "1000"])
    started = processes.read_process(process.pid).started
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield {"pid": process.pid, "process_start": started}
    process.wait()


@pytest.fixture
def watch(monkeypatch):
    """The pauses of a job that watches an owner, which take no time: `meanwhile` is called instead."""
    watch = SimpleNamespace(pauses_s=[], meanwhile=lambda: None)

    def sleep(pause_s):
        watch.pauses_s.append(pause_s)
        watch.meanwhile()

    monkeypatch.setattr(ownership, "time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    return watch


@pytest.fixture
def as_another(monkeypatch):
    """Makes the calls from now on those of another process, which differs in these."""
    real = ownership.own_lease
    return lambda **changes: monkeypatch.setattr(
        ownership, "own_lease", lambda ttl_s: replace(real(ttl_s), **changes)
    )


def here():
    """The machine of this process, as a lease names it."""
    own = ownership.own_lease(LONG_S)
    return {name: getattr(own, name) for name in (*ELSEWHERE, "pid_namespace")}


def left(**changes):
    """The lease of a job on another machine that has not released it."""
    changes = {**ELSEWHERE, "owner": "x", "started": "Monday", **changes}
    return asdict(replace(ownership.own_lease(0.5), heartbeats=3, step=40, **changes))


def leave(folder, number=1, **changes):
    folder.write(lease_name(number), canonical_json(left(**changes)))


def kept(folder, number):
    return json.loads(folder.read(lease_name(number)))


# ---- taking, keeping, releasing -------------------------------------------------------------------------------------


@DISK_AND_S3
def test_the_first_job_takes_the_folder_and_says_which_it_is(folder, new, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    owner = new()
    owner.take()
    assert (owner.number, owner.previous, owner.lost) == (1, None, None)
    owner.check()
    assert folder.names() == ["lease/00000001.json"]
    claim = kept(folder, 1)
    assert (claim["pid"], claim["job"], claim["heartbeats"], claim["released"]) == (
        os.getpid(),
        "4711",
        0,
        False,
    )


@DISK_AND_S3
def test_a_released_folder_is_taken_at_once_with_a_higher_number(folder, new):
    for number in (1, 2, 3, 4):
        owner = new()
        with owner:
            assert owner.number == number
            owner.step = 10 * number
            owner.check()
        assert kept(folder, number)["released"]
        previous = owner.previous and (owner.previous.step, owner.previous.released)
        assert previous == ((10 * (number - 1), True) if number > 1 else None)
    assert folder.names() == ["lease/00000003.json", "lease/00000004.json"]


# ---- owners on this machine -----------------------------------------------------------------------------------------


def test_the_owner_on_this_machine_is_named(folder, new, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    owner = new()
    owner.take()
    with pytest.raises(InputError) as raised:
        new(60.0).take()
    who = f"job 4711, process {os.getpid()} on {os.uname().nodename}, since {owner.claim.started}"
    for words in (f"run_dir={folder.location} is in use by {who}; stop it", "lease.ttl_s=60 "):
        assert words in str(raised.value)
    assert folder.names() == ["lease/00000001.json"]
    owner.check()


@pytest.mark.parametrize(
    "is_another", [False, True], ids=["dead", "another process got its number"]
)
def test_a_dead_owner_on_this_machine_is_followed_at_once(folder, new, dead_process, is_another):
    another = {"pid": os.getpid(), "process_start": ownership.own_lease(1).process_start - 1}
    leave(folder, **here(), **(another if is_another else dead_process))
    owner = new()
    owner.take()
    assert (owner.number, owner.previous.step, owner.previous.released) == (2, 40, False)


@pytest.mark.parametrize(
    "change", [{"pid_namespace": "pid:[1]"}, {"host": "node-2"}, {"boot_id": None}], ids=str
)
def test_an_owner_that_cannot_be_seen_and_beats_is_not_disturbed(
    folder, new, as_another, dead_process, watch, change
):
    """It has no process here. The same must hold where neither side knows its machine."""
    as_another(**dead_process, **change)
    owner = new()
    owner.take()
    if change != {"boot_id": None}:
        as_another()
    # at the last look
    watch.meanwhile = lambda: owner.heartbeat() if len(watch.pauses_s) == ownership.LOOKS else None
    lines = []
    rejects("is in use by process .* on .*, since ", new(3.0, on_wait=lines.append).take)
    (line,) = lines
    assert (
        f"{folder.location} was last used by process" in line
        and f"up to {LONG_S:g} s (until " in line
    )
    owner.check()
    assert folder.names() == ["lease/00000001.json"]


# ---- owners elsewhere -----------------------------------------------------------------------------------------------


FORGED = [{"ttl_s": float("inf")}, {"pid": 10**30}]
DAMAGED = [
    b"",
    b'{"released": true}',
    canonical_json(dict.fromkeys([each.name for each in fields(Lease)], True)),
]


@pytest.mark.parametrize("number", [7, 10**18 - 1])
def test_an_owner_whose_file_says_nothing_of_use_is_watched_and_followed(
    folder, new, watch, number
):
    for content in (*DAMAGED, *(canonical_json(left(**here(), **changes)) for changes in FORGED)):
        lines = []
        folder.write(lease_name(number), content)
        owner = new(60.0, on_wait=lines.append)
        owner.take()
        assert (owner.number, owner.previous, sum(watch.pauses_s)) == (
            number + 1,
            None,
            pytest.approx(60.0),
        ), content
        assert [
            "last used by an owner whose lease file cannot be read" in line for line in lines
        ] == [True]
        rejects("is in use by process", new().take)
        folder.remove(lease_name(number + 1))
        watch.pauses_s.clear()


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_silent_owner_is_watched_for_its_own_time_and_followed(
    folder, new, watch, monkeypatch, is_hidden
):
    """On another machine; or here, where hidepid shows nothing of another user's process, but it is there."""
    leave(folder, ttl_s=600.0, **(here() if is_hidden else {}))
    monkeypatch.setattr(processes, "read_process", lambda _: None)
    owner = new(60.0, on_wait=lambda _: None)
    owner.take()
    assert (owner.number, sum(watch.pauses_s)) == (2, pytest.approx(600))
    owner.check()


@S3
def test_a_server_that_ignores_conditions_is_rejected_at_once(bucket, folder, new):
    def forget(request, **_):
        del request.headers["If-None-Match"]

    folder.client.meta.events.register_first("before-sign.s3.PutObject", forget)
    rejects(
        r"^run_dir=s3://.*/run: its server ignores If-None-Match, so two jobs could", new().take
    )
    assert bucket.keys() == []


# ---- takeovers ------------------------------------------------------------------------------------------------------


@DISK_AND_S3
def test_the_old_owner_learns_that_it_has_lost_the_folder(folder, new, as_another, monkeypatch):
    old = new(0.3)
    old.take()
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    leave(folder, number=2, job="4712", pid=99)
    words = f"the lease of {folder.location} is lost: it now belongs to job 4712, process 99 on node-2, since Monday"
    eventually(lambda: old.lost)
    assert old.lost.startswith(words)
    old.thread.join()  # it heartbeats no more
    rejects(
        "^the lease of .* is lost: it now belongs to job 4712, process 99 on node-2",
        old.check,
        error=LeaseLost,
    )
    old.release()
    assert not kept(folder, 1)["released"] and not kept(folder, 2)["released"]


@DISK_AND_S3
def test_an_owner_that_slept_through_three_others_has_lost_the_folder(folder, new):
    """Its own file and that of the next number are gone, and a write that was under way may bring its own back."""
    old = new()
    old.take()
    fall_silent(old)
    written = folder.read(lease_name(1))
    leave(folder, number=2, released=True)
    for number in (3, 4):
        with new() as another:
            assert another.number == number
    assert folder.names() == ["lease/00000003.json", "lease/00000004.json"]
    for _ in range(2):
        rejects(r"\(lease 4\)", old.check, error=LeaseLost)
        folder.write(lease_name(1), written)


def test_a_taker_that_slept_through_three_others_does_not_own_the_folder(folder, new):
    """It creates the number after the one it saw, which nobody holds any more."""
    leave(folder, released=True)

    class Sleeper(LocalFolder):
        def create(self, name, content):
            if not others:
                for _ in range(3):
                    with new() as other:
                        others.append(other.number)
                assert not folder.size(name)
            return super().create(name, content)

    others = []
    sleeper = new(of=Sleeper(folder.path))
    sleeper.take()
    assert (others, sleeper.number) == ([2, 3, 4], 5)
    sleeper.check()


def test_an_owner_whose_file_somebody_removed_or_replaced_has_lost_the_folder(folder, new):
    old = new()
    old.take()
    folder.remove(lease_name(1))
    rejects("is lost: its file is gone; this job", old.check, error=LeaseLost)
    newcomer = new()
    newcomer.take()
    assert newcomer.number == old.number == 1
    rejects(r"it now belongs to .* \(lease 1\)", old.heartbeat, error=LeaseLost)
    newcomer.check()


@DISK_AND_S3
@pytest.mark.parametrize("before", ["nobody", "silent"])
def test_of_eight_takers_one_gets_the_folder(folder, new, monkeypatch, before):
    """All have judged the last owner before the first one creates the next number, which half of them do too late."""
    if before == "silent":
        leave(folder, ttl_s=0.2)
    together = threading.Barrier(8)
    taken = threading.Event()
    came = set()
    create = folder.create

    def create_together(*given):
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            if together.wait() >= 4:
                taken.wait()
        return create(*given)

    def take(taker):
        try:
            taker.take()
        except InputError as error:
            return str(error)
        taken.set()
        return None

    monkeypatch.setattr(folder, "create", create_together)
    takers = [new(0.2, on_wait=lambda _: None) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        rejected = list(threads.map(take, takers))
    (owner,) = (taker for taker, words in zip(takers, rejected, strict=True) if words is None)
    assert all("is in use by process" in words for words in rejected if words is not None)
    owner.check()
    assert owner.number == (1 if before == "nobody" else 2)


# ---- S3 in trouble --------------------------------------------------------------------------------------------------


@S3
def test_an_outage_is_survived_and_logged_once(bucket, folder, new, log):
    owner = new(0.3)
    owner.take()
    eventually(lambda: kept(folder, 1)["heartbeats"])
    bucket.proxy.set(Fault("status"))
    eventually(lambda: len(bucket.proxy.requests()) > 30)  # seven for a try
    with pytest.raises(Exception, match="S3 answers 503 SlowDown"):
        owner.check()
    bucket.proxy.set()
    heartbeats = kept(folder, 1)["heartbeats"]
    eventually(lambda: kept(folder, 1)["heartbeats"] > heartbeats)
    owner.check()
    assert owner.lost is None
    (failing,) = (text for text in log.messages if "not renewed" in text)
    assert "S3 answers 503 SlowDown" in failing and "without a heartbeat for 0.3 s" in failing


@S3
def test_a_lost_answer_is_not_another_owner(bucket, folder, new):
    bucket.proxy.set(Fault("lose", match="^PUT", times=1))
    owner = new()
    owner.take()
    assert owner.number == 1
    seen = [(request.fault, request.status) for request in bucket.proxy.requests("^PUT")]
    # tried again, and then whether it can be created twice
    assert seen == [
        ("lose", 200),
        (None, 412),
        (None, 412),
    ]
