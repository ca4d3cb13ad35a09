"""What commands say: a bounded number of lines on training, the rows that are learnt from, and little with --quiet."""

from __future__ import annotations

import csv
import itertools
import logging
import re
import shutil
from typing import Any

import pytest
from running import lines, train_overrides
from toy import BERT

from train.entry import main as train
from train.machine.console import begin_program
from train.models.encoder import build_masked_lm
from train.observe.journal import FIRST_PAUSE_S, RunConsole
from train.run_folder.run_folder import set_up_logging
from train.tools import evaluate, finetune, predict, prepare

STEP_S, LOG_EVERY = 0.7, 10
EXPORT = "the export has the weights of step"
# The first line is a warning.
TUNED = ["validation has only 12 examples", "evaluation", EXPORT, "done at step 4", "report: "]
SHORT = ["max_steps=4", "eval_every=2", "checkpoint.every=2", "data.num_workers=0", "samples=2"]


def said_of(num_steps: int, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the steps whose line a run says that has a line every LOG_EVERY steps."""
    set_up_logging(None)
    logging.getLogger("train").addHandler(caplog.handler)
    caplog.clear()
    console = RunConsole(step=0, total_steps=num_steps, is_first_rank=True)
    line: dict[str, Any] = dict.fromkeys(("loss", "lr", "grad_norm", "tokens_per_s"), 1.0)
    line |= {"data_wait_s": 0.0, "step_s": STEP_S, "steps": LOG_EVERY}
    for step in range(LOG_EVERY, num_steps + 1, LOG_EVERY):
        console.train({**line, "step": step, "train_s": step * STEP_S})
    return [int(message.split()[1].split("/")[0]) for message in caplog.messages]


@pytest.mark.parametrize("days", [0.01, 1, 3, 7])
def test_lines_become_rarer_and_are_bounded(days, caplog):
    begin_program()
    num_steps = round(days * 86400 / STEP_S) // LOG_EVERY * LOG_EVERY
    steps = said_of(num_steps, caplog)
    assert steps[0] == LOG_EVERY and steps[-1] == num_steps
    pauses_s = [(b - a) * STEP_S for a, b in itertools.pairwise(steps)]
    assert FIRST_PAUSE_S <= pauses_s[0] < FIRST_PAUSE_S + LOG_EVERY * STEP_S
    assert pauses_s[:-1] == pytest.approx(sorted(pauses_s[:-1]), abs=LOG_EVERY * STEP_S * 1.01)
    assert len(steps) <= 220
    assert len(steps) > min(150, num_steps / LOG_EVERY / 3)


def test_who_types_log_every_gets_each_of_its_lines(tmp_path, prepared, capfd):
    run = tmp_path / "run"
    assert train([*train_overrides(run, prepared), "max_steps=3", "export=false"]) == 0
    said = capfd.readouterr().err
    assert said.count("tokens/s") == len(lines(run, "train")) == 3
    assert re.search(r"^[\d,]+ rows for training, [\d,]+ for validation$", said, re.M)


@pytest.fixture(scope="module")
def model(tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "model"
    build_masked_lm(BERT, vocab_size=120, pad_id=0, seq_len=64).export(folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("flags", [[], ["--quiet"]])
def test_a_quiet_command_says_its_result_alone(flags, texts, corpus, model, tmp_path, capfd):
    rows = tmp_path / "rows.csv"
    run = tmp_path / "run"
    data = tmp_path / "shards"
    with rows.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([text, ("bad", "good")[n % 2]] for n, text in enumerate(texts[:80]))
    text = ["corpus=text", f"corpus.path={corpus}", f"output={data}", "tokenizer.vocab_size=120"]
    text += ["seq_len=64", "validation_fraction=0.25"]
    tuning = [str(rows), f"--model={model}", f"--output={run}", *SHORT]
    cached = f"data.cache_dir={tmp_path / 'cache'}"
    learning = train_overrides(tmp_path / "pretrained", data, "max_steps=3")
    commands = (
        (prepare.main, text, "", ["training and"]),
        (train, learning, "starting", ["evaluation", EXPORT, "done at step 3"]),
        (finetune.main, [*tuning, cached], "2 classes: bad, good", TUNED),
        (evaluate.main, [str(run), cached], "validation rows of", ["f1_macro"]),
        (predict.main, [str(run), f"data.path={rows}", cached], "", ['"prediction"']),
    )
    for main, words, progress, results in commands:
        assert main([*words, *flags]) == 0
        out, err = capfd.readouterr()
        assert [each for each in results if each not in out + err] == []
        if flags:
            assert len(err.splitlines()) <= len(results), err
        assert (progress in err) != bool(flags) or not progress
