"""One job owns a run folder, on disk and in S3: who is refused, who waits, who takes over, and who learns it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import botocore.endpoint
import pytest
from services.fault_proxy import Fault

from train import lease
from train.config import InputError, S3Config
from train.lease import Lease
from train.ownership import KINDS, LeaseLost, name_of
from train.storage import LocalFolder, canonical_json, open_folder

DISK_AND_S3 = pytest.mark.parametrize("kind", ["disk", "s3"])
DISK = pytest.mark.parametrize("kind", ["disk"])
S3 = pytest.mark.parametrize("kind", ["s3"])
LONG_S = 6000.0  # whoever waits for this has failed
DEADLINE_S = 60.0
ELSEWHERE = {"host": "node-2", "boot_id": "another boot"}
OTHER_PROCESS = """
import sys
from pathlib import Path
from train.lease import Lease
from train.storage import LocalFolder

with Lease(LocalFolder(Path(sys.argv[1])), 6000.0):
    print("taken", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """No launcher around the tests, and nobody waits for boto3's pauses."""
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda _: None))


@pytest.fixture
def folder(request, kind, tmp_path):
    if kind == "disk":
        return open_folder(str(tmp_path / "run"), S3Config())
    bucket = request.getfixturevalue("bucket")
    return open_folder(bucket.location("run"), bucket.config())


@pytest.fixture
def new(folder):
    """Makes leases of the folder, whose threads end with the test. Waiting is a failure unless the test allows it."""
    made = []

    def make(ttl_s=LONG_S, *, on_wait=pytest.fail, of=folder):
        made.append(Lease(of, ttl_s, on_wait=on_wait))
        return made[-1]

    yield make
    for each in made:
        fall_silent(each)


def fall_silent(owner):
    """As if its process hung or its machine were cut off."""
    owner.stop.set()
    if owner.thread.ident is not None:
        owner.thread.join()


@pytest.fixture
def as_another(monkeypatch):
    """Who calls from now on: somebody like this process, but for these."""
    real = lease.identity
    return lambda **changes: monkeypatch.setattr(lease, "identity", lambda: {**real(), **changes})


def leave(folder, **changes):
    """A lease as somebody on another machine left it without releasing it."""
    owner = {**lease.identity(), **ELSEWHERE, "owner": "x", "ttl_s": 0.5, "started": "Monday", "number": 1}
    content = {**owner, "beats": 3, "step": 40, "released": False, **changes}
    folder.write(name_of(content["number"]), canonical_json(content))


def kept(folder, number):
    return json.loads(folder.read(name_of(number)))


def eventually(found):
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        value = found()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError("nothing came")


def dead_process():
    """Process id and start of one that has ended."""
    process = subprocess.Popen(["sleep", "1000"])
    status = lease.process_status(process.pid)
    process.kill()
    process.wait()
    return {"pid": process.pid, "process_start": status[1]}


# ---- taking, keeping, releasing -------------------------------------------------------------------------------------


