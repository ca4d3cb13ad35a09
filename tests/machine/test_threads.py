"""The cores belong to the training: no thread beside it splits its work over a team of compute threads."""

import os
import subprocess
import sys

import pytest
from running import ROOT, train_overrides

# Prints, after each step, how many threads of the process are none of Python's, and the size of the training's team.
NATIVE = """if True:
    import os, sys, threading
    import torch
    from train import entry, loop
    end_step = loop.Recorder.end_step
    def count(self, *args, **options):
        end_step(self, *args, **options)
        print("NATIVE", len(os.listdir("/proc/self/task")) - threading.active_count(), torch.get_num_threads())
    loop.Recorder.end_step = count
    raise SystemExit(entry.main(sys.argv[1:]))
"""
SAVING = ["backend=ddp", "checkpoint.every=1", "eval_every=2", "max_steps=4", "data.num_workers=1"]
LARGE = "model.intermediate_size=2048"  # tensors that are worth a team


@pytest.mark.slow
def test_a_run_that_saves_and_evaluates_has_one_team(tmp_path, prepared):
    native, team = {}, {}
    for threads in ("1", "4"):
        settings = train_overrides(tmp_path / threads, prepared, *SAVING, LARGE)
        words, env = (
            [sys.executable, "-c", NATIVE, *settings],
            {**os.environ, "OMP_NUM_THREADS": threads},
        )
        done = subprocess.run(
            words, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        counts = [
            line.split()[1:] for line in done.stdout.splitlines() if line.startswith("NATIVE")
        ]
        assert len(counts) == 4, done.stderr
        native[threads], team[threads] = max(int(count) for count, _ in counts), int(counts[-1][1])
    assert team["1"] == 1 and native["4"] - native["1"] == team["4"] - 1
