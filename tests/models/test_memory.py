"""The estimate of a rank's memory: against what a forward pass keeps, and by how a model is split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from rejections import rejects
from running import train_here

from launch.estimate import estimate
from train.config import HeadSize, TrainConfig
from train.models.encoder import build_masked_lm
from train.models.memory_estimate import GIB, Memory, activation_bytes, advice, memory_of
from train.models.model_sizes import Shape, shape_of_model
from train.run import compose as cli
from train.run import description

GIVEN = ["run_dir=x", "data.path=x", "max_steps=1", "global_batch_size=64"]
BERT_LARGE = Shape("bert", 30_522, 1024, 4096, 24)
LARGE = [*GIVEN, "model=any", "model.architecture=bert", "model.vocab_size=30522"]
LARGE += ["model.hidden_size=1024", "model.intermediate_size=4096", "model.num_layers=24"]
SIZES = [
    "model.hidden_size=128",
    "model.intermediate_size=512",
    "model.num_heads=2",
    "model.num_layers=4",
]
# CPUs keep masks in 4 bytes, and scores with dropout
CALM = [
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
]
BATCH, SEQ_LEN, VOCABULARY = 4, 64, 1000


def load(*overrides: str) -> TrainConfig:
    return cli.load_config(TrainConfig, list(overrides))


def of(*overrides: str, accumulation: int = 1, precision: str = "bf16") -> Memory:
    """BERT-large, 8 ranks with 4 sequences each."""
    sizes = {"world_size": 8, "micro_batch_size": 4, "accumulation": accumulation, "seq_len": 128}
    shape = BERT_LARGE
    return memory_of(load(*LARGE, *overrides), shape, precision=precision, **sizes)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "albert", "modernbert"])
def test_activations_are_what_a_forward_pass_keeps(architecture: str):
    # which has no dropout of hidden states
    calm = CALM[1:] if architecture == "modernbert" else CALM
    cfg = load(*GIVEN, "model=any", f"model.architecture={architecture}", *SIZES, *calm)
    model = build_masked_lm(cfg.model, vocab_size=VOCABULARY, pad_id=0, seq_len=SEQ_LEN)
    held, kept = {weight.untyped_storage().data_ptr() for weight in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    predictions = round(
        SEQ_LEN * OmegaConf.to_container(OmegaConf.structured(cfg.task))["mask_rate"]
    )
    ids = torch.randint(5, VOCABULARY, (BATCH, SEQ_LEN))
    positions = torch.arange(predictions).repeat(BATCH, 1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(ids, torch.zeros_like(ids), positions).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(
            logits, ids[:, :predictions].flatten(), reduction="sum"
        )
    shape = shape_of_model(model)
    assert shape is not None and loss.isfinite()
    wanted = activation_bytes(cfg, shape, cfg.parallel.held(1), BATCH * SEQ_LEN, SEQ_LEN, "fp32")
    # The embedding's own activations and the head's are left out of the estimate, masks of dropout out of the pass.
    assert wanted == pytest.approx(sum(kept.values()), rel=0.25)


@pytest.mark.parametrize(
    ("layers", "batch", "vocabulary", "allocated_gib"),
    [(4, 64, 8000, 1.21), (12, 32, 8000, 1.66), (12, 128, 30000, 6.68)],
)
def test_it_is_what_an_h100_allocated_at_most(
    layers: int, batch: int, vocabulary: int, allocated_gib: float
):
    """In bf16 (benchmarks/README.md, "On one GPU")."""
    cfg = load(*GIVEN, "model=albert_base", f"model.num_layers={layers}")
    shape = shape_of_model(
        build_masked_lm(cfg.model, vocab_size=vocabulary, pad_id=0, seq_len=128)
    )
    assert shape is not None
    sizes = {"world_size": 1, "micro_batch_size": batch, "accumulation": 1, "seq_len": 128}
    total = memory_of(cfg, shape, precision="bf16", **sizes).total
    assert total == pytest.approx(allocated_gib * GIB, rel=0.03)


def test_each_split_divides_its_own_states():
    weights = BERT_LARGE.trained_parameters(HeadSize(predictions=20))
    data, fsdp = of(), of("parallel=fsdp")
    assert (data.weights, data.gradients, data.moments, data.copies) == tuple(
        each * weights for each in (4, 4, 8, 2)
    )
    assert [fsdp.weights, fsdp.gradients, fsdp.moments] == [n * weights / 8 for n in (4, 4, 8)]
    assert 0 < fsdp.copies < data.copies / 3 and of(
        "parallel=fsdp", "parallel.reshard_after_forward=false"
    ).copies == (2 * weights)
    assert of("parallel=fsdp", accumulation=2).gradients == pytest.approx(
        4 * weights * (1 + 1 / 8)
    )
    assert (
        data.activations
        == fsdp.activations
        > 5 * of("backend.activation_checkpointing=true").activations / 1.01
    )
    assert (
        of(precision="fp32").copies == 0
        and of(precision="fp32").activations > 1.5 * data.activations
    )


def test_an_evaluation_that_predicts_more_than_training_counts():
    many, shape = "eval_batch_size=99", replace(BERT_LARGE, num_hidden_layers=1)
    score_bytes = round(0.15 * 128) * shape.vocab_size * (2 + 8)  # of a sequence
    cfg = load(*LARGE, many)
    assert activation_bytes(cfg, shape, cfg.parallel.held(1), 4 * 128, 128, 2) == 99 * score_bytes
    cfg = load(*LARGE, many, "parallel=pipeline", "parallel.stages=2")
    assert activation_bytes(cfg, shape, cfg.parallel.held(2), 4 * 128, 128, 2) == 99 * score_bytes


def test_the_fullest_stage_of_a_pipeline_is_the_one_that_counts():
    def stages(number: int, *overrides: str) -> Memory:
        return of(
            "parallel=pipeline",
            f"parallel.stages={number}",
            "parallel.micro_batches=8",
            *overrides,
        )

    # 24 layers in 7 stages: one has 4 of them
    assert stages(7).weights == stages(6).weights > stages(8).weights
    # the first stages have these
    assert stages(6, "model.freeze_layers=8").activations == stages(6).activations


def test_a_plan_names_the_memory_and_what_to_change_if_it_is_too_much():
    def notes(*overrides: str) -> str:
        cfg = load(*LARGE, "instance=p4d.24xlarge", "global_batch_size=4096", *overrides)
        given = {"rows": None, "calibration": None}
        result = estimate(cfg, nodes=1, processes_per_node=8, seq_len=512, counts=(), **given)
        (note,) = (note for note in result.assumptions if "GiB of memory per rank" in note)
        return note

    assert "parallel=fsdp with backend=ddp" in advice(load(*LARGE), world_size=2)
    assert "parallel" not in advice(load(*LARGE), world_size=1)
    assert "of the device's 40" in notes("micro_batch_size=8")
    assert "MORE than the device's 40; lower micro_batch_size" in notes("micro_batch_size=512")
    assert "parallel=fsdp with backend=ddp" in notes("micro_batch_size=512")
    assert "reshard_after_forward=true or more ranks" in notes(
        "micro_batch_size=512", "parallel=fsdp"
    )
    assert of().total / GIB == pytest.approx(float(str(of()).split()[1]), rel=0.01)


def test_a_run_that_this_machine_cannot_hold_is_rejected_before_it_starts(
    prepared: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(description, "total_memory_bytes", lambda: 50_000)
    more = "^about .* activations .*; this machine or container has too little, .* for 1 rank; lower micro_batch"
    rejects(more, train_here, tmp_path / "run", prepared)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
