"""The benchmark of PyTorch/XLA in its smallest form: what it counts, not what it times."""

import json
import os
import subprocess
import sys

import pytest
from running import ROOT

from benchmarks import xla

LOG_EVERY = 3


@pytest.fixture(scope="module")
def result():
    command = "-m benchmarks.xla --shape demo --rounds 1 --steps 3 --variants naive scan --log-every".split()
    # Less optimised machine code, the same graphs: it compiles in half the time.
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(LOG_EVERY)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **flags},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    return json.loads(last)


def only(values):
    """The one value of a single round."""
    least, middle, greatest = values
    assert least == middle == greatest
    return middle


def test_ours_compiles_one_graph_to_train_and_one_to_evaluate(result):
    assert only(result["scan"]["graphs"]) == 1
    assert only(result["scan"]["graphs_afterwards"]) == 1
    assert only(result["scan"]["executions"]) == 1


def test_the_naive_script_compiles_more_and_executes_more(result):
    assert only(result["naive"]["graphs"]) > only(result["scan"]["graphs"])
    assert only(result["naive"]["executions"]) > only(result["scan"]["executions"])


def test_ours_reads_the_device_for_a_line_only_and_naive_at_every_step(result):
    numbered = enumerate(result["scan"]["reads_of_steps"], start=xla.SKIPPED + 1)
    reads = {step: count > 0 for step, count in numbered}
    assert reads == {5: False, 6: True, 7: False}
    assert only(result["scan"]["number_reads"]) == 0
    assert min(result["naive"]["reads_of_steps"]) >= 1


def test_the_naive_script_unties_the_decoder(result):
    embedding = xla.SHAPES["demo"].vocab_size * 128
    untied = only(result["naive"]["parameters"]) - only(result["scan"]["parameters"])
    assert untied == embedding + xla.SHAPES["demo"].vocab_size  # and its bias


def test_other_losses_are_refused():
    same = {"naive": {"first_loss": 7.0}, "scan": {"first_loss": 7.00001, "losses": [7.0, 6.0]}}
    xla.check_same_work(same)
    with pytest.raises(RuntimeError, match="first step differ"):
        xla.check_same_work({**same, "naive": {"first_loss": 7.001}})
    with pytest.raises(RuntimeError, match="our variants differ"):
        xla.check_same_work({**same, "unrolled": {"first_loss": 7.0, "losses": [7.0, 6.001]}})
