"""Whole runs under faults: ranks and launchers killed or stuck, two jobs at once, gradients that are no numbers."""

import json
import os
import shutil

import psutil
import pytest
import torch
from forks import start_changed
from rejections import rejects
from run_results import assert_same_weights
from running import contents, eventually, lines, outcome, run, train_overrides
from saved_steps import flip, store_of
from toy import NAN, spoilt

from train import entry
from train.checkpoints import saver
from train.checkpoints.saver import SavesFail
from train.config import Failure
from train.config.attempt import NonfiniteConfig
from train.run import compose as cli
from train.run.stopping import StopRequest
from train.run_folder.ownership import Ownership
from train.storage.folders import LocalFolder

PATIENCE_S = 90.0  # never waited for unless a test fails
STEPS = 30
LONG = [
    f"max_steps={STEPS}",
    "checkpoint.every=5",
    "eval_every=null",
    "export=false",
    "log_every=1",
    "max_epochs=99",
]


def ranks_of(process, run_dir):
    """The two ranks that torchrun has started. The first one holds the run folder."""
    holder = json.loads(max((run_dir / "lease").iterdir()).read_text())["pid"]
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2 and holder in [rank.pid for rank in ranks]
    return sorted(ranks, key=lambda rank: rank.pid != holder)


def steps_logged(run_dir):
    return (
        [line["step"] for line in lines(run_dir, "train")]
        if (run_dir / "metrics.jsonl").is_file()
        else []
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, prepared):
    """Two ranks."""
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    result = run(train_overrides(run_dir, prepared, *LONG), ranks=2)
    assert result.returncode == 0, result.stderr
    return run_dir


@pytest.fixture
def start(tmp_path, prepared):
    """Starts two ranks, see `start_changed`."""

    def start(change, *settings, **options):
        return start_changed(
            tmp_path,
            change,
            train_overrides(tmp_path / "run", prepared, *LONG, *settings),
            **options,
        )

    return start


SLOW = "time.sleep(0.05)"  # so that a test can hit a step


def test_a_killed_rank_is_started_again_and_nothing_has_happened(undisturbed, start, tmp_path):
    """Twice: first a rank in the middle of a step, then rank 0."""
    run_dir = tmp_path / "run"
    process = start(SLOW, restarts=2)
    for victim, step in ((1, 7), (0, 18)):
        eventually(
            lambda step=step: (
                max(steps_logged(run_dir), default=0) >= step or not process.is_alive()
            )
        )
        ranks_of(process, run_dir)[victim].kill()
    process.join(PATIENCE_S)
    assert process.exitcode == 0, (tmp_path / "err").read_text()
    assert_same_weights(run_dir, undisturbed, STEPS)
    last = {line["step"]: line["loss"] for line in lines(run_dir, "train")}
    assert last == {line["step"]: line["loss"] for line in lines(undisturbed, "train")}
    faults = [line for line in lines(run_dir, "fault") if "steps_lost" in line]
    assert len(faults) == 2
    assert all(0 <= fault["steps_lost"] <= 2 * 5 and fault["recover_s"] > 0 for fault in faults), (
        faults
    )
    summary = lines(run_dir, "summary")[-1]
    assert 0 < summary["goodput"] < 1
    assert outcome(run_dir)["outcome"] == "done"


def test_ranks_fall_back_to_the_same_step(undisturbed, tmp_path, prepared):
    run_dir = shutil.copytree(undisturbed, tmp_path / "run")
    for name in ("model", "optimizer"):  # of the last two
        flip(run_dir / f"checkpoints/step_{STEPS if name == 'model' else STEPS - 5:08d}/{name}.pt")
    result = run(train_overrides(run_dir, prepared, *LONG), ranks=2)
    assert result.returncode == 0, result.stderr
    assert f"step {STEPS} is damaged (model.pt has sha256" in result.stderr
    assert f"step {STEPS - 5} is damaged (optimizer.pt has sha256" in result.stderr
    assert_same_weights(run_dir, undisturbed, STEPS)
    assert len(store_of(run_dir).quarantined()) == 2


