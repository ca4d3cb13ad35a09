"""How long a run takes and what it costs: published cases, and the laws that every estimate keeps."""

from dataclasses import replace

import pytest
from rejections import rejects

from launch.estimate import Estimate, estimate, figures
from train.config import TrainConfig, make_plan
from train.run import compose as cli

GIVEN = ["run_dir=x", "data.path=x"]
# The sizes of google-bert/bert-large-uncased, for which the Hub is not asked.
BERT_LARGE = [*GIVEN, "model=any", "model.architecture=bert", "model.vocab_size=30522"]
BERT_LARGE += ["model.hidden_size=1024", "model.intermediate_size=4096"]
BERT_LARGE += ["model.num_layers=24", "model.num_heads=16"]
TRN1 = [*BERT_LARGE, "backend=xla", "instance=trn1.32xlarge"]
SMALL = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_heads=2",
    "model.num_layers=1",
]
LOCAL = [
    *GIVEN,
    "model=any",
    "model.architecture=bert",
    "model.vocab_size=100",
    *SMALL,
    "max_steps=10",
]


def load(*overrides: str) -> TrainConfig:
    return cli.load_config(TrainConfig, list(overrides))


def of(cfg: TrainConfig, nodes: int, processes: int, seq_len: int | None, **options) -> Estimate:
    given = {"rows": None, **options}
    return estimate(cfg, nodes=nodes, processes_per_node=processes, seq_len=seq_len, **given)


# ---- published cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "nodes", "processes", "speed", "tolerance"),
    [  # aws-neuron-sdk, general/benchmarks/trn1/training_data_encoder.csv, Neuron 2.26: phase 1, bf16
        ([*TRN1, "global_batch_size=16384"], 1, 32, 3_697.71, 0.1),
        ([*TRN1, "global_batch_size=1048576"], 16, 32, 55_617, 0.1),
        # NVIDIA's DeepLearningExamples, on one GPU
        (
            [*BERT_LARGE, "instance=p4de.24xlarge", "instance.devices=1", "global_batch_size=64"],
            1,
            1,
            580,
            0.05,
        ),
    ],
    ids=["trn1", "16 trn1", "A100"],
)
def test_bert_large_is_as_fast_as_the_makers_measured(
    settings, nodes: int, processes: int, speed, tolerance
):
    """Sequences of 128 tokens."""
    at = of(load(*settings, "max_steps=100"), nodes, processes, 128)
    assert at.tokens_per_s == pytest.approx(128 * speed, rel=tolerance)
    if "backend=xla" in settings:
        assert (at.micro_batch_size, at.world_size) == (16, 32 * nodes)  # AWS's micro batch
        assert any("28.8% of the peak of bf16" in note for note in at.notes)


# ---- what is unknown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "processes", "is_timed", "says"),
    [
        (LOCAL, 2, False, "the peak of instance=local is unknown"),
        (
            [*GIVEN, "model.pretrained=some/model", "instance=p5.48xlarge"],
            8,
            False,
            "the time is not estimated: no formula for some/model and task=mlm",
        ),
        ([*BERT_LARGE, "instance=trn2.48xlarge"], 64, True, "none is published for Trainium2"),
        (
            [*BERT_LARGE, "instance=trn2.48xlarge"],
            64,
            True,
            "the price of a trn2.48xlarge is unknown",
        ),
    ],
)
def test_what_is_unknown_is_left_out_and_named(settings, processes, is_timed, says):
    at = of(load(*settings, "global_batch_size=64", "max_steps=10"), 1, processes, 128)
    assert at.steps == 10 and (at.hours is not None) == is_timed and at.usd is None
    assert any(says in note for note in at.notes)


