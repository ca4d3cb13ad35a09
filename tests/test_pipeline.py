"""A model that is cut over ranks is the same model: losses, norms, weights and checkpoints of a single process."""

from __future__ import annotations

import json
import os
import random
import shutil

import numpy as np
import psutil
import pytest
import torch
from forks import launch, start_forked
from run_results import assert_same_run, losses
from running import ROOT, SYLLABLES, eventually, lines, run, train_config, train_overrides
from transformers import AutoModelForSequenceClassification, AutoTokenizer, RobertaConfig, RobertaModel

from launch.estimate import cells, estimate
from train import loop
from train.attempt.preempt import StopRequest
from train.cli import compose as cli
from train.config import InputError, ModelConfig, PipelineConfig, TrainConfig, make_plan
from train.models.chain import KNOWN, Chain
from train.models.encoder import build_masked_lm
from train.models.heads import build_with_head
from train.parallel.pipeline import cut
from train.report import page
from train.report import run as report_run

S, V, LAYERS, ROWS = 12, 101, 4, 4
NO_DROPOUT = ["model.hidden_dropout=0", "model.attention_dropout=0"]
MODELS = {  # changes of the tiny ALBERT
    "albert": ["model.num_layers=4", *NO_DROPOUT],
    "bert": ["model=any", "model.architecture=bert", "model.embedding_size=null", "model.num_layers=8", *NO_DROPOUT],
}
MODELS["bert"].append("task.eval_mask_rate=0.4")  # an evaluation has other shapes than a step


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
        loop.run(train_config(folder / name, prepared, *model), StopRequest())
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def four(tmp_path_factory, prepared):
    """A run of four stages."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    options = [*pipeline(4, 4, "interleaved"), "backend.activation_checkpointing=true", "micro_batch_size=4"]
    return trained(run_dir, prepared, *MODELS["bert"], *options, ranks=4)


def test_four_interleaved_stages_are_one_model(alone, four):
    assert_same_run(four, alone["bert"])
    assert lines(four, "summary")[0]["tokens"] == lines(alone["bert"], "summary")[0]["tokens"]
    facts = [json.loads((run_dir / "environment.json").read_text()) for run_dir in (four, alone["bert"])]
    assert facts[0]["parameters"] == facts[1]["parameters"]


def test_the_bubble_and_the_memory_of_each_rank_are_measured(alone, four):
    summary = lines(four, "summary")[0]
    assert summary["bubble_share_ideal"] == 3 / 11  # 4 stages, 4 micro batches through 2 parts each
    assert all(0 < line["bubble_share"] < 1 for line in (*lines(four, "train"), summary))
    assert len(summary["peak_bytes_of_ranks"]) == 4 and min(summary["peak_bytes_of_ranks"]) > 2**20
    assert not any("bubble" in key for line in lines(alone["bert"], "summary") for key in line)
    rows = dict(page.table([report_run.read_run(four)]))
    assert rows["Bubble at best"] == "27.3%" and rows["Bubble: waiting for other stages"].endswith("%")
    assert float(rows["Highest peak memory of a rank (GB)"]) > 0


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


def cut_back(run_dir, target):
    """A copy of a run that ended at its third step."""
    shutil.copytree(run_dir, target)
    shutil.rmtree(target / "checkpoints/step_00000006")
    return target


def test_four_stages_resume_as_one_rank_and_back(alone, four, prepared, tmp_path):
    one = cut_back(four, tmp_path / "one")
    loop.run(train_config(one, prepared, *MODELS["bert"]), StopRequest())
    assert losses(one)[6:] == pytest.approx(losses(alone["bert"])[3:], rel=2e-5)
    back = cut_back(alone["bert"], tmp_path / "two")
    trained(back, prepared, *MODELS["bert"], *pipeline(4, 4, "1f1b"), ranks=4)
    assert losses(back)[6:] == pytest.approx(losses(alone["bert"])[3:], rel=2e-5)


def test_a_run_that_is_killed_at_one_stage_goes_on_with_the_same_command(prepared, tmp_path):
    options = [*MODELS["bert"], *pipeline(2, 2, "1f1b"), "checkpoint.every=2", "eval_every=null", "export=false"]
    arguments, run_dir = train_overrides(tmp_path / "run", prepared, *options, "max_epochs=99"), tmp_path / "run"
    process = start_forked(launch("train", [*arguments, "max_steps=9999"], ranks=2), os.environ)
    eventually(lambda: (run_dir / "checkpoints/LATEST").is_file() or not process.is_alive())
    psutil.Process(process.pid).children()[-1].kill()
    process.join()
    step = lines(run_dir, "train")[-1]["step"]
    again = run([*arguments, f"max_steps={step + 2}"], ranks=2)
    assert again.returncode == 0 and "resuming from the checkpoint of step" in again.stderr
    assert lines(run_dir, "train")[-1]["step"] == step + 2


# Products are rounded to 8 bits, of other shapes than those of one process: losses of 5 differ by a few thousandths.
def test_compiled_layers_in_bf16_are_nearly_those_of_one_process(prepared, tmp_path):
    options = [*MODELS["albert"], "backend.precision=bf16", "eval_every=null", "max_steps=2"]
    loop.run(train_config(tmp_path / "one", prepared, *options), StopRequest())
    more = [*options, *pipeline(2, 2, "1f1b"), "backend.compile=layers", "micro_batch_size=2"]
    trained(tmp_path / "two", prepared, *more, ranks=2, module="traced", env={"PYTHONPATH": str(ROOT / "tests")})
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=5e-3)
    assert lines(tmp_path / "two", "summary")[0]["graphs"] > 0


# ---- parts of a model ----------------------------------------------------------------------------------------------


def config(architecture, **changes):
    small = {"hidden_size": 32, "num_layers": LAYERS, "num_heads": 4, "max_positions": 40, "intermediate_size": 64}
    factorised = {"embedding_size": 16} if architecture in ("albert", "electra") else {}
    without = {} if architecture == "modernbert" else {"hidden_dropout": 0.0}
    return ModelConfig(**{"architecture": architecture, **small, **factorised, **without, **changes})


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
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
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
            weight.data.copy_(value if number in users[weight] else torch.full_like(value, torch.nan))

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
            torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-4, atol=1e-5 * wanted[name].abs().max())


def test_the_head_counts_in_the_cut():
    model = built("tokens", config("bert", vocab_size=4000, num_layers=8))
    model.head_share = 1.0
    chain = Chain(model)
    assert [len(part) for part in chain.cut(2)] != [4, 4] and len(chain.cut(2)[1]) < 4
    model.head_share = 0.0
    assert [len(part) for part in Chain(model).cut(2)] == [4, 4]


# ---- what is rejected -----------------------------------------------------------------------------------------------


def convolving():
    model = built("label", config("deberta-v2"))
    model.network.config.conv_kernel_size = 3
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (built("label", config("bert", num_layers=2)), "cuts the model into 3 parts, but it has 2 layers"),
        (convolving(), "does not cut a deberta-v2 with conv_kernel_size=3"),
        (built("label", config("mpnet")), "parallel=pipeline knows the layers of albert, bert, .*, not those of mpnet"),
        (torch.nn.Linear(2, 2), "parallel=pipeline cuts encoders of transformers, not a Linear"),
    ],
    ids=["too_few_layers", "convolution", "unknown_layers", "no_encoder"],
)
def test_a_model_that_cannot_be_cut_is_rejected(model, message):
    with pytest.raises(InputError, match=message):
        cut(model, PipelineConfig(stages=3))


def estimated(cfg):
    """What the launcher says of one machine of 8 devices."""
    (row,) = estimate(
        cfg, nodes=1, processes_per_node=8, seq_len=128, rows=10_000, mfu=0.4, calibration=None, counts=(1,)
    ).rows
    return row


def test_the_published_recipe_is_planned():
    given = ["experiment=mnli_roberta_large", "instance=p3dn.24xlarge", *pipeline(4, 4, "interleaved")]
    cfg = cli.load_config(TrainConfig, [*given, "backend.precision=fp32"])
    assert isinstance(cfg.parallel, PipelineConfig) and cfg.parallel.num_parts == 8  # of three layers each
    plan = make_plan(cfg, world_size=8, rows=10_000, seq_len=cfg.seq_len)
    assert (plan.world_size, plan.replicas, plan.micro_batch_size, plan.accumulation) == (8, 2, 8, 1)
    row = estimated(cfg)
    assert (row.replicas, row.micro_batch_size, row.accumulation, row.reason) == (2, 8, 1, None)
    assert cells(row)[2] == "16 = 2 x 1 x 8"
    for options, reason in {
        "backend.precision=auto": "does not go with backend.precision=fp16",  # which this machine would choose
        "parallel.stages=3": "parallel.stages=3 does not divide the 8 ranks",
        "parallel.parts_per_rank=8": "cuts the model into 32 parts, but it has 24 layers",
    }.items():
        more = [*options.split(), *(["parallel.micro_batches=3"] if "stages" in options else [])]
        cfg = cli.load_config(TrainConfig, [*given, "backend.precision=fp32", *more])
        assert reason in estimated(cfg).reason


LABELS = {"entailment": "ba", "neutral": "na", "contradiction": "ti"}  # what the second sentence repeats


def sentence_pairs(folder):
    """Files as GLUE's, of made-up sentences whose label shows."""
    rng = random.Random(0)

    def words(count):
        return ["".join(rng.choices(SYLLABLES, k=2)) for _ in range(count)]

    folder.mkdir()
    for name, count in {"train": 160, "dev_matched": 40, "dev_mismatched": 20}.items():
        rows = [["pairID", "sentence1", "sentence2", "gold_label"]]
        for number in range(count):
            label, mark = rng.choice(list(LABELS.items()))
            rows.append([str(number), " ".join(words(4)), " ".join([mark] * 6), label])
        (folder / f"{name}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    return folder


def small_roberta(folder, tokenizer):
    """An encoder of the recipe's family and no dropout, in the form of the Hub."""
    shutil.copytree(tokenizer, folder)
    torch.manual_seed(0)
    vocab_size = len(AutoTokenizer.from_pretrained(tokenizer))
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    known = {"vocab_size": vocab_size, "max_position_embeddings": 80, "type_vocab_size": 1}
    RobertaModel(
        RobertaConfig(**sizes, **known, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ).save_pretrained(folder)
    return folder


def test_the_published_recipe_is_the_run_of_one_process(prepared, tmp_path):
    """2 stages, 2 replicas, from an encoder of the Hub's form. Padded pairs of two lengths, a head at its own rate,
    frozen embeddings, and labels that weigh differently.
    """
    given = ["experiment=mnli_roberta_large", "data=mnli_tsv", f"data.path={sentence_pairs(tmp_path / 'pairs')}"]
    given += [f"model.pretrained={small_roberta(tmp_path / 'roberta', prepared / 'tokenizer')}", "seq_len=40"]
    given += ["data.lengths=[24]", "data.num_workers=0", f"data.cache_dir={tmp_path / 'cache'}", "optim.lr=1e-3"]
    given += ["optim.head_lr=1e-2", "model.freeze_embeddings=true", "task.balanced=true", "watchdog.enabled=false"]
    given += ["global_batch_size=16", "max_steps=3", "eval_every=3", "checkpoint.every=3", "log_every=1"]
    given += ["backend.device=cpu", "backend.precision=fp32", "tensorboard=false", *NO_DROPOUT]
    loop.run(cli.load_config(TrainConfig, [*given, f"run_dir={tmp_path / 'one'}"]), StopRequest())
    done = run([*given, f"run_dir={tmp_path / 'four'}", *pipeline(2, 4, "interleaved")], ranks=4)
    assert done.returncode == 0, done.stderr
    for kind, keys in (("train", ("loss", "grad_norm", "lr")), ("eval", ("loss", "accuracy", "mismatched_accuracy"))):
        one, four = ([[line[key] for key in keys] for line in lines(tmp_path / n, kind)] for n in ("one", "four"))
        assert np.array(four) == pytest.approx(np.array(one), rel=1e-3, abs=0.03 if kind == "eval" else 0)
    exported = [AutoModelForSequenceClassification.from_pretrained(tmp_path / n / "export") for n in ("one", "four")]
    for (name, ours), theirs in zip(exported[0].state_dict().items(), exported[1].state_dict().values(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=2e-5, msg=name)
