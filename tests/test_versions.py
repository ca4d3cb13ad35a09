"""Run folders of earlier versions: used, or refused by name."""

from __future__ import annotations

import json

import pytest

from train.attempt.goodput import newest_saved
from train.config import InputError


def test_metrics_that_do_not_name_their_attempts_are_refused(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    line = {"kind": "checkpoint", "step": 20, "time_unix_s": 1.0}
    metrics.write_text(json.dumps({**line, "attempt": 1}) + '\n[1, 2]\n{"half')
    assert newest_saved(metrics) == 20  # damaged lines are left out
    metrics.write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match=r"metrics.jsonl is of an earlier version: .* model.init_from"):
        newest_saved(metrics)
