"""Metrics of classification are scikit-learn's, and worked out by hand."""

import warnings

import numpy as np
import pytest
from sklearn.metrics import classification_report

from train.tasks.scores import summary, tables

NAMES = ["bad", "so so", "good"]
LABELS, PREDICTED = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 0, 1, 1, 2, 0])


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_metrics_worked_out_by_hand():
    # F1: bad 2*2/(2*2+1+1) = 2/3, so so 2*1/(2*1+1+0) = 2/3, good 2*1/(2*1+0+1) = 2/3
    found = summary(LABELS, PREDICTED)
    assert found == pytest.approx({"accuracy": 4 / 6, "f1_macro": 2 / 3, "f1_weighted": 2 / 3})
    found = tables(LABELS, PREDICTED, NAMES)
    assert found["labels"] == NAMES
    assert found["confusion"] == [[2, 1, 0], [0, 1, 0], [1, 0, 1]]
    assert found["per_class"]["so so"] == {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "support": 1}


def test_metrics_of_random_answers_are_those_of_a_report():
    rng = np.random.default_rng(0)
    labels = rng.choice(3, 300, p=[0.7, 0.2, 0.1])
    predicted = np.where(rng.random(300) < 0.6, labels, rng.integers(0, 3, 300))
    report = classification_report(labels, predicted, target_names=NAMES, output_dict=True)
    found = summary(labels, predicted)
    assert found["accuracy"] == report["accuracy"]
    assert found["f1_macro"] == report["macro avg"]["f1-score"] != found["f1_weighted"]
    assert found["f1_weighted"] == report["weighted avg"]["f1-score"]
    for name, row in tables(labels, predicted, NAMES)["per_class"].items():
        assert row == {
            **{key: report[name][key] for key in ("precision", "recall", "support")},
            "f1": report[name]["f1-score"],
        }


def test_classes_that_are_missing_or_never_predicted_give_numbers_without_a_warning():
    only_one = np.zeros(4, np.int64)
    assert summary(only_one, only_one) == {"accuracy": 1, "f1_macro": 1, "f1_weighted": 1}
    never = summary(np.array([0, 0, 1]), np.array([0, 0, 0]))
    assert never == pytest.approx({"accuracy": 2 / 3, "f1_macro": 0.4, "f1_weighted": 8 / 15})
    found = tables(only_one, only_one, NAMES)
    assert found["per_class"]["good"] == {"precision": 0, "recall": 0, "f1": 0, "support": 0}
    assert found["confusion"] == [[4, 0, 0], [0, 0, 0], [0, 0, 0]]