# Rank 1 of the first attempt hangs in its twelfth step.
HANGS = """if (next(calls), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (12, "1", "0"):
        time.sleep(1000)"""


def test_a_stuck_rank_is_named_and_the_run_goes_on(undisturbed, start, tmp_path):
    """It no longer comes to the collective, in which the other one waits."""
    run_dir = tmp_path / "run"
    process = start(HANGS, "watchdog.step_s=4", restarts=1)
    process.join(PATIENCE_S)
    assert process.exitcode == 0, (tmp_path / "err").read_text()
    assert_same_weights(run_dir, undisturbed, STEPS)
    reason = next(line["reason"] for line in lines(run_dir, "fault") if "steps_lost" in line)
    assert "stuck: rank 1 has been in" in reason
    assert "_add_gradients" in (run_dir / "log/stacks_rank_0000.txt").read_text()


def test_a_second_job_on_the_same_folder_is_rejected_and_writes_nothing(toy):
    toy.train(max_steps=3)

    with Ownership(LocalFolder(toy.folder / "run"), 600.0):
        before = contents(toy.folder)
        rejects(f"in use by process {os.getpid()} on", toy.train)
        assert contents(toy.folder) == before
    assert toy.train() == ("done", 6)


# ---- gradients that are no numbers -----------------------------------------------------------------------------------


def test_a_step_without_a_finite_gradient_is_skipped_and_counted(toy):
    toy.scale = spoilt([4])
    assert toy.train() == ("done", 6)
    assert [loss is None for loss in toy.values("train", "loss")] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert "skipped steps: 1; the gradient was not finite" in toy.faults()[0]
    (summary,) = toy.lines("summary")
    assert (summary["skipped_steps"], summary["rollbacks"]) == (1, 0)
    assert toy.saved()[6]["skipped"] == 1


def test_several_in_a_row_bring_the_run_back_and_past_their_data(toy):
    """Steps 4 to 6 have bad data; the run goes back to step 3 and on with the seventh batch."""
    toy.scale = spoilt(range(4, 7))
    assert toy.train(max_steps=9) == ("done", 9)
    assert toy.losses == 3 + 3 + 6
    assert toy.values("train", "step") == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9]
    assert toy.values("train", "examples")[-1] == 12 * 8
    assert (
        "3 steps in a row had no finite gradient, up to step 6: back to step 3" in toy.faults()[-1]
    )
    assert (toy.saved()[9]["rollbacks"], toy.saved()[9]["skipped"]) == (1, 3)
    toy.scale = spoilt([])
    toy.train("clean", max_steps=9)
    clean = toy.values("train", "loss", "clean")
    losses = toy.values("train", "loss")
    assert losses[:3] == clean[:3] and not set(losses[6:9]) & set(clean)


def test_rollbacks_are_remembered_by_a_run_that_is_killed_after_one(toy):
    """Else it would come back for ever."""
    for rollbacks, first in ((1, 4), (2, 1)):
        toy.losses = 0

        def scale(call, first=first):
            if call == first + 5:  # the third step after the rollback
                raise Killed
            return NAN if first <= call < first + 3 else 1.0

        toy.scale = scale
        with pytest.raises(Killed):
            toy.train(max_steps=50, eval_every=None)
        saved = toy.saved()
        assert saved[max(saved)]["rollbacks"] == rollbacks


class Killed(BaseException):
    pass


def test_a_run_without_a_checkpoint_has_nothing_to_go_back_to_and_leaves_with_1(toy):
    toy.scale = lambda call: NAN
    rejects("no checkpoint to go back to", toy.train, error=FloatingPointError)
    assert not toy.saved()
    assert entry.attempt(toy.config("again")) == cli.FAILED
    assert "3 steps in a row had no finite gradient" in toy.outcome("again")["reason"]


