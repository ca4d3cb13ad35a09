"""A run as its user sees it: what it writes, how it ends, what it refuses."""

import json
import math
import shutil

import pytest
import torch
from running import ROOT, lines, prepare_config, run, train_config, train_overrides, write_corpus
from transformers import AutoModelForMaskedLM, AutoTokenizer

from train import environment, loop, prepare
from train.checkpoints.saver import SavesFail
from train.checkpoints.store import LocalStore
from train.config import InputError
from train.data.shards import ShardSet, read_manifest
from train.models.encoder import MaskedLM
from train.preempt import StopRequest


def train(run_dir, data, *overrides):
    return loop.run(train_config(run_dir, data, *overrides), StopRequest())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prepared):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    train(run_dir, prepared, "tensorboard=true")
    return run_dir


def test_metrics_have_the_fields_that_outside_tools_read(finished):
    step = lines(finished, "train")[-1]
    names = "step loss lr grad_norm tokens_per_s data_wait_s step_s examples".split()
    assert set(names) <= step.keys()
    assert (step["step"], step["examples"]) == (6, 48)
    evaluation = lines(finished, "eval")[-1]
    assert {"step", "loss", "perplexity", "masked_accuracy"} <= evaluation.keys()
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    (summary,) = lines(finished, "summary")
    assert set("train_s tokens tokens_per_s mfu cost_usd world_size backend".split()) <= summary.keys()
    assert summary["tokens"] == 6 * 8 * 32
    assert summary["mfu"] is summary["cost_usd"] is None  # unknown on an unknown machine
    assert [line["step"] for line in lines(finished, "eval")] == [3, 6]


def test_the_run_folder_is_as_the_readme_draws_it(finished):
    found = {path.name for path in finished.iterdir()}
    files = {"config.yaml", "environment.json", "metrics.jsonl", "outcome.json"}
    assert found == files | {"checkpoints", "tensorboard", "log", "export", "lease"}
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["plan"]["total_steps"] == 6
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0]
    assert not {"PATH", "HOME", "environ"} & environment.keys()


def test_tensorboard_shows_the_curves(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert events.Scalars("eval/loss")[-1].value == pytest.approx(lines(finished, "eval")[-1]["loss"])


def test_the_export_is_the_trained_model_for_plain_transformers(finished, prepared):
    plain = AutoModelForMaskedLM.from_pretrained(finished / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "export")
    state = torch.load(finished / "checkpoints" / "step_00000006" / "model.pt", weights_only=True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, state[f"network.{name}"]), name
    manifest = read_manifest(prepared)
    tokens = torch.tensor(ShardSet(prepared, manifest, "train").rows(torch.arange(4).numpy()).tokens.astype("int64"))
    positions = torch.arange(1, 9).expand(4, -1)
    segments = torch.zeros_like(tokens)
    ours = MaskedLM(plain)(tokens, segments, positions)
    fresh = AutoModelForMaskedLM.from_pretrained(finished / "export").eval()
    torch.testing.assert_close(ours, fresh(input_ids=tokens).logits[:, 1:9], rtol=1e-5, atol=1e-5)
    assert tokenizer.mask_token == "[MASK]"
    assert tokenizer("ba").input_ids[0] == tokenizer.cls_token_id


def test_evaluation_uses_every_validation_sequence_once(finished, prepared, tmp_path):
    """The loss does not depend on the batch that the sequences were put in, the last one padded."""
    train(tmp_path / "run", prepared, "micro_batch_size=1")
    odd = lines(tmp_path / "run", "eval")[-1]["loss"]
    assert odd == pytest.approx(lines(finished, "eval")[-1]["loss"], rel=2e-5)  # see test_equality.TOLERANCE


def test_known_peaks_and_prices_give_mfu_and_cost(tmp_path, prepared):
    known = ["instance.device_tflops_fp32=0.5", "instance.usd_per_hour=36", "export=false"]
    train(tmp_path / "run", prepared, *known)
    (summary,) = lines(tmp_path / "run", "summary")
    assert summary["cost_usd"] == pytest.approx(0.01 * summary["train_s"])
    assert 0 < summary["mfu"] < 1
    assert lines(tmp_path / "run", "train")[-1]["mfu"] > 0


def test_early_stopping_ends_a_run_that_learns_nothing(tmp_path, prepared):
    flat = ["optim.lr=1e-12", "eval_every=1", "early_stop.patience=2", "early_stop.min_delta=0.01"]
    assert train(tmp_path / "run", prepared, *flat) == ("early_stop", 3)
    assert (tmp_path / "run" / "checkpoints" / "step_00000003").is_dir()
    assert (tmp_path / "run" / "export" / "config.json").is_file()
    assert train(tmp_path / "run", prepared, *flat) == ("early_stop", 3)  # it stays stopped
    assert len(lines(tmp_path / "run", "train")) == 3


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, prepared):
    """Weights blown up to infinity by a hopeless learning rate: exit code 1, a reason, no silent hours."""
    found = run(train_overrides(tmp_path / "run", prepared, "optim.lr=1e38", "optim.warmup_steps=0"))
    assert found.returncode == 1
    assert "had no finite gradient" in json.loads((tmp_path / "run/outcome.json").read_text())["reason"]
    assert "3 steps in a row had no finite gradient" in lines(tmp_path / "run", "fault")[-1]["reason"]


