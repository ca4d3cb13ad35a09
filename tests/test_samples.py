"""Samples of what a run learnt: the exported model's own answers, bounded in size, and not for the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from finetuning import FP32, asking, tuned
from rejections import rejects
from running import SEQ_LEN, train_config
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from train import loop, predict
from train.attempt.preempt import StopRequest
from train.config import InputError, TrainConfig
from train.data.batches.masking import IGNORE_INDEX
from train.publish.push import gathered
from train.run_folder import samples
from train.run_folder.samples import MOST_CHARS, Answer, Guess, Sample, Samples
from train.storage.folders import LocalFolder
from train.tasks import build_task
from train.tasks.finetune import MOST_CHARS_READ, candidates, mixed, spread
from train.tasks.mlm.task import Blank, Spelling


def of(run: Path) -> Samples:
    written = samples.read(LocalFolder(run))
    assert written is not None
    return written


def trained(cfg: TrainConfig) -> Path:
    loop.run(cfg, StopRequest())
    return Path(cfg.run_dir)


# ---- of each task --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.3, 0.05])
def test_validation_sequences_are_masked_at_a_rate_of_their_own(prepared, tmp_path, rate):
    cfg = train_config(tmp_path / "run", prepared, f"task.eval_mask_rate={rate}", "task.sop=true", "max_steps=2")
    task = build_task(cfg)
    slots = {True: round(SEQ_LEN * cfg.task.mask_rate), False: round(SEQ_LEN * rate)}
    for is_training, data in ((True, task.train_data()), (False, task.eval_data())):
        labels = data.draw(np.arange(8)[None])["inputs"]["labels"]
        assert labels.shape == (1, 8, slots[is_training]) and (labels != IGNORE_INDEX).any(2).all()
    assert of(trained(cfg)).samples[0].answers
    evaluated = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("masked_accuracy" in line for line in evaluated)


def test_a_rate_that_leaves_nothing_to_read_is_rejected(prepared, tmp_path):
    with pytest.raises(InputError, match=f"task.eval_mask_rate=0.99 leaves nothing of a sequence of {SEQ_LEN} tokens"):
        build_task(train_config(tmp_path / "run", prepared, "task.eval_mask_rate=0.99"))


@pytest.mark.parametrize(("key", "value"), [("position_init", "sinusoid"), ("initializer_range", 0.1)])
@pytest.mark.parametrize("weights", ["init_from", "pretrained"])
def test_how_weights_begin_is_not_said_of_those_that_are_read(prepared, tmp_path, weights, key, value):
    given = [f"model.{weights}={tmp_path}", f"model.{key}={value}"]
    with pytest.raises(InputError, match=f"model.{key}={value} is for a new model.*set it to null"):
        build_task(train_config(tmp_path / "run", prepared, *given))


def test_a_masked_language_model_fills_blanks_as_its_export_does(prepared, tmp_path):
    cfg = train_config(tmp_path / "run", prepared, "samples=3", "task.sop=true", "max_steps=2")
    run = trained(cfg)
    written, task = of(run), build_task(cfg)
    assert written.step == 2 and len(written.samples) == 3
    model = AutoModelForMaskedLM.from_pretrained(run / "export").eval()
    mask_id = PreTrainedTokenizerFast.from_pretrained(run / "export").mask_token_id
    cfg.task.sop = False  # whose segments are swapped in an evaluation
    drawn = {
        name: tensor[0]
        for name, tensor in build_task(cfg).eval_data().draw(spread(task.eval_rows, 3)[None])["inputs"].items()
    }
    for number, sample in enumerate(written.samples):
        known = drawn["positions"][number][drawn["labels"][number] != IGNORE_INDEX]
        ids = drawn["input_ids"][number].clone()
        ids[known] = mask_id
        with torch.no_grad():
            output = model(input_ids=ids[None], token_type_ids=drawn["token_type_ids"][number][None])
        shares = output.logits[0, known].softmax(-1).topk(3).values
        given = torch.tensor([[guess.probability for guess in answer.guesses] for answer in sample.answers])
        torch.testing.assert_close(given, shares[: len(given)], rtol=1e-4, atol=1e-6)  # other kernels, other order
        blanks = [f"[{number}]" for number in range(1, len(given) + 1)]
        assert [word for word in sample.text.replace("[", " [").replace("]", "] ").split() if word in blanks] == blanks
        assert "[MASK]" not in sample.text and "[CLS]" not in sample.text


def test_a_classifier_labels_as_predict_does_some_right_some_wrong(texts, tokenizer_folder, tmp_path):
    rows = {f"{number} {text}": ("bad", "fair", "good")[number % 3] for number, text in enumerate(texts[:80])}
    data, new = tmp_path / "data.csv", tmp_path / "new.csv"
    data.write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows.items()))
    given = ["task=classify", "data=records", f"data.path={data}", "data.validation_fraction=0.5", "seq_len=64"]
    written = of(tuned(tmp_path / "run", tokenizer_folder, *given, "samples=6")).samples
    assert {answer.score for sample in written for answer in sample.answers} == {0.0, 1.0} and len(written) == 6
    new.write_text("text\n" + "".join(f'"{sample.text}"\n' for sample in written))
    out = tmp_path / "out.jsonl"
    assert predict.main([str(tmp_path / "run"), "--input", str(new), "--output", str(out), *FP32]) == 0
    for sample, line in zip(written, map(json.loads, out.read_text().splitlines()), strict=True):
        (answer,) = sample.answers
        assert answer.truth == rows[sample.text] and answer.score == float(answer.truth == line["prediction"])
        assert answer.guesses[0].text == line["prediction"]
        wanted = line["probabilities"]
        assert {guess.text: guess.probability for guess in answer.guesses} == pytest.approx(wanted, rel=1e-4)


def test_answers_to_questions_are_those_of_predict(texts, tokenizer_folder, tmp_path):
    given = asking(tmp_path, texts, train=12, dev=12, v2=True)
    written = of(tuned(tmp_path / "run", tokenizer_folder, *given, "seq_len=48", "samples=12")).samples
    out = tmp_path / "out.jsonl"
    flags = ["--input", str(tmp_path / "dev.json"), "--output", str(out), *FP32]
    assert predict.main([str(tmp_path / "run"), *flags]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [sample.answers[0].guesses[0].text for sample in written] == [line["answer"] for line in lines]
    asked = [
        one["qas"][0]
        for entry in json.loads((tmp_path / "dev.json").read_text())["data"]
        for one in entry["paragraphs"]
    ]
    for sample, question in zip(written, asked, strict=True):
        truth = question["answers"][0]["text"] if question["answers"] else ""
        assert (sample.text, sample.answers[0].truth) == (" ".join(question["question"].split()), truth)
        assert truth in sample.context
    assert any(sample.answers[0].truth == "" for sample in written)


# ---- how many, and which -------------------------------------------------------------------------------------------


def sample(name: str, score: float) -> Sample:
    return Sample(name, [Answer("a", [Guess("b", 0.5)], score)])


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ([1, 1, 1, 1, 1, 0, 0.5], "0156"),
        ([1, 1, 1, 1, 1, 1, 0], "0126"),
        ([0, 0, 0, 0, 0, 0, 1], "0126"),
        ([0, 0], "01"),
        ([], ""),
    ],
)
def test_half_of_the_samples_are_wrong_ones_if_there_are(scores, chosen):
    judged = [sample(str(number), score) for number, score in enumerate(scores)]
    assert "".join(each.text for each in mixed(judged, 4)) == chosen


def test_candidates_are_of_all_the_table_and_of_bounded_length():
    from datasets import Dataset

    words = "x" * (MOST_CHARS_READ // 10)
    table = Dataset.from_list([{"text": words * 11 if row == 0 else words, "label": row % 2} for row in range(101)])
    rows = list(candidates(table, 25, target="label", labels=["no", "yes"]))
    assert [row["label"] for row in rows] == [("no", "yes")[row % 2] for row in range(1, 11)]
    assert spread(101, 3).tolist() == [0, 50, 100] and spread(2, 8).tolist() == [0, 1]


def test_a_long_text_is_cut_around_what_matters():
    text = "a " * 500 + "here" + " b" * 500
    cut = samples.excerpt(text, text.index("here"))
    assert len(cut) <= MOST_CHARS and "here" in cut and cut.startswith("...") and cut.endswith("...")
    assert samples.excerpt("one\n two") == "one two"
    assert samples.excerpt(text).startswith("a a") and len(samples.excerpt(text)) <= MOST_CHARS


def test_a_long_sequence_is_cut_around_its_blanks(prepared):
    spelling = Spelling(prepared / "tokenizer", mask_id=4, special_ids=[0, 2, 3, 4])
    tokens = np.full(500, 50)
    places = [200, 210, 230, 240, 250]
    tokens[places] = 4
    cut = spelling.sample(tokens, [Blank(place, 50, [(50, 0.5)]) for place in places])
    assert len(cut.text) <= MOST_CHARS and 1 <= len(cut.answers) <= 4
    assert f"[{len(cut.answers)}]" in cut.text and f"[{len(cut.answers) + 1}]" not in cut.text


# ---- the file ------------------------------------------------------------------------------------------------------


def test_samples_can_be_left_out_and_never_reach_the_hub(run_dir, prepared):
    text = max(re.split(r"\[\d\]", of(run_dir).samples[0].text), key=len)
    pushed = gathered(run_dir, "run")
    assert samples.NAME not in pushed
    contents = [path.read_bytes() if isinstance(path, Path) else path for path in pushed.values()]
    assert not [content for content in contents if text.encode() in content or b'"guesses"' in content]
    trained(train_config(run_dir, prepared, "max_steps=7", "samples=0"))
    assert not (run_dir / samples.NAME).exists()  # those of the first export are gone


def test_a_run_is_whole_without_its_samples(run_dir, prepared, capsys):
    (run_dir / samples.NAME).unlink()
    (run_dir / samples.NAME).mkdir()
    trained(train_config(run_dir, prepared, "max_steps=7"))
    assert json.loads((run_dir / "outcome.json").read_text())["outcome"] == "done"
    assert "no samples of what the model has learnt are written" in capsys.readouterr().err


@pytest.mark.parametrize("most", [-1, 33])
def test_their_number_is_bounded(prepared, tmp_path, most):
    rejects(f"samples={most} must be", train_config, tmp_path / "run", prepared, f"samples={most}")
