"""A save that is killed, wherever that is, leaves the checkpoint before it or its own: whole, and nothing in between.

What a kill leaves is a copy of the folder, which the thread that saves takes before each thing that it does to files.
"""

import io
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_saver import backend, left, replica, saved, saver_of, tensors
from torch import nn

from train.checkpoints.loader import load
from train.checkpoints.manifest import step_name, step_of
from train.checkpoints.store import LocalStore
from train.config import OptimConfig
from train.parallel.optim import build_optimizer

OLDER, LAST, NEXT = 1, 3, 6  # to be removed, whole, and being saved
# of sys.addaudithook
EVENTS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.remove",
    "os.rmdir",
)


class Stages:
    """What the thread that saves does to files, one stage each. `kills` gets what a kill before a stage leaves."""

    def __init__(self, folder, kills, monkeypatch):
        self.folder = folder
        self.kills = kills
        self.seen = []
        self.copies = []
        self.is_off = False
        fsync = os.fsync
        open_file = Path.open

        def sync(handle):
            fsync(handle)
            self.reach("synced", str(Path(f"/proc/self/fd/{handle}").readlink()), None)

        def open_torn(path, mode="r", **options):
            return Torn(path, self) if mode == "wb" else open_file(path, mode, **options)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(Path, "open", open_torn)
        sys.addaudithook(self.see)

    def see(self, event, arguments):
        if (
            self.is_off
            or event not in EVENTS
            or not threading.current_thread().name.startswith("save")
        ):
            return
        path, *others = arguments
        # shutil.rmtree goes by handles of folders
        if event in ("os.remove", "os.rmdir") and others[0] != -1:
            path = Path(f"/proc/self/fd/{others[0]}").readlink() / path
        if str(path).startswith(str(self.folder)):
            self.reach(event, str(path), str(others[0]) if event == "os.rename" else others[-1])

    def reach(self, *stage):
        if self.is_off:
            return
        if is_new(self.seen, stage):
            self.copy()
        self.seen.append(stage)

    def copy(self):
        self.is_off = True
        if self.folder.exists():
            number = len(self.seen)
            self.copies.append((number, shutil.copytree(self.folder, self.kills / str(number))))
        self.is_off = False


class Torn(io.FileIO):
    """A file that is written in halves, at once."""

    def __init__(self, path, stages):
        super().__init__(path, "wb")
        self.stages = stages

    def write(self, content):
        content = memoryview(content).cast("B")
        for part in (content[: len(content) // 2], content[len(content) // 2 :]):
            super().write(part)
            self.stages.reach("written", str(self.name), len(part))
        return len(content)


def is_new(seen, stage):
    """Whether a kill before a stage can leave something new: not after a file was opened for reading, or synced, which
    is for power cuts, and among the many writes to a file only after the first and the last.
    """
    if not seen:
        return True
    event, _, detail = seen[-1]
    if event == "written":
        return "open" in seen[-2] or "synced" in stage
    return event != "synced" and (event != "open" or bool(detail & os.O_CREAT))


def state(step):
    """A model and its optimizer, filled with the number of the step."""
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(OptimConfig(), model.parameters())
    for tensor in tensors(model, optimizer):
        tensor.detach().fill_(step)
    return model, optimizer


def save(folder, step):
    saver = saver_of(LocalStore(folder), keep=2)
    assert saved(saver, step, state(step)) is None
    saver.close(waits=True)


def whole_steps(folder):
    """The steps whose files match their manifest and are of that step; others fail the test."""
    store = LocalStore(folder)
    for step in store.steps():
        assert (torch.load(store.fetch(step) / "model.pt")["weight"] == step).all()
    return store.steps()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The stages of a first save and of one that also removes a step, and what kills of that leave."""
    path = tmp_path_factory.mktemp("kills")
    folder = path / "checkpoints"
    seen = []
    for step in (OLDER, LAST, NEXT):
        with pytest.MonkeyPatch.context() as monkeypatch:
            stages = Stages(folder, path / str(step), monkeypatch)
            save(folder, step)
            stages.copy()
            stages.is_off = True
            seen.append(stages)
    first, _, last = seen
    return SimpleNamespace(first=first.seen, stages=last.seen, kills=last.copies)


def position(stages, event, name, *, source=False):
    """The number of the first such stage; a rename is found by its target, or by its source."""
    return next(
        number
        for number, (each, path, detail) in enumerate(stages)
        if each == event and str(path if source or event != "os.rename" else detail).endswith(name)
    )


def test_wherever_a_save_is_killed_the_last_checkpoint_or_its_own_is_whole(report):
    """And the next attempt loads it, leaves nothing of the killed save, and can save."""
    stages = report.stages
    commit = position(stages, "os.rename", f"checkpoints/{step_name(NEXT)}")
    removal = position(stages, "os.rename", f"checkpoints/{step_name(OLDER)}", source=True)
    assert 0 < commit < removal < len(stages)
    assert len(report.kills) > 20
    for number, folder in report.kills:
        steps = [OLDER] * (number <= removal) + [LAST] + [NEXT] * (number > commit)
        stage = stages[number : number + 1]
        store = LocalStore(folder)
        trained = state(-1)
        assert whole_steps(folder) == steps, stage
        store.collect_garbage(ended_below=9)
        assert left(store) == [], stage
        loaded = load(store, replica(*trained), backend(), identity={}, settings={}, force=False)
        assert loaded.progress.step == steps[-1], stage
        assert all(bool((tensor == steps[-1]).all()) for tensor in tensors(*trained)), stage
        save(folder, NEXT)
        assert whole_steps(folder) == [LAST, NEXT], stage
        assert not [name for name in left(store) if ".tmp-" in name], stage


class Disk:
    """What a power cut could take: what was written to files since their last sync, and the names in folders."""

    def __init__(self):
        self.unsafe = set()

    def see(self, event, path, detail):
        path = Path(path)
        if event == "written":
            self.unsafe.add(path)
        elif event == "synced":
            self.unsafe.discard(path)
        elif event == "os.rename":
            moved = self.below(path)
            self.unsafe -= moved
            self.unsafe |= {Path(detail) / where.relative_to(path) for where in moved}
            self.unsafe |= {path.parent, Path(detail).parent}
        elif event != "open" or detail & os.O_CREAT:
            self.unsafe.add(path.parent)

    def below(self, folder):
        return {where for where in self.unsafe if where == folder or folder in where.parents}


def at_risk(disk, event, path, detail):
    """At a stage that relies on something: what for, and which part of it a power cut could take."""
    is_new = event == "open" and detail & os.O_CREAT
    moves = event == "os.rename"
    if is_new and path.name.startswith(".manifest"):  # it says what the files are
        return "manifest", disk.below(path.parent) - {path.parent}
    if moves and step_of(Path(detail).name) is not None:
        return "commit", disk.below(path)
    if moves and step_of(path.name) is not None:
        return "removal", disk.unsafe & {path.parent}
    # or the step would come back, without its files
    if event == "os.remove" and not path.name.startswith("."):
        return "deletion", disk.unsafe & {path.parent.parent}
    return None


def test_nothing_is_relied_on_that_a_power_cut_could_take(report):
    relied = []
    for stages in (report.first, report.stages):
        disk = Disk()
        for event, path, detail in stages:
            risk = at_risk(disk, event, Path(path), detail)
            if risk is not None:
                relied.append(risk)
            disk.see(event, path, detail)
    assert [each for each in relied if each[1]] == []
    commit = ["manifest", "commit"]
    assert [what for what, _ in relied] == [*commit, *commit, "removal", *["deletion"] * 4]
