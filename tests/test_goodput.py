"""What faults cost, out of metrics.jsonl; and which rank holds the others up."""

import json
import time

import pytest

from train.attempt import goodput
from train.attempt.goodput import newest_saved, suggested_interval_s
from train.config import InputError, StragglerConfig
from train.run_folder.folder import RunClock
from train.telemetry.stragglers import Stragglers


@pytest.fixture
def metrics(tmp_path):
    def write(*lines, rest=""):
        path = tmp_path / "metrics.jsonl"
        path.write_text(
            "".join(json.dumps({"time_unix_s": 100.0, "attempt": 1, **line}) + "\n" for line in lines) + rest
        )
        return path

    return write


def trained(step, **more):
    return {"kind": "train", "step": step, **more}


RECOVERY = {"kind": "fault", "step": 31, "reason": "", "steps_lost": 20, "recover_s": 9.0}


def test_an_attempt_without_an_exit_record_has_lost_what_came_after_its_checkpoint(metrics):
    path = metrics(trained(10), {"kind": "checkpoint", "step": 10}, trained(20), rest='{"kind": "tra')
    lost = goodput.lost(path, {}, None, attempt=2, step=10)
    assert (lost.steps, lost.last_sign_unix_s) == (10, 100.0)
    assert "killed, without an exit record" in lost.reason and "step 20 or later" in lost.reason


def test_metrics_that_do_not_name_their_attempts_are_rejected(metrics):
    saved = {"kind": "checkpoint", "step": 20}
    assert newest_saved(metrics(saved, rest='[1, 2]\n{"half')) == 20  # damaged lines are left out
    path = metrics(rest=json.dumps({**saved, "time_unix_s": 1.0}) + "\n")
    with pytest.raises(InputError, match=r"metrics.jsonl is of an earlier version: .* model.init_from"):
        newest_saved(path)


@pytest.mark.parametrize("damaged", ['{"kind": "train", "st\x00', "[1]", '{"kind": "train"}', "[" * 99_999])
def test_a_damaged_line_is_no_reason_not_to_go_on(metrics, damaged):
    path = metrics(trained(10), rest=f"{damaged}\n{json.dumps({**trained(12), 'attempt': 1, 'time_unix_s': 105.0})}\n")
    assert goodput.lost(path, {}, None, attempt=2, step=10).steps == 2


@pytest.mark.parametrize(("released", "steps"), [(False, 7), (True, 0)])
def test_the_lease_knows_of_steps_that_no_line_states(metrics, released, steps):
    lease = {"step": 17, "released": released}
    assert goodput.lost(metrics(trained(10)), {}, lease, attempt=2, step=10).steps == steps


@pytest.mark.parametrize(
    ("outcome", "is_loss"), [("done", False), ("stopped", False), ("failed", True), ("left_at_once", True)]
)
def test_only_an_attempt_that_did_not_end_in_order_has_lost_something(metrics, outcome, is_loss):
    record = {"outcome": "stopped" if outcome == "left_at_once" else outcome, "kind": outcome, "reason": "x"}
    lost = goodput.lost(metrics(trained(10)), record, None, attempt=2, step=4)
    assert (lost.steps, "(x)" in lost.reason) == (6, True) if is_loss else lost is None
    assert goodput.lost(metrics(), record, None, attempt=1, step=0) is None


def test_only_the_last_attempt_counts_and_nothing_of_this_one(metrics):
    """The first reached step 50, the second was killed at 35, the third has said that a checkpoint was damaged."""
    second = [{**line, "attempt": 2} for line in (trained(31), RECOVERY, trained(35))]
    third = {"kind": "fault", "step": 30, "reason": "damaged", "attempt": 3, "time_unix_s": 900.0}
    lost = goodput.lost(metrics(trained(50), *second, third), {}, None, attempt=3, step=30)
    assert (lost.steps, lost.last_sign_unix_s) == (5, 100.0)


def test_facts_count_faults_and_nothing_else(metrics):
    alarm = {"kind": "fault", "step": 31, "reason": "slow"}
    summary = {"kind": "summary", "step": 40, "steps_lost": 20, "recover_s": 9.0}
    path = metrics(trained(10), RECOVERY, alarm, summary, {**RECOVERY, "steps_lost": 1, "recover_s": 2.0})
    facts = goodput.facts(path, wall_s=800.0, stall_s=0.5, save_s=3.0, step_s=2.0, max_loss_s=1800.0)
    assert (facts["faults"], facts["steps_lost"], facts["recover_s"], facts["mttf_s"]) == (2, 21, 11.0, 400.0)
    assert facts["suggested_interval_s"] == pytest.approx((2 * 0.5 * 400) ** 0.5)
    assert facts["suggested_every"] == 10


def test_the_interval_is_bounded_by_what_may_be_lost_and_by_what_a_save_takes():
    assert suggested_interval_s(0.5, 400.0, max_loss_s=1800.0) == 20.0
    assert suggested_interval_s(0.5, 400.0, max_loss_s=15.0) == 15.0
    assert suggested_interval_s(0.5, 400.0, max_loss_s=1800.0, save_s=60.0) == 60.0
    assert suggested_interval_s(0.5, None, max_loss_s=1800.0) == 1800.0


