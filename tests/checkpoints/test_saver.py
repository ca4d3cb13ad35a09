"""Saves beside the training: of the moment they were asked for, one at a time, and an alarm when they fail."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from forks import DEVICE
from running import train_config
from torch import nn

from train.checkpoints.loader import load
from train.checkpoints.manifest import Manifest, Progress, step_of
from train.checkpoints.saver import FAILING_S, AsyncSaver, SavesFail
from train.checkpoints.store import LocalStore
from train.config import BackendConfig, CheckpointConfig, OptimConfig
from train.parallel.ddp import DDP
from train.parallel.engines import Engine
from train.parallel.guards import tied_names
from train.parallel.optim import build_optimizer
from train.run_folder.ownership import LeaseLost
from train.tasks import build_task

DRAFT = Manifest(0, 1, {}, {}, {}, 1, "ddp", None)
PATIENCE_S = 90.0  # never waited for unless a test fails
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class HeldStore(LocalStore):
    """Saves wait before the first byte is written until it is opened."""

    def __init__(self, path):
        super().__init__(path)
        self.reached = threading.Event()
        self.opened = threading.Event()

    def begin(self, step, num_bytes):
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        return super().begin(step, num_bytes)


def backend():
    return DDP(BackendConfig(device=DEVICE, precision="fp32"))


def saver_of(store, *, check_owner=lambda: None, max_wait_s=10.0, **settings):
    folder = SimpleNamespace(ownership=SimpleNamespace(check=check_owner), mirror=lambda: None)
    result = AsyncSaver(
        CheckpointConfig(**settings), store, replica(*built()), backend(), DRAFT, folder
    )
    result.max_wait_s = max_wait_s
    return result


def replica(model, optimizer):
    return Engine(backend(), model, optimizer)


def built(*, width=16, adamw=None):
    """A small model and its optimizer, one step from the start."""
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)).to(DEVICE)
    optimizer = build_optimizer(OptimConfig(), model.parameters(), adamw=adamw)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(4, 8).to(DEVICE)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model, optimizer):
    return [
        *model.parameters(),
        *(tensor for own in optimizer.state.values() for tensor in own.values()),
    ]


def save(saver, step, trained, **options):
    saver.engine = replica(*trained)
    saver.save(Progress(step=step), {"loss_sum": 0.0}, metric=None, **options)


def saved(saver, step, trained):
    """Save and wait; returns the failure."""
    save(saver, step, trained)
    saver.wait()
    (result,) = saver.take()
    assert result.step == step
    return result.failure


def left(store):
    """What is in the folder beside checkpoints."""
    return [path.name for path in store.path.iterdir() if step_of(path.name) is None]


# ---- beside the training --------------------------------------------------------------------------------------------


def test_what_is_saved_is_of_the_moment_of_the_call_while_training_goes_on(tmp_path):
    store = HeldStore(tmp_path)
    trained = built()
    progress = Progress(step=3, window={"steps": 2})
    saver = saver_of(store)
    wanted = [tensor.detach().clone() for tensor in tensors(*trained)]
    torch.manual_seed(7)
    random = torch.get_rng_state()
    saver.engine = replica(*trained)
    saver.save(progress, {"loss_sum": 1.5}, metric=2.5)
    assert store.reached.wait(PATIENCE_S)
    assert store.steps() == [] and saver.take() == [] and saver.newest is None
    for _ in range(3):
        step(*trained)
    progress.step = 99
    progress.window["steps"] = 99
    store.opened.set()
    saver.close(waits=True)
    (result,) = saver.take()
    assert (result.step, result.failure, saver.newest) == (3, None, 3)
    assert result.save_s >= result.stall_s
    other = built()
    loaded = load(store, replica(*other), backend(), identity={}, settings={}, force=False)
    for tensor, before, now in zip(tensors(*other), wanted, tensors(*trained), strict=True):
        assert torch.equal(tensor, before) and not torch.equal(tensor, now)
    assert (loaded.progress.step, loaded.progress.window, store.manifest(3).metric) == (
        3,
        {"steps": 2},
        2.5,
    )
    assert loaded.ranks == [{"loss_sum": 1.5}]  # the random numbers are put back already
    assert torch.equal(torch.get_rng_state(), random)


def test_a_save_that_comes_too_early_is_left_out_and_reported(tmp_path, monkeypatch):
    """It is no failure, before more work is at risk than may be lost."""
    store = HeldStore(tmp_path)
    trained = built()
    saver = saver_of(store, max_wait_s=0.01)
    wanted = trained[0][0].weight.detach().cpu().clone()
    save(saver, 3, trained)
    step(*trained)
    save(saver, 6, trained)
    (skipped,) = saver.take()
    assert (skipped.step, skipped.num_bytes) == (6, 0)
    assert "skipped: the previous save has been running for 0 s" in skipped.failure
    seen = [saver.failure]
    monkeypatch.setattr("train.checkpoints.saver.MAX_LOSS_S", 1e-9)
    monkeypatch.setattr("train.checkpoints.saver.FAILING_S", 0.0)
    for number in (9, 12, 15):
        save(saver, number, trained)
        seen.append(saver.failure)
    assert [failure is not None for failure in seen] == [False, False, False, True]
    store.opened.set()
    saver.close(waits=True)
    assert [(result.step, result.failure) for result in saver.take()[3:]] == [
        (3, None)
    ] and saver.failure is None
    assert store.steps() == [3]
    assert torch.equal(torch.load(tmp_path / "step_00000003/model.pt")["0.weight"], wanted)


def test_the_last_save_waits_as_long_as_it_takes_with_a_heartbeat(tmp_path):
    store = HeldStore(tmp_path)
    trained = built()
    saver = saver_of(store, max_wait_s=0.0)
    save(saver, 3, trained)
    # without one it would wait for ever
    save(saver, 6, trained, must=True, on_wait=store.opened.set)
    saver.close(waits=True)
    assert [(result.step, result.failure) for result in saver.take()] == [(3, None), (6, None)]
    assert store.steps() == [3, 6]


@pytest.mark.parametrize(
    "options",
    [[], ["model.architecture=bert", "model.embedding_size=null"]],
    ids=["albert", "bert"],
)
def test_tied_weights_are_stored_once_and_load_tied(tmp_path, prepared, options):
    torch.manual_seed(0)
    task = build_task(train_config(tmp_path, prepared, *options))
    models = [task.build_model() for _ in range(2)]
    optimizers = [build_optimizer(OptimConfig(), model.parameters()) for model in models]
    tied = tied_names(models[0])
    assert len(tied) == 2  # the pieces' embedding and the decoder, their bias and the decoder's
    saver = saver_of(LocalStore(tmp_path))
    store = LocalStore(tmp_path)
    assert saved(saver, 3, (models[0], optimizers[0])) is None
    assert len(saver.staging.buffers) == len(tensors(models[0], optimizers[0]))
    stored = torch.load(tmp_path / "step_00000003/model.pt", weights_only=True)
    for first, second in tied:
        assert stored[first].data_ptr() == stored[second].data_ptr()
    load(
        store, replica(models[1], optimizers[1]), backend(), identity={}, settings={}, force=False
    )
    assert tied_names(models[1]) == tied
    for name, value in models[1].state_dict().items():
        assert torch.equal(value, models[0].state_dict()[name]), name


# ---- saves that fail ------------------------------------------------------------------------------------------------


class Rejecting(LocalStore):
    """A disk that has no space for a file of the save, or for what comes after."""

    rejected = ""

    def begin(self, step, num_bytes):
        folder = super().begin(step, num_bytes)
        if self.rejected.endswith(".pt"):
            # the kernel rejects every byte, as on a full disk
            (folder / self.rejected).symlink_to("/dev/full")
        return folder

    def commit(self, scratch, manifest):
        if self.rejected == "commit":
            raise FULL
        super().commit(scratch, manifest)


@pytest.mark.parametrize("rejected", ["model.pt", "optimizer.pt", "ranks.pt", "commit"])
def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_nothing_else(tmp_path, rejected):
    store = Rejecting(tmp_path)
    trained = built()
    saver = saver_of(store)
    assert saved(saver, 3, trained) is None
    store.rejected = rejected
    assert "No space left on device" in saved(saver, 6, trained)
    assert (store.steps(), left(store), saver.newest, saver.failure) == ([3], [], 3, None)
    store.rejected = ""
    assert saved(saver, 9, trained) is None
    assert store.steps() == [3, 9]


def test_several_failures_in_a_row_end_the_run_after_a_while_and_a_success_forgives_them(tmp_path):
    store = Rejecting(tmp_path)
    trained = built()
    saver = saver_of(store)
    seen = []
    for number, rejected in enumerate(["model.pt", "", "commit", "model.pt", "model.pt"], start=1):
        store.rejected = rejected
        saved(saver, number, trained)
        seen.append(saver.failure)
    assert seen == [None] * 5  # the disk may be back in a moment
    saver.worked_s -= FAILING_S
    seen[4] = saver.failure
    for words in (
        "3 saves in a row failed",
        "No space left on device",
        f"newest checkpoint is of step 2 ({tmp_path})",
    ):
        assert words in str(seen[4])
    assert store.steps() == [2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["weights.1.bias", "moments.state.0.exp_avg"])
def test_a_state_that_is_no_longer_finite_is_not_saved(tmp_path, name, value):
    store = LocalStore(tmp_path)
    (model, optimizer) = built()
    saver = saver_of(store)
    assert saved(saver, 3, (model, optimizer)) is None
    broken = (
        model[1].bias
        if name.startswith("weights")
        else optimizer.state[model[0].weight]["exp_avg"]
    )
    broken.detach().view(-1)[-1] = value
    failure = saved(saver, 6, (model, optimizer))
    assert (
        failure
        == f"FloatingPointError: {name} contains NaN or infinity; such a state is not saved"
    )
    assert (store.steps(), left(store)) == ([3], [])


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [5, 6])
def test_a_run_has_failed_if_its_last_save_has(toy, monkeypatch, step):
    """Not if the one before has, even if that is known only when the last one begins. The same command continues."""
    last_begins = threading.Event()
    options = {"eval_every": None, "checkpoint": {"every": 1, "keep": 0}}
    wait = AsyncSaver.wait
    begin = LocalStore.begin

    def waiting(self, *options):
        last_begins.set()
        wait(self, *options)

    def rejecting(self, now, num_bytes):
        if now == step:
            assert last_begins.wait(PATIENCE_S)
            raise FULL
        return begin(self, now, num_bytes)

    monkeypatch.setattr(AsyncSaver, "wait", waiting)
    monkeypatch.setattr(LocalStore, "begin", rejecting)
    if step == 5:
        assert toy.train(**options) == ("done", 6)
        assert toy.outcome()["checkpoint"] == 6
    else:
        with pytest.raises(
            SavesFail,
            match="saving step 6: OSError: .*No space left.* newest checkpoint is of step 5",
        ):
            toy.train(**options)
        ended = toy.outcome()
        assert (ended["outcome"], ended["kind"], ended["checkpoint"]) == (
            "failed",
            "saves_fail",
            5,
        )
    assert (
        toy.faults()[0]
        == f"checkpoint of step {step}: OSError: [Errno 28] No space left on device"
    )
    monkeypatch.setattr(LocalStore, "begin", begin)
    assert toy.train(**options) == ("done", 6)


def test_a_job_that_lost_the_run_folder_does_not_commit(tmp_path):
    lost = []

    def check_owner():
        if lost:
            raise LeaseLost("another job owns it now")

    store = LocalStore(tmp_path)
    trained = built()
    saver = saver_of(store, check_owner=check_owner)
    assert saved(saver, 3, trained) is None
    lost.append(True)
    assert saved(saver, 6, trained) == "LeaseLost: another job owns it now"
    assert (store.steps(), left(store)) == ([3], [])
