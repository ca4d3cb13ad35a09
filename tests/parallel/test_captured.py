"""Steps as CUDA graphs train as steps that are sent kernel by kernel. On a CPU, tapes stand for the graphs: `taped`."""

import math
import re
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
from types import SimpleNamespace

import pytest
import torch
from finetuning import tuned, two_lengths
from forks import DEVICE
from rejections import rejects
from run_results import TOLERANCE, assert_same_run, losses
from running import lines, train_config
from taped import put_tapes
from toy import Line

from train import loop
from train.config import BackendConfig, DataParallelConfig, FSDPConfig, OptimConfig
from train.models.heads import PaddedEncoder
from train.parallel import captured, ddp
from train.parallel.data import Captured, DataParallel
from train.parallel.engines import build_engine
from train.parallel.grad_sync import sent
from train.parallel.optim import OPTIMIZERS, OptimizerSpec, build_adamw, set_learning_rate
from train.run.stopping import StopRequest
from train.storage import imported
from train.tasks.finetune import TextTask
from train.tasks.mlm import MaskedLMTask

GRAPHS = "backend.cuda_graphs"
OFF = f"{GRAPHS}=false"


@pytest.fixture
def recorded(monkeypatch):
    """The functions that were recorded, with the shapes of their inputs."""
    seen, record = [], captured.Graphs.record

    def seeing(self, function, inputs):
        seen.append(
            (function.__name__, {name: tuple(value.shape) for name, value in inputs.items()})
        )
        return record(self, function, inputs)

    monkeypatch.setattr(captured.Graphs, "record", seeing)
    if DEVICE != "cuda":
        put_tapes(monkeypatch)
        monkeypatch.setattr(ddp, "captures_steps", lambda cfg, *_: cfg.cuda_graphs is not False)
        opened = ddp.DDP.__init__

        def as_on_a_gpu(self, *args, **options):
            opened(self, *args, **options)
            self.skips_on_device = True

        monkeypatch.setattr(ddp.DDP, "__init__", as_on_a_gpu)
        # so that a run without graphs draws the same numbers for dropout
        monkeypatch.setattr(PaddedEncoder, "leave_out_padding", lambda _: None)
    return seen


@pytest.mark.parametrize(
    ("shape", "precision", "is_masked", "version", "is_too_much"),
    [
        ((64, 512), "fp32", False, "2.9.1+cu128", True),
        ((64, 512), "bf16", True, "2.9.1", True),
        ((64, 512), "bf16", False, "2.9.1", False),  # flash attention draws few
        ((32, 512), "fp32", False, "2.9.1", False),
        ((64, 512), "fp32", False, "2.10.0", False),
    ],
)
def test_a_step_with_too_many_random_numbers_is_not_recorded(
    shape, precision, is_masked, version, is_too_much, monkeypatch
):
    """BERT-large: 24 layers with 16 heads."""
    model = SimpleNamespace(drawn_numbers=lambda rows, length: 24 * 16 * rows * length**2)
    ids = torch.empty(shape, device="meta")
    inputs = {"input_ids": ids} | ({"attention_mask": ids} if is_masked else {})
    fault = captured.too_random(model, inputs, precision=precision, version=version)
    wanted = "draws 6,442,450,944 random numbers, and a graph of PyTorch 2.9"
    assert (wanted in fault) == bool(fault) == is_too_much
    if is_too_much:
        monkeypatch.setattr(captured, "too_random", lambda *_, **__: fault)
        engine = SimpleNamespace(model=model, backend=SimpleNamespace(precision=precision))
        graphs = captured.Graphs(SimpleNamespace(engine=engine))
        assert graphs.try_record("key", None, inputs) == fault and not graphs.recorded


def train(folder, prepared, *settings):
    loop.run(train_config(folder, prepared, "backend=ddp", *settings), StopRequest())
    return folder


def log(folder):
    return (folder / "log" / "rank_0000.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize(
    ("micro", "functions"), [(8, ["_step"]), (2, ["_micro_batch", "_update"])]
)
def test_a_recorded_run_is_the_plain_one_and_resumes_bit_for_bit(
    recorded, prepared, tmp_path, optimizer, micro, functions
):
    settings = [f"micro_batch_size={micro}", f"optim={optimizer}", "model.hidden_dropout=0.1"]
    plain = train(tmp_path / "plain", prepared, *settings, OFF)
    assert not recorded
    run = train(tmp_path / "run", prepared, *settings)
    assert [name for name, _ in recorded] == functions
    assert_same_run(run, plain)
    asked = StopRequest()
    asked.ask("SIGTERM")
    cfg = train_config(tmp_path / "cut", prepared, "backend=ddp", *settings)
    loop.run(cfg, asked)
    loop.run(cfg, StopRequest())
    # docs/compile.md
    assert losses(tmp_path / "cut") == pytest.approx(
        losses(run), rel=1e-4 if DEVICE == "cuda" else 0
    )


