"""A model that is cut over ranks is the same model: losses, norms, weights and checkpoints of a single process."""

from __future__ import annotations

import json

import pytest
import torch
from rejections import rejects
from run_results import assert_same_run, assert_same_weights, losses
from running import ROOT, lines, run, train_here, train_overrides
from saved_steps import cut_back

from train.config import ModelConfig, PipelineConfig
from train.models.chain import KNOWN, Chain
from train.models.encoder import build_masked_lm
from train.models.heads import build_with_head
from train.observe.report import page
from train.observe.report import run as report_run
from train.parallel.pipeline import cut

S, V, LAYERS, ROWS = 12, 101, 4, 4
NO_DROPOUT = ["model.hidden_dropout=0", "model.attention_dropout=0"]
MODELS = {  # changes of the tiny ALBERT
    "albert": ["model.num_layers=4", *NO_DROPOUT],
    "bert": [
        "model=any",
        "model.architecture=bert",
        "model.embedding_size=null",
        "model.num_layers=8",
        *NO_DROPOUT,
    ],
}
MODELS["bert"].append("task.mask_rate=0.4")  # an evaluation has other shapes than a step


def pipeline(stages, micro_batches, schedule):
    return [
        "parallel=pipeline",
        f"parallel.stages={stages}",
        f"parallel.micro_batches={micro_batches}",
        f"parallel.schedule={schedule}",
    ]


def trained(run_dir, prepared, *overrides, ranks, **program):
    result = run(train_overrides(run_dir, prepared, *overrides), ranks=ranks, **program)
    assert result.returncode == 0, result.stderr
    return run_dir


# ---- a step, a run, a checkpoint -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory, prepared):
    """Runs of one rank, by the name of the model."""
    folder = tmp_path_factory.mktemp("alone")
    for name, model in MODELS.items():
        train_here(folder / name, prepared, *model)
    return {name: folder / name for name in MODELS}


FOUR = [
    *pipeline(4, 4, "interleaved"),
    "backend.activation_checkpointing=true",
    "micro_batch_size=4",
]


