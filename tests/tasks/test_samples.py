"""Samples of what a run learnt: the exported model's own answers, bounded in size, and not for the Hub."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from running import train_config, train_here
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from train.data.batches.masking import IGNORE_INDEX
from train.data.shards.order import spread
from train.observe.push import gathered
from train.run_folder import samples
from train.run_folder.samples import MOST_CHARS, Answer, Guess, Sample, Samples
from train.storage.folders import LocalFolder
from train.tasks import build_task
from train.tasks.finetune import MOST_CHARS_READ, candidates, mixed
from train.tasks.mlm.task import Blank, Spelling


def of(run: Path) -> Samples:
    written = samples.read(LocalFolder(run))
    assert written is not None
    return written


def test_a_masked_language_model_fills_blanks_as_its_export_does(prepared, tmp_path):
    run, given = tmp_path / "run", ["samples=3", "task.sop=true", "max_steps=2"]
    train_here(run, prepared, *given)
    cfg = train_config(run, prepared, *given)
    written, task = of(run), build_task(cfg)
    assert written.step == 2 and len(written.samples) == 3
    model = AutoModelForMaskedLM.from_pretrained(run / "export").eval()
    mask_id = PreTrainedTokenizerFast.from_pretrained(run / "export").mask_token_id
    cfg.task.sop = False  # whose segments are swapped in an evaluation
    drawn = {
        name: tensor[0]
        for name, tensor in build_task(cfg)
        .eval_data()
        .draw(spread(task.eval_rows, 3)[None])["inputs"]
        .items()
    }
    for number, sample in enumerate(written.samples):
        known = drawn["positions"][number][drawn["labels"][number] != IGNORE_INDEX]
        ids = drawn["input_ids"][number].clone()
        ids[known] = mask_id
        with torch.no_grad():
            output = model(
                input_ids=ids[None], token_type_ids=drawn["token_type_ids"][number][None]
            )
        shares = output.logits[0, known].softmax(-1).topk(3).values
        given = torch.tensor(
            [[guess.probability for guess in answer.guesses] for answer in sample.answers]
        )
        # other kernels, other order
        torch.testing.assert_close(given, shares[: len(given)], rtol=1e-4, atol=1e-6)
        blanks = [f"[{number}]" for number in range(1, len(given) + 1)]
        assert [
            word
            for word in sample.text.replace("[", " [").replace("]", "] ").split()
            if word in blanks
        ] == blanks
        assert "[MASK]" not in sample.text and "[CLS]" not in sample.text


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
    table = Dataset.from_list(
        [{"text": words * 11 if row == 0 else words, "label": row % 2} for row in range(101)]
    )
    rows = list(candidates(table, 25, target="label", labels=["no", "yes"]))
    assert [row["label"] for row in rows] == [("no", "yes")[row % 2] for row in range(1, 11)]
    assert spread(101, 3).tolist() == [0, 50, 100] and spread(2, 8).tolist() == [0, 1]


def test_a_long_text_is_cut_around_what_matters():
    text = "a " * 500 + "here" + " b" * 500
    cut = samples.excerpt(text, text.index("here"))
    assert (
        len(cut) <= MOST_CHARS and "here" in cut and cut.startswith("...") and cut.endswith("...")
    )
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


def test_a_piece_that_begins_with_a_space_is_told_from_the_same_letters_without_one(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    for begin, decoder in (("\u0120", decoders.ByteLevel()), ("\u2581", decoders.Metaspace())):
        pieces = ["[MASK]", "the", f"{begin}the", begin, f"{begin}{begin}of"]
        tokenizer = Tokenizer(
            models.WordLevel({piece: number for number, piece in enumerate(pieces)}, "[MASK]")
        )
        tokenizer.decoder = decoder
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        spelling = Spelling(tmp_path, mask_id=0, special_ids=[0])
        assert [spelling.piece(token) for token in range(1, 6)] == [
            "the",
            "␣the",
            "␣",
            "␣␣of",
            "token 5",
        ]


def test_samples_can_be_left_out_and_never_reach_the_hub(run_dir, prepared):
    text = max(re.split(r"\[\d\]", of(run_dir).samples[0].text), key=len)
    pushed = gathered(run_dir, "run")
    assert samples.NAME not in pushed
    contents = [path.read_bytes() if isinstance(path, Path) else path for path in pushed.values()]
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