def test_each_length_has_a_graph_after_its_first_steps(recorded, tokenizer_folder, tmp_path):
    settings = [*two_lengths(tmp_path), "max_steps=40", "global_batch_size=1"]
    plain = tuned(tmp_path / "plain", tokenizer_folder, *settings, OFF)
    run = tuned(tmp_path / "run", tokenizer_folder, *settings)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    assert {shapes["input_ids"][1] for _, shapes in recorded} == {16, 32} and len(
        recorded
    ) <= 3  # one without a mask


def test_shapes_beyond_the_last_graph_run_without(
    recorded, tokenizer_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(captured, "MOST_GRAPHS", 1)
    settings = [*two_lengths(tmp_path), "max_steps=16"]
    plain = tuned(tmp_path / "plain", tokenizer_folder, *settings, OFF)
    run = tuned(tmp_path / "run", tokenizer_folder, *settings)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5) and len(recorded) == 1
    assert log(run).count("steps with other shapes than these 1 run without") == 1


@pytest.mark.slow
@pytest.mark.parametrize("micro", [8, 2])
def test_recorded_steps_are_skipped_and_rolled_back_as_others(
    recorded, prepared, tmp_path, monkeypatch, micro
):
    """The loss is multiplied by a number on the device that is NaN at some steps. Counts of labels vary."""
    factor = torch.ones((), device=DEVICE)
    step, loss = iter(()), MaskedLMTask.loss

    def begin_step(self, count, lr, *, begin):
        number = next(step)
        factor.copy_(torch.tensor(math.nan if number in (7, 10, 11) else 1.0))
        begin(self, count * (1 + number % 3), lr)

    monkeypatch.setattr(MaskedLMTask, "loss", lambda *args: loss(*args) * factor)
    for engine in (DataParallel, Captured):
        monkeypatch.setattr(
            engine, "begin_step", partialmethod(begin_step, begin=engine.begin_step)
        )
    settings = [
        f"micro_batch_size={micro}",
        "max_steps=16",
        "nonfinite.max_skips=2",
        "model.hidden_dropout=0.1",
    ]
    for name, off in (("plain", [OFF]), ("run", [])):
        step = iter(range(100))
        train(tmp_path / name, prepared, *settings, *off)
    # NaN is written as null
    values = [[loss or 0.0 for loss in losses(tmp_path / name)] for name in ("run", "plain")]
    assert values[0] == pytest.approx(values[1], rel=TOLERANCE) and values[0].count(0) == 3
    assert len(recorded) == (2 if micro == 8 else 4)  # once more after the rollback
    reasons = [
        [line["reason"] for line in lines(tmp_path / name, "fault")] for name in ("run", "plain")
    ]
    assert reasons[0] == reasons[1] and "back to step 9" in reasons[0][-1]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_a_model_that_makes_its_own_masks_is_recorded(
    recorded, tokenizer_folder, tmp_path, architecture
):
    """transformers would read each mask, to drop it if it hides nothing."""
    model = [
        f"model.architecture={architecture}",
        "model.embedding_size=null",
        "model.hidden_dropout=null",
    ]
    settings = [*two_lengths(tmp_path), "max_steps=16", *model]
    plain = tuned(tmp_path / "plain", tokenizer_folder, *settings, OFF)
    run = tuned(tmp_path / "run", tokenizer_folder, *settings)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)
    assert {tuple(shapes) for _, shapes in recorded} >= {
        ("input_ids", "attention_mask", "token_type_ids", "labels")
    }


