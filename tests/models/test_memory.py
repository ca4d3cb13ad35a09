"""The memory of a rank's model state, by how a model is split, and what a plan says about it."""

from __future__ import annotations

import pytest
from rejections import rejects
from running import train_here

from launch.estimate import estimate
from train.config import HeadSize, TrainConfig
from train.models.memory_estimate import GIB, advice, state_gib
from train.models.model_sizes import Shape
from train.run import compose as cli
from train.run import description

BERT_LARGE = Shape("bert", 30_522, 1024, 4096, 24)
LARGE = ["run_dir=x", "data.path=x", "max_steps=1", "global_batch_size=4096", "model=any"]
LARGE += ["model.architecture=bert", "model.vocab_size=30522", "instance=p4d.24xlarge"]
LARGE += ["model.hidden_size=1024", "model.intermediate_size=4096", "model.num_layers=24"]


def load(*overrides: str) -> TrainConfig:
    return cli.load_config(TrainConfig, [*LARGE, *overrides])


@pytest.mark.parametrize(
    ("overrides", "precision", "weight_bytes"),
    [
        ([], "bf16", 16),
        ([], "bf16_master", 18),
        (["parallel=fsdp"], "bf16", 16 / 4),  # within each machine
        (["parallel=pipeline", "parallel.stages=4"], "bf16", 16 / 4),
    ],
)
def test_each_split_divides_the_state(overrides, precision, weight_bytes):
    weights = BERT_LARGE.trained_parameters(HeadSize(predictions=20))
    held = state_gib(
        load(*overrides), BERT_LARGE, world_size=8, ranks_per_machine=4, precision=precision
    )
    assert held == pytest.approx(weight_bytes * weights / GIB)


def test_a_frozen_weight_has_neither_gradient_nor_moments():
    head = HeadSize(predictions=20)
    frozen = BERT_LARGE.trained_parameters(head) - BERT_LARGE.trained_parameters(
        head, freeze_layers=12
    )
    held = [
        state_gib(
            load(f"model.freeze_layers={number}"),
            BERT_LARGE,
            world_size=1,
            ranks_per_machine=1,
            precision="bf16",
        )
        for number in (0, 12)
    ]
    assert held[0] - held[1] == pytest.approx(12 * frozen / GIB)


def test_a_plan_names_the_memory_and_what_to_change_if_it_is_too_much():
    def note(*overrides: str) -> str:
        result = estimate(load(*overrides), nodes=1, processes_per_node=8, seq_len=512, rows=None)
        (found,) = (each for each in result.notes if "GiB of memory per rank" in each)
        return found

    assert "parallel=fsdp with backend=ddp" in advice(load(), world_size=2)
    assert "parallel" not in advice(load(), world_size=1)
    assert "of the device's 40" in note()
    large = ["model.hidden_size=4096", "model.intermediate_size=16384"]
    assert "MORE than the device's 40; use parallel=fsdp with backend=ddp" in note(*large)


def test_a_run_that_this_machine_cannot_hold_is_rejected_before_it_starts(
    prepared, tmp_path, monkeypatch
):
    monkeypatch.setattr(description, "total_memory_bytes", lambda: 50_000)
    rejects(
        "^weights, gradients .*; this machine or container has too little, .* for 1 rank; lower",
        train_here,
        tmp_path / "run",
        prepared,
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