def test_weights_that_are_no_numbers_are_never_saved(toy, monkeypatch):
    """Each save is an alarm, the third ends the run."""
    monkeypatch.setattr(saver, "FAILING_S", 0.0)
    hopeless = {
        "optim": {"lr": 1e39},
        "log_every": 1000,
        "nonfinite": NonfiniteConfig(max_skips=10**6),
    }
    hopeless |= {"checkpoint": {"every": 1}, "max_steps": 300, "eval_every": None}
    rejects(
        "saves in a row failed, the last: .*; there is no checkpoint",
        toy.train,
        error=SavesFail,
        **hopeless,
    )
    assert not toy.saved()
    assert "contains NaN or infinity" in toy.faults()[0]


# ---- what ends a run, and what it then goes on with ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore."),
            "out_of_device_memory",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "out_of_host_memory",
        ),
        (MemoryError(), "out_of_host_memory"),
    ],
)
def test_memory_that_runs_out_has_its_own_reason_and_one_more_try(toy, error, kind):
    def fail(_):
        raise error

    toy.scale = fail
    for goes_on in (True, False):
        rejects(
            "memory: .*; lower micro_batch_size .*activation_checkpointing=true",
            toy.train,
            error=Failure,
        )
        ended = toy.outcome()
        assert (ended["kind"], ended["goes_on"]) == (kind, goes_on)
        assert "peak" in ended["reason"] and "micro_batch_size" in ended["reason"], ended


def test_a_loader_that_ran_out_of_shared_memory_says_so(toy):
    def fail(_):
        raise RuntimeError(
            "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that more is said"
        )

    toy.scale = fail
    said = "^out of shared memory: DataLoader worker .pid 7. is killed by signal: Bus error: /dev/shm is full; enlarge"
    rejects(said, toy.train, error=Failure)
    assert toy.outcome()["kind"] == "out_of_shared_memory"


def test_the_metrics_of_a_resumed_run_are_those_of_an_unbroken_one(toy):
    """Lines every four steps, a stop at the sixth: its window goes on in the next attempt."""
    options = {"max_steps": 12, "log_every": 4, "eval_every": None, "checkpoint": {"every": 100}}
    toy.train("whole", **options)
    stop = StopRequest()
    toy.losses = 0
    toy.scale = lambda call: stop.ask("the test") or 1.0 if call == 6 else 1.0
    assert toy.train("parts", stop=stop, **options) == ("the test", 7)
    assert toy.train("parts", **options) == ("done", 12)
    both = [
        {line["step"]: line["loss"] for line in toy.lines("train", name)}
        for name in ("whole", "parts")
    ]
    assert both[0] == both[1] and set(both[0]) == {4, 8, 12}
    first, *_, last = toy.lines("train", "parts")
    assert [(line["attempt"], line["step"], line["steps"]) for line in (first, last)] == [
        (1, 4, 4),
        (2, 12, 4),
    ]
    assert toy.values("summary", "attempt", "parts") == [1, 2]
    summary = toy.lines("summary", "parts")[-1]
    assert (last["tokens"], last["train_s"]) == (summary["tokens"], summary["train_s"])
    assert toy.weights(12, "whole") == toy.weights(12, "parts")


@pytest.mark.parametrize(
    ("options", "said", "kind"),
    [
        ({}, "the file STOP in the run folder", "stop_file"),
        ({"max_run_s": 0.5}, "max_run_s=0.5 has passed", "max_run_s"),
    ],
    ids=["stop file", "max_run_s"],
)
def test_a_stop_file_and_max_run_s_end_a_run_with_a_checkpoint(toy, options, said, kind):
    file = toy.folder / "run/STOP"
    if kind == "stop_file":
        toy.train(max_steps=1)
        file.touch()
    reason, step = toy.train(max_steps=10**6, eval_every=None, **options)
    assert (reason, toy.outcome()["kind"], toy.outcome()["checkpoint"]) == (said, kind, step)
    assert not file.exists()
