"""Question answering: contexts to windows and back, places of answers, evaluation by questions."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from finetuning import batch_of, byte_tokenizer, squad, task_of, tuning
from rejections import rejects
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from train.config.tasks import QAConfig
from train.data.batches.buckets import with_bucket
from train.data.shards.order import PADDING
from train.storage.folders import LocalFolder
from train.tasks.finetune import drawn
from train.tasks.qa.spans import LOWEST
from train.tasks.qa.windows import QAFeaturizer, answer_tokens

SEQ_LEN = 48
SURE = 20.0  # a logit


def featurizer(tokenizer, *, seq_len=SEQ_LEN, **task):
    return QAFeaturizer(
        tokenizer,
        seq_len=seq_len,
        task=QAConfig(**{"stride": 8, **task}),
    )


@pytest.fixture(scope="module")
def make(texts, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qa")
    for name, seed, questions, v2 in (
        ("train", 1, 20, False),
        ("dev", 2, 9, False),
        ("dev2", 3, 12, True),
    ):
        (folder / f"{name}.json").write_text(
            json.dumps(squad(texts, seed=seed, questions=questions, v2=v2))
        )

    def make(*overrides, validation="dev"):
        files = [
            f"data.path={folder}",
            "data.train=train.json",
            f"data.validation={validation}.json",
        ]
        given = [
            "task=qa",
            "task.stride=8",
            "data=records",
            f"seq_len={SEQ_LEN}",
        ]
        return task_of(tuning(folder / "run", tokenizer_folder, *given, *files, *overrides))

    return make


@pytest.fixture(scope="module")
def task(make):
    return make(f"data.lengths=[{SEQ_LEN}]")


@pytest.fixture(scope="module")
def v2(make):
    return make("task.unanswerable=true", validation="dev2")


def windows_of(one, questions, contexts, **columns):
    rows = {"question": questions, "context": contexts, **columns}
    return one.features(rows, list(range(len(questions))), split="x")


def text_at(result, window, context):
    """What start and end of a window say, read back through its offsets."""
    first, offsets = (
        result["context_first"][window],
        np.array(result["offsets"][window]).reshape(-1, 2),
    )
    start, end = result["start"][window] - first, result["end"][window] - first
    return context[offsets[start, 0] : offsets[end, 1]].strip()


@pytest.mark.parametrize("kind", ["albert", "roberta"])
def test_windows_cover_the_context_overlap_by_the_stride_and_find_the_answer(
    tokenizer, texts, kind
):
    used = tokenizer if kind == "albert" else byte_tokenizer()
    context = " ".join(texts[:20])
    begin = context.index(" ", len(context) // 2) + 1
    answer = context[begin : context.index(" ", begin)].strip(".")
    answers = [{"text": [answer], "answer_start": [begin]}]
    result = windows_of(featurizer(used), ["ba be ?"], [context], answers=answers)
    windows = len(result["row"])
    assert windows > 3 and set(result["row"]) == {0}
    assert all(
        len(ids) == length <= SEQ_LEN
        for ids, length in zip(result["input_ids"], result["length"], strict=True)
    )
    spans = [np.array(offsets).reshape(-1, 2) for offsets in result["offsets"]]
    for window, offsets in enumerate(spans):
        assert len(offsets) == result["context_end"][window] - result["context_first"][window]
        assert result["input_ids"][window][0] == used.cls_token_id
        assert (
            result["input_ids"][window][result["context_first"][window] - 1] == used.sep_token_id
        )
        assert result["input_ids"][window][result["context_end"][window]] == used.sep_token_id
    for before, after in pairwise(spans):
        assert (before[-8:] == after[:8]).all()
    assert spans[0][0, 0] == 0 and spans[-1][-1, 1] == len(context)
    holding = [window for window in range(windows) if result["end"][window]]
    assert holding and len(holding) < windows
    assert {text_at(result, window, context) for window in holding} == {answer}
    assert {result["start"][window] for window in range(windows) if window not in holding} == {0}
    # RoBERTa has one segment, the others begin the second one behind the question.
    second = result["context_first"] if kind == "albert" else result["length"]
    assert result["second_at"] == second


def test_questions_are_stripped_on_the_left_and_cut():
    one = featurizer(byte_tokenizer())  # to which spaces are tokens
    windows = windows_of(one, ["   ba be", "ba be", "ba be na " * 20], ["no"] * 3)
    assert windows["input_ids"][0] == windows["input_ids"][1]
    assert windows["context_first"][2] == 12 + 3  # and <s>, </s>, </s>
    assert (one.notes("x")["cut_questions"], one.notes("x")["answers_in_no_window"]) == (1, 0)
    few = featurizer(byte_tokenizer(), seq_len=20, stride=1)
    # four bytes each: the second does not fit
    assert few.cut("\U0001f600\U0001f600") == "\U0001f600"
    assert few.cut("\u6771\u4eac\u6771\u4eac") == "\u6771"


# the second with its space, two of one character
OFFSETS = np.array([[0, 3], [3, 7], [8, 9], [8, 9], [9, 12]])


@pytest.mark.parametrize(
    ("begin", "end", "tokens"),
    [
        (0, 3, (5, 5)),
        (4, 7, (6, 6)),
        (4, 9, (6, 8)),  # all tokens of its last character
        (8, 9, (7, 8)),
        (7, 9, (7, 8)),  # an answer that begins with a space that no token has
        (1, 2, (5, 5)),  # part of a token
        (0, 12, (5, 9)),
        (9, 13, (0, 0)),  # goes on behind the window
    ],
)
def test_an_answer_is_the_tokens_that_hold_it_all(begin, end, tokens):
    assert answer_tokens(begin, end, OFFSETS, 5) == tokens
    # begins before it
    assert answer_tokens(2, 7, OFFSETS[1:], 5) == answer_tokens(0, 1, OFFSETS[:0], 5) == (0, 0)


def test_windows_without_room_and_tokenizers_without_cls_in_front_are_rejected(tokenizer):
    rejects(
        "minus 12 tokens of the question .* leaves 33 .* more than task.stride=40;",
        featurizer,
        tokenizer,
        stride=40,
    )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [CLS]",
        pair="$A [SEP] $B:1 [SEP]:1 [CLS]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    other = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="<pad>"
    )
    rejects("does not begin sequences with its", featurizer, other)
    for side in ("padding_side", "truncation_side"):
        other = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            **{**tokenizer.special_tokens_map, side: "left"},
        )
        rejects("tokenizer pads or cuts sequences on the left", featurizer, other)
    just = featurizer(tokenizer, stride=32)  # of 33
    assert len(windows_of(just, ["ba be na " * 9], ["no na " * 60])["row"]) > 20


def test_the_loss_is_the_mean_of_start_and_end_summed_over_windows_as_each_has_alone(task):
    torch.manual_seed(0)
    model = task.build_model().eval()
    items = [0, 1, 2, PADDING]
    inputs = batch_of(task.train_data(), items)
    losses = []
    with torch.no_grad():
        for row, tokens in enumerate(inputs["attention_mask"].sum(1)[:3].tolist()):
            plain = model.network(
                inputs["input_ids"][row : row + 1, :tokens],
                token_type_ids=inputs["token_type_ids"][row : row + 1, :tokens],
                start_positions=inputs["start"][row : row + 1],
                end_positions=inputs["end"][row : row + 1],
            )
            losses.append(plain.loss.item())
        assert task.loss(model, inputs).item() == pytest.approx(sum(losses), rel=1e-5)
    assert task.train_data().draw(np.array([items]))["count"] == [3]


def knowing(task, *, deny=()):
    """Statistics of a model that knows where each answer is, but takes windows of the examples `deny` to have none."""
    table = task.eval_data()
    columns = {
        name: torch.from_numpy(table.values[name].astype(np.int64)) for name in table.values
    }
    logits = torch.zeros(len(table), SEQ_LEN, 2)
    rows = torch.arange(len(table))
    owners = np.array(task.splits[0].features["row"])
    denied = torch.from_numpy(np.isin(owners, deny))
    for side, name in enumerate(("start", "end")):
        logits[rows, torch.where(denied, 0, columns[name]), side] = SURE
    return task.statistics(logits, columns).numpy(), owners


def test_a_model_that_knows_gets_everything_right(task, tmp_path):
    rows, owners = knowing(task)
    assert task.eval_rows == len(owners) > 9  # windows
    result = task.eval_metrics(rows)
    assert tuple(result) == task.metrics == ("loss", "exact_match", "f1")
    assert result["exact_match"] == result["f1"] == 100
    assert result["loss"] == pytest.approx(rows[:, 0].mean())
    task.write_evaluation(rows, LocalFolder(tmp_path), step=3)
    given = json.loads((tmp_path / "predictions/validation.json").read_text())
    examples = task.tables.examples("validation")
    assert given == {example["id"]: example["answers"]["text"][0].strip() for example in examples}
    output = json.loads((tmp_path / "evaluation.json").read_text())
    assert output["step"] == 3 and output["splits"]["validation"]["exact_match"] == 100
    assert (
        output["splits"]["validation"]["questions"]
        == 9
        == task.details["splits"]["validation"]["examples"]
    )


def test_v2_gives_no_answer_where_none_scores_higher_than_the_threshold(make, v2, tmp_path):
    rows, _ = knowing(v2)
    result = v2.eval_metrics(rows)
    assert tuple(result) == v2.metrics
    assert (
        result["f1"]
        == result["exact_match"]
        == result["has_answer_f1"]
        == result["no_answer_f1"]
        == 100
    )
    v2.write_evaluation(rows, LocalFolder(tmp_path), step=1)
    given = json.loads((tmp_path / "predictions/validation.json").read_text())
    assert {name for name, text in given.items() if not text} == {"q0", "q3", "q6", "q9"}
    output = json.loads((tmp_path / "evaluation.json").read_text())["splits"]["validation"]
    assert output["threshold"] == 0 and output["f1"] == 100
    never = make("task.unanswerable=true", "task.null_threshold=1000", validation="dev2")
    result = never.eval_metrics(rows)
    assert (
        result["no_answer_f1"] == 0 and result["has_answer_f1"] == 100 and result["best_f1"] == 100
    )


def test_part_of_the_data_is_of_whole_questions(make, task, tmp_path):
    owners = np.array(task.splits[0].features["row"])
    part = make(f"eval_examples={len(owners) // 2}")
    kept = np.array(part.splits[0].features["row"])
    assert (
        all((kept == owner).sum() == (owners == owner).sum() for owner in set(kept))
        and len(set(kept)) > 1
    )
    assert len(owners) // 4 < part.eval_rows <= len(owners) // 2
    result = part.eval_metrics(knowing(part)[0])
    assert result["exact_match"] == 100
    part.write_evaluation(knowing(part)[0], LocalFolder(tmp_path), step=1)
    assert len(json.loads((tmp_path / "predictions/validation.json").read_text())) == len(
        set(kept)
    )
    windows = Dataset.from_dict({"row": [0, 0, 0, 1, 1, 1]})
    # one question at least
    assert {len(drawn(windows, most, seed=0, split=0)) for most in range(1, 6)} == {3}


def test_statistics_of_a_model_are_those_of_its_logits_and_of_one_width_for_all_lengths(
    make, task
):
    torch.manual_seed(0)
    model = task.build_model().eval()
    inputs = batch_of(task.eval_data(), [0, 1, PADDING])
    several = make("data.lengths=[16,32]")
    assert several.k == 16 and several.buckets.lengths == (16, 32, 48)
    assert make().lengths[0] >= make().k == 20  # by default no length keeps fewer candidates
    with torch.no_grad():
        rows = task.eval_statistics(model, inputs)
        logits = model(inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"])
        for bucket in (1, 2):
            row = int(np.flatnonzero(several.buckets.evaluation == bucket)[0])
            items = with_bucket(np.array([row]), bucket)
            inputs_of_length = batch_of(several.eval_data(), items)
            assert several.eval_statistics(model, inputs_of_length).shape == (1, 2 + 4 * 16)
    torch.testing.assert_close(rows, task.statistics(logits, inputs))
    assert rows.shape == (3, 82) and (rows[2, 2:22] == LOWEST).all() and rows[2, 0] == 0
