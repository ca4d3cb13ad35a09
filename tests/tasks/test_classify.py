"""Classification: texts to tokens, the loss as torch's weighted mean, metrics and predictions in the data's order."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from finetuning import batch_of, read_rows, task_of, tuning, write_rows
from rejections import rejects

from train.config.tasks import ClassifyConfig
from train.data.records.table_facts import best_lengths, padding_share
from train.data.shards.order import PADDING
from train.storage.folders import LocalFolder
from train.tasks import finetune
from train.tasks import texts as sizes_of_texts
from train.tasks.classify import ClassifyFeaturizer, class_weights, scores, tables
from train.tasks.texts import lengths_up_to

LABELS = ["bad", "fair", "good"]


@pytest.fixture(scope="module")
def data(texts, tmp_path_factory):
    """train.csv of 90 rows, dev.csv of 20 and other.csv of 12; the label is in the text."""
    folder = tmp_path_factory.mktemp("data")
    labels = ["good"] * 6 + ["bad"] * 3 + ["fair"]
    rows = []
    for number, text in enumerate(texts[:122]):
        label = labels[number % 10]
        rows.append({"name": f"row{number}", "text": f"{label} {text}", "label": label})
    for name, part in {"train": rows[:90], "dev": rows[90:110], "other": rows[110:]}.items():
        write_rows(folder / f"{name}.csv", part)
    return folder


@pytest.fixture(scope="module")
def make(data, tokenizer_folder, tmp_path_factory):
    """Tasks with the same cache."""
    cache = tmp_path_factory.mktemp("cache")

    def make(*overrides):
        files = [
            f"data.path={data}",
            "data.train=train.csv",
            "data.validation=dev.csv",
            "data.columns.id=name",
        ]
        given = [
            "task=classify",
            "data=records",
            *files,
            "data.more_validation={other: other.csv}",
            "seq_len=64",
        ]
        return task_of(tuning(cache / "run", tokenizer_folder, *given, *overrides))

    return make


@pytest.fixture(scope="module")
def task(make):
    return make("task.class_weights=balanced", "task.label_smoothing=0.1", "data.lengths=[16,32]")


def test_a_step_is_cut_for_padding_only_where_layers_read_it(make, monkeypatch):
    monkeypatch.setattr(
        sizes_of_texts, "CPU_PASS", 0
    )  # a pass that costs nothing is always worth it
    for overrides, is_cut in {
        (): False,
        ("backend.compile=layers",): True,
        ("model.architecture=deberta", "model.embedding_size=null"): True,
    }.items():
        task = make("backend.device=cpu", "data.lengths=[16,32]", *overrides)
        assert (task.micro_batches(32, 1) > 1) == is_cut
    monkeypatch.setattr(finetune, "CPU_TOKENS", 16)  # as for a batch of very many rows
    assert make("backend.device=cpu", "data.lengths=[16,32]").micro_batches(32, 1) == 32


def test_texts_are_cut_and_counted(tokenizer):
    featurizer = ClassifyFeaturizer(tokenizer, seq_len=8)
    rows = {"text": ["ba be", "ba be " * 30, "na"], "label": [0, 1, 2]}
    result = featurizer.features(rows, [10, 11, 12], split="train")
    assert result["length"] == [len(ids) for ids in result["input_ids"]]
    assert result["length"][1] == 8
    assert result["input_ids"][0] == tokenizer("ba be")["input_ids"]
    assert result["input_ids"][1][-1] == tokenizer.sep_token_id
    assert result["second_at"] == result["length"]
    assert (result["row"], result["label"]) == ([10, 11, 12], [0, 1, 2])
    lost = len(tokenizer(rows["text"][1])["input_ids"]) - 8
    assert featurizer.tokens_cut.tolist() == [0, lost, 0] and lost > 50
    counts = {
        "truncated": 1,
        "tokens_cut": lost,
        "unknown_tokens": 0,
        "text_tokens": sum(result["length"]) - 6,
    }
    assert featurizer.notes("train") == counts and featurizer.notes("validation") == {}


def test_of_a_pair_the_longer_text_is_cut_and_the_second_begins_behind_the_separator(tokenizer):
    featurizer = ClassifyFeaturizer(tokenizer, seq_len=24)
    result = featurizer.features(
        {"text": ["ba", "ba be " * 30], "text_pair": ["no " * 30, "to"]}, [0, 1], split="x"
    )
    assert result["length"] == [24, 24] and result["label"] == [0, 0]
    separators = [ids.index(tokenizer.sep_token_id) + 1 for ids in result["input_ids"]]
    assert result["second_at"] == separators
    assert separators[0] < 8 and separators[1] > 16


def test_the_fast_way_to_encode_gives_the_tokens_of_the_library(tokenizer, texts):
    featurizer = ClassifyFeaturizer(tokenizer, seq_len=12)
    first = [*texts[:40], "", "[SEP] [MASK]", "\U0001f600 \u0645", " ".join(texts[:9])]
    for second in (None, first[::-1]):
        fast = featurizer.encode_fast(first, second)
        plain = featurizer.encode(first, second, truncation="longest_first").encodings
        for name in ("ids", "type_ids", "special_tokens_mask"):
            assert [getattr(each, name) for each in fast] == [
                getattr(each, name) for each in plain
            ]
        assert [bool(each.overflowing) for each in fast] == [bool(e.overflowing) for e in plain]


def test_a_special_token_that_the_tokenizer_makes_of_a_text_becomes_the_unknown_one(
    tokenizer, texts
):
    """Whatever it makes of the name, as a vocabulary that has it does; other rows keep their tokens."""
    featurizer = ClassifyFeaturizer(tokenizer, seq_len=64)
    rows = {"text": [texts[0], texts[1], texts[2]], "label": [0, 0, 0]}
    plain = featurizer.features(rows, [0, 1, 2], split="x")["input_ids"]
    other = plain[1][2]
    featurizer.stand_ins[other] = tokenizer.unk_token_id
    replaced = featurizer.features(rows, [0, 1, 2], split="x")["input_ids"]
    for before, after in zip(plain, replaced, strict=True):
        assert after == [tokenizer.unk_token_id if token == other else token for token in before]


def test_special_tokens_in_a_text_are_text(tokenizer):
    featurizer = ClassifyFeaturizer(tokenizer, seq_len=64)
    row = {"text": ["ba<pad>be [SEP] na[MASK] [CLS]"]}
    ids = featurizer.features(row, [0], split="x")["input_ids"][0]
    # its vocabulary spells it
    assert "<pad>" in tokenizer.tokenize(row["text"][0], split_special_tokens=True)
    special = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")}
    assert [token for token in ids if token in special] == [
        tokenizer.cls_token_id,
        tokenizer.sep_token_id,
    ]


def test_the_last_length_is_that_of_the_longest_row_up_to_what_the_model_can_read(make):
    whole, cut = (
        make("seq_len=null", "model.max_positions=600"),
        make("seq_len=null", "model.max_positions=24"),
    )
    longest = max(
        rows.max() for rows in (whole.train_data().row_lengths, whole.eval_data().row_lengths)
    )
    assert (
        whole.sizes.seq_len == 512
        and whole.seq_len == whole.lengths[-1] == -(-longest // 8) * 8 < 64
    )
    assert cut.sizes.seq_len == cut.seq_len == 24
    own = make("seq_len=null", "data.lengths=[]").lengths  # a batch is padded to its longest row
    assert own == (*range(8, whole.seq_len, 8), whole.seq_len)
    assert make("data.lengths=[]", "backend=xla").lengths == (64,)
    rejects("seq_len=64 is longer than the model's 48 positions", make, "model.max_positions=48")
    assert lengths_up_to(64, []) == (64,)
    assert lengths_up_to(64, [16, 32]) == lengths_up_to(64, [16, 32, 64]) == (16, 32, 64)
    rejects("data.lengths has 128, which is more than seq_len=64", lengths_up_to, 64, [16, 128])


@pytest.mark.parametrize(
    ("settings", "gpus", "step", "most"),
    [
        ([], False, 8, 64),
        ([], True, 8, 64),
        (["backend.compile=layers"], False, 16, 3),
        (["backend=xla"], False, 16, 3),
    ],
)
def test_by_default_lengths_keep_padding_low_or_are_few_graphs(
    make, monkeypatch, settings, gpus, step, most
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    task = make("backend.device=auto", *settings)
    *shorter, _ = task.lengths
    assert all(length % step == 0 for length in task.lengths) and len(task.lengths) <= most
    rows = task.tables.lengths("train")
    every = best_lengths(rows, task.lengths[-1], most, step=step, shortest=8)
    assert padding_share(rows, task.lengths) < max(0.1, padding_share(rows, every) + 0.02)
    assert padding_share(rows, [*shorter[1:], task.lengths[-1]]) > 0.1  # none is superfluous


def test_weights_fit_the_labels_and_balanced_ones_are_those_of_scikit_learn():
    from sklearn.utils.class_weight import compute_class_weight

    counts = np.array([27, 9, 54])
    result = class_weights(ClassifyConfig(class_weights="balanced"), LABELS, counts)
    wanted = compute_class_weight(
        "balanced", classes=np.arange(3), y=np.repeat(np.arange(3), counts)
    )
    assert result == pytest.approx(wanted)
    assert class_weights(ClassifyConfig(), LABELS, counts) is None
    for cfg, counts, says in (
        (
            ClassifyConfig(class_weights=[1, 2]),
            np.ones(3),
            r"2 numbers for 3 labels \(bad, fair, good\)",
        ),
        (
            ClassifyConfig(class_weights="balanced"),
            np.array([3, 0, 3]),
            "all or no training rows have the label fair",
        ),
    ):
        rejects(says, class_weights, cfg, LABELS, counts)


@pytest.mark.parametrize("smoothing", ["0", "0.2"])
@pytest.mark.parametrize(
    "weights", ["", "task.class_weights=balanced", "task.class_weights=[1,5,0.5]"]
)
def test_however_a_batch_is_split_the_loss_is_torchs_weighted_mean(make, weights, smoothing):
    task = make("data.lengths=[64]", f"task.label_smoothing={smoothing}", *weights.split())
    torch.manual_seed(0)
    model = task.build_model().eval()
    assert task.flops_per_example(model, 64) > task.flops_per_example(model, 16) > 0
    rows = task.train_data()
    whole = batch_of(rows, range(12))
    with torch.no_grad():
        logits = model(whole["input_ids"], whole["attention_mask"], whole["token_type_ids"])
        settings = {"weight": task.weights, "label_smoothing": float(smoothing)}
        wanted = F.cross_entropy(logits, whole["labels"], **settings)
        for parts in (
            [[*range(12)]],
            [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, PADDING, PADDING]],
        ):
            total = sum(task.loss(model, batch_of(rows, part)).item() for part in parts)
            count = sum(rows.draw(np.array(parts))["count"])
            assert total / count == pytest.approx(wanted.item(), rel=1e-5)


TRUE, PREDICTED = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 1, 1, 2, 0])


def scored(truth, predicted, *, labels=LABELS):
    return scores(np.array(truth), np.array(predicted), num_labels=len(labels))


@pytest.mark.filterwarnings("error")
def test_metrics_worked_out_by_hand():
    # F1: bad 2*2/(2*2+1+1) = 2/3, fair 2*1/(2*1+1+0) = 2/3, good 2*1/(2*1+0+1) = 2/3. Matthews: of 6 rows 4 are right;
    # 3, 1 and 2 are of each label, 3, 2 and 1 predicted: (4*6 - (3*3 + 1*2 + 2*1)) / (6*6 - (3*3 + 1*1 + 2*2)) = 11/22
    wanted = {
        "accuracy": 4 / 6,
        "f1_macro": 2 / 3,
        "f1_weighted": 2 / 3,
        "matthews_correlation": 0.5,
    }
    assert scored(TRUE, PREDICTED) == pytest.approx(wanted)
    # Of two labels: 1 right and 2 wrong of the first, 3 right and 1 wrong of the second: F1 2*3/(2*3+2+1) = 2/3
    truth, answer = [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0]
    two = scored(truth, answer, labels=["no", "yes"])
    assert two["f1"] == pytest.approx(2 / 3) and two["f1_macro"] == pytest.approx(
        (2 / 5 + 2 / 3) / 2
    )
    assert two["matthews_correlation"] == pytest.approx((3 * 1 - 2 * 1) / (5 * 4 * 3 * 2) ** 0.5)
    assert (
        two["matthews_correlation"] == pytest.approx(np.corrcoef(truth, answer)[0, 1])
        and two["accuracy"] == 4 / 7
    )
    result = tables(TRUE, PREDICTED, LABELS)
    assert result["labels"] == LABELS
    assert result["confusion"] == [[2, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert result["per_class"]["fair"] == {
        "precision": 0.5,
        "recall": 1.0,
        "f1": pytest.approx(2 / 3),
        "support": 1,
    }
    # Labels that are missing or never predicted are no warning.
    never = {"accuracy": 2 / 3, "f1_macro": 0.4, "f1_weighted": 8 / 15, "matthews_correlation": 0}
    assert scored([0, 0, 1], [0, 0, 0]) == pytest.approx(never)
    assert scored([0, 0], [0, 0], labels=["no", "yes"])["f1"] == 0
    result = tables(np.zeros(4, np.int64), np.zeros(4, np.int64), LABELS)
    assert result["per_class"]["good"] == {"precision": 0, "recall": 0, "f1": 0, "support": 0}


def certain(labels, *, wrong=()):
    """Statistics of a model that is sure, and right but in the rows `wrong`, where it says the next label."""
    given = (np.array(labels) + np.isin(np.arange(len(labels)), wrong)) % len(LABELS)
    return np.concatenate(
        [np.arange(len(labels))[:, None], 3.0 * np.eye(len(LABELS))[given]], 1
    ).astype(np.float32)


def test_an_evaluation_of_each_split_is_written_in_the_order_of_the_data(task, tmp_path):
    labels = task.eval_data().values["labels"]
    rows = certain(labels, wrong=[0, 25])
    metrics = task.eval_metrics(rows)
    assert set(metrics) == set(task.metrics) and metrics["f1_macro"] < 1
    assert metrics["accuracy"] == pytest.approx(19 / 20) and metrics[
        "other_accuracy"
    ] == pytest.approx(11 / 12)
    assert (
        metrics["loss"] == np.arange(20).mean()
        and metrics["other_loss"] == np.arange(20, 32).mean()
    )
    task.write_evaluation(rows, LocalFolder(tmp_path), step=7)
    lines = read_rows(tmp_path / "predictions/validation.jsonl")
    assert [line["id"] for line in lines] == [f"row{i}" for i in range(90, 110)]
    assert [line["label"] for line in lines] == [LABELS[label] for label in labels[:20]]
    assert (
        lines[0]["prediction"] != lines[0]["label"] and lines[1]["prediction"] == lines[1]["label"]
    )
    assert lines[1]["probabilities"][lines[1]["label"]] == pytest.approx(
        np.exp(3) / (np.exp(3) + 2)
    )
    assert len(read_rows(tmp_path / "predictions/other.jsonl")) == 12
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["step"] == 7 and result["splits"]["validation"]["labels"] == LABELS
    assert result["splits"]["validation"]["accuracy"] == pytest.approx(19 / 20)
    assert sum(row["support"] for row in result["splits"]["other"]["per_class"].values()) == 12
    assert np.trace(result["splits"]["validation"]["confusion"]) == 19
