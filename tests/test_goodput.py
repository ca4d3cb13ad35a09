"""What faults cost, out of metrics.jsonl; and which rank holds the others up."""

import json

import pytest

from train import goodput
from train.config import StragglerConfig
from train.goodput import suggested_interval_s
from train.stragglers import Stragglers


@pytest.fixture
def metrics(tmp_path):
    def write(*lines, rest=""):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps({"time_unix_s": 100.0, **line}) + "\n" for line in lines) + rest)
        return path

    return write


def trained(step):
    return {"kind": "train", "step": step}


def test_a_life_that_ended_without_a_word_has_lost_what_came_after_its_checkpoint(metrics):
    path = metrics(trained(10), {"kind": "checkpoint", "step": 10}, trained(20), rest='{"kind": "tra')
    found = goodput.lost(path, {}, None, 10)
    assert (found.steps, found.last_sign_unix_s) == (10, 100.0)
    assert "killed without a word" in found.reason and "step 20 or later" in found.reason


def test_a_damaged_line_is_no_reason_not_to_go_on(metrics):
    path = metrics(trained(10), rest='{"kind": "train", "st\x00\n[1]\n{"kind": "train"}\n')
    with path.open("a") as file:
        file.write(json.dumps({**trained(12), "time_unix_s": 105.0}) + "\n")
    assert goodput.lost(path, {}, None, 10).steps == 2


def test_the_lease_knows_of_steps_that_no_line_tells(metrics):
    path = metrics(trained(10))
    assert goodput.lost(path, {}, {"step": 17, "released": False}, 10).steps == 7
    assert goodput.lost(path, {}, {"step": 17, "released": True}, 10).steps == 0


@pytest.mark.parametrize("ended", ["done", "stopped"])
def test_a_life_that_ended_in_order_has_lost_nothing(metrics, ended):
    assert goodput.lost(metrics(trained(10)), {"outcome": ended}, None, 10) is None
    assert goodput.lost(metrics(), {}, None, 0) is None


def test_who_left_at_once_has_lost_something(metrics):
    ended = {"outcome": "stopped", "kind": "left_at_once", "reason": ""}
    assert goodput.lost(metrics(trained(10)), ended, None, 4).steps == 6


def test_only_the_last_life_is_looked_at(metrics):
    """The first reached step 50, the second died at 35."""
    fault = {"kind": "fault", "step": 31, "reason": "", "steps_lost": 20, "recover_s": 9.0}
    path, ended = metrics(trained(50), trained(31), fault, trained(35)), {"outcome": "failed", "reason": "x"}
    found = goodput.lost(path, ended, None, 30)
    assert found.steps == 5 and "(x)" in found.reason


def test_facts_count_faults_and_nothing_else(metrics):
    fault = {"kind": "fault", "step": 31, "reason": "", "steps_lost": 20, "recover_s": 9.0}
    alarm = {"kind": "fault", "step": 31, "reason": "slow"}
    summary = {"kind": "summary", "step": 40, "steps_lost": 20, "recover_s": 9.0}
    path = metrics(trained(10), fault, alarm, summary, {**fault, "steps_lost": 1, "recover_s": 2.0})
    found = goodput.facts(path, wall_s=800.0, stall_s=0.5, save_s=3.0, step_s=2.0, max_loss_s=1800.0)
    assert (found["faults"], found["steps_lost"], found["recover_s"], found["mttf_s"]) == (2, 21, 11.0, 400.0)
    assert found["suggested_interval_s"] == pytest.approx((2 * 0.5 * 400) ** 0.5)
    assert found["suggested_every"] == 10


def test_the_interval_is_bounded_by_what_may_be_lost_and_by_what_a_save_takes():
    assert suggested_interval_s(0.5, 400.0, max_loss_s=1800.0) == 20.0
    assert suggested_interval_s(0.5, 400.0, max_loss_s=15.0) == 15.0
    assert suggested_interval_s(0.5, 400.0, max_loss_s=1800.0, save_s=60.0) == 60.0
    assert suggested_interval_s(0.5, None, max_loss_s=1800.0) == 1800.0


def alarms(works, **settings):
    watcher = Stragglers(StragglerConfig(**settings), [f"host{rank}" for rank in range(len(works[0]))])
    found = []
    for line in works:
        watcher.see(line)
        found.append(watcher.take_alarm())
    return found, watcher.fields


def test_a_rank_that_is_slow_for_long_is_named_once_with_its_machine():
    works = [[1, 1, 9, 1]] + [[1.0, 1.0, 2.0, 1.1]] * 5
    found, fields = alarms(works, factor=1.5, windows=3)
    assert [text is not None for text in found] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]  # the first line is warm-up
    assert (
        "rank 2 on host2 holds the others up: its own work takes 2.0 times the median of all ranks, 3 lines" in found[3]
    )
    assert fields == {"slowest_rank": 2, "slowest_ratio": 2.0}


def test_ranks_that_are_slow_in_turns_or_a_little_are_no_stragglers():
    turns = [[1.0, 1.0, 1.0], *([[2.0, 1.0, 1.0], [1.0, 2.0, 1.0]] * 4)]
    assert not any(alarms(turns, factor=1.5, windows=2)[0])
    assert not any(alarms([[1.0, 1.0, 1.4]] * 9, factor=1.5, windows=2)[0])
    assert alarms([[5.0]] * 9, factor=1.5, windows=2) == ([None] * 9, {})
