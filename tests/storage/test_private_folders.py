"""Folders whose content runs as code, or may be private: this user's alone, and rejected where others could write."""

import os
import pwd
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from rejections import rejects
from running import ROOT

from train.config import BackendConfig
from train.machine import host
from train.machine.home import settle
from train.parallel.compiled import compile_fault
from train.parallel.ddp import DDP
from train.storage import caches
from train.storage.folders import LocalFolder, make_folder


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """No variable names a cache, and the home and TMPDIR are new."""
    for name in (
        *caches.KERNELS,
        "NEURON_COMPILE_CACHE_URL",
        "NEURON_CC_FLAGS",
    ):
        monkeypatch.setenv(name, "")  # what the program sets is removed after the test
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host, "instance_stores", list)
    # wherever the tests run
    monkeypatch.setattr(host, "NETWORK_FILESYSTEMS", ("no such kind",))
    return tmp_path


def test_a_new_folder_is_this_users_alone_and_links_are_followed_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = os.umask(0)
    try:
        # which no link leads to later
        assert caches.private_folder(tmp_path / "link/a", "X") == tmp_path / "real/a"
    finally:
        os.umask(before)
    assert [mode(tmp_path / "real" / name) for name in ("", "a")] == [0o700, 0o700]
    (tmp_path / "open").mkdir(0o755)
    assert mode(caches.private_folder(tmp_path / "open", "X")) == 0o700


@pytest.mark.parametrize(
    ("folder", "parent", "says"),
    [
        (0o777, 0o700, "cache can be written to by others"),
        (0o775, 0o700, "cache can be written to by others"),
        (0o1777, 0o700, "cache can be written to by others"),  # files of others in it stay theirs
        (0o700, 0o777, "parent can be written to by others"),  # who may rename what is in it
        (0o700, 0o1777, None),  # as /tmp
        (0o700, 0o775, None),  # docs/security.md says that a group may
    ],
)
def test_a_folder_that_others_can_write_to_or_replace_is_refused(tmp_path, folder, parent, says):
    (tmp_path / "parent/cache").mkdir(parents=True)
    (tmp_path / "parent/cache").chmod(folder)
    (tmp_path / "parent").chmod(parent)
    if says is None:
        caches.private_folder(tmp_path / "parent/cache", "X")
    else:
        rejects(
            f"{says} .*set X to another", caches.private_folder, tmp_path / "parent/cache", "X"
        )


def test_a_folder_of_another_user_is_refused_but_below_one_of_root_is_not(tmp_path, monkeypatch):
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    rejects(
        f"belongs to user {owner}, and you are {owner + 1}", caches.private_folder, tmp_path, "X"
    )
    of_root = os.stat_result([0o40755, 0, 0, 0, 0, *[0] * 5])
    assert caches.foreign_fault(of_root, is_parent=True) is None
    assert caches.foreign_fault(of_root, is_parent=False)


def ddp(**settings):
    return DDP(BackendConfig(device="cpu", compile="layers", **settings))


def test_kernels_lie_below_our_cache_and_those_of_others_are_never_loaded(home):
    """TorchInductor would take them from TMPDIR, where anybody could make the folder first."""
    ddp().close()
    from torch._inductor import codecache  # as the backend imports it, after the variables are set
    from torch._inductor.runtime.cache_dir_utils import (
        cache_dir,
        default_cache_dir,
        triton_cache_dir,
    )

    for folder in (cache_dir(), triton_cache_dir(0)):
        assert Path(folder).is_relative_to(home / "xdg/baretrain") and mode(Path(folder)) == 0o700
    # Its compiled headers do not follow the variable.
    assert Path(codecache._HEADER_DIR).parent.name == Path(default_cache_dir()).name
    assert mode(Path(default_cache_dir())) == 0o700 and Path(default_cache_dir()).parent == home


@pytest.mark.parametrize("place", [*caches.KERNELS, "TMPDIR"])
def test_compiling_with_a_folder_that_others_can_write_to_is_refused(home, monkeypatch, place):
    planted = home / "planted"
    if place == "TMPDIR":
        caches.place_kernels()
        planted = caches.headers_folder()
    else:
        planted.mkdir()
        monkeypatch.setenv(place, str(planted))
    planted.chmod(0o777)
    rejects(f"{planted} can be written to by others.*set {place} to", ddp)
    planted.rmdir()
    planted.symlink_to(home)
    if place == "TMPDIR":
        rejects(f"{planted} is a link", ddp)