@pytest.fixture(scope="module")
def four(tmp_path_factory, prepared):
    """A run of four stages."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    return trained(run_dir, prepared, *MODELS["bert"], *FOUR, ranks=4)


@pytest.mark.slow
def test_four_interleaved_stages_are_one_model_and_the_bubble_and_each_memory_are_measured(
    alone, four
):
    assert_same_run(four, alone["bert"])
    facts = [
        json.loads((run_dir / "environment.json").read_text()) for run_dir in (four, alone["bert"])
    ]
    assert facts[0]["parameters"] == facts[1]["parameters"]
    summary = lines(four, "summary")[0]
    assert summary["tokens"] == lines(alone["bert"], "summary")[0]["tokens"]
    assert all(0 < line["bubble_share"] < 1 for line in lines(four, "train"))
    assert not any("bubble" in key for line in lines(alone["bert"], "summary") for key in line)
    rows = dict(page.table([report_run.read_run(four)]))
    assert rows["Pipeline bubble"].endswith("%")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "options"),
    [
        ("bert", 2, pipeline(2, 4, "gpipe")),
        ("bert", 4, [*pipeline(2, 2, "1f1b"), "micro_batch_size=2"]),
        ("albert", 4, pipeline(2, 4, "interleaved")),
    ],
    ids=["gpipe", "replicas_and_accumulation", "shared_layer"],
)
def test_stages_are_one_model(alone, prepared, tmp_path, model, ranks, options):
    """Both models have one matrix as the first stage's embedding and in the last stage's head."""
    trained(tmp_path / "run", prepared, *MODELS[model], *options, ranks=ranks)
    assert_same_run(tmp_path / "run", alone[model])


@pytest.mark.slow
def test_four_stages_resume_as_one_rank_and_back(alone, four, prepared, tmp_path):
    one = cut_back(four, tmp_path / "one")
    train_here(one, prepared, *MODELS["bert"])
    assert losses(one)[6:] == pytest.approx(losses(alone["bert"])[3:], rel=2e-5)
    back = cut_back(alone["bert"], tmp_path / "two")
    trained(back, prepared, *MODELS["bert"], *pipeline(4, 4, "1f1b"), ranks=4)
    assert losses(back)[6:] == pytest.approx(losses(alone["bert"])[3:], rel=2e-5)


@pytest.mark.slow
def test_four_stages_resume_bit_for_bit(four, prepared, tmp_path):
    run_dir = cut_back(four, tmp_path / "run")
    trained(run_dir, prepared, *MODELS["bert"], *FOUR, ranks=4)
    assert [line["attempt"] for line in lines(run_dir, "summary")] == [1, 2]
    assert losses(run_dir)[6:] == losses(four)[3:]
    assert_same_weights(run_dir, four)


# Products are rounded to 8 bits, of other shapes than those of one process: losses of 5 differ by a few thousandths.
def test_compiled_layers_in_bf16_are_nearly_those_of_one_process(prepared, tmp_path):
    options = [*MODELS["albert"], "backend.precision=bf16", "eval_every=null", "max_steps=2"]
    train_here(tmp_path / "one", prepared, *options)
    more = [*options, *pipeline(2, 2, "1f1b"), "backend.compile=layers", "micro_batch_size=2"]
    trained(
        tmp_path / "two",
        prepared,
        *more,
        ranks=2,
        module=str(ROOT / "tests" / "traced.py"),
        env={"PYTHONPATH": str(ROOT / "tests")},
    )
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=5e-3)
    assert lines(tmp_path / "two", "summary")[0]["graphs"] > 0


# ---- parts of a model ----------------------------------------------------------------------------------------------


def config(architecture, **changes):
    small = {
        "hidden_size": 32,
        "num_layers": LAYERS,
        "num_heads": 4,
        "max_positions": 40,
        "intermediate_size": 64,
    }
    factorised = {"embedding_size": 16} if architecture in ("albert", "electra") else {}
    without = {} if architecture == "modernbert" else {"hidden_dropout": 0.0}
    return ModelConfig(
        **{"architecture": architecture, **small, **factorised, **without, **changes}
    )


def built(head, cfg):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "pad_id": 1, "seq_len": S}
    if head == "tokens":
        return build_masked_lm(cfg, **sizes).eval()
    head = {"label": "SequenceClassification", "span": "QuestionAnswering"}[head]
    return build_with_head(head, cfg, labels=["a", "b"], **sizes).eval()


def outcome(head, model):
    """The sum of squared logits for some padded rows."""
    torch.manual_seed(1)
    ids, segments = torch.randint(5, V, (ROWS, S)), (torch.arange(S) > 4).long().expand(ROWS, S)
    if head == "tokens":
        return model(ids, segments, torch.tensor([[1, 3, 8]] * ROWS)).square().sum()
    real = (torch.arange(S) < torch.tensor([S, 7, 3, 9])[:, None]).long()
    return model(ids, real, segments).square().sum()


@pytest.mark.parametrize("head", ["tokens", "label", "span"])
@pytest.mark.parametrize("architecture", KNOWN)
def test_parts_that_hold_only_their_weights_give_the_gradients_of_the_whole(architecture, head):
    model = built(head, config(architecture))
    whole = outcome(head, model)
    whole.backward()
    wanted = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    model.zero_grad()
    chain = Chain(model)
    parts = chain.cut(3)
    assert [layer for part in parts for layer in part] == list(range(LAYERS)) and all(parts)
    users = chain.users(parts)
    chain.divide()
    kept = {weight: weight.detach().clone() for weight in model.parameters()}

    def hold(number):
        """Give all weights that this part need not hold no numbers."""
        for weight, value in kept.items():
            weight.data.copy_(
                value if number in users[weight] else torch.full_like(value, torch.nan)
            )

    boundaries, received = [], None
    for number, part in enumerate(parts):
        hold(number)
        output = chain.run(part, received, lambda: outcome(head, model))
        received = output.detach().requires_grad_()
        boundaries.append((output, received))
    torch.testing.assert_close(boundaries[-1][0], whole, rtol=1e-5, atol=0.0)
    gradient = None
    for number, (output, _) in reversed(list(enumerate(boundaries))):
        hold(number)
        output.backward(gradient)
        gradient = boundaries[number - 1][1].grad if number else None
    for name, weight in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(
                weight.grad, wanted[name], rtol=1e-4, atol=1e-5 * wanted[name].abs().max()
            )


# ---- what is rejected -----------------------------------------------------------------------------------------------


def convolving():
    model = built("label", config("deberta-v2"))
    model.network.config.conv_kernel_size = 3
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            built("label", config("bert", num_layers=2)),
            "splits the model into 3 parts, but it has only 2 layers",
        ),
        (convolving(), "cannot cut a deberta-v2 with conv_kernel_size=3"),
        (
            built("label", config("mpnet")),
            "parallel=pipeline supports albert, bert, .*, but not mpnet",
        ),
        (torch.nn.Linear(2, 2), "parallel=pipeline splits transformers' encoders, not a Linear"),
    ],
    ids=["too_few_layers", "convolution", "unknown_layers", "no_encoder"],
)
def test_a_model_that_cannot_be_cut_is_rejected(model, message):
    rejects(message, cut, model, PipelineConfig(stages=3))
