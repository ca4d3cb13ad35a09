"""How long a run takes and what it costs: published cases, and the laws that every estimate keeps."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rejections import rejects

from launch.estimate import ClusterSize, Estimate, cells, estimate
from launch.speed import read_calibration
from train.config import S3Config, TrainConfig, make_plan, to_dict
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


def of(cfg: TrainConfig, nodes: int, processes: int, seq_len: int, **options) -> Estimate:
    given = {"rows": None, "calibration": None, **options}
    return estimate(cfg, nodes=nodes, processes_per_node=processes, seq_len=seq_len, **given)


def row(result: Estimate, nodes: int) -> ClusterSize:
    return next(each for each in result.rows if each.nodes == nodes)


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
    result = of(load(*settings, "max_steps=100"), nodes, processes, 128)
    at = row(result, nodes)
    assert at.tokens_per_s == pytest.approx(128 * speed, rel=tolerance)
    if "backend=xla" in settings:
        assert (at.micro_batch_size, at.world_size) == (16, 32 * nodes)  # AWS's micro batch
        assert any("28.8% of the peak of bf16" in note for note in result.assumptions)


# ---- what is unknown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "processes", "is_timed", "says"),
    [
        (LOCAL, 2, False, "the peak of instance=local is unknown"),
        (
            [*GIVEN, "model=pretrained", "model.pretrained=some/model", "instance=p5.48xlarge"],
            8,
            False,
            "the time is not estimated: no formula for some/model and task=mlm",
        ),
        ([*BERT_LARGE, "instance=trn2.48xlarge"], 64, True, "none is published for Trainium2"),
        (
            [*BERT_LARGE, "instance=trn2.48xlarge"],
            64,
            True,
            "price on demand and on spot is unknown",
        ),
    ],
)
def test_what_is_unknown_is_left_out_and_named(settings, processes, is_timed, says):
    result = of(load(*settings, "global_batch_size=64", "max_steps=10"), 1, processes, 128)
    at = row(result, 1)
    assert at.steps == 10 and (at.hours is not None) == is_timed and at.usd_on_demand is None
    assert any(says in note for note in result.assumptions)


def test_passes_over_unknown_data_have_no_number_of_steps():
    cfg = load(*BERT_LARGE, "instance=p5.48xlarge", "global_batch_size=64", "max_epochs=2")
    at = row(of(cfg, 1, 8, 128), 1)
    assert (at.steps, at.hours) == (None, None) and at.step_s is not None
    assert row(of(cfg, 1, 8, 128, rows=640), 1).steps == 20
    assert any("max_epochs=2 is ignored" in note for note in of(cfg, 1, 8, 128).assumptions)


def test_a_number_of_machines_that_does_not_fit_says_why():
    cfg = load(*TRN1, "global_batch_size=96", "max_steps=100")
    result = of(cfg, 3, 32, 128)
    assert [each.nodes for each in result.rows if each.reason is None] == [1, 3]
    assert "global_batch_size=96 cannot be split evenly over 64 ranks" in str(
        row(result, 2).reason
    )
    assert "trn1.32xlarge runs 1 or 2 or 8 or 32" in str(row(of(cfg, 1, 16, 128), 1).reason)
    few = of(cfg, 1, 32, 128, rows=10)
    assert "the data has 10 training sequences" in str(row(few, 1).reason)
    assert [len(cells(each)) for each in result.rows] == [9, 3, 9, 3, 3, 3]


def test_the_vocabulary_of_the_data_counts():
    cfg = load("experiment=demo", "instance=p5.48xlarge")
    guessed, known = of(cfg, 1, 1, 64, rows=9999), of(cfg, 1, 1, 64, rows=9999, vocab_size=2000)
    assert (
        "a vocabulary of 50,368 tokens, the default of modernbert, is assumed"
        in guessed.assumptions
    )
    assert not any("vocabulary" in note for note in known.assumptions)
    slow, fast = row(guessed, 1).step_s, row(known, 1).step_s
    assert slow is not None and fast is not None and slow > 1.3 * fast


# ---- arithmetic ----------------------------------------------------------------------------------------------------


PIPELINE = ["parallel=pipeline", "parallel.stages=4", "parallel.micro_batches=4"]


def test_a_pipeline_costs_the_time_in_which_its_ranks_wait(tmp_path):
    """(stages - 1) / (micro batches + stages - 1) of it; a pipeline's own speed predicts itself."""
    given = [*BERT_LARGE, "instance=p5.48xlarge", "global_batch_size=64", "max_steps=1000"]
    plain, split = of(load(*given), 1, 8, 128), of(load(*given, *PIPELINE), 1, 8, 128)
    assert row(split, 1).usd_on_demand == pytest.approx(row(plain, 1).usd_on_demand * 7 / 4)
    assert any(
        "ranks wait 42.9% of the time for other stages" in note for note in split.assumptions
    )
    here = [
        *LOCAL,
        "global_batch_size=50",
        "model.num_layers=2",
        "parallel=pipeline",
        "parallel.micro_batches=5",
    ]
    run = read_calibration(write_run(tmp_path / "run", LINES, *here[-3:]), S3Config())
    assert row(of(load(*here), 1, 2, 32, calibration=run), 1).step_s == pytest.approx(0.5)


