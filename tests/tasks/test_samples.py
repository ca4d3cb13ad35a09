"""Samples of what a run learnt: the exported model's own answers, bounded in size, and not for the Hub."""

import json
import re
from pathlib import Path

from running import train_here

from train.observe.push import gathered
from train.run_folder import samples
from train.run_folder.samples import Samples
from train.storage.folders import LocalFolder


def of(run: Path) -> Samples:
    written = samples.read(LocalFolder(run))
    assert written is not None
    return written


def test_a_masked_language_model_fills_a_blank_of_each_sequence(prepared, tmp_path):
    run = tmp_path / "run"
    train_here(run, prepared, "samples=3", "task.sop=true", "max_steps=2")
    written = of(run)
    assert written.step == 2 and len(written.samples) == 3
    for sample in written.samples:
        (answer,) = sample.answers
        shares = [guess.probability for guess in answer.guesses]
        assert len(shares) == 3 and shares == sorted(shares, reverse=True) and shares[-1] > 0
        assert answer.truth and sample.text.count("[1]") == 1
        assert "[MASK]" not in sample.text and "[CLS]" not in sample.text


def test_samples_can_be_left_out_and_never_reach_the_hub(run_dir, prepared):
    text = max(re.split(r"\[\d\]", of(run_dir).samples[0].text), key=len)
    pushed = gathered(run_dir)
    assert samples.NAME not in pushed
    contents = [path.read_bytes() for path in pushed.values()]
    assert not [
        content for content in contents if text.encode() in content or b'"guesses"' in content
    ]
    train_here(run_dir, prepared, "max_steps=7", "samples=0")
    assert not (run_dir / samples.NAME).exists()  # those of the first export are gone


def test_a_run_is_whole_without_its_samples(run_dir, prepared, capsys, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(samples, "write", fail)
    train_here(run_dir, prepared, "max_steps=7")
    assert json.loads((run_dir / "outcome.json").read_text())["outcome"] == "done"
    assert "could not write samples of the model's answers" in capsys.readouterr().err