@DISK_AND_S3
def test_the_first_one_takes_the_folder_and_says_who_it_is(folder, new, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    owner = new()
    owner.take()
    assert (owner.number, owner.previous, owner.lost) == (1, None, None)
    owner.check()
    assert folder.names() == ["lease/00000001.json"]
    found = kept(folder, 1)
    assert (found["pid"], found["job"], found["beats"], found["released"]) == (os.getpid(), "4711", 0, False)


@DISK_AND_S3
def test_heartbeats_tell_the_step(folder, new):
    owner = new(0.1)
    owner.take()
    owner.step = 7
    eventually(lambda: kept(folder, 1)["step"] == 7 and kept(folder, 1)["beats"] >= 2)
    owner.check()


@DISK_AND_S3
def test_a_released_folder_is_taken_at_once_with_a_higher_number(folder, new):
    for number in (1, 2, 3, 4):
        owner = new()
        with owner:
            assert owner.number == number
            owner.step = 10 * number
            owner.check()
        assert kept(folder, number)["released"]
        previous = owner.previous and (owner.previous["step"], owner.previous["released"])
        assert previous == ((10 * (number - 1), True) if number > 1 else None)
    assert folder.names() == ["lease/00000003.json", "lease/00000004.json"]


@DISK
def test_a_lease_can_be_taken_again(new):
    owner = new()
    for number in (1, 2):
        with owner:
            owner.check()
            assert owner.number == number


@DISK
def test_releasing_never_raises(folder, new, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("train"), "propagate", True)
    refused, lost, unreachable = new(), new(), new()
    refused.release()  # never taken
    lost.take()
    leave(folder, number=2)
    lost.release()
    assert not kept(folder, 1)["released"]
    folder.remove(name_of(2))
    fall_silent(lost)
    lost.release()
    unreachable.take()
    monkeypatch.setattr(unreachable, "folder", LocalFolder(folder.path / "lease/00000001.json"))
    monkeypatch.setattr(LocalFolder, "names", lambda *_: ["lease/00000009.json"])
    assert not caplog.messages
    unreachable.release()
    assert "is not released: InputError: cannot read" in caplog.text


# ---- owners on this machine -----------------------------------------------------------------------------------------


@DISK_AND_S3
def test_the_owner_on_this_machine_is_named(folder, new, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    owner = new()
    owner.take()
    with pytest.raises(InputError) as raised:
        new(60.0).take()
    since = owner.claim["started"]
    who = f"job 4711, process {os.getpid()} on {os.uname().nodename}, since {since}"
    assert str(raised.value) == (
        f"run_dir={folder.location} is in use by {who}; stop it or choose another run_dir "
        "(if it is gone, its lease ends by itself after lease.ttl_s=60 without a heartbeat)"
    )
    assert folder.names() == ["lease/00000001.json"]
    owner.check()


@DISK
def test_another_process_owns_the_folder_until_it_is_killed(folder, new):
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, folder.location],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "taken\n"
        with pytest.raises(InputError, match=f"is in use by process {process.pid} on "):
            new().take()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the table of processes
        owner = new()
        owner.take()
        assert owner.number == 2
    finally:
        process.kill()
        process.communicate()


@DISK_AND_S3
def test_a_dead_owner_on_this_machine_is_followed_at_once(folder, new):
    here = {name: lease.identity()[name] for name in ELSEWHERE}
    leave(folder, **here, **dead_process())
    owner = new()
    owner.take()
    assert (owner.number, owner.previous["step"], owner.previous["released"]) == (2, 40, False)


@DISK
def test_a_process_that_got_the_dead_owners_number_is_not_the_owner(folder, new):
    here = {name: lease.identity()[name] for name in ELSEWHERE}
    leave(folder, **here, pid=os.getpid(), process_start=lease.identity()["process_start"] - 1)
    new().take()


@DISK
@pytest.mark.parametrize("change", [{"pid_namespace": "pid:[1]"}, {"host": "node-2"}, {"boot_id": None}], ids=str)
def test_a_process_that_cannot_be_seen_is_not_judged_dead(folder, new, as_another, change):
    """It has no process here, and beats. The same must hold where neither side knows its machine."""
    as_another(**dead_process(), **change)
    owner = new(3.0)
    owner.take()
    if change != {"boot_id": None}:
        as_another()
    said = []
    with pytest.raises(InputError, match="is in use by process"):
        new(3.0, on_wait=said.append).take()
    assert len(said) == 1


@DISK
def test_a_process_that_the_kernel_hides_is_not_judged_dead(folder, new, monkeypatch):
    """hidepid: /proc shows nothing of another user's process, but it is there."""
    here = {name: lease.identity()[name] for name in ELSEWHERE}
    leave(folder, **here)
    monkeypatch.setattr(lease, "process_status", lambda _: None)
    said = []
    new(0.1, on_wait=said.append).take()
    assert len(said) == 1


# ---- owners elsewhere -----------------------------------------------------------------------------------------------


@DISK_AND_S3
def test_an_owner_elsewhere_that_beats_is_not_disturbed(folder, new, as_another):
    as_another(**ELSEWHERE)
    owner = new(3.0)
    owner.take()
    as_another()
    said = []
    with pytest.raises(InputError, match="is in use by process .* on node-2, since "):
        new(3.0, on_wait=said.append).take()
    (line,) = said
    assert f"{folder.location} was last used by process" in line
    assert re.search(r": watching for a heartbeat, up to 3 s \(until \d\d:\d\d:\d\d UTC\)$", line)
    assert owner.lost is None
    owner.check()
    assert folder.names() == ["lease/00000001.json"]


@DISK_AND_S3
def test_an_owner_elsewhere_that_is_silent_is_followed(folder, new):
    leave(folder, number=7)
    said = []
    owner = new(0.5, on_wait=said.append)
    owner.take()
    assert (owner.number, owner.previous["step"], len(said)) == (8, 40, 1)
    owner.check()


@DISK
def test_an_owner_is_watched_for_its_own_time_if_that_is_longer(folder, new, monkeypatch):
    leave(folder, ttl_s=600.0)
    waited = []
    monkeypatch.setattr(lease.time, "sleep", waited.append)
    new(60.0, on_wait=lambda _: None).take()
    assert sum(waited) == pytest.approx(600)


@DISK
def test_an_owner_elsewhere_that_releases_while_it_is_watched_is_followed(folder, new, monkeypatch):
    leave(folder)
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        leave(folder, released=True)

    monkeypatch.setattr(lease.time, "sleep", sleep)
    owner = new(60.0, on_wait=lambda _: None)
    owner.take()
    assert (owner.number, waited) == (2, [5.0])


@DISK_AND_S3
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b'{"number": 1',
        b"[1]",
        b'{"released": true}',
        canonical_json(dict.fromkeys(KINDS, True)),
    ],
    ids=["empty", "no text", "half", "a list", "little", "wrong"],
)
def test_a_damaged_file_is_watched_like_a_silent_owner(folder, new, content):
    folder.write(name_of(1), content)
    said = []
    owner = new(0.1, on_wait=said.append)
    owner.take()
    assert (owner.number, owner.previous) == (2, None)
    assert "last used by an owner whose lease file cannot be read" in said[0]