def test_without_a_length_there_is_no_price_and_no_guess():
    given = [
        *BERT_LARGE,
        "instance=trn1.32xlarge",
        "backend=xla",
        "global_batch_size=4096",
        "max_steps=10",
    ]
    at = of(load(*given), 1, 32, None)
    assert any(
        "the length of the sequences is unknown; set seq_len" in note for note in at.assumptions
    )
    assert cells(row(at, 1)) == ["1", "32", "4,096", "10", "?", "?", "?", "?", "?"]
    assert row(of(load(*given), 1, 32, 128), 1).micro_batch_size is not None


@pytest.mark.parametrize(
    ("settings", "world", "says"),
    [
        (["global_batch_size=96"], 64, "global_batch_size=64 or global_batch_size=128"),
        (["global_batch_size=3"], 8, "the nearest that can is global_batch_size=8$"),
        (["global_batch_size=20", *PIPELINE], 8, "global_batch_size=16 or global_batch_size=24"),
    ],
)
def test_a_batch_that_cannot_be_split_names_the_nearest_that_can(settings, world: int, says: str):
    cfg = load(*BERT_LARGE, "max_steps=10", *settings)
    plan = {"world_size": world, "rows": 10**6, "seq_len": 128}
    rejects(says, make_plan, cfg, **plan)
    for size in map(int, re.findall(r"global_batch_size=(\d+)", says)):
        assert make_plan(replace(cfg, global_batch_size=size), **plan).global_batch_size == size


def test_figures_of_a_row_agree_with_one_another():
    cfg = load(*BERT_LARGE, "instance=p5.48xlarge", "micro_batch_size=8", "max_steps=1000")
    machine = replace(cfg.instance, usd_per_hour=90.0, usd_per_hour_spot=30.0)
    result = of(replace(cfg, instance=machine), 3, 8, 128)
    assert [each.nodes for each in result.rows] == [1, 2, 3, 4, 8, 16]
    for at in result.rows:
        assert at.step_s is not None and at.tokens_per_s is not None
        assert at.hours is not None and at.usd_on_demand is not None
        assert at.tokens_per_s * at.step_s == pytest.approx(128 * at.global_batch_size)
        assert at.hours == pytest.approx(1000 * at.step_s / 3600)
        assert at.usd_on_demand == pytest.approx(at.hours * at.nodes * 90)
        assert at.usd_spot == pytest.approx(at.usd_on_demand / 3)


# ---- the speed of a finished run -----------------------------------------------------------------------------------


def line(kind: str, **values: object) -> dict[str, object]:
    return {"kind": kind, "attempt": 1, "time_unix_s": 1.8e9, **values}