def test_a_run_is_as_old_as_the_clock_says_and_no_younger_than_its_attempts():
    now_s = time.monotonic()
    assert 3600 <= RunClock(now_s - 5, time.time() - 3600, attempts_before_s=100.0).run_s() < 3660
    assert 105 <= RunClock(now_s - 5, time.time() + 3600, attempts_before_s=100.0).run_s() < 160


def alarms(works, **settings):
    """What each line gave rise to, and the fields of the last one."""
    watcher = Stragglers(StragglerConfig(**settings), [f"host{rank}" for rank in range(len(works[0]))])
    return [watcher.see(line) for line in works], watcher.fields


def test_ranks_are_compared_with_those_of_their_stage_only():
    watcher = Stragglers(StragglerConfig(windows=2), ["a"] * 4, [0, 1, 0, 1])
    even, slow = [1.0, 3.0, 1.0, 3.0], [1.0, 3.0, 2.0, 3.0]
    texts = [watcher.see(line) for line in [*[even] * 8, *[slow] * 4]]
    assert alarmed(texts) == [9] and texts[9][0].startswith("rank 2 on a holds the others up")
    assert watcher.fields == {"slowest_rank": 2, "slowest_ratio": 2.0}
    alone = Stragglers(StragglerConfig(windows=2), ["a"] * 2, [0, 1])
    assert not any(alone.see([1.0, 3.0]) for _ in range(9)) and alone.fields == {}


def alarmed(texts):
    """Numbers of the lines that gave rise to an alarm."""
    return [number for number, alarms in enumerate(texts) if alarms]


EVEN, SLOW = [1.0, 1.0, 1.0, 1.1], [1.0, 1.0, 2.0, 1.1]


def test_a_rank_that_becomes_slow_is_named_once_with_its_machine_and_again_when_that_is_over():
    # The first line is warm-up.
    texts, fields = alarms([[1, 1, 9, 1], *[EVEN] * 3, *[SLOW] * 6, EVEN, *[SLOW] * 3, *[EVEN] * 5], windows=3)
    assert alarmed(texts) == [6, 16]
    (text,) = texts[6]
    assert text.startswith("rank 2 on host2 holds the others up: its own work takes 2.0 times the median of the other")
    assert "ranks, 3 lines in a row; look at that machine" in text
    assert texts[16] == ["rank 2 on host2 no longer holds the others up, 3 lines in a row"]
    assert fields == {"slowest_rank": 3, "slowest_ratio": 1.1}


def test_a_rank_that_is_slow_from_the_start_has_no_past_and_needs_twice_as_many_lines():
    texts, _ = alarms([SLOW] * 20, windows=3)
    assert alarmed(texts) == [6] and "6 lines in a row" in texts[6][0]


def test_of_two_ranks_the_slow_one_is_measured_by_the_other():
    texts, fields = alarms([*[[1.0, 1.0]] * 6, *[[1.0, 1.6]] * 5], windows=5)
    assert alarmed(texts) == [10] and "rank 1 on host1" in texts[10][0]
    assert fields == {"slowest_rank": 1, "slowest_ratio": 1.6}


def test_windows_of_all_lengths_are_compared_by_their_ratios():
    texts, _ = alarms([[size * work for work in EVEN] for size in (1, 10, 0.1, 5, 70, 3, 0.5, 200) * 3], windows=2)
    assert not any(texts)


def test_ranks_that_are_slow_in_turns_or_a_little_are_no_stragglers():
    turns = [[1.0, 1.0, 1.0], *([[2.0, 1.0, 1.0], [1.0, 2.0, 1.0]] * 4)]
    assert not any(alarms(turns, factor=1.5, windows=2)[0])
    assert not any(alarms([[1.0, 1.0, 1.4]] * 9, factor=1.5, windows=2)[0])
    assert alarms([[5.0]] * 9, factor=1.5, windows=2) == ([[]] * 9, {})


def test_two_slow_ranks_are_both_named_whichever_is_slower():
    slow = [[1.0, 1.0, 1.0, 2.0, 2.1], [1.0, 1.0, 1.0, 2.1, 2.0]]
    texts, _ = alarms([*[[1.0] * 5] * 4, *slow * 3], windows=3)
    assert alarmed(texts) == [6] and [text.split(" on ")[0] for text in texts[6]] == ["rank 3", "rank 4"]


def test_what_a_rank_does_by_chance_anyway_is_not_called_slow():
    """Two ranks on a shared machine: one is up to twice as slow for four lines out of ten, then for six."""
    burst, calm = [[1.0, 2.0]], [[1.0, 1.0]]
    shared = [*calm, *(calm * 6 + burst * 4) * 6]
    assert not any(alarms([*shared, *burst * 6, *calm * 6], factor=1.5, windows=5)[0])
    texts, _ = alarms([*shared, *[[1.0, 3.0]] * 6], factor=1.5, windows=5)  # slower than ever
    assert alarmed(texts) == [len(shared) + 4]