@DISK
def test_a_damaged_file_that_changes_has_an_owner(folder, new, monkeypatch):
    folder.write(name_of(1), b"?")
    monkeypatch.setattr(lease.time, "sleep", lambda _: folder.write(name_of(1), b"??"))
    with pytest.raises(InputError, match="is in use by an owner whose lease file cannot be read; stop it"):
        new(on_wait=lambda _: None).take()


@DISK
def test_who_waits_says_so_every_ten_seconds_and_until_when(folder, new, monkeypatch):
    leave(folder, ttl_s=60.0)
    waited, said = [], []
    monkeypatch.setattr(lease.time, "sleep", waited.append)
    new(60.0, on_wait=lambda text: said.append((sum(waited), text))).take()
    assert [seconds for seconds, _ in said] == [0, 10, 20, 30, 40, 50]
    until = re.search(r"\(until \d\d:\d\d:\d\d UTC\)", said[0][1])[0]
    assert said[3][1] == f"watching for a heartbeat, up to 60 s {until}: none for 30 s"
    leave(folder, number=3, ttl_s=600.0)
    waited.clear()
    new(60.0, on_wait=lambda _: None).take()
    assert max(waited) <= 10


@DISK_AND_S3
@pytest.mark.parametrize("stray", [99_999_999, 10**17])
def test_a_stray_file_of_the_highest_number_does_not_hold_up_the_next_owner(folder, new, stray):
    folder.write(name_of(stray), b"stray")
    said = []
    owner = new(0.1, on_wait=said.append)
    owner.take()
    assert owner.number == stray + 1 and len(said) == 1
    owner.check()
    with pytest.raises(InputError, match="is in use by process"):
        new().take()


@DISK_AND_S3
def test_a_lease_number_that_no_run_reaches_is_named(folder, new):
    folder.write(name_of(10**18 - 1), b"stray")
    with pytest.raises(InputError, match="lease/9{18}.json is no lease of a run: .*; remove it"):
        new(0.1).take()


