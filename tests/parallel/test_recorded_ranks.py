"""Several ranks whose steps are recorded train as ranks whose gradients torch's DDP reduces: `recorded_ranks`."""

import json
import os
from itertools import count

import pytest
from run_results import assert_same_weights, grad_norms, losses, weights
from running import ROOT, run, train_overrides

TESTS = ROOT / "tests"
# Four steps run before the first replay: in the first one, gradients have no fixed addresses.
STEPS = 8
# DDP divides each gradient by the number of ranks, and then the sum by the mean count: float32 rounds both.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A function that trains on ranks in some ways, and returns the run folder and each rank's report."""
    folder, numbers, done = tmp_path_factory.mktemp("ranks"), count(), {}

    def train(ways, *settings, ranks=2, code=0):
        key = (ways, settings, ranks)
        if key not in done:
            run_dir = folder / str(next(numbers))
            report = folder / f"{run_dir.name}_report"
            report.mkdir()
            env = {"WAYS": ways, "REPORT": str(report)}
            env["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
            common = [f"max_steps={STEPS}", "model.hidden_dropout=0.1", "export=false"]
            arguments = train_overrides(run_dir, prepared, *common, *settings)
            result = run(arguments, ranks=ranks, module=str(TESTS / "recorded_ranks.py"), env=env)
            assert result.returncode == code, result.stderr[-3000:]
            reports = [json.loads(path.read_text()) for path in sorted(report.iterdir())]
            done[key] = run_dir, reports, result.stderr
        return done[key]

    return train


def log(run_dir, rank):
    return (run_dir / "log" / f"rank_{rank:04d}.txt").read_text()


def assert_trains_as_ddp(run_dir, plain):
    assert losses(run_dir) == pytest.approx(losses(plain), rel=TOLERANCE)
    assert grad_norms(run_dir) == pytest.approx(grad_norms(plain), rel=10 * TOLERANCE)
    assert len(set(losses(plain))) == STEPS


@pytest.mark.parametrize(
    ("ways", "micro", "ranks"),
    [
        ("", 4, 2),
        pytest.param("", 2, 2, marks=pytest.mark.slow),
        pytest.param("", 1, 4, marks=pytest.mark.slow),
        ("unused", 4, 2),
        pytest.param("unlabelled", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_recorded_ranks_train_as_with_ddp(trained, ways, micro, ranks):
    settings = [f"micro_batch_size={micro}"]
    plain, *_ = trained(f"{ways} plain", *settings, ranks=ranks)
    run_dir, reports, _ = trained(ways, *settings, ranks=ranks)
    assert_trains_as_ddp(run_dir, plain)
    parts = reports[0]["parts"]
    last = "_last_micro_batch"
    assert parts.keys() == {last, "_update"} | ({"_micro_batch"} if micro * ranks < 8 else set())
    # a graph, what it sends, the next graph, ...
    (length,) = parts[last]
    assert length >= 5 and length % 2 == 1
    assert parts["_update"] == [1] and parts.get("_micro_batch", [1]) == [1]
    assert len(reports) == ranks and all(report == reports[0] for report in reports)
    for rank in range(ranks):
        assert "replays equal plain steps" in log(run_dir, rank)
    for name, weight in weights(run_dir, step=STEPS).items():
        assert not name.endswith("unused") or weight.tolist() == [1.0] * 3  # not even decayed


@pytest.mark.slow
def test_nothing_is_recorded_before_gradients_have_their_addresses(trained):
    """The first step has as many micro batches as run before a recording."""
    settings = ["micro_batch_size=1", "global_batch_size=12"]
    plain, *_ = trained("plain", *settings)
    run_dir, reports, _ = trained("", *settings)
    assert_trains_as_ddp(run_dir, plain)
    assert reports[0]["parts"]["_micro_batch"] == [1]


@pytest.mark.slow
def test_recorded_ranks_send_gradients_in_bf16_as_ddp_does(trained):
    settings = ["micro_batch_size=4", "backend.grad_compression=bf16"]
    plain, *_ = trained("plain", *settings)
    run_dir, *_ = trained("", *settings)
    exact, *_ = trained("", "micro_batch_size=4")
    assert_trains_as_ddp(run_dir, plain)
    assert grad_norms(run_dir) != pytest.approx(grad_norms(exact), rel=1e-5)


@pytest.mark.parametrize("micro", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_replays_wrongly_continues_plain_beside_one_that_replays(trained, micro):
    settings = [f"micro_batch_size={micro}"]
    run_dir, reports, _ = trained("lying", *settings)
    wanted, *_ = trained("", *settings)
    assert_same_weights(run_dir, wanted, step=STEPS)
    assert losses(run_dir) == losses(wanted)
    assert "runs without a CUDA graph: its replay differs from a plain step" in log(run_dir, 1)
    assert "runs without" not in log(run_dir, 0)
    assert reports[0]["reduced"] == reports[1]["reduced"]


@pytest.mark.slow
def test_a_rank_without_memory_that_has_sent_nothing_begins_its_step_again(trained):
    settings = ["micro_batch_size=2"]
    run_dir, reports, _ = trained("full", *settings)
    wanted, *_ = trained("", *settings)
    assert_same_weights(run_dir, wanted, step=STEPS)
    assert "the device ran out of memory" in log(run_dir, 1)
    assert reports[0]["reduced"] == reports[1]["reduced"]


@pytest.mark.slow
def test_a_rank_without_memory_that_has_sent_gradients_ends_the_run(trained):
    """To begin the step again, it would send them twice."""
    run_dir, *_ = trained("late", "micro_batch_size=4", code=1)
    assert "micro_batch_size (the global batch stays the same)" in log(run_dir, 1)
    assert "steps run without CUDA graphs" not in log(run_dir, 1)


@pytest.mark.slow
def test_a_rank_that_must_record_and_cannot_ends_the_run_on_all_ranks(trained):
    *_, stderr = trained("unable", "micro_batch_size=4", code=1)
    line = "error: backend.cuda_graphs=true, but the update cannot run as a CUDA graph"
    assert stderr.count(line) == 1 and "exitcode  : 2" in stderr