def test_weights_that_are_no_numbers_are_never_saved(tmp_path, prepared):
    """Each save is an alarm, the third ends the run."""
    hopeless = ["optim.lr=1e39", "optim.warmup_steps=0", "log_every=1000", "checkpoint.every=1", "checkpoint.keep=2"]
    hopeless += ["nonfinite.max_skips=1000"]  # steps are faster than saves
    with pytest.raises(SavesFail, match=r"\d saves in a row failed; there is no checkpoint"):
        train(tmp_path / "run", prepared, *hopeless, "max_steps=50", "eval_every=null")
    assert not LocalStore(tmp_path / "run/checkpoints").steps()
    assert "is no longer finite" in lines(tmp_path / "run", "fault")[0]["reason"]


def test_an_exit_file_is_of_this_life_and_says_why_it_was_refused(tmp_path, prepared):
    run_dir = tmp_path / "run"
    assert run(train_overrides(run_dir, prepared, "max_steps=1")).returncode == 0
    exit_file = run_dir / "log" / "exit_rank_0000.json"
    assert json.loads(exit_file.read_text())["reason"] == "done"
    assert run(train_overrides(run_dir, prepared, "backend.device=cuda")).returncode == 2
    assert "refused: backend.device=cuda" in json.loads(exit_file.read_text())["reason"]


def test_a_run_that_never_took_a_step_does_not_keep_its_folder(tmp_path, prepared):
    with pytest.raises(InputError, match="no CUDA device"):
        train(tmp_path / "run", prepared, "backend.device=cuda")
    assert train(tmp_path / "run", prepared, "seed=9") == ("done", 6)


def test_a_pretrained_model_of_another_tokenizer_is_refused(finished, prepared, tmp_path):
    other = prepare.prepare(prepare_config(tmp_path / "data", write_corpus(tmp_path / "t.txt", seed=5)))
    assert other.tokenizer.vocab_size == read_manifest(prepared).tokenizer.vocab_size
    cfg = train_config(tmp_path / "run", tmp_path / "data", f"model.pretrained={finished / 'export'}")
    with pytest.raises(InputError, match="has another tokenizer than the data"):
        loop.run(cfg, StopRequest())


def test_a_longer_run_goes_on_from_a_shorter_one(tmp_path, prepared):
    train(tmp_path / "run", prepared, "max_steps=3")
    assert train(tmp_path / "run", prepared, "max_steps=5") == ("done", 5)
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim=lamb", "optim.schedule=cosine"],
        ["task.whole_word=true", "task.max_ngram=1", "task.max_predictions=3"],
        ["backend.precision=bf16", "micro_batch_size=4"],
        ["max_steps=null", "max_epochs=0.5", "optim.schedule=polynomial", "optim.power=2"],
        ["max_steps=null", "max_examples=30", "data.num_workers=1", "optim.max_grad_norm=null"],
    ],
    ids=["lamb", "words", "bf16", "epochs", "examples"],
)
def test_the_options_run(tmp_path, prepared, overrides):
    reason, step = train(tmp_path / "run", prepared, "eval_every=null", *overrides)
    assert reason == "done"
    assert lines(tmp_path / "run", "eval")[-1]["step"] == step
    assert all(math.isfinite(line["loss"]) for line in lines(tmp_path / "run", "train"))


def test_a_pretrained_model_goes_on_where_it_was(finished, tmp_path, prepared):
    """The export of one run is the start of the next: its first evaluation is the other's last."""
    cfg = train_config(tmp_path / "run", prepared, "model=pretrained", f"model.pretrained={finished / 'export'}")
    names = ("hidden_size", "intermediate_size", "embedding_size", "num_heads")
    for name in names:  # sizes come from the checkpoint
        setattr(cfg.model, name, None)
    cfg.optim.lr, cfg.max_steps = 1e-12, 1
    loop.run(cfg, StopRequest())
    assert lines(tmp_path / "run", "eval")[-1]["loss"] == pytest.approx(lines(finished, "eval")[-1]["loss"], rel=1e-5)


# ---- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["seq_len=64"], "seq_len=64, but"),
        (["model.max_positions=16"], "seq_len=32 is longer than the model's 16 positions"),
        (["model.vocab_size=100"], "model.vocab_size=100 is smaller than the tokenizer's 120"),
        (["task.max_predictions=30"], "task.max_predictions=30 leaves nothing"),
        (["global_batch_size=4096"], "fewer than one batch of 4096"),
        (["data.path=/no/such/data"], "data.path=/no/such/data does not exist"),
        (["backend.device=cuda"], "this machine shows no CUDA device"),
        (["backend.grad_compression=bf16"], "needs CUDA"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(tmp_path, prepared, overrides, says):
    with pytest.raises(InputError, match=says):
        train(tmp_path / "run", prepared, *overrides)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_damaged_shard_stops_all_ranks_with_one_message(tmp_path, prepared):
    data = shutil.copytree(prepared, tmp_path / "data")
    shard = data / "train-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    found = run(train_overrides(tmp_path / "run", data), ranks=2)
    assert found.returncode != 0
    assert found.stderr.count("is damaged: sha256") == 1
    assert f'File "{ROOT / "train"}' not in found.stderr  # no stack trace of ours; torchrun prints its own


def test_only_rank_0_speaks(tmp_path, prepared):
    found = run(train_overrides(tmp_path / "run", prepared), ranks=2)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("step 6/6") == 1
    assert (tmp_path / "run" / "log" / "rank_0001.txt").is_file()
    refused = run(train_overrides(tmp_path / "run", prepared, "seed=5"), ranks=2)
    assert refused.stderr.count("error: ") == 1


def test_a_machine_without_git_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() is None