END = line(
    "summary",
    step=30,
    world_size=2,
    backend="ddp",
    precision="fp32",
    tokens_per_s=1.0,
    train_s=30.0,
)


def write_run(folder: Path, lines: list[object], *overrides: str) -> str:
    """2 ranks of a small BERT; 100 sequences/s between the lines of steps 10 and 30."""
    folder.mkdir(exist_ok=True)
    cfg = load(*LOCAL, "global_batch_size=50", *overrides)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg))))
    rows = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    (folder / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    return str(folder)


def trained(step: int, train_s: float) -> dict[str, object]:
    return line("train", step=step, examples=50 * step, tokens=32 * 50 * step, train_s=train_s)


LINES = [
    trained(10, 25.0),
    trained(20, 30.0),
    line("eval", step=20, loss=1.0),
    trained(30, 35.0),
    END,
]


def test_a_run_predicts_itself_and_in_proportion_others(tmp_path):
    # counts for nothing
    killed = [
        {**trained(40, 1.0), "attempt": 2},
        {**trained(50, 1.1), "attempt": 2},
        '{"kind": "tra',
    ]
    run = read_calibration(write_run(tmp_path / "run", [*LINES, *killed]), S3Config())
    assert run.world_size == 2
    at = row(of(load(*LOCAL, "global_batch_size=50"), 1, 2, 32, calibration=run), 1)
    assert at.step_s == pytest.approx(0.5)  # 100 sequences/s
    longer = row(of(load(*LOCAL, "global_batch_size=50"), 1, 2, 64, calibration=run), 1)
    assert longer.step_s is not None and 0.99 < longer.step_s < 1.5  # attention costs more a token
    one = row(of(load(*LOCAL, "global_batch_size=50"), 1, 1, 32, calibration=run), 1)
    assert one.step_s == pytest.approx(1.0)


@pytest.mark.parametrize("other", ["instance=p5.48xlarge", "backend.precision=fp32"])
def test_a_run_tells_nothing_of_another_machine_or_precision(tmp_path, other):
    lines = [*LINES[:-1], {**END, "precision": "bf16"}]
    run = read_calibration(write_run(tmp_path / "run", lines, "instance=p4d.24xlarge"), S3Config())
    same = ["global_batch_size=64", "instance=p4d.24xlarge"]
    assert row(of(load(*LOCAL, *same), 1, 8, 32, calibration=run), 1).step_s is not None
    says = "ran on instance=p4d.24xlarge in bf16, but this run uses"
    rejects(says, of, load(*LOCAL, *same, other), 1, 8, 32, calibration=run)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (LINES[:-1], "it has no summary: the run has not ended yet"),
        ([END], "its last attempt has 0 train lines, but 2 are needed"),
        ([*LINES[:-1], {**END, "world_size": "2"}], "world_size is '2', not a count"),
        (
            [trained(10, 25.0), trained(10, 30.0), END],
            "examples goes from 500 to 500: the run was rolled back",
        ),
        ([trained(10, 25.0), {**trained(30, 1.0), "train_s": None}, END], "train_s is None"),
    ],
)
def test_a_run_without_a_speed_is_rejected_in_one_line(tmp_path, lines, says: str):
    where = write_run(tmp_path / "run", lines)
    said = f"^calibrate={where}: its metrics.jsonl has no speed measurement: .*{says}"
    rejects(said, read_calibration, where, S3Config())


def test_a_folder_that_is_no_run_is_rejected(tmp_path):
    rejects(
        "is not a run folder: metrics.jsonl is missing",
        read_calibration,
        str(tmp_path),
        S3Config(),
    )
    where = write_run(tmp_path / "run", LINES, "model.vocab_size=null")
    rejects("the size of its model is unknown", read_calibration, where, S3Config())
    (tmp_path / "run/config.yaml").write_text("run_dir: ${oc.env:HOME}\n")
    rejects("references in a run's file are not resolved", read_calibration, where, S3Config())
