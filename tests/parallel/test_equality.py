"""However a run is split, stopped or taken up again, it is the same run."""

import os
import signal
import subprocess

import pytest
from rejections import rejects
from run_results import assert_same_run, assert_same_weights, grad_norms, losses
from running import ROOT, command, eventually, lines, outcome, run, train_here, train_overrides
from saved_steps import cut_back

from train.config.attempt import ResumeConfig
from train.run.stopping import StopRequest


def test_the_losses_fall_so_that_equality_means_something(finished):
    assert losses(finished)[-1] < losses(finished)[0] - 0.05
    assert len(set(losses(finished))) == 6


def test_accumulation_is_a_big_batch(finished, prepared, tmp_path):
    train_here(tmp_path / "run", prepared, "micro_batch_size=2")
    assert_same_run(tmp_path / "run", finished)


def test_several_ranks_are_one_and_resume_bit_for_bit(finished, prepared, tmp_path):
    """4 ranks x 1 x accumulation 2 = 1 rank x 8, over gloo."""
    trained = tmp_path / "run"
    for folder in (trained, tmp_path / "cut"):
        result = run(train_overrides(folder, prepared, "micro_batch_size=1"), ranks=4)
        assert result.returncode == 0, result.stderr
        if folder == trained:
            cut_back(trained, tmp_path / "cut")
    assert_same_run(trained, finished)
    assert lines(trained, "summary")[0]["world_size"] == 4
    assert [line["attempt"] for line in lines(tmp_path / "cut", "summary")] == [1, 2]
    assert_same_weights(tmp_path / "cut", trained)


def test_gradients_that_ranks_send_in_bf16_are_those_of_one_rank_but_for_rounding(
    finished, prepared, tmp_path
):
    """Replicas stay equal, which each save checks. bf16 rounds each gradient, and each sum, by up to 2**-9."""
    options = ["micro_batch_size=2", "backend.grad_compression=bf16"]
    result = run(train_overrides(tmp_path / "run", prepared, *options), ranks=2)
    assert result.returncode == 0, result.stderr
    assert grad_norms(tmp_path / "run") != pytest.approx(grad_norms(finished), rel=1e-5)
    assert grad_norms(tmp_path / "run") == pytest.approx(grad_norms(finished), rel=1e-2)
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-3)


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


WSD = {"schedule": "wsd", "warmup_steps": 2}


def test_a_stable_run_gets_its_decay_by_a_new_length_from_any_of_its_checkpoints(
    toy, tmp_path, capsys
):
    """And is then the run that had this length from the start; its decay can have another share, too."""
    stop = StopRequest()
    toy.scale = lambda call: stop.ask("SIGTERM") or 1.0 if call == 8 else 1.0
    assert (
        toy.train("stable", stop=stop, max_steps=1000, optim=WSD)[1]
        == 9
        == max(toy.saved("stable"))
    )
    toy.scale = lambda call: 1.0
    # step, length, share
    ends = {
        "newest": (9, 20, None),
        "older": (6, 12, 0.5),
        "oldest": (3, 5, 0.4),
    }
    for name, (step, length, share) in ends.items():
        cut_back(tmp_path / "stable", tmp_path / name, step)
        given = {"max_steps": length, "optim": {**WSD, "decay_fraction": share}}
        assert toy.train(name, **given) == toy.train(f"whole {name}", **given) == ("done", length)
        assert (
            toy.values("train", "lr", f"whole {name}")[step - 1]
            == 0.01
            > toy.values("train", "lr", name)[-1]
        )
        after = [line for line in toy.lines("train", name) if line["attempt"] == 2]
        whole = toy.lines("train", f"whole {name}")[step:]
        assert [(line["loss"], line["lr"]) for line in after] == [
            (line["loss"], line["lr"]) for line in whole
        ]
        assert toy.weights(length, name) == toy.weights(length, f"whole {name}")
    before = (tmp_path / "older/metrics.jsonl").read_bytes()
    longer = {"max_steps": 20, "optim": {**WSD, "decay_fraction": 0.5}}
    short = {"max_steps": 10, "optim": {**WSD, "decay_fraction": 0.4}}
    rejects(
        "begins after step 10, and the rate of step 12 .*0.00683.*0.000871.*; keep the previous length",
        toy.train,
        "older",
        **longer,
    )
    too_short = "begins after step 6, and the rate of step 9 .*0.00292.*, but it was 0.01; choose a larger length"
    rejects(too_short, toy.train, "stable", **short)
    rejects(
        "optim.warmup_steps: 2 -> 3",
        toy.train,
        "older",
        max_steps=12,
        optim={**WSD, "warmup_steps": 3},
    )
    assert (tmp_path / "older/metrics.jsonl").read_bytes() == before
    assert toy.train("older", **longer, resume=ResumeConfig(force=True)) == ("done", 20)
    assert "resume.force=true: with a length of 20" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_from_its_checkpoint_also_on_another_number_of_ranks(
    finished, prepared, tmp_path, ranks
):
    run_dir = cut_back(finished, tmp_path / "run")
    if ranks == 1:
        train_here(run_dir, prepared)
        assert losses(run_dir)[6:] == losses(finished)[3:]
        assert_same_weights(run_dir, finished)
    else:
        result = run(train_overrides(run_dir, prepared), ranks=2)
        assert result.returncode == 0, result.stderr
        assert losses(run_dir)[6:] == pytest.approx(losses(finished)[3:], rel=2e-5)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_attention_is_the_same_however_it_is_computed_and_may_change_within_a_run(
    finished, prepared, tmp_path, way
):
    train_here(tmp_path / "run", prepared, f"model.attention={way}")
    assert_same_run(tmp_path / "run", finished)
    assert "attn" not in (tmp_path / "run/export/config.json").read_text()
    run_dir = cut_back(finished, tmp_path / "resumed")
    train_here(run_dir, prepared, f"model.attention={way}")
    assert losses(run_dir)[6:] == pytest.approx(losses(finished)[3:], rel=2e-5)


LONG = ["max_steps=100000", "eval_every=null", "checkpoint.every=100000", "export=false"]


def has_steps(run_dir, number):
    return (run_dir / "metrics.jsonl").is_file() and len(losses(run_dir)) >= number


def test_a_signal_ends_the_run_with_a_checkpoint_and_the_same_command_goes_on(prepared, tmp_path):
    """Sent to the whole group, loader process included, as terminals and schedulers do."""
    arguments = train_overrides(tmp_path / "run", prepared, *LONG, "data.num_workers=1")
    process = subprocess.Popen(
        command(arguments), cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    eventually(lambda: has_steps(tmp_path / "run", 3) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 75, stderr
    step = lines(tmp_path / "run", "checkpoint")[-1]["step"]
    assert f"at step {step} with a checkpoint" in stderr
    assert outcome(tmp_path / "run")["kind"] == "SIGINT"
    assert "Traceback" not in stderr
    again = run([*arguments, f"max_steps={step + 2}"])
    assert again.returncode == 0, again.stderr
    assert f"resuming from the checkpoint of step {step}" in again.stderr
    assert [line["step"] for line in lines(tmp_path / "run", "train")][-2:] == [step + 1, step + 2]
