"""Training through PyTorch/XLA on the CPU: the same run as without it, in as many graphs as it should take.

Counts are taken in processes of their own: within one, a second run finds the graphs of the first.
"""

import pytest
import torch
from run_results import assert_same_weights, losses
from running import lines, run, train_here, train_overrides
from saved_steps import cut_back
from transformers import AutoModelForMaskedLM

from train.parallel.xla_environment import COLLECTS

pytest.importorskip("torch_xla")

# Sums in another order differ in the last bits, and Adam's division can enlarge that: differences of up to 3e-6 were
# seen in losses of 5, and 1e-5 in gradient norms. The bounds are ten times that.
LOSS, NORM = 3e-5, 1e-4
XLA, AGAIN = ["backend=xla"], "backend.activation_checkpointing=true"
ONE_STEP = ["max_steps=1", "optim.warmup_steps=1", "export=false"]


def assert_same_curve(result, wanted, *, steps=6):
    """Of the last steps, and the same last evaluation."""
    for kind, key, number, tolerance in (
        ("train", "loss", steps, LOSS),
        ("train", "grad_norm", steps, NORM),
        ("eval", "loss", 1, LOSS),
    ):
        values = [
            [line[key] for line in lines(run_dir, kind)[-number:]] for run_dir in (result, wanted)
        ]
        assert values[0] == pytest.approx(values[1], rel=tolerance)


def train(run_dir, prepared, *overrides):
    train_here(run_dir, prepared, *overrides)
    return run_dir


def state(run_dir, step=6):
    """Weights and optimizer."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    return {
        name: torch.load(folder / f"{name}.pt", weights_only=True)
        for name in ("model", "optimizer")
    }


@pytest.fixture(scope="module")
def xla(tmp_path_factory, prepared):
    return train(tmp_path_factory.mktemp("xla") / "run", prepared, *XLA)


@pytest.fixture(scope="module")
def with_lamb(tmp_path_factory, prepared):
    return train(tmp_path_factory.mktemp("lamb") / "run", prepared, "optim=lamb")


@pytest.mark.slow
def test_the_run_is_that_of_ddp_and_its_export_the_trained_model(xla, finished):
    assert losses(xla)[-1] < losses(xla)[0] - 0.05
    assert_same_curve(xla, finished)
    assert lines(xla, "summary")[0]["backend"] == "xla"
    assert (xla / "samples.json").is_file()  # computed on the host
    exported, saved = (
        AutoModelForMaskedLM.from_pretrained(xla / "export").state_dict(),
        state(xla)["model"],
    )
    assert [
        name
        for name, tensor in exported.items()
        if not torch.equal(tensor, saved[f"network.{name}"])
    ] == []


FUNCTIONALIZATION_OFF = {"XLA_DISABLE_FUNCTIONALIZATION": "1"}  # as Neuron has it


# One graph to train, two to accumulate, and one to evaluate.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro", "expected", "env", "options"),
    [(24, 2, {}, []), (12, 3, FUNCTIONALIZATION_OFF, ["optim=lamb"])],
    ids=["one", "accumulating, functionalization off, lamb"],
)
def test_graphs_over_evaluations_checkpoints_a_resume_and_the_end_of_an_epoch(
    prepared, tmp_path, micro, expected, env, options
):
    # Two numbers that become 1.0 to the last bit, and were a constant of a new graph if Python held them: Adam's bias
    # corrections after 9 steps with these betas, 1 - lr * weight_decay once the rate falls below 3e-6.
    arguments = train_overrides(
        tmp_path / "run", prepared, *XLA, *options, f"micro_batch_size={micro}"
    )
    arguments += [
        "global_batch_size=24",
        "optim.betas=[0.01,0.01]",
        "optim.lr=1e-5",
        "log_every=3",
    ]
    arguments += ["eval_every=4", "checkpoint.every=5", "export=false", "model.num_layers=1"]
    for steps in (6, 14):
        result = run([*arguments, f"max_steps={steps}"], env=env)
        assert result.returncode == 0, result.stderr
    first, second = lines(tmp_path / "run", "summary")
    assert (first["graphs"], second["graphs"]) == (expected, expected)
    assert (first["step"], second["step"]) == (6, 14)
    assert lines(tmp_path / "run", "train")[-1]["epoch"] > 1 and second["compile_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        (["optim=lamb"], 2),
        (["micro_batch_size=4", "backend.precision=bf16_stochastic"], 3),
    ],
    ids=["lamb", "accumulating, bf16 weights"],
)
def test_without_functionalization_the_numbers_are_the_same(
    finished, with_lamb, prepared, tmp_path, options, graphs
):
    result = run(
        train_overrides(tmp_path / "run", prepared, *XLA, *options), env=FUNCTIONALIZATION_OFF
    )
    assert result.returncode == 0, result.stderr
    assert lines(tmp_path / "run", "summary")[0]["graphs"] == graphs
    if "bf16" in options[-1]:
        assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=2**-8)
    else:
        assert_same_curve(tmp_path / "run", with_lamb)


@pytest.mark.slow
def test_two_ranks_are_one_with_the_double_batch(finished, prepared, tmp_path):
    result = run(train_overrides(tmp_path / "run", prepared, *XLA, "micro_batch_size=2"), ranks=2)
    assert result.returncode == 0, result.stderr
    assert_same_curve(tmp_path / "run", finished)
    summary = lines(tmp_path / "run", "summary")[0]
    assert (summary["world_size"], summary["graphs"]) == (2, 3)  # backward, update, evaluation


@pytest.mark.parametrize(("first", "second"), [("xla", "finished"), ("finished", "xla")])
def test_a_checkpoint_goes_on_with_the_other_backend(request, prepared, tmp_path, first, second):
    first, wanted = request.getfixturevalue(first), request.getfixturevalue(second)
    backend = lines(wanted, "summary")[0]["backend"]
    train(cut_back(first, tmp_path / "run"), prepared, f"backend={backend}")
    assert_same_curve(tmp_path / "run", wanted, steps=3)
    # To the file it makes no difference who wrote it: the same names, types and settings.
    for part in ("model", "optimizer"):
        assert layout(state(tmp_path / "run")[part]) == layout(state(first)[part])


def layout(value):
    """Names, shapes and types."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: layout(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [layout(item) for item in value]
    return value