@DISK
@pytest.mark.parametrize("forged", [{"ttl_s": float("inf")}, {"ttl_s": 1e300}, {"pid": 10**30}, {"pid": -1}], ids=str)
def test_a_forged_file_is_watched_like_a_damaged_one(folder, new, forged):
    here = {name: lease.identity()[name] for name in ELSEWHERE}
    leave(folder, **here, **forged)
    new(0.1, on_wait=lambda _: None).take()


@S3
def test_a_server_that_ignores_conditions_is_refused_at_once(bucket, folder, new):
    def forget(request, **_):
        del request.headers["If-None-Match"]

    folder.client.meta.events.register_first("before-sign.s3.PutObject", forget)
    with pytest.raises(InputError, match=r"^run_dir=s3://.*/run: its server ignores If-None-Match, so two jobs could"):
        new().take()
    assert bucket.keys() == []


# ---- torchrun -------------------------------------------------------------------------------------------------------


def torchrun(monkeypatch, restart, address="10.0.0.1", run_id="none"):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "29500")


@DISK
def test_the_rank_that_torchrun_restarts_elsewhere_follows_at_once(folder, new, monkeypatch):
    torchrun(monkeypatch, restart=0)
    leave(folder)
    torchrun(monkeypatch, restart=1)
    owner = new()
    owner.take()
    assert (owner.number, kept(folder, 2)["job"]) == (2, None)


OTHERS = {
    "no restart": {"restart": 0},
    "another run": {"restart": 1, "run_id": "mine"},
    "another master": {"restart": 1, "address": "10.0.0.2"},
}


@DISK
@pytest.mark.parametrize("other", OTHERS)
def test_another_torchrun_waits(folder, new, monkeypatch, other):
    torchrun(monkeypatch, restart=0)
    leave(folder)
    torchrun(monkeypatch, **OTHERS[other])
    said = []
    new(0.1, on_wait=said.append).take()
    assert len(said) == 1


@DISK
def test_a_refused_rank_that_its_torchrun_restarts_does_not_take_what_another_machine_owns(
    folder, new, monkeypatch, as_another
):
    """Both have torchrun's default run id, and each machine its own 127.0.0.1:29500."""
    torchrun(monkeypatch, restart=0, address="127.0.0.1")
    as_another(**ELSEWHERE)
    owner = new(3.0)
    owner.take()
    as_another()
    torchrun(monkeypatch, restart=1, address="127.0.0.1")
    with pytest.raises(InputError, match="is in use by process .* on node-2"):
        new(3.0, on_wait=lambda _: None).take()
    owner.check()


@pytest.mark.parametrize(
    ("address", "tells"),
    [("10.0.0.1", True), ("node-1", True), ("localhost", False), ("127.1.2.3", False), ("::1", False), ("", False)],
)
def test_only_an_address_of_a_network_tells_that_a_torchrun_is_the_same(address, tells):
    first, second = ({"torchrun": ["none", address, "29500"], "restart": restart} for restart in (0, 1))
    assert lease.same_torchrun_before(first, second) == tells
    assert not lease.same_torchrun_before(second, first)


# ---- takeovers ------------------------------------------------------------------------------------------------------


@DISK_AND_S3
def test_the_old_owner_learns_that_it_has_lost_the_folder(folder, new, as_another, monkeypatch):
    old = new(0.3)
    old.take()
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    leave(folder, number=2, job="4712", pid=99)
    words = f"lease 1 of {folder.location} is lost: job 4712, process 99 on node-2, since Monday owns it, with lease 2"
    lost = eventually(lambda: old.lost)
    assert lost.startswith(words)
    old.thread.join()  # it beats no more
    with pytest.raises(LeaseLost, match="^lease 1 of .* is lost: job 4712, process 99 on node-2"):
        old.check()
    old.release()
    assert not kept(folder, 1)["released"] and not kept(folder, 2)["released"]


@DISK_AND_S3
def test_an_owner_that_slept_through_three_others_has_lost_the_folder(folder, new):
    """Its own file and that of the next number are gone, and a write that was under way may bring its own back."""
    old = new()
    old.take()
    fall_silent(old)
    written = folder.read(name_of(1))
    leave(folder, number=2, released=True)
    for number in (3, 4):
        with new() as another:
            assert another.number == number
    assert folder.names() == ["lease/00000003.json", "lease/00000004.json"]
    for _ in range(2):
        with pytest.raises(LeaseLost, match="with lease 4"):
            old.check()
        folder.write(name_of(1), written)