def test_on_a_disk_that_runs_no_code_compiling_is_refused_and_auto_goes_without(home, monkeypatch):
    """So it is where others could replace the folder, as on a pod's volumes."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    assert compile_fault() == ""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    says = (
        r"inductor is on a disk mounted noexec, .*set TORCHINDUCTOR_CACHE_DIR to another folder$"
    )
    rejects(says, ddp)
    assert re.search(says, compile_fault())
    (home / "xdg").chmod(0o777)
    assert "xdg can be written to by others" in compile_fault()


@pytest.mark.parametrize(
    ("given", "is_known", "wanted"),
    [
        ({}, True, {}),
        ({"HOME": "home"}, True, {}),
        ({"HOME": "home", "USER": "me"}, False, {}),
        ({}, False, {"HOME": "own"}),
        (
            {"HOME": "closed"},
            False,
            {"XDG_CACHE_HOME": "own/.cache", "XDG_STATE_HOME": "own/.local/state"},
        ),
        ({"HOME": "closed", "XDG_CACHE_HOME": "/x"}, True, {"XDG_STATE_HOME": "own/.local/state"}),
        (
            {"HOME": "cached"},
            True,
            {"XDG_STATE_HOME": "own/.local/state"},
        ),  # a cache that may only be read has models
    ],
)
def test_a_user_whom_the_machine_does_not_know_has_a_name_a_home_and_a_cache(
    home, monkeypatch, given, is_known, wanted
):
    """As with `docker run --user 955`, with or without a home that may be written to."""
    for folder in ("home", "closed", "cached/.cache"):
        (home / folder).mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name not in ("closed", "cached"))
    known = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwuid", lambda _: known if is_known else {}[0])
    own = str(home / f"baretrain-home-{os.getuid()}")
    environ = {
        name: str(home / value) if name == "HOME" else value for name, value in given.items()
    }
    before = dict(environ)
    settle(environ)
    added = {
        name: value.replace(own, "own") for name, value in environ.items() if name not in before
    }
    name = {} if is_known or "USER" in given else {"LOGNAME": f"user{os.getuid()}"}
    assert added == {**wanted, **name}
    assert not wanted.keys() & {"HOME", "XDG_STATE_HOME"} or mode(Path(own)) == 0o700


def test_neurons_graphs_lie_below_our_cache(home):
    graphs = home / "xdg/baretrain/neuron"
    assert caches.place_graphs({}) == {"NEURON_COMPILE_CACHE_URL": str(graphs)}
    assert mode(graphs) == 0o700
    assert caches.place_graphs({"NEURON_COMPILE_CACHE_URL": "s3://bucket/x"}) == {}


# ---- what is another user's -----------------------------------------------------------------------------------------


# ---- texts that may be private -------------------------------------------------------------------------------------


def test_what_holds_texts_is_made_for_this_user_and_stays_as_the_user_changes_it(home):
    run = home / "runs/run"
    output = home / "data"
    for wanted in (0o700, 0o750):
        LocalFolder(run).write("log/rank_0000.txt", b"")
        make_folder(output)
        assert mode(run) == mode(output) == wanted
        for folder in (run, output):
            folder.chmod(0o750)
    (home / "xdg/baretrain").mkdir(parents=True, mode=0o755)  # of an earlier version
    assert mode(host.cache_root()) == 0o700


@pytest.mark.parametrize("planted", ["", "link", "file"])
def test_the_output_of_a_slurm_job_goes_where_no_other_user_can_have_put_a_file(tmp_path, planted):
    """On a node that shares no folder with the machine that submits. The name was /tmp/NAME-JOBID-job.txt."""
    ours = tmp_path / f"baretrain-{os.getuid()}"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if planted:
        ours.symlink_to(theirs) if planted == "link" else ours.touch()
    script = tmp_path / "job.sh"
    script.write_text((ROOT / "launch/slurm/job.sh").read_text().replace("/tmp/", f"{tmp_path}/"))
    environ = {**os.environ, "SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path)}
    for _ in range(2):  # a requeued job goes on in its file
        subprocess.run(
            ["bash", script, "echo", "runs/x"],
            env=environ,
            stdout=subprocess.DEVNULL,
            check=True,
        )
    logs = list(tmp_path.glob("*/job_7.txt"))
    said = "-m launch.slurm.batch runs/x\n"
    assert [log.read_text() for log in logs] == ([said, said] if planted else [said * 2])
    assert {mode(log.parent) for log in logs} == {0o700} and not any(theirs.iterdir())


def test_a_cache_that_another_user_made_first_is_not_used(home, monkeypatch):
    cache = home / "xdg" / "baretrain"
    assert host.cache_root() == cache and mode(cache) == 0o700
    monkeypatch.setattr(host, "is_own", lambda _: False)
    rejects("baretrain belongs to another user; remove it, or set XDG_CACHE_HOME", host.cache_root)


@pytest.mark.parametrize(
    ("umask", "becomes"),
    [(0, 0o022), (0o002, 0o002), (0o007, 0o007), (0o020, 0o022), (0o077, 0o077)],
)
def test_what_libraries_make_cannot_be_written_to_by_others(umask, becomes):
    code = f"import os; os.umask({umask}); import train; train.begin(); print(os.umask(0))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == becomes