@pytest.mark.slow
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(prepared, tmp_path):
    options = [
        *XLA,
        "model.hidden_dropout=0.2",
        "checkpoint.every=2",
        "max_steps=4",
        "eval_every=4",
        "export=false",
    ]
    train(tmp_path / "whole", prepared, *options)
    train(cut_back(tmp_path / "whole", tmp_path / "cut", 2), prepared, *options)
    assert losses(tmp_path / "cut")[4:] == losses(tmp_path / "whole")[2:]
    assert_same_weights(tmp_path / "cut", tmp_path / "whole", 4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16_master", "bf16_stochastic"])
def test_bf16_policies_train_keep_the_optimizer_in_fp32_and_go_on_in_it(
    finished, prepared, tmp_path, precision
):
    train(tmp_path / "run", prepared, *XLA, f"backend.precision={precision}")
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=2**-8)  # bf16's bits
    assert losses(tmp_path / "run") != pytest.approx(losses(finished), rel=LOSS)
    saved = state(tmp_path / "run")
    weights = {tensor.dtype for tensor in saved["model"].values() if tensor.is_floating_point()}
    assert weights == {torch.bfloat16 if precision == "bf16_stochastic" else torch.float32}
    moments = [
        entry[name]
        for entry in saved["optimizer"]["state"].values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    assert {moment.dtype for moment in moments} == {torch.float32}
    train(cut_back(tmp_path / "run", tmp_path / "fp32"), prepared)
    assert losses(tmp_path / "fp32")[6:] == pytest.approx(losses(finished)[3:], rel=2**-8)
    assert layout(state(tmp_path / "fp32")["model"]) == layout(state(finished)["model"])


def read_after_each_step(monkeypatch, read, run_dir, prepared, *options):
    """What `read` returns after each of six steps, before the evaluation at the end."""
    from train.parallel.xla import XLA as Backend

    values, original = [], Backend.optimizer_step
    with monkeypatch.context() as patch:
        patch.setattr(
            Backend, "optimizer_step", lambda *args: (original(*args), values.append(read()))[0]
        )
        train(
            run_dir, prepared, *XLA, "eval_every=6", "checkpoint.every=6", "export=false", *options
        )
    return values


def test_nothing_is_read_from_the_device_between_lines(prepared, tmp_path, monkeypatch):
    import torch_xla.debug.metrics as metrics

    def read():
        result = metrics.metric_data("TransferFromDeviceTime")
        return 0 if result is None else result[0], metrics.counter_value(
            "aten::_local_scalar_dense"
        ) or 0

    reads = read_after_each_step(monkeypatch, read, tmp_path / "run", prepared, "log_every=3")
    # the first step's own look at the weights is over by then
    assert reads[0] == reads[1] == reads[2]
    assert reads[2][0] < reads[3][0]  # the line of step 3
    assert reads[3] == reads[4] == reads[5]
    assert reads[5][1] == reads[0][1]


def test_collecting_graphs_judges_nothing(prepared, tmp_path, monkeypatch):
    """Everything that is read from the device is 0, as when Neuron only collects."""
    from train.parallel.xla import XLA as Backend

    read = Backend.to_host
    monkeypatch.setattr(
        Backend, "to_host", lambda self, tensors: [tensor * 0 for tensor in read(self, tensors)]
    )
    monkeypatch.setenv(COLLECTS, "1")
    options = ["backend=xla", "export=false"]
    assert train_here(tmp_path / "run", prepared, *options) == ("done", 6)
    assert lines(tmp_path / "run", "train") and not lines(tmp_path / "run", "eval")


def test_activation_checkpointing_with_dropout_draws_the_same_units_again(prepared, tmp_path):
    """Were others dropped in the second computation, gradients would differ from the kept ones'."""
    options = [*XLA, "model.hidden_dropout=0.2", *ONE_STEP]
    train(tmp_path / "kept", prepared, *options)
    train(tmp_path / "again", prepared, *options, AGAIN)
    assert_same_curve(tmp_path / "again", tmp_path / "kept")