def test_passes_over_unknown_data_have_no_number_of_steps():
    cfg = load(*BERT_LARGE, "instance=p5.48xlarge", "global_batch_size=64", "max_epochs=2")
    at = of(cfg, 1, 8, 128)
    assert (at.steps, at.hours) == (None, None) and at.step_s is not None
    assert of(cfg, 1, 8, 128, rows=640).steps == 20
    assert any("max_epochs=2 is ignored" in note for note in at.notes)


@pytest.mark.parametrize(
    ("nodes", "processes", "rows", "says"),
    [
        (2, 32, None, "nodes=2: global_batch_size=96 cannot be split evenly over 64 ranks"),
        (1, 16, None, "trn1.32xlarge runs 1 or 2 or 8 or 32"),
        (1, 32, 10, "the data has 10 training sequences"),
    ],
)
def test_machines_that_do_not_fit_are_rejected(nodes, processes, rows, says):
    cfg = load(*TRN1, "global_batch_size=96", "max_steps=100")
    rejects(says, of, cfg, nodes, processes, 128, rows=rows)


def test_the_vocabulary_of_the_data_counts():
    cfg = load("experiment=demo", "instance=p5.48xlarge")
    guessed = of(cfg, 1, 1, 64, rows=9999)
    known = of(cfg, 1, 1, 64, rows=9999, vocab_size=2000)
    assert "a vocabulary of 50,368 tokens, the default of modernbert, is assumed" in guessed.notes
    assert not any("vocabulary" in note for note in known.notes)
    slow = guessed.step_s
    fast = known.step_s
    assert slow is not None and fast is not None and slow > 1.3 * fast


# ---- arithmetic ----------------------------------------------------------------------------------------------------


PIPELINE = ["parallel=pipeline", "parallel.stages=4", "parallel.micro_batches=4"]


def test_a_pipeline_costs_the_time_in_which_its_ranks_wait():
    """(stages - 1) / (micro batches + stages - 1) of it."""
    given = [*BERT_LARGE, "instance=p5.48xlarge", "global_batch_size=64", "max_steps=1000"]
    plain = of(load(*given), 1, 8, 128)
    split = of(load(*given, *PIPELINE), 1, 8, 128)
    assert split.usd == pytest.approx(plain.usd * 7 / 4)
    assert any("ranks wait 42.9% of the time for other stages" in note for note in split.notes)


def test_without_a_length_there_is_no_price_and_no_guess():
    given = [
        *BERT_LARGE,
        "instance=trn1.32xlarge",
        "backend=xla",
        "global_batch_size=4096",
        "max_steps=10",
    ]
    at = of(load(*given), 1, 32, None)
    assert any("the length of the sequences is unknown; set seq_len" in note for note in at.notes)
    assert figures(at) == {"batch": "4,096", "steps": "10"}
    assert of(load(*given), 1, 32, 128).micro_batch_size is not None


@pytest.mark.parametrize(
    ("settings", "world", "says"),
    [
        (["global_batch_size=96"], 64, "cannot be split evenly over 64 ranks"),
        (["global_batch_size=20", *PIPELINE], 8, "is not a multiple of parallel.micro_batches=4"),
    ],
)
def test_a_batch_that_cannot_be_split_is_rejected(settings, world: int, says: str):
    cfg = load(*BERT_LARGE, "max_steps=10", *settings)
    rejects(says, make_plan, cfg, world_size=world, rows=10**6, seq_len=128)


def test_figures_agree_with_one_another():
    cfg = load(*BERT_LARGE, "instance=p5.48xlarge", "micro_batch_size=8", "max_steps=1000")
    machine = replace(cfg.instance, usd_per_hour=90.0)
    at = of(replace(cfg, instance=machine), 3, 8, 128)
    assert at.step_s is not None and at.tokens_per_s is not None
    assert at.hours is not None and at.usd is not None
    assert at.tokens_per_s * at.step_s == pytest.approx(128 * at.global_batch_size)
    assert at.hours == pytest.approx(1000 * at.step_s / 3600)
    assert at.usd == pytest.approx(at.hours * 3 * 90)
