"""However a run is split, stopped or taken up again, it is the same run."""

import os
import signal
import subprocess

import pytest
from run_results import assert_same_run, assert_same_weights, losses
from running import ROOT, command, eventually, lines, run, train_here, train_overrides
from saved_steps import cut_back


def test_the_losses_fall_so_that_equality_means_something(finished):
    assert losses(finished)[-1] < losses(finished)[0] - 0.05
    assert len(set(losses(finished))) == 6


def test_accumulation_is_a_big_batch(finished, prepared, tmp_path):
    train_here(tmp_path / "run", prepared, "micro_batch_size=2")
    assert_same_run(tmp_path / "run", finished)


def test_a_run_whose_norms_return_bf16_resumes_bit_for_bit_and_is_split_within_rounding(prepared, tmp_path):
    narrow = ["backend.precision=bf16", "backend.norms=bf16"]
    train_here(tmp_path / "whole", prepared, *narrow)
    run_dir = cut_back(tmp_path / "whole", tmp_path / "cut")
    train_here(run_dir, prepared, *narrow)
    assert losses(run_dir)[6:] == losses(tmp_path / "whole")[3:]
    assert_same_weights(run_dir, tmp_path / "whole")
    train_here(tmp_path / "split", prepared, *narrow, "micro_batch_size=2")
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_several_ranks_are_one(finished, prepared, tmp_path):
    """4 ranks x 1 x accumulation 2 = 1 rank x 8, over gloo."""
    result = run(train_overrides(tmp_path / "run", prepared, "micro_batch_size=1"), ranks=4)
    assert result.returncode == 0, result.stderr
    assert_same_run(tmp_path / "run", finished)
    assert lines(tmp_path / "run", "summary")[0]["world_size"] == 4


def test_loader_processes_change_nothing(finished, prepared, tmp_path):
    train_here(tmp_path / "run", prepared, "data.num_workers=2")
    assert losses(tmp_path / "run") == losses(finished)


@pytest.mark.parametrize("optim", ["adamw", "lamb"])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit_with_dropout(toy, optim):
    options = {"optim": {"name": optim}, "micro_batch_size": 4}
    toy.train("whole", **options)
    toy.stopped_at_once("cut", **options)
    assert toy.train("cut", **options) == ("done", 6)
    assert toy.values("train", "loss", "cut") == toy.values("train", "loss", "whole")
    assert toy.weights(6, "cut") == toy.weights(6, "whole") != toy.weights(3, "whole")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_from_its_checkpoint_also_on_another_number_of_ranks(finished, prepared, tmp_path, ranks):
    run_dir = cut_back(finished, tmp_path / "run")
    if ranks == 1:
        train_here(run_dir, prepared)
        assert losses(run_dir)[6:] == losses(finished)[3:]
        assert_same_weights(run_dir, finished)
    else:
        result = run(train_overrides(run_dir, prepared), ranks=2)
        assert result.returncode == 0, result.stderr
        assert losses(run_dir)[6:] == pytest.approx(losses(finished)[3:], rel=2e-5)


LONG = ["max_steps=100000", "eval_every=null", "checkpoint.every=100000", "export=false"]


def has_steps(run_dir, number):
    return (run_dir / "metrics.jsonl").is_file() and len(losses(run_dir)) >= number


def test_a_signal_ends_the_run_with_a_checkpoint_and_the_same_command_goes_on(prepared, tmp_path):
    """Sent to the whole group, loader process included, as terminals and schedulers do."""
    arguments = train_overrides(tmp_path / "run", prepared, *LONG, "data.num_workers=1")
    process = subprocess.Popen(command(arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    eventually(lambda: has_steps(tmp_path / "run", 3) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 75, stderr
    step = lines(tmp_path / "run", "checkpoint")[-1]["step"]
    assert f"at step {step} with a checkpoint" in stderr
    assert "SIGINT" in (tmp_path / "run" / "log" / "exit_rank_0000.json").read_text()
    assert "Traceback" not in stderr
    again = run([*arguments, f"max_steps={step + 2}"])
    assert again.returncode == 0, again.stderr
    assert f"resuming from the checkpoint of step {step}" in again.stderr
    assert [line["step"] for line in lines(tmp_path / "run", "train")][-2:] == [step + 1, step + 2]
