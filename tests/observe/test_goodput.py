"""What faults cost, out of metrics.jsonl; and which rank slows the others down."""

import json
import time
from dataclasses import replace

import pytest

from train.observe.metrics import slowest
from train.run import goodput
from train.run.goodput import newest_saved
from train.run_folder.ownership import own_lease
from train.run_folder.run_folder import RunFolder
from train.storage.folders import LocalFolder


@pytest.fixture
def metrics(tmp_path):
    def write(*lines, rest=""):
        path = tmp_path / "metrics.jsonl"
        path.write_text(
            "".join(
                json.dumps({"time_unix_s": 100.0, "attempt": 1, **line}) + "\n" for line in lines
            )
            + rest
        )
        return LocalFolder(tmp_path)

    return write


def trained(step, **more):
    return {"kind": "train", "step": step, **more}


RECOVERY = {"kind": "fault", "step": 31, "reason": "", "steps_lost": 20, "recover_s": 9.0}


def test_an_attempt_without_an_outcome_has_lost_what_came_after_its_checkpoint(metrics):
    run = metrics(
        trained(10), {"kind": "checkpoint", "step": 10}, trained(20), rest='[1, 2]\n{"kind": "tra'
    )
    lost = goodput.lost(run, {}, None, attempt=2, step=10)
    assert (lost.steps, lost.last_sign_unix_s, newest_saved(run)) == (10, 100.0, 10)
    assert "killed, without an outcome" in lost.reason and "step 20 or later" in lost.reason


@pytest.mark.parametrize(("released", "steps"), [(False, 7), (True, 0)])
def test_the_lease_knows_of_steps_that_no_line_states(metrics, released, steps):
    lease = replace(own_lease(1.0), step=17, released=released)
    assert goodput.lost(metrics(trained(10)), {}, lease, attempt=2, step=10).steps == steps


@pytest.mark.parametrize(
    ("outcome", "is_loss"),
    [("done", False), ("stopped", False), ("failed", True), ("left_at_once", True)],
)
def test_only_an_attempt_that_did_not_end_in_order_has_lost_something(metrics, outcome, is_loss):
    record = {
        "outcome": "stopped" if outcome == "left_at_once" else outcome,
        "kind": outcome,
        "reason": "x",
    }
    lost = goodput.lost(metrics(trained(10)), record, None, attempt=2, step=4)
    assert (lost.steps, "(x)" in lost.reason) == (6, True) if is_loss else lost is None
    assert goodput.lost(metrics(), record, None, attempt=1, step=0) is None


def test_only_the_last_attempt_counts_and_nothing_of_this_one(metrics):
    """The first reached step 50, the second was killed at 35, the third has said that a checkpoint was damaged."""
    second = [{**line, "attempt": 2} for line in (trained(31), RECOVERY, trained(35))]
    third = {"kind": "fault", "step": 30, "reason": "damaged", "attempt": 3, "time_unix_s": 900.0}
    lost = goodput.lost(metrics(trained(50), *second, third), {}, None, attempt=3, step=30)
    assert (lost.steps, lost.last_sign_unix_s) == (5, 100.0)


@pytest.mark.parametrize(("ago_s", "wanted_s"), [(3600, 3600), (-30, 5), (None, 0)])
def test_a_run_is_as_old_as_the_clock_says_and_no_younger_than_its_attempt(
    tmp_path, ago_s, wanted_s
):
    """Another machine's clock may be ahead. A first attempt began with its process."""
    folder = RunFolder(str(tmp_path))
    if ago_s is not None:
        folder.environment.write_text(json.dumps({"first_started_unix_s": time.time() - ago_s}))
        folder.began_s -= 5
    assert wanted_s <= folder.run_s() < wanted_s + (60 if ago_s else 36_000)


@pytest.mark.parametrize("first", [1000.0, 1.7e9, 4e9])
def test_a_clock_that_was_wrong_leaves_the_goodput_open(tmp_path, first):
    """1970, a year before there was this program, or the future."""
    folder = RunFolder(str(tmp_path / "clock"))
    folder.environment.parent.mkdir()
    folder.environment.write_text(json.dumps({"first_started_unix_s": first}))
    assert folder.run_s() is None


@pytest.mark.parametrize(
    ("works", "fields"),
    [
        ([1.0, 1.0, 1.0, 1.1], {"slowest_rank": 3, "slowest_ratio": 1.1}),
        ([1.0, 2.0], {"slowest_rank": 1, "slowest_ratio": 2.0}),  # measured by the other
        ([5.0], {}),  # one alone is measured by none
        ([0.0, 0.0], {}),
    ],
)
def test_the_slowest_rank_is_named(works, fields):
    assert slowest(works) == fields
