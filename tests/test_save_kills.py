"""A save that is killed, wherever that is, leaves the checkpoint before it or its own: whole, and nothing in between.

`python -m tests.test_save_kills FOLDER` kills one save after the other, each in a process forked from one that has
loaded torch and runs no threads.
"""

import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from running import ROOT
from torch import nn

from train.backend.ddp import DDP
from train.checkpoints.loader import load
from train.checkpoints.manifest import Damaged, step_name, step_of
from train.checkpoints.progress import Progress
from train.checkpoints.saver import Facts, Saver
from train.checkpoints.store import LocalStore
from train.config import BackendConfig, CheckpointConfig, OptimConfig
from train.optim import build_optimizer

OLDER, LAST, NEXT = 1, 3, 6  # to be removed, whole, and being saved
EVENTS = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir")  # of sys.addaudithook
IDENTITY = {"data": "none"}
forked = multiprocessing.get_context("fork")


class Stages:
    """What the thread that saves does to files, one stage each. Before number `kill_at` the process is killed."""

    def __init__(self, folder, kill_at=None):
        self.folder, self.kill_at, self.seen = folder, kill_at, []
        self.fsync, self.open = os.fsync, Path.open
        sys.addaudithook(self.see)
        os.fsync, Path.open = self.sync, lambda path, mode="r", **options: self.open_torn(path, mode, **options)

    def reach(self, *stage):
        if len(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(stage)

    def see(self, event, arguments):
        if event not in EVENTS or not threading.current_thread().name.startswith("save"):
            return
        path, *others = arguments
        if event in ("os.remove", "os.rmdir") and others[0] != -1:  # shutil.rmtree goes by handles of folders
            path = Path(f"/proc/self/fd/{others[0]}").readlink() / path
        if str(path).startswith(str(self.folder)):
            self.reach(event, str(path), str(others[0]) if event == "os.rename" else others[-1])

    def sync(self, handle):
        self.fsync(handle)
        self.reach("synced", str(Path(f"/proc/self/fd/{handle}").readlink()), None)

    def open_torn(self, path, mode, **options):
        return Torn(path, self) if mode == "wb" else self.open(path, mode, **options)


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


def state(step):
    """A model and its optimizer, filled with the number of the step."""
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(OptimConfig(), model.parameters())
    for tensor in tensors(model, optimizer):
        tensor.detach().fill_(step)
    return model, optimizer


def tensors(model, optimizer):
    return [*model.parameters(), *(tensor for own in optimizer.state.values() for tensor in own.values())]


def backend():
    return DDP(BackendConfig(device="cpu", precision="fp32"))


def save(folder, step):
    facts = Facts(1, IDENTITY, {}, {})
    cfg = CheckpointConfig(keep=2)
    saver = Saver(cfg, LocalStore(folder), backend(), facts, may_commit=lambda: None, after_commit=lambda: None)
    model, optimizer = state(step)
    saver.save(Progress(step=step), model, optimizer, {}, metric=None)
    saver.close(waits=True)
    assert [saved.failure for saved in saver.take()] == [None]


def stages_of_save(folder, step, answer):
    stages = Stages(folder)
    save(folder, step)
    answer.write_text(json.dumps(stages.seen))


def killed_save(folder, number):
    Stages(folder, kill_at=number)
    save(folder, NEXT)


def holds(folder, step):
    """Whether a step is there and loads as what was saved."""
    model, optimizer = state(-1)
    try:
        LocalStore(folder).fetch(step)
    except Damaged:
        return False
    alone = folder.parent / "alone"
    shutil.copytree(folder / step_name(step), alone / step_name(step))
    loaded = load(LocalStore(alone), model, optimizer, backend(), identity=IDENTITY, settings={}, force=False)
    shutil.rmtree(alone)
    return loaded.progress.step == step and all(bool((tensor == step).all()) for tensor in tensors(model, optimizer))


def recover(folder, answer):
    """What a next life of the run finds, and whether it can save."""
    store = LocalStore(folder)
    found = {"steps": store.steps(), "whole": [step for step in store.steps() if holds(folder, step)]}
    store.collect_garbage(ended_below=9)
    found["left"] = [path.name for path in folder.iterdir() if step_of(path.name) is None and path.name != "LATEST"]
    model, optimizer = state(-1)
    found["loaded"] = load(
        store, model, optimizer, backend(), identity=IDENTITY, settings={}, force=False
    ).progress.step
    save(folder, NEXT)
    found["next"] = [step for step in store.steps() if holds(folder, step)]
    found["next_left"] = [path.name for path in folder.iterdir() if ".tmp-" in path.name]
    found["latest"] = (folder / "LATEST").read_text()
    answer.write_text(json.dumps(found))


def call(work, *arguments):
    """In a process of its own; gives its exit status."""
    process = forked.Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def main(place):
    """Write to place/report.json the stages of saves, and what was found after a kill before each."""
    base, answer = place / "base" / "checkpoints", place / "answer.json"
    base.parent.mkdir()
    state(0)  # imports what torch imports late, once for all processes
    assert call(stages_of_save, base, OLDER, answer) == 0
    first = json.loads(answer.read_text())
    assert call(save, base, LAST) == 0
    shutil.copytree(base.parent, place / "whole")
    assert call(stages_of_save, place / "whole" / "checkpoints", NEXT, answer) == 0
    stages, kills = json.loads(answer.read_text()), []
    for number in [number for number in range(len(stages) + 1) if is_chosen(stages, number)]:
        run = shutil.copytree(base.parent, place / "run")
        status = call(killed_save, run / "checkpoints", number)
        answer.unlink()
        recovered = call(recover, run / "checkpoints", answer)
        kills.append((number, {"status": status, "recovered": recovered, "found": json.loads(answer.read_text())}))
        shutil.rmtree(run)
    (place / "report.json").write_text(json.dumps({"first": first, "stages": stages, "kills": kills}))


def is_chosen(stages, number):
    """All but those after a file was opened for reading, and after most of the many small writes of torch.save: the
    same is there as before.
    """
    if number == 0:
        return True
    event, _, detail = stages[number - 1]
    if event == "open":
        return bool(detail & os.O_CREAT)
    is_first = event == "written" and stages[number - 2][0] == "open"
    return event != "written" or is_first or detail >= 100


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    place = tmp_path_factory.mktemp("kills")
    found = subprocess.run(
        [sys.executable, "-m", "tests.test_save_kills", place],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return json.loads((place / "report.json").read_text())


def position(stages, event, name, *, source=False):
    """The number of the first such stage; of a rename by its target, or by its source."""
    return next(
        number
        for number, (found, path, detail) in enumerate(stages)
        if found == event and str(path if source or event != "os.rename" else detail).endswith(name)
    )


def test_all_kinds_of_stages_are_met(report):
    met = {(event, Path(path).name.split(".tmp-")[0]) for event, path, _ in report["stages"]}
    for name in ("model.pt", "optimizer.pt", "ranks.pt", ".manifest.json", ".LATEST"):
        assert {("open", name), ("written", name), ("synced", name)} <= met
    assert {("os.rename", f".{step_name(NEXT)}"), ("synced", "checkpoints"), ("os.mkdir", f".{step_name(NEXT)}")} <= met
    assert {("os.rename", step_name(OLDER)), ("os.remove", "model.pt"), ("os.rmdir", f".{step_name(OLDER)}")} <= met


def test_wherever_a_save_is_killed_the_last_checkpoint_or_its_own_is_whole(report):
    stages, kills = report["stages"], report["kills"]
    assert [kill["status"] for _, kill in kills] == [-signal.SIGKILL] * (len(kills) - 1) + [0]
    commit = position(stages, "os.rename", f"checkpoints/{step_name(NEXT)}")
    removal = position(stages, "os.rename", f"checkpoints/{step_name(OLDER)}", source=True)
    assert 0 < commit < removal < len(stages)
    for number, kill in kills:
        steps = [OLDER] * (number <= removal) + [LAST] + [NEXT] * (number > commit)
        stage = stages[number] if number < len(stages) else "the end"
        assert kill["recovered"] == 0, stage
        found = kill["found"]
        assert found["steps"] == found["whole"] == steps, stage
        assert found["loaded"] == steps[-1], stage
        assert found["left"] == [], stage
        assert (found["next"], found["next_left"], found["latest"]) == ([LAST, NEXT], [], f"{step_name(NEXT)}\n"), stage


class Disk:
    """What a power cut could take: of files what was written since their last sync, of folders the names in them."""

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
            self.unsafe |= {Path(detail) / place.relative_to(path) for place in moved}
            self.unsafe |= {path.parent, Path(detail).parent}
        elif event != "open" or detail & os.O_CREAT:
            self.unsafe.add(path.parent)

    def below(self, folder):
        return {place for place in self.unsafe if place == folder or folder in place.parents}


def at_risk(disk, event, place, detail):
    """At a stage that relies on something: what for, and what of it a power cut could take."""
    is_new, moves = event == "open" and detail & os.O_CREAT, event == "os.rename"
    if is_new and place.name.startswith(".manifest"):  # it says what the files are
        return "manifest", disk.below(place.parent) - {place.parent}
    if moves and step_of(Path(detail).name) is not None:
        return "commit", disk.below(place)
    if is_new and place.name.startswith(".LATEST"):
        return "latest", disk.unsafe & {place.parent, place.parent.parent}
    if moves and step_of(place.name) is not None:
        return "removal", disk.unsafe & {place.parent}
    if event == "os.remove" and not place.name.startswith("."):  # or the step would come back, without its files
        return "deletion", disk.unsafe & {place.parent.parent}
    return None


def test_nothing_is_relied_on_that_a_power_cut_could_take(report):
    relied = []
    for stages in (report["first"], report["stages"]):
        disk = Disk()
        for event, path, detail in stages:
            found = at_risk(disk, event, Path(path), detail)
            if found is not None:
                relied.append(found)
            disk.see(event, path, detail)
    assert [places for _, places in relied if places] == []
    commit = ["manifest", "commit", "latest"]
    assert [what for what, _ in relied] == [*commit, *commit, "removal", *["deletion"] * 4]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