@DISK
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
    assert (others, sleeper.number, sleeper.previous["number"]) == ([2, 3, 4], 5, 4)
    sleeper.check()


@DISK
def test_an_owner_whose_file_somebody_removed_or_replaced_has_lost_the_folder(folder, new):
    old = new()
    old.take()
    folder.remove(name_of(1))
    with pytest.raises(LeaseLost, match="is lost: its file is gone; this job"):
        old.check()
    newcomer = new()
    newcomer.take()
    assert newcomer.number == old.number == 1
    with pytest.raises(LeaseLost, match="owns it, with lease 1"):
        old.beat()
    newcomer.check()


@DISK_AND_S3
@pytest.mark.parametrize("before", ["nobody", "released", "silent"])
def test_of_eight_takers_one_gets_the_folder(folder, new, monkeypatch, before):
    """All have judged the last owner before the first one creates the next number, which half of them do too late."""
    if before != "nobody":
        leave(folder, released=before == "released", ttl_s=0.2)
    together, taken, came, create = threading.Barrier(8), threading.Event(), set(), folder.create

    def create_together(*given):
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            if together.wait() >= 4:
                taken.wait()
        return create(*given)

    monkeypatch.setattr(folder, "create", create_together)
    takers = [new(0.2, on_wait=lambda _: None) for _ in range(8)]

    def take(taker):
        try:
            taker.take()
        except InputError as error:
            return str(error)
        taken.set()
        return None

    with ThreadPoolExecutor(8) as threads:
        refused = list(threads.map(take, takers))
    (owner,) = (taker for taker, words in zip(takers, refused, strict=True) if words is None)
    assert all("is in use by process" in words for words in refused if words is not None)
    owner.check()
    assert owner.number == (1 if before == "nobody" else 2)


# ---- S3 in trouble --------------------------------------------------------------------------------------------------


@S3
def test_an_outage_is_survived_and_told_once(bucket, folder, new, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("train"), "propagate", True)
    caplog.set_level(logging.INFO, "train")
    owner = new(0.3)
    owner.take()
    eventually(lambda: kept(folder, 1)["beats"])
    bucket.proxy.set(Fault("status"))
    eventually(lambda: len(bucket.proxy.requests()) > 30)  # seven for a try
    with pytest.raises(Exception, match="S3 answers 503 SlowDown"):
        owner.check()
    bucket.proxy.set()
    beats = kept(folder, 1)["beats"]
    eventually(lambda: kept(folder, 1)["beats"] > beats)
    owner.check()
    assert owner.lost is None
    words = "Unreachable: .*: S3 answers 503 SlowDown.*; without a heartbeat for 0.3 s another job may take the folder"
    told = [text for text in dict.fromkeys(caplog.messages) if "renewed" in text]  # a slow machine may tell twice over
    assert re.fullmatch(f"the lease is not renewed: {words}", told[-2])
    assert told[-1] == "the lease is renewed again"


@S3
def test_a_lost_answer_is_not_another_owner(bucket, folder, new):
    bucket.proxy.set(Fault("lose", match="^PUT", times=1))
    owner = new()
    owner.take()
    assert owner.number == 1
    seen = [(request.fault, request.status) for request in bucket.proxy.requests("^PUT")]
    assert seen == [("lose", 200), (None, 412), (None, 412)]  # tried again, and then whether it can be created twice


@DISK
def test_a_created_file_that_looks_taken_is_still_ours(folder, new, monkeypatch):
    """NFS sends a link again when its answer got lost, and then says that the file exists."""
    create = LocalFolder.create
    monkeypatch.setattr(LocalFolder, "create", lambda *given: create(*given) and False)
    owner = new()
    owner.take()
    assert owner.number == 1
    owner.check()


@S3
def test_a_check_costs_two_requests(bucket, folder, new):
    owner = new()
    owner.take()
    bucket.proxy.set()
    owner.check()
    assert [request.method for request in bucket.proxy.requests()] == ["GET", "GET"]