def test_a_step_that_waits_for_the_gpu_is_not_recorded(recorded, prepared, tmp_path, monkeypatch):
    plain = train(tmp_path / "plain", prepared, OFF)
    update = ddp.DDP.update
    monkeypatch.setattr(
        ddp.DDP,
        "update",
        lambda self, opt, norm, **rest: (float(norm), update(self, opt, norm, **rest)),
    )
    run = train(tmp_path / "run", prepared)
    assert not recorded and losses(run) == pytest.approx(losses(plain), rel=1e-5)
    assert "the step [8, 32] runs without a CUDA graph: it waits for the GPU at" in log(run)
    assert "test_captured.py" in log(run)


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "failing"), [(8, "_step"), (2, "_update")])
def test_a_recording_that_fails_costs_nothing_but_speed(
    recorded, prepared, tmp_path, monkeypatch, micro, failing
):
    settings = [f"micro_batch_size={micro}"]
    plain = train(tmp_path / "plain", prepared, *settings, OFF)
    failed = []

    def replayed(function, inputs, era):
        assert len(failed) == era  # it would draw from a generator that checkpoints do not hold
        function(inputs)

    def record(self, function, inputs):
        if function.__name__ != failing:
            return partial(replayed, function, inputs, len(failed))
        failed.append(failing)
        try:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(captured.Graphs, "record", record)
    run = train(tmp_path / "run", prepared, *settings)
    assert failed == [failing] and losses(run) == pytest.approx(losses(plain), rel=1e-5)
    assert "cannot be recorded (RuntimeError: operation not permitted)" in log(run)


# ---- the proof of a graph --------------------------------------------------------------------------------------------


def of_weights(engine):
    engine.parameters[0].data.add_(1e-4)


def of_the_loss(engine):
    engine.loss_sum.mul_(1.001)


def of_the_norm(engine):
    engine.norm.mul_(1.001)


def of_no_number(engine):
    engine.loss_sum.fill_(math.nan)


@pytest.mark.parametrize("fault", [of_weights, of_the_loss, of_the_norm, of_no_number])
def test_a_graph_that_replays_wrongly_is_not_used(
    recorded, prepared, tmp_path, monkeypatch, fault
):
    settings = ["model.hidden_dropout=0.1", "log_every=3"]
    plain = train(tmp_path / "plain", prepared, *settings, OFF)
    record, replays = captured.Graphs.record, []

    def wrong(self, function, inputs):
        replay = record(self, function, inputs)

        def replayed():
            replays.append(fault)
            replay()
            fault(self.proof.engine)

        return replayed

    monkeypatch.setattr(captured.Graphs, "record", wrong)
    run = train(tmp_path / "run", prepared, *settings)
    assert_same_run(run, plain)
    assert losses(run) == losses(plain) and len(replays) == 1
    text = "the step [8, 32] runs without a CUDA graph: its replay differs from a plain step (loss"
    assert text in log(run) and "replays equal" not in log(run)


def test_a_graph_that_keeps_the_rate_of_its_recording_is_not_used(
    recorded, prepared, tmp_path, monkeypatch
):
    record = captured.Graphs.record

    def stale(self, function, inputs):
        engine = self.proof.engine
        replay, kept = record(self, function, inputs), engine.lr / 2

        def replayed():
            set_learning_rate(engine.optimizer, kept)
            replay()
            set_learning_rate(engine.optimizer, engine.lr)

        return replayed

    monkeypatch.setattr(captured.Graphs, "record", stale)
    run = train(tmp_path / "run", prepared, "optim.schedule=constant")
    text = "its replay differs from a plain step (loss 0e+00, norm 0e+00, weights 5e-01"
    assert text in log(run)


def test_a_graph_is_proven_at_the_next_finite_step(recorded, prepared, tmp_path, monkeypatch):
    loss, calls = MaskedLMTask.loss, iter(range(100))
    factors = {captured.FIRST_CALLS: math.nan}
    monkeypatch.setattr(
        MaskedLMTask, "loss", lambda *args: loss(*args) * factors.get(next(calls), 1.0)
    )
    run = train(tmp_path / "run", prepared, "eval_every=null")
    assert len(recorded) == 1 and "replays equal plain steps" in log(run)


@pytest.mark.parametrize(("micro", "name"), [(8, "step [8, 32]"), (2, "micro batch [2, 32]")])
def test_a_step_that_must_have_a_graph_ends_the_run_without_one(
    recorded, prepared, tmp_path, monkeypatch, micro, name
):
    loss = MaskedLMTask.loss
    monkeypatch.setattr(
        MaskedLMTask, "loss", lambda *args: (float(args[2]["input_ids"].sum()), loss(*args))[1]
    )
    text = f"{GRAPHS}=true, but the {name} cannot run as a CUDA graph: it waits for the GPU"
    settings = [f"{GRAPHS}=true", f"micro_batch_size={micro}"]
    rejects(re.escape(text), train, tmp_path / "run", prepared, *settings)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_without_memory_begins_again_without_graphs(
    recorded, tokenizer_folder, tmp_path, monkeypatch, batch
):
    """The first step after a graph was recorded that has none finds no memory in its backward pass."""
    settings = [*two_lengths(tmp_path), "max_steps=24", "micro_batch_size=1"]
    settings += [f"global_batch_size={batch}", "model.hidden_dropout=0.1"]
    plain = tuned(tmp_path / "plain", tokenizer_folder, *settings, OFF)
    loss, failed = TextTask.loss, []

    def fail(gradient):
        failed.append(gradient)
        raise torch.OutOfMemoryError("out of memory")

    def with_failure(self, model, inputs):
        result = loss(self, model, inputs)
        is_plain = not torch.cuda.is_current_stream_capturing()
        if recorded and not failed and is_plain and result.requires_grad:
            result.register_hook(fail)
        return result

    monkeypatch.setattr(TextTask, "loss", with_failure)
    run = tuned(tmp_path / "run", tokenizer_folder, *settings)
    assert len(failed) == 1 and losses(run) == losses(plain)
    assert log(run).count("the device ran out of memory; steps run without CUDA graphs") == 1


@pytest.mark.parametrize("failing", ["_micro_batch", "_update"])
def test_a_step_that_begins_again_counts_its_earlier_losses_once(
    recorded, prepared, tmp_path, monkeypatch, failing
):
    settings = ["micro_batch_size=4", "model.hidden_dropout=0.1"]
    plain = train(tmp_path / "plain", prepared, *settings, OFF)
    run_part, failed = captured.Graphs.run, []

    def without_memory(self, function, inputs):
        is_last = function.__name__ == failing and len(self.proof.engine.begun) == 2
        if self.recorded and not failed and is_last:
            failed.append(inputs)
            raise torch.OutOfMemoryError("out of memory")
        run_part(self, function, inputs)

    monkeypatch.setattr(captured.Graphs, "run", without_memory)
    run = train(tmp_path / "run", prepared, *settings)
    assert failed and losses(run) == losses(plain)
    assert_same_run(run, plain)


def test_an_evaluation_without_memory_is_repeated_without_graphs(
    recorded, prepared, tmp_path, monkeypatch
):
    plain = train(tmp_path / "plain", prepared, OFF)
    evaluate, failed = DataParallel.evaluate, []

    def without_memory(self, *arguments):
        if recorded and not failed:
            failed.append(arguments)
            raise torch.OutOfMemoryError("out of memory")
        return evaluate(self, *arguments)

    monkeypatch.setattr(DataParallel, "evaluate", without_memory)
    run = train(tmp_path / "run", prepared)
    assert_same_run(run, plain)
    assert len(failed) == 1 and log(run).count("the device ran out of memory") == 1


class NoProof:
    """For functions that change nothing."""

    other_numbers = nullcontext
    sync = SimpleNamespace(held=nullcontext)
    engine = SimpleNamespace(model=None, backend=SimpleNamespace(precision="fp32"), sync=sync)

    def begin(self):
        return None

    def results(self):
        return {"loss": [], "norm": []}

    def rewind(self, before):
        return None

    end = rewind


def test_a_recording_that_fails_is_freed_before_its_step_runs(monkeypatch):
    """Its memory may be all that the device has."""
    kept = []

    def record(self, function, inputs):
        memory = torch.zeros(1)
        kept.append(weakref.ref(memory))
        raise torch.OutOfMemoryError("out of memory")

    put_tapes(monkeypatch)
    monkeypatch.setattr(captured.Graphs, "record", record)
    graphs, seen = captured.Graphs(NoProof()), []
    for _ in range(captured.FIRST_CALLS + 2):
        graphs.run(lambda inputs: seen.append([each() for each in kept]), {})
    # the proof runs the step before and after the recording
    assert seen == [[], [], [], [], [None], [None]] and graphs.plain and graphs.is_on


def test_after_a_recording_that_fails_stream_and_random_numbers_are_as_before(monkeypatch):
    cuda, now = torch.cuda, SimpleNamespace(stream="default", state="before")

    @contextmanager
    def stream(chosen):
        before, now.stream = now.stream, chosen
        try:
            yield
        finally:
            now.stream = before

    @contextmanager
    def graph(*_, **__):  # as torch's, whose end raises before it leaves the stream
        now.stream, now.state = "recording", "of the recording"
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    generator = SimpleNamespace(
        clone_state=lambda: now.state, graphsafe_set_state=partial(setattr, now, "state")
    )
    for name, fake in {
        "stream": stream,
        "graph": graph,
        "current_stream": lambda: now.stream,
        "current_device": lambda: 0,
        "default_generators": [generator],
        "graph_pool_handle": object,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
    }.items():
        monkeypatch.setattr(cuda, name, fake)
    monkeypatch.setattr(captured, "release", lambda *_: None)
    with pytest.raises(RuntimeError, match="previous error"):
        captured.Graphs(NoProof()).record(lambda inputs: None, {})
    assert vars(now) == {"stream": "default", "state": "before"}


def test_restored_moments_are_recorded_anew(recorded, prepared, tmp_path, monkeypatch):
    engines, init = [], Captured.__init__

    def kept(self, *args, **options):
        init(self, *args, **options)
        engines.append(self)

    monkeypatch.setattr(Captured, "__init__", kept)
    train(tmp_path / "run", prepared)
    (engine,) = engines
    state = engine.state()
    assert engine.graphs.recorded
    engine.graphs.is_on = False
    engine.load(state["model"], state["optimizer"])
    assert not engine.graphs.recorded and engine.graphs.pool is None
    # what could not be recorded is not tried again after a rollback
    assert not engine.graphs.is_on


@pytest.mark.parametrize(
    ("settings", "device", "precision", "captures"),
    [
        ({}, "cuda", "bf16", True),
        ({}, "cuda", "fp32", True),
        ({}, "cpu", "bf16", False),
        ({}, "cuda", "fp16", False),
        ({"activation_checkpointing": True}, "cuda", "bf16", False),
        ({"cuda_graphs": False}, "cuda", "bf16", False),
        ({"cuda_graphs": True}, "cpu", "bf16", "needs a CUDA device"),
        ({"cuda_graphs": True}, "cuda", "fp16", "does not support backend.precision=fp16"),
    ],
)
def test_who_captures(monkeypatch, settings, device, precision, captures):
    asked = BackendConfig(**settings), torch.device(device), precision
    if isinstance(captures, str):
        rejects(captures, ddp.captures_steps, *asked)
        return
    assert ddp.captures_steps(*asked) is captures
    # numbers there may change from step to step
    monkeypatch.setitem(imported.IMPORTED, "focal.py", SimpleNamespace())
    assert ddp.captures_steps(*asked) is False
    assert ddp.captures_steps(BackendConfig(cuda_graphs=True), torch.device("cuda"), "bf16")


def test_a_run_whose_steps_are_recorded_compiles_layers(monkeypatch):
    monkeypatch.setattr(ddp, "captures_steps", lambda *_: True)
    made = []
    compiler = SimpleNamespace(
        compile=lambda _, **how: made.append(how["one_graph"]),
        expect=int,
        what="layers",
        is_busy=lambda: True,
    )
    monkeypatch.setattr(ddp, "open_compiler", lambda *_, **__: compiler)
    backend = ddp.DDP(BackendConfig(device="cpu", compile="layers"))
    assert backend.captures and backend.is_compiling()  # without torchrun, too
    backend.setup_model(torch.nn.Linear(2, 2))
    assert made == [False]


@pytest.mark.parametrize("parallel", [DataParallelConfig(), FSDPConfig()])
def test_a_single_rank_records_unless_the_rate_of_its_optimizer_is_a_number(monkeypatch, parallel):
    monkeypatch.setattr(ddp, "captures_steps", lambda *_: True)
    backend = ddp.DDP(BackendConfig(device="cpu"))
    build = partial(build_engine, parallel, OptimConfig(), backend, Line(), None, accumulation=1)
    assert type(build()) is Captured
    numbers = OptimizerSpec(lambda cfg, groups, _: build_adamw(cfg, groups, {"fused": True}))
    monkeypatch.setitem(OPTIMIZERS, "adamw", numbers)
    rejects(
        "optim.name=adamw: its learning rate is a Python number, which a CUDA graph would not update",
        build,
    )


def test_ranks_that_hold_shards_reject_graphs_that_must_be(monkeypatch):
    monkeypatch.setattr(ddp, "captures_steps", lambda *_: True)
    backend = ddp.DDP(BackendConfig(device="cpu"))
    backend.world.size = 2
    backend.must_capture = True
    build = partial(build_engine, FSDPConfig(), OptimConfig(), backend, Line(), None)
    rejects("true does not work with parallel=fsdp on several ranks", build, accumulation=1)


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("neuron", True), ("xla", True)])
def test_only_cuda_is_sent_a_count_without_a_wait(device, waits):
    """CUDA alone takes the bytes before the call returns, after which the host's tensor is freed."""
    calls = []
    value = SimpleNamespace(to=lambda device, **how: calls.append(how))
    sent(value, SimpleNamespace(type=device))
    assert calls == [{"non_blocking": not waits}]
